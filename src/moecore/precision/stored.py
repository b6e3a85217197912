"""Frozen routed experts that are stored in FP8 alone: the base of adapters in a byte per parameter.

    matrices of a rank -> FP8 in blocks of 128 x 128 -> values are freed, one parameter at a time

A parameter that is stored so has shape and dtype, and one NaN as memory: products read its blocks,
as those of a parameter that was gathered in FP8 (`parallel/shard/formats.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import as_part
from moecore.base.fields import check_arguments
from moecore.base.options.precision import Recipe
from moecore.base.torch_names import local_of, parameter_like
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import PartOfMatrix, block_amax_, quantise_blocks_
from moecore.moe.experts import Experts
from moecore.moe.params import GATHERED, clean_name, gathered_blocks

RANKS_OF_EXPERTS = {"ep", "etp"}  # mesh dims whose ranks hold different parts


def store_experts_in_fp8(model: nn.Module) -> None:
    """Store the frozen matrices of routed experts in FP8 alone, in place. No communication.

    A byte per parameter stays of two or four; at most one parameter is there twice meanwhile. The
    blocks are those that products make of the weights in each forward, so outputs keep their bits,
    and quantising them costs nothing any more; backward transposes bytes. Call it when the weights
    are loaded. What reads values (`save`, `export_hf`, `merge_adapters`) raises from then on;
    `save_adapters` writes the adapters.

    Args:
        model: parallelized, with storage, whose experts are computed with a "blockwise" recipe.

    Raises:
        ValueError: for experts that are trained, have no such recipe, keep gate and up apart, or
            are shared by several ranks; for a model without routed experts.
    """
    check_arguments(store_experts_in_fp8, locals())
    found = list(_matrices(model))
    if not found:
        raise ValueError(
            f"model ({type(model).__name__}) must have routed experts to be stored in FP8: drop "
            "the call"
        )
    for matrix in found:
        _check(matrix)
    for matrix in found:
        if gathered_blocks(matrix.param) is None:
            before = local_of(matrix.param).untyped_storage()
            matrix.owner._parameters[matrix.attribute] = _stored(matrix.param, matrix.recipe)
            before.resize_(0)  # units have the parameter until their next forward
            matrix.owner.reader.drop_copies()


def refuse_stored(model: nn.Module, verb: str) -> None:
    """Raise ValueError for a model with parameters that have no values to be `verb`."""
    for name, param in model.named_parameters():
        if gathered_blocks(param) is not None:
            raise ValueError(
                f"{clean_name(name)} (FP8 alone) must have values to be {verb}: save_adapters, and "
                "load them beside the base without store_experts_in_fp8"
            )


class _Matrix(NamedTuple):
    """A matrix of all experts of a layer."""

    name: str
    owner: Experts
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        param: nn.Parameter = getattr(self.owner, self.attribute)
        return param

    @property
    def recipe(self) -> Recipe:
        assert self.owner.recipe is not None
        return self.owner.recipe


def _matrices(model: nn.Module) -> Iterator[_Matrix]:
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for attribute in (module.layout.w1, module.layout.w2):
                yield _Matrix(clean_name(f"{name}.{attribute}"), module, attribute)


def _check(matrix: _Matrix) -> None:
    name, experts, param = matrix.name, matrix.owner, matrix.param
    if experts.recipe is None or experts.recipe.scaling != "blockwise" or experts.is_separate:
        recipe = "none" if experts.recipe is None else repr(experts.recipe.scaling)
        raise ValueError(
            f"recipe of {name} ({recipe}) must be 'blockwise', with gate and up in one parameter, "
            "to be stored in FP8: pass precision='blockwise' to parallelize_moe"
        )
    if param.requires_grad:
        raise ValueError(
            f"{name} (trained) must be frozen to be stored in FP8: call requires_grad_(False)"
        )
    names = set(param.device_mesh.mesh_dim_names or ()) if isinstance(param, DTensor) else set()
    if names - RANKS_OF_EXPERTS:
        raise ValueError(
            f"{name} (cut over {sorted(names)}) must be of one rank alone to be stored in FP8: "
            "give ParallelConfig.ep x etp all ranks"
        )


@torch.no_grad()
def _stored(param: nn.Parameter, recipe: Recipe) -> nn.Parameter:
    """Return a parameter without values, whose blocks products read."""
    local = local_of(param).detach()
    place = PartOfMatrix.of(local.shape, 0, 0, local.shape[0])
    amax, scales = torch.zeros(2, *place.scales_shape, device=local.device)
    values = torch.empty(local.shape, dtype=torch.uint8, device=local.device)
    block_amax_(local, place, amax)
    quantise_blocks_(local, place, amax, scales, values, power_of_two=recipe.power_of_two)
    nothing: Tensor = torch.full((), torch.nan, dtype=local.dtype, device=local.device)
    nothing = nothing.expand(local.shape)
    if isinstance(param, DTensor):
        nothing = as_part(nothing, param.device_mesh, param.placements, of=param)
    stored = parameter_like(nothing, param)
    setattr(stored, GATHERED, Blocks(values.view(FP8), scales, "block"))
    return stored
