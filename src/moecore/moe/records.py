"""Records that the stages of an MoE layer exchange, and the `Dispatcher` protocol.

    x_TD -> Router -> Routing -> Dispatcher.dispatch -> ExpertInput -> Experts -> y_SD
         -> Dispatcher.combine -> y_TD

Legend: T local tokens, D model dim, E experts, e local experts (E / ep), K experts per token (E
with expert choice routing), S source rows, R expert rows.

Each source row is a token that this rank stores after dispatch. Each expert row is a pair of a
source row and a local expert. `dispatch` sends a token at most once to each rank, and stores no
copy per expert: the index has the source row of each expert row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moecore.base.torch_private import register_dataclass
from moecore.kernels.experts.contract import GradientReceiver, UnsummedInput
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows
from moecore.moe.pairs import Pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The experts and weights that a router chose for T tokens.

    Attributes:
        expert_ids_TK: int32, global expert ids, best first; -1 = dropped, or no expert. With expert
            choice routing, column e contains e or -1.
        weights_TK: fp32, factor on the expert's output; differentiable.
        chosen_ids_TK: int32, the ids before capacity dropped choices. Load counts use these ids.
        physical_TK: int32, the physical id of each choice (`ExpertPlacement`) if experts have
            clones or were moved between ranks; None = the expert id.
        logits_TE: router dtype, differentiable; the balance losses read them. None if the model has
            a router that is not moecore's.
        padding_mask_T: bool, True = padding, whose ids are all -1; None = no padding.
        capacity: maximum number of these tokens per expert; None = T.
        pad: dispatchers allocate buffers for the capacity, without a host sync for the real counts.
        rows_multiple: the row count of each expert is padded to a multiple of this number; padding
            rows have weight 0.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    chosen_ids_TK: Tensor
    physical_TK: Tensor | None = None
    logits_TE: Tensor | None = None
    padding_mask_T: Tensor | None = None
    capacity: int | None = None
    pad: bool = False
    rows_multiple: int = 1

    @property
    def destinations_TK(self) -> Tensor:
        """Physical id of the expert or clone that computes each choice, int32; -1 = dropped."""
        return self.expert_ids_TK if self.physical_TK is None else self.physical_TK

    @property
    def max_rows_per_expert(self) -> int:
        """The maximum number of the T tokens that any expert can receive."""
        T = self.expert_ids_TK.shape[0]
        return T if self.capacity is None else min(T, self.capacity)


def split_zero_experts(routing: Routing, num_experts: int) -> tuple[Routing, Tensor]:
    """Return the routing without choices of zero experts, and the sum of their weights, [T, 1].

    A zero expert returns its input unchanged. Its id is `num_experts` or larger, and becomes -1.
    """
    # Example, E=2, ids [[1, 2], [3, 2]], weights [[.5, .5], [.6, .4]]: ids [[1, -1], [-1, -1]] and
    # the sums [[.5], [1.]].
    ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
    is_zero_TK = ids_TK >= num_experts
    zero_weights_T1 = torch.where(is_zero_TK, weights_TK, 0).sum(-1, keepdim=True)
    return replace(routing, expert_ids_TK=ids_TK.masked_fill(is_zero_TK, -1)), zero_weights_T1


class ChoiceTape(Protocol):
    """Records the expert ids that a router chooses, and may replace ids by recorded ids."""

    def get_recorded_choice(
        self, num_tokens: int, device: torch.device, choose: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return recorded int32 ids and fp32 weights [T, K] of T = `num_tokens` tokens.

        None = no record, so the router chooses. `choose()` returns the router's ids, for tokens
        without a record; it may be collective. The router computes weights that are -1, or all
        weights if the second result is None.
        """

    def observe_choice(self, ids_TK: Tensor) -> None:
        """Record the expert ids of a forward, int32 [T, K], before capacity drops choices."""

    def make_rewind(self) -> Callable[[], None]:
        """Return a function that drops all records of later forwards, so that a step can repeat."""


