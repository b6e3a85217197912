"""Compiled regions of blocks, and CUDA graphs of parts or of a step's forward and backward."""
