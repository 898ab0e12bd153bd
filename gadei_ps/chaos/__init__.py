"""Faults on purpose, and the count of what they did."""
