"""Experts through Transformer Engine's permutation and grouped linear: bf16 on CUDA.

    moe_permute -> GroupedLinear -> activation x weight -> GroupedLinear -> moe_unpermute

Legend: S source rows, R expert rows (capacity), Q expert rows that hold a choice (no padding),
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

from moecore.config import MoEConfig
from moecore.kernels.common import no_autocast, on_device
from moecore.kernels.rows.activation import weighted_activation
from moecore.moe.activation import activation_options
from moecore.moe.dispatch.base import ExpertInput


def is_available() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def te_experts(
    inp: ExpertInput,
    fc1: tuple[Tensor, Tensor | None],
    fc2: tuple[Tensor, Tensor | None],
    config: MoEConfig,
    interleaved: bool,
) -> Tensor:
    """Return y_SD, the weighted sum over the local experts of each source row.

    One host sync; with a bias of FC2 one more in backward. Transformer Engine clears the rows it
    saved once backward has read them, so a graph has one backward.

    Args:
        inp: what a dispatcher gives; no source row may choose an expert twice.
        fc1: weight [e, C, D] and bias [e, C]. A weight that is not contiguous is copied.
        fc2: weight [e, D, F] and bias [e, D], which is multiplied by the routing weight too.
        config: names the activation.
        interleaved: whether gate and up columns alternate.

    Returns:
        [S, D] bf16, added in fp32 and rounded once; a bias of FC2 rounds once more.

    Raises:
        ValueError: when Transformer Engine is missing or this input is not for it.
    """
    (w1_eCD, b1_eC), (w2_eDF, b2_eD) = fc1, fc2
    check_te(inp.rows_SD.dtype, inp.rows_SD.device)
    options = activation_options(config, interleaved=interleaved)
    with on_device(inp.rows_SD):
        mask_Se, counts = _mask_and_counts(inp)
        if not any(counts):
            # Empty inputs break its permutation. Empty sums make each gradient zero, not None.
            leaves = (inp.rows_SD, inp.weights_R, w1_eCD, b1_eC, w2_eDF, b2_eD)
            zero = sum(t[:0].sum() for t in leaves if t is not None)
            return torch.zeros_like(inp.rows_SD) + zero
        weights_Q = _weights(inp, mask_Se, sum(counts))
        x_QD, row_map = _te().moe_permute(inp.rows_SD, mask_Se, num_out_tokens=sum(counts))
        h_QC = _grouped_linear(x_QD, w1_eCD, b1_eC, counts)
        a_QF = weighted_activation(h_QC, weights_Q, None, options)
        y_QD = _grouped_linear(a_QF, w2_eDF, None, counts)
        y_SD = _te().moe_unpermute(y_QD, row_map, restore_shape=inp.rows_SD.shape)
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


def check_te(dtype: torch.dtype, device: torch.device) -> None:
    """Raise a ValueError where Transformer Engine is missing, or not for this dtype or device.

    Args:
        dtype: of rows and weights in compute.
        device: of both.
    """
    if not is_available():
        problem = "experts ('te') must be another backend where Transformer Engine is missing"
        fix = "pip install '.[te]' or use experts='auto'"
    elif dtype != torch.bfloat16:  # fp32 it would multiply in TF32, unasked
        problem = f"dtype of the experts ({dtype}) must be torch.bfloat16 for experts ('te')"
        fix = "convert the model or use experts='torch'"
    elif device.type != "cuda":
        problem = f"device of the experts ({device}) must be a CUDA device for experts ('te')"
        fix = "move the model to a GPU or use experts='torch'"
    else:
        return
    raise ValueError(f"{problem}: {fix}")


def _mask_and_counts(inp: ExpertInput) -> tuple[Tensor, list[int]]:
    """Return the int32 mask [S, e] of choices, and how many choices each expert has.

    The host sync of forward: a grouped linear takes its splits as Python ints.

    Example: offsets_e [1, 3] and slots_SK [[0, 1], [2, -1]] give [[1, 1], [0, 1]] and [1, 2].
    """
    num_experts, chosen_SK = inp.offsets_e.numel(), inp.slots_SK >= 0
    expert_SK = torch.searchsorted(inp.offsets_e, inp.slots_SK, right=True)
    mask = expert_SK.new_zeros(expert_SK.shape[0], num_experts + 1, dtype=torch.int32)
    mask.scatter_(1, expert_SK.where(chosen_SK, num_experts), 1)
    mask_Se = mask[:, :num_experts]
    *counts, num_choices = torch.cat([mask_Se.sum(0), chosen_SK.sum()[None]]).tolist()
    if sum(counts) != num_choices:
        raise ValueError(
            f"expert_ids_TK ({num_choices} choices) must name each expert at most once per token "
            f"({sum(counts)} left) for experts ('te'): drop doubles or use experts='torch'"
        )
    return mask_Se, counts


def _weights(inp: ExpertInput, mask_Se: Tensor, num_choices: int) -> Tensor:
    """Return the fp32 weights [Q], the weights of the rows without those of padding rows.

    Example: one and two choices with offsets_e [2, 4] give weights_R[[0, 2, 3]].
    """
    counts_e = mask_Se.sum(0)
    padding_e = inp.offsets_e.diff(prepend=inp.offsets_e.new_zeros(1)) - counts_e
    before_e = padding_e.cumsum(0) - padding_e
    before_Q = before_e.repeat_interleave(counts_e, output_size=num_choices)
    rows_Q = torch.arange(num_choices, device=before_Q.device) + before_Q
    return inp.weights_R.index_select(0, rows_Q)


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
