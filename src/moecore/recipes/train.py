r"""Train a Mixture-of-Experts decoder on real text: one command to checkpoints, a plot, a sample.

    moecore train --run-dir runs/demo                CPU: 2 processes; else all GPUs
    moecore train --run-dir runs/mine --data a.txt b.jsonl --preset tiny --steps 1000
    torchrun --nproc-per-node 8 -m moecore train --run-dir runs/eight --ep 4 --etp 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m moecore train --run-dir SHARED/two              the same command on both hosts

Eight GPUs of one host at full speed, a router that learns from scratch with even loads from the
first step; docs/performance.md has what it reaches:

    moecore train --run-dir runs/qwen3 --preset qwen3-30b-a3b --compile --gather-once \
        --seq-len 4096 --batch-size 4 --lr 3e-4 --schedule-steps 40000 --dispatcher nvlink \
        --row-factor 1.5 --quantile --bias-per-micro-batch

With --pp N a rank has a part of the layers, cut as --layout says: docs/pipeline.md. With --cp N so
many ranks share each row of tokens: docs/context_parallel.md.

With --precision blockwise the products of experts and projections are in FP8, with --dtype float16
losses are scaled: docs/precision.md.

Started again with the same arguments, a run continues from its last whole checkpoint, on CPU ranks
with the bits of a run that never stopped. `build_job` puts the model onto the ranks, and loop.py
has the steps, which all recipes share. The text is bytes: the Python standard library's own
sources unless --data is given. Its documents (files, and each text of a jsonl file) are packed into
rows, without attention across them: docs/sequences.md. The loss of a step is the mean over the
labels of all ranks and micro-batches.

Each step's metrics go into metrics.jsonl, into TensorBoard where it is installed, and with
--wandb PROJECT into Weights & Biases: loss, what `StepResult.to_dict` has (docs/balancing.md),
tokens/s without padding, and memory; and `mfu`, the share of the devices' dense peak that forward
and backward of the documents use (6 FLOPs per active parameter, and attention), where the peak is
known: see --peak-tflops. With --eval-every N the end of the text is held out, and `eval_loss` is
the loss on it.

Legend: A micro-batches of a step, B rows, T tokens of a row, N bytes of text.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import CloneOptions, DispatchOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.precision import Precision
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.mesh import Meshes, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.recipes.checks import check_arguments, check_memory, check_rows
from moecore.recipes.data import (
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
from moecore.recipes.loop import batch_shape, begins, ranks_of, run, say, start
from moecore.recipes.metrics import Metrics
from moecore.recipes.native import DecoderJob, dispatcher_of
from moecore.recipes.optimizer import optimizer_of, recipe_tables
from moecore.recipes.options import (
    compute_dtype,
    memory_options,
    model_config,
    moe_of,
    nvlink_options,
    parallel_config,
    parse_arguments,
    pipeline_config,
    prompt_bytes,
)
from moecore.recipes.report import make_run_dir

EVAL_BATCHES = 8  # of each data rank


@dataclass(kw_only=True)
class Pretraining(DecoderJob):
    """A decoder on text.

    Attributes:
        model: a `Decoder`.
        corpus: to train on.
        held_out_N: uint8 bytes of the end of the text, with --eval-every.
    """

    batches: PackedSteps | None
    corpus: Corpus
    held_out_N: Tensor | None

    unit = "byte"
    finish_note = ": only sampling"

    def begin(self) -> None:
        """Print what is trained."""
        args, ranks = self.args, ranks_of(self, dispatcher_of(self.model))
        text = f"{self.corpus.text_N.numel() / 1e6:.1f} MB of text"
        data = "random tokens" if args.tokens == "random" else text
        begin = begins(self, "from scratch")
        say(f"training {args.preset} {begin} to step {args.steps} on {ranks}, {data}")

    def next_batch(self, step: int) -> StepBatch:
        """Return the batch of this data rank, of text or of random tokens."""
        if self.batches is not None:
            return self.batches.next()
        return random_step(
            self.model.config.vocab_size,
            self.shape,
            seed=self.args.seed,
            step=step,
            data_rank=self.meshes.data_rank,
        )

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return the loss on held-out text, the same windows every time. Waits for the device."""
        if self.held_out_N is None:
            return {}
        shape = replace(self.shape, grad_accum=EVAL_BATCHES)
        names = "tokens_BT", "labels_BT"
        batches = read_batches(
            self.held_out_N,
            shape,
            seed=self.args.seed,
            step="eval",
            data_rank=self.meshes.data_rank,
        )
        on_device = ((to_device(part, self.device) for part in batch) for batch in batches)
        self.model.eval()
        inputs = [dict(zip(names, batch, strict=True)) for batch in on_device]
        total = self.owner.losses(inputs).sum()
        self.model.train()
        dist.all_reduce(total)
        return {"eval_loss": float(total) / (EVAL_BATCHES * dist.get_world_size())}

    def finish(self) -> None:
        """Print a sample of the model."""
        if self.args.sample_bytes:
            steps, text = max(self.start, self.args.steps), sample(self)
            say(f"--- sample after {steps} steps ---\n{text}")


