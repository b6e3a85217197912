"""moecore: PyTorch-native Mixture-of-Experts training. docs/api.md lists every public name.

Names and rooms are imported on first use, so that a command's help waits for nothing.
"""

from moecore.base import __version__ as __version__
from moecore.base.first_use import first_use

_HOMES = {
    "BalanceConfig": "base.options.layer",
    "CapacityConfig": "base.options.layer",
    "CloneOptions": "base.options.dispatch",
    "ContextOptions": "base.options.context",
    "ContextParallelModel": "parallel.family",
    "Dispatcher": "moe.records",
    "DispatcherName": "base.options.dispatch",
    "DynamicContextModel": "parallel.family",
    "DynamicLossScale": "train.loss_scale",
    "ExchangeError": "moe.dispatch.exchange",
    "ExpertBackend": "moe.backends",
    "ExpertInput": "moe.records",
    "ExpertLayout": "moe.expert_layout",
    "FSDPOptions": "base.options.fsdp",
    "GradientNorm": "parallel.shard.clip",
    "LayerLayout": "moe.layer",
    "LossConvention": "parallel.request",
    "MemoryOptions": "base.options.memory",
    "Meshes": "parallel.mesh",
    "MoEConfig": "base.options.layer",
    "MoELayer": "moe.layer",
    "MoEMetrics": "moe.metrics",
    "NVLinkOptions": "base.options.dispatch",
    "ParallelConfig": "parallel.mesh",
    "PipelineConfig": "parallel.pipeline.config",
    "PipelineError": "parallel.pipeline.transport",
    "Routing": "moe.records",
    "ShardPlan": "parallel.shard.plan",
    "StashOptions": "base.options.memory",
    "StepResult": "train.step_result",
    "TensorParallelModel": "parallel.family",
    "TrainStep": "train.step",
    "build_meshes": "parallel.mesh",
    "clip_grad_norm_": "parallel.shard.clip",
    "explain": "planning.explain",
    "parallelize_moe": "parallelize",
    "place_experts": "moe.order",
    "plan_sharding": "parallelize",
    "reorder_experts": "moe.order",
}
__all__ = list(_HOMES)
__getattr__ = first_use(__name__, _HOMES)
