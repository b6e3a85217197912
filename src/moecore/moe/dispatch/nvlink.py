"""The dispatcher for one NVLink domain: each rank stores tokens into its peers' memory.

    x_TD, Routing -> dispatch -> ExpertInput (source rows [S, D], R expert rows) -> experts
                  -> combine  -> y_TD

    dispatch = spread of tokens and choices     backward: reduce of their gradients
    combine  = reduce of partial sums           backward: spread of the gradient

Legend: T local tokens, C maximum tokens of any rank, D model dim, K experts per token, G ranks of
the group (ep * etp), S = G * C source rows, R expert rows.

Each spread or reduce is one launch that sends and receives (`kernels/exchange/operations.py`).
Source row g * C + t is token t of rank g, or a hole if this rank does not need the token. Source
rows are copied out of the buffer, and backward reads the copy, so all layers share one buffer.
Shapes are static and counts stay on the device, so a CUDA graph may hold any number of layers.

A reduce sends one sum per source row, and adds the sums of the ranks in rank order. Its input is
either these sums, or expert rows, which it sums while it sends. Expert rows save one write and read
of the sums, and combine's backward then receives its rows in expert order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moecore.base.torch_private import sum_version_counters
from moecore.kernels.exchange.operations import DispatchedRows
from moecore.kernels.experts.contract import Refetch, UnsummedInput
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.move import sum_rows_without_autograd
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.alltoall import AllToAllDispatcher, AllToAllPlan
from moecore.moe.dispatch.exchange import Exchange, ExchangeMap
from moecore.moe.dispatch.exchange_pool import ExchangePool, find_unsendable_row_problem
from moecore.moe.dispatch.wire import Receiver, Wire, make_row_handle
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import BalancedRows, Dispatcher, ExpertInput, Routing, UnsummedRows


@dataclass(frozen=True, slots=True)
class NVLinkPlan:
    """Record of one dispatch for `combine`: the ranks of each token, and the rows to sum."""

    exchange: Exchange
    dtype: torch.dtype  # of the tokens, and so of all sums
    num_tokens: int  # of combine's output; tokens for which the buffers had no capacity get 0
    row_map: ExchangeMap  # with slots_SK, the expert rows of each source row
    receiver: Receiver | None  # of combine's backward, with `DispatchOptions.fp8`


class NVLinkDispatcher(Dispatcher):
    """Stores each token once into the memory of every rank that owns one of its experts."""

    # With row_factor "exact" it waits, but then `_build_index` refuses graphs.
    waits_on_host = False
    can_alternate = False

    def __init__(self, placement: ExpertPlacement, exchanges: ExchangePool) -> None:
        self.placement = placement
        self.exchanges = exchanges
        self._alltoall = AllToAllDispatcher(placement, fp8=exchanges.wire.fp8)

    @property
    def saves_rows(self) -> bool:
        """Whether source rows are saved for backward; otherwise backward sends tokens again."""
        return self.exchanges.options.keep_rows

    @property
    def has_row_count_sync(self) -> bool:
        """Whether each dispatch synchronises the host to read its number of expert rows."""
        return self.exchanges.options.row_factor == "exact"

    def has_spare_rows(self, *, pads: bool) -> bool:
        """Return True: buffers have space for all tokens of all ranks."""
        return True

    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Send tokens to experts' ranks; return the experts' input. One host sync at first use.

        With `NVLinkOptions.row_factor` "exact" each call has a host sync. Unused rows are
        undefined.
        """
        if self._is_sent_by_alltoall(x_TD, routing):
            return self._alltoall.dispatch(x_TD, routing)
        # A forward on meta plans a step, whose capacity is limited.
        is_limited = self.exchanges.watch is not None or x_TD.is_meta
        wire = self.exchanges.wire
        wire.check_dim(x_TD.shape[1])
        exchange = self.exchanges.get_exchange(x_TD, routing.destinations_TK.shape[1])
        # `TokenCapacity` reruns a step with more tokens than C, with larger buffers.
        inputs = (x_TD, routing.weights_TK, routing.destinations_TK)
        max_tokens = exchange.layout.max_tokens
        tokens = inputs if len(x_TD) <= max_tokens else [t[:max_tokens] for t in inputs]
        sender = _GradSender(exchange) if exchange.layout.sums_slot else None
        limits: Any = dict(has_row_limit=is_limited, row_multiple=routing.rows_multiple)
        make_index = partial(_build_index, exchange=exchange, placement=self.placement, **limits)
        arguments = (exchange, wire, self.placement, sender, make_index)
        outputs = _DispatchOutputs(*_Dispatch.apply(*tokens, *arguments))
        row_map = ExchangeMap(outputs.peers_T, outputs.places_S, outputs.slots_SK)
        plan = NVLinkPlan(exchange, x_TD.dtype, len(x_TD), row_map, wire.make_receiver())
        refetch = None
        if not exchange.options.keep_rows:

            def fetch(x_TD: Tensor, peers_T: Tensor, places_S: Tensor) -> Rows:
                """Send the dispatch's tokens a second time, and return the same received rows."""
                row_map = ExchangeMap(peers_T, places_S, places_S[:, None])
                num_rows = exchange.layout.source_rows
                rows_SN = exchange.dispatch_rows(wire.pack_rows(x_TD), row_map, num_rows)
                return wire.wrap_received_rows(rows_SN, x_TD)

            refetch = Refetch(fetch, (tokens[0].detach(), outputs.peers_T, outputs.places_S))
        # With even loads.
        layout = exchange.layout
        num_tokens = self.placement.compute_balanced_tokens(layout.max_tokens, layout.top_k)
        expert_rows = None if self.has_row_count_sync else exchange.balanced_rows
        return ExpertInput(
            wire.wrap_received_rows(outputs.rows_SN, x_TD),
            ExpertIndex(*outputs[4:]),
            plan,
            UnsummedInput(outputs.grad_handle_RD, sender, refetch),
            BalancedRows(layout.num_ranks * num_tokens, expert_rows),
            receiver=plan.receiver,
        )

    def _is_sent_by_alltoall(self, x_TD: Tensor, routing: Routing) -> bool:
        """Whether the all-to-all dispatcher sends these tokens. All ranks have the same result."""
        # With `is_required`, all-to-all sends tokens if the capacity is limited and no step reads
        # shortages. Otherwise it sends tokens that stores cannot send, and the tokens of forwards
        # outside of a step that is rerun and of a CUDA graph.
        pool, problem = self.exchanges, find_unsendable_row_problem(x_TD)
        if routing.weights_TK.dtype != torch.float32:
            problem = (
                f"weights_TK ({routing.weights_TK.dtype}) must be torch.float32 for dispatcher "
                "('nvlink'): use 'alltoall'"
            )
        if problem is not None and pool.is_required:
            raise ValueError(problem)
        is_captured = x_TD.is_cuda and torch.cuda.is_current_stream_capturing()
        watch = "graph" if x_TD.is_meta or is_captured else pool.watch
        if not pool.is_required:
            return problem is not None or watch not in ("reruns", "graph")
        return pool.capacity_factor is not None and watch is None

    @torch.compiler.disable
    def combine(self, y: Tensor | UnsummedRows, plan: NVLinkPlan | AllToAllPlan) -> Tensor:
        """Send sums of y to tokens' ranks, and return y_TD, summed in fp32. No host sync."""
        if isinstance(plan, AllToAllPlan):
            return self._alltoall.combine(y, plan)
        if isinstance(y, UnsummedRows):
            rows, row_map = y.y_RD, plan.row_map
        else:
            rows = y
            row_map = plan.row_map._replace(slots_SN=plan.row_map.places_S[:, None])
        if rows.dtype != plan.dtype:
            raise ValueError(
                f"dtype of the experts' output ({rows.dtype}) must be that of their input "
                f"({plan.dtype}) for dispatcher ('nvlink'): use 'alltoall'"
            )
        y_TD = _Combine.apply(rows, plan, row_map)
        missing = plan.num_tokens - y_TD.shape[0]
        return F.pad(y_TD, (0, 0, 0, missing)) if missing else y_TD


