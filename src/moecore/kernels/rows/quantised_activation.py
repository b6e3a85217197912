"""The activation between an expert's two FP8 products, quantised from fp32.

    a[r, f] = act(gate[r, f], up[r, f]) * weight[r]

    backward, in one pass over h and da:
    dh[r]      = da[r] * weight[r] * act'(h[r])
    a[r]       as above, again
    dweight[r] = sum over f of da[r, f] * act(h[r])[f]

Letters: R expert rows (length), F hidden dim, C columns of h (2F for gated activations, else F).
Gate columns come first, then up columns.

Bytes moved per expert row, with b bytes per element: forward C * b + F, backward
(C + F) * b + C + F; the scales are 1/32 of the FP8 bytes, the parts of dweights 1/16 of F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, on_device, use_kernel
from moecore.kernels.rows.activation import (
    ActivationOptions,
    activation,
    weighted_activation_bwd_ref,
)
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.quantised import check_columns, empty_row_blocks, row_blocks_ref
from moecore.kernels.rows.quantised_activation_kernel import (
    quantised_activation_bwd_kernel,
    quantised_activation_fwd_kernel,
    sum_parts_kernel,
)
from moecore.kernels.rows.scaling import Blocks

FWD_PROGRAM = {"BLOCK_R": 32, "num_warps": 4}  # 32 elements per thread
BWD_PROGRAM = {"BLOCK_R": 16, "num_warps": 4}  # 16 elements per thread of each of three gradients
SUM_ROWS = 256  # whose parts a program adds


def quantised_activation_ref(
    h_RC: Tensor, weights_R: Tensor | None, options: ActivationOptions, *, power_of_two: bool
) -> Blocks:
    """Return what `quantised_activation` returns, in plain PyTorch."""
    a_RF = activation(h_RC, options)
    if weights_R is not None:
        a_RF = a_RF * weights_R[:, None]
    return row_blocks_ref(a_RF, power_of_two)


def quantised_activation_bwd_ref(
    h_RC: Tensor,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
) -> tuple[Blocks, Tensor, Blocks]:
    """Return what `quantised_activation_bwd` returns, in plain PyTorch."""
    wide = h_RC.float(), da_RF.float()  # in which nothing is rounded before it is quantised
    dh_RC, dweights_R, a_RF = weighted_activation_bwd_ref(*wide, weights_R, num_rows, options)
    return row_blocks_ref(dh_RC, power_of_two), dweights_R, row_blocks_ref(a_RF, power_of_two)


def _constants(options: ActivationOptions, power_of_two: bool) -> dict[str, object]:
    return {
        "KIND": options.kind,
        "GATED": options.gated,
        "LIMIT": options.limit,
        "ALPHA": options.alpha,
        "POWER_OF_TWO": power_of_two,
    }


def quantised_activation(
    h_RC: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
) -> Blocks:
    """Return the activated rows times their weight, computed in fp32 and quantised from it.

    No autograd, no host sync.

    Args:
        h_RC: FC1's output, bf16, fp16 or fp32, contiguous: [R, 2F] with gate columns first for
            gated activations, else [R, F]; F a multiple of 128.
        weights_R: fp32, contiguous factor of each row; None means 1.
        num_rows: 0-dim int32 on the device: rows from there on are not read; None means R.
        options: which activation, not interleaved.
        power_of_two: of the scales; else amax / 448.

    Returns:
        [R, F]. Rows from num_rows on are uninitialised.

    Raises:
        ValueError: for another F.
    """
    R, C = h_RC.shape
    F = C // 2 if options.gated else C
    check_columns("F", F)
    if not use_kernel(h_RC):
        return quantised_activation_ref(h_RC, weights_R, options, power_of_two=power_of_two)
    out = empty_row_blocks(h_RC, R, F)
    if R and F:
        with on_device(h_RC):
            quantised_activation_fwd_kernel[(cdiv(R, FWD_PROGRAM["BLOCK_R"]) * (F // BLOCK),)](
                h_RC,
                weights_R,
                num_rows,
                out.values.view(torch.uint8),
                out.scales,
                R,
                out.scales.shape[1],
                F=F,
                **_constants(options, power_of_two),
                **FWD_PROGRAM,
            )
    return out


def quantised_activation_bwd(
    h_RC: Tensor,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
) -> tuple[Blocks, Tensor, Blocks]:
    """Return dh, dweights and the weighted activation again. The same bits in every run.

    No autograd, no host sync.

    Args:
        h_RC: as given to the forward.
        da_RF: gradient of the output, dtype of h_RC, contiguous.
        weights_R: as given to the forward.
        num_rows: as given to the forward.
        options: as given to the forward.
        power_of_two: of the scales; else amax / 448.

    Returns:
        dh [R, C], quantised from fp32 values; dweights_R fp32, zero from num_rows on; the forward's
        output [R, F]. Rows of the first and the last from num_rows on are uninitialised.

    Raises:
        ValueError: for an F that is no multiple of 128.
    """
    (R, C), F = h_RC.shape, da_RF.shape[1]
    check_columns("F", F)
    if not use_kernel(h_RC, da_RF):
        args = (h_RC, da_RF, weights_R, num_rows, options)
        return quantised_activation_bwd_ref(*args, power_of_two=power_of_two)
    dh, a = empty_row_blocks(h_RC, R, C), empty_row_blocks(h_RC, R, F)
    dweights_R = h_RC.new_empty(R, dtype=torch.float32)
    sums = h_RC.new_empty(F // BLOCK, R, dtype=torch.float32)
    if R and F:
        with on_device(h_RC):
            quantised_activation_bwd_kernel[(cdiv(R, BWD_PROGRAM["BLOCK_R"]) * (F // BLOCK),)](
                h_RC,
                da_RF,
                weights_R,
                num_rows,
                dh.values.view(torch.uint8),
                dh.scales,
                a.values.view(torch.uint8),
                a.scales,
                sums,
                R,
                dh.scales.shape[1],
                F=F,
                **_constants(options, power_of_two),
                **BWD_PROGRAM,
            )
            sum_parts_kernel[(cdiv(R, SUM_ROWS),)](
                sums, num_rows, dweights_R, R, PARTS=F // BLOCK, BLOCK_R=SUM_ROWS
            )
    return dh, dweights_R, a
