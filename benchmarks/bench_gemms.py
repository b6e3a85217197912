"""Each grouped product of a layer alone, against `torch`'s product of gathered rows.

A ratio of 1 means that the additional work of the op (a gather, the activation, its backward) costs
no time. Every product has 2 R M N FLOP; `fraction` is the share of a large dense product's rate.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K, C =
2F columns of FC1.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.grouped.oracle import grouped_gemm_activation_ref, grouped_gemm_ref
from torch import Tensor
from torch.nn.functional import grouped_mm

from benchmarks.harness import Call
from benchmarks.ops import Inputs, Op, Work, make_params, run_op
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.grouped import cooperative, pingpong
from moecore.kernels.grouped import gemm as grouped_gemm
from moecore.kernels.grouped import wgrad as grouped_wgrad
from moecore.kernels.rows import activation, row_tiles

ROUTINGS = ("learned",)  # bench_layer.py times the bare products under all of them
SWIGLU = activation.ActivationOptions(kind="swiglu")


class Operands:
    """Rows and weights of one layer and its products; reference products without Hopper."""

    def __init__(self, inputs: Inputs) -> None:
        s = inputs.shape
        self.x_TD, self.row_ids_R, self.offsets_E = inputs.x_TD, inputs.index[0], inputs.offsets_E
        self.weights_R, self.h_RC = inputs.weights_R, inputs.h_RC
        self.x_RD = self.x_TD.index_select(0, self.row_ids_R)
        self.w1_ECD = 0.02 * inputs.random(s.num_experts, 2 * s.hidden_dim, s.dim)
        self.w2_EDF = 0.02 * inputs.random(s.num_experts, s.dim, s.hidden_dim)
        self.a_RF = inputs.random(s.rows, s.hidden_dim)
        self.has_kernels = has_hopper_kernels(self.x_TD.device)
        if self.has_kernels:
            self.tiles = row_tiles.map_row_tiles(self.offsets_E, s.rows)

    def rows(self, a: Tensor, b: Tensor) -> Call:
        """Return expert rows times matrices, as a call."""
        if self.has_kernels:
            return lambda: cooperative.cooperative_gemm(a, b, self.tiles)
        return lambda: grouped_gemm_ref(a, b, self.offsets_E)

    def fc1(self, gather: bool) -> Call:
        """Return FC1 with the weighted activation, as a call."""
        where = (self.row_ids_R, self.weights_R, self.offsets_E, SWIGLU)
        if not self.has_kernels:
            return lambda: grouped_gemm_activation_ref(self.x_TD, self.w1_ECD, *where)
        if gather:
            return lambda: grouped_gemm.grouped_gemm_activation(self.x_TD, self.w1_ECD, *where)
        args = (self.x_RD, self.w1_ECD, self.tiles, self.weights_R, SWIGLU)
        return lambda: cooperative.cooperative_activation(*args)

    def fc2_bwd(self, gather: bool) -> Call:
        """Return FC2's input gradient with the activation's backward, as a call."""
        row_ids_R = self.row_ids_R if gather else None
        dy = self.x_TD if gather else self.x_RD
        if self.has_kernels:
            where = (self.h_RC, self.weights_R, self.offsets_E, SWIGLU)
            args = (dy, self.w2_EDF, self.tiles, *where)
            return lambda: pingpong.pingpong_activation_bwd(*args, row_ids_R=row_ids_R)

        def plain() -> tuple[Tensor, ...]:
            da_RF = grouped_gemm_ref(dy, self.w2_EDF, self.offsets_E, row_ids_R=row_ids_R)
            num_rows = self.offsets_E[-1]
            return activation.weighted_activation_bwd_ref(
                self.h_RC, da_RF, self.weights_R, num_rows, SWIGLU
            )

        return plain

    def bare(self, a: Tensor, b: Tensor) -> Call:
        """Return torch's product alone, as a call."""
        return lambda: grouped_mm(a, b, offs=self.offsets_E)


def _work(run: Call, plain: Call, shape: Shape, columns: int) -> Work:
    """Return work of R rows and matrices of D x `columns` elements."""
    flops = 2 * shape.rows * shape.dim * columns
    return Work(run, plain, num_flops=flops, baseline="bare grouped_mm")


def _fc1(inputs: Inputs, gather: bool) -> Work:
    o = Operands(inputs)
    plain = o.bare(o.x_RD, o.w1_ECD.transpose(1, 2))
    return _work(o.fc1(gather), plain, inputs.shape, 2 * inputs.shape.hidden_dim)


def fc1(inputs: Inputs) -> Work:
    """Gathered rows times w1^T, with the weighted activation as a second output."""
    return _fc1(inputs, gather=False)


