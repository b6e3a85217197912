"""Cross-entropy of logits and its gradient: two reads of a row, one write.

    loss          = sum over counted rows of log(sum over v of exp(x[c, v])) - x[c, label[c]]
    d_logits[c,v] = exp(x[c, v]) / (sum over v of exp(x[c, v])) - (v == label[c]), rounded once

Letters: C rows (tokens of one chunk), V vocabulary.

One program handles one row. The first pass keeps a maximum and a sum of exponentials for each lane
(online softmax, arXiv:1805.02867), and reduces the lanes at the end of the row. The second pass
writes the gradient. A row with the ignored label is not read. If each rank has some columns of a
row, `softmax_statistics` and `softmax_gradient_` are the two passes, and the ranks combine the
statistics between the passes. The `_blocks` functions round the gradient to FP8, with a scale per
128 columns.

Budget, with b bytes per logit and g per gradient: C * V * (2b + g) bytes moved, because the second
pass reads long rows from memory again; 2 * C * V exponentials. Allocates C * V * g, or nothing if
both have one dtype: then the gradient replaces the logits.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import KERNEL_DTYPES, can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.ops import Op
from moecore.kernels.rows.e4m3 import abs_without_nan, compute_block_scale, to_e4m3
from moecore.kernels.rows.quantised import make_empty_row_blocks, quantise_row_blocks_ref
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import tl, triton

IGNORE_INDEX = -100  # the label of rows that are not counted
IGNORED = tl.constexpr(IGNORE_INDEX)
MAX_LANES = 4096
THREAD_LANES = 4  # lanes of one thread
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32, where -inf would make inf - inf


def cross_entropy_ref_(
    logits_CV: Tensor, labels_C: Tensor, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Compute `cross_entropy_` in plain PyTorch; overwrites fp32 and fp64 logits."""
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    ignored_C1 = (labels_C == IGNORE_INDEX)[:, None]
    # Only the ignored label is replaced: any other one out of range fails in gather.
    labels_C1 = labels_C[:, None].masked_fill(ignored_C1, 0)
    counts_C1 = (~ignored_C1).to(logits_CV.dtype)
    # A NaN or inf of an ignored row times the factor 0 would be NaN.
    logits_CV.masked_fill_(ignored_C1, 0)
    logits_CV.sub_(logits_CV.amax(1, keepdim=True))
    label_logits_C1 = logits_CV.gather(1, labels_C1)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    loss = ((sums_C1.log() - label_logits_C1) * counts_C1).sum()
    if grad_dtype is None:
        return loss, None
    logits_CV.mul_(counts_C1 / sums_C1).scatter_add_(1, labels_C1, -counts_C1)
    return loss, logits_CV.to(grad_dtype)


class CrossEntropyConstants(NamedTuple):
    """Compile-time constants: V vocabulary columns, read in steps of LANES * WIDTH columns."""

    V: int
    LANES: int
    WIDTH: int
    POWER_OF_TWO: bool  # of the scales of an FP8 gradient


