"""Clones over peers' memory: references by hand, kernels against them bit for bit, late ranks.

One process plays all ranks, as in `test_exchange.py`.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.exchange import clones
from moecore.kernels.exchange.buffer import ALIGNMENT, ERROR_WORD, NUM_WORDS
from moecore.kernels.exchange.clones import CloneBuffer, CloneLayout, ClonePiece, ClonePlaces
from moecore.kernels.triton_api import INTERPRET
from tests.kernels.exchange.oracles import bring_home_ref, fetch_ref

NAN = float("nan")
HALF = torch.float16 if INTERPRET else torch.bfloat16  # to which the interpreter cuts sums


def ints(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_layout() -> None:
    layout = CloneLayout(num_ranks=3, set_bytes=1 << 12, num_programs=2)
    assert layout.locate_regions(1 << 20) == [1 << 20, 0, 0, (1 << 20) + 2 * (1 << 12)]
    assert layout.num_bytes == 2 * (1 << 12) + 2 * 3 * 2 * 4
    assert layout.slot_bytes(3) == 1280 and layout.slot_bytes(3) % ALIGNMENT == 0
    rows = torch.empty(2, 700)
    assert list(clones.split_into_pieces(layout, rows, 3)) == [
        (700, 0, 320),
        (700, 320, 320),
        (700, 640, 60),
    ]
    assert list(clones.split_into_pieces(layout, rows[:, :0], 3)) == []


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks, experts and clones of each; what an expert's row is."""

    num_ranks: int = 3
    etp: int = 1
    num_local: int = 2
    num_clones: int = 2
    shape: tuple[int, ...] = (5, 8)
    dtype: torch.dtype = torch.float32
    set_bytes: int = 1 << 12
    times: int = 2


CASES = {
    "several pieces": Case(shape=(37, 33), times=1),
    "one clone": Case(num_clones=1, dtype=HALF, shape=(3, 40), times=3),
    "fp16, two ranks": Case(num_ranks=2, num_local=3, num_clones=3, dtype=torch.float16),
    "odd words": Case(shape=(7, 1), dtype=HALF),
    "etp": Case(num_ranks=6, etp=2, num_clones=1, times=1),
    "one number": Case(shape=(), num_ranks=4, num_local=1),
}


