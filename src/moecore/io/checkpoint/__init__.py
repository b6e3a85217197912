"""Distributed checkpoints: save, load on any layout, find the newest."""
