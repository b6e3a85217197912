"""What flows between the stages of a layer, and what a dispatcher is.

    x_TD -> Router -> Routing -> Dispatcher.dispatch -> ExpertInput -> Experts -> y_SD
         -> Dispatcher.combine -> y_TD

Legend: T local tokens, D model dim, E experts, e local experts (E / ep), K experts per token (E
where the experts choose), S source rows held after dispatch, R expert rows (one per source row and
local expert).

A token crosses the network at most once per rank and is never expanded in memory: `dispatch`
gives source rows and, per expert row, the index of the source row it reads.
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
    """The decision for T tokens.

    Attributes:
        expert_ids_TK: int32, global expert ids; -1 = dropped, or an unused choice. Best first,
            except where the experts choose: there column e holds e or -1.
        weights_TK: fp32, factor on the expert's output; differentiable.
        chosen_ids_TK: the same before capacity dropped any; what is counted.
        physical_TK: int32, the physical expert of each choice (`moe/placement.py`) where experts
            have clones; None = the expert id.
        logits_TE: router dtype, differentiable; for the balance losses. None where the model's own
            router chose.
        padding_mask_T: bool, True = padding, whose ids are all -1; None = no padding.
        capacity: no expert is wanted by more of these tokens; None = by all at most.
        pad: dispatchers size buffers by the capacity and not by counts, so without a host sync.
        rows_multiple: of which the rows of each expert are a multiple; padding has weight 0.
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
        """Return the physical expert of each choice, int32; -1 = nowhere."""
        return self.expert_ids_TK if self.physical_TK is None else self.physical_TK

    @property
    def most_rows_per_expert(self) -> int:
        """Most of these tokens that any expert gets, whatever was chosen."""
        T = self.expert_ids_TK.shape[0]
        return T if self.capacity is None else min(T, self.capacity)


def without_zero_experts(routing: Routing, num_experts: int) -> tuple[Routing, Tensor]:
    """Return the routing without ids from `num_experts` on, and their weights' sum per token."""
    # Example, E=2, ids [[1, 2], [3, 2]], weights [[.5, .5], [.6, .4]]: ids [[1, -1], [-1, -1]] and
    # the sums [[.5], [1.]], fp32 [T, 1].
    ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
    is_zero_TK = ids_TK >= num_experts
    zero_weights_T1 = torch.where(is_zero_TK, weights_TK, 0).sum(-1, keepdim=True)
    return replace(routing, expert_ids_TK=ids_TK.masked_fill(is_zero_TK, -1)), zero_weights_T1


