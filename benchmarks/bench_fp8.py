"""FP8 operations alone: products and linears against bf16, quantisers against plain torch.

Operands of products are quantised in advance, so `fp8_four_products` (a layer's forward and input
gradients) and `fp8_two_wgrads` give the part of a bf16 layer's product time that remains in FP8. A
linear is forward and backward with all its casts, from D to D features, like attention's
projections. Quantisers count the fewest bytes that they must move: b is 2 bytes (bf16), an FP8
value has 1 byte, and 128 values have a scale of 4 bytes.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K, C =
2F columns of FC1, t row tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm

from benchmarks.harness import Call
from benchmarks.layers import FP8_TESTS
from benchmarks.ops import Inputs, Op, Work, make_params, run_op
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape
from moecore.base.options.precision import Recipe, Scaling
from moecore.kernels.grouped import scaled_rows as sr
from moecore.kernels.grouped.fp8 import fp8_gemm, fp8_wgrad
from moecore.kernels.rows import quantised as q
from moecore.kernels.rows import quantised_activation as qa
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.cast import quantise_matrix
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.rows.scaling import Blocks, cast_ref
from moecore.moe.amax_history import advance_amax_histories
from moecore.precision.linear import Fp8Products

ROUTINGS = ("learned",)
SWIGLU = ActivationOptions(kind="swiglu")
HOW = {"power_of_two": True}
BYTES = 1 + 4 / q.BLOCK  # bytes of a value and its part of a scale


class Operands:
    """Rows and weights of one layer, in bf16 and quantised, computed on access."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.shape = inputs, inputs.shape
        self.row_ids_R, self.slots_TK, self.num_rows = inputs.index
        self.offsets_E = inputs.offsets_E

    @cached_property
    def tiles(self) -> RowTiles:
        return map_row_tiles(self.offsets_E, self.shape.rows)

    @cached_property
    def x(self) -> Rows:
        return q.quantise_rows(self.inputs.x_TD, **HOW)

    @cached_property
    def x_RD(self) -> Tensor:
        return self.inputs.x_TD.index_select(0, self.row_ids_R)

    @cached_property
    def dy_RD(self) -> Tensor:
        return self.inputs.random(self.shape.rows, self.shape.dim)

    @cached_property
    def a_RF(self) -> Tensor:
        return self.inputs.random(self.shape.rows, self.shape.hidden_dim)

    @cached_property
    def dh_RC(self) -> Tensor:
        return self.inputs.random(self.shape.rows, 2 * self.shape.hidden_dim)

    @cached_property
    def w1_ECD(self) -> Tensor:
        s = self.shape
        return 0.02 * self.inputs.random(s.num_experts, 2 * s.hidden_dim, s.dim)

    @cached_property
    def w2_EDF(self) -> Tensor:
        s = self.shape
        return 0.02 * self.inputs.random(s.num_experts, s.dim, s.hidden_dim)

    def rows(self, x_RN: Tensor) -> Blocks:
        """Return expert rows quantised for the forward and for input gradients."""
        return q.gather_row_blocks(q.quantise_rows(x_RN, **HOW), None, None, self.num_rows)

    def columns(self, x_RN: Tensor) -> Blocks:
        """Return expert rows quantised for weight gradients."""
        return q.tile_tokens(self.rows(x_RN), None, self.tiles)

    def times_transposed(self, x_RK: Tensor, w_ENK: Tensor) -> tuple[Call, Call]:
        """Return a product of the forward as calls in FP8 and in bf16."""
        rows, w = self.rows(x_RK), q.quantise_weights(w_ENK, **HOW).rows
        assert w is not None
        where = (self.offsets_E, self.tiles, torch.bfloat16)
        return (
            lambda: fp8_gemm(rows, w, *where),
            lambda: grouped_mm(x_RK, w_ENK.transpose(1, 2), offs=self.offsets_E),
        )

    def times(self, dy_RN: Tensor, w_ENK: Tensor) -> tuple[Call, Call]:
        """Return an input gradient's product as calls in FP8 and in bf16."""
        rows, w = self.rows(dy_RN), q.quantise_weights(w_ENK, **HOW).columns
        assert w is not None
        where = (self.offsets_E, self.tiles, torch.bfloat16)
        return (
            lambda: fp8_gemm(rows, w, *where),
            lambda: grouped_mm(dy_RN, w_ENK, offs=self.offsets_E),
        )

    def outer(self, x_RM: Tensor, y_RN: Tensor) -> tuple[Call, Call]:
        """Return a weight gradient's product as calls in FP8 with fp32 sums and in bf16."""
        x, y = self.columns(x_RM), self.columns(y_RN)
        return (
            lambda: fp8_wgrad(x, y, self.tiles),
            lambda: grouped_mm(x_RM.T, y_RN, offs=self.offsets_E),
        )


