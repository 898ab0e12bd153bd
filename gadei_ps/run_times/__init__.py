"""Learners' run times: recorded, learned, predicted."""
