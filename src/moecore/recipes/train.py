r"""Train a Mixture-of-Experts decoder on text: checkpoints, a plot and a sample by one command.

    moecore train --run-dir runs/demo                two processes on a CPU, or all GPUs
    moecore train --run-dir runs/mine --data a.txt b.jsonl --preset tiny --steps 1000
    torchrun --nproc-per-node 8 -m moecore train --run-dir runs/eight --ep 4 --etp 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m moecore train --run-dir SHARED/two              the same command on both hosts

Eight GPUs of one host at full speed. The router learns from scratch with even loads from the first
step. docs/performance.md has the speed of this command:

    moecore train --run-dir runs/qwen3 --preset qwen3-30b-a3b --compile-dense \
        --dense-strategy optim --experts-strategy optim_grads_params --seq-len 4096 \
        --batch-size 4 --lr 3e-4 --schedule-steps 40000 --dispatcher nvlink --row-factor 1.5 \
        --expert-bias --score-function sigmoid --bias-update quantile --bias-update-rate 1 \
        --bias-per-micro-batch

With --pp N each rank has some of the layers, see docs/pipeline.md. With --cp N each row of tokens
is split over N ranks, see docs/context_parallel.md. --precision blockwise computes the products of
experts and projections in FP8, and --dtype float16 scales the loss, see docs/precision.md.

The same command continues a run from its last complete checkpoint. On CPU ranks the continued run
has the bits of an uninterrupted run. `build_job` shards the model, and loop.py has the steps.
The text is bytes: the sources of Python's standard library unless --data is given. Documents are
files, and each text of a jsonl file. They are packed into rows without attention across documents
(docs/sequences.md). The loss of a step is the mean over the labels of all ranks and micro-batches.

Metrics are in metrics.jsonl, in TensorBoard if it is installed, and with --wandb PROJECT in Weights
& Biases. They have the loss, the values of `StepResult.to_dict` (docs/balancing.md), tokens/s
without padding, and memory. `mfu` is the share of the dense peak of the devices that forward and
backward use: 6 FLOPs per active parameter, and attention. It needs a known GPU or --peak-tflops.
With --eval-every N the end of the text is not trained, and `eval_loss` is the loss on it.

Legend: A micro-batches of a step, B rows, T tokens of a row, N bytes of text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import Count, CountOrZero
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.recipes.corpus_training import DecoderJob, dispatcher_of
from moecore.recipes.data import (
    VOCAB_SIZE,
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
from moecore.recipes.decoder_config import DecoderRunConfig
from moecore.recipes.dry_run import planned_run, print_dry_run
from moecore.recipes.errors import check_graph, check_memory, check_rows
from moecore.recipes.loop import (
    batch_shape,
    begins,
    ranks_of,
    ranks_to_start,
    run,
    run_command,
    say,
)
from moecore.recipes.metrics import Metrics
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import moe_of, parallelize
from moecore.recipes.parser import parse
from moecore.recipes.report import make_run_dir

EVAL_BATCHES = 8  # of each data rank


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DecoderRunConfig):
    """Train a Mixture-of-Experts decoder on text, byte by byte.

    Attributes:
        data: text files, or .jsonl files with "text"; none = Python's standard library.
        tokens: "random" draws tokens of the vocabulary in place of text.
        prompt: the text that the sample after the last step continues.
        sample_bytes: bytes of the sample; 0 = no sample.
    """

    data: tuple[Path, ...] = ()
    tokens: Literal["text", "random"] = "text"
    prompt: str = "def "
    sample_bytes: CountOrZero = 200
    run_dir: Path = Path("runs/demo")
    batch_size: Count = 8
    seq_len: Count = 256
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)

    def prompt_bytes(self) -> bytes:
        """Return the prompt, which need not be UTF-8."""
        return self.prompt.encode(errors="surrogateescape")


@dataclass(kw_only=True)
class ByteTraining(DecoderJob):
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


def build_job(args: TrainConfig) -> ByteTraining:
    """Shard the model and load the last checkpoint, if there is one."""
    world_size = int(os.environ["WORLD_SIZE"])
    config, parallel = check(args, world_size)
    make_run_dir(args.run_dir)
    corpus, held_out_N = read_texts(args)
    meshes = build_meshes(parallel)
    check_memory(args, config, torch.device(meshes.device_type))
    model = build_model(args, config, meshes)
    shape = batch_shape(args, meshes.parallel)
    return ByteTraining(
        args=args,
        meshes=meshes,
        model=model,
        optimizers=args.optimizer.build(model),
        shape=shape,
        config=config,
        facts={"--seed": args.seed},  # the data position depends on it
        batches=text_steps(args, corpus, shape, meshes.data_rank),
        corpus=corpus,
        held_out_N=held_out_N,
    )


def read_texts(args: TrainConfig) -> tuple[Corpus, Tensor | None]:
    """Return the text to train on, and the text to evaluate on; None = --eval-every is 0."""
    corpus = read_corpus(args.data, seq_len=args.seq_len)
    return hold_out(corpus, seq_len=args.seq_len) if args.eval_every else (corpus, None)


def text_steps(
    args: TrainConfig, corpus: Corpus, shape: BatchShape, data_rank: int
) -> PackedSteps | None:
    """Return the steps of a data rank; None = tokens are random."""
    if args.tokens == "random":
        return None
    return packed_corpus(corpus, shape, seed=args.seed, data_rank=data_rank)


def build_model(args: TrainConfig, config: DecoderConfig, meshes: Meshes) -> Decoder:
    """Return this rank's shards of the model. The weights are the same for every layout."""
    model = Decoder(config, device="meta")
    parallelize(model, meshes, args)
    model.to_empty(device=torch.device(meshes.device_type))
    model.init_weights(args.seed)
    return model


