"""Files that systemd reads, as a package ships them; `gadei-ps install-unit` writes copies."""
