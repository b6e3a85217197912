"""FC2's input gradient with the activation's backward, on Hopper: two warp groups take turns.

    da[r] = dy[row(r)] @ w2[expert(r)], which stays on the chip; with h[r] it gives dh[r],
    act(h[r]) * weight[r] again, and dweight[r] = <da[r], act(h[r])>

row(r) is row_ids[r] where the rows are gathered while they are loaded, else r itself.

Letters: S source rows, R expert rows (length), e experts, D model dim, F hidden dim, C = 2F
columns of h.

One persistent program per multiprocessor. Warps of their own fill a ring of stages: w2 and
contiguous rows by TMA, gathered rows by asynchronous copies. One warp group multiplies a tile of
BLOCK_M x BLOCK_N while the other one, which moves six times what the product alone would store,
ends the tile before: memory and tensor cores work at the same time. 2 * R * D * F floating-point
operations. Bytes moved at least: dy (R * D elements), w2, h, dh and the activation once each.

Products that store less multiply larger tiles instead (`grouped/cooperative.py`).
"""

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, gluon_descriptor, num_sms, on_device, tl, triton
from moecore.kernels.grouped.pingpong_kernel import sm90_bf16_grouped_nn_act_bwd_kernel
from moecore.kernels.grouped.skeleton import GroupedConstants
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.row_tiles import BLOCK_M, RowTiles

BLOCK_N, BLOCK_K, STAGES = 128, 64, 5
GROUP_M = {False: 4, True: 8}  # row tiles that share weights in L2, without and with a gather
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56
CLEARED_ROWS = 64  # after the last expert row, which `grouped_wgrad` multiplies by 0
ROWS_PER_SUM = 1024


@triton.jit
def _finish_bwd_kernel(
    parts_ptr,  # [PARTS, R] fp32
    offsets_ptr,  # [e] int32
    dweights_ptr,  # [R] fp32, out
    dh_ptr,  # [R, 2F]
    a_ptr,  # [R, F]
    num_experts,
    R,
    F,
    num_parts,
    CLEARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the column tiles' parts of dweights, and clear the rows after the last used one."""
    num_rows = tl.load(offsets_ptr + num_experts - 1)
    pid = tl.program_id(0)
    if pid < CLEARED:
        row = num_rows.to(tl.int64) + pid
        for column in range(0, 3 * F, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            in_dh = (columns < 2 * F) & (row < R)
            tl.store(
                dh_ptr + row * 2 * F + columns, tl.zeros([BLOCK], dh_ptr.dtype.element_ty), in_dh
            )
            in_a = (columns >= 2 * F) & (columns < 3 * F) & (row < R)
            at = a_ptr + row * F + columns - 2 * F
            tl.store(at, tl.zeros([BLOCK], a_ptr.dtype.element_ty), in_a)
    else:
        rows = (pid - CLEARED) * BLOCK + tl.arange(0, BLOCK)
        used = rows < num_rows
        total = tl.zeros([BLOCK], tl.float32)
        part = parts_ptr + rows
        for _ in range(num_parts):
            total += tl.load(part, mask=used, other=0.0)
            part += R
        tl.store(dweights_ptr + rows, total, mask=rows < R)


def pingpong_activation_bwd(
    dy: Tensor,
    w2_eDF: Tensor,
    tiles: RowTiles,
    h_RC: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    options: ActivationOptions,
    *,
    row_ids_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients behind FC2 and the activation, and the activation again.

    No autograd, no host sync. da = dy @ w2 stays on the chip, rounded to the dtype of dy.

    Args:
        dy: [R, D] rows in expert order, or [S, D] source rows with `row_ids_R`; bf16 or fp16,
            contiguous.
        w2_eDF: contiguous; D and F multiples of 8.
        tiles: from `map_row_tiles`.
        h_RC: [R, 2F] FC1's output, contiguous.
        weights_R: fp32 routing weights.
        offsets_e: int32 running sum of the experts' rows.
        options: a gated activation, not interleaved.
        row_ids_R: int32, the row of `dy` that each expert row reads.

    Returns:
        dh_RC, dweights_R (fp32, 0 past the last expert's rows) and a_RF, the weighted activation.
        Of dh and a, CLEARED_ROWS rows past the last expert's are 0; the rest is uninitialised.
    """
    R, (_, D, F) = h_RC.shape[0], w2_eDF.shape
    dh_RC, a_RF = torch.empty_like(h_RC), h_RC.new_empty(R, F)
    dweights_R = torch.empty_like(weights_R)
    if not R:
        return dh_RC, dweights_R, a_RF
    parts = weights_R.new_empty(cdiv(F, BLOCK_N), R)
    gathers = row_ids_R is not None
    const = GroupedConstants(
        *(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M[gathers], STAGES, PRODUCER_REGISTERS),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        KIND=options.kind,
        LIMIT=options.limit,
        ALPHA=options.alpha,
        GATHER=gathers,
    )
    e = offsets_e.shape[0]
    with on_device(dy):
        sm90_bf16_grouped_nn_act_bwd_kernel[(num_sms(dy.device),)](
            dy,
            gluon_descriptor(dy, (BLOCK_M, BLOCK_K)),
            gluon_descriptor(w2_eDF.reshape(-1, F), (BLOCK_K, BLOCK_N)),
            tiles.map if row_ids_R is None else row_ids_R,
            tiles.map,
            weights_R,
            gluon_descriptor(h_RC, (BLOCK_M, BLOCK_N // 4)),
            *(a_RF, dh_RC, parts, R, D, F),
            CONST=const,
            num_warps=4,
        )
        _finish_bwd_kernel[(CLEARED_ROWS + cdiv(R, ROWS_PER_SUM),)](
            parts,
            offsets_e,
            dweights_R,
            dh_RC,
            a_RF,
            e,
            R,
            F,
            parts.shape[0],
            CLEARED=CLEARED_ROWS,
            BLOCK=ROWS_PER_SUM,
        )
    return dh_RC, dweights_R, a_RF
