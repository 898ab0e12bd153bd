"""Worker groups as pure classes: what is exchanged, by which rule, among which replicas.

This package takes and gives numbers and arrays. It knows nothing of sockets, processes or clocks,
so the simulator and the replicas drive the same objects. After Yan and Shao, *Asynchronous
Distributed Data Parallelism for Machine Learning*, section 3.
"""
