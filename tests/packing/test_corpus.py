import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import pytest
import torch

from moecore.packing import CorpusError, CorpusLoader, CorpusOptions, CorpusSource
from moecore.packing.corpus.position import merge_states
from moecore.packing.corpus.sources import EMPTY_IN_TURN, permute_index

BY_HAND = [[1, 2, 3], [4, 5, 6, 7, 8]]


class Again:
    """A stream that can be read again; counts what is read."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.read = documents, 0

    def __iter__(self) -> Iterator[Any]:
        for document in self.documents:
            self.read += 1
            yield document


def corpus(count: int, *, first: int = 0, seed: int = 1) -> list[list[int]]:
    """Documents of 1 to 20 ids, all of which differ."""
    lengths = np.random.default_rng(seed).integers(1, 21, count)
    stops = first + np.cumsum(lengths)
    return [list(range(stop - length, stop)) for stop, length in zip(stops, lengths, strict=True)]


def loaders(sources: Any, *, ranks: int, rows: int = 2, workers: int = 0, **options: Any) -> Any:
    if not isinstance(sources, dict):
        sources = {"all": (sources, 1.0)}
    made = [
        CorpusSource(name=name, documents=documents, weight=weight)
        for name, (documents, weight) in sources.items()
    ]
    how = CorpusOptions(
        **{"row_tokens": 16, "partitions": 12, "shuffle_buffer": 7, "window": 5} | options
    )
    return [
        CorpusLoader(made, how, rows=rows, data_rank=rank, data_ranks=ranks, workers=workers)
        for rank in range(ranks)
    ]


def taken(loaders: Any, batches: int) -> list[list[int]]:
    """The next rows of all ranks in the order of the run, without padding."""
    rows = []
    for _ in range(batches):
        for loader in loaders:
            batch = next(loader)
            for ids, padding in zip(batch["input_ids"], batch["padding_mask"], strict=True):
                rows.append(ids[~padding].tolist())
    return rows


def state_of(loaders: Any) -> Any:
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))


@pytest.mark.parametrize(
    ("rule", "ids", "labels", "borders"),
    [
        ("split", [[1, 2, 3, 4], [5, 6, 7, 8]], [[2, 3, -100, 5], [6, 7, 8, -100]], [0, 3, 4, 8]),
        ("whole", [[1, 2, 3, 8], [4, 5, 6, 7]], [[2, 3, -100, -100], [5, 6, 7, 8]], [0, 3, 4, 8]),
    ],
)
def test_rows_by_hand(rule: str, ids: Any, labels: Any, borders: Any) -> None:
    (loader,) = loaders(
        BY_HAND, ranks=1, row_tokens=4, documents=rule, shuffle=False, partitions=1, window=2
    )
    batch = next(loader)
    assert batch["input_ids"].tolist() == ids and batch["labels"].tolist() == labels
    assert batch["cu_seqlens"].tolist() == borders and batch["max_seqlen"] == 4
    assert not batch["padding_mask"].any()
    assert int(batch["num_tokens"]) == sum(label >= 0 for row in labels for label in row)
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 0]


def test_documents_are_rounded_up_for_the_ranks_that_share_rows() -> None:
    how: dict[str, Any] = dict(row_tokens=8, multiple=4, shuffle=False, partitions=1, rows=1)
    (loader,) = loaders([[1, 2, 3], [4, 5, 6]], ranks=1, **how)
    batch = next(loader)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 6, 0]]
    assert batch["padding_mask"].int().tolist() == [[0, 0, 0, 1] * 2]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("rule", ["split", "whole"])
@pytest.mark.parametrize("kind", [list, Again])
@pytest.mark.parametrize("partitions", [12, 7])
def test_other_ranks_go_on_with_each_token_once(rule: str, kind: Any, partitions: int) -> None:
    """2 ranks, a state, 3 ranks: the rows of one rank alone, through several epochs."""
    documents, how = corpus(60), {"documents": rule, "partitions": partitions}
    wanted = taken(loaders(kind(documents), ranks=1, **how), 60)
    two = loaders(kind(documents), ranks=2, **how)
    found, state = taken(two, 12), state_of(two)
    taken(two, 3)  # what comes after a state does not matter
    three = loaders(kind(documents), ranks=3, **how)
    for loader in three:
        loader.load_state_dict(state)
    assert state_of(three) == state
    found += taken(three, 12)
    assert found == wanted
    # Each partition has every document of its own once before any twice.
    tokens = Counter(token for row in wanted for token in row)
    assert len(tokens) == max(documents[-1]) + 1
    assert max(tokens.values()) - min(tokens.values()) <= 3


def test_an_epoch_of_one_partition_has_each_token_once_and_another_order_than_the_next() -> None:
    documents = corpus(40)
    tokens = sum(map(len, documents))
    (loader,) = loaders(documents, ranks=1, rows=1, partitions=1, row_tokens=1)
    epochs = [[row[0] for row in taken([loader], tokens)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(tokens))
    assert epochs[0] != epochs[1] and loader.get_epochs() == {"all": 1}


class InterruptedAtStart(list[Any]):
    """Documents that a starting worker reads at the moment of a Ctrl-C."""

    def __reduce__(self) -> Any:
        return _interrupt, (list(self),)


def _interrupt(documents: list[Any]) -> list[Any]:
    os.kill(os.getpid(), signal.SIGINT)
    return documents


def test_an_interrupt_does_not_end_a_worker_that_starts() -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)  # as in a rank of a command
    resource_tracker.ensure_running()  # by the launcher; its start would unblock the signals
    try:
        wanted = taken(loaders(corpus(50), ranks=1), 2)
        ahead = loaders(InterruptedAtStart(corpus(50)), ranks=1, workers=1)
        assert taken(ahead, 2) == wanted
        ahead[0].close()
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def test_workers_give_the_rows_of_none_and_their_position_is_what_was_taken() -> None:
    wanted = taken(loaders(corpus(50), ranks=1), 9)
    ahead = loaders(corpus(50), ranks=1, workers=2)
    assert taken(ahead, 4) == wanted[:8]
    state = state_of(ahead)
    ahead[0].close()
    assert state == state_of(ahead)
    assert taken(ahead, 1) == wanted[8:10]  # goes on, with other workers
    ahead[0].close()
    (behind,) = loaders(corpus(50), ranks=1)
    behind.load_state_dict(state)
    assert taken([behind], 5) == wanted[8:]


def test_a_mixture_has_its_shares_in_every_batch_and_partition() -> None:
    weights = {"a": 7.0, "b": 2.0, "c": 1.0}
    sources = {
        name: (corpus(30, first=1000 * i), weight)
        for i, (name, weight) in enumerate(weights.items())
    }
    rows = taken(loaders(sources, ranks=1, rows=12), 60)
    names = np.array([[row[0] // 1000 for row in rows[i : i + 12]] for i in range(0, 720, 12)])
    for i, weight in enumerate(weights.values()):
        share, counts = weight / 10, (names == i).cumsum(axis=0)  # [batches, partitions]
        wanted = share * np.arange(1, 61)[:, None]
        assert np.abs(counts - wanted).max() < 2 and abs(counts[-1].sum() / 720 - share) < 0.01
    assert len({tuple(row) for row in (names == 2).T.tolist()}) > 6  # not all partitions at once


def test_new_weights_count_for_the_rows_to_come() -> None:
    """A source that had a tenth gets half of the next rows, not what it lacks of half of all."""
    documents = {name: corpus(30, first=1000 * i) for i, name in enumerate("ab")}
    (before,) = loaders({"a": (documents["a"], 9.0), "b": (documents["b"], 1.0)}, ranks=1, rows=12)
    taken([before], 30)
    (after,) = loaders({"a": (documents["a"], 2.0), "b": (documents["b"], 2.0)}, ranks=1, rows=12)
    after.load_state_dict(before.state_dict())
    is_b = np.array([row[0] >= 1000 for row in taken([after], 20)]).reshape(20, 12)
    assert np.abs(is_b.cumsum(axis=0) - np.arange(1, 21)[:, None] / 2).max() < 2


def test_a_stream_is_read_once_and_a_resumed_one_from_its_block() -> None:
    stream = Again(corpus(40))
    (loader,) = loaders(stream, ranks=1, rows=4, shuffle=False, partitions=4)
    taken([loader], 4)
    assert stream.read < 40
    state, behind = loader.state_dict(), Again(corpus(40))
    behind.skip = lambda count: islice(corpus(40), count, None)  # type: ignore[attr-defined]
    (resumed,) = loaders(behind, ranks=1, rows=4, shuffle=False, partitions=4)
    resumed.load_state_dict(state)
    assert taken([resumed], 1) == taken([loader], 1) and behind.read == 0


@pytest.mark.parametrize("kind", [list, Again])
@pytest.mark.parametrize(("count", "partitions"), [(4, 4), (4, 8), (6, 4), (5, 3), (3, 12)])
def test_each_partition_reads_all_documents_in_order(kind, count, partitions) -> None:
    documents, L = [[i] for i in range(count)], partitions
    how: dict[str, Any] = dict(ranks=1, rows=L, row_tokens=1, shuffle=False, partitions=L)
    (loader,) = loaders(kind(documents), **how)
    rows = taken([loader], count * count)
    order = [row[0] for row in rows]
    epochs = [order[i : i + count] for i in range(0, len(order), count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert all(b == (a + 1) % count for epoch in epochs for a, b in pairwise(epoch))
    for own in range(L):
        assert set(order[own::L]) == set(range(count))
    (loader,) = loaders(kind(documents), **how)
    taken([loader], count * count // 2)
    (resumed,) = loaders(kind(documents), **how)
    resumed.load_state_dict(loader.state_dict())
    assert taken([resumed], 3) == rows[count * count // 2 * L :][: 3 * L]


def test_a_permutation_has_each_place_once_and_looks_random() -> None:
    for count in (1, 2, 3, 5, 64, 1000):
        assert sorted(permute_index(i, count, 7) for i in range(count)) == list(range(count))
    order = np.array([permute_index(i, 1000, 7) for i in range(1000)])
    assert abs(np.abs(order - np.arange(1000)).mean() - 1000 / 3) < 30
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.1
    orders = {tuple(permute_index(i, 4, key) for i in range(4)) for key in range(500)}
    assert len(orders) == 24


def test_documents_without_tokens_are_passed_over() -> None:
    (loader,) = loaders(
        [[], [1, 2], [], [3, 4]], ranks=1, row_tokens=4, shuffle=False, partitions=1
    )
    assert taken([loader], 1) == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1, 99]], r"^all, document 0: token id \(99\) must be >= 0 and < vocab_size \(50\)"),
        ([[1, -1]], r"token id \(-1\) must be >= 0"),
        ([["a"]], "must be whole numbers in one row: tokenize it"),
        ([[]], f"must have tokens: {EMPTY_IN_TURN + 1} documents in turn have none"),
        (Again([]), "must have at least one document"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_documents_are_one_line(documents: Any, message: str, workers: int) -> None:
    if workers and not isinstance(documents, Again):
        return
    (loader,) = loaders(documents, ranks=1, vocab_size=50, workers=workers)
    with pytest.raises(CorpusError, match=message) as error:
        next(loader)
    assert "\n" not in str(error.value)
    loader.close()


def test_the_generator_of_a_run_is_left_alone() -> None:
    before = torch.get_rng_state()
    for loader in loaders(corpus(5), ranks=1):
        next(loader)
    assert torch.equal(before, torch.get_rng_state())
