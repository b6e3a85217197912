"""Reinforcement learning of an MoE model: log-probabilities, objectives, and replay of routing."""

from moecore.rl.engine import Engine
from moecore.rl.objectives import DPO, GRPO, GSPO, KTO, PPO, OwnObjective
from moecore.rl.replay import RouterReplay
from moecore.rl.rollouts import Rollouts, group_advantages

__all__ = [
    "DPO", "GRPO", "GSPO", "KTO", "PPO", "Engine",
    "OwnObjective", "Rollouts", "RouterReplay", "group_advantages",
]  # fmt: skip