@cache
def _make_constants(num_columns: int, power_of_two: bool = True) -> dict[str, Any]:
    """Return the argument CONST and the launch option num_warps for rows of `num_columns`."""
    # Four fp32 neighbours are one load of 16 bytes, which rows of other lengths are not aligned to.
    width = 4 if num_columns % 4 == 0 else 1
    lanes = min(MAX_LANES, max(32, next_power_of_2(cdiv(num_columns, width))))
    constants = CrossEntropyConstants(num_columns, lanes, width, power_of_two)
    return {"CONST": constants, "num_warps": max(1, lanes // (32 * THREAD_LANES))}


@triton.jit
def _make_first_columns(CONST: tl.constexpr):
    """Return column indices, int32 [LANES, WIDTH], that the first loop iteration of a row reads."""
    lanes = tl.arange(0, CONST.LANES)[:, None] * CONST.WIDTH
    return lanes + tl.arange(0, CONST.WIDTH)[None, :]


@triton.jit
def _reduce_max_and_sum(logits_row, CONST: tl.constexpr):
    """Return max(x), and the sum of exp(x - max(x)): NaN for a NaN or +inf in the row."""
    V: tl.constexpr = CONST.V
    LANES: tl.constexpr = CONST.LANES
    columns = _make_first_columns(CONST)
    high = tl.full([LANES], LOWEST, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * CONST.WIDTH):
        at = start + columns
        x = tl.load(logits_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(x, axis=1))
        sums = sums * tl.exp(high - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
        high = higher
    row_high = tl.max(high, axis=0)
    return row_high, tl.sum(sums * tl.exp(high - row_high), axis=0)


@triton.jit
def _write_gradient(
    logits_row,  # pointer to [V]
    d_logits_row,  # [V], out; logits_row itself or other memory; e4m3 as uint8 with scales
    scales,  # fp32 [V / 128, stride], out; None = the gradient is not quantised
    row_idx,  # column of `scales` that is written
    scales_stride,
    label,
    row_max,  # max(x), fp32
    inverse_exp_sum,  # 1 / the sum of exp(x - row_max), fp32
    CONST: tl.constexpr,
):
    """Write softmax(x) - (column == label), the gradient of one row's logits x, to d_logits_row."""
    V: tl.constexpr = CONST.V
    STEP: tl.constexpr = CONST.LANES * CONST.WIDTH
    columns, label = _make_first_columns(CONST), label.to(tl.int32)
    for start in range(0, V, STEP):
        if scales is None:
            at = start + columns
        else:
            block = start // 128 + tl.arange(0, STEP // 128)
            at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(
            logits_row + at, mask=at < V, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        d = tl.exp(x - row_max) * inverse_exp_sum
        d = tl.where(at == label, d - 1.0, d)
        if scales is None:
            d = d.to(d_logits_row.dtype.element_ty)
        else:
            amax = tl.max(abs_without_nan(d), axis=1)
            of_blocks, inverse = compute_block_scale(amax, CONST.POWER_OF_TWO)
            tl.store(scales + block * scales_stride + row_idx, of_blocks, mask=block < V // 128)
            d = to_e4m3(d * inverse[:, None])
        tl.store(d_logits_row + at, d, mask=at < V, eviction_policy="evict_first")


@triton.jit
def _write_zeros(d_logits_row, scales, row_idx, scales_stride, CONST: tl.constexpr):
    """Write zeros as the gradient of an ignored row, and 2^-126 as its FP8 scales if any."""
    STEP: tl.constexpr = CONST.LANES * CONST.WIDTH
    columns = _make_first_columns(CONST)
    zeros = tl.full([CONST.LANES, CONST.WIDTH], 0, d_logits_row.dtype.element_ty)
    for start in range(0, CONST.V, STEP):
        at = start + columns
        tl.store(d_logits_row + at, zeros, mask=at < CONST.V, eviction_policy="evict_first")
        if scales is not None:
            block = start // 128 + tl.arange(0, STEP // 128)
            minima = tl.full([STEP // 128], 1.1754943508222875e-38, tl.float32)
            tl.store(scales + block * scales_stride + row_idx, minima, mask=block < CONST.V // 128)


@triton.jit
def _load_label_logit(logits_row, label, V: tl.constexpr):
    """Return (the row's logit in column `label`, True); (0, False) if `label` is not in [0, V)."""
    inside = (label >= 0) & (label < V)
    return tl.load(logits_row + label, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit(do_not_specialize=["scales_stride"])
def _cross_entropy_kernel(
    logits,  # [C, V], contiguous
    labels,  # [C] int64
    losses,  # [C] fp32, out
    d_logits,  # [C, V], contiguous, out: logits itself or other memory; None = no gradient
    scales,  # fp32 [V / 128, stride], out; None = the gradient is not quantised
    scales_stride,  # C rounded up
    CONST: tl.constexpr,
):
    """Write one row's loss and, unless `d_logits` is None, its gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    x_row = logits + row * CONST.V
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if d_logits is not None:
            _write_zeros(d_logits + row * CONST.V, scales, row, scales_stride, CONST)
    else:
        # Before the sums, where threads meet: in place, the second pass overwrites the logit.
        label_logit, inside = _load_label_logit(x_row, label, CONST.V)
        high, total = _reduce_max_and_sum(x_row, CONST)
        # A release build has no device asserts: a label that does not exist shows as NaN.
        total = tl.where(inside, total, float("nan"))
        tl.store(losses + row, tl.log(total) - (label_logit - high))
        if d_logits is not None:
            d_row, scale = d_logits + row * CONST.V, 1.0 / total
            _write_gradient(x_row, d_row, scales, row, scales_stride, label, high, scale, CONST)


@triton.jit
def _row_statistics_kernel(logits, labels, statistics, CONST: tl.constexpr):
    """Write a row's `softmax_statistics`: maximum, sum of exp, and logit in the label's column."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    high, total, label_logit = 0.0, 1.0, 0.0
    if label != IGNORED:
        x_row = logits + row * CONST.V
        label_logit, _ = _load_label_logit(x_row, label, CONST.V)
        high, total = _reduce_max_and_sum(x_row, CONST)
    tl.store(statistics + row * 3, high)
    tl.store(statistics + row * 3 + 1, total)
    tl.store(statistics + row * 3 + 2, label_logit)


@triton.jit(do_not_specialize=["scales_stride"])
def _softmax_gradient_kernel(
    logits,  # [C, V], contiguous
    labels,  # [C] int64
    row_max,  # [C] fp32, the maximum of the full row
    exp_sums,  # [C] fp32, the sum of exp(x - row_max)
    d_logits,  # [C, V], contiguous, out: logits itself or other memory
    scales,  # fp32 [V / 128, stride], out; None = the gradient is not quantised
    scales_stride,  # C rounded up
    CONST: tl.constexpr,
):
    """Write one row's gradient softmax(x) - (column == label) from its maximum and exp sum."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    d_row = d_logits + row * CONST.V
    if label == IGNORED:
        _write_zeros(d_row, scales, row, scales_stride, CONST)
    else:
        x_row = logits + row * CONST.V
        high, scale = tl.load(row_max + row), 1.0 / tl.load(exp_sums + row)
        _write_gradient(x_row, d_row, scales, row, scales_stride, label, high, scale, CONST)


def _launch_cross_entropy(
    logits_CV: Tensor,
    labels_C: Tensor,
    d_logits_CV: Tensor | None,
    scales: Tensor | None,
    in_place: bool,
    power_of_two: bool,
) -> Tensor:
    """Return fp32 losses [C]; write the gradient to the logits (`in_place`) or d_logits_CV."""
    C, V = logits_CV.shape
    losses_C = logits_CV.new_empty(C, dtype=torch.float32)
    # A 16-bit gradient could lie in the memory of its fp32 logits. That would take a barrier per
    # tile, since threads overwrite what others read, and leave the products after it rows of 2 * V,
    # for 2 * C * V bytes less. It has its own memory instead.
    d, stride = logits_CV if in_place else d_logits_CV, 0 if scales is None else scales.stride(0)
    args = (logits_CV, labels_C, losses_C, d, scales, stride)
    launch(_cross_entropy_kernel, C, *args, **_make_constants(V, power_of_two))
    return losses_C


_cross_entropy_op = Op(
    "cross_entropy_",
    _launch_cross_entropy,
    lambda logits_CV, *_: logits_CV.new_empty(logits_CV.shape[0], dtype=torch.float32),
    mutates_args=("logits_CV", "d_logits_CV", "scales"),
)


def cross_entropy_(
    logits_CV: Tensor, labels_C: Tensor, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return the loss summed over rows, and the gradient of logits. Deterministic, no host sync.

    Args:
        logits_CV: [tokens, vocabulary], any float dtype, overwritten: the gradient may use its
            memory. Copied when not contiguous.
        labels_C: int64 in [0, V), or -100 = ignored: a row that is not read and has loss and
            gradient 0. Other labels give NaN in the loss and gradient's row; plain PyTorch raises
            an error.
        grad_dtype: dtype of the gradient; None = no gradient.

    Returns:
        The loss, an fp32 scalar (fp64 for fp64 logits), and the gradient [C, V], contiguous. A NaN
        or +inf in a counted row makes the loss and that row of the gradient NaN.
    """
    kernel_dtypes = grad_dtype is None or grad_dtype in KERNEL_DTYPES
    if not (kernel_dtypes and logits_CV.dtype in KERNEL_DTYPES and can_use_kernel(logits_CV)):
        return cross_entropy_ref_(logits_CV, labels_C, grad_dtype)
    logits_CV, labels_C = logits_CV.contiguous(), labels_C.contiguous()
    if grad_dtype == logits_CV.dtype:
        return _cross_entropy_op(logits_CV, labels_C, None, None, True, True).sum(), logits_CV
    d_logits_CV = None if grad_dtype is None else torch.empty_like(logits_CV, dtype=grad_dtype)
    losses_C = _cross_entropy_op(logits_CV, labels_C, d_logits_CV, None, False, True)
    return losses_C.sum(), d_logits_CV


def cross_entropy_blocks(
    logits_CV: Tensor, labels_C: Tensor, *, power_of_two: bool
) -> tuple[Tensor, Blocks]:
    """Return the loss summed over rows, and its FP8 gradient: one scale per 128 columns of a row.

    Logits are contiguous bf16, fp16 or fp32, with V a multiple of 128, and are not changed.
    """
    if not can_use_kernel(logits_CV):
        loss, d_logits_CV = cross_entropy_ref_(logits_CV.float().clone(), labels_C, torch.float32)
        assert d_logits_CV is not None
        return loss, quantise_row_blocks_ref(d_logits_CV, power_of_two)
    d = make_empty_row_blocks(logits_CV, *logits_CV.shape)
    out = (d.values.view(torch.uint8), d.scales, False, power_of_two)
    return _cross_entropy_op(logits_CV, labels_C.contiguous(), *out).sum(), d


def softmax_statistics_ref(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Compute `softmax_statistics` in plain PyTorch, in fp32 or fp64."""
    x_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    x_CV = x_CV.masked_fill((labels_C == IGNORE_INDEX)[:, None], 0)
    high_C1 = x_CV.amax(1, keepdim=True)
    total_C = (x_CV - high_C1).exp().sum(1).masked_fill(labels_C == IGNORE_INDEX, 1)
    label_logits_C1 = x_CV.gather(1, labels_C.clamp(0, x_CV.shape[1] - 1)[:, None])
    inside_C = (labels_C >= 0) & (labels_C < x_CV.shape[1])
    return torch.stack((high_C1[:, 0], total_C, label_logits_C1[:, 0].masked_fill(~inside_C, 0)), 1)


def softmax_gradient_ref_(
    logits_CV: Tensor, labels_C: Tensor, row_max_C: Tensor, sums_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `softmax_gradient_` in plain PyTorch; overwrites fp32 and fp64 logits."""
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    inside_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
    d_logits_CV = logits_CV.sub_(row_max_C[:, None]).exp_().div_(sums_C[:, None])
    targets_C1 = labels_C.clamp(0, logits_CV.shape[1] - 1)[:, None]
    d_logits_CV.scatter_add_(1, targets_C1, -inside_C[:, None].to(d_logits_CV.dtype))
    return d_logits_CV.masked_fill_((labels_C == IGNORE_INDEX)[:, None], 0).to(dtype)


def _launch_softmax_statistics(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Compute `softmax_statistics` of contiguous tensors by the kernel: fp32 [tokens, 3]."""
    C, V = logits_CV.shape
    statistics_C3 = logits_CV.new_empty(C, 3, dtype=torch.float32)
    launch(_row_statistics_kernel, C, logits_CV, labels_C, statistics_C3, **_make_constants(V))
    return statistics_C3


_row_statistics_op = Op(
    "softmax_statistics",
    _launch_softmax_statistics,
    lambda logits_CV, _: logits_CV.new_empty(logits_CV.shape[0], 3, dtype=torch.float32),
)


def _launch_softmax_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    row_max_C: Tensor,
    sums_C: Tensor,
    d_logits_CV: Tensor | None,
    scales: Tensor | None,
    power_of_two: bool,
) -> None:
    """Write each row's gradient to d_logits_CV; None = overwrite the logits."""
    C, V = logits_CV.shape
    d, stride = d_logits_CV, 0 if scales is None else scales.stride(0)
    d = logits_CV if d is None else d
    args = (logits_CV, labels_C, row_max_C, sums_C, d, scales, stride)
    launch(_softmax_gradient_kernel, C, *args, **_make_constants(V, power_of_two))


_softmax_gradient_op = Op(
    "softmax_gradient_",
    _launch_softmax_gradient,
    lambda *_: None,
    mutates_args=("logits_CV", "d_logits_CV", "scales"),
)


def softmax_statistics(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Return softmax statistics of each row's columns on this rank; the caller combines ranks.

    The result is [C, 3], fp32 (fp64 for fp64): maximum, sum of exp(x - maximum), and the label's
    logit (0 if it is on another rank). A row with label -100 is not read, and gives 0, 1, 0.
    """
    if logits_CV.dtype not in KERNEL_DTYPES or not can_use_kernel(logits_CV):
        return softmax_statistics_ref(logits_CV, labels_C)
    return _row_statistics_op(logits_CV.contiguous(), labels_C.contiguous())


def softmax_gradient_(
    logits_CV: Tensor, labels_C: Tensor, row_max_C: Tensor, sums_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient exp(x - row_max) / sum - (column == label), [C, V] in `dtype`.

    Logits are overwritten. row_max_C and sums_C are from `softmax_statistics`, combined over ranks.
    """
    kernel_dtypes = logits_CV.dtype in KERNEL_DTYPES and dtype in KERNEL_DTYPES
    if not (kernel_dtypes and can_use_kernel(logits_CV)):
        return softmax_gradient_ref_(logits_CV, labels_C, row_max_C, sums_C, dtype)
    logits_CV = logits_CV.contiguous()
    d_logits_CV = None if dtype == logits_CV.dtype else torch.empty_like(logits_CV, dtype=dtype)
    labels_C, row_max_C, sums_C = (t.contiguous() for t in (labels_C, row_max_C, sums_C))
    _softmax_gradient_op(logits_CV, labels_C, row_max_C, sums_C, d_logits_CV, None, True)
    return logits_CV if d_logits_CV is None else d_logits_CV


def softmax_gradient_blocks(
    logits_CV: Tensor, labels_C: Tensor, row_max_C: Tensor, sums_C: Tensor, *, power_of_two: bool
) -> Blocks:
    """Return the gradient of `softmax_gradient_` in FP8, with a scale per 128 columns of a row."""
    numbers = (labels_C, row_max_C, sums_C)
    if not can_use_kernel(logits_CV):
        d_logits_CV = softmax_gradient_ref_(logits_CV.float().clone(), *numbers, torch.float32)
        return quantise_row_blocks_ref(d_logits_CV, power_of_two)
    d = make_empty_row_blocks(logits_CV, *logits_CV.shape)
    out = (d.values.view(torch.uint8), d.scales, power_of_two)
    _softmax_gradient_op(logits_CV, *(x_C.contiguous() for x_C in numbers), *out)
    return d
