"""Functions of Transformer Engine that moecore calls, defined in plain PyTorch.

This is no Transformer Engine: it is the definition of what moecore asks of it, so that CPUs can run
what is around it. Signatures are those of release 2.12; `tests/moe/test_te_gpu.py` compares the two
where Transformer Engine is installed. A quantised operand holds the numbers that it stands for, by
moecore's reference quantisers, in the usage (summed over columns, or over rows) that was asked for;
a product that reads another usage fails, as Transformer Engine's does on Hopper.
"""

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from moecore.kernels.rows.e4m3 import abs_without_nan_ref
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import quantise_mxfp8
from moecore.kernels.rows.scaling import DTYPES, LARGEST, quantise_ref

RECIPES = {
    "blockwise": Recipe(backend="te"),
    "blockwise, fp32 scales": Recipe(backend="te", power_of_two=False),
    "tensorwise": Recipe(backend="te", scaling="tensorwise"),
    "tensorwise, e5m2": Recipe(backend="te", scaling="tensorwise", grad_format="e5m2"),
    "mxfp8": Recipe(backend="te", scaling="mxfp8"),
    "nvfp4": Recipe(backend="te", scaling="nvfp4", power_of_two=False, stochastic_rounding=False),
}


class DType(enum.Enum):
    kFloat8E4M3 = "e4m3"
    kFloat8E5M2 = "e5m2"
    kFloat4E2M1 = "e2m1"


class Quantised:
    """What a quantizer made: the numbers of each usage; None = not made."""

    def __init__(self, rowwise: Tensor | None, columnwise: Tensor | None, align: int) -> None:
        self.rowwise, self.columnwise, self.align = rowwise, columnwise, align


class Quantizer:
    align = 16  # of which rows are a multiple

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False

    def __call__(self, tensor: Tensor) -> Quantised:
        assert tensor.is_contiguous() and tensor.ndim == 2 and self.internal
        x = tensor.detach()
        rowwise = self.rounded(x, over_rows=False) if self.rowwise_usage else None
        columnwise = self.rounded(x, over_rows=True) if self.columnwise_usage else None
        return Quantised(rowwise, columnwise, self.align)

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        raise NotImplementedError


def by_blocks(x: Tensor, block: tuple[int, int], power_of_two: bool, fmt: str) -> Tensor:
    """Return fp32 values quantised in blocks, the last of which may be partial."""
    # A block with an infinity has scale 1, and infinity becomes the largest value of FP8.
    rows, columns = block
    (M, K), largest = x.shape, torch.tensor(LARGEST[fmt])
    x = pad(x.float(), (0, -K % columns, 0, -M % rows))
    x = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = abs_without_nan_ref(x).amax((1, 3), keepdim=True)
    amax = torch.where(amax.isinf(), largest, amax)
    x = torch.where(x.isinf(), largest.copysign(x), x)
    values, scales = quantise_ref(x, (1, 3), power_of_two, fmt, amax)
    return (values.float() * scales).flatten(2).flatten(0, 1)[:M, :K]


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        # Its kernel of square blocks writes rows in any case.
        assert rowwise or block_scaling_dim == 1
        self.how = (force_pow_2_scales, fp8_dtype.value)
        self.is_square = block_scaling_dim == 2

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        along = (128, 1) if over_rows else (1, 128)
        return by_blocks(x, (128, 128) if self.is_square else along, *self.how)


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert rowwise and scale is not None and amax is not None
        assert scale.shape == amax.shape == (1,)
        self.how = (force_pow_2_scales, fp8_dtype.value)

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        return by_blocks(x, tuple(x.shape), *self.how) if x.numel() else x.float()


class Float8Quantizer(Quantizer):
    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert rowwise and scale.shape == amax.shape == (1,)
        self.scale, self.amax, self.fmt = scale, amax, fp8_dtype.value

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        largest = LARGEST[self.fmt]
        self.amax.copy_(torch.maximum(self.amax, abs_without_nan_ref(x.float()).amax()))
        values = (x.float() * self.scale).clamp(-largest, largest)
        return values.to(DTYPES[self.fmt]).float() / self.scale