def _build_index(
    choices: DispatchedRows,
    *,
    exchange: Exchange,
    placement: ExpertPlacement,
    has_row_limit: bool,
    row_multiple: int,
) -> ExpertIndex:
    """Return the index that sorts the received `choices` by local expert of `placement`.

    With `NVLinkOptions.row_factor` "exact", its number of rows is the number of choices. With a
    number and `has_row_limit`, it is at most this number times the rows of even loads. Otherwise it
    suffices for any routing.
    """
    first, number = placement.first_physical, placement.num_physical
    num_rows = exchange.layout.source_rows * min(exchange.layout.top_k, number)
    factor = exchange.options.row_factor
    if factor == "exact":
        ids_SK = choices.ids_SK
        if ids_SK.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "NVLinkOptions.row_factor ('exact') must be a number while a CUDA graph is captured"
            )
        if ids_SK.is_meta:  # choices have no values, so loads are even
            num_rows = exchange.balanced_rows
        else:  # host sync
            num_rows = int(((ids_SK >= first) & (ids_SK < first + number)).sum())
    elif factor is not None and has_row_limit:
        num_rows = min(num_rows, math.ceil(factor * exchange.balanced_rows))
    index = build_index(
        choices.ids_SK,
        choices.weights_SK,
        first_expert=first,
        num_local_experts=number,
        row_multiple=row_multiple,
        max_pairs=num_rows,
    )
    if factor not in (None, "exact") and has_row_limit:
        limited = exchange.limit_rows(index.offsets_e, index.weights_R.shape[0])
        index = index._replace(offsets_e=limited)
    return index