class World:
    """The ranks of one group, in one memory that is NaN at first, as bytes too."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.layout = CloneLayout(
            num_ranks=case.num_ranks, set_bytes=case.set_bytes, num_programs=2, num_warps=4
        )
        size, flags = self.layout.num_bytes, 2 * case.set_bytes
        self.memory = torch.full((case.num_ranks + 1, size + ALIGNMENT), 255, dtype=torch.uint8)
        self.memory = self.memory.to(device)
        starts = [-(-m.data_ptr() // ALIGNMENT) * ALIGNMENT for m in self.memory[:-1]]
        self.slots = []
        for memory, start in zip(self.memory, starts, strict=False):
            at = start - memory.data_ptr()
            memory[at + flags : at + size] = 0
            self.slots.append(memory[at : at + flags].view(2, case.set_bytes))
        bases = (
            torch.tensor([self.layout.locate_regions(s) for s in starts]).T.contiguous().to(device)
        )
        self.buffers = [
            CloneBuffer(
                layout=self.layout,
                rank=r,
                bases=bases,
                state=torch.zeros(NUM_WORDS, dtype=torch.int32, device=device),
                report=torch.zeros(NUM_WORDS, dtype=torch.int32, device=device),
                timeout_ns=5 * 10**8,
            )
            for r in range(case.num_ranks)
        ]

    def places(self, seed: int) -> ClonePlaces:
        """A plan that leaves some places empty; none has an expert of its own rank."""
        case, generator = self.case, random.Random(seed)
        e, blocks = case.num_local, case.num_ranks // case.etp
        found = []
        for n in range(blocks * case.num_clones):
            others = [x for x in range(blocks * e) if x // e != n // case.num_clones]
            found.append(generator.choice([-1, *others]))
        sizes: Any = dict(num_clones=case.num_clones, num_local=e, etp=case.etp)
        return ClonePlaces(experts_N=ints(found, self.device), **sizes)

    def tensors(self, number: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.case.num_ranks, number, *self.case.shape)
        values = torch.randn(shape, generator=generator)
        return list(values.to(self.device, self.case.dtype))

    def run(self, store, receive, tensors, places) -> None:
        """Run an operation per piece: all ranks store, then all receive."""
        for piece in list(clones.split_into_pieces(self.layout, tensors[0][0], places.num_clones)):
            for function, ranks in ((store, tensors[0]), (receive, tensors[1])):
                for buffer, tensor in zip(self.buffers, ranks, strict=True):
                    function(buffer, tensor, places, piece)

    def fetched(self, rows: list[Tensor], places: ClonePlaces) -> list[Tensor]:
        out = [r.new_empty(places.num_clones, *r.shape[1:]) for r in rows]
        words = [clones._view_as_words(r) for r in rows]
        into = [clones._view_rows(o).view(words[0].dtype) for o in out]
        self.run(clones.store_weights, clones.receive_weights, (words, into), places)
        return out

    def brought_home(self, grads: list[Tensor], places: ClonePlaces) -> list[Tensor]:
        e, flat = places.num_local, [clones._view_rows(g) for g in grads]
        pair = ([f[e:] for f in flat], [f[:e] for f in flat])
        self.run(clones.store_grads, clones.receive_grads, pair, places)
        return [grad[:e] for grad in grads]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clones, "BLOCK_BYTES", 256)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Compare bits: of zeros, the sign too."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def by_block(reference, tensors, places) -> list[Tensor]:
    """Return what each rank gets, of one rank of every block together."""
    found = [reference(tensors[t :: places.etp], places) for t in range(places.etp)]
    return [tensor for of_block in zip(*found, strict=True) for tensor in of_block]


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_references(name: str, device: str) -> None:
    case = CASES[name]
    world, e, c = World(case, device), case.num_local, case.num_clones
    for seed in range(case.times):
        places = world.places(seed)
        rows, grads = world.tensors(e, seed), world.tensors(e + c, seed)
        for grad in grads:
            clones._view_rows(grad)[:, 0] = -0.0  # to which nothing else is added, not even 0
        assert same(world.fetched(rows, places), by_block(fetch_ref, rows, places))
        expected = by_block(bring_home_ref, grads, places)
        for rank, grad in enumerate(grads):  # nobody reads an empty place
            empty = places.experts_N.view(-1, c)[rank // case.etp] < 0
            grad[e:][empty] = NAN
        kept = [grad[e:].clone() for grad in grads]
        assert same(world.brought_home(grads, places), expected)
        assert same([grad[e:] for grad in grads], kept)
    assert not any(b.state[1:].any() or b.report.any() for b in world.buffers)
    assert len({int(b.state[0]) for b in world.buffers}) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_weights_of_any_dtype_travel(dtype: torch.dtype, device: str) -> None:
    world = World(Case(shape=(3, 5)), device)
    places = world.places(1)
    rows = [(t * 50).to(dtype) for t in world.tensors(2, 1)]
    assert same(world.fetched(rows, places), fetch_ref(rows, places))


def test_counts_of_all_ranks_are_clones_of_every_rank(device: str) -> None:
    """A plan in which every rank clones the only expert of each: an all-gather."""
    world = World(Case(num_ranks=3), device)
    places = ClonePlaces(experts_N=ints([0, 1, 2] * 3, device), num_clones=3, num_local=1)
    counts = [torch.arange(4, device=device)[None] + 10 * r for r in range(3)]
    assert all(torch.equal(found, torch.cat(counts)) for found in world.fetched(counts, places))


@pytest.mark.parametrize("shape", [(), (3,), (700, 3)])
def test_a_rank_alone_runs_all_pieces(shape: tuple[int, ...], device: str) -> None:
    """One rank that clones its own second expert: stores and reads follow each other."""
    world = World(Case(num_ranks=1, shape=shape, dtype=HALF), device)
    places = ClonePlaces(experts_N=ints([1, -1], device), num_clones=2, num_local=2)
    grads = world.tensors(4, 0)
    rows, expected = grads[0][:2].clone(), bring_home_ref(grads, places)
    assert same([clones.fetch_clones(world.buffers[0], rows, places)], fetch_ref([rows], places))
    home = clones.add_clone_grads_(world.buffers[0], grads[0], places)
    assert same([home], expected) and home.data_ptr() == grads[0].data_ptr()


def test_slots_take_turns(device: str) -> None:
    world = World(Case(), device)
    places, rows = world.places(0), world.tensors(2, 0)
    used = []
    for _ in range(2):
        world.fetched(rows, places)
        used.append([not all((s[i] == 255).all() for s in world.slots) for i in range(2)])
    assert used == [[True, False], [True, True]]


def test_a_rank_that_does_not_come_is_recorded(device: str) -> None:
    """Ranks 0 and 1 wait for 2: what they fetch is 0, their sums are as before; errors stay."""
    world = World(Case(), device)
    places = ClonePlaces(experts_N=ints([2, 4, 0, 4, -1, -1], device), num_clones=2, num_local=2)
    rows, grads = world.tensors(2, 0), world.tensors(4, 0)
    piece = ClonePiece(40, 0, 40)
    out = [torch.full((2, 40), NAN, device=device) for _ in range(2)]
    for buffer, row in zip(world.buffers[:2], rows, strict=False):
        clones.store_weights(buffer, clones._view_rows(row), places, piece)
    for buffer, o in zip(world.buffers[:2], out, strict=False):
        clones.receive_weights(buffer, o, places, piece)
        assert int(buffer.state[ERROR_WORD]) == int(buffer.report[ERROR_WORD]) == 1 + 2 * 2
        assert not o.any()
    before, flat = grads[0].clone(), clones._view_rows(grads[0])
    clones.store_grads(world.buffers[0], flat[2:], places, piece)
    clones.receive_grads(world.buffers[0], flat[:2], places, piece)
    assert torch.equal(grads[0], before)
    assert int(world.buffers[0].report[ERROR_WORD]) == 1 + 2 * 2, "the first error stays"
    assert int(world.buffers[0].state[0]) == 2 and not world.buffers[2].report.any()


def test_a_late_rank_of_a_sum_is_named_so(device: str) -> None:
    world = World(Case(num_ranks=2), device)
    places, flat = world.places(0), clones._view_rows(world.tensors(4, 0)[0])
    clones.store_grads(world.buffers[0], flat[2:], places, ClonePiece(40, 0, 40))
    clones.receive_grads(world.buffers[0], flat[:2], places, ClonePiece(40, 0, 40))
    assert int(world.buffers[0].report[ERROR_WORD]) == 1 + 1 * 2 + 1


@pytest.mark.gpu
def test_ranks_that_run_at_once_wait_for_each_other() -> None:
    world = World(Case(num_ranks=4, shape=(513, 64), set_bytes=1 << 16), "cuda")
    streams = [torch.cuda.Stream() for _ in world.buffers]
    places = world.places(0)  # compiled now, or the first rank would wait for that of the second
    world.fetched(world.tensors(2, 0), places)
    world.brought_home(world.tensors(4, 0), places)
    for n in range(50):
        places, rows, grads = world.places(n), world.tensors(2, n), world.tensors(4, n)
        right, sums = fetch_ref(rows, places), bring_home_ref(grads, places)
        torch.cuda.synchronize()
        came, home = [], []
        for r, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000 * ((r * 7 + n) % 5))
                came.append(clones.fetch_clones(world.buffers[r], rows[r], places))
                home.append(clones.add_clone_grads_(world.buffers[r], grads[r], places))
        torch.cuda.synchronize()
        assert same(came, right) and same(home, sums), n
        assert not any(b.report.any() for b in world.buffers)
