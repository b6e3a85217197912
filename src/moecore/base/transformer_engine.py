"""The only file that uses names of Transformer Engine, which is imported on first use.

Transformer Engine's functions for products are undocumented and change between releases.
`tests/base/test_transformer_engine.py` tests each signature if Transformer Engine is installed.
moecore uses its quantizers and matrix products, but not its modules, autograd functions and global
state.

Letters: R rows, e experts, M and N rows of the operands of a product, K the dim that is summed.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moecore.base import get_install_command
from moecore.base.options.precision import Recipe, Scaling

INSTALL = get_install_command("te", "--no-build-isolation ")
OLDEST = (2, 12)  # older releases have not been tested

Operand = Literal["activation", "weight", "gradient"]
# Operands and result: "TN" a [N, K], b [M, K] -> b @ a^T; "NN" a [K, N], b [M, K] -> b @ a;
# "NT" a [K, N], b [K, M] -> b^T @ a.
Layout = Literal["TN", "NN", "NT"]

AVAILABLE: dict[Scaling | None, str] = {
    "blockwise": "is_fp8_block_scaling_available",
    "tensorwise": "is_fp8_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


class Names(NamedTuple):
    """The imported modules of Transformer Engine, and its version."""

    version: str
    pytorch: Any  # transformer_engine.pytorch: quantizers, and checks of the GPU
    products: Any  # transformer_engine.pytorch.cpp_extensions
    extension: Any  # transformer_engine_torch: dtypes, and `split_quantize`
    device_type: str = "cuda"


@cache
def import_transformer_engine() -> Names:
    """Import Transformer Engine's modules; raise a ValueError if they cannot be imported."""
    try:
        engine = importlib.import_module("transformer_engine")
        pytorch = importlib.import_module("transformer_engine.pytorch")
        products = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        extension = importlib.import_module("transformer_engine_torch")
    except (ImportError, OSError, RuntimeError) as error:
        text = f"Transformer Engine must be installed for 'te' ({' '.join(str(error).split())})"
        raise ValueError(f"{text}: {INSTALL}") from error
    return Names(engine.__version__, pytorch, products, extension)


def find_recipe_problem(recipe: Recipe | None, device: torch.device | None) -> str | None:
    """Return the error text if Transformer Engine cannot run a recipe on a device, otherwise None.

    `recipe` None = bf16. `device` None = check only the installation.
    """
    if device is not None and device.type == "meta":
        return None
    try:
        engine = import_transformer_engine()
    except ValueError as error:
        return str(error)
    oldest = ".".join(map(str, OLDEST))
    if tuple(int(n) for n in engine.version.split(".")[:2]) < OLDEST:
        return f"Transformer Engine ({engine.version}) must be >= {oldest}: {INSTALL}"
    if device is None:
        return None
    if device.type != engine.device_type:
        relation = f"must be {engine.device_type} for Transformer Engine: move the model"
        return f"device ({device}) {relation}"
    if recipe is None:
        return None
    _, reason = getattr(engine.pytorch, AVAILABLE[recipe.scaling])(return_reason=True)
    if not reason:
        return None
    return (
        f"device ({device}) must have what Transformer Engine's {recipe.scaling!r} needs "
        f"({reason}): use another recipe, or backend='moecore'"
    )


def replace_infinities(x: Tensor) -> Tensor:
    """Return a copy with NaN in place of infinity, which quantisation would make finite."""
    # One pass: x + 0 * x. `TrainStep` skips a step only if its gradient is not finite.
    return torch.addcmul(x, x, x.new_zeros(()))


def quantise(
    x_RK: Tensor,  # contiguous
    recipe: Recipe,
    operand: Operand,
    *,
    over_rows: bool,
    scale: Tensor | None = None,  # for "tensorwise": fp32 [1] factor; None = 448 / amax
    amax_out: Tensor | None = None,  # with `scale`: fp32 [1], updated to the maximum of |x_RK|
) -> Any:
    """Return Transformer Engine's record of a quantised operand: FP8 or FP4 values and scales.

    The matmul sums over the rows of x if `over_rows`, otherwise over its columns.
    """
    with torch.no_grad():
        if scale is not None:
            dtype = _get_fp8_dtype(recipe, operand)
            amax_out = torch.zeros_like(scale) if amax_out is None else amax_out
            make: Any = import_transformer_engine().pytorch.Float8Quantizer
            quantizer = make(scale, amax_out, dtype, rowwise=True, columnwise=over_rows)
            return _set_internal(quantizer)(x_RK)
        (quantizer,) = _make_quantizers(recipe, operand, over_rows, 1, x_RK.device)
        return quantizer(_cast_for_quantizer(x_RK, recipe))


