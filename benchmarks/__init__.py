"""The benchmark suite: this project beside its peers, `gadei-ps bench NAME` and `make bench`."""
