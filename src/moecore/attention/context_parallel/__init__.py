"""Attention over ranks that hold parts of the same documents."""
