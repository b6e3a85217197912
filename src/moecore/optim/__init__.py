"""Optimizers: AdamW in one launch, with moments of half the size if asked; Muon for matrices."""

from moecore.optim.adamw import AdamW
from moecore.optim.matrices import Cut, MatrixAssignment, assign_matrices
from moecore.optim.muon import Muon
from moecore.optim.qk_clip import QKClip

__all__ = ["AdamW", "Cut", "MatrixAssignment", "Muon", "QKClip", "assign_matrices"]