def check(args: TrainConfig, world_size: int) -> tuple[DecoderConfig, ParallelConfig]:
    """Return the config of the model and the degrees.

    Raises:
        ValueError: for options that do not fit together.
    """
    config, name = args.model_config(), f"--preset {args.preset}"
    parallel = args.parallel_config(world_size, num_experts=moe_of(config).num_experts)
    args.check_sharding()
    check_rows(args, parallel)
    check_graph(args)
    args.logging.check()
    prompt, length, pp = args.prompt_bytes(), config.max_seq_len, args.degree("pp")
    if args.tokens == "text" and config.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"--preset ({args.preset}) must have vocab_size ({config.vocab_size}) >= {VOCAB_SIZE}, "
            "because tokens are bytes: use tiny, or --tokens random"
        )
    if args.seq_len > length:
        raise ValueError(f"--seq-len ({args.seq_len}) must be <= max_seq_len ({length}) of {name}")
    if not prompt:
        raise ValueError("--prompt must not be empty: give a character")
    if args.sample_bytes and len(prompt) + args.sample_bytes > length:
        raise ValueError(
            f"--sample-bytes ({args.sample_bytes}) and the {len(prompt)} of --prompt must be "
            f"<= max_seq_len ({length}) of {name} together"
        )
    if args.sample_bytes and max(prompt) >= config.vocab_size:
        raise ValueError(
            f"--prompt ({args.prompt!r}) must have bytes < vocab_size ({config.vocab_size}) of "
            f"{name}"
        )
    if args.eval_every and args.tokens == "random":
        raise ValueError(
            f"--eval-every ({args.eval_every}) must be 0 with --tokens random, which has no text "
            "to hold out: drop it"
        )
    if args.sample_bytes and pp > 1:
        raise ValueError(
            f"--sample-bytes ({args.sample_bytes}) must be 0 with --pp {pp}: sample from the "
            "checkpoint, on ranks without stages"
        )
    return config, parallel


def parse_arguments(words: Sequence[str] | None = None) -> TrainConfig:
    """Return the options of a run; None = sys.argv."""
    return parse(TrainConfig, words, prog="moecore train")


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    return run_command(parse_arguments, words, run_rank=run_rank, check=check_all, dry_run=dry_run)


def check_all(args: TrainConfig, world_size: int) -> None:
    """Raise ValueError for options or text that the ranks would refuse."""
    config, _ = check(args, world_size)
    if not torch.cuda.is_available():
        check_memory(args, config, torch.device("cpu"))
    read_texts(args)


def dry_run(args: TrainConfig) -> int:
    """Print options, plan and first batch; return 0 if the plan fits the GPU, else 1."""
    world_size = args.gpus or ranks_to_start(args)
    config, parallel = check(args, world_size)

    def read_batch() -> StepBatch:
        shape = batch_shape(args, parallel)
        steps = text_steps(args, read_texts(args)[0], shape, 0)
        if steps is not None:
            return steps.next()
        return random_step(config.vocab_size, shape, seed=args.seed, step=1, data_rank=0)

    training_run = planned_run(args, config, parallel, world_size)
    return print_dry_run(args.resolve(), training_run, read_batch, decode)


def decode(tokens: Sequence[int]) -> str:
    """Return the text of bytes."""
    return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def run_rank(args: TrainConfig) -> int:
    """Build, train, save, plot and sample on this rank."""
    return run(args, build_job)


def sample(job: ByteTraining) -> str:
    """Return the prompt and what the model makes of it. Every rank draws the same bytes."""
    prompt_BT = torch.tensor([list(job.args.prompt_bytes())], device=job.device)
    generator = torch.Generator(job.device).manual_seed(job.args.seed)
    num_bytes = job.args.sample_bytes
    out_BT = job.model.generate(prompt_BT, num_bytes, temperature=0.8, generator=generator)
    return decode(out_BT[0].tolist())
