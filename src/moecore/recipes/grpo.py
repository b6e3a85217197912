r"""Train a transformers model by a reward function: sample, score, train, sync.

    moecore tiny-model runs/sums --task sums
    moecore grpo --model runs/sums --data runs/sums/prompts.jsonl --max-new-tokens 3 \
        --reward moecore.recipes.tiny_model:reward_sum --lr 4e-3 --seq-len 256
    torchrun --nproc-per-node 8 -m moecore grpo --config grpo.toml --ep 8

See docs/rl.md. grpo_job.py has the job, and loop.py the steps. A run that is started again with the
same arguments continues from its last checkpoint. RUN_DIR/export is the trained model.
"""

import os
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from moecore.base.command_options import Fields, Table, make_internal_field
from moecore.base.fields import Count
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.rank_checks import find_difference
from moecore.families.transformers.lora_options import LoRAOptions, add_adapters
from moecore.packing.documents import hash_values
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.planning import TransformersModel
from moecore.recipes.data import make_batch_shape, make_item_steps
from moecore.recipes.dry_run import MAX_TOKENS, make_planned_run, print_plan
from moecore.recipes.files import find_model_directory
from moecore.recipes.grpo_job import (
    Prompt,
    Reinforcement,
    SamplingOptions,
    load_reward,
    read_prompts,
)
from moecore.recipes.hf_model import (
    build_hf_model,
    can_pack_documents,
    count_experts,
    load_weights,
    read_config,
    read_tokenizer,
)
from moecore.recipes.loop import count_ranks, run, run_command
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import RunConfig, ShardedConfig
from moecore.recipes.parser import parse
from moecore.recipes.report import make_run_dir
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.rl import GRPO

PREFIX = Table(prefix=True)
# The sampler is unsharded, and rollouts are packed rows of one rank.
UNUSED_DEGREES = tuple(
    item.name for item in fields(ParallelConfig) if item.name not in ("ep", "dp_replicate")
)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """Train a Hugging Face Mixture-of-Experts model by a reward function.

    Attributes:
        model: a directory of config, tokenizer and weights, or a name of the hub.
        data: rows with a prompt: .jsonl, .parquet, a directory of save_to_disk, or hf:NAME.
        batch_size: prompts per data rank and step.
        seq_len: tokens of a row of packed rollouts.
        sampling: how completions are sampled and rewarded.
        grpo: options of the loss.
        lora: train LoRA adapters and freeze the weights; None = train all weights.
        dataset: the format of the data.
        columns: the names of the columns of the data.
    """

    model: Path
    data: tuple[Path, ...]
    run_dir: Path = Path("runs/grpo")
    steps: Count = 120
    batch_size: Count = 16
    seq_len: Count = 2048
    grad_accum: Count = make_internal_field(1)
    global_batch_size: Count | None = make_internal_field(None)
    precision: None = make_internal_field(None)
    cuda_graph: bool = make_internal_field(False)
    eval_every: int = make_internal_field(0)
    peak_tflops: None = make_internal_field(None)
    parallel: Annotated[Fields, Table(record=ParallelConfig, without=UNUSED_DEGREES)] = field(
        default_factory=dict
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, weight_decay=0.0)
    sampling: SamplingOptions
    grpo: Annotated[GRPO, PREFIX] = GRPO(kl_coef=0.0)
    lora: Annotated[LoRAOptions | None, PREFIX] = None
    dataset: Annotated[DatasetOptions, PREFIX] = DatasetOptions()
    columns: Annotated[ColumnNames, PREFIX] = ColumnNames()


def build_model(
    args: GRPOConfig, config: Any, meshes: Meshes, *, is_reference: bool = False
) -> Any:
    """Return this rank's shards of the policy, or if `is_reference` of the frozen reference."""
    device = torch.device(meshes.device_type)
    is_frozen = is_reference or args.lora is not None
    model = build_hf_model(
        config, args.model, args.get_compute_dtype(device) if is_frozen else torch.float32
    )
    if not can_pack_documents(model):
        raise ValueError(
            f"--model ({args.model}) must keep documents of a row apart, which "
            f"{type(model).__name__} does not: see docs/huggingface.md"
        )
    if args.lora is not None:
        model = add_adapters(model, args.lora)
    fsdp = FSDPOptions(param_dtype=args.get_compute_dtype(device))
    parallelize_moe(model, meshes, moe=args.make_moe_overrides(), fsdp=fsdp)
    load_weights(args, model, meshes.device_type, cast=is_frozen)
    return model.requires_grad_(False).eval() if is_reference else model


