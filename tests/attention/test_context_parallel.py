"""Attention over context parallel ranks against one process's `attend`, every way.

Six ranks are spawned once; groups of 2, 3 and 6 of them are cp ranks.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moecore.attention.context_parallel.ring as ring
from moecore.attention.context_parallel import local_tokens as lt
from moecore.attention.function import attend
from moecore.attention.sequence import Sequence
from moecore.base.options.context import ContextOptions
from moecore.base.rank_checks import gather_objects
from moecore.kernels.attention import attention_backward
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks, make_row_cu_seqlens
from tests.attention import linear_cases
from tests.attention.linear_cases import KINDS as LINEAR_KINDS
from tests.attention.sparse_cases import KINDS, sparse_errors
from tests.helpers.ranks import ranks_fixture, run_ranks

SCALE = 0.4
WORKED = torch.tensor([0, 12, 36, 42])  # the documents of `kernels/zigzag.py`
HELD = [
    [0, 1, 10, 11, *range(12, 16), *range(32, 36), 36, 41],
    [2, 3, 8, 9, *range(16, 20), *range(28, 32), 37, 40],
    [*range(4, 8), *range(20, 28), 38, 39],
]
# ranks -> (rows, tokens of a row, documents over all rows)
BATCHES: dict[int, tuple[int, int, list[int]]] = {
    2: (2, 24, [0, 8, 28, 28, 48]),
    3: (1, 42, [0, 12, 36, 42]),
    6: (2, 48, [0, 12, 72, 96, 96]),
}
# name -> (way, query heads, key/value heads, options of attend)
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "allgather": ("allgather", 6, 3, {}),
    "allgather, window": ("allgather", 4, 4, dict(window=5)),
    "allgather, sinks": ("allgather", 4, 2, dict(sinks=True)),
    "allgather, whole keys": ("allgather", 4, 2, dict(whole_keys=True)),
    "a2a": ("a2a", 24, 12, {}),
    "a2a, window, sinks": ("a2a", 12, 12, dict(window=5, sinks=True)),
    "p2p": ("p2p", 6, 3, {}),
    "p2p, sinks": ("p2p", 4, 2, dict(sinks=True)),
    "p2p, window": ("p2p", 4, 2, dict(window=5)),
    "a2a+p2p": ("a2a+p2p", 8, 4, {}),
    "a2a+p2p, sinks": ("a2a+p2p", 4, 2, dict(sinks=True)),
    "a2a+p2p, window, sinks": ("a2a+p2p", 4, 4, dict(window=5, sinks=True)),
}


def heads(B: int, T: int, H: int, h: int, sinks: bool) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and perhaps sinks, and the gradient of o."""
    g = torch.Generator().manual_seed(H)
    shapes = [(B, T, H, 8), (B, T, h, 8), (B, T, h, 6), *([(H,)] if sinks else [])]
    leaves = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    return leaves, torch.randn(B, T, H, 6, generator=g)


def make(way: str, group: dist.ProcessGroup, pairs: dict[str, dist.ProcessGroup]) -> Any:
    if way == "a2a+p2p":
        return lt.ContextParallel(group, pairs["a2a"], pairs["ring"])
    return lt.ContextParallel(
        group, **{"allgather": {}, "a2a": dict(a2a=group)}.get(way, dict(ring=group))
    )


def errors(cp: lt.ContextParallel, name: str, packed: bool) -> list[float]:
    """Return the largest errors of o and every gradient of this rank's tokens."""
    _, H, h, options = CASES[name]
    B, T, _ = BATCHES[cp.size]
    options = dict(options)
    has_sinks, whole = options.pop("sinks", False), options.pop("whole_keys", False)
    leaves, do = heads(B, T, H, h, has_sinks)
    sequence, held = linear_cases.shared_tokens(cp, BATCHES[cp.size], packed)
    sinks = leaves[3] if has_sinks else None
    want = attend(*leaves[:3], sequence, scale=SCALE, sinks_H=sinks, **options)
    wants = torch.autograd.grad(want, leaves, do)
    own = [held.slice_local(x.detach()).requires_grad_() for x in leaves[:3]]
    given = [x if i == 0 or not whole else held.gather(x) for i, x in enumerate(own)]
    over_ranks = replace(sequence, positions_BT=None, local_tokens=held)
    o = attend(*given, over_ranks, scale=SCALE, sinks_H=sinks, **options)
    found = list(torch.autograd.grad(o, [*own, *leaves[3:]], held.slice_local(do)))
    if has_sinks:
        dist.all_reduce(found[3], group=cp.group)
    expected = [held.slice_local(want), *map(held.slice_local, wants[:3]), *wants[3:]]
    return [relative(x, y) for x, y in zip([o, *found], expected, strict=True)]


