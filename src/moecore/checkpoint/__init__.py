"""Distributed checkpoints: save, load on any layout, and find the newest whole one."""

from moecore.checkpoint.directory import latest
from moecore.checkpoint.store import load, save

__all__ = ["latest", "load", "save"]
