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

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moecore.base.options.layer import BalanceConfig, MoEOverrides
from moecore.base.progress import show_progress
from moecore.base.rank_checks import find_difference
from moecore.families.transformers.packing import find_packing_problem
from moecore.io import init_adapters, load_hf
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.planning import TransformersModel
from moecore.recipes.batches import digest_of, packed_examples
from moecore.recipes.checks import check_dynamic_cp, check_graph, check_rows
from moecore.recipes.data import BatchShape, StepBatch
from moecore.recipes.dry_run import planned_run, print_dry_run
from moecore.recipes.files import naming
from moecore.recipes.finetune_data import FinetuneConfig, check_objective, read_data, reader_of
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
from moecore.recipes.loop import batch_shape, ranks_to_start, run, run_command
from moecore.recipes.lora import add_adapters
from moecore.recipes.parser import parse
from moecore.recipes.preference_tuning import PreferenceTuning
from moecore.recipes.report import make_run_dir
from moecore.recipes.sharding import parallelize


def build_job(args: FinetuneConfig) -> FineTuning:
    """Read the data, put the model on the ranks and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check(args, world_size)
    make_run_dir(args.run_dir)
    data, examples, held_out = read_data(args, vocab_size=config.get_text_config().vocab_size)
    meshes = build_meshes(args.parallel_config(world_size, num_experts=num_experts(config)))
    shape = batch_shape(args, meshes.parallel)
    dtype = torch.bfloat16 if args.optimizer.master_remainder else torch.float32
    if args.lora is not None:  # frozen weights need no fp32
        dtype = args.compute_dtype(torch.device(meshes.device_type))
    hf = build_hf(config, args.model, dtype)
    packed_rows = packs(hf)  # of the whole model, of which a stage has a part
    if args.objective == "dpo" and not packed_rows:
        raise ValueError(
            f"--objective (dpo) must be sft for {type(hf).__name__}, because "
            f"{find_packing_problem(hf)} needs rows of one example each"
        )
    if args.recompute:
        recompute(hf)
    if args.lora is not None:
        hf = add_adapters(hf, args.lora)
    model = build_model(args, hf, meshes, shape)
    job_class: type[FineTuning] = FineTuning
    references: dict[str, Any] = {}
    if args.objective == "dpo":
        job_class, references = PreferenceTuning, {"reference": None}
        if args.lora is None:
            references = {"reference": build_reference(args, config, meshes, shape)}
    data_facts = f"{len(examples)} examples, digest {digest_of(examples)}"
    facts = {"--model": args.model.resolve().name, "--data": data_facts}
    if (problem := find_difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    decoder = decoder_of(args.model)
    read = reader_of(args, meshes, decoder, packs=packed_rows)
    batches = read(examples, shape, seed=args.seed)
    args = replace(args, steps=args.max_steps or args.epochs * len(batches.sampler))
    return job_class(
        **references,
        args=args,
        meshes=meshes,
        model=model,
        optimizers=args.optimizer.build(model),
        shape=shape,
        config=model.config.to_dict(),
        facts={
            "--seed": args.seed,
            "rows per step": shape.data_ranks * shape.grad_accum * shape.batch_size,
            **facts,
        },
        batches=batches,
        examples=examples,
        held_out=held_out,
        data=data,
        packs=packed_rows,
        decoder=decoder,
        read=read,
    )


def build_reference(args: FinetuneConfig, config: Any, meshes: Meshes, shape: BatchShape) -> Any:
    """Return the model of the directory, sharded like the policy and frozen."""
    hf = build_hf(config, args.model, args.compute_dtype(torch.device(meshes.device_type)))
    return build_model(args, hf, meshes, shape, is_reference=True).requires_grad_(False).eval()


def build_model(
    args: FinetuneConfig,
    model: Any,
    meshes: Meshes,
    shape: BatchShape,
    *,
    is_reference: bool = False,
) -> Any:
    """Return this rank's shards of a model on meta, with the weights of the directory."""
    device = torch.device(meshes.device_type)
    has_adapters, longest = args.lora is not None, args.sharding.dynamic_cp
    for option, is_given in (
        (f"--dynamic-cp ({longest})", longest is not None),
        ("--cuda-graph", args.cuda_graph),
    ):
        if is_given and (other := find_packing_problem(model)) is not None:
            raise ValueError(
                f"{option} must be left out for {type(model).__name__}, because {other} needs rows "
                "of one example each"
            )
    num_rows = shape.batch_size * (2 if args.objective == "dpo" else 1)
    max_tokens = (longest or num_rows * shape.seq_len // shape.cp) // meshes.parallel.tp
    moe = MoEOverrides()
    if args.aux_loss:
        moe["balance"] = BalanceConfig(micro_batch_coef=args.aux_loss)
    parallelize(model, meshes, args, max_tokens=max_tokens, moe=moe)
    model.to_empty(device=device)
    with naming("--model"), show_progress("loading weights", unit="B") as report:
        load_hf(args.model, model, cast=has_adapters or is_reference, progress=report)
    if has_adapters:
        init_adapters(model, args.seed)
    return model


def check(args: FinetuneConfig, world_size: int) -> tuple[FinetuneConfig, Any]:
    """Return the options, with a directory as `model`, and the config of the model.

    Raises:
        ValueError: for options that do not fit the model, and a model that does not exist.
    """
    args = replace(args, model=model_directory(args.model))
    config = read_config(args.model)
    parallel = args.parallel_config(world_size, num_experts=num_experts(config))
    args.check_sharding()
    check_graph(args, args.sharding.dynamic_cp)
    check_objective(args)
    if args.sharding.dynamic_cp is not None:
        check_dynamic_cp(args, args.sharding.dynamic_cp, parallel)
    check_rows(args, parallel)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and args.seq_len > longest:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_position_embeddings ({longest}) of --model"
        )
    args.logging.check()
    return args, config


def parse_arguments(words: Sequence[str] | None = None) -> FinetuneConfig:
    """Return the options of a run; None = sys.argv."""
    return parse(FinetuneConfig, words, prog="moecore finetune")


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    return run_command(parse_arguments, words, run_rank=run_rank, check=check, dry_run=dry_run)


def dry_run(args: FinetuneConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, else 1."""
    world_size = args.gpus or ranks_to_start(args)
    args, config = check(args, world_size)
    parallel = args.parallel_config(world_size, num_experts=num_experts(config))
    training_run = None
    if args.objective == "sft" and args.lora is None:
        model = TransformersModel.of(args.model)
        training_run = planned_run(args, model, parallel, world_size)

    def read_batch() -> StepBatch:
        data, examples, _ = read_data(args, vocab_size=config.get_text_config().vocab_size)
        print(f"data: {data.report}")
        packed_rows, shape = packs(build_hf(config, args.model)), batch_shape(args, parallel)
        parts = [part for example in examples for part in example.parts]
        return packed_examples(parts, shape, seed=args.seed, data_rank=0, packs=packed_rows).next()

    return print_dry_run(args, training_run, read_batch, read_tokenizer(args.model).decode)


def run_rank(args: FinetuneConfig) -> int:
    """Build, train, save and export on this rank."""
    return run(args, build_job)
