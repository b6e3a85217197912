"""The experts' operation as a custom op: what compilers, fake tensors and dispatch modes see.

Schemas are flat, so each op has a record of its arguments; nothing is taken by position.

Letters: as in `contract.py`.
"""

from typing import Any, NamedTuple

from torch import Tensor

from moecore.kernels.experts.backward import Grads, Saved, Wants, differentiate
from moecore.kernels.experts.contract import ExpertMLPOptions, ProductsName
from moecore.kernels.experts.products import make_products
from moecore.kernels.ops import register
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_plain
from moecore.kernels.rows.record import Rows


class _Inputs(NamedTuple):
    """The custom op's arguments; `handle_RD` and those before it may have gradients."""

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


def _forward(
    x_SD: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    weights_R: Tensor,
    handle_RD: Tensor | None,
    row_ids_R: Tensor,
    slots_SK: Tensor,
    offsets_e: Tensor,
    kind: str,
    limit: float,
    alpha: float,
    interleaved: bool,
    products: str,
    keep_h: bool,
) -> tuple[Tensor, Tensor]:
    """Return y_SD, or y_RD with a handle, and h_RC (empty unless kept)."""
    index = ExpertIndex(row_ids_R, weights_R, slots_SK, offsets_e)
    act = ActivationOptions(kind=kind, limit=limit, alpha=alpha, interleaved=interleaved)
    made = make_products(products, index, act, hidden_dim=w2_eDF.shape[2])
    h_RC, a_RF = made.fc1(made.source(Rows(x_SD), "fc1"), w1_eCD, weights_R)
    y = made.rows(a_RF, w2_eDF.transpose(1, 2))
    if handle_RD is None:
        y = sum_rows_plain(y, *made.where)
    return y, h_RC if keep_h else h_RC.new_empty(0)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = _Inputs(*args)
    (S, D), R, C = inputs.x_SD.shape, inputs.weights_R.shape[0], inputs.w1_eCD.shape[1]
    rows = S if inputs.handle_RD is None else R
    h_shape = (R, C) if inputs.keep_h else (0,)
    return inputs.x_SD.new_empty(rows, D), inputs.x_SD.new_empty(h_shape)


def _backward(
    dy: Tensor,
    x_SD: Tensor,
    h_RC: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    weights_R: Tensor,
    row_ids_R: Tensor,
    slots_SK: Tensor,
    offsets_e: Tensor,
    kind: str,
    limit: float,
    alpha: float,
    interleaved: bool,
    products: str,
    unsummed: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw1, dw2 and dweights, empty where not wanted; h_RC is [0] where not kept."""
    kept_h = None if h_RC.ndim == 1 else h_RC
    index = (row_ids_R, weights_R, slots_SK, offsets_e)
    saved = Saved(x_SD, None, w1_eCD, w2_eDF, *index, kept_h)
    act = ActivationOptions(kind=kind, limit=limit, alpha=alpha, interleaved=interleaved)
    made = make_products(products, saved.expert_index, act, hidden_dim=w2_eDF.shape[2])
    grads = differentiate(made, act, saved, dy.contiguous(), Wants(*wants), unsummed=unsummed)
    dx, dw1, dw2, dweights_R = (dy.new_empty(0) if g is None else g for g in grads)
    return dx, dw1, dw2, dweights_R


def _backward_fake(dy, x_SD, h_RC, w1_eCD, w2_eDF, weights_R, *rest):  # type: ignore[no-untyped-def]
    *_, wants = rest
    likes = zip((dy, w1_eCD, w2_eDF, weights_R), wants, strict=True)
    return tuple(like.new_empty(like.shape if want else (0,)) for like, want in likes)


_bwd = register("expert_mlp_bwd", _backward, _backward_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args, h_RC = _Inputs(*inputs), output[1]
    index = (args.row_ids_R, args.weights_R, args.slots_SK, args.offsets_e)
    ctx.save_for_backward(*Saved(args.x_SD, None, args.w1_eCD, args.w2_eDF, *index, h_RC))
    act = ActivationOptions(
        kind=args.kind, limit=args.limit, alpha=args.alpha, interleaved=args.interleaved
    )
    ctx.options = ExpertMLPOptions(activation=act, products=args.products, keep_h=args.keep_h)
    ctx.is_unsummed = args.handle_RD is not None
    ctx.mark_non_differentiable(h_RC)
    ctx.set_materialize_grads(False)  # H would get a gradient of zeros, as large as itself


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return _Inputs()
    needs = _Inputs(*ctx.needs_input_grad)
    of_x = needs.handle_RD if ctx.is_unsummed else needs.x_SD
    wants = Wants(of_x, needs.w1_eCD, needs.w2_eDF, needs.weights_R)
    found = traced_backward(dy, Saved(*ctx.saved_tensors), ctx.options, ctx.is_unsummed, wants)
    grads = _Inputs(w1_eCD=found.w1, w2_eDF=found.w2, weights_R=found.weights)
    return grads._replace(**{"handle_RD" if ctx.is_unsummed else "x_SD": found.x})


_fwd = register("expert_mlp", _forward, _forward_fake, setup_context=_save, backward=_differentiate)


def traced_backward(
    dy: Tensor, saved: Saved, options: ExpertMLPOptions, unsummed: bool, wants: Wants
) -> Grads:
    """Return the gradients by the custom op; None where not wanted."""
    h_RC = saved.w1_eCD.new_empty(0) if saved.h_RC is None else saved.h_RC
    act = options.activation
    found = _bwd(
        dy,
        saved.rows.widen(),
        h_RC,
        saved.w1_eCD,
        saved.w2_eDF,
        saved.weights_R,
        saved.row_ids_R,
        saved.slots_SK,
        saved.offsets_e,
        act.kind,
        act.limit,
        act.alpha,
        act.interleaved,
        options.products,
        unsummed,
        list(wants),
    )
    return Grads(*(g if want else None for g, want in zip(found, wants, strict=True)))


def traced_expert_mlp(
    x_SD: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    weights_R: Tensor,
    handle_RD: Tensor | None,
    index: ExpertIndex,
    options: ExpertMLPOptions,
    products: ProductsName,
) -> Tensor:
    """Return what `expert_mlp` returns, by the custom op."""
    act = options.activation
    y, _ = _fwd(
        x_SD,
        w1_eCD,
        w2_eDF,
        weights_R,
        handle_RD,
        index.row_ids_R,
        index.slots_SK,
        index.offsets_e,
        act.kind,
        act.limit,
        act.alpha,
        act.interleaved,
        products,
        options.keep_h,
    )
    return y
