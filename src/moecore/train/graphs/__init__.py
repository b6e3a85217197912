"""Compile regions, and CUDA graphs."""
