"""Simulates synchronization models, the same objects that the server drives, in virtual time."""
