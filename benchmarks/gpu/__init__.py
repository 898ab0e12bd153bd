"""Benchmarks of learners on a GPU, beside the limit or the peer measured in the same run."""
