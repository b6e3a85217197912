"""moecore: PyTorch-native Mixture-of-Experts training. docs/api.md lists every public name.

Names and rooms are imported on first use, so that a command's help waits for nothing.
"""

from moecore.base import __version__ as __version__
from moecore.base.first_use import first_use

_NAMES = {
    "base.options.context": "ContextOptions",
    "base.options.dispatch": "CloneOptions DispatcherName NVLinkOptions",
    "base.options.fsdp": "FSDPOptions",
    "base.options.indexer": "IndexerConfig",
    "base.options.layer": "BalanceConfig CapacityConfig MoEConfig",
    "base.options.memory": "MemoryOptions StashOptions",
    "moe.backends": "ExpertBackend",
    "moe.dispatch.exchange": "ExchangeError",
    "moe.expert_layout": "ExpertLayout",
    "moe.layer": "LayerLayout MoELayer",
    "moe.metrics": "MoEMetrics",
    "moe.order": "place_experts reorder_experts",
    "moe.records": "Dispatcher ExpertInput Routing",
    "parallel.model.family": "ContextParallelModel DynamicContextModel TensorParallelModel",
    "parallel.mesh": "Meshes ParallelConfig build_meshes",
    "parallel.pipeline.config": "PipelineConfig",
    "parallel.pipeline.transport": "PipelineError",
    "parallel.model.request": "LossConvention",
    "parallel.model.clip": "GradientNorm clip_grad_norm_",
    "parallel.fsdp.plan": "ShardPlan",
    "parallelize": "parallelize_moe plan_sharding",
    "planning.explain": "explain",
    "train.loss_scale": "DynamicLossScale",
    "train.step": "TrainStep",
    "train.step_result": "StepResult",
}
__all__ = [name for names in _NAMES.values() for name in names.split()]
__getattr__ = first_use(__name__, _NAMES)
