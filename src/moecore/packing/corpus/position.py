"""The saved position of a loader as JSON, and its checks on resume.

    {"rows": 96, "partitions": 32, "cursors": [[0, [[3, 64, 17, -0.2, 40]]], ...],
     "lengths": {"web": 5000}, "facts": {"number of sources": 1, "name of source 0": "web", ...}}

An entry of "cursors" has a partition's number and the fields of the `Cursor` of each source. The
facts must be equal in the state and in the loader that loads the state.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from moecore.base.fields import Bound, check_value, quote
from moecore.packing.corpus.files import shorten_text
from moecore.packing.corpus.partitions import Cursor
from moecore.packing.corpus.sources import (
    CorpusError,
    CorpusOptions,
    CorpusSource,
    Partitions,
    tokenize_document,
)

SAMPLED = 16  # documents of a source whose tokens are a fact
SAMPLED_TOKENS = 1 << 20  # no further document is tokenized after this number of tokens
ROW_OPTIONS = (
    *("row_tokens", "documents", "window", "multiple"),
    *("seed", "shuffle", "shuffle_buffer"),
)
Cursors = dict[int, list[Cursor]]  # by partition
Number = Annotated[int, Bound(">=", 0), Bound("<", 2**62)]
FIELDS: dict[str, Any] = {
    "rows": Number,
    "partitions": Partitions,
    "cursors": list,
    "lengths": Mapping[str, Annotated[int, Bound(">=", 1), Bound("<", 2**62)] | None],
    "facts": dict,
}


class Position(NamedTuple):
    """The validated position of a loader in its sources, which all data ranks share."""

    rows: int  # rows that the run has received
    partitions: int
    cursors: Cursors
    lengths: dict[str, int | None]  # source name -> documents of an epoch; None = unknown


def collect_facts(sources: Sequence[CorpusSource], options: CorpusOptions) -> dict[str, Any]:
    """Return {name: JSON value} of all options and source properties that decide the rows."""
    facts: dict[str, Any] = {"number of sources": len(sources)}
    facts |= {f"name of source {i}": source.name for i, source in enumerate(sources)}
    facts |= {name: getattr(options, name) for name in ROW_OPTIONS}
    for source in sources:
        is_indexed, name = source.is_indexed, source.name
        # Not `_fingerprint` of Hugging Face data sets: it is random where a `map` cannot be hashed.
        fingerprint = getattr(source.documents, "fingerprint", None)
        facts |= {
            f"number of documents of {name}": len(source.documents) if is_indexed else None,
            f"fingerprint of {name}": None if fingerprint is None else shorten_text(fingerprint),
            f"tokens of sampled documents of {name}": (
                _hash_sampled_tokens(source) if is_indexed else None
            ),
        }
    return facts


def _hash_sampled_tokens(source: CorpusSource) -> str:
    """Return a digest of the tokens of up to 16 evenly spaced documents of an indexed source."""
    digest, count = hashlib.sha256(), 0
    numbers = np.linspace(0, len(source.documents) - 1, SAMPLED).astype(int)
    for number in np.unique(numbers).tolist():
        try:
            ids = tokenize_document(source, source.documents[number], None)
        except Exception:  # the loader raises the error when it reads the document
            digest.update(b"error/")
            continue
        digest.update(f"{len(ids)} {ids.dtype}/".encode() + ids.tobytes())
        count += len(ids)
        if count > SAMPLED_TOKENS:
            break
    return digest.hexdigest()[:16]


def check_equal_facts(facts_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise a CorpusError if options or source properties of ranks differ (`collect_facts`)."""
    for name in facts_of_ranks[0]:
        values = [facts.get(name) for facts in facts_of_ranks]
        for rank, value in enumerate(values):
            if repr(value) != repr(values[0]):
                text = f"{quote(values[0])} on rank 0, {quote(value)} on rank {rank}"
                raise CorpusError(
                    f"{shorten_text(name)} ({text}) must be the same on all data ranks: give every "
                    "rank the same sources, files, tokenizer, options and position"
                )


