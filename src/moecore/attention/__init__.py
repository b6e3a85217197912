"""Attention over query, key and value heads of a `Sequence`, which has positions and documents."""
