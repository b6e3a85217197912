"""FP8 operands of products: kinds and layouts of their scales, and dense operands in plain PyTorch.

CPUs compute with this file. It is also the reference for the kernels in `cast.py` and for torch's
scaled products (`precision/linear.py`).

    kind      rows and columns of one scale   scales in memory
    "tile"    1 x 128                         [K / 128, M]: scales of neighbouring rows are adjacent
    "block"   128 x 128                       [M / 128, K / 128 rounded up to 4]
    "row"     1 x K                           [M, 1]
    "tensor"  M x K                           [1, 1]

    grouped   values, by `quantised.py` and `grouped/scaled_rows.py` -> scales
    "tile"    [R, K], rows in expert order           -> [K / 128, R rounded up to 4]
    "block"   [e, N, K], one matrix of every expert  -> [e, N / 128, K / 128], any strides
    "block"   [t, C, 128], columns of row tiles      -> [t, C / 128]
    "row"     [R, K] -> [R];  [e, N, K] -> [e, N];  [C, P], columns of every expert -> [e, C]

    all-gathered weight, whose parts ranks have quantised -> scales
    "block"   by `shard_blocks.py`: as a dense operand; of experts [e * N / 128, K / 128 rounded
              up to 4]
    "tensor"  by `shard_matrices.py`: [e] or [1], one per matrix
    "packed"  by `shard_matrices.py`: E4M3 [M / 16, K / 16] of two E2M1 in a byte

`microscaling.py` defines the operands of "mxfp8" and "nvfp4", whose values are not FP8.

Letters: M rows of an operand, K columns, the dim that is summed; T rows and D columns of the tensor
that is quantised. M and K of a dense operand are padded with zeros to the sizes that tensor cores
support.

A scale is amax / LARGEST in fp32, or the smallest power of two that is not less, and at least
2^-126, so that the scale of zeros is finite. A value is multiplied by the reciprocal of its scale
in fp32, then rounded. A NaN stays a NaN and does not count for amax. An infinity makes all values
of its scale NaN. If amax is given (delayed scaling), larger values saturate, and infinities become
NaN.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.base.options.precision import Block
from moecore.base.torch_private import register_pytree_node
from moecore.kernels.common import cdiv
from moecore.kernels.rows.e4m3 import BLOCK, FP8, MAX, abs_without_nan_ref, compute_block_scale_ref

ALIGNED = 16  # M and K are multiples of it: 16 bytes
SCALE_COLUMNS = 4  # the scales of a "block" operand have a multiple of so many columns
DTYPES = {"e4m3": FP8, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": MAX, "e5m2": 57344.0}  # values


class ScaleKind(NamedTuple):
    """The shape of the block of elements that share a scale, for a kind of FP8 matmul operand."""

    code: int  # constant of `cast_kernel`
    block: Block  # rows and columns of one scale
    dims: int | tuple[int, ...]  # dims of one scale in [M / 128, 128, K / 128, 128], or in [M, K]
    multiple: int  # K is padded to a multiple of it
    changes_along_k: bool  # whether a row of the operand has more than one scale


SCALE_KINDS = {
    "tile": ScaleKind(0, (1, 128), 3, BLOCK, True),
    "block": ScaleKind(1, (128, 128), (1, 3), BLOCK, True),
    "row": ScaleKind(2, (1, None), 1, ALIGNED, False),
    "tensor": ScaleKind(3, (None, None), (0, 1), ALIGNED, False),
}
KINDS = {scale_kind.block: kind for kind, scale_kind in SCALE_KINDS.items()}
GATHERED_KINDS: dict[Block, str] = {(128, 128): "block", (None, None): "tensor", (16, 16): "packed"}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matmul operand: FP8 or packed values, their scales, and the kind of scales."""

    values: Tensor  # float8, contiguous, the summed dim innermost; zero in the padding
    scales: Tensor  # fp32, of the shape that `kind` has in this file's table
    kind: str  # of the scales: a key of `SCALE_KINDS`, or a packed or emulated kind
    # fp32 largest magnitudes of full matrices, [e] or [1], of an all-gathered weight
    amax: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return [values, scales], and `amax` as a third if it is not None."""
        return [self.values, self.scales, *([] if self.amax is None else [self.amax])]


class OperandPair(NamedTuple):
    """A matrix (or a matrix per expert) quantised for sums over columns and for sums over rows."""

    rows: Blocks | None  # for sums over D
    columns: Blocks | None  # for sums over T; transposed


def get_values_and_scales(operand: Blocks | None) -> tuple[Tensor | None, Tensor | None]:
    """Return an operand's (values, scales), or (None, None) if `operand` is None."""
    return (None, None) if operand is None else (operand.values, operand.scales)


def _make_blocks(tensors: Iterable[Tensor], scale_kind: Any) -> Blocks:
    """Rebuild an operand from `Blocks.tensors`' result and the kind of its scales."""
    values, scales, *amax = tensors
    return Blocks(values, scales, scale_kind, *amax)


