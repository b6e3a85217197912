"""The activation between an expert's two matrices, times the routing weight, rounded once.

    a[r, f] = round(act(gate[r, f], up[r, f]) * weight[r])

    backward, which recomputes the activation from h:
    dh[r]      = da[r] * weight[r] * act'(h[r])
    dweight[r] = sum over f of da[r, f] * act(h[r])[f]

Letters: R expert rows (length), F hidden dim, C columns of h: 2F of an activation with a gate,
otherwise F. An activation without a gate has one input, called "gate".

Bytes moved, with b bytes per element and U <= R rows in use: forward (U * C + R * F) * b, backward
(U * (C + F) + R * (C + F)) * b, or R * F * b less without the forward's output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.base.fields import CheckedRecord, OneOf, Positive
from moecore.kernels.common import KERNEL_DTYPES, can_skip_row_masks, can_use_kernel, cdiv, launch
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.rows.activation_kernel import (
    BWD_TILE,
    FWD_TILE,
    ActivationConstants,
    choose_column_blocks,
    weighted_activation_bwd_kernel,
    weighted_activation_fwd_kernel,
)

GATED_KINDS = ("swiglu", "geglu", "clamped_swiglu", "limited_swiglu", "situ_glu")
PLAIN_KINDS = ("gelu", "relu", "relu2", "silu")
KINDS = GATED_KINDS + PLAIN_KINDS
FLAT = "str kind, float limit, float up_limit, float alpha, bool interleaved"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationOptions(CheckedRecord):
    """The activation between FC1 and FC2 of an expert, and the order of FC1's output columns."""

    # "swiglu" silu(gate) * up; "geglu" gelu_tanh(gate) * up; "clamped_swiglu"
    # (up + 1) * gate * sigmoid(alpha * gate), with gate clamped from above and up on both sides
    # (Source: gpt-oss); "limited_swiglu" silu(gate) * up, clamped likewise (Source: DeepSeek-V4);
    # "situ_glu" cap(gate, limit) * sigmoid(gate) * cap(up, up_limit), where cap(x, b) is
    # b * tanh(x / b) (Source: Kimi K3, equation 12);
    # without a gate "gelu" h * Phi(h), the exact form by erf, "relu", "relu2"
    # relu(h)^2 and "silu" h * sigmoid(h)
    kind: Annotated[str, OneOf(KINDS)]
    limit: Positive = 7.0  # of the gate of "clamped_swiglu", "limited_swiglu" and "situ_glu"
    up_limit: Positive | None = None  # of their up; None = limit
    alpha: Positive = 1.702  # sigmoid slope of "clamped_swiglu"
    interleaved: bool = False  # gate and up columns alternate; otherwise all gate columns are first
    # fp32 [..., C] -> [..., F], in place of `kind`, which then only says whether there is a gate.
    # Only `activate_rows` calls it, not kernels. None = `kind`
    function: Callable[[Tensor], Tensor] | None = None

    @property
    def gated(self) -> bool:
        """Whether an output column is computed from two input columns, a gate and an up column."""
        return self.kind in GATED_KINDS

    @property
    def constants(self) -> ActivationConstants:
        """The options, except `function`, as a compile-time argument of Triton kernels."""
        kind, limit, up_limit, alpha, _ = self.flat
        return ActivationConstants(kind, self.gated, limit, up_limit, alpha)

    @property
    def flat(self) -> tuple[str, float, float, float, bool]:
        """(kind, limit, up_limit or limit, alpha, interleaved), as arguments of custom ops."""
        up_limit = self.limit if self.up_limit is None else self.up_limit
        return self.kind, self.limit, up_limit, self.alpha, self.interleaved


@cache
def make_activation_options(
    activation_kind: str, limit: float, up_limit: float, alpha: float, interleaved: bool
) -> ActivationOptions:
    """Return the options whose `ActivationOptions.flat` has these values. Cached."""
    return ActivationOptions(
        kind=activation_kind, limit=limit, up_limit=up_limit, alpha=alpha, interleaved=interleaved
    )


def activate_rows(h_RC: Tensor, options: ActivationOptions) -> Tensor:
    """Return the activation [..., F] of FC1's output, in at least fp32; differentiable PyTorch."""
    h_RC = h_RC.to(torch.promote_types(h_RC.dtype, torch.float32))
    if options.function is not None:
        return options.function(h_RC)
    if not options.gated:
        plain: dict[str, Any] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
        apply = plain.get(options.kind, lambda h_RF: F.relu(h_RF).square())
        return apply(h_RC)  # type: ignore[no-any-return]
    gate, up = split_columns(h_RC, options)
    if options.kind == "swiglu":
        return F.silu(gate) * up
    if options.kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    _, limit, up_limit, alpha, _ = options.flat
    if options.kind == "situ_glu":
        capped_gate, capped_up = (b * torch.tanh(x / b) for x, b in ((gate, limit), (up, up_limit)))
        return capped_gate * torch.sigmoid(gate) * capped_up
    gate, up = gate.clamp(max=limit), up.clamp(-up_limit, up_limit)
    if options.kind == "limited_swiglu":
        return F.silu(gate) * up
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def split_columns(h_RC: Tensor, options: ActivationOptions) -> tuple[Tensor, Tensor]:
    """Return views of the gate columns and of the up columns of FC1's output."""
    if options.interleaved:
        return h_RC[..., 0::2], h_RC[..., 1::2]
    gate, up = h_RC.chunk(2, dim=-1)
    return gate, up


