"""Synchronization models in virtual time: the objects that the server drives, with any learners."""
