"""Opens the documents of a corpus, tokenizes them, and reads the steps of packed rows."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from moecore.base.fields import CheckedRecord, Positive, quote
from moecore.packing import (
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    JsonLines,
    MegatronDocuments,
    PackedBatch,
    ScheduledLoader,
)
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.packing.corpus.sources import describe_location
from moecore.recipes.chat import BorderTokens, find_borders
from moecore.recipes.data import BatchShape, StepBatch, Steps, repeat_last_bound, scan_stdlib
from moecore.recipes.files import HUB, format_option, is_dataset, open_dataset, read_text
from moecore.recipes.hf_model import load_tokenizer

BYTES = "bytes"
STDLIB = "python:"  # sources of the Python standard library
HELD_OUT = 20  # one of so many documents
PARTITIONS_PER_ROW = 8  # so many workers of a rank tokenize documents of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions(CheckedRecord):
    """A source of documents: PATH,key=value,... or a table of a TOML file."""

    # A .jsonl file; the prefix of Megatron's .bin and .idx; a .parquet file; a directory of
    # `save_to_disk`; hf:NAME, a data set of the Hugging Face hub or of another directory; python:,
    # the sources of the Python standard library, to try a command; or any other file, which is one
    # document.
    path: str
    weight: Positive = 1.0  # share of the rows, relative to the sum of all weights
    name: str = ""  # in metrics, errors and positions; "" = see `name_sources`
    field: str = "text"  # column of a row, or key of a line, with the text or the token ids
    split: str = "train"  # of a Hugging Face data set
    config: str = ""  # of a Hugging Face data set that has several; "" = its only one
    stream: bool = False  # read hf:NAME without storing it
    skip_invalid: bool = False  # leave out lines that are no objects with the field: bad_lines

    @classmethod
    def from_word(cls, word: str) -> Self:
        """Parse a command-line word such as "code.jsonl,weight=0.3,field=content"."""
        path, *pairs = word.split(",")
        values: dict[str, Any] = {}
        for key, _, text in (pair.partition("=") for pair in pairs):
            values[key] = text
            if key in ("stream", "skip_invalid"):
                values[key] = {"true": True, "false": False}.get(text.lower(), text)
            elif key == "weight":
                with suppress(ValueError):
                    values[key] = float(text)
        return cls.from_table({"path": path, **values})

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> Self:
        """Convert a TOML table; ValueError for an unknown key or without the key "path"."""
        names = [field.name for field in fields(cls)]
        for key in values:
            if key not in names:
                raise ValueError(f"a source must have keys of {', '.join(names)}, not {quote(key)}")
        if not isinstance(values.get("path"), str):
            raise ValueError("a source must have a path, which is a string")
        return cls(**values)


def name_sources(sources: Sequence[SourceOptions]) -> tuple[SourceOptions, ...]:
    """Return copies of the sources, each with a name.

    A source without a name gets the name of its file, without the suffix. If other sources have the
    same name, folders are added in front: a/web.jsonl and b/web.jsonl become "a/web" and "b/web".
    """
    tails = [[source.name] if source.name else _list_path_names(source.path) for source in sources]
    count = Counter(tail for names in tails for tail in set(names))
    unique = (next((tail for tail in names if count[tail] == 1), names[-1]) for names in tails)
    return tuple(replace(source, name=name) for source, name in zip(sources, unique, strict=True))


def _list_path_names(path: str) -> list[str]:
    """Return possible names of a path, shortest first: "b", "a/b" and "a/b.jsonl" for a/b.jsonl."""
    plain = Path(path.removeprefix(HUB))
    parts = (plain.with_suffix("") if plain.suffix in (".jsonl", ".bin", ".idx") else plain).parts
    return [*("/".join(parts[-n:]) for n in range(1, len(parts) + 1)), path]


def open_source(
    options: SourceOptions, tokenizer: "Tokenizer", *, option: str = "--data"
) -> CorpusSource:
    """Open a source of documents that `tokenizer` encodes. ValueErrors name the flag `option`."""
    try:
        documents = _open_documents(options, option)
    except ValueError as error:
        line = str(error)
        raise ValueError(line if line.startswith(option) else f"{option}: {line}") from None
    return CorpusSource(
        name=options.name or options.path,
        documents=documents,
        tokenize=DocumentEncoder(tokenizer, options.field),
        weight=options.weight,
    )


def _open_documents(options: SourceOptions, option: str) -> Any:
    """Return a source's documents (texts, dicts or token ids); errors name the flag `option`."""
    path, name = Path(options.path), format_option(option, options.path)
    if options.skip_invalid and (path.suffix != ".jsonl" or options.path.startswith(HUB)):
        raise ValueError(f"{name} must be a .jsonl file to have broken lines: drop skip_invalid")
    if options.path == STDLIB:
        return [path.read_text(errors="replace") for path in scan_stdlib()]
    if options.stream and not options.path.startswith(HUB):
        raise ValueError(f"{name} must be {HUB}NAME to be streamed: drop stream")
    if is_dataset(options.path):
        selection = {"split": options.split, "config": options.config}
        return open_dataset(options.path, option, **selection, stream=options.stream)
    if path.suffix == ".jsonl":
        return JsonLines(path, options.field, skip_invalid=options.skip_invalid)
    if path.suffix in (".bin", ".idx") and os.path.exists(f"{path.with_suffix('')}.idx"):
        path = path.with_suffix("")
    if os.path.exists(f"{path}.idx"):
        return MegatronDocuments(path)
    if os.path.lexists(path) and not path.is_dir():
        text = read_text(path, option)
        if not text:
            raise ValueError(f"{name} must have text, but it is empty: leave it out")
        return [text]
    raise ValueError(
        f"{name} must be a .jsonl, .parquet or text file, the prefix of a .bin and a .idx, or a "
        f"directory of save_to_disk: others, and data sets of the hub, are {HUB}NAME"
    )