def quantise_experts(
    x_RK: Tensor, splits: list[int], recipe: Recipe, operand: Operand, *, over_rows: bool
) -> list[Any]:
    """Quantise the rows of each expert, `splits[e]` rows of x; return one result per expert."""
    quantizers = _make_quantizers(recipe, operand, over_rows, len(splits), x_RK.device)
    with torch.no_grad():
        x_RK = _cast_for_quantizer(x_RK, recipe)
        if operand == "weight" and recipe.scaling == "nvfp4":  # as its own layers quantise matrices
            parts = zip(quantizers, x_RK.split(splits), strict=True)
            return [quantizer(part) for quantizer, part in parts]
        return import_transformer_engine().extension.split_quantize(x_RK, splits, quantizers)  # type: ignore[no-any-return]


def multiply_quantised(a: Any, b: Any, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the matrix product of `a` and `b`, results of `quantise`, in `dtype`, summed in fp32.

    `layout`: "TN" = b @ a^T, "NN" = b @ a, "NT" = b^T @ a.
    """
    gemm_options: Any = dict(layout=layout, grad=layout != "TN", use_split_accumulator=True)
    products = import_transformer_engine().products
    return products.general_gemm(a, b, out_dtype=dtype, **gemm_options)[0]  # type: ignore[no-any-return]


def multiply_quantised_experts(
    a: Sequence[Any],  # each expert's matrix, or for "NT" its rows
    b: Sequence[Any],  # each expert's rows
    layout: Layout,
    out: list[Tensor],  # contiguous
    splits: list[int],  # rows of each expert
    *,
    accumulates: bool = False,  # add to `out`
) -> None:
    """Write each expert's matrix product (`multiply_quantised`) to `out`; if `accumulates`, add it.

    `out` is a list of one tensor with all experts' rows, or for "NT" of one matrix per expert.
    """
    # For "NT" the product of an expert without rows is zero.
    import_transformer_engine().products.general_grouped_gemm(
        list(a),
        list(b),
        out,
        quantization_params=[None] * len(splits),
        out_dtype=out[0].dtype,
        layout=layout,
        m_splits=splits,
        grad=layout != "TN",
        accumulate=accumulates,
        use_split_accumulator=True,
        single_output=layout != "NT",
    )


def _cast_for_quantizer(x_RK: Tensor, recipe: Recipe) -> Tensor:
    """Cast a matrix to bf16 for "nvfp4", whose quantizer reads no other dtype."""
    return x_RK.bfloat16() if recipe.scaling == "nvfp4" else x_RK


def _make_quantizers(
    recipe: Recipe, operand: Operand, over_rows: bool, num_quantizers: int, device: torch.device
) -> list[Any]:
    """Return one quantizer per expert; quantizers without state are one shared object."""
    if recipe.scaling != "tensorwise":
        return [_make_block_quantizer(recipe, operand, over_rows, device)] * num_quantizers
    # Each quantizer has its own buffers for scale and amax.
    buffers = torch.empty(2, num_quantizers, device=device, dtype=torch.float32)
    make = import_transformer_engine().pytorch.Float8CurrentScalingQuantizer
    dtype = _get_fp8_dtype(recipe, operand)
    options: Any = dict(columnwise=over_rows, force_pow_2_scales=recipe.power_of_two)
    return [
        _set_internal(make(dtype, device, scale=scale, amax=amax, **options))
        for scale, amax in zip(buffers[0].split(1), buffers[1].split(1), strict=True)
    ]


@cache
def _make_block_quantizer(
    recipe: Recipe, operand: Operand, over_rows: bool, device: torch.device
) -> Any:
    """Return Transformer Engine's block quantizer for an operand; the quantizer has no state."""
    te, is_weight = import_transformer_engine().pytorch, operand == "weight"
    # Weights have square blocks, whose rowwise operand is always needed.
    usage: Any = dict(rowwise=is_weight or not over_rows, columnwise=over_rows)
    if recipe.scaling == "blockwise":
        usage |= dict(force_pow_2_scales=recipe.power_of_two, block_scaling_dim=1 + is_weight)
        return _set_internal(te.Float8BlockQuantizer(_get_fp8_dtype(recipe, operand), **usage))
    if recipe.scaling == "mxfp8":
        return _set_internal(te.MXFP8Quantizer(_get_fp8_dtype(recipe, operand), **usage))
    transforms = recipe.hadamard and not is_weight
    usage |= dict(with_rht=transforms, with_post_rht_amax=transforms)
    usage |= dict(with_2d_quantization=is_weight)
    rounds = recipe.stochastic_rounding and operand == "gradient"
    return _set_internal(te.NVFP4Quantizer(stochastic_rounding=rounds, **usage))


def _get_fp8_dtype(recipe: Recipe, operand: Operand) -> Any:
    """Return Transformer Engine's FP8 dtype for an operand: e4m3, or e5m2 for gradients."""
    dtypes = import_transformer_engine().extension.DType
    is_e5m2 = operand == "gradient" and recipe.grad_format == "e5m2"
    return dtypes.kFloat8E5M2 if is_e5m2 else dtypes.kFloat8E4M3


def _set_internal(quantizer: Any) -> Any:
    """Make a quantizer return its internal storage instead of a tensor subclass; return it."""
    quantizer.internal = True
    return quantizer
