"""Pipeline parallelism: which stage has which layers, and which rank runs what and when.

layout string -> PipelineLayout     (name, pp, chunks, micro-batches) -> Schedule -> Timeline
"""

from moecore.pipeline.layout import (
    LayoutCosts,
    PipelineLayout,
    Stage,
    balanced_layout,
    even_layout,
    parse_layout,
)
from moecore.pipeline.offload import offload_fractions
from moecore.pipeline.orders import Action, Overlap
from moecore.pipeline.schedule import Schedule, make_schedule
from moecore.pipeline.simulate import Costs, simulate
from moecore.pipeline.timeline import Timeline, draw

__all__ = [
    "Action",
    "Costs",
    "LayoutCosts",
    "Overlap",
    "PipelineLayout",
    "Schedule",
    "Stage",
    "Timeline",
    "balanced_layout",
    "draw",
    "even_layout",
    "make_schedule",
    "offload_fractions",
    "parse_layout",
    "simulate",
]
