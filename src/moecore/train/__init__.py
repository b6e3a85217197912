"""Training steps, optimizers, activation memory, CUDA graphs and compiled regions."""

from moecore.train.expert_moves import move_experts
from moecore.train.graphs.forward_backward import GraphedForwardBackward
from moecore.train.memory.param_offload import materialize
from moecore.train.memory.training_offload import TrainingOffload
from moecore.train.optim.adamw import AdamW
from moecore.train.optim.host_step import HostAdamW
from moecore.train.optim.matrices import MatrixCut, assign_matrices
from moecore.train.optim.muon import Muon
from moecore.train.optim.qk_clip import QKClip
from moecore.train.optim.state_offload import StateOffload
from moecore.train.optim.width import width_rates

__all__ = [
    "AdamW",
    "GraphedForwardBackward",
    "HostAdamW",
    "MatrixCut",
    "Muon",
    "QKClip",
    "StateOffload",
    "TrainingOffload",
    "assign_matrices",
    "materialize",
    "move_experts",
    "width_rates",
]  # fmt: skip
