"""FP8 operands of a dense product: one matrix, quantised along rows, along columns, or both.

FP8 tensor cores need the summed dim innermost. The gradients of a linear sum over another dim than
its forward, so they need the transposed copy. `scaling.py` defines the kinds and layouts of scales,
and has the reference.

    kind      kernels
    "tile"    one: a tile of x has all elements of its scales
    "block"   one
    "tensor"  the largest magnitudes of parts of x, and a cast that reads them; with a given `amax`
              only the cast
    "row"     only rows: one, which reads full rows. Otherwise the largest magnitudes of rows and
              columns, and a cast

Letters: T rows and D columns of the matrix; M, K rows and columns of the operand summed over D, m,
k of the transposed one. Bytes moved with b per element: T * D * (b + 1 per operand), plus scales,
and T * D * b again if a kernel computes the largest magnitudes.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.torch_private import is_plain_eager
from moecore.kernels.common import KERNEL_DTYPES, can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.ops import Op, is_plain
from moecore.kernels.rows.cast_kernel import (
    amax_kernel,
    amax_parts_kernel,
    cast_kernel,
    cast_rows_kernel,
)
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.scaling import (
    ALIGNED,
    DTYPES,
    SCALE_KINDS,
    Blocks,
    OperandPair,
    cast_ref,
    compute_amax_ref,
    compute_operand_shape,
    compute_scales_shape,
    get_values_and_scales,
    round_up,
    update_amax_ref_,
)
from moecore.kernels.triton_api import INTERPRET

PROGRAM = {"num_warps": 8, "maxnreg": 128}  # two programs on a multiprocessor
WIDE_PROGRAM = {"num_warps": 8}  # where that would spill
ROW_ELEMENTS = 8192  # elements of full rows that a program has at a time
PART_ROWS, PART_COLUMNS = 16, 512  # tile of x whose largest magnitude a program finds at a time
MAX_PARTS = 512  # parts whose largest magnitudes a program of a cast reads


class _CastOptions(NamedTuple):
    """The arguments of `quantise_matrix` that are not tensors."""

    scale_kind: str
    fp8_format: str
    power_of_two: bool
    rowwise: bool
    columnwise: bool


Parts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@functools.lru_cache(4096)
def _compute_shapes(T: int, D: int, scale_kind: str) -> tuple[tuple[int, int], ...]:
    """Return shapes of values and scales of a [T, D] matrix, then of its transpose's."""
    shapes = [compute_operand_shape(*sizes, scale_kind) for sizes in ((T, D), (D, T))]
    return tuple(x for s in shapes for x in (s, compute_scales_shape(*s, scale_kind)))


def _launch_quantise(
    x: Tensor, amax: Tensor | None, new_amax: Tensor | None, options: _CastOptions
) -> Parts:
    """Return values, scales, transposed values and their scales; None = not requested."""
    kind, fmt, power_of_two, rows, columns = options
    if not has_cast_kernel(x) or not (rows or columns or new_amax is not None):
        return _quantise_matrix_ref(x, amax, new_amax, options)
    x = _make_rows_contiguous(x)
    D = x.shape[-1]
    T, device, dtype = x.numel() // D, x.device, DTYPES[fmt]
    shapes = _compute_shapes(T, D, kind)
    outputs: list[Tensor | None] = [None] * 4
    for i in ((0,) if rows else ()) + ((2,) if columns else ()):
        outputs[i] = torch.empty(shapes[i], dtype=dtype, device=device)
        outputs[i + 1] = torch.empty(shapes[i + 1], dtype=torch.float32, device=device)
    targets = [view_as_bytes(t) for t in outputs] if INTERPRET else outputs
    stride = x.stride(0) if x.ndim == 2 else D
    size, is_e5m2 = (T, D, stride), fmt == "e5m2"
    if kind == "row" and not columns and new_amax is None:
        assert outputs[0] is not None
        row_args = (x, None, targets[0], targets[1], *size, 0)
        launch_cast_rows(*row_args, E5M2=is_e5m2, POWER_OF_TWO=power_of_two)
        return tuple(outputs)  # type: ignore[return-value]
    has_amax, parts = amax is not None, 1
    if kind == "row":
        amax = torch.zeros(T * rows + D, device=device, dtype=torch.float32)
        args, grid = (x, None, amax, 1, T, *size), cdiv(T, BLOCK) * cdiv(D, BLOCK)
        launch(amax_kernel, grid, *args, ROWS=rows, E_POW2=1, BLOCK=BLOCK, num_warps=8)
    elif kind == "tensor":
        amax = _launch_amax(x, None) if amax is None else amax
        parts = amax.shape[0]
    (M, K), _, (m, k), _ = shapes
    is_narrow = power_of_two and kind != "block" and new_amax is None
    launch(
        cast_kernel,
        cdiv(max(M, k), BLOCK) * cdiv(max(K, m), BLOCK),
        *(x, amax, new_amax, *targets, *size),
        KIND=SCALE_KINDS[kind].code,
        PARTS=parts,
        HAS_AMAX=has_amax,
        E5M2=is_e5m2,
        POWER_OF_TWO=power_of_two,
        BLOCK=BLOCK,
        **(PROGRAM if is_narrow else WIDE_PROGRAM),
    )
    return tuple(outputs)  # type: ignore[return-value]


