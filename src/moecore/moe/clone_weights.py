"""Weights of a rank's local experts and clones, concatenated for the experts' kernels.

    concatenate_clones(ExpertWeights of e experts, Clones) -> ExpertWeights of e + n experts

Backward returns the clones' gradients to the ranks of their experts. Only the clones' weights are
saved for backward. Backward concatenates them with the experts' weights again.

Legend: e experts of a rank, n clones on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.saved_tensors import Handle, use_packer
from moecore.base.torch_private import get_storage_key, tree_leaves, tree_map_only
from moecore.kernels.experts.contract import (
    ComputeGrad,
    ExpertWeights,
    GradSink,
    GradTarget,
    LowRankUpdate,
)
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.scaling import OperandPair
from moecore.moe.clones import Clones, view_as_sendable_dtype
from moecore.moe.param_reader import RecomputedView


@contextmanager
def concatenate_clones(weights: ExpertWeights, clones: Clones) -> Iterator[ExpertWeights]:
    """Return a context with the weights of local experts and then of local clones. Collective."""
    concatenator, quantised = _CloneConcatenator(clones), weights.quantised
    updates = [u for u in (weights.update1, weights.update2) if u is not None]
    matrices = [weights.w1_eCD, weights.w2_eDF]
    sinks = [
        None if sink is None else _CloneGradSink(sink, clones, matrix.dtype)
        for sink, matrix in zip(weights.sinks, matrices, strict=True)
    ]
    uses = [_TensorUse(quantised is None, sink) for sink in sinks]
    small_tensors = [b for b in (weights.b1_eC, weights.b2_eD) if b is not None]
    small_tensors += [t for u in updates for t in (u.a_erI, u.b_eOr)]
    # Transposed matrices are views of contiguous memory; that memory is sent and concatenated.
    is_view = [not m.is_contiguous() and h.has_values for m, h in zip(matrices, uses, strict=True)]
    contiguous = [m.transpose(1, 2) if v else m for m, v in zip(matrices, is_view, strict=True)]
    uses += [_TensorUse()] * len(small_tensors)
    tensors = iter(_AppendClones.apply(concatenator, tuple(uses), *contiguous, *small_tensors))
    w1, w2 = (w.transpose(1, 2) if v else w for v, w in zip(is_view, tensors, strict=False))
    extended = replace(  # the fields are in the order of `tensors`
        weights,
        w1_eCD=w1,
        w2_eDF=w2,
        b1_eC=None if weights.b1_eC is None else next(tensors),
        b2_eD=None if weights.b2_eD is None else next(tensors),
        update1=weights.update1 and LowRankUpdate(next(tensors), next(tensors)),
        update2=weights.update2 and LowRankUpdate(next(tensors), next(tensors)),
        sinks=(sinks[0], sinks[1]),
        quantised=None if quantised is None else _append_clone_matrices(quantised, concatenator),
    )
    with use_packer(concatenator.pack):
        yield extended


class _CloneConcatenator:
    """Concatenates the weights of experts and clones; backward saves both parts, not the result."""

    def __init__(self, clones: Clones) -> None:
        self.clones = clones
        # Storage key -> concatenated tensor and its parts; the reference keeps the key unique.
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def append_clones(self, local_part: Tensor, clones: Tensor) -> Tensor:
        """Return weights `local_part` [e, ...] followed by `clones` [n, ...]; no copy if n is 0."""
        if not clones.shape[0]:
            return local_part.view_as(local_part)
        full = _concatenate(local_part, clones)
        self._parts[get_storage_key(full)] = full, local_part.detach(), clones
        return full

    def pack(self, tensor: Tensor) -> Handle | None:
        """Return the parts to save for backward in place of `tensor`; None = save the tensor."""
        parts = self._parts.get(get_storage_key(tensor))
        if parts is None:
            return None
        return RecomputedView.from_view(tensor, partial(_concatenate, *parts[1:]))


def _concatenate(*parts: Tensor) -> Tensor:
    """Concatenate along dim 0, in the dtype of the parts; torch.cat reads FP8 as uint8."""
    return torch.cat([*map(view_as_sendable_dtype, parts)]).view(parts[0].dtype)


class _AppendClones(torch.autograd.Function):
    """Concatenates weights of experts and clones; backward returns clones' gradients to experts."""

    @staticmethod
    def forward(
        ctx: Any,
        concatenator: _CloneConcatenator,
        tensor_uses: tuple[_TensorUse, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Append n clones' weights to each tensor [e, ...] of e experts; return [e + n, ...] each.

        The result of a tensor without `has_values` is uninitialised, with strides of 0.
        """
        ctx.clones, ctx.uses = concatenator.clones, tensor_uses
        ctx.set_materialize_grads(False)
        n = concatenator.clones.num_local_clones
        read = [t for t, h in zip(tensors, tensor_uses, strict=True) if h.has_values]
        clone_parts = iter(concatenator.clones.fetch_clone_weights(read) if read else ())
        return tuple(
            concatenator.append_clones(t, next(clone_parts))
            if h.has_values
            else t.new_empty(1).expand(t.shape[0] + n, *t.shape[1:])
            for t, h in zip(tensors, tensor_uses, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Add the clones' gradients to their experts' on all ranks; return [e, ...]. Collective."""
        is_added = [h.sink is not None and h.sink.pop_has_accumulated() for h in ctx.uses]
        local_grads = {
            i: grad.clone() for i, grad in enumerate(grads) if grad is not None and not is_added[i]
        }
        sums = ctx.clones.add_clone_grads_(list(local_grads.values())) if local_grads else ()
        expert_grads = dict(zip(local_grads, sums, strict=True))
        n = ctx.clones.num_local_clones
        results = (
            expert_grads.get(i, None if grad is None else grad[: grad.shape[0] - n])
            for i, grad in enumerate(grads)
        )
        return None, None, *results


class _TensorUse(NamedTuple):
    """Whether the experts' matmuls read a weight, and the object that receives its gradient."""

    has_values: bool = True  # matmuls read it; False if they read a quantised copy
    sink: _CloneGradSink | None = None  # may return the tensor's gradient in the experts' backward


class _CloneGradSink:
    """A `GradSink` that adds clones' gradients to their experts', and gives `sink` the sum."""

    def __init__(self, sink: GradSink, clones: Clones, dtype: torch.dtype) -> None:
        self._sink, self._clones, self._dtype = sink, clones, dtype
        self._is_added = False

    def pop_has_accumulated(self) -> bool:
        """Return whether `accumulate` ran since the last call; not in dispatch modes."""
        is_added, self._is_added = self._is_added, False
        return is_added

    def accumulate(self, compute: ComputeGrad, *operands: Any) -> Tensor | None:
        """Compute the gradient, add all ranks' clones to their experts in fp32, and store the sum.

        Returns [e + n, ...] with zeros for the clones, or None if the experts' sink stores the sum.
        """
        wide = torch.promote_types(self._dtype, torch.float32)
        (sums,) = self._clones.add_clone_grads_([compute(*operands, GradTarget(dtype=wide))])
        self._is_added = True
        grad = self._sink.accumulate(_write_grad, sums, self._dtype)
        if grad is None:
            return None
        return torch.cat([grad, grad.new_zeros(self._clones.num_local_clones, *grad.shape[1:])])

    def defer(self, compute: ComputeGrad, *operands: Any) -> bool:
        """Return False: the gradient's sum needs a collective, which must run in this backward."""
        return False


def _write_grad(grad: Tensor, dtype: torch.dtype, grad_target: GradTarget) -> Tensor:
    """Write a gradient to `grad_target` and return it; a new tensor has `dtype` by default."""
    return scale_and_store_grad(
        grad, grad_target.out, grad_target.accumulate, grad_target.dtype or dtype, grad_target.scale
    )


@torch.no_grad()
def _append_clone_matrices(
    quantised_pairs: tuple[OperandPair, OperandPair], concatenator: _CloneConcatenator
) -> tuple[OperandPair, OperandPair]:
    """Fetch the clones' quantised matrices, and append them to the experts'. Collective."""
    # The scales of columns may be those of rows, transposed: one view of each memory is fetched.
    leaves: dict[int, Tensor] = {}
    for leaf in tree_leaves(quantised_pairs):
        if leaf is not None:
            leaves.setdefault(leaf.data_ptr(), leaf)
    clones = concatenator.clones.fetch_clone_weights([x.contiguous() for x in leaves.values()])
    full_leaves = map(concatenator.append_clones, leaves.values(), clones)
    full_by_address = dict(zip(leaves, full_leaves, strict=True))

    def get_full_leaf(leaf: Tensor) -> Tensor:
        """Return `leaf` with the clones appended, transposed if `leaf` is a transposed view."""
        full, first = full_by_address[leaf.data_ptr()], leaves[leaf.data_ptr()]
        # If a dim has size 1, a transposed view can have equal strides, but not an equal shape.
        is_first = (leaf.shape, leaf.stride()) == (first.shape, first.stride())
        return full if is_first else full.transpose(1, 2)

    return tree_map_only(Tensor, get_full_leaf, quantised_pairs)  # type: ignore[no-any-return]
