"""Baseline of the layer: Transformer Engine's permutation and grouped linear, on CUDA.

    moe_permute -> GroupedLinear -> activation x weight -> GroupedLinear -> moe_unpermute

In bf16, or by a recipe in FP8: then `Fp8Padding` comes after the first and `Fp8Unpadding` before
the last, because FP8 products want a multiple of 16 rows per expert. GroupedLinear quantises its
input, its weights (in every forward) and the gradients of its output.

Legend: S source rows, Q expert rows that hold a choice (in FP8 with padding), D model dim, F
hidden dim, C columns of FC1 (2F with a gate, else F), I and O input and output dim of one linear,
e experts.

Note on order. Transformer Engine sorts by itself, from a mask [S, e]: by expert, then by source
row. `ExpertInput` has the same order plus padding, as long as no source row chooses an expert
twice. So the mask is rebuilt from the slots, and the weights are read past the padding.

Written for Transformer Engine 2.12 (`pip install 'transformer-engine[pytorch]'`); imported when
first used.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from moecore.kernels.rows.activation import weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.moe.experts import Experts, activation_options
from moecore.moe.records import ExpertInput

Recipe = Literal["blockwise"]
ROWS = 16  # of which the rows of each expert are a multiple in FP8
BF16, BLOCKWISE = "te", "te-blockwise"
RECIPES: dict[str, Recipe | None] = {BF16: None, BLOCKWISE: "blockwise"}  # by name in records


def is_available() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


class TEExperts(Experts):
    """Experts without biases through Transformer Engine: one host sync.

    It clears the rows it saved once backward has read them, so a graph has one backward. At least
    one expert must be chosen: its permutation breaks on empty inputs.
    """

    te_recipe: Recipe | None = None

    @classmethod
    def over(cls, experts: Experts, *, recipe: Recipe | None = None) -> TEExperts:
        """Return a module with the same parameters, to be put in the place of `experts`.

        Args:
            experts: whose parameters.
            recipe: "blockwise" is Transformer Engine's Float8BlockScaling; None = bf16.
        """
        twin = cls(experts.config, layout=experts.layout, device="meta")
        twin.te_recipe = recipe
        for name, parameter in experts.named_parameters():
            twin.register_parameter(name, parameter)
        return twin

    def forward(self, inp: ExpertInput) -> Tensor:
        """Return y_SD [S, D] as `Experts.forward` does: added in fp32, rounded once."""
        rows_SD, options = inp.rows.values, activation_options(self.config)
        with self.reader.reading():
            weights = self._weights(rows_SD.dtype)
            mask_Se, counts = mask_and_counts(inp.index)
            weights_Q = weights_of_choices(inp.index, mask_Se, sum(counts))
            x_QD, row_map = _te().moe_permute(rows_SD, mask_Se, num_out_tokens=sum(counts))
            chosen = counts
            if self.te_recipe is not None:
                x_QD, counts = _padding(len(chosen))(x_QD, chosen)
                weights_Q = _padding(len(chosen))(weights_Q[:, None], chosen)[0][:, 0]
            h_QC = _grouped_linear(x_QD, weights.w1_eCD, counts, self.te_recipe)
            a_QF = weighted_activation(h_QC, weights_Q, None, options)
            y_QD = _grouped_linear(a_QF, weights.w2_eDF, counts, self.te_recipe)
            if self.te_recipe is not None:
                y_QD = _te().Fp8Unpadding(len(chosen), ROWS)(y_QD, chosen)
            return _te().moe_unpermute(y_QD, row_map, restore_shape=rows_SD.shape)


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def mask_and_counts(index: ExpertIndex) -> tuple[Tensor, list[int]]:
    """Return the int32 mask [S, e] of choices, and how many choices each expert has.

    The host sync of forward: a grouped linear takes its splits as Python ints.

    Example: offsets_e [1, 3] and slots_SK [[0, 1], [2, -1]] give [[1, 1], [0, 1]] and [1, 2].
    """
    num_experts, chosen_SK = index.offsets_e.numel(), index.slots_SK >= 0
    expert_SK = torch.searchsorted(index.offsets_e, index.slots_SK, right=True)
    mask = expert_SK.new_zeros(expert_SK.shape[0], num_experts + 1, dtype=torch.int32)
    mask.scatter_(1, expert_SK.where(chosen_SK, num_experts), 1)
    mask_Se = mask[:, :num_experts]
    return mask_Se, mask_Se.sum(0).tolist()


def weights_of_choices(index: ExpertIndex, mask_Se: Tensor, num_choices: int) -> Tensor:
    """Return the fp32 weights [Q], the weights of the rows without those of padding rows.

    Example: one and two choices with offsets_e [2, 4] give weights_R[[0, 2, 3]].
    """
    counts_e = mask_Se.sum(0)
    padding_e = index.offsets_e.diff(prepend=index.offsets_e.new_zeros(1)) - counts_e
    before_e = padding_e.cumsum(0) - padding_e
    before_Q = before_e.repeat_interleave(counts_e, output_size=num_choices)
    rows_Q = torch.arange(num_choices, device=before_Q.device) + before_Q
    return index.weights_R.index_select(0, rows_Q)


def _padding(num_experts: int) -> Any:
    return _te().Fp8Padding(num_experts, ROWS)


def _autocast(recipe: Recipe | None) -> AbstractContextManager[None]:
    """Return the context of a grouped linear; in bf16 one in which nothing is quantised."""
    if recipe is None:
        return _te().autocast(enabled=False)
    return _te().autocast(enabled=True, recipe=_scaling())


def _scaling() -> Any:
    return importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()


def _grouped_linear(
    x_QI: Tensor, w_eOI: Tensor, counts: list[int], recipe: Recipe | None
) -> Tensor:
    """Return [Q, O]; the gradient of the stacked weight comes back as one tensor."""
    tensors = {f"weight{i}": w for i, w in enumerate(w_eOI.unbind())}
    tensors |= {f"bias{i}": x_QI.new_empty(0) for i in range(len(counts))}
    module = _template(len(counts), w_eOI.shape[2], w_eOI.shape[1], recipe)
    # State of FP8 would be the template's, so every layer's; this recipe has none between calls.
    with _autocast(recipe):
        return functional_call(module, tensors, (x_QI, counts))


@functools.cache
def _template(num_experts: int, in_dim: int, out_dim: int, recipe: Recipe | None) -> Any:
    """Return a GroupedLinear without memory, to be called with a layer's own weights."""
    options = dict(bias=False, params_dtype=torch.bfloat16, device="meta")
    return _te().GroupedLinear(num_experts, in_dim, out_dim, **options)
