"""Frozen routed experts that are stored in FP8 alone: the base of adapters in a byte per parameter.

A parameter that is stored so has shape and dtype, and one NaN as memory: products read its blocks,
as those of a parameter that was gathered in FP8 (`parallel/fsdp/formats.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import as_part
from moecore.base.fields import check_arguments
from moecore.base.params import GATHERED_BLOCKS, clean_name
from moecore.base.torch_private import local_of, parameter_like
from moecore.kernels.rows.e4m3 import BLOCK, FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import PartOfMatrix, block_amax_, quantise_blocks_
from moecore.moe.experts import Experts
from moecore.moe.param_reader import gathered_blocks

OF_EXPERTS = {"ep", "etp"}  # mesh dims whose ranks have different experts, or parts of them


def store_experts_in_fp8(model: nn.Module) -> None:
    """Store the frozen matrices of routed experts in FP8 alone, in place. No communication.

    A byte per parameter stays of two or four; one parameter at a time is there twice. The blocks
    are those that products make of the weights in each forward, so outputs keep their bits; only
    backward transposes bytes. Call it when the weights are loaded. What needs the
    values before rounding (`save`, `merge_adapters`) raises from then on; `save_adapters` works,
    and `export_hf` writes what products read.

    Args:
        model: parallelized, with storage, whose experts are computed with a "blockwise" recipe.

    Raises:
        ValueError: for experts that are trained, have no such recipe, keep gate and up apart, or
            are shared by several ranks; for a model without routed experts.
    """
    check_arguments(store_experts_in_fp8, locals())
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, Experts)]
    if not named:
        raise ValueError(
            f"model ({type(model).__name__}) must have routed experts to be stored in FP8: drop "
            "the call"
        )
    places = [(n, m, role) for n, m in named for role in (m.layout.w1, m.layout.w2)]
    for name, experts, attribute in places:
        _check(clean_name(f"{name}.{attribute}"), experts, getattr(experts, attribute))
    for _, experts, attribute in places:
        param = getattr(experts, attribute)
        if gathered_blocks(param) is None:
            assert experts.recipe is not None
            fp8_param = _store_blocks(param, power_of_two=experts.recipe.power_of_two)
            experts._parameters[attribute] = fp8_param
            # Units have the parameter until their next forward, and readers what was made of it.
            local_of(param).untyped_storage().resize_(0)
            experts.reader.drop_copies()


def refuse_fp8_storage(model: nn.Module, verb: str) -> None:
    """Raise ValueError for a model with parameters that have no values to be `verb`."""
    for name, param in model.named_parameters():
        if gathered_blocks(param) is not None:
            raise ValueError(
                f"{clean_name(name)} (FP8 alone) must have values to be {verb}: save_adapters, and "
                "load them beside the base without store_experts_in_fp8"
            )


def stored_values(param: Tensor, box: tuple[slice, ...]) -> Tensor:
    """Return a box of the values that products read of a parameter stored so, in its dtype."""
    blocks = gathered_blocks(param)
    assert blocks is not None, "the caller asks for stored parameters alone"
    shape = local_of(param).shape
    rows, columns = torch.arange(shape[:-1].numel()).view(shape[:-1]), torch.arange(shape[-1])
    row, column = (
        (index // BLOCK).to(blocks.scales.device) for index in (rows[box[:-1]], columns[box[-1]])
    )
    return (blocks.values[box].float() * blocks.scales[row][..., column]).to(param.dtype)


def _check(name: str, experts: Experts, param: nn.Parameter) -> None:
    recipe = experts.recipe
    if recipe is None or not recipe.reads_blocks or experts.is_separate:
        scaling = None if recipe is None else recipe.scaling
        backend = ", Transformer Engine's" if recipe is not None and recipe.backend == "te" else ""
        raise ValueError(
            f"recipe of {name} ({scaling}{backend}) must be 'blockwise', with gate and up in one "
            "parameter, to be stored in FP8: pass precision='blockwise' to parallelize_moe"
        )
    if param.requires_grad:
        raise ValueError(
            f"{name} (trained) must be frozen to be stored in FP8: call requires_grad_(False)"
        )
    cuts = set(param.device_mesh.mesh_dim_names or ()) if isinstance(param, DTensor) else set()
    if cuts - OF_EXPERTS:
        raise ValueError(
            f"{name} (cut over {sorted(cuts)}) must be of one rank alone to be stored in FP8: give "
            "ParallelConfig.ep x etp all ranks"
        )


@torch.no_grad()
def _store_blocks(param: nn.Parameter, *, power_of_two: bool) -> nn.Parameter:
    """Return a parameter without values, whose blocks products read."""
    local = local_of(param).detach()
    place = PartOfMatrix.of(local.shape, 0, 0, local.shape[0])
    amax, scales = torch.zeros(2, *place.scales_shape, device=local.device)
    values = torch.empty_like(local, dtype=torch.uint8)
    block_amax_(local, place, amax)
    quantise_blocks_(local, place, amax, scales, values, power_of_two=power_of_two)
    nothing: Tensor = local.new_full((), torch.nan).expand(local.shape)
    if isinstance(param, DTensor):
        nothing = as_part(nothing, param.device_mesh, param.placements, of=param)
    fp8_param = parameter_like(nothing, param)
    setattr(fp8_param, GATHERED_BLOCKS, Blocks(values.view(FP8), scales, "block"))
    return fp8_param
