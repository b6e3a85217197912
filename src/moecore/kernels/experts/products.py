"""The products of a rank's experts: torch's grouped product, or this package's kernels.

A set of products is made for one index and one activation. It multiplies a `Source`: source rows
that a kernel gathers while it loads them, or rows gathered beforehand where that is faster. A
gather moves R * D elements whatever F is; the product that it speeds up grows with F.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moecore._compat import grouped_mm
from moecore.kernels.common import INTERPRET, has_hopper_kernels
from moecore.kernels.experts.contract import ExpertSpec, GradTarget, ProductsName
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
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_rows_plain, gather_used_rows
from moecore.kernels.rows.packed import gather_packed_rows
from moecore.kernels.rows.record import Rows

Use = Literal["fc1", "fc1_again", "dy", "wgrad"]

# Smallest F for which rows are gathered before a product: "gather first", docs/findings/kernels.md
GATHER_FIRST: dict[Use, int] = {
    "fc1": 512,  # X, for FC1 and its gated activation
    "dy": 1024,  # dY, for FC2's input gradient under a gated activation and its weight gradient
    "wgrad": 2048,  # X, for FC1's weight gradient
}


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of a product: source rows, or rows in expert order where `row_ids_R` is None."""

    rows: Tensor
    row_ids_R: Tensor | None


