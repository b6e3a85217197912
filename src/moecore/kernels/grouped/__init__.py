"""Grouped matrix products: Triton and Gluon kernels, their launchers, tile maps."""