@dataclass(frozen=True)
class DocumentRange:
    """A part of a data set: the documents whose indices in the data set are in `indices`."""

    documents: Any
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.documents[self.indices[index]]

    def location(self, index: int) -> str:
        """Return the text that names a document in errors."""
        return describe_location(self.documents, self.indices[index])

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the data set and the range."""
        return f"{getattr(self.documents, 'fingerprint', '')}{self.indices}"


def split_sources(sources: Sequence[CorpusSource]) -> tuple[list[CorpusSource], list[CorpusSource]]:
    """Return (training, evaluation) sources: the last 5% of a source, >= 1 document, evaluate."""
    parts: tuple[list[CorpusSource], list[CorpusSource]] = ([], [])
    for source in sources:
        number = len(source.documents) if source.is_indexed else 0
        if number < 2:
            raise ValueError(
                f"--data ({source.name}) must have a number of documents >= 2 with --eval-every, "
                "which holds out the last ones: name --validation, or use --eval-every 0"
            )
        border = number - max(1, number // HELD_OUT)
        for part, indices in zip(parts, (range(border), range(border, number)), strict=True):
            part.append(replace(source, documents=DocumentRange(source.documents, indices)))
    return parts


class Tokenizer:
    """The tokenizer of a model directory or hub name; if the name is "bytes", bytes are tokens."""

    def __init__(self, name: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loaders have workers instead
        self.hf: Any = None if name == BYTES else load_tokenizer(name, "--tokenizer")
        self.size = 256 if self.hf is None else len(self.hf)
        self.borders: BorderTokens | None = None
        if self.hf is not None:
            try:
                self.borders = find_borders(self.hf)
            except ValueError as error:
                label = format_option("--tokenizer", name)
                raise ValueError(f"{label} {error}: use another") from None

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        if self.hf is None:
            return bytes(min(i, 255) for i in ids).decode(errors="replace")
        text: str = self.hf.decode(ids)
        return text

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a document, with its begin and end tokens once each."""
        if self.borders is None:
            return list(text.encode())
        ids: list[int] = self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.borders.make_document(ids) if ids else []


@dataclass(frozen=True)
class DocumentEncoder:
    """A callable that tokenizes a document: a text, token ids, or a row with either in `field`."""

    tokenizer: Tokenizer
    field: str

    def __call__(self, document: Any) -> Any:
        """Return the token ids of a document; ValueError for a row without the column."""
        if isinstance(document, Mapping):
            if self.field not in document:
                raise ValueError(
                    f"a row with {quote(list(document))} must have {quote(self.field)}: set field"
                )
            document = document[self.field]
        return self.tokenizer(document) if isinstance(document, str) else document


def make_scheduled_corpus_steps(
    sources: Sequence[CorpusSource], options: CorpusOptions, shape: BatchShape, **arguments: Any
) -> Steps[ScheduledBatch]:
    """Return this data rank's reader for --dynamic-cp, a `ScheduledLoader` with `arguments`."""
    loader = ScheduledLoader(
        sources, options, rows=shape.rows, data_ranks=shape.data_ranks, **arguments
    )
    return Steps(loader, lambda batch: batch)


class CorpusSteps:
    """An endless reader of this data rank's batches, whose rows are packed corpus documents."""

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        shape: BatchShape,
        *,
        data_rank: int,
        workers: int,  # processes that read ahead
    ) -> None:
        self._shape = shape
        partitions = options.partitions or PARTITIONS_PER_ROW * shape.rows
        options = replace(options, partitions=partitions)
        self.sampler = CorpusLoader(
            sources,
            options,
            rows=shape.batch_size,
            data_rank=data_rank,
            data_ranks=shape.data_ranks,
            workers=workers,
        )
        self._num_borders = 1  # borders of a micro-batch so far

    def next_batch(self, num_micro_batches: int | None = None) -> StepBatch:
        """Return the next batch with `num_micro_batches` micro-batches; None = `grad_accum`."""
        count = num_micro_batches or self._shape.grad_accum
        batches: list[PackedBatch] = [next(self.sampler) for _ in range(count)]
        num_borders = max(len(batch["cu_seqlens"]) for batch in batches)
        # Few lengths in a run: what is compiled by shape is compiled seldom.
        self._num_borders = max(self._num_borders, 1 << (num_borders - 1).bit_length())
        return StepBatch(
            tokens_ABT=torch.stack([batch["input_ids"] for batch in batches]),
            labels_ABT=torch.stack([batch["labels"] for batch in batches]),
            padding_ABT=torch.stack([batch["padding_mask"] for batch in batches]),
            cu_seqlens_An=torch.stack(
                [repeat_last_bound(batch["cu_seqlens"], self._num_borders) for batch in batches]
            ),
            num_labels=torch.stack([batch["num_tokens"] for batch in batches]).sum(),
        )
