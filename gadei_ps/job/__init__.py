"""Definition of a job, and communication with it."""
