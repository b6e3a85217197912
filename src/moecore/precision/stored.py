"""Stores frozen weights, as the base of adapters: experts in FP8 or 4 bits, linears in 4 bits.

Such a parameter has its shape and dtype, but its memory is a single NaN. Products read its FP8
blocks, as they read the blocks of a parameter that FSDP all-gathered in FP8. 4-bit blocks are
dequantised to the compute dtype in each forward and backward.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import check_arguments
from moecore.base.options.dense import DenseOptions
from moecore.base.options.precision import FrozenFormat, Precision
from moecore.base.params import PARALLEL_STATE, clean_name, get_local_param
from moecore.base.regions import run_product
from moecore.base.torch_private import get_autocast_dtype, get_local_tensor
from moecore.kernels.linear import LinearProducts
from moecore.kernels.ops import Op
from moecore.kernels.rows.e4m3 import BLOCK, FP8
from moecore.kernels.rows.four_bit import FORMATS, dequantise
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import MatrixShard, quantise_blocks_, write_block_amax_
from moecore.moe.experts import Experts
from moecore.moe.param_reader import get_fp8_blocks
from moecore.moe.stored_weights import (
    EXPORT_UPDATE,
    get_four_bit_blocks,
    make_stored_parameter,
    read_four_bit_values,
    store_in_four_bits,
)
from moecore.precision.apply import list_storable_linears
from moecore.precision.plain import set_products

OF_EXPERTS = {"ep", "etp"}  # mesh dims whose ranks own different experts or slices of experts


def store_experts_in_fp8(model: nn.Module) -> None:
    """Store the frozen matrices of routed experts only in FP8, in place. No communication.

    Call it after the weights are loaded. An element then takes one byte, and outputs do not change.
    A pipeline stage without experts does not change.
    `save` and `merge_adapters` need the unrounded values and raise ValueError. `save_adapters`
    works, and `export_hf` writes the rounded values.

    Args:
        model: a parallelized model whose experts have a "blockwise" recipe.

    Raises:
        ValueError: if an expert is trained, has another recipe, stores gate and up in two
            parameters, or is sharded by FSDP; or if the model has no routed experts.
    """
    check_arguments(store_experts_in_fp8, locals())
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, Experts)]
    state = getattr(model, PARALLEL_STATE, None)
    is_stage = state is not None and state.layout is not None
    if not named and not is_stage:  # a pipeline stage may have no layer with experts
        kind = type(model).__name__
        raise ValueError(f"model ({kind}) must have routed experts to be stored in FP8: drop it")
    places = [(n, m, role) for n, m in named for role in (m.layout.w1, m.layout.w2)]
    for name, experts, attribute in places:
        _check_storable(clean_name(f"{name}.{attribute}"), experts, getattr(experts, attribute))
    for _, experts, attribute in places:
        param = getattr(experts, attribute)
        if get_fp8_blocks(param) is None:
            assert experts.recipe is not None
            fp8_param = _store_blocks(param, power_of_two=experts.recipe.power_of_two)
            _replace_parameter(experts, attribute, fp8_param)


def store_experts_in_four_bits(experts: Experts, kind: FrozenFormat) -> None:
    """Store the matrices of a layer's routed experts in a 4-bit format, in place.

    Parameters on meta get 4-bit tensors on meta, which `to_empty` allocates. Call it only if
    `find_storage_problem` returned None.
    """
    experts.reader.dequantises = True
    for attribute, k in experts.summed_dims.items():
        param = store_in_four_bits(getattr(experts, attribute), kind, k)
        _replace_parameter(experts, attribute, param)


def store_linears_in_four_bits(model: nn.Module, precision: Precision) -> None:
    """Store the linears of `list_storable_linears` in the format `Precision.frozen`, in place.

    Call it only if `find_linear_storage_problem` returned None.
    """
    for module in list_storable_linears(model, precision).values():
        assert precision.frozen is not None
        weight = cast(nn.Parameter, module.weight)
        _replace_parameter(module, "weight", store_in_four_bits(weight, precision.frozen, k=1))
        set_products(module, FourBitProducts())


def find_linear_storage_problem(
    model: nn.Module, precision: Precision, dense: DenseOptions, tp: int
) -> str | None:
    """Return an error text if the linears of a model cannot be stored in 4 bits, or None."""
    suffix = "with Precision.frozen_dense (True)"
    linears = list_storable_linears(model, precision)
    if not linears:
        return f"model ({type(model).__name__}) must have linears to store {suffix}: drop it"
    if tp > 1:
        return f"ParallelConfig.tp ({tp}) must be 1 {suffix}: use dp_shard or cp instead"
    if dense.graph:
        return f"DenseOptions.graph (True) must be False {suffix}: drop one of them"
    for name, layer in model.named_modules():
        if getattr(layer, "lora_magnitude_vector", None):
            return f"{name} must have no DoRA, which reads its weight, {suffix}: drop one of them"
    for name, module in linears.items():
        if module.weight.requires_grad:
            fix = "call requires_grad_(False), or add adapters first (peft.get_peft_model)"
            return f"{name}.weight (trained) must be frozen {suffix}: {fix}"
    return None


def find_storage_problem(
    name: str, experts: Experts, kind: FrozenFormat, shards: Mapping[str, int]
) -> str | None:
    """Return an error text if experts `name` cannot be stored in a 4-bit format, or None.

    `shards` has the number of ranks by mesh dim.
    """
    suffix = f"with Precision.frozen ({kind!r})"
    if experts.is_separate:
        return f"{name} must have gate and up in one parameter {suffix}: drop it"
    for attribute, k in experts.summed_dims.items():
        param, etp = getattr(experts, attribute), shards["etp"]
        if param.requires_grad:
            fix = "call requires_grad_(False), or add adapters first (peft.get_peft_model)"
            return f"{name}.{attribute} (trained) must be frozen {suffix}: {fix}"
        K = param.shape[k] // (1 if attribute == experts.layout.w1 else etp)
        if K % FORMATS[kind].group:
            relation = f"must divide by {FORMATS[kind].group} {suffix}"
            return f"{name}.{attribute} (rows of {K}) {relation}: choose another etp, or drop it"
    for degree in ("edp_shard", "edp_replicate"):
        if shards[degree] > 1:
            relation = f"must be 1 {suffix}, whose experts each belong to one rank"
            return f"ParallelConfig.{degree} ({shards[degree]}) {relation}: give ep x etp all ranks"
    return None


def _replace_parameter(module: nn.Module, attribute: str, param: nn.Parameter) -> None:
    """Replace a parameter by its stored form, and free the memory of its values."""
    local = get_local_tensor(getattr(module, attribute))
    module._parameters[attribute] = param
    # FSDP units refer to the old parameter until their next forward, and readers to copies.
    if not local.is_meta:
        local.untyped_storage().resize_(0)
    if isinstance(module, Experts):
        module.reader.drop_copies()


def refuse_fp8_storage(model: nn.Module, operation: str) -> None:
    """Raise a ValueError that names `operation` if a parameter is stored only in FP8."""
    for name, param in model.named_parameters():
        if get_fp8_blocks(param) is not None and get_four_bit_blocks(param) is None:
            raise ValueError(
                f"{clean_name(name)} (FP8 alone) must have values to be {operation}: "
                "save_adapters, and load them beside the base without store_experts_in_fp8"
            )


def read_stored_values(
    param: Tensor, slices: tuple[slice, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return `slices` of a parameter's local shard, dequantised to the parameter's dtype.

    Values in 4 bits are dequantised to `dtype`, unless it is None.
    """
    blocks = get_fp8_blocks(param)
    assert blocks is not None, "the parameter has values"
    if blocks.kind in FORMATS:
        return _read_with_update(param, blocks, slices).to(dtype or param.dtype)
    shape = get_local_tensor(param).shape
    rows = torch.arange(shape[:-1].numel(), device="cpu").view(shape[:-1])
    columns = torch.arange(shape[-1], device="cpu")
    device = blocks.scales.device
    row, column = ((i // BLOCK).to(device) for i in (rows[slices[:-1]], columns[slices[-1]]))
    return (blocks.values[slices].float() * blocks.scales[row][..., column]).to(param.dtype)


def _read_with_update(param: Tensor, blocks: Blocks, slices: tuple[slice, ...]) -> Tensor:
    """Return `slices` of a 4-bit parameter in fp32, with the update of merged adapters."""
    values = read_four_bit_values(blocks, torch.float32, slices, param.device)
    update: Callable[..., None] | None = getattr(param, EXPORT_UPDATE, None)
    if update is not None:
        update(values, slices)
    return values


def _check_storable(name: str, experts: Experts, param: nn.Parameter) -> None:
    """Raise a ValueError if the recipe, training or sharding of `param` forbids FP8 storage."""
    recipe = experts.recipe
    if recipe is None or not recipe.reads_blocks or experts.is_separate:
        scaling = None if recipe is None else recipe.scaling
        backend = ", Transformer Engine's" if recipe is not None and recipe.backend == "te" else ""
        raise ValueError(
            f"recipe of {name} ({scaling}{backend}) must be 'blockwise', with gate and up in one "
            "parameter, to be stored in FP8: pass precision='blockwise' to parallelize_moe"
        )
    suffix = "to be stored in FP8"
    if param.requires_grad:
        raise ValueError(f"{name} (trained) must be frozen {suffix}: call requires_grad_(False)")
    axes = set(param.device_mesh.mesh_dim_names or ()) if isinstance(param, DTensor) else set()
    if axes - OF_EXPERTS:
        relation = f"must be of one rank alone {suffix}: give ParallelConfig.ep x etp all ranks"
        raise ValueError(f"{name} (cut over {sorted(axes)}) {relation}")


@torch.no_grad()
def _store_blocks(param: nn.Parameter, *, power_of_two: bool) -> nn.Parameter:
    """Return a parameter like `param` with its FP8 blocks as an attribute, but without values.

    `power_of_two` = the scales of the blocks are powers of two.
    """
    local = get_local_tensor(param).detach()
    place = MatrixShard.from_slice(local.shape, 0, 0, local.shape[0])
    amax, scales = torch.zeros(2, *place.scales_shape, device=local.device, dtype=torch.float32)
    values = torch.empty_like(local, dtype=torch.uint8)
    write_block_amax_(local, place, amax)
    quantise_blocks_(local, place, amax, scales, values, power_of_two=power_of_two)
    return make_stored_parameter(param, Blocks(values.view(FP8), scales, "block"))


class FourBitProducts(LinearProducts):
    """Matmuls of a linear with a frozen 4-bit weight, computed in the dtype of x or autocast's.

    Forward and backward each dequantise the weight. Backward saves no tensor.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        """Return x @ weight^T + bias. `training` has no effect."""
        x = x.to(get_autocast_dtype(x) or x.dtype)
        bias_N = None if bias is None else get_local_param(bias)
        blocks = get_four_bit_blocks(weight)
        assert blocks is not None, "the weight is stored in 4 bits"
        args = x, bias_N, blocks.values, blocks.scales, blocks.kind
        return run_product(_four_bit_linear, *args)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """Return the name of the products."""
        return "weight in 4 bits"


def _multiply(
    x: Tensor, bias_N: Tensor | None, values: Tensor, scales: Tensor, kind: str
) -> Tensor:
    """Return y [..., N] = x [..., K] @ weight^T + bias; `bias_N` None = no bias."""
    return F.linear(x, dequantise(Blocks(values, scales, kind), x.dtype), bias_N)


def _store_blocks_in_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Store the blocks and the dtype of x in `ctx`, outside of the saved tensors."""
    x, _, *blocks = inputs
    ctx.blocks, ctx.dtype = Blocks(*blocks), x.dtype


def _compute_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return dx and dbias, None if not needed, and None for the other inputs."""
    wants_x, wants_bias, *_ = ctx.needs_input_grad
    dy_TN, dx = dy.reshape(-1, dy.shape[-1]), None
    if wants_x:
        dx_TK = dy_TN.mm(dequantise(ctx.blocks, ctx.dtype))
        dx = dx_TK.view(*dy.shape[:-1], dx_TK.shape[1])
    return dx, dy_TN.sum(0) if wants_bias else None, None, None, None


_four_bit_linear: Op[Tensor] = Op(
    "four_bit_linear",
    _multiply,
    lambda x, bias_N, values, *_: x.new_empty(*x.shape[:-1], values.shape[0]),
    setup_context=_store_blocks_in_context,
    backward=_compute_gradients,
)