def _make_rows_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy, with stride 1 in the last dim; rows of a matrix may be strided."""
    if x.ndim != 2:
        if x.is_contiguous():
            return x
        x = x.detach().reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.detach().contiguous()


def view_as_bytes(t: Tensor | None) -> Tensor | None:
    """Return FP8 as uint8, which Triton's interpreter needs; None and fp32 do not change."""
    return t if t is None or t.dtype == torch.float32 else t.view(torch.uint8)


def launch_cast_rows(
    x_TD: Tensor,
    ends_e: Tensor | None,
    values: Tensor | None,
    scales: Tensor | None,
    T: int,
    D: int,
    row_stride: int,
    num_experts: int,
    *,
    E5M2: bool,
    POWER_OF_TWO: bool,
) -> None:
    """Quantise each row of x [T, D] with one scale per row, by a kernel, to `values` and `scales`.

    `ends_e` is the running sum of the experts' row counts, and rows from ends_e[-1] on are skipped.
    None = all rows; `values` and `scales` then have T padded to a multiple of 16.
    """
    columns = min(next_power_of_2(round_up(D, ALIGNED)), ROW_ELEMENTS)
    rows = ROW_ELEMENTS // columns
    launch(
        cast_rows_kernel,
        cdiv(round_up(T, ALIGNED), rows),
        *(x_TD, ends_e, values, scales, T, D, row_stride, num_experts),
        E5M2=E5M2,
        POWER_OF_TWO=POWER_OF_TWO,
        ROWS=rows,
        COLUMNS=columns,
        FITS=columns >= D,
        num_warps=8,
    )


def has_cast_kernel(x: Tensor) -> bool:
    """Return whether Triton kernels can quantise x: device and dtype match, and x is not empty."""
    return can_use_kernel(x) and x.numel() > 0 and x.dtype in KERNEL_DTYPES


def _quantise_matrix_ref(
    x: Tensor, amax: Tensor | None, new_amax: Tensor | None, options: _CastOptions
) -> Parts:
    """Compute `_launch_quantise` in plain PyTorch."""
    kind, fmt, power_of_two, rows, columns = options
    x_TD = x.detach().reshape(-1, x.shape[-1])
    if new_amax is not None:
        update_amax_ref_(x_TD, new_amax)
    outputs: list[Tensor | None] = []
    for is_needed, part in ((rows, x_TD), (columns, x_TD.T)):
        operand = cast_ref(part.contiguous(), amax, kind, fmt, power_of_two) if is_needed else None
        outputs += get_values_and_scales(operand)
    return tuple(outputs)  # type: ignore[return-value]