class BalancedRows(NamedTuple):
    """Numbers of source and expert rows with even loads; only the device has the real numbers."""

    source: int
    expert: int | None  # None where R is exact


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """Input of one rank's experts. Every dispatcher returns this record.

    Attributes:
        rows: source rows of this rank (without EP, the tokens without a copy). They are
            differentiable unless `unsummed` is set. Rows that were received as FP8 are
            differentiable through their handle.
        index: expert rows in expert order. R is static: rows past `index.num_rows` have row id 0
            and weight 0, and results of these rows must not be used. An entry of slots_SK is -1 if
            the token was dropped or the expert is on another rank. row_ids_R is None if the source
            rows are the expert rows, without padding.
        plan: the dispatcher's record for `combine`. No other stage reads it.
        unsummed: set by a dispatcher that sums expert rows in `combine`, or whose source rows are
            the expert rows; otherwise None. If set, experts return `UnsummedRows`, and write each
            expert row's gradient to the record's handle. Experts that always sum their rows call
            `convert_to_summed_input` first.
        balanced: numbers of used rows with even loads, if buffers have more rows than the rank
            received; None = S and R are the exact numbers.
        clones: experts of other ranks that this forward computes after the local experts
            (`moe/clones.py`), or None. The index includes them.
        receiver: receives gradients of the experts' output as FP8, if the experts quantise in the
            same format; None = no FP8 gradients.

    Example, two experts, K=2, routing [[0, 1], [1, -1]]: row_ids_R [0, 0, 1, 0], slots_SK [[0, 1],
    [2, -1]], offsets_e [1, 3], num_rows 3: expert 0 reads row 0, expert 1 rows 0 and 1; the last is
    unused.
    """

    rows: Rows
    index: ExpertIndex
    plan: Any
    unsummed: UnsummedInput | None = None
    balanced: BalancedRows | None = None
    clones: Any = None
    receiver: GradientReceiver | None = None

    def replace_rows(self, rows: Rows) -> ExpertInput:
        """Return a copy with other source rows; faster than `dataclasses.replace`."""
        fields = (self.index, self.plan, self.unsummed, self.balanced, self.clones, self.receiver)
        return ExpertInput(rows, *fields)


@dataclass(frozen=True, slots=True)
class UnsummedRows:
    """The experts' output, one row per (token, expert) pair; `combine` sums rows per token."""

    y_RD: Tensor  # weighted output of each expert row; rows past `num_rows` are uninitialised


class Dispatcher(Protocol):
    """Sends tokens to the ranks that own their experts, and returns the experts' outputs.

    On the meta device, nothing is sent, and shapes assume even loads
    (`train/memory/saved_bytes.py`).

    Attributes:
        waits_on_host: the host waits for row counts in every forward, unless `Routing.pad`; such a
            forward cannot be captured in a CUDA graph.
        can_alternate: the host starts and awaits each exchange, where `pairs` can switch passes.
        pairs: alternates the forward of one micro-batch and the backward of another at exchanges;
            None = no alternation.
    """

    waits_on_host: bool
    can_alternate: bool = True
    pairs: Pairs | None = None

    def has_spare_rows(self, *, pads: bool) -> bool:
        """Whether buffers may have more rows than the rank receives.

        `pads` is `Routing.pad`: buffers have the capacity of the experts, not the received counts.
        """
        return False

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Send each token once to every rank of its experts; return the local experts' input."""

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        """Send the experts' output to the tokens' ranks; return y_TD, each token's sum in fp32.

        `y_SD` is weighted sums [S, D] or `UnsummedRows`. `plan` is `ExpertInput.plan`.
        """


class _RouteGradToHandle(torch.autograd.Function):
    """Identity on rows [S, D], whose gradient becomes the gradient [R, D] of a handle."""

    @staticmethod
    def forward(ctx: Any, grad_handle_RD: Tensor, rows_SD: Tensor, slots_SK: Tensor) -> Tensor:
        ctx.num_rows = grad_handle_RD.shape[0]
        ctx.save_for_backward(slots_SK)
        return rows_SD.view_as(rows_SD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (drows_SD,), R = grads, ctx.num_rows
        slots_S = ctx.saved_tensors[0].amax(1)
        slots_S = slots_S.where(slots_S >= 0, R)  # one row more, for source rows without a slot
        drows_RD = drows_SD.new_zeros(R + 1, drows_SD.shape[1])
        return drows_RD.index_copy_(0, slots_S.long(), drows_SD)[:R], None, None


def convert_to_summed_input(inp: ExpertInput) -> ExpertInput:
    """Return `inp` with dequantised, differentiable rows, and with `unsummed` None.

    For experts that sum their output per source row.
    """
    if inp.unsummed is None:
        return inp if inp.rows.scales is None else inp.replace_rows(Rows(inp.rows.widen()))
    if inp.unsummed.refetch is not None:
        raise ValueError(
            "NVLinkOptions.keep_rows (False) must be True for experts that keep their rows "
            "('sequential' or with biases): set it, or use 'triton' or 'torch' without biases"
        )
    handle_RD, rows_SD, index = inp.unsummed.grad_handle_RD, inp.rows.widen(), inp.index
    rows_SD = _RouteGradToHandle.apply(handle_RD, rows_SD, index.slots_SK)
    if index.row_ids_R is None:
        ids_R = torch.arange(len(rows_SD), dtype=torch.int32, device=rows_SD.device)
        index = index._replace(row_ids_R=ids_R)
    return replace(inp, rows=Rows(rows_SD), index=index, unsummed=None)


# Units find the tensors of a module's inputs and outputs through pytree: without this they would
# free the experts' gathered parameters only at the end of the whole backward.
for _record in (Routing, ExpertInput, UnsummedInput, UnsummedRows):
    register_dataclass(_record, field_names=[f.name for f in fields(_record)], drop_field_names=[])
