"""The data of `moecore finetune`: examples of the objective, and the steps that read them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from moecore.models import DecoderConfig, document_cost
from moecore.packing import DocumentCost, ScheduledCollator
from moecore.parallel.mesh import Meshes
from moecore.recipes.batches import ScheduledExamples, packed_examples, split_examples
from moecore.recipes.examples import Examples, encode_row, read_examples
from moecore.recipes.hf_model import read_tokenizer
from moecore.recipes.preferences import PreferenceSteps, encode_preference
from moecore.recipes.records import build, values_of
from moecore.recipes.rows import ColumnNames, DatasetOptions


def check_objective(args: argparse.Namespace) -> None:
    """Raise ValueError for options that the objective does not take."""
    if args.objective == "sft":
        if values := values_of(args, "dpo"):
            raise ValueError(f"--objective (sft) must be dpo with options of [dpo] ({values})")
        return
    for option, is_given in (
        ("--dynamic-cp", args.dynamic_cp is not None),
        ("--cuda-graph", args.cuda_graph),
    ):
        if is_given:
            raise ValueError(f"{option} must not go with --objective dpo: drop it")


def reader_of(
    args: argparse.Namespace, meshes: Meshes, decoder: DecoderConfig | None, *, packs: bool
) -> Callable[..., Any]:
    """Return a function (examples, shape, seed) -> the batches of this data rank."""
    if args.objective == "dpo":
        return partial(PreferenceSteps, data_rank=meshes.data_rank)
    if args.dynamic_cp is None:
        return partial(packed_examples, data_rank=meshes.data_rank, packs=packs)
    collator = ScheduledCollator(
        max_tokens=args.dynamic_cp,
        cost=DocumentCost() if decoder is None else document_cost(decoder),
        data_rank=meshes.data_rank,
        data_ranks=meshes.data_ranks,
    )
    return partial(ScheduledExamples, collator=collator)


def read_data(
    args: argparse.Namespace, *, vocab_size: int
) -> tuple[Examples[Any], list[Any], list[Any]]:
    """Return the records of the files, the training examples and the held-out examples."""
    read = partial(
        read_examples,
        encode=encode_row if args.objective == "sft" else encode_preference,
        tokenizer=read_tokenizer(args.model),
        seq_len=args.seq_len,
        options=build(args, "dataset", DatasetOptions),
        columns=build(args, "columns", ColumnNames),
    )
    data = read(args.data)
    examples, held_out = data.examples, []
    if args.eval_data and args.eval_every:
        held_out = read(args.eval_data, option="--eval-data").examples
    elif args.eval_share and args.eval_every and len(examples) > 1:
        examples, held_out = split_examples(examples, share=args.eval_share, seed=args.seed)
    parts = (part for example in (*examples, *held_out) for part in example.parts)
    largest = max(int(part.tokens_T.max()) for part in parts)
    if largest >= vocab_size:
        raise ValueError(
            f"tokens ({largest}) of --model's tokenizer must be < vocab_size ({vocab_size}) of its "
            "config.json: take both from the same model"
        )
    return data, examples, held_out
