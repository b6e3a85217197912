"""Rollouts: sequences that a policy sampled, end to end, and values of their tokens.

Legend: N tokens of all sequences, n sequences, L MoE layers, K experts per token.

Example, prompts [5 6] and [7] with responses [8 9] and [4]:

    tokens_N           5  6  8  9  7  4
    response_mask_N    -  -  x  x  -  x       cu_seqlens  [0, 4, 6]

A token's value has the index of the token: `old_log_probs_N[2]` is of token 8 after 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from moecore.base.fields import CheckedRecord, FieldErrors, Positive, check_arguments, quote
from moecore.packing.documents import Lengths, as_lengths

PER_TOKEN = ("advantages_N", "old_log_probs_N", "ref_log_probs_N", "weights_N")
Numbers = Annotated[Tensor, "pass one number per token"]


@dataclass(frozen=True, kw_only=True)
class Rollouts(CheckedRecord):
    """n sequences of one data-parallel rank, concatenated to N tokens without padding.

    Tensors may be on any device. Values where `response_mask_N` is False are ignored.

    Attributes:
        tokens_N: int64 [N], token ids.
        cu_seqlens: integers [n + 1], the start of each sequence, and N.
        response_mask_N: bool [N], True = a token that the policy sampled and learns from. The first
            token of a sequence has no log-probability and must be False.
        advantages_N: floating [N], the advantage of each token.
        old_log_probs_N: floating [N], log-probabilities under the sampling policy; None = the
            current policy.
        ref_log_probs_N: floating [N], log-probabilities under the reference model.
        weights_N: floating [N], >= 0, the weight of each token in the mean of a loss, such as
            truncated importance weights; None = 1.
        routes_NLK: integers [N, L, K], the expert ids of each token in each MoE layer, to replay.
            The router selects experts for a token whose ids are all -1. See docs/rl.md.
        route_weights_NLK: floating [N, L, K], >= 0, the combine weights of the sampling engine,
            normalized and scaled; constants. None = the routers compute differentiable weights.
        temperature: the sampling temperature, which divides logits before log-probabilities.

    Raises:
        ValueError: for wrong shapes and dtypes, a `cu_seqlens` that does not ascend from 0 to N, or
            a mask that is True for the first token of a sequence.
    """

    tokens_N: Annotated[Tensor, "pass int64 [N]"]
    cu_seqlens: Annotated[Tensor, "pass integers [n + 1]"]
    response_mask_N: Annotated[Tensor, "pass bool [N]"]
    advantages_N: Numbers | None = None
    old_log_probs_N: Numbers | None = None
    ref_log_probs_N: Numbers | None = None
    weights_N: Numbers | None = None
    routes_NLK: Annotated[Tensor | None, "pass integers [N, L, K]"] = None
    route_weights_NLK: Annotated[Tensor | None, "pass floating [N, L, K]"] = None
    temperature: Positive = 1.0

    def _find_field_errors(self) -> FieldErrors:
        shape = tuple(self.tokens_N.shape)
        if len(shape) != 1 or self.tokens_N.dtype != torch.int64:
            yield "tokens_N", f"be int64 [N], found {shape}: lay sequences end to end"
        N, cu = len(self.tokens_N), self.cu_seqlens
        is_list = cu.ndim == 1 and not cu.is_floating_point() and len(cu) > 0
        has_ends = is_list and self.borders[0] == 0 and self.borders[-1] == N
        if not has_ends or min(self.lengths, default=1) < 1:
            yield "cu_seqlens", f"be integers that ascend from 0 to the number of tokens ({N})"
        mask = self.response_mask_N
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            yield "response_mask_N", f"be bool {shape}: True where the policy sampled a token"
        if mask[self.cu_seqlens[:-1].long().to(mask.device)].any():
            rule = "be False for the first token of each sequence, which nothing predicts"
            yield "response_mask_N", f"{rule}: give sequences a prompt"
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and (tuple(value.shape) != shape or not value.is_floating_point()):
                yield name, f"be floating {shape}, found {tuple(value.shape)} of {value.dtype}"
        routes, weights = self.routes_NLK, self.route_weights_NLK
        routes_shape = None if routes is None else tuple(routes.shape)
        if routes is not None and (
            routes.ndim != 3 or len(routes) != N or routes.is_floating_point()
        ):
            yield "routes_NLK", f"be integers [{N}, layers, experts per token]"
        if weights is None or (weights.shape == routes_shape and weights.is_floating_point()):
            return
        rule = f"be floating in the shape of routes_NLK ({routes_shape}), found "
        rule += f"{tuple(weights.shape)} of {weights.dtype}: give one weight per expert id"
        yield "route_weights_NLK", rule

    @classmethod
    def of(cls, prompts: Sequence[Any], responses: Sequence[Any], **token_fields: Any) -> Rollouts:
        """Return rollouts from token ids; `token_fields` are other fields of `Rollouts` by name."""
        if len(prompts) != len(responses):
            raise ValueError(
                f"responses ({len(responses)}) must be one per prompt ({len(prompts)}): repeat a "
                "prompt for each of its responses"
            )
        convert = partial(torch.as_tensor, dtype=torch.int64, device="cpu")
        pairs = [(convert(a), convert(b)) for a, b in zip(prompts, responses, strict=True)]
        parts = [part for pair in pairs for part in pair]
        part_lengths = convert([len(part) for part in parts])
        is_response = torch.arange(len(parts), device="cpu") % 2 == 1
        return cls(
            tokens_N=torch.cat([convert([]), *parts]),
            cu_seqlens=convert([0, *(len(a) + len(b) for a, b in pairs)]).cumsum(0),
            response_mask_N=is_response.repeat_interleave(part_lengths),
            **token_fields,
        )

    @cached_property
    def borders(self) -> list[int]:
        """`cu_seqlens` as a list of Python integers."""
        return [int(x) for x in self.cu_seqlens.tolist()]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence."""
        return [b - a for a, b in pairwise(self.borders)]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, n."""
        return len(self.borders) - 1

    @cached_property
    def sequence_N(self) -> Tensor:
        """int64 [N], the index of each token's sequence."""
        numbers = torch.arange(self.num_sequences, device=self.tokens_N.device)
        lengths = self.cu_seqlens.to(self.tokens_N.device).long().diff()
        return numbers.repeat_interleave(lengths, output_size=len(self.tokens_N))

    def expand_to_tokens(self, values_n: Tensor) -> Tensor:
        """Repeat one value per sequence for each of its tokens; return [N]."""
        _check_length("values_n", values_n, self.num_sequences, "sequence")
        return values_n.to(self.tokens_N.device)[self.sequence_N]

    def sum_responses(self, values_N: Tensor) -> Tensor:
        """Return [n], the sum of `values_N` over each sequence's response; differentiable."""
        _check_length("values_N", values_N, len(self.tokens_N), "token")
        masked_N = values_N.where(self.response_mask_N, 0)
        lengths_n = self.cu_seqlens.to(values_N.device).diff().long()
        # Borders were checked; torch's own check waits for the device and refuses 0 sequences.
        return torch.segment_reduce(masked_N, "sum", lengths=lengths_n, unsafe=True)

    def replace(self, **changes: Any) -> Rollouts:
        """Return a copy with some fields replaced, such as `old_log_probs_N`."""
        return replace(self, **changes)

    def take(self, sequences: Iterable[int]) -> Rollouts:
        """Return a mini-batch: a copy of the sequences with indices `sequences`, in this order."""
        indices = list(sequences)
        if any(not 0 <= i < self.num_sequences for i in indices):
            raise ValueError(
                f"sequences ({quote(indices)}) must be numbers from 0 to {self.num_sequences - 1}: "
                "take those that there are"
            )
        token_idx_N, lengths = self.find_token_indices(indices), self.lengths
        values = self.get_token_values().items()
        changes = {name: value[token_idx_N.to(value.device)] for name, value in values}
        sizes = [0, *(lengths[i] for i in indices)]
        borders = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0)
        return replace(self, cu_seqlens=borders, **changes)

    def get_token_values(self) -> dict[str, Any]:
        """Return {name: tensor} of the fields [N, ..] that are not None."""
        names = (f.name for f in fields(self) if f.name.endswith(("_N", "_NLK")))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def find_token_indices(self, sequence_idxs: Sequence[int]) -> Tensor:
        """Return the token indices of these sequences in their order, int64 on the CPU."""
        borders = self.borders
        ranges = [torch.arange(borders[i], borders[i + 1], device="cpu") for i in sequence_idxs]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *ranges])