def _work(o: Operands, *pairs: tuple[Call, Call], columns: int) -> Work:
    """Return work that runs the pairs in sequence, on R rows and D x `columns` elements in all."""

    def each(which: int) -> Call:
        calls = [pair[which] for pair in pairs]
        return lambda: [call() for call in calls]

    flops = 2 * o.shape.rows * o.shape.dim * columns
    return Work(each(0), each(1), num_flops=flops, baseline="bare grouped_mm in bf16")


def _fc1(o: Operands) -> tuple[Call, Call]:
    return o.times_transposed(o.x_RD, o.w1_ECD)


def _fc2(o: Operands) -> tuple[Call, Call]:
    return o.times_transposed(o.a_RF, o.w2_EDF)


def _fc2_dgrad(o: Operands) -> tuple[Call, Call]:
    return o.times(o.dy_RD, o.w2_EDF)


def _fc1_dgrad(o: Operands) -> tuple[Call, Call]:
    return o.times(o.dh_RC, o.w1_ECD)


def _fc1_wgrad(o: Operands) -> tuple[Call, Call]:
    return o.outer(o.dh_RC, o.x_RD)


def _fc2_wgrad(o: Operands) -> tuple[Call, Call]:
    return o.outer(o.dy_RD, o.a_RF)


def fp8_fc1(inputs: Inputs) -> Work:
    """Expert rows times w1^T."""
    o = Operands(inputs)
    return _work(o, _fc1(o), columns=2 * o.shape.hidden_dim)


def fp8_fc2(inputs: Inputs) -> Work:
    """Activated rows times w2^T."""
    o = Operands(inputs)
    return _work(o, _fc2(o), columns=o.shape.hidden_dim)


def fp8_fc2_dgrad(inputs: Inputs) -> Work:
    """The output's gradient times w2."""
    o = Operands(inputs)
    return _work(o, _fc2_dgrad(o), columns=o.shape.hidden_dim)


def fp8_fc1_dgrad(inputs: Inputs) -> Work:
    """The gradient of H times w1."""
    o = Operands(inputs)
    return _work(o, _fc1_dgrad(o), columns=2 * o.shape.hidden_dim)


def fp8_fc1_wgrad(inputs: Inputs) -> Work:
    """The gradient of H times expert rows, by expert."""
    o = Operands(inputs)
    return _work(o, _fc1_wgrad(o), columns=2 * o.shape.hidden_dim)


def fp8_fc2_wgrad(inputs: Inputs) -> Work:
    """The output's gradient times activated rows, by expert."""
    o = Operands(inputs)
    return _work(o, _fc2_wgrad(o), columns=o.shape.hidden_dim)


def fp8_four_products(inputs: Inputs) -> Work:
    """Both products of the forward and both input gradients."""
    o = Operands(inputs)
    pairs = (_fc1(o), _fc2(o), _fc2_dgrad(o), _fc1_dgrad(o))
    return _work(o, *pairs, columns=6 * o.shape.hidden_dim)


def fp8_two_wgrads(inputs: Inputs) -> Work:
    """Both weight gradients."""
    o = Operands(inputs)
    return _work(o, _fc1_wgrad(o), _fc2_wgrad(o), columns=3 * o.shape.hidden_dim)


def _both(op: Callable[..., Any], ref: Callable[..., Any], num_bytes: float) -> Work:
    return Work(op, ref, int(num_bytes))


def quantise_rows(inputs: Inputs) -> Work:
    """T D b read; T D values and their scales written."""
    x_TD = inputs.x_TD
    return _both(
        lambda: q.quantise_rows(x_TD, **HOW),
        lambda: q.quantise_rows_ref(x_TD, **HOW),
        x_TD.numel() * (2 + BYTES),
    )


def gather_row_blocks(inputs: Inputs) -> Work:
    """T D values and scales and the index, 4 R, read; R D values and scales written."""
    o = Operands(inputs)
    rows, where, s = o.x, (o.row_ids_R, o.slots_TK, o.num_rows), o.shape
    return _both(
        lambda: q.gather_row_blocks(rows, *where),
        lambda: q.gather_row_blocks_ref(rows, o.row_ids_R),
        (s.tokens + s.rows) * s.dim * BYTES + 4 * s.rows,
    )


def tile_tokens(inputs: Inputs) -> Work:
    """T D values and scales and the index, 4 R, read; R D values and scales written."""
    o = Operands(inputs)
    rows, tiles, s = o.x, o.tiles, o.shape
    return _both(
        lambda: q.tile_tokens(rows, o.row_ids_R, tiles),
        lambda: q.tile_tokens_ref(rows, o.row_ids_R, tiles),
        (s.tokens + s.rows) * s.dim * BYTES + 4 * s.rows,
    )


