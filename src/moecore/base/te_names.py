"""Every name of Transformer Engine that moecore uses, each behind one function of ours.

Transformer Engine changes what it has from release to release, and its functions for products are
not documented. `tests/base/test_te_names.py` holds each to its signature where it is installed. It
is imported at the first use. Only what multiplies and quantises is taken: no module, no autograd,
no global state.

Letters: R rows, e experts, M and N rows of the operands of a product, K the dim that is summed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe, Scaling

INSTALL = "pip install --no-build-isolation 'moecore[te]'"
OLDEST = (2, 12)  # an older one has not been tried

Operand = Literal["activation", "weight", "gradient"]
# What is summed: "TN" a [N, K], b [M, K] -> b @ a^T; "NN" a [K, N], b [M, K] -> b @ a; "NT"
# a [K, N], b [K, M] -> b^T @ a.
Layout = Literal["TN", "NN", "NT"]

AVAILABLE: dict[Scaling | None, str] = {
    "blockwise": "is_fp8_block_scaling_available",
    "tensorwise": "is_fp8_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


class Names(NamedTuple):
    """The modules of Transformer Engine, of a version, and the devices that they run on."""

    version: str
    pytorch: Any  # transformer_engine.pytorch: quantizers, and what a GPU has
    products: Any  # transformer_engine.pytorch.cpp_extensions
    extension: Any  # transformer_engine_torch: dtypes, and the quantisation of experts' rows
    device_type: str = "cuda"


@cache
def names() -> Names:
    """Return what is installed; a ValueError where nothing is, or it does not load."""
    try:
        engine = importlib.import_module("transformer_engine")
        pytorch = importlib.import_module("transformer_engine.pytorch")
        products = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        extension = importlib.import_module("transformer_engine_torch")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"Transformer Engine must be installed for 'te' ({reason}): {INSTALL}"
        ) from error
    return Names(engine.__version__, pytorch, products, extension)


def why_not(recipe: Recipe | None, device: torch.device | None) -> str | None:
    """Return why Transformer Engine cannot multiply by a recipe, None = bf16; None = it can."""
    # A device of None is not known yet; nothing is computed on meta.
    if device is not None and device.type == "meta":
        return None
    try:
        engine = names()
    except ValueError as error:
        return str(error)
    oldest = ".".join(map(str, OLDEST))
    if tuple(int(n) for n in engine.version.split(".")[:2]) < OLDEST:
        return f"Transformer Engine ({engine.version}) must be >= {oldest}: {INSTALL}"
    if device is None:
        return None
    if device.type != engine.device_type:
        return (
            f"device ({device}) must be {engine.device_type} for Transformer Engine: move the model"
        )
    if recipe is None:
        return None
    _, reason = getattr(engine.pytorch, AVAILABLE[recipe.scaling])(return_reason=True)
    if not reason:
        return None
    return (
        f"device ({device}) must have what Transformer Engine's {recipe.scaling!r} needs "
        f"({reason}): use another recipe, or backend='moecore'"
    )


def without_infinities(x: Tensor) -> Tensor:
    """Return NaN for infinity, which Transformer Engine would quantise to a finite number."""
    # In one pass: x + 0 * x. A step that is not finite must be seen to be skipped.
    return torch.addcmul(x, x, x.new_zeros(()))


def quantise(
    x_RK: Tensor,  # contiguous
    recipe: Recipe,
    operand: Operand,
    *,
    over_rows: bool,
    scale: Tensor | None = None,  # of "tensorwise", fp32 [1], a factor; None = 448 / amax
    seen: Tensor | None = None,  # fp32 [1], with a scale: grows to amax of x_RK, NaN left out
) -> Any:
    """Return a matrix as an operand that is summed over its rows, or over its columns."""
    with torch.no_grad():
        if scale is not None:
            dtype = _fp8(recipe, operand)
            seen = torch.zeros_like(scale) if seen is None else seen
            usage: Any = dict(rowwise=True, columnwise=over_rows)
            return _internal(names().pytorch.Float8Quantizer(scale, seen, dtype, **usage))(x_RK)
        (quantizer,) = _quantizers(recipe, operand, over_rows, 1, x_RK.device)
        return quantizer(_cast_for_quantizer(x_RK, recipe))


def quantise_experts(
    x_RK: Tensor, splits: list[int], recipe: Recipe, operand: Operand, *, over_rows: bool
) -> list[Any]:
    """Return the rows of each expert as an operand; `quantise` has the arguments."""
    quantizers = _quantizers(recipe, operand, over_rows, len(splits), x_RK.device)
    with torch.no_grad():
        x_RK = _cast_for_quantizer(x_RK, recipe)
        if operand == "weight" and recipe.scaling == "nvfp4":  # as its own layers quantise matrices
            parts = zip(quantizers, x_RK.split(splits), strict=True)
            return [quantizer(part) for quantizer, part in parts]
        return names().extension.split_quantize(x_RK, splits, quantizers)  # type: ignore[no-any-return]


def multiply(a: Any, b: Any, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return one product, summed in fp32 and rounded to a dtype."""
    gemm_options: Any = dict(layout=layout, grad=layout != "TN", use_split_accumulator=True)
    return names().products.general_gemm(a, b, out_dtype=dtype, **gemm_options)[0]  # type: ignore[no-any-return]


