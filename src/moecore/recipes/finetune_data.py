"""The options and the data of `moecore finetune`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from moecore.base.command_options import Spelling, Table, make_internal_field
from moecore.base.fields import Bound, Count, CountOrZero
from moecore.models import DecoderConfig, document_cost
from moecore.packing import DocumentCost, ScheduledCollator
from moecore.parallel.mesh import Meshes
from moecore.recipes.batches import ScheduledExamples, packed_examples, split_examples
from moecore.recipes.examples import Examples, encode_row, read_examples
from moecore.recipes.hf_model import read_tokenizer
from moecore.recipes.lora import LoRAOptions
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.preferences import PreferenceSteps, encode_preference
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.recipes.sharding import ShardedConfig
from moecore.rl import DPO

PREFIX = Table(prefix=True)
FINETUNING = OptimizerConfig(lr=1e-5, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(ShardedConfig):
    """Fine-tune a Hugging Face Mixture-of-Experts model on chats, prompts or text.

    Attributes:
        model: a directory of config, tokenizer and weights, or a name of the hub.
        data: .jsonl and .parquet files, directories of save_to_disk, hf:NAME, or plain text.
        objective: "sft" learns answers; "dpo" prefers chosen to rejected answers.
        eval_data: files of the evaluation.
        eval_share: share of `data` that is evaluated and not trained, without `eval_data`.
        epochs: times that all of `data` is read.
        max_steps: optimizer steps of the run; None = the steps of `epochs`.
        recompute: recompute each decoder layer in backward.
        lora: adapters in place of a change of all weights.
        dataset: the format of the data.
        columns: the names of the columns of the data.
        dpo: objective "dpo".
    """

    model: Annotated[Path, Spelling(alias="hf_config")]  # as `moecore plan --write` names it
    data: tuple[Path, ...]
    objective: Literal["sft", "dpo"] = "sft"
    eval_data: tuple[Path, ...] = ()
    eval_share: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.05
    epochs: Count = 1
    max_steps: Count | None = None
    recompute: bool = False
    run_dir: Path = Path("runs/tuned")
    steps: int = make_internal_field(0)
    batch_size: Count = 4
    seq_len: Count = 1024
    eval_every: CountOrZero = 50
    optimizer: OptimizerConfig = FINETUNING
    lora: Annotated[LoRAOptions | None, PREFIX] = None
    dataset: Annotated[DatasetOptions, PREFIX] = DatasetOptions()
    columns: Annotated[ColumnNames, PREFIX] = ColumnNames()
    dpo: Annotated[DPO | None, PREFIX] = None


def check_objective(args: FinetuneConfig) -> None:
    """Raise ValueError for options that the objective does not take."""
    if args.objective == "sft":
        if args.dpo is not None:
            raise ValueError(f"--objective (sft) must be dpo with options of [dpo]: {args.dpo}")
        return
    for option, is_given in (
        ("--dynamic-cp", args.sharding.dynamic_cp is not None),
        ("--cuda-graph", args.cuda_graph),
    ):
        if is_given:
            raise ValueError(f"{option} must not go with --objective dpo: drop it")


def reader_of(
    args: FinetuneConfig, meshes: Meshes, decoder: DecoderConfig | None, *, packs: bool
) -> Callable[..., Any]:
    """Return a function (examples, shape, seed) -> the batches of this data rank."""
    if args.objective == "dpo":
        return partial(PreferenceSteps, data_rank=meshes.data_rank)
    if args.sharding.dynamic_cp is None:
        return partial(packed_examples, data_rank=meshes.data_rank, packs=packs)
    collator = ScheduledCollator(
        max_tokens=args.sharding.dynamic_cp,
        cost=DocumentCost() if decoder is None else document_cost(decoder),
        data_rank=meshes.data_rank,
        data_ranks=meshes.data_ranks,
    )
    return partial(ScheduledExamples, collator=collator)


def read_data(
    args: FinetuneConfig, *, vocab_size: int
) -> tuple[Examples[Any], list[Any], list[Any]]:
    """Return the records of the files, the training examples and the held-out examples."""
    read = partial(
        read_examples,
        encode=encode_row if args.objective == "sft" else encode_preference,
        tokenizer=read_tokenizer(args.model),
        seq_len=args.seq_len,
        options=args.dataset,
        columns=args.columns,
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
