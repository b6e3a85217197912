r"""Fine-tune a Hugging Face Mixture-of-Experts model: one command to a directory that vLLM serves.

    python examples/tiny_hf.py runs/tiny                        a tiny model and chats, to try it
    python examples/finetune_hf.py --model runs/tiny --data runs/tiny/chats.jsonl --lr 3e-3
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model hf/Qwen3-30B-A3B --ep 8 \
        --data chats.jsonl --run-dir runs/mine --recompute

The model's own tokenizer and chat template make the tokens, and answers alone are learned: see
chat.py for the forms of data. Examples are packed into rows, without attention across them, where
the model keeps documents apart; else each has a row of its own. Started again with the same
arguments, a run continues from its last whole checkpoint, bit for bit as if it had never stopped.
Its result is RUN_DIR/export, which `AutoModelForCausalLM.from_pretrained` loads.
docs/finetuning.md has all of it.

The loss of a step is the mean over the answers' tokens of all ranks and micro-batches: each
micro-batch gives a sum, divided by the step's number of tokens. So a run computes the same on any
number of ranks that divides its batch. Padding reaches neither experts nor their counts.

Note "a step ahead" of train.py holds here, too: metrics are read when the next step is launched.

Legend: A micro-batches of a step, B rows, T tokens of a row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from batches import digest_of, packed_examples, split_examples
from chat import Example, Examples, read_examples
from data import BatchShape, PackedSteps, StepBatch, to_device
from errors import (
    ARGUMENT_ERRORS,
    RUN_ERRORS,
    print_error,
    print_rank_error,
    print_run_error,
    printed_once,
)
from finetune_options import SHARDING, check_arguments, parse_arguments
from hf_model import (
    WithLoss,
    build_hf,
    export,
    num_experts,
    read_config,
    read_tokenizer,
    recompute,
)
from launch import check_environment, launch, leave
from metrics import Launched, Moment, memory_gib
from options import MOMENT_DTYPES, compute_dtype, loss_scale, parallel_config
from report import Report, make_run_dir
from resume import KEPT_CHECKPOINTS, checkpoint_dir, resume
from schedule import is_due, lr_at
from torch import Tensor

from moecore import BalanceConfig, FSDPOptions, Meshes, TrainStep, build_meshes, parallelize_moe
from moecore.io import Saver, load_hf
from moecore.train import AdamW

CPU_RANKS = 2
EXPORT = "export"
EXPERT_LOADS_EVERY = 10  # steps between lines with the load of each expert
SAVES_MEMORY = "add --recompute, lower --seq-len"


def train(job: Job) -> None:
    """Train to the last step, with metrics, evaluations and checkpoints on the way."""
    args, running = job.args, deque[Launched]()
    root, config = checkpoint_dir(args), job.model.hf.config.to_dict()
    with (
        Report(args, start=job.start, unit="token")
        if dist.get_rank() == 0
        else nullcontext() as report,
        Saver(root, job.model, job.optimizer, keep=KEPT_CHECKPOINTS, config=config) as saver,
    ):
        for step in range(job.start + 1, args.steps + 1):
            try:
                launched = train_step(job, step)
                if is_due(step, every=args.eval_every, steps=args.steps):
                    launched = replace(launched, eval_loss=evaluate(job))
            except RUN_ERRORS:
                log(job, running, report)
                raise
            running.append(launched)
            saved = is_due(step, every=args.checkpoint_every, steps=args.steps)
            log(job, running, report, keep=0 if saved or step in (job.start + 1, args.steps) else 1)
            saver.check()  # a save that failed in the background ends the run here
            if saved:
                job.owner.check()  # no checkpoint of a step whose tokens got lost
                extra = {"step": step, **job.facts, **job.owner.state_dict()}
                extra["data"] = job.steps.sampler.state_dict()
                saver.save(step, extra, wait=False)
        job.owner.check()  # the last step's


def train_step(job: Job, step: int) -> Launched:
    """Launch one optimizer step; on a GPU nothing of it needs to be done when this returns."""
    args, began = job.args, Moment(job.device)
    for group in job.optimizer.param_groups:
        group["lr"] = lr_at(step, peak=args.lr, steps=args.steps)
    batch = job.steps.next()
    counts = to_device(batch.counts(), job.device)
    dist.all_reduce(counts)  # of all ranks, because each of them has data of its own
    loss = torch.zeros((), device=job.device)
    for parts in micro_batches(job, batch):
        with job.owner.micro_batch():
            part = job.model(counts[0].clamp(min=1), *parts)
            job.owner.scale(part).backward()
        loss += part.detach()
    done = job.owner.finish()  # clips, steps; a nan skips it everywhere
    dist.all_reduce(loss)
    return Launched(
        step=step,
        began=began,
        ended=Moment(job.device),
        loss=loss,
        done=done,
        counts=counts,
        ep=job.meshes.parallel.ep,
        expert_loads=is_due(step, every=EXPERT_LOADS_EVERY, steps=args.steps),
        reader=job.reader,
    )


def micro_batches(job: Job, batch: StepBatch) -> Iterator[list[Tensor]]:
    """Yield the tensors of each micro-batch, on the device."""
    for parts in zip(*batch.tensors(), strict=True):
        if not job.model.packs:  # rows end with the longest of their documents
            tokens_BT, labels_BT, padding_BT, _ = parts
            T = int((~padding_BT).sum(1).max().clamp(min=1))
            parts = (tokens_BT[:, :T], labels_BT[:, :T], padding_BT[:, :T])
        yield [to_device(part, job.device) for part in parts]


@torch.no_grad()
def evaluate(job: Job) -> float | None:
    """Return the mean loss over the answers' tokens of all that is held out; None = nothing is."""
    if not job.held_out:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)
    one = torch.ones((), dtype=torch.int64, device=job.device)
    steps = steps_of(job.held_out, replace(job.shape, grad_accum=1), job.model, job.meshes, None)
    job.model.eval()
    for _ in range(len(steps.sampler)):
        batch = steps.next()
        for parts in micro_batches(job, batch):
            sums[0] += job.model(one, *parts)
        sums[1] += to_device(batch.num_labels, job.device)
    job.model.train()
    dist.all_reduce(sums)
    total, num_tokens = sums.tolist()
    return total / num_tokens


