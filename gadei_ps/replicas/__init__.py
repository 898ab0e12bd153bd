"""Replicas of a run on several hosts: Ray places them, and torch.distributed moves their models.

A replica is a process in a session of its own, with a job and its learners (`replica.py`). Beside
it, an actor of Ray starts it, and forwards its reports to the run's coordinator (`actor.py`).
"""
