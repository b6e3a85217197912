"""Fused Triton kernels, an operation per file with its reference beside it.

An operation runs its kernel on CUDA tensors and its reference elsewhere. With `TRITON_INTERPRET=1`
kernels run on CPU tensors too, for tests. The grouped products are launchers without a reference to
fall back on: `choose_products` chooses between them and torch's.
"""