def differentiate_activation(h_RC: Tensor, options: ActivationOptions) -> Tensor:
    """Return the activation's derivative with respect to each entry of FC1's output h_RC."""
    if not options.gated:
        grad_RF = torch.ones_like(h_RC)
        if options.kind == "gelu":
            return torch.ops.aten.gelu_backward(grad_RF, h_RC)  # type: ignore[no-any-return]
        if options.kind == "silu":
            return torch.ops.aten.silu_backward(grad_RF, h_RC)  # type: ignore[no-any-return]
        # A NaN keeps the slope of the right side, as in torch.
        return torch.where(h_RC <= 0, 0, grad_RF) if options.kind == "relu" else 2 * F.relu(h_RC)
    gate, up = split_columns(h_RC, options)
    _, limit, up_limit, alpha, _ = options.flat
    if options.kind == "swiglu":
        s = torch.sigmoid(gate)
        parts = up * s * (1 + gate * (1 - s)), gate * s
    elif options.kind == "geglu":
        dgate = torch.ops.aten.gelu_backward(up, gate, approximate="tanh")
        parts = dgate, F.gelu(gate, approximate="tanh")
    elif options.kind == "situ_glu":
        s, low, near = torch.sigmoid(gate), torch.tanh(gate / limit), torch.tanh(up / up_limit)
        slope = s * (1 - low.square() + limit * low * (1 - s))
        parts = up_limit * near * slope, limit * low * s * (1 - near.square())
    else:
        low, near = gate.clamp(max=limit), up.clamp(-up_limit, up_limit)
        alpha, near = (1.0, near) if options.kind == "limited_swiglu" else (alpha, near + 1)
        s = torch.sigmoid(alpha * low)
        slope = near * s * (1 + alpha * low * (1 - s))
        parts = slope * (gate <= limit), low * s * (up.abs() <= up_limit)
    out_RC = torch.empty_like(h_RC)
    for half, part in zip(split_columns(out_RC, options), parts, strict=True):
        half.copy_(part)
    return out_RC


def weighted_activation_ref(
    h_RC: Tensor, weights_R: Tensor | None, num_rows: Tensor | None, options: ActivationOptions
) -> Tensor:
    """Compute `weighted_activation` in plain PyTorch."""
    mask_R1 = _make_row_mask(h_RC, num_rows)
    if mask_R1 is not None:
        # On both sides: 0 * NaN would reach the gradient of unused rows.
        h_RC = torch.where(mask_R1, h_RC, 0)
    a_RF = activate_rows(h_RC, options)
    if weights_R is not None:
        a_RF = a_RF * weights_R[:, None]
    a_RF = a_RF.to(h_RC.dtype)
    return a_RF if mask_R1 is None else torch.where(mask_R1, a_RF, 0)


