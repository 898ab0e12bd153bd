"""Arithmetic of the server: optimizers, learning-rate schedules and conversions between types.

`optimizers` names what there is and imports no Numba; `reference` says in NumPy what each kernel
computes; `cpu` computes it fast. All take arrays and know nothing of shared memory.
"""