def half_ratios(cp: lt.ContextParallel, packed: bool, device: torch.device) -> list[float]:
    """Return the error of o and each gradient in bf16 over that of one process in bf16."""
    B, T, _ = linear_cases.HALVES
    g = torch.Generator().manual_seed(1)
    shapes = ((B, T, 8, 64), (B, T, 2, 64), (B, T, 2, 64), (B, T, 8, 64))
    *leaves, do = (torch.randn(s, generator=g).bfloat16().to(device) for s in shapes)
    sequence, held = linear_cases.shared_tokens(cp, linear_cases.HALVES, packed, device)

    def run(own: Any, dtype: torch.dtype, sequence: Sequence) -> list[Tensor]:
        q, k, v = (own(x).to(dtype).requires_grad_() for x in leaves)
        o = attend(q, k, v, sequence, scale=SCALE)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), own(do).to(dtype))]

    return linear_cases.ratios_of_halves(run, sequence, held)


def halves(group: dist.ProcessGroup, device: torch.device) -> dict[Any, list[float]]:
    ways = itertools.product(("allgather", "a2a", "p2p"), (False, True))
    found = {
        ("bf16", way, packed): half_ratios(make(way, group, {}), packed, device)
        for way, packed in ways
    }
    for packed in (False, True):
        found["bf16", "linear", packed] = linear_cases.linear_half_ratios(
            lt.ContextParallel(group), packed, device
        )
    return found


