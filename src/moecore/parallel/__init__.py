"""Parallelism: device meshes, checks and plans of `parallelize_moe`, FSDP, and pipeline stages.

layout string -> PipelineLayout     (name, pp, chunks, micro-batches) -> Schedule -> Timeline
"""

from moecore.parallel.fsdp.plan import (
    AxisPlacement,
    FlatLayout,
    FlatSlot,
    LayerPlan,
    ParamPlan,
    ShardPlan,
    UnitPlan,
)
from moecore.parallel.fsdp.size import RankBytes, RoleBytes, rank_bytes
from moecore.parallel.model.module_protocols import init_modules, register_forward_method
from moecore.parallel.pipeline.layout import (
    LayoutCosts,
    PipelineLayout,
    Stage,
    balanced_layout,
    even_layout,
    parse_layout,
)
from moecore.parallel.pipeline.offload import offload_fractions
from moecore.parallel.pipeline.orders import Action, Overlap
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.pipeline.timeline import Costs, Timeline, draw, simulate

__all__ = [
    "Action", "AxisPlacement", "Costs", "FlatLayout", "FlatSlot", "LayerPlan", "LayoutCosts",
    "Overlap", "ParamPlan", "PipelineLayout", "RankBytes", "RoleBytes", "Schedule", "ShardPlan",
    "Stage", "Timeline", "UnitPlan", "balanced_layout", "draw", "even_layout", "init_modules",
    "make_schedule", "offload_fractions", "parse_layout", "rank_bytes", "register_forward_method",
    "simulate",
]  # fmt: skip
