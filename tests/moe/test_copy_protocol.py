"""Copies without barriers: no order of layers writes to a slot that somebody has yet to read.

Layers, dispatcher, rules and autograd are the real ones and play one rank without a GPU; instead of
what kernels and copies do it is noted which stream would do it. All ranks' streams together are a
graph: each stream in order, streams that wait for others, and flags from rank to rank. In it, for
every place in memory, writes must be ordered, and each read must lie between the write that it
means and the next one. What holds there holds however fast or slow anybody is.

The table of the slot's states (`kernels/exchange/copies.py`) is its own model: everything that it
allows is run, and whatever it would allow besides is found to be wrong.

A place is what one rank writes on another one: its part of a slot, or a flag. An operation's
programs push and receive at once, so it is several nodes between a begin and an end.
"""

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecore import MoEConfig, MoELayer, NVLinkOptions
from moecore.kernels.exchange import operations as exchange
from moecore.kernels.exchange.buffer import NUM_WORDS, ExchangeLayout
from moecore.kernels.exchange.copies import TRANSITIONS, SlotEvent, SlotState
from moecore.kernels.exchange.operations import DispatchedRows
from moecore.moe.dispatch import exchange as moves
from moecore.moe.dispatch.exchange import Exchange
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.experts import Experts

RANKS, TOKENS, DIM, LOCAL = 3, 4, 8, 2  # LOCAL experts of each rank
Step = tuple[Any, ...]  # (stream, what, ...)


