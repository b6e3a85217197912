"""The kernels of `activation.py`, and device functions for the epilogues of other kernels."""

from functools import cache
from typing import NamedTuple

from moecore.kernels.common import next_power_of_2
from moecore.kernels.rows.row_tiles import mask_rows_in_use
from moecore.kernels.triton_api import tl, triton

# Output elements of one program and loop step; the backward keeps five operands in registers.
FWD_TILE = 2048
BWD_TILE = 1024


class ActivationConstants(NamedTuple):
    """The options of an activation as one compile-time argument of Triton kernels."""

    KIND: str
    GATED: bool
    LIMIT: float
    UP_LIMIT: float
    ALPHA: float


@cache
def choose_column_blocks(num_columns: int, tile_size: int) -> dict[str, int]:
    """Return the rows BLOCK_R and columns BLOCK_F of a program's tile, powers of two."""
    fits = (n for n in (512, 256, 128) if -(-num_columns // n) * n * 8 <= num_columns * 9)
    block_F = next(fits, min(128, max(16, next_power_of_2(num_columns))))
    return {"BLOCK_R": tile_size // block_F, "BLOCK_F": block_F}


# Device functions, for the epilogues of other kernels too. Comparisons, not min and max: they let
# a NaN through.


@triton.jit
def _compute_gelu_erf(h):
    """Return gelu by erf, h * Phi(h), and its derivative, in fp32."""
    cumulative = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
    density = 0.3989422804014327 * tl.exp(-0.5 * h * h)
    return h * cumulative, cumulative + h * density


@triton.jit
def _compute_gelu_tanh(gate):
    """Return gelu in its tanh form, and its derivative, in fp32."""
    SLOPE: tl.constexpr = 1.5957691216057308  # 2 * sqrt(2 / pi)
    CUBE: tl.constexpr = 0.044715
    square = gate * gate
    s = tl.sigmoid(SLOPE * (gate + CUBE * gate * square))
    derivative = s * (1.0 + gate * (1.0 - s) * SLOPE * (1.0 + 3.0 * CUBE * square))
    return gate * s, derivative


@triton.jit
def _compute_tanh(x):
    """Return tanh to 3 fp32 ulps; Triton has none of its own, and 2 sigmoid(2x) - 1 cancels."""
    square = x * x
    # A least relative error up to 0.625, beyond which 1 - exp(-2x) loses no bit.
    series = -0.0537434965 + square * (0.0206505824 - square * 0.0057170405)
    series = -0.3333328366 + square * (0.1333149076 + square * series)
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.625, x + x * square * series, tl.where(x < 0.0, -far, far))


@triton.jit
def _clamp(x, LIMIT: tl.constexpr):
    """Return x limited to [-LIMIT, LIMIT]; a NaN stays a NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def activate_with_gradients(gate, up, ACT: tl.constexpr):
    """Return the activation and its derivatives by gate and by up (0 without a gate), in fp32."""
    KIND: tl.constexpr = ACT.KIND
    LIMIT: tl.constexpr = ACT.LIMIT
    UP_LIMIT: tl.constexpr = ACT.UP_LIMIT
    ALPHA: tl.constexpr = ACT.ALPHA
    if KIND == "swiglu":
        s = tl.sigmoid(gate)
        da_dup = gate * s
        a = da_dup * up
        da_dgate = up * s * (1.0 + gate * (1.0 - s))
    elif KIND == "geglu":
        da_dup, derivative = _compute_gelu_tanh(gate)
        a = da_dup * up
        da_dgate = up * derivative
    elif KIND == "clamped_swiglu":
        low = tl.where(gate > LIMIT, LIMIT, gate)
        near = _clamp(up, UP_LIMIT)
        s = tl.sigmoid(ALPHA * low)
        a = (near + 1.0) * low * s
        slope = (near + 1.0) * s * (1.0 + ALPHA * low * (1.0 - s))
        da_dgate = tl.where(gate > LIMIT, 0.0, slope)
        da_dup = tl.where((up > UP_LIMIT) | (up < -UP_LIMIT), 0.0, low * s)
    elif KIND == "limited_swiglu":
        low = tl.where(gate > LIMIT, LIMIT, gate)
        near = _clamp(up, UP_LIMIT)
        s = tl.sigmoid(low)
        a = low * s * near
        da_dgate = tl.where(gate > LIMIT, 0.0, near * s * (1.0 + low * (1.0 - s)))
        da_dup = tl.where((up > UP_LIMIT) | (up < -UP_LIMIT), 0.0, low * s)
    elif KIND == "situ_glu":
        s, low = tl.sigmoid(gate), _compute_tanh(gate * (1.0 / LIMIT))
        near = _compute_tanh(up * (1.0 / UP_LIMIT))
        a = LIMIT * low * s * (UP_LIMIT * near)
        da_dgate = UP_LIMIT * near * s * (1.0 - low * low + LIMIT * low * (1.0 - s))
        da_dup = LIMIT * low * s * (1.0 - near * near)
    elif KIND == "gelu":
        a, da_dgate = _compute_gelu_erf(gate)
        da_dup = gate * 0.0
    elif KIND == "silu":
        s = tl.sigmoid(gate)
        a = gate * s
        da_dgate = s * (1.0 + gate * (1.0 - s))
        da_dup = gate * 0.0
    elif KIND == "relu":
        a = tl.where(gate < 0.0, 0.0, gate)
        da_dgate = tl.where(gate <= 0.0, 0.0, 1.0)
        da_dup = gate * 0.0
    else:
        positive = tl.where(gate < 0.0, 0.0, gate)
        a = positive * positive
        da_dgate = 2.0 * positive
        da_dup = positive * 0.0
    return a, da_dgate, da_dup


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Return the activation ACT (`ActivationConstants`) of fp32 gate and up, in fp32."""
    a, _, _ = activate_with_gradients(gate, up, ACT)
    return a


@triton.jit
def _load_gate_and_up(
    row_ptr,  # [BLOCK_R, 1] pointers to the first column of each row
    column_block,  # which block of output columns
    mask,  # [BLOCK_R, 1] bool
    F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return a block of gate and of up columns, fp32; without GATED twice the same; 0 if masked."""
    columns = column_block * BLOCK_F + tl.arange(0, BLOCK_F)
    if INTERLEAVED:
        h_columns = column_block * (2 * BLOCK_F) + tl.arange(0, 2 * BLOCK_F)
        h = tl.load(
            row_ptr + h_columns[None, :], mask=mask & (h_columns < 2 * F)[None, :], other=0.0
        )
        gate, up = tl.split(tl.reshape(h, [BLOCK_R, BLOCK_F, 2]))
    else:
        inside = mask & (columns < F)[None, :]
        gate = tl.load(row_ptr + columns[None, :], mask=inside, other=0.0)
        up = gate
        if GATED:
            up = tl.load(row_ptr + F + columns[None, :], mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit(do_not_specialize=["num_expert_rows"])
def weighted_activation_fwd_kernel(
    h_ptr,  # [R, C]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    a_ptr,  # [R, F], out
    num_expert_rows,  # R
    F: tl.constexpr,
    ACT: tl.constexpr,  # ActivationConstants
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Write act(h) * weight of BLOCK_R rows and BLOCK_F columns; 0 in rows from num_rows on."""
    BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    C: tl.constexpr = 2 * F if ACT.GATED else F
    pid = tl.program_id(0)
    block = pid % BLOCKS
    rows = (pid // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
    h_rows = h_ptr + rows[:, None] * C
    gate, up = _load_gate_and_up(
        h_rows, block, row_mask[:, None], F, BLOCK_R, BLOCK_F, ACT.GATED, INTERLEAVED
    )
    a = activate(gate, up, ACT)
    if weights_ptr is not None:
        a = a * tl.load(weights_ptr + rows, mask=row_mask, other=0.0)[:, None]
    columns = block * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (rows < num_expert_rows)[:, None] & (columns < F)[None, :]
    out = a.to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + rows[:, None] * F + columns[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_expert_rows"])
def weighted_activation_bwd_kernel(
    h_ptr,  # [R, C]
    da_ptr,  # [R, F]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    dh_ptr,  # [R, C], out
    dweights_ptr,  # [R] fp32, out
    a_ptr,  # [R, F], out; None = not written
    num_expert_rows,  # R
    F: tl.constexpr,
    ACT: tl.constexpr,  # ActivationConstants
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Write gradients of h and weights of BLOCK_R rows, and act(h) * weight if a_ptr is given."""
    BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    C: tl.constexpr = 2 * F if ACT.GATED else F
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = (rows < num_expert_rows)[:, None]
    row_mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
    weights = tl.full([BLOCK_R], 1.0, tl.float32)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + rows, mask=row_mask, other=0.0)
    row_mask = row_mask[:, None]
    dweights = tl.zeros([BLOCK_R, BLOCK_F], dtype=tl.float32)
    for block in range(BLOCKS):
        columns = block * BLOCK_F + tl.arange(0, BLOCK_F)
        inside = (columns < F)[None, :]
        cells = rows[:, None] * F + columns[None, :]
        gate, up = _load_gate_and_up(
            h_ptr + rows[:, None] * C, block, row_mask, F, BLOCK_R, BLOCK_F, ACT.GATED, INTERLEAVED
        )
        da = tl.load(da_ptr + cells, mask=row_mask & inside, other=0.0).to(tl.float32)
        a, da_dgate, da_dup = activate_with_gradients(gate, up, ACT)
        dweights += da * a
        da = da * weights[:, None]
        if a_ptr is not None:
            out = (a * weights[:, None]).to(a_ptr.dtype.element_ty)
            tl.store(a_ptr + cells, out, mask=exists & inside)
        dgate = (da * da_dgate).to(dh_ptr.dtype.element_ty)
        dup = (da * da_dup).to(dh_ptr.dtype.element_ty)
        dh_rows = dh_ptr + rows[:, None] * C
        if INTERLEAVED:
            h_columns = block * (2 * BLOCK_F) + tl.arange(0, 2 * BLOCK_F)
            mask = exists & (h_columns < C)[None, :]
            tl.store(dh_rows + h_columns[None, :], tl.interleave(dgate, dup), mask=mask)
        else:
            tl.store(dh_rows + columns[None, :], dgate, mask=exists & inside)
            if ACT.GATED:
                tl.store(dh_rows + F + columns[None, :], dup, mask=exists & inside)
    tl.store(dweights_ptr + rows, tl.sum(dweights, axis=1), mask=rows < num_expert_rows)
