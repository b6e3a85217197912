"""The experts' operation as a custom op: what compilers, fake tensors and dispatch modes see.

Schemas are flat; each op has a record of its arguments, so that nothing is taken by position.

Letters: as in `contract.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moecore.kernels.experts.backward import Grads, Saved, Wants, differentiate
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertWeights, ProductsName
from moecore.kernels.experts.products import make_products
from moecore.kernels.ops import register
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_plain
from moecore.kernels.rows.record import Rows

_INDEX = "Tensor row_ids_R, Tensor slots_SK, Tensor offsets_e"
_OPTIONS = "str kind, float limit, float alpha, bool interleaved, str products, bool keep_h"
_FORWARD = (
    f"(Tensor x_SD, Tensor w1_eCD, Tensor w2_eDF, Tensor weights_R, Tensor? handle_RD, {_INDEX}, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_BACKWARD = (
    f"(Tensor dy, Tensor x_SD, Tensor h_RC, Tensor w1_eCD, Tensor w2_eDF, Tensor weights_R, "
    f"{_INDEX}, {_OPTIONS}, bool unsummed, bool[] wants) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


class _Inputs(NamedTuple):
    """Arguments of the forward op; `handle_RD` and those before it may have gradients."""

    x_SD: Any = None
    w1_eCD: Any = None
    w2_eDF: Any = None
    weights_R: Any = None
    handle_RD: Any = None
    row_ids_R: Any = None
    slots_SK: Any = None
    offsets_e: Any = None
    kind: Any = None
    limit: Any = None
    alpha: Any = None
    interleaved: Any = None
    products: Any = None
    keep_h: Any = None


class _BackwardInputs(NamedTuple):
    """Arguments of the backward op; h_RC is [0] where FC1 runs again."""

    dy: Tensor
    x_SD: Tensor
    h_RC: Tensor
    w1_eCD: Tensor
    w2_eDF: Tensor
    weights_R: Tensor
    row_ids_R: Tensor
    slots_SK: Tensor
    offsets_e: Tensor
    kind: str
    limit: float
    alpha: float
    interleaved: bool
    products: ProductsName
    keep_h: bool
    unsummed: bool
    wants: list[bool]


def _options(args: _Inputs | _BackwardInputs) -> ExpertMLPOptions:
    activation = ActivationOptions(
        kind=args.kind, limit=args.limit, alpha=args.alpha, interleaved=args.interleaved
    )
    return ExpertMLPOptions(activation=activation, products=args.products, keep_h=args.keep_h)


def _index(args: _Inputs | _BackwardInputs) -> ExpertIndex:
    return ExpertIndex(args.row_ids_R, args.weights_R, args.slots_SK, args.offsets_e)


def _weights(args: _Inputs | _BackwardInputs) -> ExpertWeights:
    return ExpertWeights(w1_eCD=args.w1_eCD, w2_eDF=args.w2_eDF)


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    """Return y_SD, or y_RD with a handle, and h_RC (empty unless kept)."""
    args = _Inputs(*flat)
    products = make_products(_options(args), _index(args), _weights(args))
    h, a = products.fc1(products.as_kept(Rows(args.x_SD)))
    h_RC = products.h_as_kept(h).values if args.keep_h else args.x_SD.new_empty(0)
    y = products.fc2(a)
    if args.handle_RD is None:
        y = sum_rows_plain(y, *products.where)
    return y, h_RC


def _forward_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    args = _Inputs(*flat)
    (S, D), R, C = args.x_SD.shape, args.weights_R.shape[0], args.w1_eCD.shape[1]
    h_shape = (R, C) if args.keep_h else (0,)
    y_shape = (S if args.handle_RD is None else R, D)
    return args.x_SD.new_empty(y_shape), args.x_SD.new_empty(h_shape)


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    """Return dx, dw1, dw2 and dweights, empty where not wanted."""
    args = _BackwardInputs(*flat)
    h = None if args.h_RC.ndim == 1 else Rows(args.h_RC)
    saved = Saved(Rows(args.x_SD), h, _weights(args), _index(args))
    products = make_products(_options(args), saved.index, saved.weights)
    wants, dy = Wants(*args.wants), args.dy.contiguous()
    grads = differentiate(products, saved, dy, wants, unsummed=args.unsummed)
    return tuple(dy.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(*flat: Any) -> tuple[Tensor, ...]:
    args = _BackwardInputs(*flat)
    likes = (args.dy, args.w1_eCD, args.w2_eDF, args.weights_R)
    wanted = zip(likes, args.wants, strict=True)
    return tuple(like.new_empty(like.shape if want else (0,)) for like, want in wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args, h_RC = _Inputs(*inputs), output[1]
    saved = Saved(Rows(args.x_SD), Rows(h_RC), _weights(args), _index(args))
    ctx.save_for_backward(*saved.tensors())
    ctx.options, ctx.dtype = _options(args), args.x_SD.dtype
    ctx.is_unsummed = args.handle_RD is not None
    ctx.mark_non_differentiable(h_RC)
    ctx.set_materialize_grads(False)  # H would get a gradient of zeros, as large as itself


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> _Inputs:
    if dy is None:
        return _Inputs()
    needs = _Inputs(*ctx.needs_input_grad)
    of_x = needs.handle_RD if ctx.is_unsummed else needs.x_SD
    wants = Wants(of_x, needs.w1_eCD, needs.w2_eDF, needs.weights_R)
    saved = Saved.of(ctx.saved_tensors, ctx.dtype)
    found = traced_backward(dy, saved, ctx.options, ctx.is_unsummed, wants)
    grads = _Inputs(w1_eCD=found.w1, w2_eDF=found.w2, weights_R=found.weights)
    return grads._replace(**{"handle_RD" if ctx.is_unsummed else "x_SD": found.x})


_bwd = register("expert_mlp_bwd", _backward, _backward_fake, schema=_BACKWARD)
_fwd = register(
    "expert_mlp",
    _forward,
    _forward_fake,
    schema=_FORWARD,
    setup_context=_save,
    backward=_differentiate,
)


def traced_backward(
    dy: Tensor, saved: Saved, options: ExpertMLPOptions, unsummed: bool, wants: Wants
) -> Grads:
    """Return the gradients by the custom op; None where not wanted."""
    weights, index = saved.weights, saved.index
    x_SD = dy.new_empty(0) if saved.rows is None else saved.rows.widen()
    h_RC = dy.new_empty(0) if saved.h is None else saved.h.values
    matrices = (weights.w1_eCD, weights.w2_eDF, index.weights_R)
    places = (index.row_ids_R, index.slots_SK, index.offsets_e)
    how: Any = (*_flat(options), unsummed, list(wants))
    args = _BackwardInputs(dy, x_SD, h_RC, *matrices, *places, *how)
    found = zip(_bwd(*args), wants, strict=True)
    return Grads(*(grad if want else None for grad, want in found))


def traced_expert_mlp(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    handle_RD: Tensor | None,
    index: ExpertIndex,
    options: ExpertMLPOptions,
) -> Tensor:
    """Return what `expert_mlp` returns, by the custom op, of wide x, w1, w2 and weights_R."""
    places = (index.row_ids_R, index.slots_SK, index.offsets_e)
    y, _ = _fwd(*_Inputs(*tensors, handle_RD, *places, *_flat(options)))
    return y


def _flat(options: ExpertMLPOptions) -> tuple[Any, ...]:
    activation = options.activation
    how = (activation.kind, activation.limit, activation.alpha, activation.interleaved)
    return *how, options.products, options.keep_h