# Tensors that are saved for backward are found through pytree.
register_pytree_node(Blocks, lambda b: (b.tensors(), b.kind), _make_blocks)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than n."""
    return cdiv(n, multiple) * multiple


def compute_operand_shape(num_rows: int, num_columns: int, scale_kind: str) -> tuple[int, int]:
    """Return [rows, columns] padded to the (M, K) that FP8 matmuls of this `scale_kind` support."""
    return round_up(num_rows, ALIGNED), round_up(num_columns, SCALE_KINDS[scale_kind].multiple)


def compute_scales_shape(M: int, K: int, scale_kind: str) -> tuple[int, int]:
    """Return the shape in memory of the scales of an operand [M, K] of this `scale_kind`."""
    if scale_kind == "tile":
        return cdiv(K, BLOCK), M
    if scale_kind == "block":
        return cdiv(M, BLOCK), round_up(cdiv(K, BLOCK), SCALE_COLUMNS)
    return (M, 1) if scale_kind == "row" else (1, 1)


def compute_amax_ref(x: Tensor) -> Tensor:
    """Return the largest magnitude of x as fp32 [1]; NaN is ignored, and no elements give 0."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device, dtype=torch.float32)
    return abs_without_nan_ref(x.float()).amax().reshape(1)


def quantise_ref(
    x: Tensor,
    amax_dim: int | tuple[int, ...],
    power_of_two: bool,
    fp8_format: str = "e4m3",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FP8 values of x and fp32 scales, from `amax` or the amax of x over `amax_dim`."""
    x = x.float()
    amax = abs_without_nan_ref(x).amax(amax_dim, keepdim=True) if amax is None else amax
    scales, inverse = compute_block_scale_ref(amax, power_of_two, LARGEST[fp8_format])
    return encode_fp8_ref(x, inverse, fp8_format), scales


def encode_fp8_ref(x: Tensor, inverse_scales: Tensor, fp8_format: str) -> Tensor:
    """Return fp32 x * inverse_scales, saturated, as FP8; infinities become NaN."""
    values = x * inverse_scales
    del inverse_scales  # which may be as large
    values.clamp_(-LARGEST[fp8_format], LARGEST[fp8_format]).masked_fill_(x.isinf(), torch.nan)
    return values.to(DTYPES[fp8_format])


def update_amax_ref_(x: Tensor, running_amax: Tensor) -> None:
    """Set `running_amax`, fp32 [1], to the maximum of itself and the finite magnitudes of x."""
    new_amax = compute_amax_ref(torch.where(x.isinf(), 0, x))
    running_amax.copy_(torch.maximum(running_amax, new_amax))


def cast_ref(
    x_TD: Tensor, amax: Tensor | None, scale_kind: str, fp8_format: str, power_of_two: bool
) -> Blocks:
    """Quantise a matrix to the FP8 operand summed over its columns, in plain PyTorch.

    For kind "tensor", the largest entry of `amax`, fp32 [n], gives the scale; None = x's amax.
    """
    T, D = x_TD.shape
    M, K = compute_operand_shape(T, D, scale_kind)
    M128, B = round_up(M, BLOCK), K // BLOCK
    x = pad(x_TD.float(), (0, K - D, 0, M128 - T))
    if SCALE_KINDS[scale_kind].changes_along_k:
        x = x.view(M128 // BLOCK, BLOCK, B, BLOCK)
    elif scale_kind == "tensor":
        amax = (compute_amax_ref(x_TD) if amax is None else amax).amax().reshape(1, 1)
    elif not K:
        amax = x.new_zeros(M128, 1)
    values, scales = quantise_ref(x, SCALE_KINDS[scale_kind].dims, power_of_two, fp8_format, amax)
    if scale_kind == "tile":
        scales = scales.reshape(M128, B)[:M].T.contiguous()
    elif scale_kind == "block":
        scales = pad(scales[:, 0, :, 0], (0, -B % SCALE_COLUMNS))
    elif scale_kind == "row":
        scales = scales[:M]
    return Blocks(values.view(M128, K)[:M], scales, scale_kind)


def matmul_ref(a: Blocks, b: Blocks) -> Tensor:
    """Return a @ b^T in fp32, for a dense operand a [M, K] and b [N, K].

    If scales change along K, each 128 columns are multiplied separately, then added.
    """
    a_MK, b_NK = a.values.float(), b.values.float()
    (M, K), N = a_MK.shape, b_NK.shape[0]
    a_scales = _expand_scales(_view_scales_by_rows(a), a.kind, M, K)
    b_scales = _expand_scales(_view_scales_by_rows(b), b.kind, N, K)
    step = BLOCK if SCALE_KINDS[a.kind].changes_along_k else max(K, 1)
    out_MN = torch.zeros(M, N, device=a_MK.device, dtype=torch.float32)
    for k in range(0, K, step):
        product_MN = a_MK[:, k : k + step] @ b_NK[:, k : k + step].T
        out_MN += product_MN * a_scales[:, k, None] * b_scales[:, k]
    return out_MN


def _view_scales_by_rows(operand: Blocks) -> Tensor:
    """View scales with the operand's rows, or blocks of 128 rows, as dim 0, without padding."""
    if operand.kind == "tile":
        return operand.scales.T
    if operand.kind == "block":
        return operand.scales[:, : operand.values.shape[1] // BLOCK]
    return operand.scales


def _expand_scales(scales: Tensor, scale_kind: str, M: int, K: int) -> Tensor:
    """Expand the result of `_view_scales_by_rows` to one scale per element, [M, K]."""
    if scale_kind == "block":
        scales = scales.repeat_interleave(BLOCK, 0)[:M]
    changes_along_k = SCALE_KINDS[scale_kind].changes_along_k
    return scales.repeat_interleave(BLOCK, 1) if changes_along_k else scales.expand(M, K)
