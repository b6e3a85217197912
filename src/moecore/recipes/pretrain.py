r"""Pre-train a Mixture-of-Experts decoder on a corpus: one command to a directory for transformers.

    moecore pretrain --hf-config DIR --tokenizer DIR --seq-len 4096 --steps 100000 \
        --data web_text_document,weight=0.7 code.jsonl,weight=0.3,field=content \
        --validation held_out.jsonl,name=web --eval-every 500 --run-dir runs/mine
    torchrun --nproc-per-node 8 -m moecore pretrain --config runs/mine/config.toml --ep 4 --cp 2

See docs/pretraining.md. The same command continues a run from its last complete checkpoint, on any
number of ranks. corpus_training.py has the job, loop.py the steps, and corpora.py the data.
"""

import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch

from moecore.base.command_options import Fields, Table, make_internal_field
from moecore.base.fields import Count, CountOrZero, Positive
from moecore.base.options.layer import BalanceConfig, CapacityConfig, MoEConfig
from moecore.io.checkpoint.config_differences import find_decoder_differences
from moecore.models import Decoder, DecoderConfig, at_width, document_cost, preset
from moecore.packing import CorpusOptions, CorpusSource
from moecore.packing.collate import get_length_multiple
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.recipes.corpora import (
    BYTES,
    CorpusSteps,
    SourceOptions,
    Tokenizer,
    make_scheduled_corpus_steps,
    name_sources,
    open_source,
    split_sources,
)
from moecore.recipes.corpus_training import CorpusTraining
from moecore.recipes.data import RandomSteps, make_batch_shape
from moecore.recipes.decoder_config import (
    RotaryOptions,
    choose_balance,
    get_fields,
    read_decoder_config,
    replace_rotary,
)
from moecore.recipes.dry_run import make_planned_run, print_batch, print_plan
from moecore.recipes.generate import SampleOptions
from moecore.recipes.loop import count_ranks, run, run_command
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import ShardedConfig, get_moe_config, parallelize
from moecore.recipes.parser import parse
from moecore.recipes.report import make_run_dir
from moecore.recipes.schedule import BatchRamp, LearningRateSchedule, plan_stages
from moecore.recipes.sdc import SDCOptions
from moecore.train import QKClip, materialize
from moecore.train.optim.width import WidthRates, width_rates

