"""Memory and time of a training run, planned on a CPU from moecore's own code."""

from moecore.planning.costs import CostTable
from moecore.planning.dry_run import dry_run
from moecore.planning.gpus import Gpu
from moecore.planning.layouts import SearchRequest
from moecore.planning.memory import plan_memory, plan_peak_memory
from moecore.planning.option_sets import next_change
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world
from moecore.planning.search import search
from moecore.planning.times import plan_time, time_step
from moecore.planning.transformers import TransformersModel

__all__ = [
    "CostTable",
    "Gpu",
    "OptimizerOptions",
    "SearchRequest",
    "TrainingRun",
    "TransformersModel",
    "dry_run",
    "fake_world",
    "next_change",
    "plan_memory",
    "plan_peak_memory",
    "plan_time",
    "search",
    "time_step",
]
