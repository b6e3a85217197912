"""A matrix product a @ b in which the bits of a row do not depend on other rows.

Letters: B products, M rows, K terms of a sum, N columns.

Libraries choose tiles and split-K by the number of rows. Here tiles depend only on the dtype and N,
and one program sums all of K in order.

Bytes moved at least: B * (MK + KN + MN) elements; 2 * B * M * N * K floating-point operations.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import KERNEL_DTYPES, can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.triton_api import INTERPRET, tl, triton

Multiply = Callable[[Tensor, Tensor], Tensor]


def invariant_product_ref(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    dtype: torch.dtype | None = None,
    multiply: Multiply = torch.mm,
) -> Tensor:
    """Compute `invariant_product` in plain PyTorch: each call of `multiply` has one row of a."""
    if a.ndim == 3:
        addends = [None] * len(a) if addend is None else addend.expand(len(a), -1, -1)
        parts = [
            invariant_product_ref(
                a_MK, b_KN, c, beta=beta, alpha=alpha, dtype=dtype, multiply=multiply
            )
            for a_MK, b_KN, c in zip(a, b, addends, strict=True)
        ]
        return torch.stack(parts) if parts else a.new_empty(0, a.shape[1], b.shape[2], dtype=dtype)
    wide = torch.promote_types(a.dtype, torch.float32)
    b_wide = b.to(wide, copy=True, memory_format=torch.contiguous_format)  # aligned, as rows are
    rows = [
        multiply(row.to(wide, copy=True, memory_format=torch.contiguous_format), b_wide)
        for row in a.split(1)
    ]
    out = torch.cat(rows) if len(a) else a.new_empty(0, b.shape[1], dtype=wide)
    # Separate roundings: torch fuses additions only for complete vectors.
    out = out if alpha == 1 else out * alpha
    if addend is not None and beta != 0:
        out = out + (addend.to(wide) if beta == 1 else addend.to(wide) * beta)
    return out.to(dtype or a.dtype)


@triton.jit
def _add_product(a, b, total, WIDEN: tl.constexpr):
    """Return total + a @ b in fp32 without TF32. WIDEN converts bf16 first, for the interpreter."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "a_batch", "b_batch", "c_batch", "c_row", "alpha", "beta"])
def _invariant_product_kernel(
    a_ptr,  # [B, M, K]
    b_ptr,  # [B, K, N]
    c_ptr,  # [B, M, N], what is added, or None
    out_ptr,  # out, [B, M, N], contiguous
    M,
    N,
    K,
    # strides
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    c_batch,
    c_row,
    c_column,
    alpha,
    beta,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,  # row tiles that share columns of b in L2
    WIDEN: tl.constexpr,
):
    """Write one [BM, BN] tile of alpha * a @ b + beta * c, for one of the B matrices."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = GROUP_M * tiles_n
    first = tl.program_id(0) // width * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    inside = tl.program_id(0) % width
    batch = tl.program_id(1).to(tl.int64)
    m0 = (first + inside % size).to(tl.int64) * BM
    n0 = (inside // size).to(tl.int64) * BN
    m, n, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    m_ok, n_ok = m < M - m0, n < N - n0
    # Addresses of a tile are one wide number and offsets of 32 bits, which take fewer registers.
    a_tile = a_ptr + batch * a_batch + m0 * a_row
    b_tile = b_ptr + batch * b_batch + n0 * b_column
    a_at, b_at = m * a_row + k[None, :] * a_column, k[:, None] * b_row + n * b_column
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        k_ok = k < K - start
        a = tl.load(a_tile + a_at, mask=m_ok & k_ok[None, :], other=0.0)
        b = tl.load(b_tile + b_at, mask=n_ok & k_ok[:, None], other=0.0)
        total = _add_product(a, b, total, WIDEN)
        a_tile += BK * a_column
        b_tile += BK * b_row
    total *= alpha
    if c_ptr is not None:
        c_tile = c_ptr + batch * c_batch + m0 * c_row + n0 * c_column
        c = tl.load(c_tile + m * c_row + n * c_column, mask=m_ok & n_ok, other=0.0)
        total += c.to(tl.float32) * beta
    out_tile = out_ptr + (batch * M + m0) * N + n0
    tl.store(out_tile + m * N + n, total.to(out_ptr.dtype.element_ty), mask=m_ok & n_ok)


@cache
def _choose_tile(num_columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile constants and launch options; they must not depend on the number of rows."""
    if INTERPRET:
        return dict(BM=16, BN=32, BK=32, GROUP_M=2, WIDEN=dtype == torch.bfloat16)
    wide = dtype == torch.float32
    BN = min(64 if wide else 128, max(16, next_power_of_2(num_columns)))
    size = dict(BM=64, BK=32, num_warps=4) if wide else dict(BM=128, BK=64, num_warps=8)
    return dict(BN=BN, GROUP_M=8, WIDEN=False, num_stages=3, **size)


def invariant_product(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    dtype: torch.dtype | None = None,
    multiply: Multiply = torch.mm,
) -> Tensor:
    """Return alpha * a @ b + beta * addend, whose rows do not depend on the number of rows of a.

    No autograd, no host sync. The product is summed in fp32 in a fixed order and rounded once.

    Args:
        a: [M, K] or [B, M, K]; on a CPU any float dtype, on a GPU bf16, fp16 or fp32 (others raise
            a NotImplementedError).
        b: [K, N] or [B, K, N], the dtype of a.
        addend: broadcasts to the result; not read if beta is 0.
        dtype: dtype of the result, which is contiguous; None = the dtype of a.
        multiply: on a CPU, the matmul of one row [1, K] and b [K, N], both in fp32 or fp64.
    """
    if not can_use_kernel(a, b):
        return invariant_product_ref(
            a, b, addend, beta=beta, alpha=alpha, dtype=dtype, multiply=multiply
        )
    if a.dtype not in KERNEL_DTYPES:
        raise NotImplementedError(
            f"dtype of a product ({a.dtype}) must be bfloat16, float16 or float32 for batch "
            "invariance on a GPU: convert the model"
        )
    if a.ndim == 2:
        c = None if addend is None else addend.expand(a.shape[0], b.shape[1])[None]
        return invariant_product(a[None], b[None], c, beta=beta, alpha=alpha, dtype=dtype)[0]
    (B, M, K), N = a.shape, b.shape[2]
    out = a.new_empty(B, M, N, dtype=dtype or a.dtype)
    c = None if addend is None or beta == 0 else addend.expand(B, M, N)
    a, b, tile = _align_strides(a), _align_strides(b), _choose_tile(N, a.dtype)
    c_strides = (0, 0, 0) if c is None else c.stride()
    strides = (*a.stride(), *b.stride(), *c_strides, float(alpha), float(beta))
    grid = (cdiv(M, tile["BM"]) * cdiv(N, tile["BN"]), B)
    launch(_invariant_product_kernel, grid, a, b, c, out, M, N, K, *strides, **tile)
    return out


def _align_strides(x: Tensor) -> Tensor:
    """Return x, copied unless its matrices are row- or column-major and aligned to 16 bytes."""
    by_rows, by_columns = x.stride(2) == 1, x.stride(1) == 1 and x.shape[1] > 1
    if x.data_ptr() % 16 or not (by_rows or by_columns):
        x = x.clone(memory_format=torch.contiguous_format)
    if x.shape[1] == 1 or x.shape[2] == 1:
        x = x.contiguous().as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
    return x
