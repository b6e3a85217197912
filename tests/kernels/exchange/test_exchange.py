"""Exchange of rows: references by hand, kernels against references bit for bit, late ranks.

One process plays all ranks: their buffers lie in one memory, and every rank's push half runs before
any rank's receive half. On a GPU the ranks also run at once, on streams of their own.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moecore.kernels.exchange import copies as exchange_copies
from moecore.kernels.exchange import operations as exchange
from moecore.kernels.exchange import tiles as exchange_tiles
from moecore.kernels.exchange.buffer import (
    ALIGNMENT,
    ERROR_BEFORE_WORD,
    ERROR_WORD,
    NEEDED_WORD,
    NUM_WORDS,
    ExchangeLayout,
    SymmetricBuffer,
    view_int32,
)
from moecore.kernels.exchange.operations import DispatchedRows, limit_rows, limit_rows_ref
from moecore.kernels.exchange.tiles import RowFormat
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.move import sum_rows_ref
from tests.kernels.exchange.oracles import peers_ref, reduce_ref, spread_ref


def test_layout_and_tiles() -> None:
    layout = ExchangeLayout(
        num_ranks=8, max_tokens=4096, row_bytes=7168 * 2, top_k=8, num_push=66, num_receive=66
    )
    assert (layout.source_rows, layout.chunk, layout.num_chunks) == (32768, 8, 512)
    assert replace(layout, num_push=12, num_receive=12).chunk == 64
    assert replace(layout, max_tokens=3).num_chunks == 1 and replace(layout, rounds=4).chunk == 16
    regions = [*layout.locate_regions(1 << 40), (1 << 40) + layout.num_bytes]
    sizes = [b - a for a, b in itertools.pairwise(regions)]
    assert sizes[:3] == [2 * 32768 * 7168 * 2, 2 * 32768 * 8 * 4, 2 * 32768 * 8 * 4]
    assert sizes[3] >= 2 * 8 * 512 * 4 and all(r % ALIGNMENT == 0 for r in regions)
    few, tiles = replace(layout, num_push=12, num_receive=12), exchange_tiles
    words, sums, narrow = RowFormat(3584, 4), RowFormat(7168, 2), RowFormat(24, 2)
    assert [tiles.choose_move_tile(layout, words, n) for n in (64, 8)] == [(32, 512), (8, 2048)]
    assert [tiles.choose_move_tile(few, words, n) for n in (512, 8)] == [(64, 128), (8, 1024)]
    assert tiles.choose_move_tile(layout, RowFormat(1024, 4), 32, 32) == (32, 512)
    assert [tiles.choose_add_tile(layout, n) for n in (sums, narrow)] == [(8, 1024), (8, 32)]
    assert [tiles.choose_sum_tile(layout, n) for n in (sums, narrow)] == [(16, 1024), (64, 32)]


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: tuple[int, ...]  # of each rank
    max_tokens: int
    etp: int = 1
    num_experts: int = 8
    top_k: int = 3
    dim: int = 32
    dtype: torch.dtype = torch.float32
    programs: int = 2  # of each half
    rounds: int = 8
    dropped: float = 0.2
    times: int = 1  # rounds under the interpreter; later rounds find rows of earlier ones


CASES = {
    "uneven": Case(tokens=(13, 0, 5, 9), max_tokens=13, times=3),
    "etp": Case(tokens=(3, 17, 0, 6), max_tokens=20, etp=2),
    "more choices than local experts": Case(tokens=(7, 9), max_tokens=9, top_k=7),
    "all experts are columns, few chosen": Case(
        tokens=(5, 9), max_tokens=9, num_experts=40, top_k=40, dropped=0.96
    ),
    "three ranks, odd columns": Case(
        tokens=(6, 1, 8),
        max_tokens=8,
        num_experts=6,
        top_k=2,
        dim=104,
        dtype=torch.float16,
        times=2,
    ),
    "several chunks": Case(
        tokens=(20, 32, 17, 26), max_tokens=33, programs=1, rounds=3, dim=264, times=2
    ),
    "four tiles at once": Case(tokens=(9, 20), max_tokens=20, dim=1536),
    "one rank": Case(tokens=(11,), max_tokens=16),
    "everything dropped": Case(tokens=(4, 4), max_tokens=4, dropped=1.1),
    "no tokens": Case(tokens=(0, 0, 0, 0), max_tokens=1),
}


class World:
    """All ranks of an exchange in one memory; what nobody writes is NaN."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.G = case, device, len(case.tokens)
        self.layout = ExchangeLayout(
            num_ranks=self.G,
            max_tokens=case.max_tokens,
            row_bytes=case.dim * case.dtype.itemsize,
            top_k=case.top_k,
            num_push=case.programs,
            num_receive=case.programs,
            rounds=case.rounds,
            sums_slot=True,
        )
        size = self.layout.num_bytes
        self.memories = [
            torch.full((size + ALIGNMENT,), 255, dtype=torch.uint8, device=device)
            for _ in range(self.G)
        ]
        # An interpreted kernel reads any address; 16-byte accesses of a GPU want aligned ones.
        starts = [-(-b.data_ptr() // ALIGNMENT) * ALIGNMENT for b in self.memories]
        for memory, start in zip(self.memories, starts, strict=True):
            flags = self.layout.locate_regions(start - memory.data_ptr())[3]
            memory[flags : flags + self.layout.region_bytes[3]] = 0
        bases = (
            torch.tensor([self.layout.locate_regions(s) for s in starts]).T.contiguous().to(device)
        )
        self.starts = [s - b.data_ptr() for s, b in zip(starts, self.memories, strict=True)]
        peers = [b[start:] for b, start in zip(self.memories, self.starts, strict=True)]
        self.buffers = [
            SymmetricBuffer(
                layout=self.layout,
                rank=r,
                bases=bases,
                state=torch.zeros(NUM_WORDS, dtype=torch.int32, device=device),
                report=torch.zeros(NUM_WORDS, dtype=torch.int32, device=device),
                timeout_ns=5 * 10**8,
                sums_slots=tuple(self.layout.view_sums(p, r) for p in peers),
            )
            for r in range(self.G)
        ]
        self.num_local = case.num_experts // (self.G // case.etp)

    def slot(self, rank: int, slot: int) -> Tensor:
        """Return the receive buffer of a rank, [S, D]."""
        S, D = self.layout.source_rows, self.case.dim
        start = self.starts[rank]
        rows = self.memories[rank][start : start + self.layout.region_bytes[0]].view(
            self.case.dtype
        )
        return rows[: 2 * S * D].view(2, S, D)[slot]

    def padded(self, tensors: list[Tensor], fill: float) -> Tensor:
        """Return [G, C, ...] with `fill` past each rank's tokens."""
        shape = (self.G, self.case.max_tokens, *tensors[0].shape[1:])
        out = tensors[0].new_full(shape, fill)
        for row, tensor in zip(out, tensors, strict=True):
            row[: tensor.shape[0]] = tensor
        return out


@dataclass(frozen=True)
class Inputs:
    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]


def inputs_of(world: World, seed: int) -> Inputs:
    case, generator = world.case, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # Other token counts in every round.
    counts = [min(case.max_tokens, n + seed) if n else 0 for n in case.tokens]
    ids = []
    for n in counts:
        choices = random(n, case.num_experts).argsort(1)[:, : case.top_k].to(torch.int32)
        drop = torch.rand(choices.shape, generator=generator) < case.dropped
        ids.append(choices.masked_fill(drop, -1).to(world.device))
    return Inputs(
        x=[random(n, case.dim).to(world.device, case.dtype) for n in counts],
        ids=ids,
        weights=[random(n, case.top_k).to(world.device) for n in counts],
    )


def check_dispatch(world, inp, peers, came) -> None:
    case, blocks = world.case, world.G // world.case.etp
    expected = [peers_ref(i, world.num_local, blocks, case.etp) for i in inp.ids]
    assert all(torch.equal(a, b) for a, b in zip(peers, expected, strict=True))
    peers_GC = world.padded(peers, 0)
    for r, got in enumerate(came):
        used = (peers_GC >> r & 1).flatten().bool()
        rows_S = torch.arange(used.numel(), dtype=torch.int32, device=used.device)
        assert torch.equal(got.places_S, rows_S.where(used, -1))
        sent = (world.padded(inp.x, 0), peers_GC)
        assert torch.equal(got.rows_SD[used], spread_ref(*sent, r)[used])
        ids_SK = spread_ref(world.padded(inp.ids, -1), peers_GC, r, -1)
        assert torch.equal(got.ids_SK, ids_SK)
        weights_SK = spread_ref(world.padded(inp.weights, 0), peers_GC, r)
        assert torch.equal(got.weights_SK, weights_SK.where(ids_SK >= 0, 0))


def expert_slots(world: World, came: list[DispatchedRows]) -> list[Tensor]:
    """Return each rank's places of source rows among the rows of its experts."""
    slots = []
    for r, got in enumerate(came):
        sizes = dict(
            first_expert=r // world.case.etp * world.num_local, num_local_experts=world.num_local
        )
        slots.append(build_index(got.ids_SK, got.weights_SK, **sizes).slots_SK)
    return slots


def rows_of(world: World, slots: list[Tensor], seed: int) -> list[Tensor]:
    """Return rows that the slots of each rank point at."""
    generator, case = torch.Generator().manual_seed(seed), world.case
    rows = world.layout.source_rows * slots[0].shape[1]
    y = [torch.randn(rows, case.dim, generator=generator) for _ in slots]
    return [t.to(world.device, case.dtype) for t in y]


def choices_of(world, slots, seed) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return each rank's gradients of weights and their slots, and the same by choice."""
    rows = rows_of(world, slots, seed + 100)
    grads = [y[:, 0].float().contiguous() for y in rows]
    pairs = list(zip(grads, slots, strict=True))
    return pairs, torch.stack([torch.where(s >= 0, g[s.clamp(min=0).long()], 0) for g, s in pairs])


def check_copied(world, peers, came, grads, seed) -> None:
    """Sums that copies bring home, and gradients of choices beside them."""
    sums = rows_of(world, [c.places_S[:, None] for c in came], seed)
    choices, dweights_GSK = grads
    for buffer, sums_SD in zip(world.buffers, sums, strict=True):
        exchange_copies.copy_sums_to_peers(buffer, sums_SD)
    where = [(g, c.places_S, c.places_S[:, None]) for g, c in zip(peers, came, strict=True)]
    calls = [(p, y, *w, g) for p, y, w, g in zip(world.buffers, sums, where, choices, strict=True)]
    for call in calls:
        exchange.combine_rows(*call, has_sums=True, half="push")
    for r, call in enumerate(calls):
        out, out_grads = exchange.combine_rows(*call, has_sums=True, half="receive")
        assert torch.equal(out, reduce_ref(torch.stack(sums), peers[r], r))
        assert torch.equal(out_grads, reduce_ref(dweights_GSK, peers[r], r))  # type: ignore[arg-type]


def check_narrow(world: World, inp: Inputs, sizes: dict[str, int]) -> None:
    """Bytes of half a row, as FP8 rows are, in the same slots."""
    width = max(16, world.layout.row_bytes // 32 * 16)
    inp = replace(inp, x=[x.view(torch.uint8)[:, :width].contiguous() for x in inp.x])
    tokens = list(zip(world.buffers, inp.x, inp.ids, inp.weights, strict=True))
    peers = [exchange.dispatch_rows_and_choices(*t, **sizes, half="push").peers_T for t in tokens]
    came = [exchange.dispatch_rows_and_choices(*t, **sizes, half="receive") for t in tokens]
    check_dispatch(world, inp, peers, came)


def test_rows_at_odd_places_are_moved_as_words() -> None:
    flat = torch.arange(40, dtype=torch.bfloat16)
    for start in (0, 1, 2, 3):
        rows = flat[start : start + 32].view(2, 16)
        words = view_int32(rows)
        assert words.shape == (2, 8) and torch.equal(words.view(torch.bfloat16), rows)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_references(name: str, device: str) -> None:
    world = World(CASES[name], device)
    buffers, sizes = world.buffers, dict(num_local_experts=world.num_local, etp=world.case.etp)
    for n in range(3 if device == "cuda" else world.case.times):
        inp = inputs_of(world, n)
        tokens = list(zip(buffers, inp.x, inp.ids, inp.weights, strict=True))
        peers = [
            exchange.dispatch_rows_and_choices(*t, **sizes, half="push").peers_T for t in tokens
        ]
        came = [exchange.dispatch_rows_and_choices(*t, **sizes, half="receive") for t in tokens]
        check_dispatch(world, inp, peers, came)
        if n == 0:  # later rounds find rows of earlier ones, in both slots
            for r, got in enumerate(came):
                assert world.slot(r, 0)[got.places_S < 0].isnan().all()
                assert world.slot(r, 1).isnan().all()
        of_experts = expert_slots(world, came)
        choices, dweights_GSK = choices_of(world, of_experts, seed=n)
        for with_grads in (True, False):
            by_expert = (n + with_grads) % 2 == 0
            slots = of_experts if by_expert else [c.places_S[:, None] for c in came]
            y = rows_of(world, slots, seed=n)
            where = [(g, c.places_S, s) for g, c, s in zip(peers, came, slots, strict=True)]
            grads = choices if with_grads else [None] * world.G
            sums = [(p, x, *w, g) for p, x, w, g in zip(buffers, y, where, grads, strict=True)]
            y_GSN = torch.stack([sum_rows_ref(*t, None) for t in zip(y, slots, slots, strict=True)])
            for s in sums:
                exchange.combine_rows(*s, half="push")
            for r, s in enumerate(sums):
                out, out_grads = exchange.combine_rows(*s, half="receive")
                assert torch.equal(out, reduce_ref(y_GSN, peers[r], r))
                if not with_grads:
                    assert out_grads is None
                else:
                    right = reduce_ref(dweights_GSK, peers[r], r)
                    assert torch.equal(out_grads, right)  # type: ignore[arg-type]
            if n == 0 and with_grads and any(p.any() for p in peers):
                second = torch.stack([world.slot(r, 1) for r in range(world.G)])
                assert not second.isnan().all(), "operations take turns in two slots"
        back = [(p, x, *w, y[0].shape[0]) for p, x, w in zip(buffers, inp.x, where, strict=True)]
        for b in back:
            exchange.dispatch_rows(*b, half="push")
        for r, b in enumerate(back):
            rows_RD, (s, k) = (
                exchange.dispatch_rows(*b, half="receive"),
                (slots[r] >= 0).nonzero().T,
            )
            right = spread_ref(world.padded(inp.x, 0), world.padded(peers, 0), r)
            assert torch.equal(rows_RD[slots[r][s, k].long()], right[s])
        check_copied(world, peers, came, (choices, dweights_GSK), seed=n)
        check_narrow(world, inp, sizes)
        assert [int(p.state[0]) for p in buffers] == [6 * (n + 1)] * world.G
        assert not any(p.state[1:].any() or p.report.any() for p in buffers)


@pytest.mark.parametrize(("ranks", "etp"), [(33, 3), (64, 1), (64, 64)])
def test_masks_name_many_ranks(ranks: int, etp: int, device: str) -> None:
    """Three ranks send, and add what all others would have sent: the first, one, the last."""
    shape = dict(
        max_tokens=9, etp=etp, num_experts=2 * ranks // etp, top_k=min(8, 2 * ranks // etp)
    )
    world = World(Case(tokens=(9,) * ranks, dim=16, **shape), device)  # type: ignore[arg-type]
    inp, sizes = inputs_of(world, 0), dict(num_local_experts=world.num_local, etp=etp)
    senders = (0, ranks // 2, ranks - 1)
    for r in senders:
        tokens = (inp.x[r], inp.ids[r], inp.weights[r])
        peers = exchange.dispatch_rows_and_choices(
            world.buffers[r], *tokens, **sizes, half="push"
        ).peers_T
        assert torch.equal(peers, peers_ref(inp.ids[r], world.num_local, ranks // etp, etp))
        for g in range(ranks):
            rows = world.slot(g, 0)[r * 9 : (r + 1) * 9]
            needed = (peers >> g & 1).bool()
            assert torch.equal(rows[needed], inp.x[r][needed]) and rows[~needed].isnan().all()
        flags = world.starts[r] + sum(world.layout.region_bytes[:3])
        world.memories[r][flags:].view(torch.int32).fill_(2)  # all have come to operation 1
        sums = torch.randn(ranks * 9, 16, generator=torch.Generator().manual_seed(r)).to(device)
        world.slot(r, 1).copy_(sums)
        y_GSN = sums.new_zeros(ranks, ranks * 9, 16)
        y_GSN.view(ranks, ranks, 9, 16)[:, r] = sums.view(ranks, 9, 16)
        world.buffers[r].state[0] = 1
        places = torch.zeros(ranks * 9, dtype=torch.int32, device=device)
        where = (peers, places, places[:, None])
        found, _ = exchange.combine_rows(world.buffers[r], sums, *where, half="receive")
        assert torch.equal(found, reduce_ref(y_GSN, peers, r))


def test_a_rank_that_does_not_come_is_recorded(device: str) -> None:
    """Ranks 0 and 1 wait for 2, whose error word stays empty; the first error is kept."""
    world = World(Case(tokens=(5, 4, 6), max_tokens=6, num_experts=6), device)
    buffers, inp = world.buffers, inputs_of(world, 0)
    sizes = dict(num_local_experts=world.num_local, etp=1)
    tokens = list(zip(buffers, inp.x, inp.ids, inp.weights, strict=True))
    for t in tokens[:2]:
        exchange.dispatch_rows_and_choices(*t, **sizes, half="push")
    late = [exchange.dispatch_rows_and_choices(*t, **sizes, half="receive") for t in tokens[:2]]
    for r, got in enumerate(late):
        found = 1 + 2 * 2  # spread, rank 2
        assert int(buffers[r].state[ERROR_WORD]) == int(buffers[r].report[ERROR_WORD]) == found
        assert int(buffers[r].state[ERROR_BEFORE_WORD]) == found
        C = world.case.max_tokens
        assert (got.ids_SK[2 * C :] == -1).all() and (got.places_S[2 * C :] == -1).all()
        assert (got.places_S[: 2 * C] >= 0).any()
    where = (late[0].peers_T, late[0].places_S, late[0].places_S[:, None])
    exchange.combine_rows(buffers[0], late[0].rows_SD, *where, half="receive")
    assert int(buffers[0].report[ERROR_WORD]) == 1 + 2 * 2, "the first error stays"
    assert int(buffers[0].state[0]) == 2 and not buffers[2].report.any()


@pytest.mark.parametrize("kind", ["spread", "reduce"])
def test_flags_of_a_late_rank_are_not_taken_for_later_ones(kind: str, device: str) -> None:
    """Rank 1 comes after the timeout; two operations on, in the same slot, it is late again."""
    world = World(Case(tokens=(5, 4), max_tokens=5, num_experts=4, top_k=2), device)
    inp, buffer = inputs_of(world, 0), world.buffers[0]
    ones = [torch.full((n,), 3, device=device) for n in (5, 4)]
    S = world.layout.source_rows
    places = torch.arange(S, dtype=torch.int32, device=device)
    y_SD = torch.zeros(S, world.case.dim, device=device)

    def run(rank: int, half: exchange.Half) -> None:
        where = (ones[rank], places, places[:, None])
        if kind == "spread":
            exchange.dispatch_rows(world.buffers[rank], inp.x[rank], *where, S, half=half)
        else:
            exchange.combine_rows(world.buffers[rank], y_SD, *where, half=half)

    for n in range(3):
        run(0, "push")
        run(0, "receive")
        assert int(buffer.report[ERROR_WORD]) == 1 + 1 * 2 + (kind == "reduce"), n
        if n == 0:
            run(1, "push")
        buffer.state[ERROR_WORD] = buffer.report[ERROR_WORD] = 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uneven", "etp", "several chunks", "no tokens"])
def test_ranks_that_run_at_once_wait_for_each_other(name: str) -> None:
    case = replace(CASES[name], dtype=torch.bfloat16, dim=512)
    world = World(case, "cuda")
    streams = [torch.cuda.Stream() for _ in world.buffers]
    sizes = dict(num_local_experts=world.num_local, etp=case.etp)
    for n in range(20):
        inp = inputs_of(world, n)
        torch.cuda.synchronize()
        came = []
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000 * ((r * 7 + n) % 5))
                tokens = (inp.x[r], inp.ids[r], inp.weights[r])
                came.append(exchange.dispatch_rows_and_choices(world.buffers[r], *tokens, **sizes))
        torch.cuda.synchronize()
        check_dispatch(world, inp, [c.peers_T for c in came], came)
        slots = [c.places_S[:, None] for c in came] if n % 2 else expert_slots(world, came)
        y = rows_of(world, slots, seed=n)
        torch.cuda.synchronize()
        home = []
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                where = (came[r].peers_T, came[r].places_S, slots[r])
                home.append(exchange.combine_rows(world.buffers[r], y[r], *where)[0])
        torch.cuda.synchronize()
        y_GSN = torch.stack([sum_rows_ref(*t, None) for t in zip(y, slots, slots, strict=True)])
        for r, y_TD in enumerate(home):
            assert torch.equal(y_TD, reduce_ref(y_GSN, came[r].peers_T, r))
        assert not any(p.report.any() for p in world.buffers)


@pytest.mark.parametrize("where", ["reference", "kernel"])
def test_offsets_are_cut_and_the_need_is_kept(where: str, device: str) -> None:
    state, report = (torch.zeros(NUM_WORDS, dtype=torch.int32, device=device) for _ in range(2))
    cut = limit_rows_ref if where == "reference" else limit_rows
    for offsets, limit, expected, needed in (
        ([3, 3, 7], 7, [3, 3, 7], 0),
        ([3, 3, 7], 5, [3, 3, 5], 7),
        ([1, 2, 6], 5, [1, 2, 5], 7),
        ([4, 8, 9], 5, [4, 5, 5], 9),
    ):
        offsets_e = torch.tensor(offsets, dtype=torch.int32, device=device)
        assert cut(offsets_e, limit, state, report).tolist() == expected
        assert offsets_e.tolist() == offsets
        assert int(state[NEEDED_WORD]) == int(report[NEEDED_WORD]) == needed
