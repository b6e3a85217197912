"""A dense model becomes an MoE model with the same output at step 0."""
