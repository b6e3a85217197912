"""Compile regions."""

from __future__ import annotations

from moecore.graphs.regions import compile_blocks

__all__ = ["compile_blocks"]
