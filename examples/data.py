"""Text as bytes, and which of them a step reads: a pure function of seed, step and data rank.

Legend: N bytes of the corpus, B sequences of one micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
VOCAB_SIZE = 256
HELD_OUT = 20  # one part of so many of the text


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What one optimizer step reads, over all data ranks.

    Attributes:
        data_ranks: ranks with different data.
        grad_accum: micro-batches per step.
        batch_size: sequences per data rank and micro-batch.
        seq_len: tokens of a sequence.
    """

    data_ranks: int
    grad_accum: int
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.data_ranks * self.grad_accum * self.batch_size * self.seq_len


def read_corpus(files: list[Path], *, seq_len: int) -> Tensor:
    """Return the corpus, uint8 [N]: the files, or without any the Python standard library.

    Raises:
        ValueError: for a file that cannot be read, or too little text for one sequence.
    """
    text = b"\n".join(_read(path) for path in files or standard_library())
    if len(text) <= seq_len:
        raise ValueError(f"--data ({len(text)} bytes) must be longer than --seq-len ({seq_len})")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def hold_out(corpus_N: Tensor, *, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the text to train on, and its end, a twentieth, to evaluate on.

    Raises:
        ValueError: for too little text for one sequence of each.
    """
    size = max(corpus_N.numel() // HELD_OUT, seq_len + 1)
    if corpus_N.numel() - size <= seq_len:
        raise ValueError(
            f"--data ({corpus_N.numel()} bytes) must be longer than two of --seq-len ({seq_len}) "
            "with --eval-every, which holds its end out: use more text, or --eval-every 0"
        )
    return corpus_N[:-size], corpus_N[-size:]


def standard_library() -> list[Path]:
    """Return the sources that every Python brings along, without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p.relative_to(root) for p in root.rglob("*.py")]
    return [root / p for p in sorted(files) if not SKIPPED_FOLDERS & set(p.parts)]


def read_batches(
    corpus_N: Tensor, shape: BatchShape, *, seed: int, step: int | Literal["eval"], data_rank: int
) -> list[tuple[Tensor, Tensor]]:
    """Return one (tokens_BT, labels_BT) per micro-batch, int64 on the CPU.

    All sequences of a step are drawn together and dealt out, so that the same global batch is read
    however many data ranks share it. Nothing is kept between steps: the data position is the step.
    """
    generator = generator_of(f"{seed}/{step}")
    num = shape.grad_accum * shape.data_ranks * shape.batch_size
    starts = torch.randint(corpus_N.numel() - shape.seq_len, (num,), generator=generator)
    mine = starts.view(shape.grad_accum, shape.data_ranks, shape.batch_size)[:, data_rank]
    batches = []
    for starts_B in mine:
        rows_BT = corpus_N[starts_B[:, None] + torch.arange(shape.seq_len + 1)].long()
        batches.append((rows_BT[:, :-1], rows_BT[:, 1:]))
    return batches


def random_batches(
    vocab_size: int, shape: BatchShape, *, seed: int, step: int, data_rank: int
) -> list[tuple[Tensor, Tensor]]:
    """Return what `read_batches` does, of uniformly random tokens: for measuring speed."""
    generator = generator_of(f"{seed}/{step}/{data_rank}")
    size = (shape.grad_accum, shape.batch_size, shape.seq_len + 1)
    rows_ABT = torch.randint(vocab_size, size, generator=generator)
    return [(rows_BT[:, :-1], rows_BT[:, 1:]) for rows_BT in rows_ABT]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy that nothing waits for; from memory that is not pinned the host would wait."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def generator_of(key: str) -> torch.Generator:
    """Return a generator that the same key always starts alike."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe gives its text once, to one rank
            raise ValueError(f"--data ({path}) must be a plain file: write its text into one")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--data ({path}) must be a readable file: {error.strerror}") from None
    return _join_texts(path, content) if path.suffix == ".jsonl" else content


def _join_texts(path: Path, content: bytes) -> bytes:
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"].encode())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'--data ({path}) line {number} must be a JSON object with a string "text"'
            ) from None
    return b"\n".join(texts)
