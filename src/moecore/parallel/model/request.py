"""`Request`: the arguments of `parallelize_moe` as a record, which ranks compare.

Ranks first compare versions, arguments and the full model over the world. After each rank has
removed the pipeline stages of other ranks, the ranks of one stage compare their plans and weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moecore.base import __version__
from moecore.base.attributes import list_attribute_entries
from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import GRAPH_SCOPES, DenseOptions, GraphScope
from moecore.base.options.dispatch import DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.indexer import IndexerConfig
from moecore.base.options.layer import MoEConfig, MoEOverrides
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, Recipe, Role
from moecore.base.params import clean_name
from moecore.base.rank_checks import check_equal, check_equal_weights, list_field_entries
from moecore.base.torch_private import is_gloo
from moecore.kernels.experts.contract import ExpertSpec
from moecore.kernels.experts.fp8_products import find_fp8_speed_problem
from moecore.moe.backends import ExpertBackend
from moecore.moe.experts import Experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.shared_experts import SharedExpert
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.parallel.mesh import Meshes
from moecore.parallel.model.family import Family
from moecore.parallel.pipeline.schedule import PipelineConfig

LossConvention = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of `parallelize_moe`; options that were None are default records."""

    family: Family
    meshes: Meshes
    dispatch: DispatchOptions
    expert_backend: ExpertBackend
    memory: MemoryOptions
    dense: DenseOptions
    moe: MoEOverrides
    context: ContextOptions | None
    indexer: IndexerConfig | None
    precision: Precision | None
    fsdp: FSDPOptions
    loss: LossConvention
    pipeline: PipelineConfig | None

    def find_recipe(self, layer_name: str, layer: RoutedLayer, role: Role) -> Recipe | None:
        """Return the FP8 recipe for a layer's "experts" or "shared_experts"; None = no FP8."""
        if role == "experts" and self.find_fp8_problem(layer_name, layer) is not None:
            return None
        return self._select_recipe(layer_name, layer, role)

    def find_recipes(self, layer_name: str, layer: RoutedLayer) -> dict[Role, Recipe | None]:
        """Return `find_recipe` of "experts", and of "shared_experts" if they are moecore's."""
        is_native = isinstance(layer.get_part("shared"), SharedExpert)
        roles: tuple[Role, ...] = ("experts", "shared_experts") if is_native else ("experts",)
        return {role: self.find_recipe(layer_name, layer, role) for role in roles}

    def find_fp8_problem(self, layer_name: str, layer: RoutedLayer) -> str | None:
        """Return why `Precision.only_faster` disables FP8 for a layer's experts, or None."""
        recipe = self._select_recipe(layer_name, layer, "experts")
        if recipe is None or self.precision is None or not self.precision.only_faster:
            return None
        return find_fp8_speed_problem(self.make_expert_spec(layer, recipe))

    def _select_recipe(self, layer_name: str, layer: RoutedLayer, role: Role) -> Recipe | None:
        if self.precision is None:
            return None
        part = layer.get_part_name("experts" if role == "experts" else "shared")
        return self.precision.find_recipe(clean_name(f"{layer_name}.{part}".strip(".")), role)

    @property
    def is_dynamic(self) -> bool:
        """Whether context parallelism is dynamic: the cp degree is an argument of each forward."""
        return self.context is not None and self.context.dynamic

    @property
    def graph_scopes(self) -> tuple[GraphScope, ...]:
        """The parts of blocks that run as CUDA graphs: `DenseOptions.graph_scopes`."""
        dense, p = self.dense, self.meshes.parallel
        return dense.graph_scopes or (GRAPH_SCOPES[p.tp * p.cp > 1 :] if dense.graph else ())

    def find_capture_problem(self) -> str | None:
        """Return why CUDA graphs cannot contain the collectives of attention, or None."""
        group, device_type = self.meshes.micro_batch_group, self.meshes.device_type
        if group is None or device_type == "cpu":
            return None
        if is_gloo(group, device_type):
            return "NCCL for tp and cp, because graphs cannot contain collectives of gloo"
        names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
        is_expandable = any("expandable_segments:True" in os.getenv(name, "") for name in names)
        if is_expandable and os.getenv("NCCL_GRAPH_REGISTER") != "0":  # pytorch issue 158029
            return (
                "NCCL_GRAPH_REGISTER=0, because NCCL cannot register memory of "
                "expandable_segments:True for graphs over tp or cp: set it"
            )
        return None

    def context_options(self, model: Any) -> dict[int, ContextOptions]:
        """Return {cp: options with a chosen communication method} for each cp > 1 of a forward."""
        p, options, sizes = self.meshes.parallel, self.context or ContextOptions(), []
        if self.is_dynamic:
            ranks = self.meshes.data_ranks
            sizes = [2**n for n in range(1, ranks.bit_length()) if ranks % 2**n == 0]
        elif p.cp > 1:
            sizes = [p.cp]
        owner = self.family.make_context_parallel_model(model)
        return {cp: owner.context_options(options, cp, p.tp) for cp in sizes}

    def make_layer_config(self, layer: RoutedLayer) -> MoEConfig:
        """Return a layer's config with the fields that the argument `moe` overrides."""
        config, moe = layer.config, self.moe
        if config.assignment == "hash":  # a selection by a hash of token ids cannot be balanced
            moe = {**moe, "balance": config.balance}
        return replace(config, **moe)

    def make_expert_spec(self, layer: RoutedLayer, recipe: Recipe | None) -> ExpertSpec:
        """Return the local shapes, dtypes and recipe (None = no FP8) of a layer's experts."""
        experts: Experts = layer.get_part("experts")
        return experts.make_spec(
            dim=layer.config.expert_dim,
            hidden_dim=layer.config.hidden_dim // self.meshes.parallel.etp,
            dtypes=frozenset([self.fsdp.param_dtype or next(experts.parameters()).dtype]),
            device=self.meshes.device,
            recipe=recipe,
        )

    def list_compared_arguments(self) -> dict[str, Any]:
        """Return {name: value} of the arguments, without degrees, that ranks must pass equally."""
        records = ("family", "meshes", "moe", "dispatch", "dense", "fsdp", "memory")
        entries = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in records}
        entries |= {f"MoEConfig.{name}": value for name, value in self.moe.items()}
        nvlink = self.dispatch.nvlink or NVLinkOptions()
        for record in (replace(self.dispatch, nvlink=None), nvlink, self.dense):
            entries |= list_field_entries(record)
        # Other dispatchers allow hosts with different numbers of ranks.
        is_read = self.dispatch.name in ("hierarchical", "nccl_ep")
        entries["ranks_per_domain"] = self.meshes.ranks_per_domain if is_read else None
        entries["graphs over tp and cp"] = self.find_capture_problem()  # of the environment
        return entries | list_field_entries(self.fsdp) | list_field_entries(self.memory)


