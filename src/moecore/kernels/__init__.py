"""Fused Triton kernels, an op per file with its reference beside it; imports torch and triton only.

A file's public function runs the kernel on CUDA tensors and the reference elsewhere. With
`TRITON_INTERPRET=1` the kernels run on CPU tensors too, for tests.
"""
