r"""Fine-tune a Hugging Face Mixture-of-Experts model: one command to a directory that vLLM serves.

    moecore tiny-model runs/tiny                        a tiny model and chats, to try it
    moecore finetune --model runs/tiny --data runs/tiny/chats.jsonl --lr 3e-3 \
        --epochs 25 --seq-len 256 --batch-size 1 --eval-share 0 --aux-loss 0.01
    torchrun --nproc-per-node 8 -m moecore finetune --model hf/Qwen3-30B-A3B --ep 8 \
        --data chats.jsonl --run-dir runs/mine --recompute

See docs/finetuning.md. The loss of a step is the mean over the answers' tokens of all ranks and
micro-batches: the sum over each micro-batch is divided by the step's number of tokens. examples.py
and chat.py make the examples, finetuning.py has the job, and loop.py the steps.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moecore.base.rank_checks import find_difference
from moecore.families.transformers.lora_options import add_adapters
from moecore.families.transformers.packing import find_packing_problem
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io.hf.config_fields import HFConfig
from moecore.models import DecoderConfig, document_cost
from moecore.packing import DocumentCost, ScheduledCollator
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.planning import TransformersModel
from moecore.recipes.adapter_tuning import AdapterSteps, AdapterTuning
from moecore.recipes.data import BatchShape, make_batch_shape, make_item_steps
from moecore.recipes.dry_run import make_planned_run, print_batch, print_plan
from moecore.recipes.errors import (
    ARGUMENT_ERRORS,
    RUN_ERRORS,
    print_rank_error,
    print_run_error,
)
from moecore.recipes.examples import (
    Examples,
    compute_examples_digest,
    make_packed_steps,
    make_scheduled_steps,
    read_examples,
    split_examples,
)
from moecore.recipes.finetune_config import FinetuneConfig, check_options
from moecore.recipes.finetuning import JOBS, FineTuning
from moecore.recipes.hf_model import (
    build_hf_model,
    can_pack_documents,
    count_experts,
    find_decoder_config,
    load_weights,
    read_config,
    read_tokenizer,
)
from moecore.recipes.launch import check_environment
from moecore.recipes.loop import count_ranks, print_on_rank_0, run, run_command
from moecore.recipes.options import parallelize
from moecore.recipes.parser import parse
from moecore.recipes.report import make_run_dir
from moecore.recipes.teacher_files import (
    TeacherFiles,
    make_distillation_steps,
    write_teacher_files,
)


def make_step_reader(
    args: FinetuneConfig,
    meshes: Meshes,
    decoder: DecoderConfig | None,
    *,
    packs: bool,
    files: TeacherFiles | None,
) -> Callable[..., Any]:
    """Return a function of (examples, shape, seed) that returns this data rank's batch reader."""
    if files is not None:
        return partial(
            make_distillation_steps, files=files, data_rank=meshes.data_rank, packs=packs
        )
    if (make_batch := JOBS[args.objective].make_batch) is not None:
        return partial(make_item_steps, make_batch=make_batch, data_rank=meshes.data_rank)
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
    data = read(args.data, option="--adapters" if args.adapters else "--data")
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


def join_data(
    parts: Collection[tuple[Examples, list[Any], list[Any]]],
) -> tuple[Examples, list[Any], list[Any]]:
    """Return the results of several calls of `read_data` as one result."""
    data, examples, held_out = zip(*parts, strict=True)
    all_data = Examples(
        examples=list(chain(*(part.examples for part in data))),
        num_rows=sum(part.num_rows for part in data),
        num_cut=sum(part.num_cut for part in data),
        problems=list(chain(*(part.problems for part in data))),
    )
    return all_data, list(chain(*examples)), list(chain(*held_out))


