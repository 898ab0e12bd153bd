"""`make reproduce`: repeats what the papers report."""
