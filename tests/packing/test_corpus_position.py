import copy
import json
import math
import os
import signal
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moecore.base.rank_checks import gather_objects
from moecore.packing import (
    CorpusError,
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    JsonLines,
    ScheduledLoader,
)
from moecore.packing.corpus.partitions import Cursor
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks

DOCUMENTS = [[i] * (1 + i % 9) for i in range(30)]


class Stream:
    """Documents that are iterated."""

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        return iter(self.documents)


class Marked(list[Any]):
    """Documents with a fingerprint."""

    def __init__(self, documents: Any, fingerprint: str) -> None:
        super().__init__(documents)
        self.fingerprint = fingerprint


def loader(documents: Any = DOCUMENTS, /, **changes: Any) -> CorpusLoader:
    """One source, or those of a dict by name, in rows of 8 tokens."""
    of_loader = {n: changes.pop(n) for n in ("rows", "data_rank", "data_ranks") if n in changes}
    of_loader["workers"] = changes.pop("workers", 0)
    of_source = {n: changes.pop(n) for n in ("tokenize", "weight") if n in changes}
    documents = documents if isinstance(documents, dict) else {"web": documents}
    sources = [CorpusSource(name=n, documents=d, **of_source) for n, d in documents.items()]
    options: dict[str, Any] = {"row_tokens": 8, "partitions": 4, "window": 3} | changes
    return CorpusLoader(sources, CorpusOptions(**options), **of_loader)


def changed(value: Any, at: Any) -> Iterator[Any]:
    """Yield copies of a state with one value of another kind, left out or added, at each place."""
    path: list[Any] = [None]
    path.append(path)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    wrong = [True, None, -1, 2**62, 10**400, 0.5, math.nan, math.inf, "", "1", [], {}, [[1]]]
    for other in [*wrong, object(), {1}, b"1", np.int64(1), torch.ones(2), deep, path]:
        if type(other) is not type(at) or other != at:
            yield other
    if isinstance(at, dict):
        yield at | {"more": 1}
    for key in at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ():
        rest = copy.copy(at)
        del rest[key]
        yield rest
        for other in changed(value, at[key]):
            replaced = copy.copy(at)
            replaced[key] = other
            yield replaced


@pytest.mark.parametrize(("rule", "kind"), [("split", Stream), ("whole", list)])
def test_what_is_no_state_is_one_line_and_changes_nothing(rule: str, kind: Any) -> None:
    """A credit of another value is a state; an ordinal, a count or a name is not."""
    sources = {"web": kind(DOCUMENTS), "code": DOCUMENTS}
    one = loader(sources, documents=rule)
    for _ in range(9):
        next(one)
    state = one.state_dict()
    number = refused = 0
    for wrong in changed(None, state):
        if not isinstance(wrong, dict):  # refused by its type
            continue
        number += 1
        try:
            loader(sources, documents=rule).load_state_dict(wrong)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500
    assert number > 800 and number - refused < 60, (number, refused)  # credits and stream lengths
    before = one.state_dict()
    with pytest.raises(ValueError, match=r"state\['rows'\] \(-1\) must be a whole number >= 0"):
        one.load_state_dict(state | {"rows": -1})
    assert one.state_dict() == before
    one.load_state_dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize("rule", ["split", "whole"])
@pytest.mark.parametrize(("field", "value"), [("ordinal", 2), ("offset", 200), ("tokens", 200)])
def test_a_source_without_rows_is_at_its_start(rule: str, field: str, value: int) -> None:
    """Else a packer reads on from an offset behind the end of a document."""
    sources = {f"s{i}": [[i + 1] * 50, [i + 2] * 50] for i in (0, 1)}
    how: dict[str, Any] = {"partitions": 1, "shuffle": False, "documents": rule, "window": 2}
    one = loader(sources, **how)
    next(one)
    state, place = one.state_dict(), Cursor._fields.index(field)
    for cursor in state["cursors"][0][1]:
        if not cursor[0]:
            cursor[place] = value
            cursor[4] = max(cursor[2], cursor[4])
    with pytest.raises(ValueError, match=r"^state\['cursors'\] \(.*\) must be that of a state"):
        loader(sources, **how).load_state_dict(state)
    loader(sources, **how).load_state_dict(one.state_dict())


