r"""Train a Mixture-of-Experts decoder on real text: one command to checkpoints, a plot, a sample.

    python examples/train.py --run-dir runs/demo                CPU: 2 processes; else all GPUs
    python examples/train.py --run-dir runs/mine --data a.txt b.jsonl --preset tiny --steps 1000
    torchrun --nproc-per-node 8 examples/train.py --run-dir runs/eight --ep 4 --etp 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/train.py --run-dir SHARED/two              the same command on both hosts

Eight GPUs of one host at full speed, a router that learns from scratch with even loads from the
first step; docs/performance.md has what it reaches:

    python examples/train.py --run-dir runs/qwen3 --preset qwen3-30b-a3b --compile --gather-once \
        --seq-len 4096 --batch-size 4 --lr 3e-4 --schedule-steps 40000 --dispatcher nvlink \
        --row-factor 1.5 --quantile --bias-per-micro-batch

With --pp N a rank has a part of the layers, cut as --layout says: docs/pipeline.md.

With --precision blockwise the products of experts and projections are in FP8, with --dtype float16
losses are scaled: docs/precision.md.

Started again with the same arguments, a run continues from its last whole checkpoint, bit for bit
as if it had never stopped. `train` is the loop, `train_step` one optimizer step, `build_job` puts
the model onto the ranks. The text is bytes: the Python standard library's own sources unless
--data is given. Its documents (files, and each text of a jsonl file) are packed into rows, without
attention across them: docs/sequences.md. The loss of a step is the mean over the labels of all
ranks and micro-batches.

Each step's metrics go into metrics.jsonl, into TensorBoard where it is installed, and with
--wandb PROJECT into Weights & Biases: loss, what `StepResult.to_dict` has (docs/balancing.md),
tokens/s without padding, and memory; and `mfu`, the share of the devices' dense peak that forward
and backward of the documents use (6 FLOPs per active parameter, and attention), where the peak is
known: see --peak-tflops. With --eval-every N the end of the text is held out, and `eval_loss` is
the loss on it.

Note "a step ahead": a GPU stays busy over the end of a step when the next one is launched already.
So the host waits for nothing in a step, and reads a step's metrics when it has launched the one
after it, or before a checkpoint. An overflow may be noticed a step later for that; it never gets
into a checkpoint.

Legend: A micro-batches of a step, B rows, T tokens of a row, N bytes of text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from data import (
    BatchShape,
    Corpus,
    PackedSteps,
    StepBatch,
    hold_out,
    packed_corpus,
    random_step,
    read_batches,
    read_corpus,
    to_device,
)
from errors import (
    ARGUMENT_ERRORS,
    RUN_ERRORS,
    print_error,
    print_rank_error,
    print_run_error,
    printed_once,
)
from launch import check_environment, launch, leave
from metrics import Launched, Moment, memory_gib, peak_tflops
from options import (
    DEGREES,
    MOMENT_DTYPES,
    check_arguments,
    check_memory,
    compute_dtype,
    loss_scale,
    memory_options,
    model_config,
    nvlink_options,
    parallel_config,
    parse_arguments,
    pipeline_config,
    prompt_bytes,
)
from report import Report, make_run_dir
from resume import KEPT_CHECKPOINTS, checkpoint_dir, resume
from schedule import is_due, lr_at
from torch import Tensor

from moecore import (
    CloneOptions,
    FSDPOptions,
    Meshes,
    MoELayer,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.io import Saver
from moecore.models import Decoder, DecoderConfig, flops_per_token
from moecore.train import AdamW, GraphedForwardBackward, Muon, assign_matrices

CPU_RANKS = 2
EVAL_BATCHES = 8  # of each data rank
ForwardBackward = Callable[..., Tensor]


def train(job: Job) -> None:
    """Train to the last step, with metrics and checkpoints on the way."""
    args = job.args
    root, config = checkpoint_dir(args), job.model.config
    running: deque[Launched] = deque()
    with (
        Report(args, start=job.start) if dist.get_rank() == 0 else nullcontext() as report,
        Saver(root, job.model, job.optimizers, keep=KEPT_CHECKPOINTS, config=config) as saver,
    ):
        for step in range(job.start + 1, args.steps + 1):
            try:
                running.append(train_step(job, step))
                if is_due(step, every=args.eval_every, steps=args.steps):
                    running[-1] = replace(running[-1], eval_loss=evaluate(job))
            except RUN_ERRORS:
                log(job, running, report)
                raise
            saved = is_due(step, every=args.checkpoint_every, steps=args.steps)
            log(job, running, report, keep=0 if saved or step == args.steps else 1)
            saver.check()  # a save that failed in the background ends the run here
            if saved:
                job.owner.check()  # no checkpoint of a step whose tokens got lost
                extra = {"step": step, **facts_of(args), **job.owner.state_dict()}
                if job.documents is not None:
                    extra["data"] = job.documents.sampler.state_dict()
                saver.save(step, extra, wait=False)
        job.owner.check()  # the last step's


def train_step(job: Job, step: int) -> Launched:
    """Launch one optimizer step; on a GPU nothing of it needs to be done when this returns."""
    args, began = job.args, Moment(job.device)
    for group in (group for one in job.optimizers for group in one.param_groups):
        group["lr"] = lr_at(step, peak=args.lr, steps=args.schedule_steps or args.steps)
    batch = batch_of(job, step)
    copies = dist.get_world_size() // job.meshes.data_ranks  # tp ranks have equal data
    counts = to_device(batch.counts(), job.device)
    dist.all_reduce(counts)
    counts //= copies
    tensors = (to_device(tensor, job.device) for tensor in batch.tensors())
    loss = job.forward_backward(counts[0].clamp(min=1), *tensors)
    done = job.owner.finish()  # clips, steps, moves the expert biases; a nan skips it everywhere
    dist.all_reduce(loss)
    loss = loss / copies
    return Launched(
        step=step,
        began=began,
        ended=Moment(job.device),
        loss=loss,
        done=done,
        counts=counts,
        ep=job.meshes.parallel.ep,
        expert_loads=is_due(step, every=args.expert_loads_every, steps=args.steps),
        reader=job.reader,
    )


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Return the loss on held-out text, the same windows every time. Waits for the device."""
    shape = replace(job.shape, grad_accum=EVAL_BATCHES)
    where = {"seed": job.args.seed, "step": "eval", "data_rank": job.meshes.data_rank}
    names = "tokens_BT", "labels_BT"
    batches = read_batches(job.held_out_N, shape, **where)
    on_device = ((to_device(part, job.device) for part in batch) for batch in batches)
    job.model.eval()
    total = job.owner.losses([dict(zip(names, batch, strict=True)) for batch in on_device]).sum()
    job.model.train()
    dist.all_reduce(total)
    return float(total) / (EVAL_BATCHES * dist.get_world_size())


