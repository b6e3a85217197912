r"""Fine-tune a Hugging Face Mixture-of-Experts model: one command to a directory that vLLM serves.

    moecore tiny-model runs/tiny                        a tiny model and chats, to try it
    moecore finetune --model runs/tiny --data runs/tiny/chats.jsonl --lr 3e-3 \
        --epochs 25 --seq-len 256 --batch-size 1 --eval-share 0
    torchrun --nproc-per-node 8 -m moecore finetune --model hf/Qwen3-30B-A3B --ep 8 \
        --data chats.jsonl --run-dir runs/mine --recompute

See docs/finetuning.md. The loss of a step is the mean over the answers' tokens of all ranks and
micro-batches: the sum over each micro-batch is divided by the step's number of tokens. examples.py
and chat.py make the examples, finetuning.py has the job, and loop.py the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from moecore.base.command_options import Spelling, Table, make_internal_field
from moecore.base.fields import Bound, Count, CountOrZero
from moecore.base.rank_checks import find_difference
from moecore.families.transformers.lora import LoRAOptions, add_adapters
from moecore.families.transformers.packing import find_packing_problem
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io.hf.config_fields import HFConfig
from moecore.models import DecoderConfig, document_cost
from moecore.models.distillation import Distillation
from moecore.packing import DocumentCost, ScheduledCollator
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.planning import TransformersModel
from moecore.recipes.data import BatchShape, make_batch_shape
from moecore.recipes.dry_run import make_planned_run, print_batch, print_plan
from moecore.recipes.examples import (
    Examples,
    compute_examples_digest,
    make_packed_steps,
    make_scheduled_steps,
    read_examples,
    split_examples,
)
from moecore.recipes.files import find_model_directory
from moecore.recipes.finetuning import JOBS, FineTuning
from moecore.recipes.hf_model import (
    build_hf_model,
    can_pack_documents,
    count_experts,
    find_decoder_config,
    load_tokenizer,
    load_weights,
    read_config,
    read_tokenizer,
)
from moecore.recipes.loop import count_ranks, run, run_command
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import ShardedConfig, parallelize
from moecore.recipes.parser import parse
from moecore.recipes.preferences import make_preference_steps
from moecore.recipes.report import make_run_dir
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.recipes.sdc import SDCOptions
from moecore.rl import DPO, KTO

PREFIX = Table(prefix=True)
FINETUNING = OptimizerConfig(lr=1e-5, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(ShardedConfig):
    """Fine-tune a Hugging Face Mixture-of-Experts model on chats, prompts or text.

    Attributes:
        model: a directory of config, tokenizer and weights, or a name of the hub.
        data: .jsonl and .parquet files, directories of save_to_disk, hf:NAME, or plain text.
        objective: "sft" learns answers; "dpo" prefers chosen to rejected answers; "kto" learns
            which answers are desirable; "distill" learns answers and a teacher's probabilities.
        eval_data: files for evaluation.
        eval_share: share of `data` for evaluation instead of training, if `eval_data` is not set.
        epochs: passes over `data`.
        max_steps: optimizer steps of the run; None = the steps of `epochs`.
        recompute: recompute each decoder layer in backward.
        lora: train LoRA adapters and freeze the weights; None = train all weights.
        dataset: the format of the data.
        columns: the names of the columns of the data.
        dpo: options of objective "dpo".
        kto: options of objective "kto".
        distill: options of objective "distill".
        sdc_check: checks for silent data corruption; None = no checks.
    """

    model: Annotated[Path, Spelling(alias="hf_config")]  # as `moecore plan --write` names it
    data: tuple[Path, ...]
    objective: Literal["sft", "dpo", "kto", "distill"] = "sft"
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
    kto: Annotated[KTO | None, Table(prefix=True, without=("kl",))] = None
    distill: Annotated[Distillation | None, PREFIX] = None
    sdc_check: Annotated[SDCOptions | None, PREFIX] = None


def check_objective(args: FinetuneConfig) -> None:
    """Raise ValueError for options that do not apply to the objective."""
    for name, job in JOBS.items():
        options = None if job.options is None else getattr(args, name)
        if options is not None and args.objective != name:
            raise ValueError(
                f"--objective ({args.objective}) must be {name} with options of [{name}]: {options}"
            )
    if args.objective == "distill" and args.distill is None:
        raise ValueError(
            "--objective (distill) must have a teacher: give --distill-teacher its directory"
        )
    for option, value in (
        ("--cuda-graph", args.cuda_graph or None),
        ("--dynamic-cp", args.sharding.dynamic_cp),
        ("--sdc-check-every", args.sdc_check),
    ):
        if args.objective != "sft" and value is not None:
            raise ValueError(f"{option} must not go with --objective {args.objective}: drop it")


def make_step_reader(
    args: FinetuneConfig, meshes: Meshes, decoder: DecoderConfig | None, *, packs: bool
) -> Callable[..., Any]:
    """Return a function of (examples, shape, seed) that returns this data rank's batch reader."""
    if (make_batch := JOBS[args.objective].make_batch) is not None:
        return partial(make_preference_steps, make_batch=make_batch, data_rank=meshes.data_rank)
    if args.sharding.dynamic_cp is None:
        return partial(make_packed_steps, data_rank=meshes.data_rank, packs=packs)
    collator = ScheduledCollator(
        max_tokens=args.sharding.dynamic_cp,
        cost=DocumentCost() if decoder is None else document_cost(decoder),
        data_rank=meshes.data_rank,
        data_ranks=meshes.data_ranks,
    )
    return partial(make_scheduled_steps, collator=collator)