def quantise_weights(inputs: Inputs) -> Work:
    """2 E F D b of FC1 read, the values written in both layouts."""
    w1_ECD = Operands(inputs).w1_ECD
    return _both(
        lambda: q.quantise_weights(w1_ECD, **HOW),
        lambda: q.quantise_weights_ref(w1_ECD, **HOW),
        w1_ECD.numel() * 4,
    )


def quantised_activation(inputs: Inputs) -> Work:
    """2 R F b and the weights, 4 R, read; R F values and scales written."""
    s, h_RC, weights_R = inputs.shape, inputs.h_RC, inputs.weights_R
    num_rows = inputs.index[2]
    return _both(
        lambda: qa.quantised_activation(h_RC, weights_R, num_rows, SWIGLU, **HOW),
        lambda: qa.quantised_activation_ref(h_RC, weights_R, SWIGLU, **HOW),
        s.rows * (s.hidden_dim * (4 + BYTES) + 4),
    )


def quantised_activation_bwd(inputs: Inputs) -> Work:
    """3 R F b and 4 R read; dH and A, 3 R F values and scales, and 4 R written."""
    o, s = Operands(inputs), inputs.shape
    args = (Rows(inputs.h_RC), o.a_RF, inputs.weights_R, o.num_rows, SWIGLU)
    return _both(
        lambda: qa.quantised_activation_bwd(*args, **HOW),
        lambda: qa.quantised_activation_bwd_ref(*args, **HOW),
        s.rows * (s.hidden_dim * (6 + 3 * BYTES) + 8),
    )


def _scaled_rows(inputs: Inputs, *, per_row: bool, delayed: bool = False) -> Work:
    """Return work that quantises expert rows of D columns as both operands, like dY and dH."""
    x_RD, offsets_E = Operands(inputs).dy_RD, inputs.offsets_E
    how: dict[str, Any] = dict(per_row=per_row, **HOW)
    if delayed:
        how |= dict(amax=x_RD.new_ones(1).float(), new_amax=x_RD.new_zeros(1).float())
    return _both(
        lambda: sr.quantise_expert_rows(x_RD, offsets_E, sr.pad_offsets(offsets_E), **how),
        lambda: sr.quantise_expert_rows_ref(x_RD, offsets_E, **how),
        x_RD.numel() * (4 if delayed else 6),
    )


def scaled_rows_rowwise(inputs: Inputs) -> Work:
    """2 R D b read; the values written in both layouts."""
    return _scaled_rows(inputs, per_row=True)


def scaled_rows_tensorwise(inputs: Inputs) -> Work:
    """2 R D b read; the values written in both layouts."""
    return _scaled_rows(inputs, per_row=False)


def scaled_rows_delayed(inputs: Inputs) -> Work:
    """R D b read; the values written in both layouts."""
    return _scaled_rows(inputs, per_row=False, delayed=True)


def scaled_rows_alone(inputs: Inputs) -> Work:
    """R D b read; the values written along rows, each with its scale."""
    x_RD, offsets_E = Operands(inputs).dy_RD, inputs.offsets_E
    how: dict[str, Any] = dict(per_row=True, columnwise=False, **HOW)
    return _both(
        lambda: sr.quantise_expert_rows(x_RD, offsets_E, None, **how),
        lambda: sr.quantise_expert_rows_ref(x_RD, offsets_E, **how),
        x_RD.numel() * 3,
    )


def _scaled_matrices(inputs: Inputs, *, per_row: bool) -> Work:
    """Return work that quantises FC1's weights in both layouts."""
    w1_ECD, how = Operands(inputs).w1_ECD, dict(per_row=per_row, **HOW)
    return _both(
        lambda: sr.quantise_expert_matrices(w1_ECD, **how),
        lambda: sr.quantise_expert_matrices_ref(w1_ECD, **how),
        w1_ECD.numel() * 6,
    )


def scaled_matrices_rowwise(inputs: Inputs) -> Work:
    """2 * 2 E F D b of FC1 read; the values written in both layouts."""
    return _scaled_matrices(inputs, per_row=True)


def scaled_matrices_tensorwise(inputs: Inputs) -> Work:
    """2 * 2 E F D b of FC1 read; the values written in both layouts."""
    return _scaled_matrices(inputs, per_row=False)


