"""gadei-ps: a parameter server for one machine.

A daemon owns the weights of a model in shared memory; learner processes push gradients into
lock-free queues and pull weights, and may be killed at any instant.

The top-level folders learners/, watchdog/ and benchmarks/ are imported as gadei_ps.learners,
gadei_ps.watchdog and gadei_ps.benchmarks.
"""

__version__ = "0.2.0"