def multiply_experts(
    a: Sequence[Any],  # each expert's matrix, or for "NT" its rows
    b: Sequence[Any],  # each expert's rows
    layout: Layout,
    out: list[Tensor],  # contiguous
    splits: list[int],  # rows of each expert
    *,
    adds: bool = False,  # to what `out` holds
) -> None:
    """Put each expert's product in `out`: [R, N], or for "NT" one [M, N] for each expert."""
    # Experts without rows give zeros for "NT". Transformer Engine launches a product for each.
    names().products.general_grouped_gemm(
        list(a),
        list(b),
        out,
        quantization_params=[None] * len(splits),
        out_dtype=out[0].dtype,
        layout=layout,
        m_splits=splits,
        grad=layout != "TN",
        accumulate=adds,
        use_split_accumulator=True,
        single_output=layout != "NT",
    )


def _cast_for_quantizer(x_RK: Tensor, recipe: Recipe) -> Tensor:
    """Return a matrix as quantizers take it: what transforms reads bf16 alone."""
    return x_RK.bfloat16() if recipe.scaling == "nvfp4" else x_RK


def _quantizers(
    recipe: Recipe, operand: Operand, over_rows: bool, num: int, device: torch.device
) -> list[Any]:
    if recipe.scaling != "tensorwise":
        return [_by_blocks(recipe, operand, over_rows, device)] * num
    # Each has memory for its largest magnitude, so none is shared.
    buffers = torch.empty(2, num, device=device)
    make, dtype = names().pytorch.Float8CurrentScalingQuantizer, _fp8(recipe, operand)
    options: Any = dict(columnwise=over_rows, force_pow_2_scales=recipe.power_of_two)
    return [
        _internal(make(dtype, device, scale=scale, amax=amax, **options))
        for scale, amax in zip(buffers[0].split(1), buffers[1].split(1), strict=True)
    ]


@cache
def _by_blocks(recipe: Recipe, operand: Operand, over_rows: bool, device: torch.device) -> Any:
    """Return a quantizer whose scales are of blocks: it has no state but what its device has."""
    te, is_weight = names().pytorch, operand == "weight"
    # What makes square blocks makes rows in any case.
    usage: Any = dict(rowwise=is_weight or not over_rows, columnwise=over_rows)
    if recipe.scaling == "blockwise":
        usage |= dict(force_pow_2_scales=recipe.power_of_two, block_scaling_dim=1 + is_weight)
        return _internal(te.Float8BlockQuantizer(_fp8(recipe, operand), **usage))
    if recipe.scaling == "mxfp8":
        return _internal(te.MXFP8Quantizer(_fp8(recipe, operand), **usage))
    transforms = recipe.hadamard and not is_weight
    usage |= dict(
        with_rht=transforms, with_post_rht_amax=transforms, with_2d_quantization=is_weight
    )
    rounds = recipe.stochastic_rounding and operand == "gradient"
    return _internal(te.NVFP4Quantizer(stochastic_rounding=rounds, **usage))


def _fp8(recipe: Recipe, operand: Operand) -> Any:
    dtypes = names().extension.DType
    is_e5m2 = operand == "gradient" and recipe.grad_format == "e5m2"
    return dtypes.kFloat8E5M2 if is_e5m2 else dtypes.kFloat8E4M3


def _internal(quantizer: Any) -> Any:
    """Return a quantizer that makes plain records, no subclasses of tensors."""
    quantizer.internal = True
    return quantizer