class MXFP8Quantizer(Quantizer):
    align = 32

    def __init__(self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert fp8_dtype is DType.kFloat8E4M3

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        block = (32, 1) if over_rows else (1, 32)
        values, scales = quantise_mxfp8(x.float(), block)
        return values.float() * scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


class NVFP4Quantizer(Quantizer):
    align = 128

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert with_rht == with_post_rht_amax and not (with_rht and with_2d_quantization)
        how: Any = dict(hadamard=with_rht, stochastic_rounding=stochastic_rounding)
        self.recipe = Recipe(scaling="nvfp4", power_of_two=False, **how)
        self.is_square = with_2d_quantization

    def rounded(self, x: Tensor, *, over_rows: bool) -> Tensor:
        """Return the numbers; over rows those of the transformed matrix."""
        assert x.dtype == torch.bfloat16 or not self.recipe.hadamard
        if self.is_square:
            made = quantise_microscaled_matrices(x[None], self.recipe, columnwise=False).rows
            return made.values[0] * made.scales
        made = quantise_microscaled(x, self.recipe, over_rows=over_rows, is_gradient=True)
        return made.values * made.scales


def split_quantize(
    tensor: Tensor,
    split_sections: list[int],
    quantizer_list: list[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Quantised]:
    assert len(split_sections) == len(quantizer_list)
    assert sum(split_sections) == tensor.shape[0] and tensor.is_contiguous()
    parts = tensor.split(split_sections)
    return [quantizer(x) for quantizer, x in zip(quantizer_list, parts, strict=True)]


def _numbers(x: Any, *, over_rows: bool) -> Tensor:
    if isinstance(x, Tensor):
        assert x.is_contiguous()
        return x.detach().to(torch.promote_types(x.dtype, torch.float32))
    found = x.columnwise if over_rows else x.rowwise
    assert found is not None, "the operand was quantised for another product"
    return found


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    assert use_split_accumulator and grad == (layout != "TN")
    a, b = _numbers(A, over_rows=layout != "TN"), _numbers(B, over_rows=layout == "NT")
    if layout == "NT" and not isinstance(A, Tensor):
        assert a.shape[0] % A.align == 0
    product = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
    if out is None:
        return product.to(out_dtype), None, None, None
    assert out.is_contiguous() and out.dtype == out_dtype
    out.copy_(product + out if accumulate else product)
    return out, None, None, None


def general_grouped_gemm(
    A: list[Any],
    B: list[Any],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Any = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[list[Tensor], None, None]:
    assert len(A) == len(B) == len(quantization_params) and m_splits is not None
    assert all(type(n) is int for n in m_splits) and single_output == (layout != "NT")
    outs = list(out[0].split(m_splits)) if single_output else out
    how: Any = dict(layout=layout, grad=grad, accumulate=accumulate)
    for a, b, o, n in zip(A, B, outs, m_splits, strict=True):
        assert isinstance(b, Tensor) or n % b.align == 0, "rows are not padded"
        general_gemm(a, b, out_dtype, out=o, use_split_accumulator=use_split_accumulator, **how)
    return out, None, None


def available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


is_fp8_available = is_mxfp8_available = available
is_fp8_block_scaling_available = is_nvfp4_available = available


@contextmanager
def te_defined(**changes: Any) -> Iterator[None]:
    """Let `transformer_engine` find these definitions, on CPUs."""
    module: Any = __import__(__name__, fromlist=["*"])
    found = te.Names("2.12.0", module, module, module, device_type="cpu")
    te._make_block_quantizer.cache_clear()
    with patch.object(te, "import_transformer_engine", lambda: found._replace(**changes)):
        yield
    te._make_block_quantizer.cache_clear()
