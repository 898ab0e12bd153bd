"""This machine: processes, cores, devices."""
