"""What the papers report, done again here: `make reproduce`."""
