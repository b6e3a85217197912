"""Bridges to training programs, each an optional dependency that its modules import."""