def make_forward_backward(
    model: Decoder, owner: TrainStep, args: argparse.Namespace
) -> ForwardBackward:
    """Return what runs a step's micro-batches: its part of the mean loss over all labels.

    It takes the number of labels of all ranks and the tensors of a `StepBatch`.
    """

    def forward_backward(num_labels: Tensor, *tensors: Tensor) -> Tensor:
        names = ["tokens_BT", "labels_BT"]
        of_all = {"num_tokens": num_labels}
        if len(tensors) > len(names):
            names += ["padding_mask_BT", "cu_seqlens"]
            of_all["max_seqlen"] = args.seq_len
        rows = zip(*tensors, strict=True)
        return owner.forward_backward(
            [dict(zip(names, row, strict=True)) | of_all for row in rows]
        ).sum()

    return GraphedForwardBackward(forward_backward, model) if args.cuda_graph else forward_backward


def batch_of(job: Job, step: int) -> StepBatch:
    """Return what this rank reads in the next step."""
    if job.documents is not None:
        return job.documents.next()
    where = {"seed": job.args.seed, "step": step, "data_rank": job.meshes.data_rank}
    return random_step(job.model.config.vocab_size, job.shape, **where)


def log(job: Job, running: deque[Launched], report: Report | None, *, keep: int = 0) -> None:
    """Wait for all but the newest `keep` steps and report them. Every rank waits."""
    while len(running) > keep:
        done = running.popleft()
        metrics = done.metrics()
        _, tokens, pairs = done.read_counts()
        seconds = done.began.seconds_until(done.ended)
        metrics |= {"tokens_per_second": tokens / seconds, **memory_gib(job.device)}
        if job.peak_tflops:
            peak = dist.get_world_size() * job.peak_tflops * 1e12
            metrics["mfu"] = flops_of(job.model.config, tokens, pairs) / seconds / peak
        if report:
            report.log(done.step, metrics)


