"""What a run on a cluster would need, before anybody rents it."""

from __future__ import annotations

from moecore.planning.costs import CostTable
from moecore.planning.memory import MemoryPlan, RankMemory, plan_memory
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.planning.work import Work
from moecore.planning.world import fake_world

__all__ = [
    "CostTable",
    "MemoryPlan",
    "OptimizerOptions",
    "RankMemory",
    "TrainingRun",
    "Work",
    "fake_world",
    "plan_memory",
]