class Device:
    """Notes in `log` what each stream would do, in place of `torch.cuda`'s streams."""

    def __init__(self) -> None:
        self.log: list[Step] = []
        self.numbers = itertools.count()
        self.streams = [self.make_stream(None)]

    def note(self, *what: Any) -> None:
        self.log.append((self.streams[-1].number, *what))

    def make_stream(self, _: Any) -> Any:
        made = SimpleNamespace(number=next(self.numbers))
        made.wait_stream = lambda other: self.log.append((made.number, "wait", other.number))
        return made

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    @contextmanager
    def graph(self, log: list[Step]) -> Iterator[None]:
        self.log, before = log, self.log
        yield
        self.log = before

    @contextmanager
    def runs(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for function in (dispatch_rows_and_choices, dispatch_rows, combine_rows):
                patch.setattr(exchange, function.__name__, function)
            patch.setattr(moves, "create_stream", self.make_stream)
            patch.setattr(moves, "get_current_stream", lambda _: self.streams[-1])
            patch.setattr(moves, "use_stream", self.stream)
            yield


@dataclass
class Target:
    """What copy engines write on a peer."""

    buffer: Any
    peer: int

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        self.buffer.note("copy", (self.peer - self.buffer.rank) % RANKS, self.buffer.memory)


class NotedExchange(Exchange):
    """The real one; it tells when what is copied was made, and when it is freed."""

    def start_copies(self, sums_SD: Any) -> None:
        device = self.buffer.device
        self.buffer.memory = number = next(device.numbers)
        setattr(sums_SD, self.buffer.name, number)
        device.note("made", number)
        weakref.finalize(sums_SD, lambda: device.log.append((0, "freed", number))).atexit = False
        super().start_copies(sums_SD)


class NotedExchangePool(ExchangePool):
    def __init__(self, rank: int, device: Device, options: NVLinkOptions) -> None:
        super().__init__(None, ep=RANKS, options=options)  # type: ignore[arg-type]
        self.rank, self.device, self.watch = rank, device, "skips"

    def _make_exchange(self, x_TD: Tensor, top_k: int) -> Exchange:
        sizes: dict[str, Any] = dict(num_ranks=RANKS, max_tokens=TOKENS, top_k=top_k)
        programs: Any = dict(num_push=1, num_receive=1, sums_slot=True)
        layout = ExchangeLayout(row_bytes=DIM * x_TD.itemsize, **sizes, **programs)
        words, number = torch.zeros(NUM_WORDS, dtype=torch.int32), len(self._entries)
        buffer: Any = SimpleNamespace(layout=layout, rank=self.rank, state=words, report=words)
        buffer.device, buffer.name = self.device, f"memory_of_{number}"
        buffer.note = lambda what, *more: self.device.note(what, number, *more)
        buffer.sums_slots = [Target(buffer, peer) for peer in range(RANKS)]
        balanced = layout.source_rows * top_k // RANKS
        return NotedExchange(buffer, self.group, self.options, balanced_rows=balanced)


def dispatch_rows_and_choices(buffer, x_TD, ids_TK, *_, **__) -> DispatchedRows:
    buffer.note("operation", None)
    rows_S = torch.arange(buffer.layout.source_rows, dtype=torch.int32)
    ids_SK = torch.full((rows_S.shape[0], ids_TK.shape[1]), -1, dtype=torch.int32)
    if buffer.rank < RANKS - 1:  # nobody chooses the last rank's experts
        ids_SK[:, 0] = buffer.rank * LOCAL + rows_S % LOCAL
    rows_SD = x_TD.new_ones(rows_S.shape[0], DIM)
    peers_T = torch.ones(x_TD.shape[0], dtype=torch.int64)
    return DispatchedRows(rows_SD, ids_SK, torch.ones(ids_SK.shape), peers_T, rows_S)


def dispatch_rows(buffer: Any, x_TD: Tensor, _: Any, __: Any, ___: Any, num_rows: int) -> Tensor:
    buffer.note("operation", None)
    return x_TD.new_ones(num_rows, DIM)


def combine_rows(buffer: Any, y_RD: Any, peers_T: Tensor, *_: Any, has_sums: bool = False) -> Any:
    buffer.note("operation", getattr(y_RD, buffer.name) if has_sums else None)
    return y_RD.new_ones(peers_T.shape[0], DIM), y_RD.new_ones(
        peers_T.shape[0], buffer.layout.top_k
    )


@dataclass(frozen=True)
class Model:
    """Layers, one after the other or side by side.

    A layer is some words: "copied" (sums go home by copies), "sequential" (experts that add their
    rows, so none are copied), "other" (another exchange), "again" (recomputed).
    """

    layers: tuple[str, ...] = ("copied",)
    parallel: bool = False
    frozen: bool = False  # no gradients of tokens and routers
    frozen_w1: bool = False
    keep_rows: bool = True
    exact_rows: bool = False


def make_layer(words: list[str], model: Model, exchanges: NotedExchangePool) -> MoELayer:
    sizes: dict[str, Any] = dict(dim=DIM, hidden_dim=8, top_k=1 if "other" in words else 2)
    layer: Any = MoELayer(MoEConfig(num_experts=LOCAL * RANKS, **sizes))
    backend: Any = "sequential" if "sequential" in words else "torch"
    layer.experts = Experts(MoEConfig(num_experts=LOCAL, **sizes), backend=backend)
    for p in layer.parameters():
        torch.nn.init.ones_(p)
    layer.router.weight.requires_grad_(not model.frozen)
    layer.experts.w1.requires_grad_(not model.frozen_w1)
    place: Any = SimpleNamespace(
        num_physical=LOCAL,
        first_physical=exchanges.rank * LOCAL,
        etp=1,
        group=None,
        layer=(0, "moe"),
    )
    place.compute_balanced_tokens = lambda num_tokens, top_k: num_tokens
    layer.dispatcher = NVLinkDispatcher(place, exchanges)
    if "again" in words:
        how = dict(use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(checkpoint, layer.forward, **how)
    return layer


class Program:
    """What one rank runs: micro-batches, kept until their backward, and graphs."""

    def __init__(self, model: Model, rank: int, device: Device) -> None:
        room: Any = dict(row_factor="exact") if model.exact_rows else dict(row_factor=3.0)
        options = NVLinkOptions(max_tokens=TOKENS, keep_rows=model.keep_rows, **room)
        exchanges = NotedExchangePool(rank, device, options)
        self.model, self.rank, self.device = model, rank, device
        self.layers: Any = [make_layer(kind.split(), model, exchanges) for kind in model.layers]
        self.outputs: list[Tensor] = []
        self.graphs: list[list[Step]] = []

    def tokens(self) -> Tensor:
        count = 0 if self.rank == 1 else TOKENS
        return torch.ones(count, DIM, requires_grad=not self.model.frozen)

    def forward(self) -> None:
        x_TD, ys = self.tokens(), []
        for layer in self.layers:
            ys.append(layer(x_TD))
            x_TD = x_TD if self.model.parallel else ys[-1]
        self.outputs.append(sum(ys))  # type: ignore[arg-type]

    def verbs(self, order: str) -> None:
        """Run the verbs of layers side by side in another order: a number is a layer's next one."""

        def verbs_of(layer: Any) -> Iterator[Callable[[Any], Any]]:
            yield lambda x_TD: layer.dispatcher.dispatch(x_TD, layer.router(x_TD))
            yield lambda inp: (layer.experts(inp), inp.plan)
            yield lambda made: layer.dispatcher.combine(*made)

        made: list[Any] = [self.tokens() for _ in self.layers]
        verbs = [verbs_of(layer) for layer in self.layers]
        for i in map(int, order):
            made[i] = next(verbs[i])(made[i])
        self.outputs.append(sum(made))  # type: ignore[arg-type]

    def backward(self, which: int = -1) -> None:
        if self.outputs:
            self.outputs.pop(which).sum().backward()

    def backward_of_first(self) -> None:
        self.backward(0)

    def weights_alone(self) -> None:
        torch.autograd.grad(self.outputs.pop().sum(), self.layers[0].experts.w1)

    def no_backward(self) -> None:
        self.outputs.clear()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()
        self.outputs.pop()

    def step(self) -> None:
        self.forward()
        self.backward()

    def capture_step(self) -> None:
        self.graphs.append([])
        with self.device.graph(self.graphs[-1]):
            self.step()

    def capture_backward(self) -> None:
        self.graphs.append([])
        with self.device.graph(self.graphs[-1]):
            self.backward()

    def replay(self) -> None:
        if self.graphs:
            self.device.note("replay", self.graphs[-1])


def run(model: Model, plan: str, rank: int = 0) -> list[Step]:
    """Return what a rank's device would do; rank 1 has no tokens, the last one no expert rows.

    `plan` names methods of `Program`; digits are an order for `verbs`.
    """
    device = Device()
    with device.runs():
        program = Program(model, rank, device)
        for name in plan.split():
            program.verbs(name) if name.isdigit() else getattr(program, name)()
        return list(device.log)


class Graph:
    """Numbered nodes of all ranks: what comes before each, and which places it writes and reads."""

    def __init__(self, log: list[Step], slots: int = 2) -> None:
        self.slots = slots
        self.before: list[list[int]] = []
        self.raised: dict[Any, int] = {}  # flags, by which node
        self.awaited: list[tuple[int, Any]] = []
        self.writes: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        self.reads: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        for self.rank in range(RANKS):
            self.last: dict[Any, int] = {}  # node of each stream
            self.count: Counter[Any] = Counter()
            for self.stream, what, *more in flat(log):
                getattr(self, f"_{what}")(*more)

    def _node(self, *before: int, reads: Any = (), writes: Any = (), flags: Any = ()) -> int:
        """Add a node that reads and writes places, each with what is meant, and waits for flags."""
        node = len(self.before)
        self.before.append(list(before))
        for found, places in ((self.reads, reads), (self.writes, writes)):
            for place, meaning in places:
                found[place].append((node, meaning))
        self.awaited += [(node, flag) for flag in flags]
        return node

    def _next(self, *before: int, **does: Any) -> int:
        """Add the stream's next node."""
        last = [self.last[self.stream]] if self.stream in self.last else []
        self.last[self.stream] = self._node(*last, *before, **does)
        return self.last[self.stream]

    def _wait(self, other: Any) -> None:
        self._next(*[self.last[other]] if other in self.last else [])

    def _made(self, memory: Any) -> None:
        self._next(writes=[(("memory", self.rank, memory), "made")])

    def _freed(self, memory: Any) -> None:
        self._next(writes=[(("memory", self.rank, memory), "freed")])

    def _operation(self, of: int, copied: Any) -> None:
        n, me, begin = self.count["operation", of], self.rank, self._next()
        self.count["operation", of] += 1
        slot = ("slot", of, n % self.slots)
        ends = [self._node(begin, writes=[((*slot, to, me), n) for to in range(RANKS)])]
        self.raised["operation", of, me, n] = ends[0]
        for source in range(RANKS):
            reads = [((*slot, me, source), n)]
            if copied is not None:
                reads.append((("sums", of, me, source), copied))
            flags = [("operation", of, source, n)]
            ends.append(self._node(begin, reads=reads, flags=flags))
        self._next(*ends)

    def _copy(self, of: int, distance: int, memory: Any) -> None:
        to = ("sums", of, (self.rank + distance) % RANKS, self.rank)
        self._next(reads=[(("memory", self.rank, memory), "made")], writes=[(to, memory)])

    def problems(self) -> list[str]:
        """Return what may go wrong; nothing can if this is empty."""
        for node, flag in self.awaited:
            if flag not in self.raised:
                return [f"nobody raises {flag}"]
            self.before[node].append(self.raised[flag])
        earlier = ancestors(self.before)
        if earlier is None:
            return ["ranks wait for each other"]
        found = [f"{place}: never written" for place in self.reads if place not in self.writes]
        for place, writes in self.writes.items():
            writes.sort(key=lambda write: earlier[write[0]].bit_count())
            found += [f"{place}: {p}" for p in misread(writes, self.reads[place], earlier)]
        return found


def misread(writes, reads, earlier) -> Iterator[str]:
    """Yield what may go wrong at a place whose writes are sorted."""
    after = {a: b for (a, _), (b, _) in itertools.pairwise(writes)}
    written = {meaning: node for node, meaning in writes}
    for a, b in after.items():
        if not earlier[b] >> a & 1:
            yield "written at once"
    for node, meaning in reads:
        source = written.get(meaning)
        if source is None or not earlier[node] >> source & 1:
            yield f"{meaning} is read before it is written"
        elif source in after and not earlier[after[source]] >> node & 1:
            yield f"{meaning} is written over before it is read"


def flat(log: list[Step]) -> Iterator[Step]:
    """Yield the steps and those of replayed graphs, which have streams and memory of their own."""
    replays = itertools.count()
    for stream, what, *more in log:
        if what != "replay":
            yield stream, what, *more
            continue
        replay = next(replays)
        own = {s: (s, replay) for s, *_ in more[0] if s != stream}
        yield from ((name, "wait", stream) for name in own.values())
        for at, kind, *rest, last in more[0]:
            if kind == "wait":
                last = own.get(last, last)
            elif last is not None:
                last = (last, replay)
            yield own.get(at, at), kind, *rest, last
        yield from ((stream, "wait", name) for name in own.values())


def ancestors(before: list[list[int]]) -> list[int] | None:
    """Return which nodes come before each, as bits; None where some wait for each other."""
    after, missing = defaultdict(list), [len(nodes) for nodes in before]
    for node, nodes in enumerate(before):
        for b in nodes:
            after[b].append(node)
    found = [0] * len(before)
    ready = [node for node, count in enumerate(missing) if not count]
    for node in ready:  # which grows
        for a in after[node]:
            found[a] |= found[node] | 1 << node
            missing[a] -= 1
            if not missing[a]:
                ready.append(a)
    return found if len(ready) == len(before) else None


def check(model: Model, plan: str) -> list[Step]:
    """Run it on all ranks; return what each of them does."""
    logs = [run(model, plan, rank) for rank in range(RANKS)]
    same = [[s for s in flat(log) if s[1] != "freed"] for log in logs]
    assert same[0] == same[1] == same[2], "ranks do different things"
    assert not (problems := Graph(logs[0]).problems()), problems
    return logs[0]


COPIED, OTHER, SEQUENTIAL, AGAIN = "copied", "copied other", "sequential", "copied again"
TWO = Model((COPIED, COPIED))
METHODS = ["forward", "backward", "backward_of_first", "no_backward", "evaluate", "replay"]


@st.composite
def cases(draw: Any) -> tuple[Model, str]:
    """Draw layers and what is done with them."""
    frozen, graphs = draw(st.sampled_from([(False, False), (False, True), (True, False)]))
    kinds = [COPIED, SEQUENTIAL, OTHER] + [AGAIN] * (not frozen and not graphs)
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    keep_rows = SEQUENTIAL in layers or draw(st.booleans())
    names = st.sampled_from(METHODS + ["capture_step", "capture_backward"] * graphs)
    plan = ["step", *draw(st.lists(names, min_size=2, max_size=10))]
    return Model(tuple(layers), draw(st.booleans()), frozen, keep_rows=keep_rows), " ".join(plan)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(cases())
def test_any_order_of_micro_batches_and_graphs_is_safe(case: tuple[Model, str]) -> None:
    check(*case)


@pytest.mark.parametrize("kinds", [(COPIED, COPIED), (COPIED, SEQUENTIAL), (COPIED, OTHER)])
def test_any_order_of_the_verbs_of_two_layers_is_safe(kinds: tuple[str, ...]) -> None:
    for order in sorted({"".join(p) for p in itertools.permutations("000111")}):
        check(Model(kinds), f"{order} backward step")


def test_sums_are_copied_once_in_a_step() -> None:
    log = check(Model(), "step")
    count = Counter(what for _, what, *more in log)
    assert count == dict(operation=4, wait=2, made=1, freed=1, copy=RANKS)


def test_one_slot_of_operations_is_too_few() -> None:
    log = check(Model((SEQUENTIAL,)), "step")
    assert any(problem.startswith("('slot'") for problem in Graph(log, slots=1).problems())


def stream_at_once(self: Any, x: Tensor) -> Any:
    self._stream = self._stream or moves.create_stream(x.device)
    return self._stream


@pytest.mark.parametrize(
    ("name", "weaker"),
    [("_wait_for_stream", lambda self, x: None), ("_get_ordered_copy_stream", stream_at_once)],
)
def test_streams_that_do_not_wait_are_found(name, weaker, monkeypatch) -> None:
    monkeypatch.setattr(Exchange, name, weaker)
    assert Graph(run(TWO, "step")).problems()


Table = dict[SlotState, dict[SlotEvent, SlotState]]
EVENTS = 8  # that a rank runs, one after the other
BORDERS = {"begin", "end", "replay"}  # of the one graph that is captured


def logs(table: Table, length: int, *, behind_operation: bool = True) -> Iterator[list[Step]]:
    """Yield all that a rank can run by a table of the slot, in `length` events and `BORDERS`.

    `behind_operation` = copies follow an operation with no border between them.
    """

    def steps_of(event: SlotEvent, memory: int) -> list[Step]:
        if event is SlotEvent.OPERATION:
            return [(0, "operation", 0, None)]
        if event is SlotEvent.READ:
            return [(0, "wait", 1), (0, "operation", 0, memory)]
        copies = [(1, "copy", 0, i % RANKS, memory) for i in range(1, RANKS + 1)]
        return [(0, "made", memory), (1, "wait", 0), *copies]

    def extend(names, log, graph, state) -> Iterator[list[Step]]:
        if len(names) == length:
            yield log
            return
        borders = [name for name in names if name in BORDERS]
        is_open, since = borders == ["begin"], len(names)
        while since and names[since - 1] not in BORDERS:
            since -= 1
        copied, read = names.count("COPY"), names.count("READ")
        for event, then in table[state].items():
            if event is SlotEvent.READ and copied == read:
                continue
            if event is SlotEvent.COPY and behind_operation and "OPERATION" not in names[since:]:
                continue
            more = steps_of(event, read if event is SlotEvent.READ else copied)
            logs = (log, graph + more) if is_open else (log + more, graph)
            yield from extend([*names, event.name], *logs, then)
        if copied > read:  # a graph holds copies together with their read
            return
        if not borders:
            yield from extend([*names, "begin"], log, graph, state)
        elif is_open:
            yield from extend([*names, "end"], log, graph, state)
        elif graph:
            yield from extend([*names, "replay"], [*log, (0, "replay", graph)], graph, state)

    return extend([], [], [], SlotState.FREE)


def is_safe(table: Table, length: int, **assumed: bool) -> bool:
    return not any(Graph(log).problems() for log in logs(table, length, **assumed))


def test_all_that_the_table_allows_is_safe() -> None:
    assert is_safe(TRANSITIONS, EVENTS)


def test_copies_that_no_operation_precedes_are_not_safe() -> None:
    """They may then follow a replayed read, of which the state of the slot does not know."""
    assert not is_safe(TRANSITIONS, EVENTS, behind_operation=False)


@pytest.mark.parametrize(
    ("state", "event", "then"),
    [
        (SlotState.COPYING, SlotEvent.COPY, SlotState.COPYING),
        (SlotState.READ, SlotEvent.COPY, SlotState.COPYING),
        (SlotState.COPYING, SlotEvent.OPERATION, SlotState.FREE),
        (SlotState.COPYING, SlotEvent.READ, SlotState.FREE),
    ],
    ids=lambda e: e.name,
)
def test_a_table_that_allows_more_is_not_safe(state, event, then) -> None:
    assert TRANSITIONS[state].get(event) is not then
    assert not is_safe(TRANSITIONS | {state: TRANSITIONS[state] | {event: then}}, 5)


# What was wrong once.
REPAIRED: dict[str, tuple[Model, str]] = {
    # Without expert rows H has no element, as if it was not kept: that rank had rows sent again.
    "no rows, w1 frozen": (Model(frozen_w1=True, keep_rows=False, exact_rows=True), "step"),
    # A graph ended with a slot that the rules of what runs eagerly do not know.
    "eager around a graph": (Model(frozen=True), "step capture_step forward replay backward"),
    # Nobody ended what was begun: nothing was copied any more, and memory was freed too early.
    "weights' gradients alone": (Model(), "forward weights_alone step"),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_repaired(name: str) -> None:
    check(*REPAIRED[name])
