"""Parallelism: device meshes, checks and plans of `parallelize_moe`, FSDP, and pipeline stages.

layout string -> PipelineLayout     (name, pp, chunks, micro-batches) -> Schedule -> Timeline
"""

from moecore.parallel.model.module_protocols import init_modules, register_forward_method
from moecore.parallel.pipeline.layout import LayoutCosts, balanced_layout, parse_layout
from moecore.parallel.pipeline.offload import offload_fractions
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.pipeline.timeline import Costs, Timeline, draw, simulate

__all__ = [
    "Costs", "LayoutCosts",
    "Schedule",
    "Timeline", "balanced_layout", "draw", "init_modules",
    "make_schedule", "offload_fractions", "parse_layout", "register_forward_method",
    "simulate",
]  # fmt: skip
