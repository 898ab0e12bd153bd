"""Arithmetic of the server: optimizers, learning-rate schedules and conversions between types.

`optimizers` names what there is and imports no Numba; `cpu` computes it. Both take arrays and know
nothing of shared memory. `tests/support/kernel_reference.py` has the same plainly in NumPy.
"""