def half_worker(rank: int, device: torch.device) -> dict[Any, list[float]]:
    assert dist.group.WORLD is not None
    return halves(dist.group.WORLD, device)


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def wrong_merge(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> tuple[Tensor, Tensor]:
    return (o + o_new) / 2, torch.logaddexp(lse, lse_new)


def swapped(block: Any) -> Any:
    """Read the late half of keys where the early one is due."""
    return block._replace(keys="late") if block.keys == "early" else block


def worker(rank: int, device: torch.device, names: list[str]) -> dict[Any, Any]:
    groups = {2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2]), 6: dist.new_group()}
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [4, 5])]
    rings = [dist.new_group(ranks) for ranks in ([0, 2, 4], [1, 3, 5])]
    mine = {"a2a": pairs[rank // 2], "ring": rings[rank % 2]}
    results: dict[Any, Any] = {}
    for size, group in groups.items():
        for name in names:
            way, _, h, _ = CASES[name]
            if rank >= size or (way == "a2a+p2p" and size != 6) or (way == "a2a" and h % size):
                continue
            cp = make(way, group, mine)
            for packed in (False, True):
                results[name, size, packed] = errors(cp, name, packed)
        for packed in (False, True) if rank < size else ():
            cp = lt.ContextParallel(group)
            for kind in LINEAR_KINDS:
                found = linear_cases.linear_errors(cp, BATCHES[size], packed, kind)
                results["linear", size, packed, kind] = found
            for kind in KINDS:
                found = sparse_errors(cp, BATCHES[size], packed, kind)
                results["sparse", size, packed, kind] = found
    if rank < 2:
        results |= halves(groups[2], device)
    merged: dict[Any, Any] = {}
    for one in gather_objects(results):
        for key, values in one.items():
            merged[key] = [max(pair) for pair in zip(values, merged.get(key, values), strict=True)]
    return merged


results = ranks_fixture(6, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results: dict[Any, Any], name: str) -> None:
    way = CASES[name][0]
    found = {key: values for key, values in results.items() if key[0] == name}
    assert len(found) == (2 if way == "a2a+p2p" else 6)
    assert not {key: values for key, values in found.items() if not max(values) <= 1e-5}


def test_states_and_tokens_of_linear_attention_go_from_piece_to_piece(results) -> None:
    found = {key: values for key, values in results.items() if key[0] == "linear"}
    assert len(found) == 6 * len(LINEAR_KINDS)
    assert not {key: values for key, values in found.items() if not max(values) <= 1e-6}


def test_queries_of_sparse_attention_read_gathered_keys(results: dict[Any, Any]) -> None:
    found = {key: values for key, values in results.items() if key[0] == "sparse"}
    assert len(found) == 18
    assert not {key: values for key, values in found.items() if not max(values) <= 1e-5}


class Alone:
    """Stands for the group of a ring whose other ranks are not there."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize(("size", "first", "last"), [(3, "a", "cc"), (4, "a", "cc"), (5, "", "c")])
def test_products_follow_each_send_of_a_ring(size, first, last, monkeypatch) -> None:
    events = ""  # s: a send, a: a product with all keys, c: a causal one

    def send(x: Tensor, _: Any) -> Any:
        nonlocal events
        events += "s"
        return ring._RingTransfer(x, x, [])

    def differentiate(*args: Any) -> Any:
        nonlocal events
        events += "c" if args[6].causal else "a"
        return attention_backward(*args)

    monkeypatch.setattr(ring, "_send_to_next", send)
    monkeypatch.setattr(ring, "attention_backward", differentiate)
    leaves, do = heads(1, 4, 2, 1, False)
    o = ring.RingAttention.apply(*leaves, None, lt.ChunkLayout(size, 4 * size), Alone(size), SCALE)
    events = ""
    torch.autograd.grad(o, leaves, do)
    assert events == "s" + first + "sas" * (size - 2) + "as" + last


def check_half(ratios: dict[Any, list[float]]) -> None:
    assert len(ratios) == 8
    assert not {key: values for key, values in ratios.items() if not max(values) <= 2}


def test_bf16_is_at_most_twice_as_wrong_as_one_process(results: dict[Any, Any]) -> None:
    check_half({key: values for key, values in results.items() if key[0] == "bf16"})


@pytest.mark.gpu
@pytest.mark.gpus(2)  # gloo sends nothing from a GPU's memory
def test_bf16_is_at_most_twice_as_wrong_as_one_process_on_gpus() -> None:
    check_half(run_ranks(2, half_worker, device_type="cuda"))


def test_who_holds_what() -> None:
    assert assign_tokens_to_cp_ranks(WORKED, 42, 3).tolist() == HELD
    assert assign_tokens_to_cp_ranks(torch.tensor([0, 4, 4, 8, 8]), 8, 2).tolist() == [
        [0, 3, 4, 7],
        [1, 2, 5, 6],
    ]
    rows, x = lt.ChunkLayout(2, 16), torch.arange(16).view(2, 8)
    assert rows.split_by_rank(x).tolist() == [
        [[0, 1, 6, 7], [8, 9, 14, 15]],
        [[2, 3, 4, 5], [10, 11, 12, 13]],
    ]
    packed = lt.ChunkLayout(2, 16, make_row_cu_seqlens(2, 16, x.device), 8)
    assert torch.equal(packed.split_by_rank(x), rows.split_by_rank(x))
    for layout in (rows, packed):
        assert torch.equal(layout.join_ranks(layout.split_by_rank(x)), x)


@pytest.mark.parametrize(
    ("options", "cp", "heads", "latents", "want"),
    [
        ({}, 4, (32, 32), False, ("a2a", None)),
        ({}, 4, (64, 4), False, ("p2p", None)),  # 24 heads against 51
        ({}, 32, (64, 4), False, ("a2a+p2p", 4)),
        ({}, 6, (4, 4), False, ("a2a+p2p", 2)),
        ({}, 3, (12, 6), False, ("a2a", None)),  # 12 heads against 24
        ({}, 4, (16, 16), True, ("allgather", None)),
        (dict(way="a2a+p2p"), 8, (64, 4), False, ("a2a+p2p", 4)),
        (dict(way="a2a+p2p", a2a_ranks=2), 8, (4, 4), False, ("a2a+p2p", 2)),
        (dict(way="a2a"), 4, (4, 2), False, r"way \('a2a'\) must .* \(2\) that divide by cp \(4\)"),
        (dict(way="a2a+p2p"), 4, (4, 4), False, r"a2a_ranks \(4\) must be more than 1 and less"),
        (dict(way="a2a+p2p", a2a_ranks=3), 4, (6, 6), False, r"ranks \(3\) must divide cp \(4\)"),
        (dict(way="a2a+p2p", a2a_ranks=2), 4, (3, 3), False, r"must divide the key/value heads"),
        (dict(a2a_ranks=2), 4, (4, 4), False, r"a2a_ranks \(2\) must be None with way \('auto'\)"),
    ],
)
def test_which_way(options: Any, cp: int, heads: tuple[int, int], latents: bool, want: Any) -> None:
    def resolve() -> ContextOptions:
        return ContextOptions(**options).resolve(cp, *heads, has_latents=latents)

    if isinstance(want, str):
        with pytest.raises(ValueError, match=want) as info:
            resolve()
        assert "\n" not in str(info.value)
    else:
        found = resolve()
        assert (found.way, found.a2a_ranks) == want


def test_documents_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"document 1 of 6 tokens\) must .* 2 \* cp \(4\): pad"):
        lt.check_document_lengths(torch.tensor([0, 8, 14, 16]), 2)
    lt.check_document_lengths(WORKED, 3)
