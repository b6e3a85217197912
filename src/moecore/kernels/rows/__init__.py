"""Rows of tokens: gather, sum, index, activation, packed FP8."""
