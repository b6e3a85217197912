"""Training examples from files and data sets, and the steps that read them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecore.base.progress import track_progress
from moecore.packing import PackedBatchSampler, ScheduledCollator
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes import chat
from moecore.recipes.chat import Example
from moecore.recipes.data import BatchShape, PackedSteps, Steps, make_generator
from moecore.recipes.files import format_option
from moecore.recipes.rows import ColumnNames, DatasetOptions, Row, convert_to_form, read_rows

MAX_PLACES = 5  # of rows that are left out, in the first lines of a run


# Makes `Example`s, `Preference`s or `UnpairedPreference`s of a row.
RowEncoder = Callable[[Row, Any, int, DatasetOptions, ColumnNames], Sequence[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Training examples of files, the number of rows, and counts of cut and skipped rows."""

    examples: list[Any]  # of at most seq_len tokens, each with an answer
    num_rows: int  # with rows that are left out
    num_cut: int  # number of examples that were cut to seq_len tokens
    problems: list[str]  # why rows or examples are left out, with their locations

    @property
    def report(self) -> str:
        """The numbers of rows and tokens as text, and a line for each of the first skipped rows."""
        num_tokens = sum(count_tokens(example) for example in self.examples)
        lines = [f"{self.num_rows} rows, {num_tokens} tokens in {len(self.examples)} examples"]
        lines += [f"left out: {problem}" for problem in self.problems[:MAX_PLACES]]
        if (num_further := len(self.problems) - MAX_PLACES) > 0:
            lines.append(f"left out: {num_further} more")
        return "\n".join(lines)


def count_tokens(example: Any) -> int:
    """Return the number of tokens in all sequences of an example."""
    return sum(len(part.tokens_T) for part in example.parts)


def encode_row(
    row: Row, tokenizer: Any, seq_len: int, options: DatasetOptions, column_names: ColumnNames
) -> list[Example]:
    """Return the examples of one row: a chat, a prompt with its completion, or pieces of a text."""
    record = convert_to_form(row.select_columns(column_names), options.format, row.location)
    return chat.encode_record(record, tokenizer, seq_len=seq_len, location=row.location)


def read_examples(
    files: Sequence[Path],
    tokenizer: Any,
    *,
    seq_len: int,
    option: str = "--data",
    options: DatasetOptions | None = None,
    columns: ColumnNames | None = None,
    encode: RowEncoder = encode_row,
) -> Examples:
    """Return the examples of the files, in order, cut to at most `seq_len` tokens.

    ValueError if no example has an answer, or a row is invalid and `skip_invalid` is not set.
    """
    options, names = options or DatasetOptions(), columns or ColumnNames()
    examples, problems, invalid = list[Any](), list[str](), list[str]()
    num_rows = num_cut = num_empty = 0
    for row in track_progress(read_rows(files, option, options), "tokenizing", unit="rows"):
        num_rows += 1
        try:
            row_examples = encode(row, tokenizer, seq_len, options, names)
        except ValueError as error:
            invalid.append(str(error))
            continue
        for example in row_examples:
            piece = example.cut(seq_len)
            if piece.num_answers:
                examples.append(piece)
                num_cut += count_tokens(example) > count_tokens(piece)
            else:
                problems.append(f"{row.location} has no answer among the first {seq_len} tokens")
                num_empty += 1
    if invalid and not options.skip_invalid:
        raise ValueError(
            f"{invalid[0]} (broken rows: {len(invalid)} of {num_rows}): mend them, or leave them "
            "out with --dataset-skip-invalid"
        )
    name = format_option(option, " ".join(map(str, files)))
    if not num_rows:
        raise ValueError(f"{name} must have a row, but is empty: name another file")
    if not examples:
        raise ValueError(
            f"{name} must have a token to learn: none of its {num_empty} example(s) has an answer "
            f"among the first --seq-len ({seq_len}) tokens: raise --seq-len, or look at the roles"
        )
    return Examples(
        examples=examples, num_rows=num_rows, num_cut=num_cut, problems=invalid + problems
    )


IGNORED = -100  # label of a token that is not learned


def make_packed_steps(
    examples: Sequence[Example], shape: BatchShape, *, seed: int | None, data_rank: int, packs: bool
) -> PackedSteps:
    """Return this data rank's reader of packed batches; arguments as of `PackedSteps`."""
    documents, lengths = _make_documents(examples)
    return PackedSteps(documents, lengths, shape, seed=seed, data_rank=data_rank, packs=packs)


def make_scheduled_steps(
    examples: Sequence[Example], shape: BatchShape, *, seed: int | None, collator: ScheduledCollator
) -> Steps[ScheduledBatch]:
    """Return an endless reader of batches for --dynamic-cp; `seed` None = no shuffle.

    Every data rank samples the same examples, and `collator` returns this rank's batch of them.
    """
    documents, lengths = _make_documents(examples)
    sampler = PackedBatchSampler(
        lengths, shape.seq_len, rows=shape.rows, seed=seed or 0, shuffle=seed is not None
    )
    return Steps(sampler, lambda numbers: collator([documents[number] for number in numbers]))


def _make_documents(examples: Sequence[Example]) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return `input_ids` and `labels` (-100 = not learned) of each example, and their lengths."""
    documents = []
    for example in examples:
        ids_T = example.tokens_T.long()
        labels_T = ids_T.where(example.is_answer_T, IGNORED)
        documents.append({"input_ids": ids_T, "labels": labels_T})
    return documents, [len(example.tokens_T) for example in examples]


def split_examples(examples: list[Any], *, share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Return (training, evaluation) examples; a random `share`, at least one, is for evaluation."""
    order = torch.randperm(
        len(examples), generator=make_generator(f"{seed}/held out"), device="cpu"
    ).tolist()
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    evaluated, trained = sorted(order[:count]), sorted(order[count:])
    return [examples[i] for i in trained], [examples[i] for i in evaluated]


def compute_examples_digest(examples: Sequence[Any]) -> str:
    """Return 12 hex digits of the SHA-256 of tokens, answer masks and labels, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for part in example.parts:
            digest.update(len(part.tokens_T).to_bytes(8, "little"))
            digest.update(part.tokens_T.numpy().data)
            digest.update(part.is_answer_T.numpy().data)
        digest.update(bytes([example.is_desirable]) if hasattr(example, "is_desirable") else b"")
    return digest.hexdigest()[:12]
