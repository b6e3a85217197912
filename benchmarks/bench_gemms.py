"""Each grouped product of a layer alone, against `torch`'s on rows that already lie gathered.

So a ratio of 1 means that the op's gather (and, for FC1, its activation) cost nothing. Every
product is 2 R M N FLOP; `fraction` is of a large dense product's rate.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K,
C = 2F columns of FC1.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.ops import Inputs, Op, Work, params, run_op
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape
from moecore._compat import grouped_mm

ROUTINGS = ("learned",)  # bench_layer.py times the bare products under all of them


class Operands:
    """Rows and weights of one layer's products."""

    def __init__(self, inputs: Inputs) -> None:
        s = inputs.shape
        self.x_TD, self.row_ids_R, self.offsets_E = inputs.x_TD, inputs.index[0], inputs.offsets_E
        self.weights_R = inputs.weights_R
        self.x_RD = self.x_TD.index_select(0, self.row_ids_R)
        self.w1_ECD = 0.02 * inputs.random(s.num_experts, 2 * s.hidden_dim, s.dim)
        self.w2_EDF = 0.02 * inputs.random(s.num_experts, s.dim, s.hidden_dim)
        self.a_RF = inputs.random(s.rows, s.hidden_dim)

    def gemm(self, a: Tensor, b: Tensor, **rows: Tensor) -> Call:
        """The op, or its reference where there is no GPU."""
        from moecore.kernels import grouped_gemm as module

        op = module.grouped_gemm if a.is_cuda else module.grouped_gemm_ref
        return lambda: op(a, b, self.offsets_E, **rows)

    def bare(self, a: Tensor, b: Tensor) -> Call:
        """The bare product of torch."""
        return lambda: grouped_mm(a, b, offs=self.offsets_E)


def _work(run: Call, plain: Call, shape: Shape, columns: int) -> Work:
    """R rows and matrices of D x `columns` elements."""
    flops = 2 * shape.rows * shape.dim * columns
    return Work(run, plain, num_flops=flops, baseline="bare grouped_mm")


def grouped_gemm_fc1(inputs: Inputs) -> Work:
    """Source rows gathered while loaded, times w1^T."""
    o = Operands(inputs)
    w1_EDC = o.w1_ECD.transpose(1, 2)
    run = o.gemm(o.x_TD, w1_EDC, row_ids_R=o.row_ids_R)
    return _work(run, o.bare(o.x_RD, w1_EDC), inputs.shape, 2 * inputs.shape.hidden_dim)


def grouped_gemm_activation(inputs: Inputs) -> Work:
    """FC1 again, with the weighted activation as a second output."""
    from moecore.kernels import grouped_gemm as module
    from moecore.kernels.activation import ActivationOptions

    o = Operands(inputs)
    op = module.grouped_gemm_activation if o.x_TD.is_cuda else module.grouped_gemm_activation_ref
    options = ActivationOptions(kind="swiglu")
    args: Any = (o.x_TD, o.w1_ECD, o.row_ids_R, o.weights_R, o.offsets_E, options)
    plain = o.bare(o.x_RD, o.w1_ECD.transpose(1, 2))
    return _work(lambda: op(*args), plain, inputs.shape, 2 * inputs.shape.hidden_dim)


def grouped_gemm_fc2(inputs: Inputs) -> Work:
    """Activated rows times w2^T."""
    o = Operands(inputs)
    w2_EFD = o.w2_EDF.transpose(1, 2)
    run, plain = o.gemm(o.a_RF, w2_EFD), o.bare(o.a_RF, w2_EFD)
    return _work(run, plain, inputs.shape, inputs.shape.hidden_dim)


def grouped_gemm_fc2_dgrad(inputs: Inputs) -> Work:
    """The output's gradient, gathered while loaded, times w2."""
    o = Operands(inputs)
    run = o.gemm(o.x_TD, o.w2_EDF, row_ids_R=o.row_ids_R)
    return _work(run, o.bare(o.x_RD, o.w2_EDF), inputs.shape, inputs.shape.hidden_dim)


def grouped_gemm_fc1_dgrad(inputs: Inputs) -> Work:
    """The gradient of H times w1."""
    o = Operands(inputs)
    run, plain = o.gemm(inputs.h_RC, o.w1_ECD), o.bare(inputs.h_RC, o.w1_ECD)
    return _work(run, plain, inputs.shape, 2 * inputs.shape.hidden_dim)


def grouped_wgrad_fc2(inputs: Inputs) -> Work:
    """The output's gradient, gathered while loaded, times the activated rows, by expert."""
    from moecore.kernels import grouped_wgrad as module

    o = Operands(inputs)
    args = (o.x_TD, o.a_RF, o.row_ids_R, o.offsets_E)
    plain = o.bare(o.x_RD.T, o.a_RF)
    return _work(lambda: module.grouped_wgrad(*args), plain, inputs.shape, inputs.shape.hidden_dim)


def grouped_wgrad_fc1(inputs: Inputs) -> Work:
    """The gradient of H times the source rows, gathered while loaded, by expert."""
    from moecore.kernels import grouped_wgrad as module

    o = Operands(inputs)
    args = (o.x_TD, inputs.h_RC, o.row_ids_R, o.offsets_E)
    plain = o.bare(inputs.h_RC.T, o.x_RD)
    return _work(
        lambda: module.grouped_wgrad(*args, transposed=True),
        plain,
        inputs.shape,
        2 * inputs.shape.hidden_dim,
    )


GEMM, WGRAD = "tests/kernels/test_grouped_gemm.py", "tests/kernels/test_grouped_wgrad.py"
OPS = (
    Op(grouped_gemm_fc1, GEMM),
    Op(grouped_gemm_activation, GEMM),
    Op(grouped_gemm_fc2, GEMM),
    Op(grouped_gemm_fc2_dgrad, GEMM),
    Op(grouped_gemm_fc1_dgrad, GEMM),
    Op(grouped_wgrad_fc2, WGRAD),
    Op(grouped_wgrad_fc1, WGRAD),
)


@pytest.mark.parametrize("op", params(OPS))
def test_gemm(op: Op, shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    run_op(op, shape, routing, session, ceilings)