def build_job(args: FinetuneConfig) -> FineTuning:
    """Read the data, shard the model and load the last checkpoint, if any; return the job."""
    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check_options(args, world_size)
    make_run_dir(args.run_dir)
    vocab_size, adapters = config.get_text_config().vocab_size, args.list_adapters()
    of_names = {
        name: read_data(replace(args, data=files), vocab_size=vocab_size)
        for name, files in (adapters or {"default": args.data}).items()
    }
    data, examples, held_out = join_data(of_names.values())
    meshes = build_meshes(args.make_parallel_config(world_size, num_experts=count_experts(config)))
    shape = make_batch_shape(args, meshes.parallel)
    dtype = torch.bfloat16 if args.optimizer.master_remainder else torch.float32
    device = torch.device(meshes.device_type)
    if args.lora is not None:  # frozen weights need no fp32
        dtype = args.get_compute_dtype(device)
    hf = build_hf_model(config, args.model, dtype)
    packed_rows = can_pack_documents(hf)  # of the whole model, of which a stage has a part
    if (args.objective != "sft" or adapters) and not packed_rows:
        option = "--adapters must be left out" if adapters else "--objective ({}) must be sft"
        raise ValueError(
            f"{option.format(args.objective)} for {type(hf).__name__}, because "
            f"{find_packing_problem(hf)} needs rows of one example each"
        )
    if args.recompute:
        enable_activation_checkpointing(hf)
    if args.lora is not None:
        hf = add_adapters(hf, args.lora, *of_names)
    model = build_model(args, hf, meshes, shape)
    job_class: Callable[..., FineTuning] = JOBS[args.objective]
    if (options := JOBS[args.objective].options) is not None:
        reference, path = None, args.model if args.lora is None else None
        if (path := args.distill.teacher if args.distill is not None else path) is not None:
            reference = build_reference(args, path, meshes, shape)
        objective = getattr(args, args.objective) or options()
        job_class = partial(job_class, reference=reference, objective=objective)
    teacher = None if args.distill is None else args.distill.teacher
    data_facts = f"{len(examples)} examples, digest {compute_examples_digest(examples)}"
    facts = {
        "--objective": args.objective,
        "--model": args.model.resolve().name,
        "--distill-teacher": teacher and teacher.resolve().name,
        "--data": data_facts,
    }
    files = open_teacher_files(args, config, (*examples, *held_out))
    if files is not None:
        facts["--distill-log-probs"] = f"{files.path.resolve().name}, k {files.top_k}"
    if adapters:
        sizes = (f"{name} {len(parts[1])}" for name, parts in of_names.items())
        facts["--adapters"] = f"examples of {', '.join(sizes)}"
    if (problem := find_difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    decoder = find_decoder_config(args.model)
    read = make_step_reader(args, meshes, decoder, packs=packed_rows, files=files)
    readers = [read(parts[1], shape, seed=args.seed) for parts in of_names.values()]
    batches = AdapterSteps(dict(enumerate(readers))) if adapters else readers[0]
    if adapters:
        held_out_of = {name: parts[2] for name, parts in of_names.items()}
        job_class = partial(AdapterTuning, held_out_of=held_out_of)
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


def build_reference(args: FinetuneConfig, path: Path, meshes: Meshes, shape: BatchShape) -> Any:
    """Return the frozen, sharded model of a directory `path`. Collective."""
    dtype = args.get_compute_dtype(torch.device(meshes.device_type))
    hf = build_hf_model(read_config(path), path, dtype)
    if (problem := find_packing_problem(hf)) is not None:
        raise ValueError(
            f"--distill-teacher ({path}) must read packed rows, but {problem} needs rows of one "
            "example each: choose another teacher"
        )
    hf.requires_grad_(False)  # before, because frozen experts may be stored in 4 bits
    frozen = replace(args, model=path, lora=None)
    return build_model(frozen, hf, meshes, shape, is_reference=True).eval()


def open_teacher_files(
    args: FinetuneConfig, config: Any, examples: Sequence[Any]
) -> TeacherFiles | None:
    """Return the stored log-probabilities of all examples, None without --distill-log-probs."""
    if (options := args.distill) is None or options.log_probs is None:
        return None
    vocab_size = config.get_text_config().vocab_size
    files = TeacherFiles(options.log_probs, vocab_size=vocab_size, top_k=options.top_k)
    files.check(examples)
    return files


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
    num_rows *= max(1, len(args.list_adapters()))
    max_tokens = (longest or num_rows * shape.seq_len // shape.cp) // meshes.parallel.tp
    parallelize(model, meshes, args, max_tokens=max_tokens, moe=args.make_moe_overrides())
    load_weights(args, model, meshes.device_type, cast=args.lora is not None or is_reference)
    return model


parse_arguments = partial(parse, FinetuneConfig, prog="moecore finetune")


def run_rank(args: FinetuneConfig) -> int:
    """Train and export on this rank, or write log-probabilities; return the exit status."""
    options = args.distill
    if options is None or None in (options.teacher, options.log_probs):
        return run(args, build_job)
    try:
        check_environment()
        write_log_probs(args)
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, int(os.environ["RANK"]))
    except RUN_ERRORS as error:
        return print_run_error(error, args, saves_memory=FineTuning.saves_memory)
    return 0


def write_log_probs(args: FinetuneConfig) -> None:
    """Write --distill-log-probs: the teacher's log-probabilities of all examples. Collective."""
    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check_options(args, world_size)
    options, vocab_size = args.distill, config.get_text_config().vocab_size
    assert options is not None and options.teacher and options.log_probs and options.top_k
    _, examples, held_out = read_data(args, vocab_size=vocab_size)
    num_experts = count_experts(read_config(options.teacher))
    meshes = build_meshes(args.make_parallel_config(world_size, num_experts=num_experts))
    shape = replace(make_batch_shape(args, meshes.parallel), grad_accum=1)
    teacher = build_reference(args, options.teacher, meshes, shape)
    all_examples = examples + held_out
    steps = make_packed_steps(
        all_examples, shape, seed=None, data_rank=meshes.data_rank, packs=True
    )
    write_teacher_files(
        teacher,
        meshes,
        all_examples,
        steps,
        options.log_probs,
        top_k=options.top_k,
        vocab_size=vocab_size,
    )
    print_on_rank_0(f"{options.log_probs} is ready: train without --distill-teacher")


def dry_run(args: FinetuneConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, otherwise 1."""
    world_size = args.gpus or count_ranks(args)
    args, config = check_options(args, world_size)
    parallel = args.make_parallel_config(world_size, num_experts=count_experts(config))
    training_run, adapters = None, args.list_adapters()
    if args.objective == "sft":
        model = make_planned_model(args, args.model)
        all_rows = replace(args, batch_size=args.batch_size * max(1, len(adapters)))
        training_run = make_planned_run(all_rows, model, parallel, world_size)
    code = print_plan(args, training_run)
    if adapters:  # the first batch is of the first adapter
        args = replace(args, data=next(iter(adapters.values())))
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
