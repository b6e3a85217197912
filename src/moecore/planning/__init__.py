"""Memory and time of a training run, planned on a CPU from moecore's own code."""

from __future__ import annotations

from moecore.planning.commands import draw_memory
from moecore.planning.costs import CostTable
from moecore.planning.dry_run import DryRun, dry_run
from moecore.planning.gpus import Gpu
from moecore.planning.layouts import Folding, SearchRequest
from moecore.planning.memory import MemoryPlan, RankMemory, plan_memory, plan_peak
from moecore.planning.option_sets import Change, next_change
from moecore.planning.recipe import call_of
from moecore.planning.record import Queued, Work
from moecore.planning.report import Lever, Report, report_trace
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world
from moecore.planning.search import Candidate, Fitting, SearchResult, explain_folding, search
from moecore.planning.times import StepTime, TimePlan, plan_time, time_step
from moecore.planning.transformers import TransformersModel

__all__ = [
    "Candidate",
    "Change",
    "CostTable",
    "DryRun",
    "Fitting",
    "Folding",
    "Gpu",
    "Lever",
    "MemoryPlan",
    "OptimizerOptions",
    "Queued",
    "RankMemory",
    "Report",
    "SearchRequest",
    "SearchResult",
    "StepTime",
    "TimePlan",
    "TrainingRun",
    "TransformersModel",
    "Work",
    "call_of",
    "draw_memory",
    "dry_run",
    "explain_folding",
    "fake_world",
    "next_change",
    "plan_memory",
    "plan_peak",
    "plan_time",
    "report_trace",
    "search",
    "time_step",
]