def compare_models(model: nn.Module, layers: Mapping[str, RoutedLayer], request: Request) -> None:
    """Raise a ValueError on every rank if versions, arguments or full models differ. Collective."""
    params = dict(model.named_parameters())
    tensors = params | dict(model.named_buffers())
    model_entries = {
        "names of parameters and buffers": list(tensors),
        "names of MoE layers": list(layers),
        "shape": {n: tuple(t.shape) for n, t in tensors.items()},
        "dtype": {n: t.dtype for n, t in tensors.items()},
        "is_meta": {n: t.is_meta for n, t in tensors.items()},
        "is a DTensor": {n: isinstance(t, DTensor) for n, t in tensors.items()},
        "requires_grad": {n: p.requires_grad for n, p in params.items()},
        "value": list_attribute_entries(model.named_modules()),
    }
    versions = {"torch.__version__": str(torch.__version__), "moecore.__version__": __version__}
    entries = versions | request.list_compared_arguments() | model_entries
    check_equal(entries, request.meshes.device_type)


def compare_stages(model: nn.Module, plan: ShardPlan, request: Request) -> None:
    """Raise a ValueError on all ranks of a pipeline stage if their plans or weights differ."""
    device_type = request.meshes.device_type
    # Other parts of a plan follow from arguments and model. Recipes also depend on the GPU
    # ("auto"), and placements on the model's own tensor parallelism.
    decided = ((layer.name, *role) for layer in plan.layers for role in layer.recipes)
    of_stages = {
        "recipes": {f"{role} of {name}": recipe for name, role, recipe in decided},
        "placement": {param.name: param.placements for param in plan.params},
    }
    group = request.meshes.stage_group
    check_equal(of_stages, device_type, group=group)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    check_equal_weights(tensors, device_type, group=group)


def is_tp_sharded(model: nn.Module) -> bool:
    """Whether a model has parameters that are already sharded over tp."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
