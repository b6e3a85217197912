"""The experts of one rank as one operation that keeps X and H, and nothing else, for backward.

    h[r] = x[row_ids[r]] @ w1[i]^T      a[r] = act(h[r]) * weight[r]      i = expert of row r
    y[s] = sum over k of a[slots[s, k]] @ w2[i]^T

    da[r] = dy[row_ids[r]] @ w2[i]      dh, dweight and a again from h, da in one pass
    dx[s] = sum over k of dh[slots[s, k]] @ w1[i]
    dw2[i] = sum of dy[row_ids[r]]^T a[r]      dw1[i] = sum of dh[r]^T x[row_ids[r]]

The weight is applied before FC2, so FC2's output is not needed: dweight[r] = <da[r], act(h[r])>.

Letters: S source rows, R expert rows (capacity), e experts, D model dim, F hidden dim, C columns of
H (2F for gated activations, else F).

Two sets of products: "triton" (this package's kernels; a gated activation and its backward sit in
epilogues) and "torch" (torch's grouped product around gathers in memory). 18 * R * D * F
floating-point operations forward and backward when gated.

Source: Megatron-Core's memory-efficient permutation (arXiv:2603.07685) for the place of the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from moecore._autograd import have_tangents, is_plain_eager, will_run
from moecore.kernels.common import use_kernel
from moecore.kernels.experts.products import (
    GATHER_FIRST_DY,
    GATHER_FIRST_FC1,
    GATHER_FIRST_WGRAD,
    ExpertProducts,
    GradTarget,
    Source,
)
from moecore.kernels.ops import Op
from moecore.kernels.rows.activation import ActivationOptions, activation, weighted_activation
from moecore.kernels.rows.move import sum_rows_plain, sum_rows_ref
from moecore.kernels.rows.packed import PACKED

Products = Literal["triton", "torch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Which source rows each expert reads, as in `ExpertInput`.

    Attributes:
        row_ids_R: int32, source row of each expert row.
        weights_R: fp32, routing weight of each expert row; differentiable.
        slots_SK: int32, expert row of each source row's k-th choice, -1 for none here.
        offsets_e: int32, running sum of the experts' rows.
    """

    row_ids_R: Tensor
    weights_R: Tensor
    slots_SK: Tensor
    offsets_e: Tensor


class GradientSender(Protocol):
    """A dispatcher's part in the experts' backward: it sends the gradients of the rows early."""

    def start(
        self,
        drows_RD: Tensor,
        dweights_R: Tensor | None,
        row_ids_R: Tensor,
        slots_SK: Tensor,
        num_rows: Tensor,
    ) -> None:
        """Begin to send them; backward returns the same tensors. The index is `ExpertInput`'s."""
        ...


class GradSink(Protocol):
    """Takes a weight's gradient past autograd, where a backward allows that."""

    def open(self) -> GradTarget | None:
        """Return where the running backward puts the gradient; None = to autograd."""
        ...

    def close(self, grad: Tensor) -> None:
        """Take the gradient that went there."""
        ...


GradSinks = tuple[GradSink | None, GradSink | None]


@dataclass(frozen=True, slots=True)
class RowsAgain:
    """Brings the source rows once more in backward, so that nobody keeps them.

    Attributes:
        fetch: fetch(*kept) -> x_SD, the same bits.
        kept: what autograd keeps instead.
    """

    fetch: Callable[..., Tensor]
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMLPOptions:
    """How `expert_mlp` computes.

    Attributes:
        activation: between the two products.
        products: whose kernels multiply. "triton" wants contiguous weights, no interleaved
            columns, 16-bit floats and a GPU; "torch" takes any strides.
        keep_h: keep FC1's output for backward; False keeps X alone and multiplies again.

    Raises:
        ValueError: for unknown products.
    """

    activation: ActivationOptions
    products: Products = "torch"
    keep_h: bool = True

    def __post_init__(self) -> None:
        if self.products not in get_args(Products):
            raise ValueError(
                f"ExpertMLPOptions.products ({self.products!r}) must be 'triton' or 'torch'"
            )