class _GradSender:
    """Sends gradients to the tokens' ranks while experts compute weight gradients."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        # gradients that are being sent, their tensor versions, and the sums that are being copied
        self._sent_grads: tuple[tuple[Tensor | None, ...], tuple[int, ...], Tensor] | None = None

    def start_sending(
        self,
        drows_RD: Tensor,
        dweights_R: Tensor | None,
        row_ids_R: Tensor | None,
        slots_SK: Tensor,
        num_rows: Tensor,
    ) -> None:
        """Sum expert rows' gradients per source row, and start to copy sums to the tokens' ranks.

        If the buffer is in use, nothing is sent, and the dispatch's backward sends all gradients.
        """
        self._sent_grads = None
        if self._exchange.can_copy():
            sums_SD = sum_rows_without_autograd(drows_RD, row_ids_R, slots_SK, num_rows)
            grads = (drows_RD, dweights_R)
            self._sent_grads = grads, _get_versions(*grads), sums_SD
            self._exchange.start_copies(sums_SD)

    def finish_sending(
        self, grads: tuple[Tensor | None, Tensor | None], row_map: ExchangeMap
    ) -> tuple[Tensor, Tensor | None] | None:
        """Wait for copies; return gradients of tokens and routing weights; None = no copies."""
        entry, self._sent_grads = self._sent_grads, None
        if entry is None:
            return None
        (drows_RD, dweights_R), versions, sums_SD = entry
        is_unchanged = grads[0] is drows_RD and grads[1] is dweights_R
        if not is_unchanged or _get_versions(*grads) != versions:
            raise RuntimeError(
                "gradients of the experts' input must not change after the experts' backward with "
                "NVLinkOptions.overlap_weight_grads (True), which has sent them already: remove "
                "the hook or use overlap_weight_grads=False"
            )
        if dweights_R is None:
            assert drows_RD is not None
            dweights_R = drows_RD.new_zeros(drows_RD.shape[0], dtype=torch.float32)
        return self._exchange.finish_copies(sums_SD, row_map, (dweights_R, row_map.slots_SN))


def _get_versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(sum_version_counters(t) for t in tensors if t is not None)


class _DispatchOutputs(NamedTuple):
    """The outputs of `_Dispatch`, or their gradients: received rows, dispatch map, expert index."""

    rows_SN: Any  # source rows as sent, maybe packed
    grad_handle_RD: Any
    peers_T: Any
    places_S: Any
    row_ids_R: Any  # from here on an `ExpertIndex`
    weights_R: Any
    slots_SK: Any
    offsets_e: Any


class _Dispatch(torch.autograd.Function):
    """Sends tokens to experts' ranks; backward sends expert rows' gradients to tokens' ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        exchange: Exchange,
        wire: Wire,
        placement: ExpertPlacement,
        sender: _GradSender | None,
        make_index: Callable[[DispatchedRows], ExpertIndex],
    ) -> tuple[Tensor, ...]:
        choices = exchange.dispatch_tokens(wire.pack_rows(x_TD), ids_TK, weights_TK, placement)
        index = make_index(choices)
        grad_handle_RD = make_row_handle(x_TD, index.weights_R.shape[0])
        row_map = (choices.peers_T, choices.places_S)
        ctx.exchange, ctx.sender = exchange, sender
        ctx.rows_like = (index.weights_R.shape[0], x_TD.shape[1]), x_TD.dtype
        ctx.save_for_backward(*row_map, index.slots_SK)
        integers = (*row_map, index.row_ids_R, index.slots_SK, index.offsets_e)
        ctx.mark_non_differentiable(choices.rows_SD, *integers)
        ctx.set_materialize_grads(False)  # the integer outputs would get zeros of their size
        return _DispatchOutputs(choices.rows_SD, grad_handle_RD, *row_map, *index[:4])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        row_map = ExchangeMap(*ctx.saved_tensors)
        outputs = _DispatchOutputs(*grads)
        drows_RD, dweights_R = outputs.grad_handle_RD, outputs.weights_R
        pair = ctx.sender.finish_sending((drows_RD, dweights_R), row_map) if ctx.sender else None
        if pair is not None:
            return *pair, *(None,) * 6
        # Every rank takes part in the reduce, so missing gradients become zeros.
        zeros = partial(torch.zeros, device=row_map.places_S.device, dtype=torch.float32)
        shape, dtype = ctx.rows_like
        if drows_RD is None:
            drows_RD = zeros(shape, dtype=dtype)
        if dweights_R is None:
            dweights_R = zeros(shape[0])
        choices = (dweights_R, row_map.slots_SN)
        return *ctx.exchange.combine_rows(drows_RD, row_map, choices), *(None,) * 6


class _Combine(torch.autograd.Function):
    """Sums y_RD per token over its ranks to y_TD. Backward sends dy_TD to each token's ranks."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: NVLinkPlan, row_map: ExchangeMap) -> Tensor:
        ctx.exchange, ctx.num_rows, ctx.receiver = plan.exchange, y_RD.shape[0], plan.receiver
        ctx.save_for_backward(*row_map)
        return plan.exchange.combine_rows(y_RD, row_map)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        row_map = ExchangeMap(*ctx.saved_tensors)

        def send(rows_TN: Tensor) -> Tensor:
            return ctx.exchange.dispatch_rows(rows_TN, row_map, ctx.num_rows)  # type: ignore[no-any-return]

        dy_RD = None if ctx.receiver is None else ctx.receiver.exchange_as_fp8(grads[0], send)
        return send(grads[0]) if dy_RD is None else dy_RD, None, None
