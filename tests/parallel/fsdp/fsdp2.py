"""FSDP2 as the oracle of `shard/`: the same plan, applied with torch's `fully_shard`."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard

from moecore import parallelize
from moecore.base.torch_private import is_gloo
from moecore.moe.param_reader import ParamReader
from moecore.parallel.fsdp.plan import ShardPlan, UnitPlan
from moecore.parallel.mesh import Meshes

# From 2.15 on FSDP2 reduces a gradient that autograd has in fp32 as it is. Earlier ones, and units,
# reduce it in the parameter's dtype.
if hasattr(FSDPParam, "unsharded_grad_dtype"):
    FSDPParam.unsharded_grad_dtype = property(lambda self: self.param_dtype or self.orig_dtype)

INNER_FIRST = ("routers", "experts", "block", "head", "root")  # an outer unit takes what is left


def parallelize_with_fsdp2(model: nn.Module, meshes: Meshes, **options: Any) -> nn.Module:
    """Return the model of `parallelize_moe`, sharded by FSDP2.

    Not for evaluations and partial forwards between steps: FSDP2 keeps what it has gathered then.
    """
    with patch.object(parallelize, "shard_model", shard_with_fsdp2):
        return parallelize.parallelize_moe(model, meshes, **options)


def shard_with_fsdp2(model: nn.Module, plan: ShardPlan, meshes: Meshes) -> None:
    """Apply a plan in place."""
    units = {unit.name: [model.get_submodule(name) for name in unit.modules] for unit in plan.units}
    params = dict(model.named_parameters())
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    dims = {params[slot.param]: slot.dim for layout in layouts for slot in layout.slots}
    for unit in sorted(plan.units, key=lambda unit: INNER_FIRST.index(unit.role)):
        fully_shard(
            units[unit.name],
            mesh=_mesh(unit, meshes),
            mp_policy=_policy(unit),
            reshard_after_forward=not unit.is_resident,
            shard_placement_fn=lambda param: Shard(dims[param]),
        )
    for unit in plan.units:
        first: Any = units[unit.name][0]
        if unit.role == "experts":
            first.reader = ParamReader(caches_copies=unit.is_resident)
        mesh = _mesh(unit, meshes)
        group = mesh.get_group(mesh.ndim - 1)
        first.set_gradient_divide_factor(unit.divisor)
        # gloo has no scaled sum; a group of one rank would divide twice.
        is_summed = is_gloo(group, mesh.device_type) and group.size() > 1
        first.set_force_sum_reduction_for_comms(is_summed)
        if unit.forward_prefetch:
            first.set_modules_to_forward_prefetch([units[n][0] for n in unit.forward_prefetch])
        if unit.backward_prefetch:
            first.set_modules_to_backward_prefetch([units[n][0] for n in unit.backward_prefetch])


def _policy(unit: UnitPlan) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if unit.gather_dtype is None else getattr(torch, unit.gather_dtype),
        reduce_dtype=getattr(torch, unit.layouts[0].reduces),
        cast_forward_inputs=unit.casts_inputs,
    )


def _mesh(unit: UnitPlan, meshes: Meshes) -> DeviceMesh:
    return meshes.expert_fsdp if unit.mesh == "expert" else meshes.dense_fsdp
