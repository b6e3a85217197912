"""The kernels of `quantised_activation.py`.

Letters: as there.
"""

from moecore.kernels.common import tl, triton
from moecore.kernels.rows.activation_kernel import activate, activate_with_gradients
from moecore.kernels.rows.quantised_kernel import store_row_blocks


@triton.jit(do_not_specialize=["num_expert_rows", "stride"])
def quantised_activation_fwd_kernel(
    h_ptr,  # [R, C]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    values_ptr,  # [R, F] uint8, out
    scales_ptr,  # [F / 128, R4] fp32, out
    num_expert_rows,  # R
    stride,  # R4
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the weighted activation of BLOCK_R rows and 128 columns."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if GATED else F
    block = tl.program_id(0) % BLOCKS
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = rows < num_expert_rows
    if num_rows_ptr is not None:
        used = used & (rows < tl.load(num_rows_ptr))
    at = h_ptr + rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + F, mask=used[:, None], other=0.0).to(tl.float32)
    a = activate(gate, up, KIND, LIMIT, ALPHA)
    if weights_ptr is not None:
        a = a * tl.load(weights_ptr + rows, mask=used, other=0.0)[:, None]
    store_row_blocks(a, values_ptr, scales_ptr, rows, used, block, stride, F, POWER_OF_TWO)


@triton.jit(do_not_specialize=["num_expert_rows", "stride"])
def quantised_activation_bwd_kernel(
    h_ptr,  # [R, C]
    da_ptr,  # [R, F]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    dh_ptr,  # [R, C] uint8, out
    dh_scales_ptr,  # [C / 128, R4] fp32, out
    a_ptr,  # [R, F] uint8, out
    a_scales_ptr,  # [F / 128, R4] fp32, out
    sums_ptr,  # [F / 128, R] fp32, out: parts of dweights
    num_expert_rows,  # R
    stride,  # R4
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write all of BLOCK_R rows and 128 columns of F."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if GATED else F
    block = tl.program_id(0) % BLOCKS
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = rows < num_expert_rows
    if num_rows_ptr is not None:
        used = used & (rows < tl.load(num_rows_ptr))
    columns = block * 128 + tl.arange(0, 128)[None, :]
    at = h_ptr + rows[:, None] * C + columns
    gate = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + F, mask=used[:, None], other=0.0).to(tl.float32)
    da = tl.load(da_ptr + rows[:, None] * F + columns, mask=used[:, None], other=0.0)
    da = da.to(tl.float32)
    a, dgate, dup = activate_with_gradients(gate, up, KIND, LIMIT, ALPHA)
    tl.store(
        sums_ptr + block.to(tl.int64) * num_expert_rows + rows, tl.sum(da * a, axis=1), mask=used
    )
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + rows, mask=used, other=0.0)[:, None]
        a = a * weights
        da = da * weights
    store_row_blocks(a, a_ptr, a_scales_ptr, rows, used, block, stride, F, POWER_OF_TWO)
    dgate = da * dgate
    store_row_blocks(dgate, dh_ptr, dh_scales_ptr, rows, used, block, stride, C, POWER_OF_TWO)
    if GATED:
        dup, block = da * dup, block + BLOCKS
        store_row_blocks(dup, dh_ptr, dh_scales_ptr, rows, used, block, stride, C, POWER_OF_TWO)


@triton.jit(do_not_specialize=["num_expert_rows"])
def sum_parts_kernel(
    sums_ptr,  # [parts, R] fp32
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R] fp32, out
    num_expert_rows,  # R
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the parts of each row in their order; 0 from num_rows on."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = rows < num_expert_rows
    if num_rows_ptr is not None:
        used = used & (rows < tl.load(num_rows_ptr))
    total = tl.zeros([BLOCK_R], tl.float32)
    at = sums_ptr + rows
    for _ in range(PARTS):
        total += tl.load(at, mask=used, other=0.0)
        at += num_expert_rows
    tl.store(out_ptr + rows, total, mask=rows < num_expert_rows)