def _cast(inputs: Inputs, kind: str, num_bytes: int, **more: Any) -> Work:
    """Return work that quantises T rows of D columns as both operands, like a dense linear's dY."""
    x_TD, amax = inputs.x_TD, more.get("amax")
    return _both(
        lambda: quantise_matrix(x_TD, kind, **HOW, **more),
        lambda: [cast_ref(x, amax, kind, "e4m3", True) for x in (x_TD, x_TD.T)],
        x_TD.numel() * num_bytes,
    )


def cast_blockwise(inputs: Inputs) -> Work:
    """T D b read; the values written in both layouts."""
    return _cast(inputs, "tile", 4)


def cast_rowwise(inputs: Inputs) -> Work:
    """2 T D b read; the values written in both layouts."""
    return _cast(inputs, "row", 6)


def cast_tensorwise(inputs: Inputs) -> Work:
    """2 T D b read; the values written in both layouts."""
    return _cast(inputs, "tensor", 6)


def cast_delayed(inputs: Inputs) -> Work:
    """T D b read; the values written in both layouts. The baseline computes no new amax."""
    amax, new_amax = (inputs.x_TD.new_ones(1).float() for _ in range(2))
    return _cast(inputs, "tensor", 4, amax=amax, new_amax=new_amax)


def _linear(inputs: Inputs, scaling: Scaling, amax_history: int = 0) -> Work:
    """Return work of one dense linear: forward, input gradient and weight gradient."""
    s, products = inputs.shape, Fp8Products(Recipe(scaling=scaling, amax_history=amax_history))
    x_TD = inputs.x_TD.detach().requires_grad_()
    w_DD = (0.02 * inputs.random(s.dim, s.dim)).requires_grad_()
    dy_TD = inputs.random(s.tokens, s.dim)

    if products.history is not None:  # after a first step
        products.history.get_current_amax(inputs.device, training=True)
        advance_amax_histories([products.history], inputs.device, None)

    def each(op: Callable[[Tensor, Tensor], Tensor]) -> Call:
        def call() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(op(x_TD, w_DD), (x_TD, w_DD), dy_TD)

        return call

    flops = 6 * s.tokens * s.dim * s.dim
    return Work(each(products), each(F.linear), num_flops=flops, baseline="bf16")


def fp8_linear(inputs: Inputs) -> Work:
    """A linear from D to D, blockwise."""
    return _linear(inputs, "blockwise")


def fp8_linear_rowwise(inputs: Inputs) -> Work:
    """The same by row."""
    return _linear(inputs, "rowwise")


def fp8_linear_tensorwise(inputs: Inputs) -> Work:
    """The same by tensor."""
    return _linear(inputs, "tensorwise")


def fp8_linear_delayed(inputs: Inputs) -> Work:
    """The same by tensor, with scales of earlier steps."""
    return _linear(inputs, "tensorwise", amax_history=16)


PRODUCTS, QUANTISERS, ACTIVATION = FP8_TESTS
SCALED, CASTS = "tests/kernels/grouped/test_scaled_rows.py", "tests/kernels/rows/test_cast.py"
LINEAR = CASTS if torch.cuda.is_available() else "tests/precision/test_linear.py"
OPS = (
    Op(fp8_fc1, PRODUCTS),
    Op(fp8_fc2, PRODUCTS),
    Op(fp8_fc2_dgrad, PRODUCTS),
    Op(fp8_fc1_dgrad, PRODUCTS),
    Op(fp8_fc1_wgrad, PRODUCTS),
    Op(fp8_fc2_wgrad, PRODUCTS),
    Op(fp8_four_products, PRODUCTS),
    Op(fp8_two_wgrads, PRODUCTS),
    Op(quantise_rows, QUANTISERS),
    Op(gather_row_blocks, QUANTISERS),
    Op(tile_tokens, QUANTISERS),
    Op(quantise_weights, QUANTISERS),
    Op(quantised_activation, ACTIVATION),
    Op(quantised_activation_bwd, ACTIVATION),
    Op(fp8_linear, LINEAR),
    Op(fp8_linear_rowwise, LINEAR),
    Op(fp8_linear_tensorwise, LINEAR),
    Op(fp8_linear_delayed, LINEAR),
    Op(scaled_rows_rowwise, SCALED),
    Op(scaled_rows_tensorwise, SCALED),
    Op(scaled_rows_delayed, SCALED),
    Op(scaled_rows_alone, SCALED),
    Op(scaled_matrices_rowwise, SCALED),
    Op(scaled_matrices_tensorwise, SCALED),
    Op(cast_blockwise, CASTS),
    Op(cast_rowwise, CASTS),
    Op(cast_tensorwise, CASTS),
    Op(cast_delayed, CASTS),
)


@pytest.mark.parametrize("op", make_params(OPS))
def test_fp8(op: Op, shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    run_op(op, shape, routing, session, ceilings)
