r"""Pre-train a Mixture-of-Experts decoder on a corpus: one command to a directory for transformers.

    moecore pretrain --hf-config DIR --tokenizer DIR --seq-len 4096 --steps 100000 \
        --data web_text_document,weight=0.7 code.jsonl,weight=0.3,field=content \
        --validation held_out.jsonl,name=web --eval-every 500 --run-dir runs/mine
    torchrun --nproc-per-node 8 -m moecore pretrain --config runs/mine/config.toml --ep 4 --cp 2
    torchrun --nproc-per-node 8 -m moecore pretrain --config ... --seq-len 65536 --dynamic-cp 8192

Documents are text or token ids from JSONL files, Megatron's .bin and .idx, and Hugging Face data
sets on disk or streamed. Worker processes tokenize and pack them into rows ahead of the step,
without attention across documents. Sources are mixed by their weights. See docs/pretraining.md.

The model is a decoder with the sizes of a config.json (--hf-config) and new weights, or a preset
(--preset) with changed fields (--num-layers, ...). Each option is a flag and a key of a TOML file.
RUN_DIR/config.toml has the options of the run. `moecore plan --write FILE` writes a planned run.

The same command continues a run from its last complete checkpoint, on any number of ranks. The run
reads each remaining token once (docs/checkpointing.md). Its result is RUN_DIR/export with the
tokenizer, if --hf-config is set. loop.py has the steps, sharding.py shards the model, and native.py
runs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from moecore.base.command_options import Fields, Table, make_internal_field
from moecore.base.fields import Count, CountOrZero, Positive
from moecore.io.checkpoint.config_differences import differences
from moecore.models import Decoder, DecoderConfig, at_width, document_cost
from moecore.packing import CorpusOptions
from moecore.packing.collate import get_length_multiple
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
    with_names,
)
from moecore.recipes.corpus_training import CorpusTraining
from moecore.recipes.data import BatchShape, StepBatch
from moecore.recipes.decoder_config import DecoderRunConfig, default_balance, read_decoder_config
from moecore.recipes.dry_run import planned_run, print_dry_run
from moecore.recipes.loop import batch_shape, ranks_to_start, run, run_command
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import moe_of
from moecore.recipes.parser import parse
from moecore.recipes.report import make_run_dir
from moecore.recipes.rotary import RotaryOptions, with_rotary
from moecore.recipes.samples import SampleOptions
from moecore.recipes.schedule import LearningRateSchedule
from moecore.recipes.sharding import parallelize
from moecore.recipes.stages import plan_stages
from moecore.recipes.steps import BatchRamp
from moecore.train import WidthRates, width_rates

FIELDS_OF_RUN = "row_tokens", "multiple", "vocab_size", "seed"  # of [corpus], which the run sets


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(DecoderRunConfig):
    """Pre-train a Mixture-of-Experts decoder on a corpus.

    Attributes:
        data: sources: PATH,weight=1,field=text,name=NAME,split=train,config=NAME,stream=true.
        validation: sources of the evaluation, like `data`.
        tokenizer: directory or name on the hub, or "bytes".
        workers: processes of a rank that read ahead; 0 = none.
        eval_rows: rows of each validation set over all ranks.
        hf_config: config.json of the model or its directory, in place of a preset.
        embedding_std: standard deviation of new embeddings that are not tied.
        corpus: how documents become rows.
        rotary: positions for sequences of another length.
        batch: growth of the batch at the beginning of the run.
        samples: texts that the model generates during the training.
        stages: options of each stage.
        stage_tables: the tables of [[stages]].
    """

    data: tuple[SourceOptions, ...] = ()
    validation: tuple[SourceOptions, ...] = ()
    tokenizer: str = BYTES
    workers: CountOrZero = 2
    eval_rows: Count = 64
    hf_config: Path | None = None
    embedding_std: Positive = 1.0
    run_dir: Path = Path("runs/pretrained")
    batch_size: Count = 8
    seq_len: Count = 256
    optimizer: OptimizerConfig = OptimizerConfig(router_lr_factor=0.1)
    schedule: LearningRateSchedule = LearningRateSchedule(min_warmup_steps=100)
    corpus: Annotated[Fields, Table(record=CorpusOptions, without=FIELDS_OF_RUN)] = field(
        default_factory=dict
    )
    rotary: RotaryOptions = RotaryOptions()
    batch: BatchRamp = BatchRamp()
    samples: SampleOptions = SampleOptions()
    stages: tuple[PretrainConfig, ...] = make_internal_field(())
    stage_tables: tuple[dict[str, Any], ...] = make_internal_field(())

    def __post_init__(self) -> None:
        for name in ("data", "validation"):
            object.__setattr__(self, name, with_names(getattr(self, name)))

    def model_config(self) -> DecoderConfig:
        """Return the decoder of config.json, or the preset with the fields that are set."""
        if self.hf_config is None:
            config = self.preset_config()
        else:
            tables = {"model": self.model, "moe": self.moe, "capacity": self.capacity}
            for table, values in tables.items():
                if values:
                    raise ValueError(
                        f"options of [{table}] must be left out with --hf-config "
                        f"({self.hf_config}): set them there"
                    )
            config = read_decoder_config(self.hf_config)
        balance = self.set_balance() or default_balance(moe_of(config))
        return self.rotary.apply(self.with_balance(config, balance))

    def resolve(self) -> PretrainConfig:
        """Return the options with all fields of a model without config.json."""
        run = self if self.hf_config else super().resolve()
        rows = corpus_options(self, self.model_config(), 1)
        return replace(run, corpus=asdict(rows))


def build_job(args: PretrainConfig) -> CorpusTraining:
    """Open the corpus, shard the model and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    config, tokenizer = check(args, world_size)
    make_run_dir(args.run_dir)
    sources = [read_source(options, tokenizer) for options in args.data]
    held_out = [
        read_source(options, tokenizer, option="--validation") for options in args.validation
    ]
    meshes = build_meshes(args.parallel_config(world_size, num_experts=moe_of(config).num_experts))
    rows = corpus_options(args, config, meshes.parallel.cp)
    max_tokens = args.sharding.dynamic_cp
    if max_tokens is None:
        check_memory(args, config, torch.device(meshes.device_type))
    rates = rates_of(args, config)
    model = build_model(args, config, meshes, rates)
    shape = batch_shape(args, meshes.parallel)
    steps: Any = partial(CorpusSteps, data_rank=meshes.data_rank)
    if max_tokens is not None:
        plan: Any = {"max_tokens": max_tokens, "cost": document_cost(config)}
        steps = partial(ScheduledCorpusSteps, data_rank=meshes.data_rank, **plan)
    eval_shape, fixed = eval_shape_of(args, shape), replace(rows, shuffle=False, partitions=1)
    return CorpusTraining(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=args.optimizer.build(model, rates),
        shape=shape,
        config=config,
        facts={"--tokenizer": args.tokenizer},
        batches=steps(sources, rows, shape, workers=args.workers),
        tokenizer=tokenizer,
        bad_lines=sum(getattr(source.documents, "num_invalid", 0) for source in sources),
        validation={
            source.name: steps([source], fixed, eval_shape, workers=0).next() for source in held_out
        },
    )


