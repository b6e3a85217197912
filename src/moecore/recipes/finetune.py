r"""Fine-tune a Hugging Face Mixture-of-Experts model: one command to a directory that vLLM serves.

    moecore tiny-model runs/tiny                        a tiny model and chats, to try it
    moecore finetune --model runs/tiny --data runs/tiny/chats.jsonl --lr 3e-3 \
        --epochs 25 --seq-len 256 --batch-size 1 --eval-share 0
    torchrun --nproc-per-node 8 -m moecore finetune --model hf/Qwen3-30B-A3B --ep 8 \
        --data chats.jsonl --run-dir runs/mine --recompute

The model's own tokenizer and chat template make the tokens, and answers alone are learned: see
chat.py for the forms of data. Examples are packed into rows, without attention across them, where
the model keeps documents apart; else each has a row of its own. Started again with the same
arguments, a run continues from its last whole checkpoint, on CPU ranks with the bits of a run that
never stopped. Its result is RUN_DIR/export, which `AutoModelForCausalLM.from_pretrained` loads. A
TOML file stands for options (--config), such as that of `moecore plan --write`. docs/finetuning.md
has all of it.

The loss of a step is the mean over the answers' tokens of all ranks and micro-batches: each
micro-batch gives a sum, divided by the step's number of tokens. So a run computes the same on any
number of ranks that divides its batch. Padding reaches neither experts nor their counts.

loop.py has the steps, which all recipes share, sharding.py how a model is put onto the ranks.

Legend: A micro-batches of a step, B rows, T tokens of a row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import BalanceConfig, MoEOverrides
from moecore.base.progress import show_progress
from moecore.base.rank_checks import difference
from moecore.families.transformers.packing import packing_problem
from moecore.io import init_adapters, load_hf
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.planning import TransformersModel
from moecore.recipes.batches import digest_of, packed_examples
from moecore.recipes.checks import check_dynamic_cp, check_graph, check_rows
from moecore.recipes.data import BatchShape, StepBatch
from moecore.recipes.dry_run import add_dry_run, planned_run, print_dry_run
from moecore.recipes.errors import ARGUMENT_ERRORS, print_error
from moecore.recipes.files import naming
from moecore.recipes.finetune_data import check_objective, read_data, reader_of
from moecore.recipes.finetuning import FineTuning
from moecore.recipes.hf_model import (
    build_hf,
    decoder_of,
    num_experts,
    packs,
    read_config,
    read_tokenizer,
    recompute,
)
from moecore.recipes.hub import model_directory
from moecore.recipes.loggers import logger_options
from moecore.recipes.loop import (
    batch_shape,
    ranks_to_start,
    run,
    shape_of,
    start,
)
from moecore.recipes.lora import LoRAOptions, add_adapters
from moecore.recipes.optimizer import optimizer_of, recipe_tables, schedule_of
from moecore.recipes.options import (
    DEGREES,
    add_common,
    compute_dtype,
    parallel_config,
    positive_int,
)
from moecore.recipes.preference_tuning import PreferenceTuning
from moecore.recipes.records import add_records, as_toml, build, parse, values_of
from moecore.recipes.report import make_run_dir
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.recipes.sharding import TABLES, fsdp_of, nvlink_of, parallelize, records_of
from moecore.rl import DPO

PREFIXED_TABLES: dict[str, type] = {
    "lora": LoRAOptions,
    "dataset": DatasetOptions,
    "columns": ColumnNames,
    "dpo": DPO,
}
EXCLUDED_FIELDS = "fsdp.param_dtype", "context.dynamic"  # fields that another option sets


def build_job(args: argparse.Namespace) -> FineTuning:
    """Read the data, put the model on the ranks and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    config = check(args, world_size)
    make_run_dir(args.run_dir)
    data, examples, held_out = read_data(args, vocab_size=config.get_text_config().vocab_size)
    meshes = build_meshes(parallel_config(args, world_size, num_experts=num_experts(config)))
    shape = batch_shape(args, meshes)
    lora = build(args, "lora", LoRAOptions)
    dtype = torch.bfloat16 if optimizer_of(args).master_remainder else torch.float32
    if lora is not None:  # frozen weights need no fp32
        dtype = compute_dtype(args, torch.device(meshes.device_type))
    hf = build_hf(config, args.model, dtype)
    packed_rows = packs(hf)  # of the whole model, of which a stage has a part
    if args.objective == "dpo" and not packed_rows:
        raise ValueError(
            f"--objective (dpo) must be sft for {type(hf).__name__}, because "
            f"{packing_problem(hf)} needs rows of one example each"
        )
    if args.recompute:
        recompute(hf)
    if lora is not None:
        hf = add_adapters(hf, lora)
    model = build_model(args, hf, meshes, shape)
    job_class: type[FineTuning] = FineTuning
    references: dict[str, Any] = {}
    if args.objective == "dpo":
        job_class, references = PreferenceTuning, {"reference": None}
        if lora is None:
            references = {"reference": build_reference(args, config, meshes, shape)}
    data_facts = f"{len(examples)} examples, digest {digest_of(examples)}"
    facts = {"--model": args.model.resolve().name, "--data": data_facts}
    if (problem := difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    decoder = decoder_of(args.model)
    read = reader_of(args, meshes, decoder, packs=packed_rows)
    batches = read(examples, shape, seed=args.seed)
    args.steps = args.max_steps or args.epochs * len(batches.sampler)
    return job_class(
        **references,
        args=args,
        meshes=meshes,
        model=model,
        optimizers=optimizer_of(args).build(model),
        shape=shape,
        config=model.config.to_dict(),
        facts={
            "--seed": args.seed,
            "rows per step": shape.data_ranks * shape.grad_accum * shape.batch_size,
            **facts,
        },
        tables=tables_of(args, records_of(args) | {"fsdp": fsdp_of(args, meshes)}),
        batches=batches,
        examples=examples,
        held_out=held_out,
        data=data,
        packs=packed_rows,
        decoder=decoder,
        read=read,
    )


def build_reference(
    args: argparse.Namespace, config: Any, meshes: Meshes, shape: BatchShape
) -> Any:
    """Return the model of the directory, sharded like the policy and frozen."""
    hf = build_hf(config, args.model, compute_dtype(args, torch.device(meshes.device_type)))
    return build_model(args, hf, meshes, shape, is_reference=True).requires_grad_(False).eval()


def build_model(
    args: argparse.Namespace,
    model: Any,
    meshes: Meshes,
    shape: BatchShape,
    *,
    is_reference: bool = False,
) -> Any:
    """Return this rank's shards of a model on meta, with the weights of the directory."""
    device = torch.device(meshes.device_type)
    has_adapters = build(args, "lora", LoRAOptions) is not None
    records = records_of(args) | {"fsdp": fsdp_of(args, meshes)}
    for option, is_given in (
        (f"--dynamic-cp ({args.dynamic_cp})", args.dynamic_cp is not None),
        ("--cuda-graph", args.cuda_graph),
    ):
        if is_given and (other := packing_problem(model)) is not None:
            raise ValueError(
                f"{option} must be left out for {type(model).__name__}, because {other} needs rows "
                "of one example each"
            )
    num_rows = shape.batch_size * (2 if args.objective == "dpo" else 1)
    max_tokens = args.dynamic_cp or num_rows * shape.seq_len // shape.cp
    records["nvlink"] = nvlink_of(records, max_tokens // meshes.parallel.tp)
    moe = MoEOverrides()
    if args.aux_loss:
        moe["balance"] = BalanceConfig(micro_batch_coef=args.aux_loss)
    parallelize(model, meshes, args, records, moe=moe)
    model.to_empty(device=device)
    with naming("--model"), show_progress("loading weights", unit="B") as report:
        load_hf(args.model, model, cast=has_adapters or is_reference, progress=report)
    if has_adapters:
        init_adapters(model, args.seed)
    return model


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run; None = sys.argv."""
    parser = argparse.ArgumentParser(
        prog="moecore finetune",
        description="Fine-tune a Hugging Face Mixture-of-Experts model on chats, prompts or text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML file of options; a flag beside it wins")
    model_help = "a directory of config, tokenizer and weights, or a name of the hub"
    add("--model", "--hf-config", type=Path, required=True, metavar="DIR", help=model_help)
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl, .parquet, a directory of save_to_disk, hf:NAME, else plain text: [dataset]",
    )
    objective_help = "sft learns answers; dpo prefers chosen to rejected ones, see [dpo]"
    add("--objective", choices=("sft", "dpo"), default="sft", help=objective_help)
    add("--eval-data", type=Path, nargs="+", default=[], metavar="FILE", help="held-out files")
    add("--eval-share", type=share, default=0.05, help="of --data, held out without --eval-data")
    add("--epochs", type=positive_int, default=1, help="times that all of --data is read")
    add(
        "--max-steps",
        type=positive_int,
        help="optimizer steps of the whole run (None = of --epochs)",
    )
    add("--recompute", action="store_true", help="activations again in backward: less memory")
    add_common(parser, DEGREES)
    add_dry_run(parser)
    add_records(
        parser, {**TABLES, **PREFIXED_TABLES}, without=EXCLUDED_FIELDS, prefixed=(*PREFIXED_TABLES,)
    )
    parser.set_defaults(run_dir=Path("runs/tuned"), batch_size=4, seq_len=1024, eval_every=50)
    parser.set_defaults(**{"optimizer.lr": 1e-5, "optimizer.weight_decay": 0.0})
    parser.set_defaults(expert_loads_every=10)  # no options here
    args = parse(parser, sys.argv[1:] if arguments is None else arguments)
    args.dynamic_cp = values_of(args, "sharding").get("dynamic_cp")
    return args


def share(text: str) -> float:
    """Read a number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"({text}) must be a number in [0, 1)")
    return value


def check(args: argparse.Namespace, world_size: int) -> Any:
    """Return the config of the model, whose directory `args.model` then is.

    Raises:
        ValueError: for arguments that do not fit the model, and a model that is not there.
    """
    args.model = model_directory(args.model)
    config = read_config(args.model)
    parallel = parallel_config(args, world_size, num_experts=num_experts(config))
    parallel = parallel.resolve(world_size)
    optimizer_of(args), schedule_of(args), records_of(args)
    check_graph(args, args.dynamic_cp)
    check_objective(args)
    if args.dynamic_cp is not None:
        check_dynamic_cp(args, args.dynamic_cp, parallel)
    check_rows(args, parallel)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and args.seq_len > longest:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_position_embeddings ({longest}) of --model"
        )
    logger_options(args).check()
    return config


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    try:
        args = parse_arguments(words)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    if args.dry_run:
        return dry_run(args)
    return start(run_rank, args, partial(check, args))


