"""Rank-deduplicated all-to-all over NCCL or gloo, with uneven splits.

    x_TD, Routing -> dispatch -> ExpertInput (S source rows, R expert rows) -> experts
                  -> combine  -> y_TD

    dispatch = gather the M rows to send -> all-to-all      backward: all-to-all -> sum
    combine  = all-to-all -> sum of M partial sums          backward: gather -> all-to-all

Legend: T local tokens, D model dim, K experts per token, P expert blocks (ep), G ranks of the
group (ep * etp), M rows sent, S source rows (received), R expert rows.

Sums run over the ranks in order, so every run computes the same bits. A forward has one host sync,
for the split sizes. Backward has no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.streams import record_host_wait
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.collectives import (
    EqualTokenCounts,
    LayerCheck,
    drop_unneeded_grads,
    exchange_tensors,
    exchange_with_grad,
    list_outputs_without_grad,
    run_collectives,
)
from moecore.moe.dispatch.send_order import (
    SendOrder,
    assign_padded_rows,
    build_send_order,
    mask_choices_by_block,
)
from moecore.moe.dispatch.wire import Receiver, Wire, gather_fp8_rows, make_row_handle
from moecore.moe.pairs import Pairs, read_numbers
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher, ExpertInput, Routing, UnsummedRows


@dataclass(frozen=True, slots=True)
class AllToAllPlan:
    """Record of a dispatch for `combine`: the sent rows of each token, and rows per rank."""

    token_ids_M: Tensor  # int32, token of each sent row, ordered by destination and then by token
    slots_TG: Tensor  # int32, sent row of each token and destination; -1 = not sent to this rank
    send_splits: list[int]  # rows sent to each rank
    receive_splits: list[int]  # rows received from each rank
    receiver: Receiver | None  # of combine's backward, if tokens are sent as FP8


class ReceivedRows(NamedTuple):
    """The rows that a rank received, K physical expert ids and weights per row, and the plan."""

    rows: Rows  # differentiable, as the weights are
    ids_SK: Tensor
    weights_SK: Tensor
    plan: AllToAllPlan


class TokenExchange:
    """Sends each token once to every rank of a group that needs it; sums the returned rows."""

    def __init__(self, group: dist.ProcessGroup, layer: tuple[int, str], wire: Wire) -> None:
        self.group, self.wire = group, wire
        self.layer_check = LayerCheck(group, layer)
        self._sizes = EqualTokenCounts(group)

    def send_tokens(
        self,
        x_TD: Tensor,
        routing: Routing,
        send_order: SendOrder,
        pairs: Pairs | None,
        *,
        balanced_counts: tuple[int, int],
    ) -> tuple[ReceivedRows, int]:
        """Send rows; return received rows, and the number of (token, local expert) pairs.

        `pairs` runs another micro-batch during the exchange. On meta, `balanced_counts` replaces
        the received counts (rows from each rank, pairs). One host sync.
        """
        # In a pair the rows are gathered before the other side computes. M is then the maximum:
        # rows after the sent rows are uninitialised and not read.
        token_ids_M, slots_TG, counts_G3 = send_order
        if pairs is not None:
            pairs.give_back_at_gradient(x_TD)
            send_rows = self._gather_send_rows(x_TD, routing, token_ids_M, slots_TG)
        if x_TD.is_meta:
            send_splits = receive_splits = [balanced_counts[0]] * self.group.size()
            num_choices = balanced_counts[1]
            record_host_wait()
        else:
            # Collectives with uneven splits take the splits from the host.
            all_counts_2G3 = counts_G3.repeat(2, 1, 1)
            send_counts_G3, recv_counts_G3 = all_counts_2G3
            start = partial(
                dist.all_to_all_single, recv_counts_G3, send_counts_G3, group=self.group
            )
            send_counts, recv_counts = read_numbers(start, all_counts_2G3, pairs)
            tokens, choices, notes = zip(*recv_counts, strict=True)
            self.layer_check.check_encoded_layers(notes)
            send_splits, receive_splits = [n for n, _, _ in send_counts], list(tokens)
            num_choices = sum(choices)
        if pairs is None:
            token_ids_M = token_ids_M[: sum(send_splits)]
            send_rows = self._gather_send_rows(x_TD, routing, token_ids_M, slots_TG)
        splits = (send_splits, receive_splits)
        plan = AllToAllPlan(token_ids_M, slots_TG, *splits, self.wire.make_receiver())
        return self._send_rows(send_rows, plan, pairs, may_overlap=True), num_choices

    def send_padded(
        self,
        x_TD: Tensor,
        routing: Routing,
        is_sent_GT: Tensor,
        rows_per_rank: int,
        pairs: Pairs | None,
    ) -> ReceivedRows:
        """Send every rank `rows_per_rank` rows, tokens and then padding; return received rows.

        Args:
            is_sent_GT: bool [G, T], whether token t is sent to rank g; at most `rows_per_rank`
                tokens per rank.
            pairs: the micro-batches that overlap with this one; None = no overlap.
        """
        self._sizes.check_num_tokens(x_TD.shape[0], x_TD.device)
        token_ids_M, slots_TG, is_row_M = assign_padded_rows(is_sent_GT, rows_per_rank)
        splits = [rows_per_rank] * self.group.size()
        plan = AllToAllPlan(token_ids_M, slots_TG, splits, splits, self.wire.make_receiver())
        send_rows = self._gather_send_rows(x_TD, routing, token_ids_M, slots_TG, is_row_M)
        return self._send_rows(send_rows, plan, pairs, may_overlap=False)

    def _gather_send_rows(
        self,
        x_TD: Tensor,
        routing: Routing,
        token_ids_M: Tensor,
        slots_TG: Tensor,
        is_row_M: Tensor | None = None,
    ) -> _RowsToSend:
        """Gather the M rows to send, with their tokens' ids and weights; padding has the id -1."""
        words_MN, rows_MD = self.wire.gather_send_rows(x_TD, token_ids_M, slots_TG)
        weights_MK = gather_rows(routing.weights_TK, token_ids_M, slots_TG)
        ids_MK = routing.destinations_TK.index_select(0, token_ids_M)
        if is_row_M is not None:
            ids_MK = ids_MK.masked_fill(~is_row_M[:, None], -1)
        ids_and_weights = torch.cat([ids_MK, weights_MK.detach().view(torch.int32)], dim=1)
        return _RowsToSend(rows_MD, ids_and_weights, weights_MK, words_MN)

    def _send_rows(
        self, send_rows: _RowsToSend, plan: AllToAllPlan, pairs: Pairs | None, *, may_overlap: bool
    ) -> ReceivedRows:
        """All-to-all the gathered rows by the splits of `plan`, and return the received rows."""
        num_source_rows = sum(plan.receive_splits)
        collectives = _make_collectives(plan, num_source_rows, self.group, pairs)
        leaf_SD, ids_SK, weights_SK, words_SW = _SendRowsAndIds.apply(
            *send_rows, num_source_rows, collectives, may_overlap
        )
        rows = Rows(leaf_SD)
        if words_SW is not None:
            rows = self.wire.wrap_received_rows(words_SW, leaf_SD, leaf_SD)
        return ReceivedRows(rows, ids_SK, weights_SK, plan)

    def return_sums(self, y_SD: Tensor, plan: AllToAllPlan, pairs: Pairs | None) -> Tensor:
        """Send sums y_SD back to their tokens' ranks; return each token's fp32 sum, [T, D]."""
        row_map, S = (plan.token_ids_M, plan.slots_TG), y_SD.shape[0]
        to_tokens, to_experts = _make_collectives(plan, S, self.group, pairs)

        def return_rows(y_SD: Tensor) -> Tensor:
            (y_MD,) = to_tokens((y_SD,))
            return sum_rows(y_MD, *row_map)

        def send(grads_TW: Tensor) -> Tensor:
            words_SW: Tensor = to_experts((gather_fp8_rows(grads_TW, *row_map),))[0]
            return words_SW

        def back(dy_TD: Tensor) -> Tensor:
            """Send tokens' gradients to the experts' ranks; return dy_SD, or its FP8 stand-in."""
            dy_SD = None if plan.receiver is None else plan.receiver.exchange_as_fp8(dy_TD, send)
            if dy_SD is None:
                rows_MD = gather_rows(dy_TD, *row_map)
                (dy_SD,) = exchange_tensors((rows_MD,), to_experts, to_tokens)
            return dy_SD

        return exchange_with_grad(y_SD, return_rows, back)