class ChoiceTape(Protocol):
    """Sees every choice of a router, and may make it; see `moecore.rl.replay`."""

    def recorded_choice(
        self, num_tokens: int, device: torch.device, choose: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return int32 ids and fp32 weights [T, K] of this forward; None = the router chooses."""
        # `choose()` is the router's choice, for ids without a record. It is collective if the rule
        # compares tokens. A weight of -1 is the router's for this choice; None = all weights are.

    def took(self, ids_TK: Tensor) -> None:
        """See the choice of this forward, before capacity."""

    def rewinder(self) -> Callable[[], None]:
        """Return what undoes all forwards from here on, for a step that runs again."""


class BalancedRows(NamedTuple):
    """Rows in use with even loads, where only the device knows which of S and R are."""

    source: int
    expert: int | None  # None where R is exact


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """All that the experts of one rank need, the same from every dispatcher.

    Attributes:
        rows: source rows held by this rank (without EP: the tokens themselves, no copy);
            differentiable unless `unsummed`, by their handle where they came quantised.
        index: expert rows in expert order. R is static: rows past `index.num_rows` have row id 0
            and weight 0, and nothing computed from them may be used. A slot is -1 where the choice
            was dropped or its expert lives on another rank.
        plan: the dispatcher's own record for `combine`; no other stage opens it.
        unsummed: None, or the part of a dispatcher that adds expert rows itself. Experts then give
            each expert row's gradient to its handle and return `UnsummedRows`; those that add their
            rows themselves start with `summed_input`.
        balanced: how many rows are in use with even loads, where shapes have room for more; None =
            S and R are those that came.
        clones: None, or other ranks' experts that this forward computes behind its own
            (`moe/clones.py`); the index has them too.
        receiver: None, or where gradients of the experts' output arrive as FP8, if the experts
            would quantise them alike.

    Example, two experts, K=2, routing [[0, 1], [1, -1]]: row_ids_R [0, 0, 1, 0],
    slots_SK [[0, 1], [2, -1]], offsets_e [1, 3], num_rows 3: expert 0 reads row 0, expert 1 rows 0
    and 1; the last is unused.
    """

    rows: Rows
    index: ExpertIndex
    plan: Any
    unsummed: UnsummedInput | None = None
    balanced: BalancedRows | None = None
    clones: Any = None
    receiver: GradientReceiver | None = None

    def with_rows(self, rows: Rows) -> ExpertInput:
        """Return the same with other rows; `replace` costs a host four times as much."""
        fields = (self.index, self.plan, self.unsummed, self.balanced, self.clones, self.receiver)
        return ExpertInput(rows, *fields)


@dataclass(frozen=True, slots=True)
class UnsummedRows:
    """What experts may return for an `unsummed` input; `combine` adds."""

    y_RD: Tensor  # weighted output of each expert row; rows past `num_rows` are uninitialised


class Dispatcher(Protocol):
    """Brings tokens to the ranks that own their experts, and their outputs home.

    On meta nothing is sent, and shapes are those of even loads (`train/memory/saved_bytes.py`).

    Attributes:
        waits_on_host: every forward waits for sizes on the host, unless each expert's rows are
            padded to a capacity; such a forward cannot be in a CUDA graph.
        takes_turns: the host starts and waits for its exchanges, so pairs can alternate there.
        pairs: alternate a forward and a backward at exchanges; None = none.
    """

    waits_on_host: bool
    takes_turns: bool = True
    pairs: Pairs | None = None

    def has_spare_rows(self, *, pads: bool) -> bool:
        """Whether experts get room for more rows than come, a number that only the device knows."""
        # `pads` is that of `Routing`. By default shapes are exact.
        return False

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Bring every token to each rank that owns at least one of its experts, once."""

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        """Send each partial sum home once and add over ranks in fp32; returns y_TD."""
        # y_SD is a tensor, or `UnsummedRows` where the experts' input was `unsummed`.


class _HandleRows(torch.autograd.Function):
    """The rows; a row's gradient goes to one of its expert rows, zeros to the others: same sum."""

    @staticmethod
    def forward(ctx: Any, handle_RD: Tensor, rows_SD: Tensor, slots_SK: Tensor) -> Tensor:
        ctx.num_rows = handle_RD.shape[0]
        ctx.save_for_backward(slots_SK)
        return rows_SD.view_as(rows_SD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (drows_SD,), R = grads, ctx.num_rows
        slots_S = ctx.saved_tensors[0].amax(1)
        slots_S = slots_S.where(slots_S >= 0, R)  # one row more, for source rows without a slot
        drows_RD = drows_SD.new_zeros(R + 1, drows_SD.shape[1])
        return drows_RD.index_copy_(0, slots_S.long(), drows_SD)[:R], None, None


def summed_input(inp: ExpertInput) -> ExpertInput:
    """Return the same input with wide differentiable rows, for experts that gather and sum."""
    if inp.unsummed is None:
        return inp if inp.rows.scales is None else inp.with_rows(Rows(inp.rows.widen()))
    if inp.unsummed.refetch is not None:
        raise ValueError(
            "NVLinkOptions.keep_rows (False) must be True for experts that keep their rows "
            "('sequential' or with biases): set it, or use 'triton' or 'torch' without biases"
        )
    rows_SD = _HandleRows.apply(inp.unsummed.handle_RD, inp.rows.widen(), inp.index.slots_SK)
    return replace(inp, rows=Rows(rows_SD), unsummed=None)


# Units find the tensors of a module's inputs and outputs through pytree: without this they would
# free the experts' gathered parameters only at the end of the whole backward.
for _record in (Routing, ExpertInput, UnsummedInput, UnsummedRows):
    register_dataclass(_record, field_names=[f.name for f in fields(_record)], drop_field_names=[])