def dry_run(args: argparse.Namespace) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, else 1."""
    try:
        world_size = args.gpus or ranks_to_start(args)
        config = check(args, world_size)
        parallel = parallel_config(args, world_size, num_experts=num_experts(config))
        parallel = parallel.resolve(world_size)
        records = records_of(args) | {"fsdp": FSDPOptions(**values_of(args, "fsdp"))}
        training_run = None
        if args.objective == "sft" and build(args, "lora", LoRAOptions) is None:
            model = TransformersModel.of(args.model)
            training_run = planned_run(args, model, records, parallel, world_size)

        def read_batch() -> StepBatch:
            data, examples, _ = read_data(args, vocab_size=config.get_text_config().vocab_size)
            print(f"data: {data.report}")
            packed_rows, shape = packs(build_hf(config, args.model)), shape_of(args, parallel)
            parts = [part for example in examples for part in example.parts]
            return packed_examples(
                parts, shape, seed=args.seed, data_rank=0, packs=packed_rows
            ).next()

        toml = as_toml(args, tables_of(args, records))
        return print_dry_run(
            args, toml, training_run, read_batch, read_tokenizer(args.model).decode
        )
    except ARGUMENT_ERRORS as error:
        return print_error(error)


def tables_of(args: argparse.Namespace, records: dict[str, Any]) -> dict[str, Any]:
    """Return the record of each table of the resolved options."""
    of_run = {table: build(args, table, record) for table, record in PREFIXED_TABLES.items()}
    return records | recipe_tables(args) | of_run


def run_rank(args: argparse.Namespace) -> int:
    """Build, train, save and export on this rank."""
    return run(args, build_job)
