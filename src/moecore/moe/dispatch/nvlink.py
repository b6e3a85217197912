"""Stores straight into the peers' memory: the dispatcher for one NVLink domain.

Legend: T local tokens, C the most tokens of any rank, D model dim, K experts per token, G ranks of
the group (ep * etp), S = G * C source rows, R expert rows.

    dispatch = spread of tokens and choices     backward: reduce of their gradients
    combine  = reduce of partial sums           backward: spread of the gradient

With overlap "experts" the tokens and the gradient of a combine come by copy engines instead
(`_Travel`), rank after rank, while the experts multiply what has come.

Each operation is one launch that sends and receives (`kernels/exchange/operations.py`). Source row
g * C + t is token t of rank g, or a hole where this rank does not need it. Sums run over the ranks
in order. What is summed is one row per source row, or the expert rows of each, added on the way:
then no sum is written and read, and backward's rows arrive in expert order. Where experts take
part (`_Sender`)
gradients are added first, and copied home beside the gradients of the weights.
Received rows are copied out of the buffer, and backward finds the copy: so layers share one buffer.
With `fp8_dispatch` tokens go out as FP8 rows over an exchange of their own (`_Outward`), and stay
that until experts gather them; all else is the same.

Shapes are static and counts stay on the device, so a CUDA graph may hold any number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecore._autograd import disable_dynamo, version
from moecore.kernels.exchange.operations import SpreadChoices
from moecore.kernels.experts.expert_mlp import RowsAgain
from moecore.kernels.experts.products import take_all
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.move import sum_rows_plain
from moecore.kernels.rows.packed import PACKED, PACKED_COLUMNS, pack_rows, packed_bytes
from moecore.moe.dispatch.base import ExpertInput, ExpertPlacement, UnsummedRows
from moecore.moe.dispatch.symmetric import Exchange, Exchanges, Pieces
from moecore.moe.router import Routing

CARRIED_AS = torch.bfloat16  # packed rows: exchanges move 16 or 32 bits at a time


@dataclass(frozen=True, slots=True)
class NVLinkPlan:
    """What combine needs: the exchange, who needed which token, and which rows are added.

    Attributes:
        exchange: over which the tokens came.
        peers_T: int32, bit g of each local token: rank g has it.
        places_S: int32, the row's own number, -1 = a hole.
        slots_SK: int32, expert rows of each source row, -1 = none.
        sender: of the dispatch, where it has one.
    """

    exchange: Exchange
    peers_T: Tensor
    places_S: Tensor
    slots_SK: Tensor
    sender: _Sender | None


class NVLinkDispatcher:
    """Sends each token once to every rank that owns at least one of its experts, by stores.

    Args:
        placement: the dispatch group and who owns what.
        exchanges: of the same group; shared by the layers of a model.
    """

    def __init__(self, placement: ExpertPlacement, exchanges: Exchanges) -> None:
        self.placement = placement
        self.exchanges = exchanges

    @disable_dynamo
    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Bring tokens to their experts' ranks. No collective, and no host sync after the first.

        But for one with `NVLinkOptions.exact_rows`.

        Holes of `rows_SD` are uninitialised; no slot names them.

        Raises:
            ValueError: for rows that can not travel, or more tokens than there is room for.
            RuntimeError: when an earlier operation went wrong (see `Exchange.poll`).
        """
        if routing.weights_TK.dtype != torch.float32:
            raise ValueError(
                f"weights_TK ({routing.weights_TK.dtype}) must be torch.float32 for dispatcher "
                "('nvlink'): use 'alltoall'"
            )
        exchange = self.exchanges.get(x_TD, routing.expert_ids_TK.shape[1])
        outward = self._outward(exchange, x_TD)
        tokens = (x_TD, routing.weights_TK, routing.expert_ids_TK)
        pieces = self._pieces(exchange)
        sender = _Sender(exchange, pieces) if exchange.options.overlap != "none" else None
        travel = None
        if pieces is not None and exchange.can_send_rows(after_operation=True):
            travel = _Travel(exchange, pieces, x_TD.detach())
        made = _Dispatch.apply(*tokens, exchange, self.placement, sender, travel, outward)
        rows_SD, expert_rows_RD, peers_T, places_S = made[:4]
        index = ExpertIndex(*made[4:])
        plan = NVLinkPlan(exchange, peers_T, places_S, index.slots_SK, sender)
        again = None
        if not exchange.options.keep_rows:
            again = RowsAgain(outward.again, (x_TD.detach(), peers_T, places_S))
        used = index.offsets_e[-1]
        return ExpertInput(rows_SD, *index, used, plan, expert_rows_RD, sender, again, travel)

    def _outward(self, exchange: Exchange, x_TD: Tensor) -> _Outward:
        """Return how tokens go to their experts."""
        T, D = x_TD.shape
        if not exchange.options.fp8_dispatch:
            return _Outward(exchange, is_packed=False)
        if D % PACKED_COLUMNS:
            raise ValueError(
                f"model dim ({D}) must be a multiple of {PACKED_COLUMNS} with "
                "NVLinkOptions.fp8_dispatch (True): pad it, or let rows travel as they are"
            )
        shape = (T, packed_bytes(D) // CARRIED_AS.itemsize)
        packed = x_TD.new_empty(1, dtype=CARRIED_AS).expand(shape)
        top_k = exchange.layout.top_k
        return _Outward(self.exchanges.get(packed, top_k, one_way=True), is_packed=True)

    def _pieces(self, exchange: Exchange) -> Pieces | None:
        """Return the pieces in which rows come, the same on all ranks; None = as a whole."""
        if exchange.layout.copy_slots < 2:
            return None
        layout, place = exchange.layout, self.placement
        per_rank = layout.capacity * layout.top_k / place.num_experts
        least = max(1, math.ceil(exchange.options.rows_per_piece / per_rank))
        return exchange.pieces(least) if least < layout.num_ranks else None

    @disable_dynamo
    def combine(self, y: Tensor | UnsummedRows, plan: NVLinkPlan) -> Tensor:
        """Send partial sums home and add them in fp32. No host sync, no collective.

        Args:
            y: sums of the source rows [S, D], or expert rows, which are added as they are sent.
            plan: of the dispatch.

        Raises:
            ValueError: when y has another dtype than the tokens had.
        """
        if isinstance(y, UnsummedRows):
            rows, slots_SN = y.y_RD, plan.slots_SK
        else:
            rows, slots_SN = y, plan.places_S[:, None]
        if rows.dtype != plan.exchange.layout.dtype:
            raise ValueError(
                f"dtype of the experts' output ({rows.dtype}) must be that of their input "
                f"({plan.exchange.layout.dtype}) for dispatcher ('nvlink'): use 'alltoall'"
            )
        return _Combine.apply(rows, plan, slots_SN)


def _index_of(came: SpreadChoices, exchange: Exchange, place: ExpertPlacement) -> ExpertIndex:
    """Return the index of the rows that came: room for any routing, or less if asked for."""
    owned = dict(first=place.first_local, num_local=place.num_local)
    num_rows = exchange.layout.source_rows * min(exchange.layout.top_k, place.num_local)
    factor = exchange.options.capacity_factor
    if exchange.options.exact_rows:
        num_rows = exchange.count_rows(came.ids_SK, **owned)
    elif factor is not None:
        num_rows = min(num_rows, math.ceil(factor * exchange.balanced_rows))
    index = build_index(came.ids_SK, came.weights_SK, **owned, capacity=num_rows)
    if factor is not None:
        index = index._replace(offsets_e=exchange.limit_rows(index.offsets_e, num_rows))
    return index


@dataclass(frozen=True, slots=True)
class _Outward:
    """How tokens go to their experts: as they are, or packed over an exchange of their own.

    Attributes:
        exchange: over which.
        is_packed: as FP8 rows, which to the exchange are 16-bit columns.
    """

    exchange: Exchange
    is_packed: bool

    def pack(self, x_TD: Tensor) -> Tensor:
        """Return what the exchange carries."""
        return pack_rows(x_TD.contiguous()).view(CARRIED_AS) if self.is_packed else x_TD

    def rows(self, came_SN: Tensor) -> Tensor:
        """Return what came as `ExpertInput.rows_SD`."""
        return came_SN.view(PACKED) if self.is_packed else came_SN

    def again(self, x_TD: Tensor, peers_T: Tensor, places_S: Tensor) -> Tensor:
        """Send tokens where they went; return the same rows once more."""
        return self.rows(self.exchange.spread_again(self.pack(x_TD), peers_T, places_S))


class _Travel:
    """Rows on their way to the experts, by copy engines: a `TravellingRows`.

    Args:
        exchange: over which they go; `can_send_rows` now.
        pieces: in which they come.
        x_TD: this rank's rows.
    """

    rows_RD: Tensor

    def __init__(self, exchange: Exchange, pieces: Pieces, x_TD: Tensor) -> None:
        self.ranges_PN2 = pieces.ranges_PN2
        self._exchange = exchange
        self._ranks = pieces.ranks
        x_TD = x_TD.contiguous()
        self._x_TD = x_TD.clone() if x_TD.data_ptr() % 16 else x_TD
        self._version = version(self._x_TD)
        self._where: tuple[Tensor, Tensor] | None = None
        self._is_over = False

    def start(self) -> None:
        """Send them."""
        self._exchange.start_rows(self._x_TD)

    def locate(self, places_S: Tensor, slots_SN: Tensor, num_rows: int) -> None:
        """Say where the rows go that come, of `num_rows`; before the first is taken."""
        self._where = (places_S, slots_SN)
        self.rows_RD = self._x_TD.new_empty(num_rows, self._x_TD.shape[1])

    def take(self, piece: int) -> None:
        """Bring a piece into `rows_RD`; the last one ends the journey.

        Raises:
            RuntimeError: when it has ended, or this rank's rows have changed in place since they
                were sent.
        """
        assert self._where is not None
        if self._is_over:
            raise RuntimeError(
                "rows must be taken once with NVLinkOptions.overlap ('experts'), the slot may have "
                "others since: checkpoint whole layers or use overlap='weight_grads'"
            )
        if version(self._x_TD) != self._version:
            raise RuntimeError(
                "rows must not change in place while they travel with NVLinkOptions.overlap "
                "('experts'): change a copy or use overlap='weight_grads'"
            )
        self._exchange.take_rows(self._x_TD, *self._where, self.rows_RD, self._ranks[piece])
        if piece == len(self._ranks) - 1:
            self._is_over = True
            self._exchange.finish_rows(self._x_TD)

    def take_source_rows(self) -> Tensor:
        """Wait for all; return the source rows [S, D] instead, holes uninitialised."""
        assert self._where is not None
        places_S, S = self._where[0], self._exchange.layout.source_rows
        self.locate(places_S, places_S[:, None], S)
        return take_all(self)


class _Sender:
    """The part of one dispatch and its combine in the experts' backward: a `GradientSender`.

    It sends the dispatch's gradients home before its backward is asked for them, and hands the
    gradients of the combine over while they come.

    Args:
        exchange: over which the tokens came.
        pieces: in which gradients may come; None = as a whole.
    """

    def __init__(self, exchange: Exchange, pieces: Pieces | None) -> None:
        self.takes_arriving = False
        self._exchange = exchange
        self._pieces = pieces
        self._travel: _Travel | None = None
        self._stand_in: Tensor | None = None
        self._sent: tuple[Tensor, Tensor | None] | None = None
        self._versions: tuple[int, ...] = ()
        self._sums_SD: Tensor | None = None

    def start(
        self,
        drows_RD: Tensor,
        dweights_R: Tensor | None,
        row_ids_R: Tensor,
        slots_SK: Tensor,
        num_rows: Tensor,
    ) -> None:
        """Add the gradients of each source row's expert rows and begin to copy the sums home.

        Does nothing where copies can not come now: then backward sends all of it.
        """
        self._sent = self._sums_SD = None
        if not self._exchange.can_copy():
            return
        self._sent = (drows_RD, dweights_R)
        self._versions = _versions(*self._sent)
        self._sums_SD = sum_rows_plain(drows_RD, row_ids_R, slots_SK, num_rows)
        self._exchange.start_copies(self._sums_SD)

    def hand_over(
        self, dy_TD: Tensor, where: tuple[Tensor, Tensor], num_rows: int
    ) -> Tensor | None:
        """Begin to send a combine's gradient; return what stands for it until it has come.

        That is NaN without memory: whoever reads it instead of the gradient sees it. None where it
        can not come in pieces, the same on all ranks.

        Args:
            dy_TD: of this rank's tokens.
            where: places_S and slots_SN.
            num_rows: R.
        """
        if not (self.takes_arriving and self._pieces and self._exchange.can_send_rows()):
            return None
        self._travel = _Travel(self._exchange, self._pieces, dy_TD)
        self._travel.start()
        self._travel.locate(*where, num_rows)
        self._stand_in = dy_TD.new_full((1,), math.nan).expand(num_rows, dy_TD.shape[1])
        return self._stand_in

    def arriving(self, dy_RD: Tensor) -> _Travel | None:
        """Return the gradients for which `dy_RD` stands; None = it is what it says.

        Raises:
            RuntimeError: when they were handed over and this is another tensor.
        """
        travel, stand_in, self._travel, self._stand_in = self._travel, self._stand_in, None, None
        if travel is None or stand_in is None:
            return None
        if dy_RD is not stand_in or dy_RD._version:
            raise RuntimeError(
                "gradients of the experts' output must not change before the experts' backward "
                "with NVLinkOptions.overlap ('experts'), where they are still on their way: remove "
                "the hook or use overlap='weight_grads'"
            )
        return travel

    def finish(
        self, came: tuple[Tensor | None, Tensor | None], where: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the sums at home, [T, D] and [T, K]; None where nothing was begun.

        Args:
            came: gradients of the expert rows and of their weights, which must be those of `start`.
            where: peers_T, places_S and slots_SK.

        Raises:
            RuntimeError: when they are others, or have changed.
        """
        sent, sums_SD, self._sent, self._sums_SD = self._sent, self._sums_SD, None, None
        if sent is None or sums_SD is None:
            return None
        if came[0] is not sent[0] or came[1] is not sent[1] or _versions(*came) != self._versions:
            raise RuntimeError(
                "gradients of the experts' input must not change after the experts' backward with "
                f"NVLinkOptions.overlap ({self._exchange.options.overlap!r}), which has sent them "
                "already: remove the hook or use overlap='none'"
            )
        peers_T, places_S, slots_SK = where
        dweights_R = sent[1]
        if dweights_R is None:
            dweights_R = sums_SD.new_zeros(sent[0].shape[0], dtype=torch.float32)
        return self._exchange.finish_copies(sums_SD, peers_T, places_S, (dweights_R, slots_SK))


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(version(t) for t in tensors if t is not None)


class _Dispatch(torch.autograd.Function):
    """Tokens out, rows in; the gradient comes back at the expert rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        exchange: Exchange,
        place: ExpertPlacement,
        sender: _Sender | None,
        travel: _Travel | None,
        outward: _Outward,
    ) -> tuple[Tensor, ...]:
        sizes: dict[str, Any] = dict(num_local=place.num_local, etp=place.etp, rows=travel is None)
        sent = (outward.pack(x_TD), ids_TK, weights_TK)
        came = outward.exchange.spread_choices(*sent, **sizes)
        if travel is not None:
            travel.start()  # not earlier: copies would slow the choices down, which all wait for
        index = _index_of(came, exchange, place)
        rows_SD = outward.rows(came.rows_SD)
        if travel is not None:
            travel.locate(came.places_S, index.slots_SK, index.row_ids_R.shape[0])
            shape = (exchange.layout.source_rows, x_TD.shape[1])
            rows_SD = x_TD.new_full((1,), math.nan).expand(shape)
        expert_rows_RD = x_TD.new_empty(1).expand(index.row_ids_R.shape[0], x_TD.shape[1])
        where = (came.peers_T, came.places_S)
        ctx.exchange, ctx.num_rows, ctx.sender = exchange, index.row_ids_R.shape[0], sender
        ctx.save_for_backward(*where, index.slots_SK)
        integers = (*where, index.row_ids_R, index.slots_SK, index.offsets_e)
        ctx.mark_non_differentiable(rows_SD, *integers)
        ctx.set_materialize_grads(False)  # the integer outputs would get zeros of their size
        return rows_SD, expert_rows_RD, *where, *index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        where = ctx.saved_tensors
        _, places_S, slots_SK = where
        _, drows_RD, _, _, _, dweights_R, *_ = grads
        home = ctx.sender.finish((drows_RD, dweights_R), where) if ctx.sender else None
        if home is not None:
            return *home, *(None,) * 6
        # Every rank takes part, whichever gradients it has.
        zeros = partial(torch.zeros, device=places_S.device)
        if drows_RD is None:
            layout = ctx.exchange.layout
            drows_RD = zeros(ctx.num_rows, layout.dim, dtype=layout.dtype)
        if dweights_R is None:
            dweights_R = zeros(ctx.num_rows)
        dx_TD, dweights_TK = ctx.exchange.reduce(drows_RD, *where, (dweights_R, slots_SK))
        return dx_TD, dweights_TK, *(None,) * 6


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: NVLinkPlan, slots_SN: Tensor) -> Tensor:
        ctx.exchange, ctx.num_rows, ctx.sender = plan.exchange, y_RD.shape[0], plan.sender
        where = (plan.peers_T, plan.places_S, slots_SN)
        ctx.save_for_backward(*where)
        return plan.exchange.reduce(y_RD, *where)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        peers_T, places_S, slots_SN = ctx.saved_tensors
        dy_RD = None
        if ctx.sender is not None:
            dy_RD = ctx.sender.hand_over(grads[0], (places_S, slots_SN), ctx.num_rows)
        if dy_RD is None:
            dy_RD = ctx.exchange.spread(grads[0], peers_T, places_S, slots_SN, ctx.num_rows)
        return dy_RD, None, None
