"""Jobs as monitors see them: read from shared memory, exported as metrics and as curves."""
