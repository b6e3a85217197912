"""The experts' operation as a custom op, for compilers, fake tensors and dispatch modes.

Schemas are flat. Each op has a record with one field per argument of its schema, so that arguments
are read by name.

Letters: as in `contract.py`.
"""

import re
from collections import namedtuple
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.backward import Grads, SavedState, compute_gradients
from moecore.kernels.experts.contract import LEAVE_OUT, ExpertMLPOptions, ExpertWeights, GradFlags
from moecore.kernels.experts.products import make_products
from moecore.kernels.ops import Op
from moecore.kernels.rows.activation import FLAT, make_activation_options
from moecore.kernels.rows.e4m3 import BLOCK, FP8
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.microscaled_rows import make_empty_microscaled_rows
from moecore.kernels.rows.move import sum_rows_without_autograd
from moecore.kernels.rows.record import Rows

RECIPE_FIELDS = [field.name for field in fields(Recipe)]
_INDEX = "Tensor? row_ids_R, Tensor slots_SK, Tensor offsets_e, Tensor? offsets_g"
_UPDATES = "Tensor? a1_erD, Tensor? b1_eCr, Tensor? a2_erF, Tensor? b2_eDr"
_OPTIONS = (
    f"{FLAT}, str products, bool saves_h, "
    "str scaling, bool power_of_two, str grad_format, int amax_history, str keep_hidden, "
    "bool hadamard, bool stochastic_rounding, str backend, ScalarType dtype"
)
_FORWARD = (
    f"(Tensor x_SD, Tensor w1_eCD, Tensor w2_eDF, {_UPDATES}, Tensor weights_R, "
    f"Tensor? handle, bool unsummed, Tensor? x_scales, {_INDEX}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    f"(Tensor dy, Tensor x_SD, Tensor? x_scales, Tensor h_RC, Tensor h_scales, Tensor w1_eCD, "
    f"Tensor w2_eDF, {_UPDATES}, Tensor weights_R, {_INDEX}, {_OPTIONS}, bool unsummed, "
    "bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _make_record_class(name: str, schema: str) -> Any:
    """Return a namedtuple class with a field per argument of a custom op's schema; default None."""
    names = re.findall(r"(\w+)[,)]", schema.split("->")[0])
    return namedtuple(name, names, defaults=[None] * len(names))


_Inputs = _make_record_class("_Inputs", _FORWARD)  # `handle` and those before it may have gradients
# h_RC is [0] where FC1 runs again, h_scales where H has no scales.
_BackwardInputs = _make_record_class("_BackwardInputs", _BACKWARD)


def _make_expert_options(op_args: Any) -> ExpertMLPOptions:
    """Return the options of `expert_mlp` from the flat arguments of a custom op."""
    activation = make_activation_options(
        op_args.kind, op_args.limit, op_args.up_limit, op_args.alpha, op_args.interleaved
    )
    recipe = None
    if op_args.scaling:
        recipe = Recipe(**{name: getattr(op_args, name) for name in RECIPE_FIELDS})
    return ExpertMLPOptions(
        activation=activation, products=op_args.products, saves_h=op_args.saves_h, recipe=recipe
    )


def _flatten_options(options: ExpertMLPOptions, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return options and dtype as flat arguments of the custom ops; scaling "" = no recipe."""
    activation, recipe = options.activation, options.recipe
    flat = [getattr(recipe or Recipe(), name) for name in RECIPE_FIELDS[1:]]
    scaling = "" if recipe is None else recipe.scaling
    return *activation.flat, options.products, options.saves_h, scaling, *flat, dtype


def _make_state(op_args: Any, h: Rows | None = None) -> SavedState:
    """Return rows, weights and index of a custom op's arguments, with `h`, FC1's output."""
    weights = ExpertWeights(w1_eCD=op_args.w1_eCD, w2_eDF=op_args.w2_eDF)
    index = ExpertIndex(**{name: getattr(op_args, name) for name in ExpertIndex._fields})
    rows = Rows(op_args.x_SD, op_args.x_scales, op_args.dtype)
    return SavedState(rows, h, weights.replace_updates(_list_updates(op_args)), index)


def _list_updates(op_args: Any) -> tuple[Any, ...]:
    """Return the LoRA matrices A and B of w1, then of w2, from a custom op's arguments."""
    return op_args.a1_erD, op_args.b1_eCr, op_args.a2_erF, op_args.b2_eDr


def _forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts' output, and values and scales of FC1's output, empty if not saved."""
    args = _Inputs(*flat)
    state: Any = _make_state(args)
    products = make_products(_make_expert_options(args), state.index, state.weights)
    h, a = products.fc1(products.prepare_rows(state.rows), saves_h=args.saves_h)
    # Outputs of a custom op must not alias each other, also if they are empty.
    none, no_scales = (args.x_SD.new_empty(0, dtype=dtype) for dtype in (args.dtype, torch.float32))
    h_rows = Rows(none) if h is None else h
    y = products.fc2(a)
    if not args.unsummed:
        y = sum_rows_without_autograd(y, *products.row_map)
    return y, h_rows.values, no_scales if h_rows.scales is None else h_rows.scales


def _forward_fake(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised outputs of `_forward` for tracing; [0] if an output is not saved."""
    args = _Inputs(*flat)
    (S, D), R, C = args.x_SD.shape, args.weights_R.shape[0], args.w1_eCD.shape[1]
    empty = partial(args.x_SD.new_empty, dtype=args.dtype)
    y = empty((R if args.unsummed else S, D))
    recipe = _make_expert_options(args).recipe
    h_format = "wide" if recipe is None or not args.saves_h else recipe.hidden_format
    if h_format == "fp8":
        return y, empty((R, C), dtype=FP8), empty((R, C // BLOCK), dtype=torch.float32)
    if h_format == "microscaled":
        assert recipe is not None
        return y, *make_empty_microscaled_rows(empty((R, C)), recipe)
    return y, empty((R, C) if args.saves_h else (0,)), empty((0,), dtype=torch.float32)


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    """Return all gradients from the backward op's flat arguments; shape [0] if not requested."""
    args = _BackwardInputs(*flat)
    h_scales = args.h_scales if args.h_scales.ndim > 1 else None
    h = Rows(args.h_RC, h_scales, args.dtype) if args.h_RC.ndim > 1 else None
    state, wants, dy = _make_state(args, h), GradFlags(*args.wants), args.dy.contiguous()
    products = make_products(_make_expert_options(args), state.index, state.weights)
    grads: Any = compute_gradients(products, state, dy, wants, has_expert_rows=args.unsummed)
    return tuple(g if want else dy.new_empty(0) for g, want in zip(grads, wants, strict=True))


def _backward_fake(*flat: Any) -> tuple[Tensor, ...]:
    """Return uninitialised gradients for tracing, as `_backward`; shape [0] if not requested."""
    args = _BackwardInputs(*flat)
    likes = (args.dy, args.w1_eCD, args.w2_eDF, args.weights_R, *_list_updates(args))
    return tuple(
        like.new_empty(like.shape) if want else args.dy.new_empty(0)
        for like, want in zip(likes, args.wants, strict=True)
    )


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Save the tensors and options that the backward `_differentiate` reads, in `ctx`."""
    args = _Inputs(*inputs)
    state = _make_state(args, Rows(*output[1:]))
    ctx.save_for_backward(*state.list_saved_tensors())
    ctx.options, ctx.dtype = _make_expert_options(args), args.dtype
    ctx.is_unsummed, ctx.has_handle = args.unsummed, args.handle is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # H would get a gradient of zeros, as large as itself


def _differentiate(ctx: Any, dy: Tensor | None, *_: None) -> Any:
    """Return the gradients of the forward op's arguments from `dy`; None = no gradient."""
    if dy is None:
        return _Inputs()
    needs = _Inputs(*ctx.needs_input_grad)
    leaf = "handle" if ctx.has_handle else "x_SD"
    wants = GradFlags(
        getattr(needs, leaf), *(getattr(needs, name) for name in GradFlags._fields[1:])
    )
    state = SavedState.from_tensors(ctx.saved_tensors, ctx.dtype)
    grads = run_traced_backward(dy, state, ctx.options, ctx.is_unsummed, wants)._asdict()
    return _Inputs(**{leaf: grads.pop("x")}, **grads)


_backward_op = Op("expert_mlp_bwd", _backward, _backward_fake, schema=_BACKWARD).custom
_forward_op = Op(
    "expert_mlp",
    _forward,
    _forward_fake,
    schema=_FORWARD,
    setup_context=_setup_context,
    backward=_differentiate,
).custom


def _raise_if_delayed_scaling(weights: ExpertWeights, recipe: Recipe | None) -> None:
    """Raise ValueError for delayed FP8 scaling, which the custom op does not support."""
    if weights.magnitudes is not None and recipe is not None:
        raise ValueError(
            f"Recipe.amax_history ({recipe.amax_history}) must be 0 for experts under "
            f"torch.compile, dispatch modes and second derivatives: {LEAVE_OUT}"
        )


def run_traced_backward(
    dy: Tensor,
    state: SavedState,
    options: ExpertMLPOptions,
    has_expert_rows: bool,
    grad_flags: GradFlags,
) -> Grads:
    """Return the gradients that `grad_flags` requests, by the custom op."""
    weights, index = state.weights, state.index
    _raise_if_delayed_scaling(weights, options.recipe)
    rows = Rows(dy.new_empty(0)) if state.rows is None else state.rows
    h = Rows(dy.new_empty(0)) if state.h is None else state.h
    h_scales = dy.new_empty(0) if h.scales is None else h.scales
    matrices = (weights.w1_eCD, weights.w2_eDF, *weights.list_updates(), index.weights_R)
    places = (index.row_ids_R, *index[2:])
    options_flat: Any = (*_flatten_options(options, dy.dtype), has_expert_rows, list(grad_flags))
    rows_flat = (rows.values, rows.scales, h.values, h_scales)
    grads = _backward_op(*_BackwardInputs(dy, *rows_flat, *matrices, *places, *options_flat))
    return Grads(*(grad if want else None for grad, want in zip(grads, grad_flags, strict=True)))


def run_traced_expert_mlp(
    rows: Rows,
    weights: ExpertWeights,
    grad_handle_RD: Tensor | None,
    index: ExpertIndex,
    options: ExpertMLPOptions,
) -> Tensor:
    """Return token outputs by the custom op; if `grad_handle_RD` is given, expert rows' outputs."""
    _raise_if_delayed_scaling(weights, options.recipe)
    matrices = (weights.w1_eCD, weights.w2_eDF, *weights.list_updates())
    handle = rows.grad_handle_SD if grad_handle_RD is None else grad_handle_RD
    leaves = (rows.values, *matrices, index.weights_R, handle, grad_handle_RD is not None)
    places = (index.row_ids_R, *index[2:])
    y, *_ = _forward_op(
        *_Inputs(*leaves, rows.scales, *places, *_flatten_options(options, rows.dtype))
    )
    return y