def weighted_activation_bwd_ref(
    h_RC: Tensor,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `weighted_activation_bwd` in plain PyTorch."""
    dtype = torch.promote_types(h_RC.dtype, torch.float32)
    mask_R1 = _make_row_mask(h_RC, num_rows)
    if mask_R1 is not None:
        h_RC, da_RF = torch.where(mask_R1, h_RC, 0), torch.where(mask_R1, da_RF, 0)
        weights_R = None if weights_R is None else torch.where(mask_R1[:, 0], weights_R, 0)
    a_RF, da_RF, h = activate_rows(h_RC, options), da_RF.to(dtype), h_RC.to(dtype)
    dweights_R = (da_RF * a_RF).sum(-1)
    if weights_R is not None:
        da_RF, a_RF = da_RF * weights_R[:, None], a_RF * weights_R[:, None]
    dh_RC = differentiate_activation(h, options)
    for half in split_columns(dh_RC, options) if options.gated else (dh_RC,):
        half *= da_RF
    return dh_RC.to(h_RC.dtype), dweights_R, a_RF.to(h_RC.dtype)


def _make_row_mask(h_RC: Tensor, num_rows: Tensor | None) -> Tensor | None:
    """Return bool [R, 1], True for rows below num_rows; None if every row is in use."""
    if num_rows is None or can_skip_row_masks(num_rows, h_RC.shape[0]):
        return None
    return (torch.arange(h_RC.shape[0], device=h_RC.device) < num_rows)[:, None]


def _launch_activation(
    h_RC: Tensor, weights_R: Tensor | None, num_rows: Tensor | None, *flat_options: Any
) -> Tensor:
    """Return act(h) * weight of each row by the kernel; `flat_options` from `options.flat`."""
    options = make_activation_options(*flat_options)
    a_RF = _make_empty_output(h_RC, options.kind)
    R, F_ = a_RF.shape
    blocks = choose_column_blocks(F_, FWD_TILE)
    grid = cdiv(R, blocks["BLOCK_R"]) * cdiv(F_, blocks["BLOCK_F"])
    weights_R = None if weights_R is None else weights_R.contiguous()
    args = (h_RC.contiguous(), weights_R, num_rows, a_RF, R)
    constants = dict(
        F=F_, ACT=options.constants, INTERLEAVED=options.interleaved and options.gated, **blocks
    )
    launch(weighted_activation_fwd_kernel, grid, *args, **constants)
    return a_RF


def _launch_activation_bwd(
    h_RC: Tensor, da_RF: Tensor, weights_R: Tensor | None, num_rows: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of h and weights, and act(h) * weight if the last of `flat` is True."""
    options, with_output = make_activation_options(*flat[:-1]), flat[-1]
    dh_RC, dweights_R, a_RF = _make_empty_gradients(h_RC, options.kind, with_output)
    R, F_ = da_RF.shape
    if not R or not F_:
        return dh_RC, dweights_R.zero_(), a_RF
    blocks = choose_column_blocks(F_, BWD_TILE)
    weights_R = None if weights_R is None else weights_R.contiguous()
    inputs = (h_RC.contiguous(), da_RF.contiguous(), weights_R, num_rows)
    args = (*inputs, dh_RC, dweights_R, a_RF if with_output else None, R)
    grid = cdiv(R, blocks["BLOCK_R"])
    constants = dict(
        F=F_, ACT=options.constants, INTERLEAVED=options.interleaved and options.gated, **blocks
    )
    launch(weighted_activation_bwd_kernel, grid, *args, **constants)
    return dh_RC, dweights_R, a_RF


def _make_empty_output(h_RC: Tensor, activation_kind: str) -> Tensor:
    """Return the uninitialised activation [R, F] of h_RC."""
    R, C = h_RC.shape
    return h_RC.new_empty(R, C // 2 if activation_kind in GATED_KINDS else C)


def _make_empty_gradients(
    h_RC: Tensor, activation_kind: str, has_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised gradients of h and weights, and output (empty unless `has_output`)."""
    a_RF = _make_empty_output(h_RC, activation_kind) if has_output else h_RC.new_empty(0)
    return h_RC.new_empty(h_RC.shape), h_RC.new_empty(h_RC.shape[0], dtype=torch.float32), a_RF


_SHARED_SCHEMA = f"Tensor? weights_R, Tensor? num_rows, {FLAT}"
_weighted_activation_bwd = Op(
    "weighted_activation_bwd",
    _launch_activation_bwd,
    lambda h_RC, _, __, ___, kind, *flat: _make_empty_gradients(h_RC, kind, flat[-1]),
    schema=f"(Tensor h_RC, Tensor da_RF, {_SHARED_SCHEMA}, bool with_output) "
    "-> (Tensor, Tensor, Tensor)",
)


def _weighted_activation_backward(ctx: Any, da_RF: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs; None where no gradient is needed or exists."""
    h_RC, *rest = ctx.saved_tensors
    dh_RC, dweights_R, _ = _weighted_activation_bwd(h_RC, da_RF, *rest, *ctx.others, False)
    needs_grad = ctx.needs_input_grad
    grads = (dh_RC if needs_grad[0] else None, dweights_R if needs_grad[1] else None)
    return *grads, *[None] * (len(needs_grad) - 2)


_weighted_activation = Op(
    "weighted_activation",
    _launch_activation,
    lambda h_RC, _, __, kind, *flat: _make_empty_output(h_RC, kind),
    setup_context=make_setup_context(slice(3), slice(3, None)),
    backward=_weighted_activation_backward,
    schema=f"(Tensor h_RC, {_SHARED_SCHEMA}) -> Tensor",
)


def weighted_activation_bwd(
    h_RC: Tensor,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dh_RC, dweights_R, a_RF): gradients of `weighted_activation`, and its output.

    The output is recomputed. Not differentiable. No host sync; the same bits in every run.
    dweights_R is always fp32. Rows from num_rows on are not read, and are zero in the results.
    """
    if h_RC.dtype in KERNEL_DTYPES and can_use_kernel(h_RC, da_RF):
        return _weighted_activation_bwd(h_RC, da_RF, weights_R, num_rows, *options.flat, True)
    return weighted_activation_bwd_ref(h_RC, da_RF, weights_R, num_rows, options)


def weighted_activation(
    h_RC: Tensor, weights_R: Tensor | None, num_rows: Tensor | None, options: ActivationOptions
) -> Tensor:
    """Return act(h) times each expert row's routing weight, computed in fp32 and rounded once.

    Differentiable in h_RC and weights_R, which are saved for backward. No host sync.

    Args:
        h_RC: FC1's output, any float dtype; copied if not contiguous.
        weights_R: fp32 routing weight of each row; None means 1.
        num_rows: 0-dim int32 on the device; None = R. Rows from num_rows on are not read, and are
            zero in the result.
    """
    if options.function is None and h_RC.dtype in KERNEL_DTYPES and can_use_kernel(h_RC):
        return _weighted_activation(h_RC, weights_R, num_rows, *options.flat)
    return weighted_activation_ref(h_RC, weights_R, num_rows, options)
