"""ShardPlan: who owns which part of a model, as plain data, before anything is sharded."""

from moecore.shard.plan import (
    AxisPlacement,
    FlatLayout,
    FlatSlot,
    LayerPlan,
    ParamPlan,
    ShardPlan,
    UnitPlan,
)
from moecore.shard.size import RankBytes, RoleBytes, rank_bytes

__all__ = [
    "AxisPlacement",
    "FlatLayout",
    "FlatSlot",
    "LayerPlan",
    "ParamPlan",
    "RankBytes",
    "RoleBytes",
    "ShardPlan",
    "UnitPlan",
    "rank_bytes",
]
