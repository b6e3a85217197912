"""moecore: PyTorch-native Mixture-of-Experts training. docs/api.md lists every public name."""

from moecore.base import __version__ as __version__
from moecore.base.options.context import ContextOptions
from moecore.base.options.dispatch import CloneOptions, DispatcherName, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import BalanceConfig, CapacityConfig, MoEConfig
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.moe.backends import ExpertBackend
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer
from moecore.moe.metrics import MoEMetrics
from moecore.moe.order import place_experts, reorder_experts
from moecore.moe.records import Dispatcher, ExpertInput, Routing
from moecore.parallel.family import (
    ContextParallelModel,
    DynamicContextModel,
    TensorParallelModel,
)
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallel.pipeline.config import PipelineConfig
from moecore.parallel.pipeline.transport import PipelineError
from moecore.parallel.request import LossConvention
from moecore.parallel.shard.clip import GradientNorm, clip_grad_norm_
from moecore.parallel.shard.plan import ShardPlan
from moecore.parallelize import parallelize_moe, plan_sharding
from moecore.planning.explain import explain
from moecore.train.loss_scale import DynamicLossScale
from moecore.train.step import TrainStep
from moecore.train.step_result import StepResult

__all__ = [
    "BalanceConfig",
    "CapacityConfig",
    "CloneOptions",
    "ContextOptions",
    "ContextParallelModel",
    "Dispatcher",
    "DispatcherName",
    "DynamicContextModel",
    "DynamicLossScale",
    "ExchangeError",
    "ExpertBackend",
    "ExpertInput",
    "ExpertLayout",
    "FSDPOptions",
    "GradientNorm",
    "LayerLayout",
    "LossConvention",
    "MemoryOptions",
    "Meshes",
    "MoEConfig",
    "MoELayer",
    "MoEMetrics",
    "NVLinkOptions",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineError",
    "Routing",
    "ShardPlan",
    "StashOptions",
    "StepResult",
    "TensorParallelModel",
    "TrainStep",
    "build_meshes",
    "clip_grad_norm_",
    "explain",
    "parallelize_moe",
    "place_experts",
    "plan_sharding",
    "reorder_experts",
]