def fc1_gather(inputs: Inputs) -> Work:
    """The same with source rows gathered while loaded."""
    return _fc1(inputs, gather=True)


def fc2(inputs: Inputs) -> Work:
    """Activated rows times w2^T."""
    o = Operands(inputs)
    w2_EFD = o.w2_EDF.transpose(1, 2)
    return _work(
        o.rows(o.a_RF, w2_EFD), o.bare(o.a_RF, w2_EFD), inputs.shape, inputs.shape.hidden_dim
    )


def _fc2_bwd(inputs: Inputs, gather: bool) -> Work:
    o = Operands(inputs)
    return _work(o.fc2_bwd(gather), o.bare(o.x_RD, o.w2_EDF), inputs.shape, inputs.shape.hidden_dim)


def fc2_dgrad(inputs: Inputs) -> Work:
    """The output's gradient, gathered rows, times w2; dH, dweights and the activation again."""
    return _fc2_bwd(inputs, gather=False)


def fc2_dgrad_gather(inputs: Inputs) -> Work:
    """The same with source rows gathered while loaded."""
    return _fc2_bwd(inputs, gather=True)


def fc1_dgrad(inputs: Inputs) -> Work:
    """The gradient of H times w1."""
    o = Operands(inputs)
    run, plain = o.rows(o.h_RC, o.w1_ECD), o.bare(o.h_RC, o.w1_ECD)
    return _work(run, plain, inputs.shape, 2 * inputs.shape.hidden_dim)


def _fc2_wgrad(inputs: Inputs, gather: bool) -> Work:
    """Return work of FC2's weight gradient, with or without gathering rows while loading."""
    o = Operands(inputs)
    dy, row_ids_R = (o.x_TD, o.row_ids_R) if gather else (o.x_RD, None)
    args = (dy, o.a_RF, o.offsets_E)
    run = lambda: grouped_wgrad.grouped_wgrad(*args, row_ids_R=row_ids_R)  # noqa: E731
    return _work(run, o.bare(o.x_RD.T, o.a_RF), inputs.shape, inputs.shape.hidden_dim)


def fc2_wgrad(inputs: Inputs) -> Work:
    """The output's gradient, gathered rows, times the activated rows, by expert."""
    return _fc2_wgrad(inputs, gather=False)


def fc2_wgrad_gather(inputs: Inputs) -> Work:
    """The same with source rows gathered while loaded."""
    return _fc2_wgrad(inputs, gather=True)


def _fc1_wgrad(inputs: Inputs, gather: bool) -> Work:
    """Return work of FC1's weight gradient, with or without gathering rows while loading."""
    o = Operands(inputs)
    x, row_ids_R = (o.x_TD, o.row_ids_R) if gather else (o.x_RD, None)
    args = (x, o.h_RC, o.offsets_E)
    run = lambda: grouped_wgrad.grouped_wgrad(  # noqa: E731
        *args, row_ids_R=row_ids_R, transposed=True
    )
    return _work(run, o.bare(o.h_RC.T, o.x_RD), inputs.shape, 2 * inputs.shape.hidden_dim)


def fc1_wgrad(inputs: Inputs) -> Work:
    """The gradient of H times gathered source rows, by expert."""
    return _fc1_wgrad(inputs, gather=False)


def fc1_wgrad_gather(inputs: Inputs) -> Work:
    """The same with source rows gathered while loaded."""
    return _fc1_wgrad(inputs, gather=True)


GEMM = "tests/kernels/grouped/test_grouped_gemm.py"
WGRAD = "tests/kernels/grouped/test_grouped_wgrad.py"
COOPERATIVE, PINGPONG = GEMM, GEMM
if torch.cuda.is_available():
    COOPERATIVE, PINGPONG = (
        f"tests/kernels/grouped/test_{n}.py" for n in ("cooperative", "pingpong")
    )
OPS = (
    Op(fc1, COOPERATIVE),
    Op(fc1_gather, GEMM),
    Op(fc2, COOPERATIVE),
    Op(fc2_dgrad, PINGPONG),
    Op(fc2_dgrad_gather, PINGPONG),
    Op(fc1_dgrad, COOPERATIVE),
    Op(fc2_wgrad, WGRAD),
    Op(fc2_wgrad_gather, WGRAD),
    Op(fc1_wgrad, WGRAD),
    Op(fc1_wgrad_gather, WGRAD),
)


@pytest.mark.parametrize("op", make_params(OPS))
def test_gemm(op: Op, shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    run_op(op, shape, routing, session, ceilings)
