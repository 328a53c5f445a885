"""The house of kvmem's device kernels.

It imports jax and numpy and nothing of kvmem: plans reach it as integer arrays.
`dispatch` says which implementation of each operation runs, and why.
"""
