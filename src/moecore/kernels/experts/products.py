"""The products of a rank's experts, by this package's kernels or by torch's grouped product.

"triton" gathers rows while a product loads them, or beforehand where that is faster: a gather moves
R * D elements whatever F is, the product that it speeds up grows with F.

Letters: as in `experts/expert_mlp.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moecore._compat import grouped_mm
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.grouped.cooperative import cooperative_activation, cooperative_gemm
from moecore.kernels.grouped.gemm import grouped_gemm, grouped_gemm_activation
from moecore.kernels.grouped.pingpong import pingpong_activation_bwd
from moecore.kernels.grouped.row_tiles import map_row_tiles
from moecore.kernels.grouped.wgrad import grouped_wgrad, put_grad
from moecore.kernels.rows.activation import (
    ActivationOptions,
    weighted_activation,
    weighted_activation_bwd,
)
from moecore.kernels.rows.move import gather_rows_plain, gather_used_rows
from moecore.kernels.rows.packed import PACKED, gather_packed_rows, unpack_rows

# Smallest F for which rows are gathered before a product: "gather first" in docs/log.md.
GATHER_FIRST_FC1 = 512  # X, for FC1
GATHER_FIRST_DY = 1024  # dY, for FC2's input gradient and weight gradient
GATHER_FIRST_WGRAD = 2048  # X, for FC1's weight gradient


@dataclass(frozen=True, slots=True)
class Source:
    """Source rows, gathered in expert order where `row_ids_R` is None."""

    rows: Tensor
    row_ids_R: Tensor | None


@dataclass(frozen=True, slots=True)
class GradTarget:
    """Where a weight's gradient goes.

    Attributes:
        add_to: a tensor of the weight's shape, contiguous, fp32 or bf16; None = a new one.
        dtype: of a new one; None = the weight's.
        scale: of what goes there.
    """

    add_to: Tensor | None = None
    dtype: torch.dtype | None = None
    scale: float = 1.0


class ExpertProducts:
    """The products of the two weights and the activation between them, one set or the other.

    Args:
        triton: whose kernels.
        row_ids_R, slots_SK, offsets_e: as in `ExpertRows`.
        options: the activation.
    """

    def __init__(
        self,
        triton: bool,
        row_ids_R: Tensor,
        slots_SK: Tensor,
        offsets_e: Tensor,
        options: ActivationOptions,
    ) -> None:
        self.triton, self.options = triton, options
        self.index = (row_ids_R, slots_SK, offsets_e[-1])
        self.row_ids_R, self.offsets_e = row_ids_R, offsets_e
        hopper = triton and row_ids_R.shape[0] and has_hopper_kernels(row_ids_R.device)
        self.tiles = map_row_tiles(offsets_e, row_ids_R.shape[0]) if hopper else None

    def source(self, x_SK: Tensor, w_eNK: Tensor, *, gather: bool = False) -> Source:
        """Rows for the verbs below; "triton" gathers them beforehand only where told to.

        Packed rows (`rows/packed.py`) come out wide, always gathered where a kernel does it.

        Args:
            x_SK: source rows, or packed ones.
            w_eNK: has the columns and the dtype that the rows must have.
            gather: whether rows that are wide are gathered beforehand.
        """
        if x_SK.dtype == PACKED:
            if self.tiles is not None:
                return Source(gather_packed_rows(x_SK, w_eNK, *self.index), None)
            x_SK = unpack_rows(x_SK, w_eNK.shape[-1], w_eNK.dtype)
        if not self.triton:
            return Source(gather_rows_plain(x_SK, *self.index), None)
        if gather and self.tiles is not None and x_SK.shape[0]:
            return Source(gather_used_rows(x_SK, *self.index), None)
        return Source(x_SK, self.row_ids_R)

    def fc1(self, x: Source, w1_eCD: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation."""
        if not (self.triton and self.options.gated):
            h_RC = self.product(x, w1_eCD.transpose(1, 2))
            return h_RC, weighted_activation(h_RC, weights_R, self.index[2], self.options)
        if x.row_ids_R is None:
            assert self.tiles is not None, "rows were gathered for the kernel that has them"
            return cooperative_activation(x.rows, w1_eCD, self.tiles, weights_R, self.options)
        where = (x.row_ids_R, weights_R, self.offsets_e)
        return grouped_gemm_activation(x.rows, w1_eCD, *where, self.options)

    def activation_bwd(
        self, dy: Source, w2_eDF: Tensor, h_RC: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh, dweights and the weighted activation again."""
        if self.tiles is None or not self.options.gated or not dy.rows.shape[0]:
            da_RF = self.product(dy, w2_eDF)
            return weighted_activation_bwd(h_RC, da_RF, weights_R, self.index[2], self.options)
        where = (self.tiles, h_RC, weights_R, self.offsets_e)
        return pingpong_activation_bwd(
            dy.rows, w2_eDF, *where, self.options, row_ids_R=dy.row_ids_R
        )

    def product(self, source: Source, b_eKN: Tensor) -> Tensor:
        """The source row of each expert row times its expert's matrix."""
        if source.row_ids_R is None:
            return self.rows(source.rows, b_eKN)
        return grouped_gemm(source.rows, b_eKN, self.offsets_e, row_ids_R=source.row_ids_R)

    def rows(self, a_RK: Tensor, b_eKN: Tensor) -> Tensor:
        """Each expert row times its expert's matrix."""
        if not a_RK.shape[0]:
            return a_RK.new_empty(0, b_eKN.shape[2])
        if self.tiles is not None:
            return cooperative_gemm(a_RK, b_eKN, self.tiles)
        if self.triton:
            return grouped_gemm(a_RK, b_eKN, self.offsets_e)
        return grouped_mm(a_RK, b_eKN, offs=self.offsets_e)

    def weight_grad(
        self, source: Source, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        """[e, M, N] or transposed, where the target says."""
        x, where = source.rows, (target.add_to, target.dtype, target.scale)
        if self.triton:
            return grouped_wgrad(
                x,
                y_RN,
                self.offsets_e,
                row_ids_R=source.row_ids_R,
                transposed=transposed,
                main_grad=target.add_to,
                dtype=target.dtype,
                scale=target.scale,
            )
        left, right = (y_RN, x) if transposed else (x, y_RN)
        if x.shape[0]:
            return put_grad(grouped_mm(left.t(), right, offs=self.offsets_e), *where)
        sizes = (self.offsets_e.shape[0], left.shape[1], right.shape[1])
        return put_grad(x.new_zeros(sizes), *where)
