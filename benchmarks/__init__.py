"""The benchmark suite, `gadei-ps bench NAME` and `make bench`: compares gadei-ps with its peers."""