def flops_of(config: DecoderConfig, tokens: int, pairs: int) -> float:
    """Return the FLOPs of forward and backward of documents: see `StepBatch.counts`."""
    linear = flops_per_token(config, 0)
    return tokens * linear + pairs * (flops_per_token(config, 1) - linear)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's part of a run that is ready to train.

    Attributes:
        owner: of the optimizer steps.
        forward_backward: see `make_forward_backward`.
        start: steps that the loaded checkpoint has done; 0 = none was there.
        corpus: to train on.
        documents: of the corpus, as steps read them; None = --tokens random.
        held_out_N: uint8 bytes of the end of the text, with --eval-every.
        reader: a GPU's stream for what the host reads; on that of the steps it would wait for all
            that has been launched. None on other devices.
        peak_tflops: of one device; None = no MFU.
    """

    args: argparse.Namespace
    meshes: Meshes
    device: torch.device
    model: Decoder
    owner: TrainStep
    forward_backward: ForwardBackward
    optimizers: list[torch.optim.Optimizer]
    corpus: Corpus
    documents: PackedSteps | None
    held_out_N: Tensor | None
    shape: BatchShape
    start: int
    reader: torch.cuda.Stream | None
    peak_tflops: float | None


def build_job(args: argparse.Namespace) -> Job:
    """Put the model on the ranks and load the last checkpoint, if there is one."""
    config = model_config(args)
    world_size = int(os.environ["WORLD_SIZE"])
    if args.ranks not in (None, world_size):
        raise ValueError(f"--ranks ({args.ranks}) must equal torchrun's ({world_size}): drop it")
    check_arguments(args, config)
    make_run_dir(args.run_dir)
    corpus, held_out_N = read_texts(args)
    meshes = build_meshes(parallel_config(args, world_size, num_experts=config.moe.num_experts))
    device = torch.device(meshes.device_type)
    check_memory(args, config, device)
    model = build_model(args, config, meshes)
    torch.manual_seed(args.seed)
    optimizers = make_optimizers(model, args)
    owner = TrainStep(
        model,
        optimizers,
        max_norm=1.0,
        num_micro_batches=args.grad_accum,
        loss_scale=loss_scale(args, device),
    )
    shape = BatchShape(
        data_ranks=meshes.data_ranks,
        grad_accum=args.grad_accum,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
    )
    documents = None
    if args.tokens == "text":
        where = {"seed": args.seed, "data_rank": meshes.data_rank}
        documents = packed_corpus(corpus, shape, **where)
    sampler = documents.sampler if documents else None
    return Job(
        args=args,
        meshes=meshes,
        device=device,
        model=model,
        owner=owner,
        forward_backward=make_forward_backward(model, owner, args),
        optimizers=optimizers,
        corpus=corpus,
        documents=documents,
        held_out_N=held_out_N,
        shape=shape,
        start=resume(args, model, optimizers, facts_of(args), owner, sampler),
        reader=torch.cuda.Stream() if device.type == "cuda" else None,
        peak_tflops=args.peak_tflops or peak_tflops(device, compute_dtype(args, device)),
    )


def make_optimizers(model: Decoder, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return AdamW, behind Muon for the matrices with --optimizer muon."""
    assignment = assign_matrices(model) if args.optimizer else None
    params = assignment.others if assignment else list(model.parameters())
    moments = MOMENT_DTYPES[args.moment_dtype]
    adamw = AdamW(params, betas=(0.9, 0.95), weight_decay=0.1, moment_dtype=moments)
    return [Muon(assignment), adamw] if assignment else [adamw]