FIELDS_OF_RUN = "row_tokens", "multiple", "vocab_size", "seed"  # of [corpus], which the run sets


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(ShardedConfig):
    """Pre-train a Mixture-of-Experts decoder on a corpus.

    Attributes:
        preset: the model, see moecore.models.PRESETS.
        model: fields of the decoder that differ from the preset.
        moe: fields of the decoder's MoE layers that differ from the preset.
        capacity: token dropping.
        balance: load balancing.
        data: sources: PATH,weight=1,field=text,name=NAME,split=train,config=NAME,stream=true.
        tokens: "random" draws tokens of the vocabulary in place of `data`, to measure speed.
        validation: sources for evaluation, like `data`; () = the last 5% of `data`.
        tokenizer: directory or name on the hub, or "bytes".
        workers: processes per rank that read ahead; 0 = none.
        eval_rows: rows of each validation set over all ranks.
        hf_config: config.json, model directory or name of the hub, in place of a preset.
        embedding_std: standard deviation of initial embeddings that are not tied.
        qk_clip: largest attention logit, see `QKClip`; None = no limit.
        corpus: how documents are packed into rows.
        rotary: rotary embedding for longer sequences.
        batch: growth of the batch at the beginning of the run.
        samples: texts that the model generates during the training.
        sdc_check: checks for silent data corruption; None = no checks.
        stages: options of each stage.
        stage_tables: the tables of [[stages]].
    """

    preset: str = "tiny"
    model: Annotated[Fields, Table(record=DecoderConfig)] = field(default_factory=dict)
    moe: Annotated[Fields, Table(record=MoEConfig, without=("dim",))] = field(default_factory=dict)
    capacity: CapacityConfig | None = None
    balance: Annotated[Fields, Table(record=BalanceConfig, without=("micro_batch_coef",))] = field(
        default_factory=dict
    )
    data: tuple[SourceOptions, ...] = ()
    tokens: Literal["text", "random"] = "text"
    validation: tuple[SourceOptions, ...] = ()
    tokenizer: str = BYTES
    workers: CountOrZero = 2
    eval_rows: Count = 64
    hf_config: Path | None = None
    embedding_std: Positive = 1.0
    qk_clip: Positive | None = None
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
    sdc_check: Annotated[SDCOptions | None, Table(prefix=True)] = None
    stages: "tuple[PretrainConfig, ...]" = make_internal_field(())
    stage_tables: tuple[dict[str, Any], ...] = make_internal_field(())

    def __post_init__(self) -> None:
        for name in ("data", "validation"):
            object.__setattr__(self, name, name_sources(getattr(self, name)))

    def make_decoder_config(self) -> DecoderConfig:
        """Return the decoder config of --hf-config, or of the preset with [model] and [moe]."""
        tables = {"model": self.model, "moe": self.moe, "capacity": self.capacity}
        set_tables = [table for table, values in tables.items() if values]
        if self.hf_config is not None and set_tables:
            raise ValueError(
                f"options of [{set_tables[0]}] must be left out with --hf-config "
                f"({self.hf_config}): set them there"
            )
        if self.hf_config is not None:
            config = read_decoder_config(self.hf_config)
        else:
            config = preset(self.preset)
            moe, dim = get_moe_config(config), self.model.get("dim", config.dim)
            moe = replace(moe, **self.moe, dim=dim, capacity=self.capacity or moe.capacity)
            # Together: rules of DecoderConfig relate its fields to those of its MoE layers.
            config = replace(config, **self.model, moe=moe)
        coef = {} if self.aux_loss is None else {"micro_batch_coef": self.aux_loss}
        moe = get_moe_config(config)
        values = {**self.balance, **coef} or self.choose_balance(config)
        config = replace(config, moe=replace(moe, balance=replace(moe.balance, **values)))
        return self.rotary.apply(config)

    def choose_balance(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the default fields of [balance], see `decoder_config.choose_balance`."""
        return choose_balance(get_moe_config(config))

    def resolve(self) -> Self:
        """Return options with all defaults of [corpus] and, without --hf-config, of the model."""
        config = self.make_decoder_config()
        moe = get_moe_config(config)
        run = replace(self, corpus=asdict(make_corpus_options(self, config, 1)))
        if self.hf_config:
            return run
        return replace(
            run,
            aux_loss=moe.balance.micro_batch_coef,
            model=get_fields(config),
            moe=get_fields(moe),
            capacity=moe.capacity,
            balance=get_fields(moe.balance),
        )


def build_job(args: PretrainConfig) -> CorpusTraining:
    """Open the corpus, shard the model, and load the last checkpoint, if any; return the job."""
    world_size = int(os.environ["WORLD_SIZE"])
    config, tokenizer = check_options(args, world_size)
    make_run_dir(args.run_dir)
    sources, held_out = read_sources(args, tokenizer)
    meshes = build_meshes(
        args.make_parallel_config(world_size, num_experts=get_moe_config(config).num_experts)
    )
    rows = make_corpus_options(args, config, meshes.parallel.cp)
    max_tokens = args.sharding.dynamic_cp
    rates = compute_width_rates(args, config)
    model = build_model(args, config, meshes, rates)
    shape = make_batch_shape(args, meshes.parallel)
    data_rank = meshes.data_rank
    steps: Any = partial(CorpusSteps, data_rank=data_rank)
    if max_tokens is not None:
        plan: Any = {"max_tokens": max_tokens, "cost": document_cost(config)}
        steps = partial(make_scheduled_corpus_steps, data_rank=data_rank, **plan)
    if args.tokens == "random":
        batches = RandomSteps(config.vocab_size, shape, seed=args.seed, data_rank=data_rank)
    else:
        batches = steps(sources, rows, shape, workers=args.workers)
    eval_micro_batches = -(-args.eval_rows // (shape.data_ranks * shape.batch_size))
    eval_shape = replace(shape, grad_accum=eval_micro_batches)
    fixed = replace(rows, shuffle=False, partitions=1)
    return CorpusTraining(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=args.optimizer.build_optimizers(model, rates),
        shape=shape,
        config=config,
        facts={"--tokenizer": args.tokenizer},
        batches=batches,
        tokenizer=tokenizer,
        qk_clip=None if args.qk_clip is None else QKClip(model, args.qk_clip),
        bad_lines=sum(getattr(source.documents, "num_invalid", 0) for source in sources),
        validation={
            source.name: steps([source], fixed, eval_shape, workers=0).next_batch()
            for source in held_out
        },
    )


def read_sources(
    args: PretrainConfig, tokenizer: Tokenizer
) -> tuple[list[CorpusSource], list[CorpusSource]]:
    """Open the corpus; return (training, evaluation) sources, both empty for --tokens random."""
    if args.tokens == "random":
        return [], []
    sources = [open_source(options, tokenizer) for options in args.data]
    if args.eval_every and not args.validation:
        return split_sources(sources)
    held_out = (open_source(of, tokenizer, option="--validation") for of in args.validation)
    return sources, list(held_out)


def make_corpus_options(args: PretrainConfig, config: DecoderConfig, cp: int) -> CorpusOptions:
    """Return the corpus options from [corpus] and the run, for `cp` context parallel ranks."""
    of_run: Any = {"row_tokens": args.seq_len, "vocab_size": config.vocab_size, "seed": args.seed}
    return CorpusOptions(**of_run, multiple=get_length_multiple(cp), **args.corpus)


def compute_width_rates(args: PretrainConfig, config: DecoderConfig) -> WidthRates | None:
    """Return factors of initial weights and learning rates for --base-width; None = not set."""
    if args.optimizer.base_width is None:
        return None
    base = at_width(config, args.optimizer.base_width)
    return width_rates(Decoder(config, device="meta"), Decoder(base, device="meta"))


def build_model(
    args: PretrainConfig, config: DecoderConfig, meshes: Meshes, rates: WidthRates | None
) -> Decoder:
    """Return the sharded model with initial weights that do not depend on parallel degrees."""
    dtype = torch.bfloat16 if args.optimizer.master_remainder else torch.float32
    model = Decoder(config, device="meta", dtype=dtype)
    longest = args.sharding.dynamic_cp
    parallelize(model, meshes, args, max_tokens=longest and longest // meshes.parallel.tp)
    materialize(model, device=meshes.device_type)
    # The head reads tied embeddings, whose logits would be as wide.
    wide = {} if config.tie_embeddings else {"embedding_std": args.embedding_std}
    model.init_weights(args.seed, **wide)
    if rates is not None:
        rates.scale_weights(model)
    return model


def check_options(args: PretrainConfig, world_size: int) -> tuple[DecoderConfig, Tokenizer]:
    """Check options for `world_size` ranks; return the model's config and the tokenizer."""
    is_random, max_tokens = args.tokens == "random", args.sharding.dynamic_cp
    if not (args.data or is_random):
        raise ValueError("--data ([]) must have at least one source: name a file")
    if is_random and (args.eval_every or max_tokens is not None):
        raise ValueError(
            "--tokens (random) must be text with --eval-every and --dynamic-cp, which need "
            "documents: drop them"
        )
    args.check_sharding()
    config, tokenizer = args.make_decoder_config(), Tokenizer(args.tokenizer)
    if args.optimizer.base_width is not None:
        at_width(config, args.optimizer.base_width)
    if args.seq_len > config.max_seq_len:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_seq_len ({config.max_seq_len}) of the model"
        )
    if tokenizer.size > config.vocab_size and not is_random:
        raise ValueError(
            f"--tokenizer ({args.tokenizer}, {tokenizer.size} ids) must have <= vocab_size "
            f"({config.vocab_size}) of the model: take the model's own, raise vocab_size, or "
            "use --tokens random"
        )
    parallel = args.make_parallel_config(world_size, num_experts=get_moe_config(config).num_experts)
    args.check_seq_len(parallel)
    if max_tokens is not None and args.batch != BatchRamp():
        raise ValueError(
            f"--dynamic-cp ({max_tokens}) must not go with options of [batch], whose steps have "
            "whole micro-batches: drop one of them"
        )
    args.logging.check_packages()
    if args.sdc_check is not None:
        args.sdc_check.check(args)
    samples, pp = args.samples, args.get_degree("pp")
    samples.encode_prompts(tokenizer, config)
    if samples.sample_every and pp > 1:
        raise ValueError(
            f"sample_every ({samples.sample_every}) must be 0 with --pp {pp}: sample from the "
            "checkpoint, on ranks without stages"
        )
    return config, tokenizer


