"""Attention over cp ranks, which each store some tokens of every document."""