class AllToAllDispatcher(Dispatcher):
    """Sends each token once to every rank that owns at least one of its experts."""

    waits_on_host = True

    def __init__(self, placement: ExpertPlacement, *, fp8: bool = False) -> None:
        self.placement = placement
        self._exchange = TokenExchange(placement.group, placement.layer, Wire(fp8))
        self.layer_check = self._exchange.layer_check

    def has_spare_rows(self, *, pads: bool) -> bool:
        """Return `pads`: only buffers that are padded to the experts' capacity have unused rows."""
        return pads

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Send tokens to experts' ranks; return the experts' input. 3 collectives.

        One host sync; with `routing.pad` only the first call has a host sync.
        """
        p, (T, K), ids_TK = self.placement, routing.expert_ids_TK.shape, routing.destinations_TK
        self._exchange.wire.check_dim(x_TD.shape[1])
        if routing.pad:
            num_slots = min(T, p.num_physical * routing.max_rows_per_expert)
            needs_PT = mask_choices_by_block(ids_TK, p.num_physical, p.ep).any(-1)
            needs_GT = needs_PT.repeat_interleave(p.etp, 0)
            source = self._exchange.send_padded(x_TD, routing, needs_GT, num_slots, self.pairs)
            num_rows = p.compute_max_rows(routing)
        else:
            # The order is launched before the host waits for splits, for the maximum of rows M.
            order = self.prepare_send_order(ids_TK, self.layer_check.encode_layer(x_TD))
            even = p.compute_balanced_tokens(T, K), p.compute_balanced_rows(T, K)
            source, num_rows = self._exchange.send_tokens(
                x_TD, routing, order, self.pairs, balanced_counts=even
            )
        index = p.build_index(source.ids_SK, source.weights_SK, routing, num_rows)
        balanced = None
        if routing.pad and not torch.compiler.is_compiling():  # a tracer would guard on T
            balanced = p.count_balanced(T, K)
        unsummed = p.find_unsummed(source.rows, index, routing)
        if unsummed is not None:  # products read the received rows in place
            index = index._replace(row_ids_R=None)
        parts = (source.rows, index, source.plan, unsummed, balanced)
        return ExpertInput(*parts, receiver=source.plan.receiver)

    def prepare_send_order(self, ids_TK: Tensor, encoded_layer: int) -> SendOrder:
        """Return rows by destination rank, and counts with `encoded_layer`, which ranks compare."""
        p, (T, K) = self.placement, ids_TK.shape
        owned_PTK = mask_choices_by_block(ids_TK, p.num_physical, p.ep)
        num_rows = T * min(p.ep, K) * p.etp
        return build_send_order(owned_PTK, num_rows, encoded_layer, ranks_per_block=p.etp)

    def combine(self, y_SD: Any, plan: AllToAllPlan) -> Tensor:
        """Send partial sums to tokens' ranks, and return y_TD, summed in fp32. No host sync."""
        y_SD = y_SD.y_RD if isinstance(y_SD, UnsummedRows) else y_SD
        return self._exchange.return_sums(y_SD, plan, self.pairs)