TWO = {"web": DOCUMENTS, "code": DOCUMENTS}


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (DOCUMENTS, DOCUMENTS[:-1], "number of documents of web"),
        (DOCUMENTS, DOCUMENTS[::-1], "tokens of sampled documents of web"),
        ([[1] * 50, [2] * 50], [[1] * 5, [2] * 50], "tokens of sampled documents of web"),
        (Marked(DOCUMENTS, "a"), Marked(DOCUMENTS, "b"), "fingerprint of web"),
        (TWO, {"web": DOCUMENTS}, "number of sources"),
        (TWO, dict(reversed(TWO.items())), "name of source 0"),
    ],
)
@pytest.mark.parametrize("rule", ["split", "whole"])
def test_a_position_in_other_data_is_refused(rule: str, before: Any, after: Any, name: str) -> None:
    one, other = loader(before, documents=rule), loader(after, documents=rule)
    next(one)
    with pytest.raises(ValueError, match=rf"^{name} of the state \(.*\) must be that of this load"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("edit", ["swap", "same length", "longer"])
def test_a_position_in_a_file_that_was_edited_is_refused(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"ids": [i] * 9}) for i in range(10, 90)]
    path.write_text("\n".join(lines))
    one = loader(JsonLines(path), tokenize=lambda line: line["ids"])
    next(one)
    lines[7:9] = {
        "swap": lines[8:6:-1],
        "same length": [lines[7].replace("17", "18"), lines[8]],
        "longer": [lines[7], lines[8].replace("18", "1, 8")],
    }[edit]
    path.write_text("\n".join(lines))
    other = loader(JsonLines(path), tokenize=lambda line: line["ids"])
    with pytest.raises(ValueError, match=r"^fingerprint of web of the state"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("rule", ["split", "whole"])
@pytest.mark.parametrize("first", [[1] * 5, [1] * 90])
def test_a_document_of_another_length_than_it_had_is_one_line(rule: str, first: Any) -> None:
    """Of a stream nothing can be compared before it is read."""
    how: dict[str, Any] = {"documents": rule, "partitions": 1, "window": 1, "shuffle": False}
    one = loader(Stream([[1] * 50, [2] * 50]), **how)
    other = loader(Stream([first, [2] * 50]), **how)
    next(one), next(one)
    other.load_state_dict(one.state_dict())
    with pytest.raises(CorpusError, match=r"^web, document 0: .*tokens\) must have 50, as when"):
        next(other)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rows", "length", "number"), [(8, 3, 10), (14, 9, 10), (14, 12, 10)])
def test_a_stream_of_another_length_is_one_line(shuffle, rows, length, number) -> None:
    how: dict[str, Any] = {"partitions": 2, "shuffle": shuffle, "shuffle_buffer": 3}
    one = loader(Stream([[i] * 8 for i in range(number)]), **how)
    other = loader(Stream([[i] * 8 for i in range(length)]), **how)
    for _ in range(rows):
        next(one)
    other.load_state_dict(one.state_dict())
    with pytest.raises(CorpusError, match=r"the stream \((\d+|more) documents\) must have \d+, as"):
        [next(other) for _ in range(20)]


def test_workers_that_begin_behind_the_end_of_a_short_stream_know_its_length() -> None:
    def ids(workers: int) -> list[list[int]]:
        how: dict[str, Any] = {"partitions": 12, "shuffle": False, "rows": 6, "row_tokens": 1}
        one = loader(Stream([[1], [2], [3]]), workers=workers, **how)
        found = [next(one)["input_ids"].flatten().tolist() for _ in range(12)]
        one.close()
        return found

    assert ids(2) == ids(0)


@pytest.mark.parametrize("rule", ["split", "whole"])
def test_partitions_share_a_document(rule: str) -> None:
    """32 partitions are in one document of a million tokens: one copy, tokenized once."""
    calls, ids = 0, np.arange(1_000_000) % 50_000

    def tokenize(document: Any) -> Any:
        nonlocal calls
        calls += 1
        return ids

    how: dict[str, Any] = dict(rows=4, row_tokens=4096, partitions=32, documents=rule)
    one = loader(["long"], tokenize=tokenize, **how)
    tracemalloc.start()
    for _ in range(8):
        next(one)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert calls == 1 and held < 2 * 2e6 + 3e6, (calls, held)


class Slow:
    """Documents that take time, so that workers are not ahead."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> list[int]:
        time.sleep(0.02)
        return [index] * 8


def test_a_worker_that_is_killed_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    one = loader(Slow(), workers=1)
    next(one)
    handler = signal.getsignal(signal.SIGCHLD)
    state = one.state_dict()
    (worker,) = one._batch_iterator._workers  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(CorpusError, match=r"^a data worker of this rank has ended \(") as error:
        [next(one) for _ in range(9)]
    assert "\n" not in str(error.value) and signal.getsignal(signal.SIGCHLD) == handler
    assert "Traceback" not in capfd.readouterr().err
    one.close()
    other = loader(Slow())
    other.load_state_dict(state)
    straight = loader(Slow())
    next(straight)
    assert torch.equal(next(other)["input_ids"], next(straight)["input_ids"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_workers(number: signal.Signals) -> None:
    """A scheduler or a terminal sends it; the rank saves a checkpoint, for which it reads on."""
    one, straight = loader(Slow(), workers=1), loader(Slow())
    next(one), next(straight)
    (worker,) = one._batch_iterator._workers  # type: ignore[union-attr]
    subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
    for _ in range(9):
        assert torch.equal(next(one)["input_ids"], next(straight)["input_ids"])
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


# What rank 1 of two has otherwise, and the beginning of the error of both.
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"documents": DOCUMENTS[:-1]}, "number of documents of web (30 on rank 0, 29 on"),
    "content": ({"documents": DOCUMENTS[::-1]}, "tokens of sampled documents of web ('"),
    "tokenizer": ({"tokenize": lambda d: [*d, 0]}, "tokens of sampled documents of web ('"),
    "name": ({"documents": {"x": DOCUMENTS}}, "name of source 0 ('web' on rank 0, 'x' on rank 1)"),
    "sources": ({"documents": TWO}, "number of sources (1 on rank 0, 2 on rank 1)"),
    "fingerprint": ({"documents": Marked(DOCUMENTS, "b")}, "fingerprint of web (None on rank 0,"),
    "seed": ({"seed": 1}, "seed (0 on rank 0, 1 on rank 1)"),
    "rule": ({"rule": "whole"}, "documents ('split' on rank 0, 'whole' on rank 1)"),
    "order": ({"shuffle": False}, "shuffle (True on rank 0, False on rank 1)"),
    "row_tokens": ({"row_tokens": 16}, "row_tokens (8 on rank 0, 16 on rank 1)"),
    "partitions": ({"partitions": 8}, "partitions (4 on rank 0, 8 on rank 1)"),
    "rows": ({"rows": 2}, "rows of a batch (1 on rank 0, 2 on rank 1)"),
    "weight": ({"weight": 2.0}, "weight of web (1.0 on rank 0, 2.0 on rank 1)"),
    "data_ranks": ({"data_ranks": 3}, "data_ranks (2 on rank 0, 3 on rank 1)"),
    "data_rank": ({"data_rank": 0}, "data_rank ([0] on all ranks) must also be 1"),
    "position": ({"loaded": True}, "rows before this batch (0 on rank 0, 8 on rank 1)"),
}


def _made(rank: int, changes: dict[str, Any]) -> CorpusLoader:
    changes = dict(changes if rank else {})
    documents, rule = changes.pop("documents", DOCUMENTS), changes.pop("rule", "split")
    is_loaded = changes.pop("loaded", False)
    where = {"data_rank": rank, "data_ranks": 2} | changes | {"documents": rule}
    one = loader(documents, **where)
    if is_loaded:
        alone = loader(rows=2)
        for _ in range(4):
            next(alone)
        one.load_state_dict(alone.state_dict())
    return one


def compared(rank: int, device: torch.device) -> Any:
    """Return by case the errors of both ranks."""
    found = {}
    for name, (changes, _) in OTHERWISE.items():
        one = _made(rank, changes)
        found[name] = [error_of(one.__next__), error_of(one.__next__)]
    ahead = _made(rank, {})
    next(ahead)
    if rank:
        next(ahead)
    found["state_dict"] = [error_of(ahead.state_dict)]
    for name, lengths in {"streams": (3, 4), "equal streams": (3, 3), "ends": (3, 90)}.items():
        stream = Stream([[1] * 50] * lengths[rank])
        streams = loader(stream, partitions=16, data_rank=rank, data_ranks=2)
        for _ in range(60):
            next(streams)
        found[name] = [error_of(streams.state_dict)]
    sources = [CorpusSource(name="web", documents=DOCUMENTS[rank:])]
    options = CorpusOptions(row_tokens=8, partitions=4)
    where = dict(rows=2, max_tokens=8, data_rank=rank, data_ranks=2)
    scheduled = ScheduledLoader(sources, options, **where)
    found["scheduled"] = [error_of(scheduled.__next__)]
    alike = _made(rank, {})
    next(alike), next(alike)
    found["alike"] = [alike.state_dict()]
    return gather_objects(found)


def test_data_ranks_that_differ_are_one_line_on_each() -> None:
    """Also of a rank that asks again, and of ranks that have taken other numbers of batches."""
    first, second = run_ranks(2, compared, over_gloo=True)
    for name, (_, message) in OTHERWISE.items():
        assert first[name] == second[name]
        for error in first[name]:
            assert error.startswith(message) and "\n" not in error, (name, error)
    assert first["state_dict"] == second["state_dict"]
    assert first["state_dict"][0].startswith("rows taken (2 on rank 0, 4 on rank 1) must be the")
    assert first["streams"] == second["streams"]
    assert first["streams"][0].startswith("web (3 documents on rank 0, 4 on rank 1) must be the")
    assert first["equal streams"] == ["no error"]
    assert first["ends"] == ["no error"]  # rank 1 has not read an epoch yet
    assert first["scheduled"] == second["scheduled"]
    assert first["scheduled"][0].startswith("number of documents of web (30 on rank 0, 29 on")
    assert first["alike"] == second["alike"]
    loader().load_state_dict(first["alike"][0])
