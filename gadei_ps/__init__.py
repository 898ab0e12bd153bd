"""gadei-ps: a parameter server for one machine.

A daemon owns the weights of a model in shared memory; learner processes push gradients into
lock-free queues and pull weights, and may be killed at any instant.
"""

__version__ = "0.2.0"
