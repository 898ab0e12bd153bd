"""PyTorch: a drop-in optimizer whose step() pushes, and whose model reads the shared weights."""

from gadei_ps.learners.torch.gpu import embedding
from gadei_ps.learners.torch.optimizer import Optimizer, linear

__all__ = ["Optimizer", "embedding", "linear"]