def eval_shape_of(args: PretrainConfig, shape: BatchShape) -> BatchShape:
    """Return the shape of the rows of a validation set, in full micro-batches of all ranks."""
    return replace(shape, grad_accum=-(-args.eval_rows // (shape.data_ranks * shape.batch_size)))


def corpus_options(args: PretrainConfig, config: DecoderConfig, cp: int) -> CorpusOptions:
    """Return the options of [corpus], completed by the options of the run."""
    of_run: Any = {"row_tokens": args.seq_len, "vocab_size": config.vocab_size, "seed": args.seed}
    return CorpusOptions(**of_run, multiple=get_length_multiple(cp), **args.corpus)


def rates_of(args: PretrainConfig, config: DecoderConfig) -> WidthRates | None:
    """Return the factors of --base-width."""
    width = args.optimizer.base_width
    if width is None:
        return None
    base = at_width(config, width)
    return width_rates(Decoder(config, device="meta"), Decoder(base, device="meta"))


def build_model(
    args: PretrainConfig, config: DecoderConfig, meshes: Meshes, rates: WidthRates | None
) -> Decoder:
    """Return this rank's shards of the model. The weights are the same for every layout."""
    dtype = torch.bfloat16 if args.optimizer.master_remainder else torch.float32
    model = Decoder(config, device="meta", dtype=dtype)
    longest = args.sharding.dynamic_cp
    parallelize(model, meshes, args, max_tokens=longest and longest // meshes.parallel.tp)
    model.to_empty(device=torch.device(meshes.device_type))
    # The head reads tied embeddings, whose logits would be as wide.
    wide = {} if config.tie_embeddings else {"embedding_std": args.embedding_std}
    model.init_weights(args.seed, **wide)
    if rates is not None:
        rates.scale_weights(model)
    return model


def check(args: PretrainConfig, world_size: int) -> tuple[DecoderConfig, Tokenizer]:
    """Return config and tokenizer; raise ValueError for arguments that do not fit together."""
    if not args.data:
        raise ValueError("--data ([]) must have at least one source: name a file")
    if args.eval_every and not args.validation:
        raise ValueError(f"--eval-every ({args.eval_every}) must go with --validation: name a file")
    max_tokens = args.sharding.dynamic_cp
    args.check_sharding()
    check_graph(args, max_tokens)
    config, tokenizer = args.model_config(), Tokenizer(args.tokenizer)
    if args.optimizer.base_width is not None:
        at_width(config, args.optimizer.base_width)
    if args.seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_seq_len ({config.max_seq_len}) of the model"
        )
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"--tokenizer ({args.tokenizer}, {tokenizer.size} ids) must have <= vocab_size "
            f"({config.vocab_size}) of the model: take the model's own, or raise vocab_size"
        )
    parallel = args.parallel_config(world_size, num_experts=moe_of(config).num_experts)
    check_rows(args, parallel)
    if max_tokens is not None and args.batch != BatchRamp():
        raise ValueError(
            f"--dynamic-cp ({max_tokens}) must not go with options of [batch], whose steps have "
            "whole micro-batches: drop one of them"
        )
    if max_tokens is not None:
        check_dynamic_cp(args, max_tokens, parallel)
    args.logging.check()
    samples, pp = args.samples, args.degree("pp")
    samples.prompts(tokenizer, max_seq_len=config.max_seq_len)
    if samples.sample_every and pp > 1:
        raise ValueError(
            f"sample_every ({samples.sample_every}) must be 0 with --pp {pp}: sample from the "
            "checkpoint, on ranks without stages"
        )
    return config, tokenizer


def parse_arguments(words: Sequence[str] | None = None) -> PretrainConfig:
    """Return the options of a run; None = sys.argv."""
    return parse(PretrainConfig, words, prog="moecore pretrain")


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    return run_command(
        parse_arguments, words, run_rank=run_rank, check=check_stages, dry_run=dry_run_stages
    )


def resolve_stages(args: PretrainConfig, world_size: int | None = None) -> list[PretrainConfig]:
    """Return the options of each stage with its steps, see `plan_stages`."""
    num_ranks = world_size or int(os.environ["WORLD_SIZE"])

    def batch_of(options: PretrainConfig) -> tuple[int, int, BatchRamp]:
        num_experts = moe_of(options.model_config()).num_experts
        shape = batch_shape(options, options.parallel_config(num_ranks, num_experts=num_experts))
        return shape.rows, shape.data_ranks * shape.batch_size, options.batch

    return plan_stages(args, batch_of)


def check_stages(args: PretrainConfig, world_size: int) -> None:
    """Raise ValueError for options that do not fit together, or stages of different models."""
    configs = [check(options, world_size)[0] for options in args.stages or [args]]
    for config, table in zip(configs, args.stage_tables, strict=False):
        if changes := differences(with_rotary(config, asdict(configs[0])), configs[0]):
            raise ValueError(
                f"{changes[0].name} ({changes[0].value}) of stage {table['name']!r} must be "
                f"{changes[0].reference}, as in the first stage: stages may differ in [rotary]"
            )
    resolve_stages(args, world_size)


def dry_run_stages(args: PretrainConfig) -> int:
    """Print options, plan and first batch of each stage; return 0 if all plans fit, else 1."""
    return max(map(dry_run, args.stages or [args]))


def dry_run(args: PretrainConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, else 1."""
    world_size = args.gpus or ranks_to_start(args)
    config, tokenizer = check(args, world_size)
    parallel = args.parallel_config(world_size, num_experts=moe_of(config).num_experts)

    def read_batch() -> StepBatch:
        sources = [read_source(options, tokenizer) for options in args.data]
        rows, shape = corpus_options(args, config, parallel.cp), batch_shape(args, parallel)
        return CorpusSteps(sources, rows, shape, data_rank=0, workers=0).next()

    training_run = planned_run(args, config, parallel, world_size)
    return print_dry_run(args.resolve(), training_run, read_batch, tokenizer.decode)


def run_rank(args: PretrainConfig) -> int:
    """Build, train, save and export on this rank."""
    return run(args, build_job, resolve_stages)
