"""One agent process for each machine: the transport between machines."""
