"""Grouped products of contiguous rows on Hopper: two warp groups share a tile of 128 x 256.

    cooperative_gemm        out[r] = a[r] @ b[expert(r)]
    cooperative_activation  h[r] = x[r] @ w1[expert(r)]^T,  out[r] = act(h[r]) * weight[r]

Letters: R expert rows (length), e experts, M N K the sizes of one product, D model dim, F hidden
dim, C = 2F columns of h.

One persistent program per multiprocessor. A warp of its own fills a ring of stages by TMA. Each
warp group multiplies half of a tile's rows, puts the result into shared memory, and goes on: while
the next tile is multiplied, TMA stores this one and two more warps compute its activation.
2 * R * N * K floating-point operations. Bytes moved at least: a (R * K elements), b and the outputs
once each.

Tiles of this size read a quarter less through the L2 cache than those of `pingpong.py`, which costs
power: a training step is bound by power (docs/findings/measuring.md). The Triton kernels of
`gemm.py` compute the same; these run where they are faster.
"""

from torch import Tensor

from moecore.kernels.common import gluon_descriptor, num_sms, on_device
from moecore.kernels.grouped.cooperative_kernel import sm90_bf16_grouped_kernel
from moecore.kernels.grouped.skeleton import GroupedConstants
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.row_tiles import BLOCK_M, RowTiles

BLOCK_N, BLOCK_K, STAGES = 256, 64, 3
GROUP_M = 8  # row tiles that share weights in L2
EPILOGUE_ROWS = 16  # of an activation, at a time in registers
CONSUMER_REGISTERS = {False: 240, True: 208}  # without and with an activation
EPILOGUE_REGISTERS, PRODUCER_REGISTERS = 88, 24


def _launch(
    a: Tensor,
    b: Tensor,
    tiles: RowTiles,
    out: Tensor,
    h_RC: Tensor | None = None,
    weights_R: Tensor | None = None,
    options: ActivationOptions | None = None,
) -> None:
    """Launch the kernel; `h_RC` and what follows for FC1."""
    K, N = a.shape[1], out.shape[1]
    b_is_NK = b.stride(1) == 1
    flat = (b.transpose(1, 2) if b_is_NK else b).reshape(-1, K if b_is_NK else b.shape[2])
    width = BLOCK_N if h_RC is None else BLOCK_N // 2
    block = (BLOCK_M // 2, width)
    const = GroupedConstants(
        *(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PRODUCER_REGISTERS),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[h_RC is not None],
        B_IS_NK=b_is_NK,
    )
    if options is not None:
        const = const._replace(
            EPILOGUE_REGISTERS=EPILOGUE_REGISTERS,
            EPILOGUE_ROWS=EPILOGUE_ROWS,
            ACTIVATION=True,
            KIND=options.kind,
            LIMIT=options.limit,
            ALPHA=options.alpha,
        )
    with on_device(a):
        sm90_bf16_grouped_kernel[(num_sms(a.device),)](
            gluon_descriptor(a, (BLOCK_M, BLOCK_K)),
            gluon_descriptor(flat, (width, BLOCK_K) if b_is_NK else (BLOCK_K, BLOCK_N)),
            tiles.map,
            weights_R,
            h_RC,
            None if h_RC is None else gluon_descriptor(h_RC, block),
            out,
            gluon_descriptor(out, block),
            K,
            N,
            CONST=const,
            num_warps=4,
        )


def cooperative_gemm(a_RK: Tensor, b_eKN: Tensor, tiles: RowTiles) -> Tensor:
    """Return each expert row times its expert's matrix. No autograd, no host sync.

    Args:
        a_RK: rows in expert order, bf16 or fp16, contiguous.
        b_eKN: dtype of `a_RK`; contiguous, or the transpose of a contiguous [e, N, K]. K and N are
            multiples of 8.
        tiles: from `map_row_tiles`.

    Returns:
        [R, N], dtype of `a_RK`, summed in fp32 and rounded once. Rows past the last expert's are
        uninitialised.
    """
    out_RN = a_RK.new_empty(a_RK.shape[0], b_eKN.shape[2])
    if out_RN.numel():
        _launch(a_RK, b_eKN, tiles, out_RN)
    return out_RN


def cooperative_activation(
    x_RD: Tensor,
    w1_eCD: Tensor,
    tiles: RowTiles,
    weights_R: Tensor,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor]:
    """Return FC1's output and the weighted activation of it. No autograd, no host sync.

    Args:
        x_RD: rows in expert order, bf16 or fp16, contiguous.
        w1_eCD: [e, 2F, D] gate rows then up rows, contiguous; D and F multiples of 8.
        tiles: from `map_row_tiles`.
        weights_R: fp32 routing weights.
        options: a gated activation, not interleaved.

    Returns:
        h_RC [R, 2F] and a_RF [R, F]; rows past the last expert's are uninitialised.
    """
    R, C = x_RD.shape[0], w1_eCD.shape[1]
    h_RC, a_RF = x_RD.new_empty(R, C), x_RD.new_empty(R, C // 2)
    if R:
        _launch(x_RD, w1_eCD.transpose(1, 2), tiles, a_RF, h_RC, weights_R, options)
    return h_RC, a_RF