def read_data(args: FinetuneConfig, *, vocab_size: int) -> tuple[Examples, list[Any], list[Any]]:
    """Return (all examples of --data, training examples, evaluation examples)."""
    read = partial(
        read_examples,
        encode=JOBS[args.objective].encode,
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


def build_job(args: FinetuneConfig) -> FineTuning:
    """Read the data, shard the model and load the last checkpoint, if any; return the job."""
    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check_options(args, world_size)
    make_run_dir(args.run_dir)
    data, examples, held_out = read_data(args, vocab_size=config.get_text_config().vocab_size)
    meshes = build_meshes(args.make_parallel_config(world_size, num_experts=count_experts(config)))
    shape = make_batch_shape(args, meshes.parallel)
    dtype = torch.bfloat16 if args.optimizer.master_remainder else torch.float32
    device = torch.device(meshes.device_type)
    if args.lora is not None:  # frozen weights need no fp32
        dtype = args.get_compute_dtype(device)
    hf = build_hf_model(config, args.model, dtype)
    packed_rows = can_pack_documents(hf)  # of the whole model, of which a stage has a part
    if args.objective != "sft" and not packed_rows:
        raise ValueError(
            f"--objective ({args.objective}) must be sft for {type(hf).__name__}, because "
            f"{find_packing_problem(hf)} needs rows of one example each"
        )
    if args.recompute:
        enable_activation_checkpointing(hf)
    if args.lora is not None:
        hf = add_adapters(hf, args.lora)
    model = build_model(args, hf, meshes, shape)
    job_class: Callable[..., FineTuning] = JOBS[args.objective]
    if (options := JOBS[args.objective].options) is not None:
        reference, path = None, args.model if args.lora is None else None
        if (path := args.distill.teacher if args.distill is not None else path) is not None:
            hf = build_hf_model(read_config(path), path, args.get_compute_dtype(device))
            frozen = replace(args, model=path, lora=None)
            hf.requires_grad_(False)  # before, because frozen experts may be stored in 4 bits
            reference = build_model(frozen, hf, meshes, shape, is_reference=True).eval()
        objective = getattr(args, args.objective) or options()
        job_class = partial(job_class, reference=reference, objective=objective)
    data_facts = f"{len(examples)} examples, digest {compute_examples_digest(examples)}"
    facts = {
        "--objective": args.objective,
        "--model": args.model.resolve().name,
        "--distill-teacher": args.distill and args.distill.teacher.resolve().name,
        "--data": data_facts,
    }
    if (problem := find_difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    decoder = find_decoder_config(args.model)
    read = make_step_reader(args, meshes, decoder, packs=packed_rows)
    batches = read(examples, shape, seed=args.seed)
    args = replace(args, steps=args.max_steps or args.epochs * len(batches.sampler))
    return job_class(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=args.optimizer.build_optimizers(model),
        shape=shape,
        config=model.config.to_dict(),
        facts={"--seed": args.seed, "rows per step": shape.rows, **facts},
        batches=batches,
        examples=examples,
        held_out=held_out,
        data=data,
        packs=packed_rows,
        decoder=decoder,
        read=read,
    )


def build_model(
    args: FinetuneConfig,
    model: Any,
    meshes: Meshes,
    shape: BatchShape,
    *,
    is_reference: bool = False,
) -> Any:
    """Shard `model`, the policy or a frozen reference, and load --model; return it. Collective."""
    longest = args.sharding.dynamic_cp
    needs_packing = longest is not None or args.cuda_graph
    if needs_packing and (other := find_packing_problem(model)) is not None:
        option = "--cuda-graph" if longest is None else f"--dynamic-cp ({longest})"
        raise ValueError(
            f"{option} must be left out for {type(model).__name__}, because {other} needs rows of "
            "one example each"
        )
    num_rows = shape.batch_size * JOBS[args.objective].num_sequences
    max_tokens = (longest or num_rows * shape.seq_len // shape.cp) // meshes.parallel.tp
    parallelize(model, meshes, args, max_tokens=max_tokens, moe=args.make_moe_overrides())
    load_weights(args, model, meshes.device_type, cast=args.lora is not None or is_reference)
    return model


def check_options(args: FinetuneConfig, world_size: int) -> tuple[FinetuneConfig, Any]:
    """Check options for `world_size` ranks; return (options with local paths, HF config)."""
    args = replace(args, model=find_model_directory(args.model))
    config = read_config(args.model)
    parallel = args.make_parallel_config(world_size, num_experts=count_experts(config))
    args.check_sharding()
    check_objective(args)
    if args.sdc_check is not None:
        args.sdc_check.check(args)
    args.check_seq_len(parallel)
    shape = make_batch_shape(args, parallel)
    if args.objective == "kto" and shape.grad_accum * shape.batch_size < 2:
        raise ValueError(
            f"--batch-size ({shape.batch_size}) must be >= 2 with --objective kto, whose KL term "
            "pairs each prompt with another completion of its data rank: raise it"
        )
    if args.distill is not None:
        args = replace(args, distill=check_teacher(args, args.distill, config))
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and args.seq_len > longest:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_position_embeddings ({longest}) of --model"
        )
    args.logging.check_packages()
    return args, config


def check_teacher(args: FinetuneConfig, distill: Distillation, config: Any) -> Distillation:
    """Return `distill` with the teacher's local path; ValueError if vocabularies differ."""
    option = "--distill-teacher"
    path = find_model_directory(distill.teacher, option)
    sizes = [x.get_text_config().vocab_size for x in (config, read_config(path, option))]
    tokens, of_teacher = (load_tokenizer(x, option).get_vocab().items() for x in (args.model, path))
    if sizes[0] != sizes[1] or not tokens <= of_teacher:
        raise ValueError(
            f"{option} ({path}) must have the tokens and vocab_size ({sizes[0]}) of --model, not "
            f"others ({sizes[1]}): choose a teacher with the same tokenizer"
        )
    return replace(distill, teacher=path)


parse_arguments = partial(parse, FinetuneConfig, prog="moecore finetune")


def run_rank(args: FinetuneConfig) -> int:
    """Train and export on this rank; return the exit status."""
    return run(args, build_job)


def dry_run(args: FinetuneConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, otherwise 1."""
    world_size = args.gpus or count_ranks(args)
    args, config = check_options(args, world_size)
    parallel = args.make_parallel_config(world_size, num_experts=count_experts(config))
    training_run = None
    if args.objective == "sft":
        model = make_planned_model(args, args.model)
        training_run = make_planned_run(args, model, parallel, world_size)
    code = print_plan(args, training_run)
    data, examples, _ = read_data(args, vocab_size=config.get_text_config().vocab_size)
    print(f"data: {data.report}")
    packed_rows = can_pack_documents(build_hf_model(config, args.model))
    shape = make_batch_shape(args, parallel)
    parts = [part for example in examples for part in example.parts]
    steps = make_packed_steps(parts, shape, seed=args.seed, data_rank=0, packs=packed_rows)
    print_batch(steps.next_batch(), read_tokenizer(args.model).decode)
    return code


def make_planned_model(args: FinetuneConfig, config: HFConfig) -> TransformersModel:
    """Return the input of `moecore.planning` for these options and a config.json."""
    model = TransformersModel.of(config)
    return replace(model, recompute=args.recompute, lora=args.lora)


main = partial(
    run_command, parse_arguments, run_rank=run_rank, check=check_options, dry_run=dry_run
)