def steps_of(
    examples: list[Example], shape: BatchShape, model: WithLoss, meshes: Meshes, seed: int | None
) -> PackedSteps:
    """Return what this data rank reads, in the order of a seed or that of the examples."""
    where = {"data_rank": meshes.data_rank, "packs": model.packs}
    return packed_examples(examples, shape, seed=seed, **where)


def log(job: Job, running: deque[Launched], report: Report | None, *, keep: int = 0) -> None:
    """Wait for all but the newest `keep` steps and report them. Every rank waits."""
    while len(running) > keep:
        done = running.popleft()
        metrics = done.metrics()
        num_answers, num_tokens, _ = done.read_counts()
        metrics["answer_tokens"] = num_answers
        metrics["tokens_per_second"] = num_tokens / done.began.seconds_until(done.ended)
        metrics |= memory_gib(job.device)
        if report:
            report.log(done.step, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's part of a run that is ready to train.

    Attributes:
        owner: of the optimizer steps.
        start: steps that the loaded checkpoint has done; 0 = none was there.
        facts: what a run that goes on must have in common, see `resume`.
        examples, held_out: of all ranks.
        steps: of the examples.
        data: what the examples came from.
        reader: a GPU's stream for what the host reads, see train.py.
    """

    args: argparse.Namespace
    meshes: Meshes
    device: torch.device
    model: WithLoss
    owner: TrainStep
    optimizer: torch.optim.Optimizer
    examples: list[Example]
    held_out: list[Example]
    data: Examples
    shape: BatchShape
    steps: PackedSteps
    start: int
    facts: dict[str, object]
    reader: torch.cuda.Stream | None


def build_job(args: argparse.Namespace) -> Job:
    """Read the data, put the model on the ranks and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    if args.ranks not in (None, world_size):
        raise ValueError(f"--ranks ({args.ranks}) must equal torchrun's ({world_size}): drop it")
    config = read_config(args.model)
    check_arguments(args, config)
    make_run_dir(args.run_dir)
    data, examples, held_out = read_data(args, vocab_size=config.get_text_config().vocab_size)
    parallel = parallel_config(args, world_size, num_experts=num_experts(config))
    meshes = build_meshes(parallel)
    shape = BatchShape(
        data_ranks=meshes.data_ranks,
        grad_accum=args.grad_accum,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
    )
    model = build_model(args, config, meshes)
    steps = steps_of(examples, shape, model, meshes, args.seed)
    args.steps = args.max_steps or args.epochs * len(steps.sampler)
    torch.manual_seed(args.seed)
    optimizer = AdamW(
        model.parameters(),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        moment_dtype=MOMENT_DTYPES[args.moment_dtype],
    )
    device = torch.device(meshes.device_type)
    facts = {
        "--seed": args.seed,
        "--model": args.model.resolve().name,
        "rows per step": shape.data_ranks * shape.grad_accum * shape.batch_size,
        "--data": f"{len(examples)} examples, digest {digest_of(examples)}",
    }
    owner = TrainStep(
        model,
        optimizer,
        max_norm=1.0,
        num_micro_batches=args.grad_accum,
        loss_scale=loss_scale(args, device),
    )
    return Job(
        args=args,
        meshes=meshes,
        device=device,
        model=model,
        owner=owner,
        optimizer=optimizer,
        examples=examples,
        held_out=held_out,
        data=data,
        shape=shape,
        steps=steps,
        start=resume(args, model, optimizer, facts, owner, steps.sampler),
        facts=facts,
        reader=torch.cuda.Stream() if device.type == "cuda" else None,
    )


def read_data(
    args: argparse.Namespace, *, vocab_size: int
) -> tuple[Examples, list[Example], list[Example]]:
    """Return what the files hold, what is trained on and what is held out."""
    tokenizer = read_tokenizer(args.model)
    data = read_examples(args.data, tokenizer, seq_len=args.seq_len)
    examples, held_out = data.kept, []
    if args.eval_data and args.eval_every:
        where = {"seq_len": args.seq_len, "option": "--eval-data"}
        held_out = read_examples(args.eval_data, tokenizer, **where).kept
    elif args.eval_share and args.eval_every and len(examples) > 1:
        examples, held_out = split_examples(examples, share=args.eval_share, seed=args.seed)
    largest = max(int(example.tokens_T.max()) for example in (*examples, *held_out))
    if largest >= vocab_size:
        raise ValueError(
            f"tokens ({largest}) of --model's tokenizer must be < vocab_size ({vocab_size}) of its "
            "config.json: take both from the same model"
        )
    return data, examples, held_out


def build_model(args: argparse.Namespace, config: object, meshes: Meshes) -> WithLoss:
    """Return this rank's shards of the model, with the weights of the directory."""
    device = torch.device(meshes.device_type)
    model = WithLoss(build_hf(config, args.model))
    if args.recompute:
        recompute(model.hf)
    balance = BalanceConfig(micro_batch_coef=args.aux_loss) if args.aux_loss else None
    parallelize_moe(
        model,
        meshes,
        loss="sum",
        balance=balance,
        precision=args.precision,
        fsdp=FSDPOptions(param_dtype=compute_dtype(args, device)),
    )
    model.to_empty(device=device)
    load_hf(args.model, model.hf)
    model.mask_padding()
    model.choose_loss(device)
    return model


def main() -> int:
    """Start the ranks, or be one of them under torchrun."""
    args = parse_arguments()
    if "RANK" in os.environ:
        leave(run_rank(args))
    gpus = torch.cuda.device_count()
    world_size = args.ranks or gpus or CPU_RANKS
    try:  # what needs no rank is checked before any starts
        if gpus and world_size > gpus:
            raise ValueError(f"--ranks ({world_size}) must be <= the number of GPUs ({gpus})")
        config = read_config(args.model)
        parallel_config(args, world_size, num_experts=num_experts(config)).resolve(world_size)
        check_arguments(args, config)
        make_run_dir(args.run_dir)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    return launch(run_rank, args, world_size)


def run_rank(args: argparse.Namespace) -> int:
    """Build, train, save and export on this rank."""
    try:
        check_environment()
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    rank = int(os.environ["RANK"])
    try:
        job = build_job(args)
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, rank)
    say(describe(job))
    target = args.run_dir / EXPORT
    try:
        if job.start < args.steps:
            before = evaluate(job) if job.start == 0 else None
            if before is not None:
                say(f"eval loss {before:.3f} before the first step")
            with printed_once():
                train(job)
        if job.start < args.steps or not target.exists():
            export(job.model.hf, args.model, target)
    except RUN_ERRORS as error:
        return print_run_error(error, args, saves_memory=SAVES_MEMORY)
    say(f"{target} is ready for from_pretrained")
    dist.barrier()
    return 0


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def describe(job: Job) -> str:
    args, p = job.args, job.meshes.parallel
    if job.start >= args.steps:
        return f"{args.run_dir} is finished at step {job.start}"
    degrees = " ".join(f"{d}={getattr(p, d)}" for d in SHARDING if getattr(p, d) > 1)
    begins = f"from step {job.start}" if job.start else "from its weights"
    ranks = f"{dist.get_world_size()} {job.device.type} ranks ({degrees or 'no sharding'})"
    data = f"{len(job.examples)} examples" + ("" if job.model.packs else ", not packed")
    notes = {
        "held out": len(job.held_out),
        "cut": job.data.num_cut,
        "dropped": job.data.num_dropped,
    }
    data += "".join(f", {count} {what}" for what, count in notes.items() if count)
    return f"fine-tuning {args.model} {begins} to step {args.steps} on {ranks}: {data}"


if __name__ == "__main__":
    sys.exit(main())
