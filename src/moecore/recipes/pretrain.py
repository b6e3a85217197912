r"""Pre-train a Mixture-of-Experts decoder on a corpus: one command to a directory for transformers.

    moecore pretrain --hf-config DIR --tokenizer DIR --seq-len 4096 --steps 100000 \
        --data web_text_document,weight=0.7 code.jsonl,weight=0.3,field=content \
        --validation held_out.jsonl,name=web --eval-every 500 --run-dir runs/mine
    torchrun --nproc-per-node 8 -m moecore pretrain --config runs/mine/config.toml --ep 4 --cp 2
    torchrun --nproc-per-node 8 -m moecore pretrain --config ... --seq-len 65536 --dynamic-cp 8192

Documents are text or token ids: JSONL, Megatron's .bin and .idx, and data sets of Hugging Face, on
disk or streamed. They are tokenized and packed into rows by workers ahead of the step, without
attention across documents, and sources are mixed by their weights. docs/pretraining.md has all of
it, and what happens to documents that are empty or bad.

The model is that of a config.json (--hf-config), whose weights start at random, or a preset with
fields of its own (--preset, --num-layers, ...). Every option of moecore's records has a flag, and a
line in a TOML file (--config); RUN_DIR/config.toml has those of the run. `moecore plan --write
FILE` writes such a file of a planned run.

Started again with the same arguments, a run continues from its last whole checkpoint. On other
ranks too it reads the tokens that are left, each once; docs/checkpointing.md has what changes then.
Its result is RUN_DIR/export, with the tokenizer, where the config.json is known.

loop.py has the steps, which all recipes share, sharding.py how a model is put onto
the ranks, native.py the model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moecore.base.options.fsdp import FSDPOptions
from moecore.io.checkpoint.config_differences import differences
from moecore.models import Decoder, DecoderConfig, at_width, document_cost
from moecore.packing import CorpusOptions
from moecore.packing.collate import multiple_of
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.recipes.checks import (
    check_dynamic_cp,
    check_graph,
    check_memory,
    check_rows,
)
from moecore.recipes.corpora import (
    BYTES,
    CorpusSteps,
    ScheduledCorpusSteps,
    SourceOptions,
    Tokenizer,
    read_source,
    source_of,
    with_names,
)
from moecore.recipes.corpus_training import CorpusTraining
from moecore.recipes.data import BatchShape, StepBatch
from moecore.recipes.decoder_config import (
    EXCLUDED_FIELDS,
    RECORDS,
    model_config,
    ramp_of,
    tables_of,
)
from moecore.recipes.dry_run import add_dry_run, planned_run, print_dry_run
from moecore.recipes.errors import ARGUMENT_ERRORS, print_error
from moecore.recipes.loggers import logger_options
from moecore.recipes.loop import (
    batch_shape,
    ranks_to_start,
    run,
    shape_of,
    start,
)
from moecore.recipes.optimizer import optimizer_of, schedule_of
from moecore.recipes.options import (
    DEGREES,
    add_common,
    count,
    moe_of,
    parallel_config,
    positive,
    positive_int,
)
from moecore.recipes.records import add_records, as_toml, parse, values_of
from moecore.recipes.report import make_run_dir
from moecore.recipes.rotary import with_rotary
from moecore.recipes.samples import sample_options
from moecore.recipes.sharding import fsdp_of, nvlink_of, parallelize, records_of
from moecore.recipes.stages import plan_stages, stages_of
from moecore.recipes.steps import BatchRamp
from moecore.train import WidthRates, width_rates


def build_job(args: argparse.Namespace) -> CorpusTraining:
    """Open the corpus, put the model on the ranks and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    config, tokenizer = check(args, world_size)
    make_run_dir(args.run_dir)
    sources = [read_source(options, tokenizer) for options in args.data]
    held_out = [
        read_source(options, tokenizer, option="--validation") for options in args.validation
    ]
    meshes = build_meshes(parallel_config(args, world_size, num_experts=moe_of(config).num_experts))
    rows = corpus_options(args, config, meshes.parallel.cp)
    records = records_of(args) | {"corpus": rows, "fsdp": fsdp_of(args, meshes)}
    max_tokens = records["sharding"].dynamic_cp
    if max_tokens is None:
        check_memory(args, config, torch.device(meshes.device_type))
    if max_tokens is not None:
        records["nvlink"] = nvlink_of(records, max_tokens // meshes.parallel.tp)
    rates = rates_of(args, config)
    model = build_model(args, config, meshes, records, rates)
    shape = batch_shape(args, meshes)
    steps: Any = partial(CorpusSteps, data_rank=meshes.data_rank)
    if max_tokens is not None:
        plan = {"max_tokens": max_tokens, "cost": document_cost(config)}
        steps = partial(ScheduledCorpusSteps, data_rank=meshes.data_rank, **plan)
    eval_shape, fixed = eval_shape_of(args, shape), replace(rows, shuffle=False, partitions=1)
    return CorpusTraining(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=optimizer_of(args).build(model, rates),
        shape=shape,
        config=config,
        facts={"--tokenizer": args.tokenizer},
        tables=run_tables(args.run_args),
        batches=steps(sources, rows, shape, workers=args.workers),
        tokenizer=tokenizer,
        bad_lines=sum(getattr(source.documents, "num_invalid", 0) for source in sources),
        validation={
            source.name: steps([source], fixed, eval_shape, workers=0).next() for source in held_out
        },
    )


def eval_shape_of(args: argparse.Namespace, shape: BatchShape) -> BatchShape:
    """Return the shape of the rows of a validation set, in whole micro-batches of all ranks."""
    return replace(shape, grad_accum=-(-args.eval_rows // (shape.data_ranks * shape.batch_size)))


def corpus_options(args: argparse.Namespace, config: DecoderConfig, cp: int) -> CorpusOptions:
    """Return the options of [corpus], completed by the options of the run."""
    of_run = {"row_tokens": args.seq_len, "vocab_size": config.vocab_size, "seed": args.seed}
    return CorpusOptions(**of_run, multiple=multiple_of(cp), **values_of(args, "corpus"))


def run_tables(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of each table of the options of the run."""
    config = model_config(args)
    of_run = {"corpus": corpus_options(args, config, 1), "fsdp": fsdp_options(args)}
    return tables_of(args, config, records_of(args) | of_run)


def fsdp_options(args: argparse.Namespace) -> FSDPOptions:
    """Return the options of [fsdp] in the dtype of the parameters."""
    return FSDPOptions(**values_of(args, "fsdp"))


def rates_of(args: argparse.Namespace, config: DecoderConfig) -> WidthRates | None:
    """Return the factors of --base-width."""
    width = optimizer_of(args).base_width
    if width is None:
        return None
    base = at_width(config, width)
    return width_rates(Decoder(config, device="meta"), Decoder(base, device="meta"))


def build_model(
    args: argparse.Namespace,
    config: DecoderConfig,
    meshes: Meshes,
    records: dict[str, Any],
    rates: WidthRates | None,
) -> Decoder:
    """Return this rank's shards of the model: the same weights on every layout."""
    dtype = torch.bfloat16 if optimizer_of(args).master_remainder else torch.float32
    model = Decoder(config, device="meta", dtype=dtype)
    parallelize(model, meshes, args, records)
    model.to_empty(device=torch.device(meshes.device_type))
    # The head reads tied embeddings, whose logits would be as wide.
    wide = {} if config.tie_embeddings else {"embedding_std": args.embedding_std}
    model.init_weights(args.seed, **wide)
    if rates is not None:
        rates.scale_weights(model)
    return model


def check(args: argparse.Namespace, world_size: int) -> tuple[DecoderConfig, Tokenizer]:
    """Return config and tokenizer; raise ValueError for arguments that do not fit together."""
    if not args.data:
        raise ValueError("--data ([]) must have at least one source: name a file")
    if args.eval_every and not args.validation:
        raise ValueError(f"--eval-every ({args.eval_every}) must go with --validation: name a file")
    max_tokens = records_of(args)["sharding"].dynamic_cp
    check_graph(args, max_tokens)
    config, tokenizer = model_config(args), Tokenizer(args.tokenizer)
    optimizer = optimizer_of(args)
    schedule_of(args)
    if optimizer.base_width is not None:
        at_width(config, optimizer.base_width)
    if args.seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_seq_len ({config.max_seq_len}) of the model"
        )
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"--tokenizer ({args.tokenizer}, {tokenizer.size} ids) must have <= vocab_size "
            f"({config.vocab_size}) of the model: take the model's own, or raise vocab_size"
        )
    parallel = parallel_config(args, world_size, num_experts=moe_of(config).num_experts)
    check_rows(args, parallel.resolve(world_size))
    if max_tokens is not None and ramp_of(args) != BatchRamp():
        raise ValueError(
            f"--dynamic-cp ({max_tokens}) must not go with options of [batch], whose steps have "
            "whole micro-batches: drop one of them"
        )
    if max_tokens is not None:
        check_dynamic_cp(args, max_tokens, parallel.resolve(world_size))
    logger_options(args).check()
    samples = sample_options(args)
    samples.prompts(tokenizer, max_seq_len=config.max_seq_len)
    if samples.sample_every and (args.pp or 1) > 1:
        raise ValueError(
            f"sample_every ({samples.sample_every}) must be 0 with --pp {args.pp}: sample from the "
            "checkpoint, on ranks without stages"
        )
    return config, tokenizer


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run; None = sys.argv."""
    parser = argparse.ArgumentParser(
        prog="moecore pretrain",
        description="Pre-train a Mixture-of-Experts decoder on a corpus.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML file of options; a flag beside it wins")
    add("--data", type=source, nargs="+", default=[], metavar="PATH", help=SOURCE_HELP)
    add("--validation", type=source, nargs="+", default=[], metavar="PATH", help="like --data")
    add("--tokenizer", default=BYTES, help='directory or name on the hub, or "bytes"')
    add("--workers", type=count, default=2, help="processes of a rank that read ahead; 0 = none")
    add(
        "--eval-rows",
        type=positive_int,
        default=64,
        help="of each validation set, all ranks together",
    )
    add("--hf-config", type=Path, metavar="PATH", help="config.json of the model")
    add("--preset", default="tiny", help="without --hf-config, see moecore.models.PRESETS")
    add("--steps", type=positive_int, default=400, help="optimizer steps of the whole run")
    add("--embedding-std", type=positive, default=1.0, help="of new embeddings that are not tied")
    add("--expert-loads-every", type=count, default=10, help="steps; load of each expert, 0 = none")
    add_common(parser, DEGREES)
    add_dry_run(parser)
    add_records(parser, RECORDS, without=EXCLUDED_FIELDS)
    parser.set_defaults(run_dir=Path("runs/pretrained"), batch_size=8, seq_len=256)
    parser.set_defaults(
        eval_every=0, **{"optimizer.router_lr_factor": 0.1, "schedule.min_warmup_steps": 100}
    )
    words = sys.argv[1:] if arguments is None else arguments
    args = parse(parser, words, tables=("data", "validation"), takes_stages=True)
    for options in {id(part): part for part in (args, *stages_of(args))}.values():
        options.data, options.validation = with_names(options.data), with_names(options.validation)
        options.row_factor = values_of(options, "nvlink").get("row_factor")
    return args


SOURCE_HELP = "PATH,weight=1,field=text,name=NAME,split=train,config=NAME,stream=true"


def source(word: str) -> SourceOptions:
    """Read a source of --data."""
    try:
        return source_of(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    try:
        args = parse_arguments(words)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    if args.dry_run:
        return max(map(dry_run, stages_of(args)))
    return start(run_rank, args, lambda world_size: check_stages(args, world_size))


def resolve_stages(
    args: argparse.Namespace, world_size: int | None = None
) -> list[argparse.Namespace]:
    """Return the options of each stage with its steps, see `plan_stages`."""
    num_ranks = world_size or int(os.environ["WORLD_SIZE"])

    def batch_of(options: argparse.Namespace) -> tuple[int, int, BatchRamp]:
        num_experts = moe_of(model_config(options)).num_experts
        parallel = parallel_config(options, num_ranks, num_experts=num_experts)
        shape = shape_of(options, parallel.resolve(num_ranks))
        return shape.rows, shape.data_ranks * shape.batch_size, ramp_of(options)

    return plan_stages(args, batch_of)


def check_stages(args: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for options that do not fit together, or stages of different models."""
    configs = [check(options, world_size)[0] for options in stages_of(args)]
    for config, table in zip(configs, args.stages or [], strict=False):
        if changes := differences(with_rotary(config, asdict(configs[0])), configs[0]):
            raise ValueError(
                f"{changes[0].name} ({changes[0].value}) of stage {table['name']!r} must be "
                f"{changes[0].reference}, as in the first stage: stages may differ in [rotary]"
            )
    resolve_stages(args, world_size)


def dry_run(args: argparse.Namespace) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, else 1."""
    try:
        world_size = args.gpus or ranks_to_start(args)
        config, tokenizer = check(args, world_size)
        parallel = parallel_config(args, world_size, num_experts=moe_of(config).num_experts)
        parallel = parallel.resolve(world_size)
        rows = corpus_options(args, config, parallel.cp)
        records = records_of(args) | {
            "corpus": rows,
            "fsdp": fsdp_options(args),
        }
        training_run = planned_run(args, config, records, parallel, world_size)

        def read_batch() -> StepBatch:
            sources = [read_source(options, tokenizer) for options in args.data]
            shape = shape_of(args, parallel)
            return CorpusSteps(sources, rows, shape, data_rank=0, workers=0).next()

        toml = as_toml(args, tables_of(args, config, records))
        return print_dry_run(args, toml, training_run, read_batch, tokenizer.decode)
    except ARGUMENT_ERRORS as error:
        return print_error(error)


def run_rank(args: argparse.Namespace) -> int:
    """Build, train, save and export on this rank."""
    return run(args, build_job, resolve_stages)