def facts_of(args: argparse.Namespace) -> dict[str, object]:
    """Return what a run that goes on must have in common: the data position depends on it."""
    return {"--seed": args.seed}


def read_texts(args: argparse.Namespace) -> tuple[Corpus, Tensor | None]:
    """Return the text to train on, and that to evaluate on; None = --eval-every is 0."""
    corpus = read_corpus(args.data, seq_len=args.seq_len)
    return hold_out(corpus, seq_len=args.seq_len) if args.eval_every else (corpus, None)


def build_model(args: argparse.Namespace, config: DecoderConfig, meshes: Meshes) -> Decoder:
    """Return this rank's shards of the model: the same weights on every layout."""
    device = torch.device(meshes.device_type)
    model = Decoder(config, device="meta")
    parallelize_moe(
        model,
        meshes,
        dispatcher=args.dispatcher,
        nvlink=nvlink_options(args),
        expert_backend=args.experts,
        memory=memory_options(args),
        clones=CloneOptions() if args.clones else None,
        compile_dense=args.compile,
        graph_dense=args.graph_dense,
        loss="sum",
        precision=args.precision,
        pipeline=pipeline_config(args),
        fsdp=FSDPOptions(
            param_dtype=compute_dtype(args, device),
            dense_strategy="optim" if args.gather_once else "optim_grads_params",
            blocks_per_unit=args.blocks_per_unit,
            experts_strategy="optim" if args.keep_experts else "optim_grads_params",
            fp8_param_gather=args.fp8_gather,
        ),
    )
    model.to_empty(device=device)
    model.init_weights(args.seed)
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
        config = model_config(args)
        parallel_config(args, world_size, num_experts=config.moe.num_experts).resolve(world_size)
        check_arguments(args, config)
        if not gpus:
            check_memory(args, config, torch.device("cpu"))
        make_run_dir(args.run_dir)
        read_texts(args)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    return launch(run_rank, args, world_size)


def run_rank(args: argparse.Namespace) -> int:
    """Build, train, save, plot and sample on this rank."""
    try:
        check_environment()
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    rank = int(os.environ["RANK"])
    try:
        job = build_job(args)
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, rank)
    if rank == 0:
        print(describe(job), flush=True)
    try:
        if job.start < args.steps:
            with printed_once():
                train(job)
        text = sample(job) if args.sample_bytes else ""
    except RUN_ERRORS as error:
        return print_run_error(error, args)
    if text and rank == 0:
        print(f"--- sample after {max(job.start, args.steps)} steps ---\n{text}", flush=True)
    dist.barrier()
    return 0


def describe(job: Job) -> str:
    args, p = job.args, job.meshes.parallel
    if job.start >= args.steps:
        return f"{args.run_dir} is finished at step {job.start}: only sampling"
    degrees = " ".join(f"{d}={getattr(p, d)}" for d in DEGREES if getattr(p, d) > 1)
    begins = f"from step {job.start}" if job.start else "from scratch"
    how = f"{degrees or 'no sharding'}, {dispatcher_of(job.model)}"
    ranks = f"{dist.get_world_size()} {job.device.type} ranks ({how})"
    corpus = f"{job.corpus.text_N.numel() / 1e6:.1f} MB of text"
    if args.tokens == "random":
        corpus = "random tokens"
    return f"training {args.preset} {begins} to step {args.steps} on {ranks}, {corpus}"


def dispatcher_of(model: Decoder) -> str:
    """Return the dispatcher in use: "auto" has chosen by now."""
    used = {type(m.dispatcher).__name__ for m in model.modules() if isinstance(m, MoELayer)}
    return "".join(used).removesuffix("Dispatcher").lower() or "dense"


def sample(job: Job) -> str:
    """Return the prompt and what the model makes of it. Every rank draws the same bytes."""
    prompt_BT = torch.tensor([list(prompt_bytes(job.args))], device=job.device)
    generator = torch.Generator(job.device).manual_seed(job.args.seed)
    num_bytes = job.args.sample_bytes
    out_BT = job.model.generate(prompt_BT, num_bytes, temperature=0.8, generator=generator)
    return bytes(min(token, 255) for token in out_BT[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
