"""One agent process for each machine: rounds of its group, and the transport between machines."""
