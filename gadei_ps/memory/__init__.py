"""Shared memory: its layout and its segments."""
