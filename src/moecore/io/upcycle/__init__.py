"""Upcycling: convert a dense model to an MoE model with the same output at step 0."""