def _make_empty_outputs(
    x: Tensor, amax: Tensor | None, new_amax: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """Return uninitialised outputs of `_launch_quantise` for tracing; [0] if not requested.

    `options` are the fields of `_CastOptions`.
    """
    scale_kind, fp8_format, _, rowwise, columnwise = options
    T, D, outputs = math.prod(x.shape[:-1]), x.shape[-1], []
    for is_needed, shape in ((rowwise, (T, D)), (columnwise, (D, T))):
        M, K = compute_operand_shape(*shape, scale_kind)
        sizes = ((M, K), compute_scales_shape(M, K, scale_kind)) if is_needed else ((0,), (0,))
        outputs.append(x.new_empty(sizes[0], dtype=DTYPES[fp8_format]))
        outputs.append(x.new_empty(sizes[1], dtype=torch.float32))
    return tuple(outputs)


def _cast_without_none(
    x: Tensor, amax: Tensor | None, new_amax: Tensor | None, *options: Any
) -> Any:
    """Return the outputs of `_launch_quantise`; empty tensors replace None, for a custom op."""
    of_none = (DTYPES[options[1]], torch.float32)
    parts = enumerate(_launch_quantise(x, amax, new_amax, _CastOptions(*options)))
    return tuple(x.new_empty(0, dtype=of_none[i % 2]) if t is None else t for i, t in parts)


def _count_parts(T: int, D: int, num_matrices: int) -> int:
    """Return into how many parts `compute_amax_parts` divides a [T, D] matrix, a power of two."""
    tiles = cdiv(T, PART_ROWS) * cdiv(D, PART_COLUMNS)
    return next_power_of_2(min(tiles, max(MAX_PARTS // num_matrices, 1)))


def compute_amax_parts(
    x: Tensor, ends_e: Tensor | None = None, past_amax: Tensor | None = None
) -> Tensor:
    """Divide a matrix into n parts; return the largest magnitude in each part, fp32 [n].

    x is [T, D], or [experts, T, D] with the result [experts, n]; all rows have one stride. NaN is
    ignored. `ends_e` is the running sum of row counts; rows from ends_e[-1] on are not read. If
    `past_amax`, fp32 [1], is not None or 0, all results are `past_amax`.
    """
    (T, D), matrices = x.shape[-2:], x.shape[:-2]
    num_matrices = matrices[0] if matrices else 1
    n = _count_parts(T, D, num_matrices)
    parts = torch.empty((*matrices, n), dtype=torch.float32, device=x.device)
    num_experts = 0 if ends_e is None else ends_e.shape[0]
    args = (x, ends_e, past_amax, parts, T, D, x.stride(-2), num_experts)
    sizes = dict(PARTS=n, ROWS=PART_ROWS, COLUMNS=PART_COLUMNS, num_warps=8)
    launch(amax_parts_kernel, (n, num_matrices), *args, **sizes)
    return parts


def _launch_amax(x: Tensor, past_amax: Tensor | None) -> Tensor:
    """Compute `compute_amax` without autograd; one part if no kernel supports x."""
    x_TD = x if x.ndim == 2 else x.detach().reshape(-1, x.shape[-1])
    if has_cast_kernel(x):
        return compute_amax_parts(_make_rows_contiguous(x_TD), None, past_amax)
    return choose_amax_ref(past_amax, compute_amax_ref(x_TD.detach()))


def choose_amax_ref(past_amax: Tensor | None, amax: Tensor) -> Tensor:
    """Return `past_amax`, the amax of earlier steps, or `amax` if `past_amax` is None or 0."""
    return amax if past_amax is None else torch.where(past_amax > 0, past_amax, amax)


def _make_empty_amax(x: Tensor, past_amax: Tensor | None) -> Tensor:
    """Return the uninitialised result of `compute_amax`."""
    n = _count_parts(math.prod(x.shape[:-1]), x.shape[-1], 1) if has_cast_kernel(x) else 1
    return x.new_empty(n, dtype=torch.float32)


# Two operations, because a compiler computes one that mutates nothing once for equal arguments.
_SCHEMA = (
    "(Tensor x, Tensor? amax{}, str scale_kind, str fp8_format, bool power_of_two, bool rowwise, "
    "bool columnwise) -> (Tensor, Tensor, Tensor, Tensor)"
)
_cast_op = Op(
    "fp8_cast",
    lambda x, amax, *options: _cast_without_none(x, amax, None, *options),
    lambda x, amax, *options: _make_empty_outputs(x, amax, None, *options),
    schema=_SCHEMA.format(""),
)
_RECORD_SCHEMA = _SCHEMA.format(", Tensor(a!) new_amax")
_cast_and_record_op = Op(
    "fp8_cast_and_record_amax",
    _cast_without_none,
    _make_empty_outputs,
    mutates_args=("new_amax",),
    schema=_RECORD_SCHEMA,
)
_amax_op = Op("fp8_amax", _launch_amax, _make_empty_amax)


def quantise_matrix(
    x: Tensor,
    scale_kind: str,
    fp8_format: str = "e4m3",
    *,
    power_of_two: bool,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> OperandPair:
    """Quantise a matrix to the operands of FP8 matmuls. Not differentiable, no host sync.

    Args:
        x: [..., D], whose T rows are a matrix; bf16, fp16, fp32 or fp64.
        scale_kind: one scale per "tile" (1 x 128), "block" (128 x 128), "row" or "tensor".
        fp8_format: "e4m3" or "e5m2".
        power_of_two: whether scales are rounded up to powers of two.
        rowwise: whether to make the operand [T, D] that is summed over D.
        columnwise: whether to make the transposed operand [D, T] that is summed over T.
        amax: fp32 [n], whose largest entry gives the scale of "tensor"; None = magnitudes of x.
        new_amax: fp32 [1], raised in place to the largest finite magnitude of x; None = unused.
    """
    options = _CastOptions(scale_kind, fp8_format, power_of_two, rowwise, columnwise)
    if is_plain_eager() and is_plain(x):
        parts = _launch_quantise(x, amax, new_amax, options)
    elif new_amax is None:
        parts = _cast_op(x.detach(), amax, *options)
    else:
        parts = _cast_and_record_op(x.detach(), amax, new_amax, *options)
    return OperandPair(
        Blocks(parts[0], parts[1], scale_kind) if rowwise else None,  # type: ignore[arg-type]
        Blocks(parts[2], parts[3], scale_kind) if columnwise else None,  # type: ignore[arg-type]
    )


def compute_amax(x: Tensor, past_amax: Tensor | None = None) -> Tensor:
    """Return `compute_amax_parts` of all rows of x. No autograd, no host sync."""
    parts: Tensor = _amax_op(x.detach(), past_amax)
    return parts
