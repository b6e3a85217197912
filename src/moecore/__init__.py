"""moecore: PyTorch-native Mixture-of-Experts training. docs/api.md lists every public name.

Public names and their packages are imported on first use, so that `moecore --help` starts fast.
"""

from typing import TYPE_CHECKING

from moecore.base import __version__ as __version__
from moecore.base.lazy_names import make_lazy_getattr

_NAMES = {
    "base.options.context": "ContextOptions",
    "base.options.dense": "DenseOptions",
    "base.options.dispatch": "CloneOptions DispatchOptions NVLinkOptions",
    "base.options.fsdp": "FSDPOptions",
    "base.options.indexer": "IndexerConfig",
    "base.options.layer": "BalanceConfig CapacityConfig MoEConfig MoEOverrides",
    "base.options.memory": "MemoryOptions StashOptions",
    "base.options.precision": "Precision Recipe register_precision",
    "moe.assignment": "register_assignment",
    "moe.backends": "register_expert_backend",
    "moe.dispatch.exchange": "ExchangeError",
    "moe.expert_layout": "ExpertLayout",
    "moe.layer": "LayerLayout MoELayer",
    "moe.expert_order": "place_experts reorder_experts",
    "moe.dispatch.register": "register_dispatcher",
    "moe.records": "Dispatcher ExpertInput Routing",
    "parallel.model.family": "ContextParallelModel DynamicContextModel TensorParallelModel",
    "parallel.mesh": "Meshes ParallelConfig build_meshes",
    "parallel.pipeline.schedule": "PipelineConfig",
    "parallel.pipeline.transport": "PipelineError",
    "parallel.model.clip": "clip_grad_norm_",
    "parallel.fsdp.plan": "ShardPlan",
    "parallelize": "parallelize_moe plan_sharding",
    "planning.explain": "explain",
    "train.loss_scale": "DynamicLossScale",
    "train.spikes": "SpikeOptions",
    "train.step": "TrainStep",
    "train.step_result": "StepResult",
}
if TYPE_CHECKING:
    from moecore.base.options.context import ContextOptions as ContextOptions
    from moecore.base.options.dense import DenseOptions as DenseOptions
    from moecore.base.options.dispatch import CloneOptions as CloneOptions
    from moecore.base.options.dispatch import DispatchOptions as DispatchOptions
    from moecore.base.options.dispatch import NVLinkOptions as NVLinkOptions
    from moecore.base.options.fsdp import FSDPOptions as FSDPOptions
    from moecore.base.options.indexer import IndexerConfig as IndexerConfig
    from moecore.base.options.layer import BalanceConfig as BalanceConfig
    from moecore.base.options.layer import CapacityConfig as CapacityConfig
    from moecore.base.options.layer import MoEConfig as MoEConfig
    from moecore.base.options.layer import MoEOverrides as MoEOverrides
    from moecore.base.options.memory import MemoryOptions as MemoryOptions
    from moecore.base.options.memory import StashOptions as StashOptions
    from moecore.base.options.precision import Precision as Precision
    from moecore.base.options.precision import Recipe as Recipe
    from moecore.base.options.precision import register_precision as register_precision
    from moecore.moe.assignment import register_assignment as register_assignment
    from moecore.moe.backends import register_expert_backend as register_expert_backend
    from moecore.moe.dispatch.exchange import ExchangeError as ExchangeError
    from moecore.moe.dispatch.register import register_dispatcher as register_dispatcher
    from moecore.moe.expert_layout import ExpertLayout as ExpertLayout
    from moecore.moe.expert_order import place_experts as place_experts
    from moecore.moe.expert_order import reorder_experts as reorder_experts
    from moecore.moe.layer import LayerLayout as LayerLayout
    from moecore.moe.layer import MoELayer as MoELayer
    from moecore.moe.records import Dispatcher as Dispatcher
    from moecore.moe.records import ExpertInput as ExpertInput
    from moecore.moe.records import Routing as Routing
    from moecore.parallel.fsdp.plan import ShardPlan as ShardPlan
    from moecore.parallel.mesh import Meshes as Meshes
    from moecore.parallel.mesh import ParallelConfig as ParallelConfig
    from moecore.parallel.mesh import build_meshes as build_meshes
    from moecore.parallel.model.clip import clip_grad_norm_ as clip_grad_norm_
    from moecore.parallel.model.family import ContextParallelModel as ContextParallelModel
    from moecore.parallel.model.family import DynamicContextModel as DynamicContextModel
    from moecore.parallel.model.family import TensorParallelModel as TensorParallelModel
    from moecore.parallel.pipeline.schedule import PipelineConfig as PipelineConfig
    from moecore.parallel.pipeline.transport import PipelineError as PipelineError
    from moecore.parallelize import parallelize_moe as parallelize_moe
    from moecore.parallelize import plan_sharding as plan_sharding
    from moecore.planning.explain import explain as explain
    from moecore.train.loss_scale import DynamicLossScale as DynamicLossScale
    from moecore.train.spikes import SpikeOptions as SpikeOptions
    from moecore.train.step import TrainStep as TrainStep
    from moecore.train.step_result import StepResult as StepResult
else:  # type checkers would take any name for granted
    __all__ = [name for names in _NAMES.values() for name in names.split()]
    __getattr__ = make_lazy_getattr(__name__, _NAMES)