parse_arguments = partial(parse, PretrainConfig, prog="moecore pretrain")


def resolve_stages(args: PretrainConfig, world_size: int | None = None) -> list[PretrainConfig]:
    """Return each stage's options and steps; `world_size` None = environment's WORLD_SIZE."""
    num_ranks = world_size or int(os.environ["WORLD_SIZE"])

    def get_batch_sizes(options: PretrainConfig) -> tuple[int, int, BatchRamp]:
        """Return rows of a full step, rows of a micro-batch over all ranks, the ramp."""
        num_experts = get_moe_config(options.make_decoder_config()).num_experts
        shape = make_batch_shape(
            options, options.make_parallel_config(num_ranks, num_experts=num_experts)
        )
        return shape.rows, shape.data_ranks * shape.batch_size, options.batch

    return plan_stages(args, get_batch_sizes)


def check_stages(args: PretrainConfig, world_size: int) -> None:
    """Raise ValueError if `world_size` ranks cannot run a stage or stages' models differ."""
    configs = [check_options(options, world_size)[0] for options in args.stages or [args]]
    for config, table in zip(configs, args.stage_tables, strict=False):
        config = replace_rotary(config, asdict(configs[0]))  # the only part that may differ
        if changes := find_decoder_differences(config, configs[0]):
            raise ValueError(
                f"{changes[0].name} ({changes[0].value}) of stage {table['name']!r} must be "
                f"{changes[0].reference}, as in the first stage: stages may differ in [rotary]"
            )
    resolve_stages(args, world_size)


