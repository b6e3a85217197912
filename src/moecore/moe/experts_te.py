"""Experts through Transformer Engine's permutation and grouped linear: bf16 on CUDA.

    moe_permute -> GroupedLinear -> activation x weight -> GroupedLinear -> moe_unpermute

Legend: S source rows, R expert rows (length), Q expert rows that hold a choice (no padding),
D model dim, F hidden dim, C columns of FC1 (2F with a gate, else F), I and O input and output dim
of one linear, e local experts, K choices per source row.

Note on order. Transformer Engine sorts by itself, from a mask [S, e]: by expert, then by source
row. `ExpertInput` has the same order plus padding, as long as no source row chooses an expert
twice. So the mask is rebuilt from the slots, and the weights are read past the padding.

Written for Transformer Engine 2.12; imported when first used.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from moecore.kernels.common import no_autocast, on_device
from moecore.kernels.experts.contract import ExpertSpec, ExpertWeights
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.moe.records import ExpertInput


def is_available() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def te_experts(inp: ExpertInput, weights: ExpertWeights, options: ActivationOptions) -> Tensor:
    """Return y_SD, the weighted sum over the local experts of each source row.

    One host sync; with a bias of FC2 one more in backward. Transformer Engine clears the rows it
    saved once backward has read them, so a graph has one backward.

    Args:
        inp: what a dispatcher gives, summed; no source row may choose an expert twice.
        weights: this rank's experts. A matrix that is not contiguous is copied; a bias of FC2 is
            multiplied by the routing weight too.
        options: the activation.

    Returns:
        [S, D] bf16, added in fp32 and rounded once; a bias of FC2 rounds once more.

    Raises:
        ValueError: when Transformer Engine is missing or this input is not for it.
    """
    rows_SD, index = inp.rows.values, inp.index
    w1_eCD, w2_eDF = weights.w1_eCD, weights.w2_eDF
    b1_eC, b2_eD = weights.b1_eC, weights.b2_eD
    problem = supports(ExpertSpec.of(inp.rows, weights, options))
    if problem is not None:
        raise ValueError(problem)
    with on_device(rows_SD):
        mask_Se, counts = _mask_and_counts(index)
        if not any(counts):
            # Empty inputs break its permutation. Empty sums make each gradient zero, not None.
            leaves = (rows_SD, index.weights_R, w1_eCD, b1_eC, w2_eDF, b2_eD)
            zero = sum(t[:0].sum() for t in leaves if t is not None)
            return torch.zeros_like(rows_SD) + zero
        weights_Q = _weights(index, mask_Se, sum(counts))
        x_QD, row_map = _te().moe_permute(rows_SD, mask_Se, num_out_tokens=sum(counts))
        h_QC = _grouped_linear(x_QD, w1_eCD, b1_eC, counts)
        a_QF = weighted_activation(h_QC, weights_Q, None, options)
        y_QD = _grouped_linear(a_QF, w2_eDF, None, counts)
        y_SD = _te().moe_unpermute(y_QD, row_map, restore_shape=rows_SD.shape)
        if b2_eD is None:
            return y_SD
        weights_eS = weights_Q.new_zeros(mask_Se.T.shape)
        weights_eS = weights_eS.masked_scatter(mask_Se.T.bool(), weights_Q)
        wide = weights_Q.dtype
        with no_autocast(y_SD):
            y_SD = torch.addmm(y_SD.to(wide), weights_eS.T, b2_eD.to(wide)).to(y_SD.dtype)
        # Rows without a choice have no defined gradient, and 0 * NaN would reach that of b2.
        return torch.where(mask_Se.any(1)[:, None], y_SD, 0)


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def supports(spec: ExpertSpec) -> str | None:
    """Return why Transformer Engine is missing or cannot compute such experts; None = it can."""
    if spec.dtypes is None or spec.device is None:
        return None
    if not is_available():
        return (
            "expert_backend ('te') must be another one where Transformer Engine is missing: pip "
            "install '.[te]' or use expert_backend='auto'"
        )
    if spec.dtypes != {torch.bfloat16}:  # it multiplies fp32 in TF32 by default
        shown = ", ".join(sorted(str(dtype) for dtype in spec.dtypes))
        return (
            f"dtype of the experts ({shown}) must be torch.bfloat16 for expert_backend ('te'): "
            "convert the model or use expert_backend='torch'"
        )
    if spec.device.type != "cuda":
        return (
            f"device of the experts ({spec.device}) must be a GPU for expert_backend ('te'): "
            "move the model to one or use expert_backend='torch'"
        )
    return spec.misaligned()


def _mask_and_counts(index: ExpertIndex) -> tuple[Tensor, list[int]]:
    """Return the int32 mask [S, e] of choices, and how many choices each expert has.

    The host sync of forward: a grouped linear takes its splits as Python ints.

    Example: offsets_e [1, 3] and slots_SK [[0, 1], [2, -1]] give [[1, 1], [0, 1]] and [1, 2].
    """
    num_experts, chosen_SK = index.offsets_e.numel(), index.slots_SK >= 0
    expert_SK = torch.searchsorted(index.offsets_e, index.slots_SK, right=True)
    mask = expert_SK.new_zeros(expert_SK.shape[0], num_experts + 1, dtype=torch.int32)
    mask.scatter_(1, expert_SK.where(chosen_SK, num_experts), 1)
    mask_Se = mask[:, :num_experts]
    *counts, num_choices = torch.cat([mask_Se.sum(0), chosen_SK.sum()[None]]).tolist()
    if sum(counts) != num_choices:
        raise ValueError(
            f"expert_ids_TK ({num_choices} choices) must name each expert at most once per token "
            f"({sum(counts)} left) for expert_backend ('te'): drop doubles or use "
            "expert_backend='torch'"
        )
    return mask_Se, counts


def _weights(index: ExpertIndex, mask_Se: Tensor, num_choices: int) -> Tensor:
    """Return the fp32 weights [Q], the weights of the rows without those of padding rows.

    Example: one and two choices with offsets_e [2, 4] give weights_R[[0, 2, 3]].
    """
    counts_e = mask_Se.sum(0)
    padding_e = index.offsets_e.diff(prepend=index.offsets_e.new_zeros(1)) - counts_e
    before_e = padding_e.cumsum(0) - padding_e
    before_Q = before_e.repeat_interleave(counts_e, output_size=num_choices)
    rows_Q = torch.arange(num_choices, device=before_Q.device) + before_Q
    return index.weights_R.index_select(0, rows_Q)


def _grouped_linear(x_QI: Tensor, w_eOI: Tensor, b_eO: Tensor | None, counts: list[int]) -> Tensor:
    """Return [Q, O]; the gradient of the stacked weight comes back as one tensor."""
    if b_eO is not None and b_eO.requires_grad and not w_eOI.requires_grad:
        w_eOI = w_eOI.detach().requires_grad_()  # it has bias gradients only beside weight ones
    # It reads plain pointers, whatever the strides.
    tensors = {f"weight{i}": w for i, w in enumerate(w_eOI.contiguous().unbind())}
    biases = [x_QI.new_empty(0)] * len(counts) if b_eO is None else b_eO.contiguous().unbind()
    tensors |= {f"bias{i}": b for i, b in enumerate(biases)}
    module = _template(len(counts), w_eOI.shape[2], w_eOI.shape[1], b_eO is not None)
    with _te().autocast(enabled=False):  # FP8 state would be the template's, so every layer's
        return functional_call(module, tensors, (x_QI, counts))


@functools.cache
def _template(num_experts: int, in_dim: int, out_dim: int, bias: bool) -> Any:
    """Return a GroupedLinear without memory, to be called with a layer's own weights."""
    options = dict(bias=bias, params_dtype=torch.bfloat16, device="meta")
    return _te().GroupedLinear(num_experts, in_dim, out_dim, **options)
