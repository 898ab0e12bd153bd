"""A CUDA device, by CuPy."""

from gadei_ps.learners.cuda.link import Cuda

__all__ = ["Cuda"]
