"""Weight gradients of grouped products; the source rows may be gathered while they are loaded.

    out[i] = sum over the rows r of expert i of  x[row(r)]^T  y[r]      [M, N], or its transpose

row(r) is row_ids[r] where the rows are gathered, else r itself.

FC1's gradient has the source rows as x and dH as y, transposed; FC2's has dY and the activation.

Letters: S source rows, R expert rows (length), e experts, M columns of x, N columns of y.

Hopper only; elsewhere a gather and torch's grouped product. One persistent program runs on each
multiprocessor. Warps of its own fill a ring of stages: contiguous rows by TMA, rows that lie apart
by asynchronous copies. Two warp groups multiply a tile of BLOCK_M x BLOCK_N. Rows of x past the
expert's last one are made 0, so what y holds there is multiplied by 0. x takes the narrow side of
the tile: copies of 256 columns take longer than the product of a stage ("weight gradients with
gathered rows" in docs/findings/kernels.md). 2 * R * M * N floating-point operations.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.kernels.common import gluon_descriptor, has_hopper_kernels, num_sms, on_device
from moecore.kernels.grouped.skeleton import GroupedConstants
from moecore.kernels.grouped.wgrad_kernel import sm90_bf16_grouped_wgrad_kernel
from moecore.kernels.rows.scaled_cast import scaled_cast

BLOCK_M, BLOCK_N, BLOCK_K, CONSUMER_WARPS = 128, 256, 64, 8
CONST = GroupedConstants(
    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M=8, STAGES=3, PRODUCER_REGISTERS=56, PRODUCER_WARPS=4
)


def grouped_wgrad_ref(
    x: Tensor,
    y_RN: Tensor,
    offsets_e: Tensor,
    *,
    row_ids_R: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the gradients expert by expert, summed in fp32. Host sync.

    Args and Returns: as `grouped_wgrad`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x_RM = x if row_ids_R is None else x.index_select(0, row_ids_R)
    out, start = [], 0
    for stop in offsets_e.tolist():
        product = x_RM[start:stop].to(dtype).T @ y_RN[start:stop].to(dtype)
        out.append(product.T if transposed else product)
        start = stop
    return torch.stack(out).to(x.dtype)


def grouped_wgrad(
    x: Tensor,
    y_RN: Tensor,
    offsets_e: Tensor,
    *,
    row_ids_R: Tensor | None = None,
    transposed: bool = False,
    out: Tensor | None = None,
    adds: bool = False,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return each expert's sum of outer products x[row(r)] y[r]. No autograd, no host sync.

    Args:
        x: [R, M] rows in expert order, or [S, M] source rows with `row_ids_R`; bf16 or fp16,
            contiguous; M a multiple of 8.
        y_RN: [R, N] rows in expert order, dtype of x, contiguous; N a multiple of 8. Up to 63 rows
            past an expert's last one are multiplied by 0, so they must be finite: rows past
            offsets_e[-1] may not be uninitialised, and a NaN or an infinity in one expert's first
            rows reaches the expert before it too.
        offsets_e: int32 on the device, running sum of the experts' rows, at most R.
        row_ids_R: int32, the row of x that each expert row reads.
        transposed: return [e, N, M] instead of [e, M, N].
        out: fp32 or bf16, contiguous, of the output's shape, which takes the result.
        adds: whether the result is added to `out`, in fp32, without another pass.
        dtype: of a new result, fp32 or that of x (None).
        scale: of what is returned or added; multiplies the fp32 sum.

    Returns:
        [e, M, N] (or transposed), summed in fp32 and rounded once, or `out`. Zero (nothing
        added) for an expert without rows. Bit-reproducible.
    """
    if not has_hopper_kernels(x.device):
        x_RM = x if row_ids_R is None else x.index_select(0, row_ids_R)
        left, right = (y_RN, x_RM) if transposed else (x_RM, y_RN)
        return put_grad(grouped_mm(left.t(), right, offs=offsets_e), out, adds, dtype, scale)
    x, y_RN = _aligned(x), _aligned(y_RN)
    (M, N), e = (x.shape[1], y_RN.shape[1]), offsets_e.shape[0]
    shape = (e, N, M) if transposed else (e, M, N)
    out = x.new_empty(shape, dtype=dtype) if out is None else out
    if not y_RN.shape[0] or not x.shape[0]:
        return out if adds else out.zero_()
    columns = BLOCK_N * 2 // out.dtype.itemsize  # what the staging buffer has room for
    block = (1, columns, BLOCK_M) if transposed else (1, BLOCK_M, columns)
    gathers = row_ids_R is not None
    with on_device(x):
        sm90_bf16_grouped_wgrad_kernel[(num_sms(x.device),)](
            x,
            gluon_descriptor(x, (BLOCK_K, BLOCK_M)),
            gluon_descriptor(y_RN, (BLOCK_K, BLOCK_N)),
            offsets_e if row_ids_R is None else row_ids_R,
            offsets_e,
            None if adds else gluon_descriptor(out, block),
            out,
            *(e, M, N, scale),
            CONST=CONST._replace(GATHER=gathers, ADD=adds, TRANSPOSED=transposed),
            num_warps=CONSUMER_WARPS,
        )
    return out


def _aligned(x: Tensor) -> Tensor:
    """Views that start between two 16-byte lines are copied."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def put_grad(
    grad: Tensor, out: Tensor | None, adds: bool, dtype: torch.dtype | None, scale: float
) -> Tensor:
    """Return what `grouped_wgrad` returns of a gradient that stands in memory: another pass."""
    if out is not None:
        if adds:
            return out.add_(grad, alpha=scale)
        return out.copy_(put_grad(grad, None, adds, out.dtype, scale))
    if scale == 1.0 and dtype in (None, grad.dtype):
        return grad
    return scaled_cast(grad, dtype or grad.dtype, scale)
