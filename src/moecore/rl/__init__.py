"""What reinforcement learning needs from an MoE model: the choices of another run, replayed."""

from moecore.rl.choices import Choices, choices_from_tensors, choices_to_tensors
from moecore.rl.replay import RouterReplay

__all__ = ["Choices", "RouterReplay", "choices_from_tensors", "choices_to_tensors"]
