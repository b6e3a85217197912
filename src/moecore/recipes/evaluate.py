"""`moecore evaluate`: the loss of a trained model on documents, by transformers in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from moecore.base.command_options import POSITIONAL
from moecore.base.fields import Count
from moecore.base.progress import track_progress
from moecore.packing.corpus.files import shorten_text
from moecore.packing.corpus.sources import describe_location, tokenize_document
from moecore.recipes.corpora import SourceOptions, open_source
from moecore.recipes.generate import load_model


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure the loss of a run, a checkpoint or a Hugging Face directory on documents.

    Attributes:
        path: a run (its export or latest checkpoint), a checkpoint, or a Hugging Face
            directory.
        data: sources, in the syntax of moecore pretrain.
        seq_len: maximum tokens of a document; longer documents are cut.
        max_documents: maximum documents of each source; None = all.
    """

    path: Annotated[Path, POSITIONAL]
    data: tuple[SourceOptions, ...]
    seq_len: Count = 1024
    max_documents: Count | None = None


def run_evaluate(args: EvaluateConfig) -> int:
    """Print the mean loss per token, in nats, of each source's documents; return 0."""
    model, tokenizer = load_model(args.path)
    num_ids = model.get_input_embeddings().weight.shape[0]
    for source in [open_source(options, tokenizer) for options in args.data]:
        total, count = 0.0, 0
        for ids_1T in iterate_documents(source, args.seq_len, args.max_documents, num_ids):
            total += sum_losses(model, ids_1T.to(model.device))
            count += ids_1T.shape[1] - 1
        if not count:
            raise ValueError(f"--data ({source.name}) must have a document of 2 tokens: add it")
        mean = total / count
        print(f"{source.name}: loss {mean:.4f}, perplexity {math.exp(mean):.2f}, {count} tokens")
    return 0


def iterate_documents(
    source: Any, seq_len: int, max_documents: int | None, vocab_size: int
) -> Iterator[Tensor]:
    """Yield int64 ids [1, T <= seq_len] of the first `max_documents` documents (None = all)."""
    for i, document in enumerate(track_progress(source.documents, "evaluating", unit="documents")):
        if i == max_documents:
            return
        try:
            ids = tokenize_document(source, document, vocab_size)[:seq_len]
        except Exception as error:  # of any kind: a tokenizer is code
            place = describe_location(source.documents, i)
            line = f"--data ({source.name}), {place}: {shorten_text(error)}"
            raise ValueError(line) from None
        if len(ids) > 1:
            yield torch.from_numpy(ids.astype(np.int64))[None]


@torch.no_grad()
def sum_losses(model: Any, ids_1T: Tensor) -> float:
    """Return the summed cross-entropy, in nats, of all tokens of `ids_1T` except the first."""
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, 1:], reduction="sum"))