def expert_mlp_ref(
    x_SD: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    rows: ExpertRows,
    options: ActivationOptions,
) -> Tensor:
    """Return y expert by expert, in plain differentiable PyTorch. Host sync."""
    parts, start = [], 0
    for i, stop in enumerate(rows.offsets_e.tolist()):
        x = x_SD.index_select(0, rows.row_ids_R[start:stop])
        a = activation(x @ w1_eCD[i].T, options) * rows.weights_R[start:stop, None]
        parts.append(a.to(x.dtype) @ w2_eDF[i].T)
        start = stop
    return sum_rows_ref(torch.cat(parts), rows.row_ids_R, rows.slots_SK, None)


@cache
def _activation_options(kind: str, limit: float, alpha: float, inter: bool) -> ActivationOptions:
    return ActivationOptions(kind=kind, limit=limit, alpha=alpha, interleaved=inter)


def _forward(
    x_SD: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    weights_R: Tensor,
    row_ids_R: Tensor,
    slots_SK: Tensor,
    offsets_e: Tensor,
    expert_rows_RD: Tensor | None,
    main_grad1: Tensor | None,
    main_grad2: Tensor | None,
    kind: str,
    limit: float,
    alpha: float,
    interleaved: bool,
    triton: bool,
    keep_h: bool,
) -> tuple[Tensor, Tensor]:
    """Return y_SD, or y_RD with `expert_rows_RD`, and h_RC (empty unless kept)."""
    options = _activation_options(kind, limit, alpha, interleaved)
    products = ExpertProducts(triton, row_ids_R, slots_SK, offsets_e, options)
    gathers = options.gated and w2_eDF.shape[2] >= GATHER_FIRST_FC1
    h_RC, a_RF = products.fc1(products.source(x_SD, w1_eCD, gather=gathers), w1_eCD, weights_R)
    y = products.rows(a_RF, w2_eDF.transpose(1, 2))
    if expert_rows_RD is None:
        y = sum_rows_plain(y, *products.index)
    return y, h_RC if keep_h else h_RC.new_empty(0)


def _forward_fake(x_SD, w1_eCD, w2_eDF, weights_R, *rest):  # type: ignore[no-untyped-def]
    R = weights_R.shape[0]
    h_shape = (R, w1_eCD.shape[1]) if rest[-1] else (0,)
    rows = x_SD.shape[0] if rest[3] is None else R
    return x_SD.new_empty(rows, x_SD.shape[1]), x_SD.new_empty(h_shape)


