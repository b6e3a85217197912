"""Compile regions, and CUDA graphs."""

from __future__ import annotations

from moecore.graphs.forward_backward import GraphedForwardBackward
from moecore.graphs.regions import compile_blocks

__all__ = ["GraphedForwardBackward", "compile_blocks"]