class _RowsToSend(NamedTuple):
    """Rows to send, an int32 tensor of their ids and weights, and their differentiable weights."""

    rows_MD: Tensor  # differentiable, as the weights are; a handle if packed rows are sent
    ids_and_weights: Tensor
    weights_MK: Tensor
    words_MW: Tensor | None  # packed rows


def _make_collectives(
    plan: AllToAllPlan, num_source_rows: int, group: dist.ProcessGroup, pairs: Pairs | None
) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
    """Return two all-to-alls: of M rows back to the tokens' ranks, and to the experts' ranks.

    They send the first rows of each input. Further rows of the outputs are uninitialised.
    """

    def run_all_to_all(
        num_rows: int,
        receive_splits: list[int],
        send_splits: list[int],
        inputs: Sequence[Tensor | None],
        *,
        may_overlap: bool = False,
    ) -> list[Any]:
        may_overlap = may_overlap and pairs is not None and pairs.running_pair is not None
        with pairs.launch_on_side_stream() if may_overlap and pairs is not None else nullcontext():
            outs = [None if x is None else x.new_empty((num_rows, *x.shape[1:])) for x in inputs]
        run_collectives(
            dist.all_to_all_single,
            [None if out is None else out[: sum(receive_splits)] for out in outs],
            [None if x is None else x[: sum(send_splits)] for x in inputs],
            pairs,
            may_overlap=may_overlap,
            output_split_sizes=receive_splits,
            input_split_sizes=send_splits,
            group=group,
        )
        for out in outs:
            if may_overlap and out is not None and out.is_cuda:
                out.record_stream(torch.cuda.current_stream())
        return outs

    M, splits = plan.token_ids_M.shape[0], (plan.receive_splits, plan.send_splits)
    to_tokens = partial(run_all_to_all, M, *splits[::-1])
    return to_tokens, partial(run_all_to_all, num_source_rows, *splits)


class _SendRowsAndIds(torch.autograd.Function):
    """Sends rows, and packed ids and weights, in two concurrent collectives; differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        ids_and_weights: Tensor,
        weights_MK: Tensor,
        words_MW: Tensor | None,
        num_source_rows: int,
        collectives: tuple[Callable[..., Any], Callable[..., Any]],
        may_overlap: bool,
    ) -> tuple[Tensor | None, ...]:
        """Send rows, ids and weights; return received rows, ids and weights [S, K], and FP8 rows.

        FP8 `words_MW` are sent instead of `rows_MD` if not None. The first result then has no
        values, only the rows' gradient.
        """
        ctx.collectives, (_, send) = collectives, collectives
        tensors = (rows_MD if words_MW is None else words_MW, ids_and_weights)
        rows_SN, ids_and_weights_S = send(tensors, may_overlap=may_overlap)
        ids_SK, weights_SK = (x.contiguous() for x in ids_and_weights_S.chunk(2, dim=1))
        leaf_SD, words_SW = rows_SN, None
        if words_MW is not None:
            leaf_SD, words_SW = make_row_handle(rows_MD, num_source_rows), rows_SN
        outs = leaf_SD, ids_SK, weights_SK.view(torch.float32), words_SW
        ctx.mark_non_differentiable(*list_outputs_without_grad(outs, ctx.needs_input_grad))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        drows_SD, _, dweights_SK, _ = drop_unneeded_grads(grads, ctx.needs_input_grad)
        drows_MD, dweights_MK = exchange_tensors((drows_SD, dweights_SK), *ctx.collectives)
        return drows_MD, None, dweights_MK, *(None,) * 4
