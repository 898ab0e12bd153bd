"""Learners: processes that compute gradients and push them to a running job."""
