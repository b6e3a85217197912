"""Distributed checkpoints: save, load on any parallel layout, find the newest."""