def dry_run_stages(args: PretrainConfig) -> int:
    """Print options, plan and first batch of each stage; return 0 if all plans fit, otherwise 1."""
    return max(map(dry_run, args.stages or [args]))


def dry_run(args: PretrainConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, otherwise 1."""
    world_size = args.gpus or count_ranks(args)
    config, tokenizer = check_options(args, world_size)
    parallel = args.make_parallel_config(world_size, num_experts=get_moe_config(config).num_experts)
    code = print_plan(args.resolve(), make_planned_run(args, config, parallel, world_size))
    rows = make_corpus_options(args, config, parallel.cp)
    shape = make_batch_shape(args, parallel)
    if args.tokens == "random":
        batch = RandomSteps(config.vocab_size, shape, seed=args.seed, data_rank=0).next_batch()
    else:
        sources, _ = read_sources(args, tokenizer)
        batch = CorpusSteps(sources, rows, shape, data_rank=0, workers=0).next_batch()
    print_batch(batch, tokenizer.decode)
    return code


def run_rank(args: PretrainConfig) -> int:
    """Train and export on this rank; return the exit status."""
    return run(args, build_job, resolve_stages)


main = partial(
    run_command, parse_arguments, run_rank=run_rank, check=check_stages, dry_run=dry_run_stages
)
