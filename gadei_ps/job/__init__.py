"""What a job is, and how one talks to it."""