def _check_length(field: str, values: Tensor, num_entries: int, entry: str) -> None:
    """Raise ValueError unless `values` has one number per `entry`, such as "token"."""
    if values.shape != (num_entries,):
        raise ValueError(
            f"{field} {tuple(values.shape)} must be one number per {entry} ({num_entries}): pass "
            f"[{num_entries}]"
        )


def group_advantages(
    rewards_n: Annotated[Tensor, "pass floating [n]"],
    groups_n: Lengths,
    *,
    scale_rewards: bool = True,
) -> Tensor:
    """Return the GRPO advantage of each response within its group, fp32 [n].

    The advantage is (reward - group mean) / (unbiased group standard deviation + 1e-6), and 0 in a
    group of one response. ValueError unless rewards are one finite number per response.

    Args:
        rewards_n: the reward of each response.
        groups_n: integers >= 0, equal for responses to one prompt. A group must be on one rank.
        scale_rewards: False = no division by the standard deviation (arXiv:2503.20783).
    """
    check_arguments(group_advantages, locals())
    groups = torch.from_numpy(as_lengths(groups_n, "groups_n", 0)).to(rewards_n.device)
    if rewards_n.shape != groups.shape or not bool(rewards_n.isfinite().all()):
        raise ValueError(
            f"rewards_n {tuple(rewards_n.shape)} must be one finite number per response "
            f"({len(groups)}): score all of them"
        )
    _, group_n, counts_g = groups.unique(return_inverse=True, return_counts=True)
    rewards_n = rewards_n.double()
    zeros_g = rewards_n.new_zeros(len(counts_g))
    mean_g = zeros_g.index_add(0, group_n, rewards_n) / counts_g
    centered_n: Tensor = rewards_n - mean_g[group_n]
    if scale_rewards:
        squares_g = zeros_g.index_add(0, group_n, centered_n**2)
        deviation_g = (squares_g / (counts_g - 1).clamp(min=1)).sqrt()
        centered_n = centered_n / (deviation_g[group_n] + 1e-6)
    return centered_n.float()