def _gradients(
    dy: Tensor,
    x_SD: Tensor,
    h_RC: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    weights_R: Tensor,
    row_ids_R: Tensor,
    slots_SK: Tensor,
    offsets_e: Tensor,
    main_grad1: Tensor | None,
    main_grad2: Tensor | None,
    kind: str,
    limit: float,
    alpha: float,
    interleaved: bool,
    triton: bool,
    unsummed: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw1, dw2 and dweights; empty where not wanted or added to a main gradient.

    dy and dx are [S, D], or [R, D] when unsummed.
    """
    options = _activation_options(kind, limit, alpha, interleaved)
    products = ExpertProducts(triton, row_ids_R, slots_SK, offsets_e, options)
    saved = _Saved(dy.contiguous(), x_SD, h_RC, w1_eCD, w2_eDF, weights_R)
    targets = (GradTarget(main_grad1), GradTarget(main_grad2))
    dx, dw1, dw2, dweights_R = _differentiate(products, saved, targets, unsummed, wanted, None)
    # An operation returns none of its inputs.
    dw1 = dw1 if main_grad1 is None else w1_eCD.new_empty(0)
    dw2 = dw2 if main_grad2 is None else w2_eDF.new_empty(0)
    return dx, dw1, dw2, dweights_R


@dataclass(frozen=True, slots=True)
class _Saved:
    """dy and what the forward kept; x may be packed, h_RC is [0] where FC1 runs again."""

    dy: Tensor
    x: Tensor
    h_RC: Tensor
    w1_eCD: Tensor
    w2_eDF: Tensor
    weights_R: Tensor

    def source(self, products: ExpertProducts, *, gather: bool = False) -> Source:
        """X for a product."""
        return products.source(self.x, self.w1_eCD, gather=gather)


def _differentiate(
    products: ExpertProducts,
    saved: _Saved,
    targets: tuple[GradTarget, GradTarget],
    unsummed: bool,
    wanted: list[bool],
    sender: GradientSender | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, dw1, dw2 and dweights, empty where not wanted; the middle ones in their targets.

    A sender gets dx and dweights before dw1 and dw2.
    """
    w1_eCD, w2_eDF = saved.w1_eCD, saved.w2_eDF
    weights_R, h_RC = saved.weights_R, saved.h_RC
    want_x, want_w1, want_w2, want_weights = wanted
    dh_RC, dweights_R = h_RC, weights_R  # replaced where anybody wants them
    dx, dw1, dw2 = (w1_eCD.new_empty(0) for _ in range(3))
    if unsummed:
        dy_rows = Source(saved.dy, None)
    else:
        gathers = products.options.gated and w2_eDF.shape[2] >= GATHER_FIRST_DY
        dy_rows = products.source(saved.dy, w2_eDF.transpose(1, 2), gather=gathers)
    if h_RC.ndim == 1:
        h_RC = products.product(saved.source(products), w1_eCD.transpose(1, 2))
    if want_x or want_w1 or want_weights:
        dh_RC, dweights_R, a_RF = products.activation_bwd(dy_rows, w2_eDF, h_RC, weights_R)
    else:
        a_RF = weighted_activation(h_RC, weights_R, products.index[2], products.options)
    if sender is not None:
        dx = products.rows(dh_RC, w1_eCD)
        sender.start(dx, dweights_R if want_weights else None, *products.index)
    if want_w2:
        dw2 = products.weight_grad(dy_rows, a_RF, False, targets[1])
    del a_RF, dy_rows
    if want_w1:
        x = saved.source(products, gather=w2_eDF.shape[2] >= GATHER_FIRST_WGRAD)
        dw1 = products.weight_grad(x, dh_RC, True, targets[0])
        del x  # gathered rows, as large as those of dx
    if want_x and sender is None:
        dx = products.rows(dh_RC, w1_eCD)
        if not unsummed:
            dx = sum_rows_plain(dx, *products.index)
    return dx, dw1, dw2, dweights_R if want_weights else weights_R.new_empty(0)


def _gradients_fake(dy, x_SD, h_RC, w1_eCD, w2_eDF, weights_R, *rest):  # type: ignore[no-untyped-def]
    main_grads, wanted = rest[3:5], rest[-1]
    made = [wanted[0], *(w and m is None for w, m in zip(wanted[1:3], main_grads, strict=True))]
    shapes = [t.shape if m else (0,) for t, m in zip((dy, w1_eCD, w2_eDF), made, strict=True)]
    dweights_R = weights_R.new_empty(weights_R.shape if wanted[3] else (0,))
    return *(x_SD.new_empty(shape) for shape in shapes), dweights_R


_expert_mlp_bwd = Op(
    "expert_mlp_bwd", _gradients, _gradients_fake, mutates_args=("main_grad1", "main_grad2")
)


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
    kept: tuple[Tensor, ...] = (),
) -> None:
    *tensors, expert_rows_RD, main_grad1, main_grad2 = inputs[:10]
    kind, limit, alpha, interleaved, triton, ctx.keep_h = inputs[10:]
    ctx.save_for_backward(*tensors, output[1], *kept)
    # Not among the saved ones: another micro-batch's backward may have added to them since.
    ctx.main_grads = (main_grad1, main_grad2)
    ctx.unsummed = expert_rows_RD is not None
    ctx.options = (kind, limit, alpha, interleaved, triton, ctx.unsummed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # H would get a gradient of zeros, as large as itself


def _backward(
    ctx: Any,
    dy: Tensor | None,
    _: None,
    sender: GradientSender | None = None,
    fetch: Callable[..., Tensor] | None = None,
    sinks: GradSinks = (None, None),
) -> tuple[Tensor | None, ...]:
    """Return the inputs' gradients; what is saved last is `_TravellingMLP`'s."""
    if dy is None:
        return (None,) * 16
    (x_SD, w1_eCD, w2_eDF, weights_R, row_ids_R, slots_SK, offsets_e, h_RC, *kept) = (
        ctx.saved_tensors
    )
    needs = ctx.needs_input_grad
    wanted = [needs[7] if ctx.unsummed else needs[0], *needs[1:4]]
    if fetch is not None and (wanted[1] or not ctx.keep_h):
        x_SD = fetch(*kept)
    index = (row_ids_R, slots_SK, offsets_e)
    tensors = (x_SD, h_RC, w1_eCD, w2_eDF, weights_R)
    if sender is not None and not (wanted[0] and will_run(ctx.rows_node)):
        sender = None
    of1, of2 = (
        sink.open() if sink is not None and main_grad is None and want else None
        for sink, main_grad, want in zip(sinks, ctx.main_grads, wanted[1:3], strict=True)
    )
    main1, main2 = ctx.main_grads
    if sender is None and of1 is of2 is None:
        grads = _expert_mlp_bwd(dy, *tensors, *index, *ctx.main_grads, *ctx.options, wanted)
    else:
        targets = (of1 or GradTarget(main1), of2 or GradTarget(main2))
        added_to = [t.add_to for t in targets if t.add_to is not None]
        if added_to:
            torch.autograd.graph.increment_version(added_to)
        *activation_of, triton, unsummed = ctx.options
        options = _activation_options(*activation_of)
        products = ExpertProducts(triton, row_ids_R, slots_SK, offsets_e, options)
        saved = _Saved(dy.contiguous(), *tensors)
        grads = _differentiate(products, saved, targets, unsummed, wanted, sender)
        for sink, target, grad in zip(sinks, (of1, of2), grads[1:3], strict=True):
            if sink is not None and target is not None:
                sink.close(grad)
    gone = (None, main1 if of1 is None else of1, main2 if of2 is None else of2, None)
    found = [g if w and t is None else None for g, w, t in zip(grads, wanted, gone, strict=True)]
    dx, of_rows = (None, found[0]) if ctx.unsummed else (found[0], None)
    return dx, *found[1:], *(None,) * 3, of_rows, *(None,) * 8


_expert_mlp = Op("expert_mlp", _forward, _forward_fake, setup_context=_save, backward=_backward)


class _TravellingMLP(torch.autograd.Function):
    """The same operation in plain eager, for a dispatcher or sinks that take part in it."""

    @staticmethod
    def forward(ctx: Any, *inputs_and_others: Any) -> tuple[Tensor, Tensor]:
        x_SD, *rest, ctx.sinks, sender, again = inputs_and_others
        output = _forward(x_SD, *rest)
        ctx.fetch, kept = (None, ()) if again is None else (again.fetch, again.kept)
        _save(ctx, (x_SD if again is None else x_SD.new_empty(0), *rest), output, kept)
        ctx.sender, expert_rows_RD = sender if ctx.unsummed else None, rest[6]
        if ctx.sender is not None:
            ctx.rows_node = expert_rows_RD.grad_fn
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = _backward(ctx, grads[0], None, ctx.sender, ctx.fetch, ctx.sinks)
        return *inputs, None, None, None


def _refuse_tangents(*tensors: Tensor) -> None:
    """Forward-mode derivatives would be dropped, and come out as zero."""
    if have_tangents(*tensors):
        raise NotImplementedError(
            "expert_mlp has no forward-mode derivative: use reverse mode, or experts='sequential'"
        )


def _check_triton(x_SD: Tensor, w1: Tensor, w2: Tensor, act: ActivationOptions) -> None:
    dtypes = {w1.dtype if x_SD.dtype == PACKED else x_SD.dtype, w1.dtype, w2.dtype}
    if act.interleaved and act.gated:
        raise ValueError(
            "ActivationOptions.interleaved (True) must be False with products ('triton'): use "
            "products='torch'"
        )
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        shown = ", ".join(sorted(str(d) for d in dtypes))
        raise ValueError(
            f"dtypes of x, w1 and w2 ({shown}) must be one of torch.bfloat16 and torch.float16 "
            "with products ('triton'): convert them or use products='torch'"
        )
    if not (w1.is_contiguous() and w2.is_contiguous()):
        raise ValueError(
            "w1_eCD and w2_eDF (strided) must be contiguous with products ('triton'): use "
            "products='torch'"
        )
    if w2.shape[1] % 8 or w2.shape[2] % 8:
        raise ValueError(
            f"D ({w2.shape[1]}) and F ({w2.shape[2]}) must be multiples of 8 with products "
            "('triton'), 16 bytes: pad them"
        )
    if not use_kernel(x_SD, w1, w2):
        raise ValueError(
            f"device of x ({x_SD.device}) must be a GPU with Triton with products ('triton'): use "
            "products='torch'"
        )


def expert_mlp(
    x_SD: Tensor,
    w1_eCD: Tensor,
    w2_eDF: Tensor,
    rows: ExpertRows,
    options: ExpertMLPOptions,
    *,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    sinks: GradSinks = (None, None),
    expert_rows_RD: Tensor | None = None,
    sender: GradientSender | None = None,
    again: RowsAgain | None = None,
) -> Tensor:
    """Return the weighted sum over each source row's experts; differentiable once, in reverse.

    No host sync with "triton", nor with "torch" where torch's grouped product has none: in bf16 on
    Hopper and datacenter Blackwell. Elsewhere that loops over experts on the host.

    Keeps x, H, the weights and the index for backward. Frozen inputs cost no product. Under
    torch.compile it is one opaque operation.

    Args:
        x_SD: [S, D] source rows; with `expert_rows_RD` also packed ones (`rows/packed.py`), but for
            torch.compile.
        w1_eCD: [e, C, D], dtype of x, or that in which packed rows are multiplied: gate rows
            then up rows when gated.
        w2_eDF: [e, D, F], dtype of w1.
        rows: which rows each expert reads, and with which weight.
        options: how.
        main_grads: contiguous fp32 or bf16 tensors of the shapes of w1 and w2, to which the
            weights' gradients are added by every backward, also one that asks for other gradients
            only; autograd then gets none for that weight. They are remembered from the forward.
            Not under torch.compile.
        sinks: of w1 and w2, asked by every backward; not where there is a main gradient, nor where
            a compiler or a dispatch mode looks at operations.
        expert_rows_RD: [R, D], stands for x_SD[row_ids_R] and is not read. With it nothing is
            summed: the rows themselves come back, and theirs is the gradient, not that of x_SD.
        sender: gets the gradients of `expert_rows_RD` and weights_R early, to send them while those
            of w1 and w2 are computed.
        again: where backward gets x_SD, which is then not kept. Under torch.compile it and the
            sender are not used.

    Returns:
        [S, D], dtype of w1: added in fp32, rounded once. Bit-reproducible with "triton". With
        `expert_rows_RD` [R, D], rows that hold no choice uninitialised.

    Raises:
        ValueError: when "triton" is asked to multiply what it cannot.
    """
    act = options.activation
    _refuse_tangents(x_SD, w1_eCD, w2_eDF, rows.weights_R)
    if options.products == "triton":
        _check_triton(x_SD, w1_eCD, w2_eDF, act)
    inputs = (
        x_SD.contiguous(),
        w1_eCD,
        w2_eDF,
        rows.weights_R,
        rows.row_ids_R,
        rows.slots_SK,
        rows.offsets_e,
        expert_rows_RD,
        *main_grads,
        act.kind,
        act.limit,
        act.alpha,
        act.interleaved,
        options.products == "triton",
        options.keep_h,
    )
    if not is_plain_eager():
        sinks = (None, None)  # who looks at operations wants to see this one
    others = (sinks, sender, again)
    if torch.compiler.is_compiling() or others == ((None, None), None, None):
        y, _ = _expert_mlp(*inputs)
    else:
        y, _ = _TravellingMLP.apply(*inputs, *others)
    return y