def read_run_prompts(args: GRPOConfig, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of --data; raises ValueError like `read_prompts`."""
    return read_prompts(
        args.data,
        tokenizer,
        options=args.dataset,
        columns=args.columns,
        max_tokens=args.seq_len - args.sampling.max_new_tokens,
    )


def build_job(args: GRPOConfig) -> Reinforcement:
    """Build policy and sampler, load the last checkpoint, if one exists; return the job."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check_options(args, world_size)
    sampling = args.sampling
    reward = load_reward(sampling.reward)
    make_run_dir(args.run_dir)
    tokenizer = read_tokenizer(args.model)
    if args.lora is not None:
        args.optimizer.check_adapters()
    prompts = read_run_prompts(args, tokenizer)
    meshes = build_meshes(args.make_parallel_config(world_size, num_experts=count_experts(config)))
    digest = hash_values(*(prompt.ids for prompt in prompts))
    data = f"{len(prompts)} prompts, digest {digest:016x}"
    facts = {"--model": args.model.resolve().name, "--data": data}
    if (problem := find_difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    policy = build_model(args, config, meshes)
    reference = None
    if args.grpo.kl_coef and args.lora is None:  # the policy without its adapters is one
        reference = build_model(args, config, meshes, is_reference=True)
    dtype = args.get_compute_dtype(torch.device(meshes.device_type))
    shape = make_batch_shape(args, meshes.parallel)
    logging.disable_progress_bar()  # each rank would draw one
    sampler = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return Reinforcement(
        args=args,
        meshes=meshes,
        model=policy,
        optimizers=args.optimizer.build_optimizers(policy),
        shape=shape,
        config=config.to_dict(),
        facts={
            "--seed": args.seed,
            "--group": sampling.group,
            "prompts of a step": meshes.data_ranks * args.batch_size,
            **facts,
        },
        batches=make_item_steps(
            prompts,
            shape,
            make_batch=lambda prompts, _seq_len: prompts,
            seed=args.seed,
            data_rank=meshes.data_rank,
        ),
        sampler=sampler.to(meshes.device_type).eval(),
        tokenizer=tokenizer,
        reward=reward,
        sampling=sampling,
        reference=reference,
    )


def check_options(args: GRPOConfig, world_size: int) -> tuple[GRPOConfig, Any]:
    """Check options for `world_size` ranks; return (options with a local path, HF config)."""
    args = replace(args, model=find_model_directory(args.model))
    config = read_config(args.model)
    args.make_parallel_config(world_size, num_experts=count_experts(config))
    load_reward(args.sampling.reward)
    return args, config


parse_arguments = partial(parse, GRPOConfig, prog="moecore grpo")


def run_rank(args: GRPOConfig) -> int:
    """Train and export on this rank; return the exit status."""
    return run(args, build_job)


def dry_run(args: GRPOConfig) -> int:
    """Print options, plan and a prompt; return 0 if the plan fits the GPU, otherwise 1."""
    world_size = args.gpus or count_ranks(args)
    args, config = check_options(args, world_size)
    training_run = None
    if args.lora is not None or not args.grpo.kl_coef:
        training = ShardedConfig(
            run_dir=args.run_dir,
            batch_size=1,
            seq_len=args.seq_len,
            optimizer=args.optimizer,
            gpu=args.gpu,
        )
        parallel = args.make_parallel_config(world_size, num_experts=count_experts(config))
        model = replace(TransformersModel.of(args.model), lora=args.lora)
        training_run = make_planned_run(training, model, parallel, world_size)
    code = print_plan(args, training_run)
    prompts = read_run_prompts(args, read_tokenizer(args.model))
    group = args.sampling.group
    if training_run is not None:
        print("the plan is without the sampler, a full copy of the model on each rank")
    print(f"{len(prompts)} prompts; a step has {args.batch_size} x {group} completions per rank")
    print(f"first prompt: {prompts[0].content!r}, tokens {prompts[0].ids[:MAX_TOKENS]}")
    return code


main = partial(
    run_command, parse_arguments, run_rank=run_rank, check=check_options, dry_run=dry_run
)