def build_job(args: argparse.Namespace) -> Pretraining:
    """Put the model on the ranks and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    config = check(args, world_size)
    make_run_dir(args.run_dir)
    corpus, held_out_N = read_texts(args)
    meshes = build_meshes(parallel_config(args, world_size, num_experts=moe_of(config).num_experts))
    check_memory(args, config, torch.device(meshes.device_type))
    model = build_model(args, config, meshes)
    shape, batches = batch_shape(args, meshes), None
    if args.tokens == "text":
        batches = packed_corpus(corpus, shape, seed=args.seed, data_rank=meshes.data_rank)
    return Pretraining(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=optimizer_of(args).build(model),
        shape=shape,
        config=config,
        facts={"--seed": args.seed},  # the data position depends on it
        tables=recipe_tables(args),
        batches=batches,
        corpus=corpus,
        held_out_N=held_out_N,
    )


def read_texts(args: argparse.Namespace) -> tuple[Corpus, Tensor | None]:
    """Return the text to train on, and that to evaluate on; None = --eval-every is 0."""
    corpus = read_corpus(args.data, seq_len=args.seq_len)
    return hold_out(corpus, seq_len=args.seq_len) if args.eval_every else (corpus, None)


def precision_of(args: argparse.Namespace) -> Precision | None:
    """Return which products are in FP8."""
    precision = Precision.of(args.precision)
    if not args.fp8_head:
        return precision
    if precision is None:
        raise ValueError("--fp8-head must go with --precision blockwise or auto: add one")
    return replace(precision, fp8_head=True)


def build_model(args: argparse.Namespace, config: DecoderConfig, meshes: Meshes) -> Decoder:
    """Return this rank's shards of the model: the same weights on every layout."""
    device = torch.device(meshes.device_type)
    model = Decoder(config, device="meta")
    parallelize_moe(
        model,
        meshes,
        dispatch=DispatchOptions(
            name=args.dispatcher,
            nvlink=nvlink_options(args),
            fp8=args.fp8_dispatch,
            clones=CloneOptions() if args.clones else None,
        ),
        expert_backend=args.experts,
        memory=memory_options(args),
        dense=DenseOptions(compile=args.compile, graph=args.graph_dense),
        loss="sum",
        precision=precision_of(args),
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


def check(args: argparse.Namespace, world_size: int) -> DecoderConfig:
    """Return the config of the model; raise ValueError for arguments that do not fit together."""
    config = model_config(args)
    parallel = parallel_config(args, world_size, num_experts=moe_of(config).num_experts)
    check_rows(args, parallel.resolve(world_size))
    check_arguments(args, config)
    return config


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    args = parse_arguments(words)

    def check_all(world_size: int) -> None:
        config = check(args, world_size)
        if not torch.cuda.is_available():
            check_memory(args, config, torch.device("cpu"))
        read_texts(args)

    return start(run_rank, args, check_all)


def run_rank(args: argparse.Namespace) -> int:
    """Build, train, save, plot and sample on this rank."""
    return run(args, build_job)


def sample(job: Pretraining) -> str:
    """Return the prompt and what the model makes of it. Every rank draws the same bytes."""
    prompt_BT = torch.tensor([list(prompt_bytes(job.args))], device=job.device)
    generator = torch.Generator(job.device).manual_seed(job.args.seed)
    num_bytes = job.args.sample_bytes
    out_BT = job.model.generate(prompt_BT, num_bytes, temperature=0.8, generator=generator)
    return bytes(min(token, 255) for token in out_BT[0].tolist()).decode(errors="replace")
