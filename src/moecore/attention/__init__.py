"""Attention of a model: where its tokens stand, and one function of heads and that."""