def check_stream_document_counts(lengths_of_ranks: Sequence[Mapping[str, int | None]]) -> None:
    """Raise CorpusError if a stream's document counts differ on ranks; None = not known yet."""
    firsts: dict[str, tuple[int, int]] = {}  # rank and length by name
    for rank, lengths in enumerate(lengths_of_ranks):
        for name, length in lengths.items():
            if length is None:
                continue
            first, expected_length = firsts.setdefault(name, (rank, length))
            if length != expected_length:
                raise CorpusError(
                    f"{shorten_text(name)} ({expected_length} documents on rank {first}, {length} "
                    f"on rank {rank}) must be the same on all data ranks: give every rank the same "
                    "stream"
                )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of ranks: of each partition, keep the most advanced cursors."""
    furthest: dict[int, list[list[float]]] = {}
    lengths: dict[str, int | None] = {}
    for state in states:
        for partition, cursors in state["cursors"]:
            candidates = furthest.get(partition, cursors), cursors
            furthest[partition] = max(candidates, key=lambda of: sum(cursor[0] for cursor in of))
        lengths |= {name: n for name, n in state["lengths"].items() if n or name not in lengths}
    return {
        **states[0],
        "cursors": [[n, furthest[n]] for n in sorted(furthest)],
        "lengths": lengths,
    }


def parse_state(
    state: Mapping[str, Any], facts: Mapping[str, Any], sources: Sequence[CorpusSource]
) -> Position:
    """Return the position in a `state_dict`; ValueError if it has other facts or sources."""
    try:
        values = json.loads(json.dumps(dict(state), allow_nan=False))  # tuples become lists
    except (TypeError, ValueError, RecursionError):
        values = {}
    if set(values) != set(FIELDS):
        relation = f"must be a state_dict(), JSON with {', '.join(FIELDS)}: pass one"
        raise ValueError(f"state ({quote(state)}) {relation}")
    for name, annotation in FIELDS.items():
        check_value(f"state[{name!r}]", values[name], annotation)
    _check_facts(values["facts"], facts)
    rows, partitions = values["rows"], values["partitions"]
    step = partitions * (facts["window"] if facts["documents"] == "whole" else 1)
    cursors: Cursors = {}
    for entry in values["cursors"]:
        number, of_sources = _parse_cursors(entry, partitions, step, len(sources))
        if number in cursors:
            raise ValueError(f"state['cursors'] (two of partition {number}) {_NO_STATE}")
        cursors[number] = of_sources
    for number in {*range(min(rows, partitions)), *cursors}:
        expected_rows = max(0, -(-(rows - number) // partitions))
        cursor_rows = sum(cursor.rows for cursor in cursors.get(number, []))
        if cursor_rows != expected_rows:
            raise ValueError(
                f"state['cursors'] ({cursor_rows} rows of partition {number}) must have "
                f"{expected_rows}, as of {rows} rows in {partitions} partitions: pass the "
                "state_dict() of all data ranks"
            )
    source_lengths = {s.name: len(s.documents) if s.is_indexed else None for s in sources}
    for name, length in values["lengths"].items():
        if name not in source_lengths or (
            source_lengths[name] is not None and length not in (None, source_lengths[name])
        ):
            raise ValueError(f"state['lengths'] ({quote(values['lengths'])}) {_NO_STATE}")
    return Position(rows, partitions, cursors, values["lengths"])


_NO_STATE = "must be that of a state_dict(): pass one, of all data ranks"


def _check_facts(state_facts: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise a ValueError if a state has other options or source properties than this loader."""
    loader_facts = json.loads(json.dumps(facts))
    for name in [*loader_facts, *(state_facts.keys() - loader_facts.keys())]:
        is_known = name in state_facts and name in loader_facts
        if not is_known or repr(state_facts[name]) != repr(loader_facts[name]):
            raise ValueError(
                f"{shorten_text(name)} of the state ({quote(state_facts.get(name))}) must be "
                f"that of this loader ({quote(loader_facts.get(name))}): make it as it was, with "
                "the same sources, files, tokenizer and options"
            )


def _parse_cursors(
    entry: Any, num_partitions: int, ordinal_step: int, num_sources: int
) -> tuple[int, list[Cursor]]:
    """Return partition and cursors of an entry of state["cursors"]; ValueError if invalid."""
    credit = Annotated[float, Bound(">=", -num_sources - 1), Bound("<=", num_sources + 1)]
    kinds: tuple[Any, ...] = (Number, Number, Number, credit, Number)
    try:
        number, of_sources = entry
        cursors = [Cursor(*cursor) for cursor in of_sources]
        for cursor in cursors:
            for value, kind in zip(cursor, kinds, strict=True):
                check_value("cursor", value, kind)
        check_value("partition", number, Number)
    except (TypeError, ValueError):
        raise ValueError(f"state['cursors'] ({quote(entry)}) {_NO_STATE}") from None
    is_valid = len(cursors) == num_sources and number < num_partitions
    for cursor in cursors:
        is_place = cursor.ordinal >= number and (cursor.ordinal - number) % ordinal_step == 0
        # A source without rows is at its start. A packer compares tokens of other sources only.
        is_start = (cursor.ordinal, cursor.offset, cursor.tokens) == (number, 0, 0)
        is_valid &= is_place and (cursor.rows > 0 or is_start) and cursor.offset <= cursor.tokens
    if not is_valid:
        raise ValueError(f"state['cursors'] ({quote(entry)}) {_NO_STATE}")
    return number, cursors
