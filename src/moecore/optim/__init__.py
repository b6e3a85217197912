"""Optimizers: AdamW in one launch or in part on the host, Muon for matrices, state off the GPU."""

from moecore.optim.adamw import AdamW
from moecore.optim.host_step import HostAdamW
from moecore.optim.matrices import Cut, MatrixAssignment, assign_matrices
from moecore.optim.muon import Muon
from moecore.optim.qk_clip import QKClip
from moecore.optim.state_offload import StateOffload

__all__ = [
    "AdamW",
    "Cut",
    "HostAdamW",
    "MatrixAssignment",
    "Muon",
    "QKClip",
    "StateOffload",
    "assign_matrices",
]
