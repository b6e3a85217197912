"""Reinforcement learning of an MoE model: log-probabilities, objectives, and replay of routing."""

from moecore.rl.choices import Choices, choices_from_tensors, choices_to_tensors
from moecore.rl.engine import Engine, ObjectiveResult, TokenScores
from moecore.rl.objectives import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    Objective,
    OwnObjective,
    estimate_kl,
)
from moecore.rl.replay import RouterReplay
from moecore.rl.rollouts import Rollouts, group_advantages

__all__ = [
    "DPO",
    "GRPO",
    "GSPO",
    "PPO",
    "Choices",
    "Engine",
    "Objective",
    "ObjectiveResult",
    "OwnObjective",
    "Rollouts",
    "RouterReplay",
    "TokenScores",
    "choices_from_tensors",
    "choices_to_tensors",
    "estimate_kl",
    "group_advantages",
]  # fmt: skip