class TorchProducts:
    """The two matrices' products and the activation between them.

    Here they are torch's grouped product around gathers in memory: any strides, any device. A
    subclass has kernels.

    Args:
        index: which source row each expert row reads, and its weight.
        activation: between the two products.
        hidden_dim: F.

    Attributes:
        where: row_ids_R, slots_SK and the number of used rows, as row movers take them.
    """

    def __init__(self, index: ExpertIndex, activation: ActivationOptions, hidden_dim: int) -> None:
        self.activation, self.hidden_dim = activation, hidden_dim
        self.where = (index.row_ids_R, index.slots_SK, index.num_rows)
        self.offsets_e = index.offsets_e

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        """Return why such experts cannot be multiplied, one line; None = they can."""
        return spec.misaligned()

    def source(self, rows: Rows, use: Use) -> Source:
        """Return rows for the verbs below, gathered here; quantised ones come out wide."""
        return Source(gather_rows_plain(rows.widen(), *self.where), None)

    def fc1(self, x: Source, w1_eCD: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation."""
        h_RC = self.product(x, w1_eCD.transpose(1, 2))
        return h_RC, weighted_activation(h_RC, weights_R, self.where[2], self.activation)

    def activation_bwd(
        self, dy: Source, w2_eDF: Tensor, h_RC: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh, dweights and the weighted activation again."""
        da_RF = self.product(dy, w2_eDF)
        return weighted_activation_bwd(h_RC, da_RF, weights_R, self.where[2], self.activation)

    def product(self, source: Source, b_eKN: Tensor) -> Tensor:
        """Return each expert row's source row times its expert's matrix."""
        return self.rows(source.rows, b_eKN)

    def rows(self, a_RK: Tensor, b_eKN: Tensor) -> Tensor:
        """Return each expert row times its expert's matrix."""
        if not a_RK.shape[0]:
            return a_RK.new_empty(0, b_eKN.shape[2])
        return grouped_mm(a_RK, b_eKN, offs=self.offsets_e)

    def weight_grad(
        self, source: Source, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        """Put the gradient of a matrix [e, M, N], or transposed, at the target; return it."""
        left, right = (y_RN, source.rows) if transposed else (source.rows, y_RN)
        if source.rows.shape[0]:
            grad = grouped_mm(left.t(), right, offs=self.offsets_e)
        else:
            grad = left.new_zeros(self.offsets_e.shape[0], left.shape[1], right.shape[1])
        return put_grad(grad, target.add_to, target.dtype, target.scale)


class TritonProducts(TorchProducts):
    """Triton kernels that gather while they load: what the interpreter runs, and empty inputs."""

    @staticmethod
    def supports(spec: ExpertSpec) -> str | None:
        """Return why such experts cannot be multiplied; None = they can."""
        for field, refused in (
            ("MoEConfig.fc1_bias", spec.fc1_bias),
            ("MoEConfig.fc2_bias", spec.fc2_bias),
            ("ExpertLayout.transposed", spec.transposed),
            ("interleaved ExpertLayout.gate_up", spec.interleaved and spec.gated),
        ):
            if refused:
                return (
                    f"{field} (True) must be False for expert_backend ('triton'): use "
                    "expert_backend='torch'"
                )
        if spec.dtypes is not None and spec.dtypes not in ({torch.bfloat16}, {torch.float16}):
            shown = ", ".join(sorted(str(dtype) for dtype in spec.dtypes))
            return (
                f"dtype of the experts ({shown}) must be torch.bfloat16 or torch.float16 for "
                "expert_backend ('triton'): convert the model or use expert_backend='torch'"
            )
        if INTERPRET and spec.dtypes == {torch.bfloat16}:
            return (
                "dtype of the experts (torch.bfloat16) must be torch.float16 under Triton's "
                "interpreter, which multiplies bf16 wrongly: convert the model"
            )
        if spec.device is not None and not (INTERPRET or has_hopper_kernels(spec.device)):
            return (
                f"device of the experts ({spec.device}) must be a Hopper GPU with Triton for "
                "expert_backend ('triton'): use expert_backend='torch'"
            )
        return spec.misaligned()

    def source(self, rows: Rows, use: Use) -> Source:
        """Return source rows, which the kernels gather."""
        return Source(rows.widen(), self.where[0])

    def fc1(self, x: Source, w1_eCD: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation, which a gated one's kernel computes with it."""
        if x.row_ids_R is None or not self.activation.gated:
            return super().fc1(x, w1_eCD, weights_R)
        where = (x.row_ids_R, weights_R, self.offsets_e)
        return grouped_gemm_activation(x.rows, w1_eCD, *where, self.activation)

    def product(self, source: Source, b_eKN: Tensor) -> Tensor:
        """Return each expert row's source row times its expert's matrix."""
        if source.row_ids_R is None:
            return self.rows(source.rows, b_eKN)
        return grouped_gemm(source.rows, b_eKN, self.offsets_e, row_ids_R=source.row_ids_R)

    def rows(self, a_RK: Tensor, b_eKN: Tensor) -> Tensor:
        """Return each expert row times its expert's matrix."""
        return grouped_gemm(a_RK, b_eKN, self.offsets_e)

    def weight_grad(
        self, source: Source, y_RN: Tensor, transposed: bool, target: GradTarget
    ) -> Tensor:
        """Put the gradient of a matrix [e, M, N], or transposed, at the target; return it."""
        return grouped_wgrad(
            source.rows,
            y_RN,
            self.offsets_e,
            row_ids_R=source.row_ids_R,
            transposed=transposed,
            add_to=target.add_to,
            dtype=target.dtype,
            scale=target.scale,
        )


class HopperProducts(TritonProducts):
    """Gluon kernels for Hopper over a map of row tiles, and Triton's where those gather better."""

    def __init__(self, index: ExpertIndex, activation: ActivationOptions, hidden_dim: int) -> None:
        super().__init__(index, activation, hidden_dim)
        self.tiles = map_row_tiles(index.offsets_e, index.row_ids_R.shape[0])

    def source(self, rows: Rows, use: Use) -> Source:
        """Return source rows, or gathered ones where the product is faster by more than that."""
        if rows.scales is not None:
            wide = (rows.values, rows.scales, rows.dtype)
            return Source(gather_packed_rows(*wide, *self.where), None)
        gathers = self.hidden_dim >= GATHER_FIRST.get(use, self.hidden_dim + 1)
        if gathers and (self.activation.gated or use == "wgrad") and rows.values.shape[0]:
            return Source(gather_used_rows(rows.values, *self.where), None)
        return Source(rows.values, self.where[0])

    def fc1(self, x: Source, w1_eCD: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return H and the weighted activation, which a gated one's kernel computes with it."""
        if x.row_ids_R is not None or not self.activation.gated:
            return super().fc1(x, w1_eCD, weights_R)
        return cooperative_activation(x.rows, w1_eCD, self.tiles, weights_R, self.activation)

    def activation_bwd(
        self, dy: Source, w2_eDF: Tensor, h_RC: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh, dweights and the weighted activation again, a gated one's in one pass."""
        if not self.activation.gated or not dy.rows.shape[0]:
            return super().activation_bwd(dy, w2_eDF, h_RC, weights_R)
        where = (self.tiles, h_RC, weights_R, self.offsets_e)
        return pingpong_activation_bwd(
            dy.rows, w2_eDF, *where, self.activation, row_ids_R=dy.row_ids_R
        )

    def rows(self, a_RK: Tensor, b_eKN: Tensor) -> Tensor:
        """Return each expert row times its expert's matrix."""
        return cooperative_gemm(a_RK, b_eKN, self.tiles)


NAMED: dict[str, type[TorchProducts]] = {"triton": TritonProducts, "torch": TorchProducts}


def choose_products(name: ProductsName, spec: ExpertSpec) -> ProductsName:
    """Return "triton" or "torch"; "auto" is "triton" where that is supported and was faster.

    Raises:
        ValueError: when these products cannot multiply such experts.
    """
    if name == "auto":
        is_hopper = spec.device is not None and has_hopper_kernels(spec.device)
        name = (
            "triton" if is_hopper and spec.gated and not TritonProducts.supports(spec) else "torch"
        )
    problem = NAMED[name].supports(spec)
    if problem is not None:
        raise ValueError(problem)
    return name


def make_products(
    name: str, index: ExpertIndex, activation: ActivationOptions, hidden_dim: int
) -> TorchProducts:
    """Return the products of a name that `choose_products` gave."""
    kind = NAMED[name]
    if name == "triton" and index.row_ids_R.shape[0] and has_hopper_kernels(index.row_ids_R.device):
        kind = HopperProducts
    return kind(index, activation, hidden_dim)
