"""A step in torchtitan 0.2.2: stock Qwen3, Qwen3 with moecore's layers, or moecore's decoder.

    torchrun --nproc-per-node 8 -m benchmarks.bench_torchtitan --variant stock --batch-size 2
    torchrun --nproc-per-node 8 -m benchmarks.bench_torchtitan --variant decoder --batch-size 4
    torchrun --nproc-per-node 2 -m benchmarks.bench_torchtitan --variant layers --layers 12

A run has one variant, because torchtitan's Trainer ends the process group. Tokens are random,
routers randomly initialised, EP is over all ranks, blocks are compiled and nothing is recomputed.
tokens/s is the median of torchtitan's values, each over `WINDOW` steps. Install torchtitan with
`pip install '.[titan]' 'torch<2.14'`. CPU ranks need `--tiny`; several CPU ranks only run moecore's
layers, since gloo lacks the sum that FSDP2 uses.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import append_rows, results_path
from moecore.models import DecoderConfig, preset
from moecore.models.size import flops_per_token

VARIANTS = ("stock", "layers", "decoder")
PRESET, FLAVOR = "qwen3-30b-a3b", "30B-A3B"
WINDOW, WARM_UP, TIMED = 4, 8, 12  # steps: of a figure, before the first that counts, that count
TINY = {"dim": 64, "hidden_dim": 64, "moe_inter_dim": 32, "vocab_size": 512}


def main() -> None:
    """Train, and append the row on rank 0."""
    args = _parse_arguments()
    if not torch.cuda.is_available():
        from examples.torchtitan import cpu

        cpu.prepare()
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    register(args)
    with TemporaryDirectory() as folder:
        trainer = Trainer(ConfigManager().parse_args(make_command_line(args, folder)))
        log, found = trainer.metrics_processor.logger.log, []

        def keep(metrics: dict[str, Any], step: int) -> None:
            if step > WARM_UP:
                found.append(metrics)
            log(metrics, step)

        trainer.metrics_processor.logger.log = keep
        trainer.train()
        trainer.close()
    tokens = statistics.median(m["throughput(tps)"] for m in found)
    row = {
        "op": "torchtitan",
        **{name: getattr(args, name) for name in ("variant", "layers", "batch_size", "seq_len")},
        "tokens_per_second_per_gpu": tokens,
        "tflops_per_gpu": tokens * flops_per_token(make_config(args), args.seq_len) / 1e12,
        "peak_gib": max(m["memory/max_active(GiB)"] for m in found),
        "losses": [m["loss_metrics/global_avg_loss"] for m in found],
    }
    if os.environ["RANK"] == "0":
        print(row, flush=True)
        if args.results is not None:
            world = int(os.environ["WORLD_SIZE"])
            append_rows(args.results, "benchmarks.bench_torchtitan", [row], num_gpus=world)


def make_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the config of the model as moecore's decoder."""
    return replace(preset("tiny-qwen3" if args.tiny else PRESET), num_layers=args.layers)


def register(args: argparse.Namespace) -> None:
    """Register the model of a variant in torchtitan by name."""
    from torchtitan.models import qwen3
    from torchtitan.protocols.train_spec import register_train_spec

    from moecore.integrations.torchtitan.v02 import specs

    stock = qwen3.get_train_spec()
    sizes: dict[str, Any] = {"n_layers": args.layers, **(TINY if args.tiny else {})}
    flavor = replace(stock.model_args[FLAVOR], **sizes)
    config = make_config(args)
    if args.variant == "decoder":
        batches = specs.add_labels(partial(make_random_batches, vocab_size=config.vocab_size))
        spec = replace(specs.decoder_spec({FLAVOR: config}), build_dataloader_fn=batches)
    else:
        batches = partial(make_random_batches, vocab_size=flavor.vocab_size)
        stock = replace(stock, model_args={FLAVOR: flavor}, build_dataloader_fn=batches)
        spec = specs.accelerated(stock) if args.variant == "layers" else stock
    spec = replace(spec, build_tokenizer_fn=None, build_validator_fn=None)
    register_train_spec(f"bench_{args.variant}", spec)


def make_command_line(args: argparse.Namespace, folder: str) -> list[str]:
    """Return the arguments of `torchtitan.train`."""
    world, is_gpu = os.environ["WORLD_SIZE"], torch.cuda.is_available()
    settings: dict[str, Any] = {
        "job.dump_folder": folder,
        "model.name": f"bench_{args.variant}",
        "model.flavor": FLAVOR,
        "training.seq_len": args.seq_len,
        "training.local_batch_size": args.batch_size,
        "training.steps": WARM_UP + TIMED,
        "metrics.log_freq": WINDOW,
        "optimizer.lr": 1e-5,
        "parallelism.expert_parallel_degree": world,
        "activation_checkpoint.mode": "none",
    }
    if args.variant != "stock":
        settings["job.custom_config_module"] = "moecore.integrations.torchtitan.options"
        if is_gpu and int(world) > 1:
            settings["moecore.dispatch.name"] = "nvlink"
            settings["moecore.dispatch.nvlink.row_factor"] = 2.0
    found = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [*found, *(["--compile.enable"] if is_gpu else [])]


class RandomBatches:
    """Rows of random tokens, different on each data rank."""

    def __init__(self, dp_rank: int, job_config: Any, vocab_size: int) -> None:
        training = job_config.training
        self._shape = training.local_batch_size, training.seq_len + 1
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._vocab_size = vocab_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            rows = torch.randint(self._vocab_size, self._shape, generator=self._generator)
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return no state: a benchmark does not resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state."""


def make_random_batches(
    *, vocab_size: int, dp_rank: int, job_config: Any, **_: Any
) -> RandomBatches:
    """Return the batches of a data rank, with torchtitan's signature."""
    return RandomBatches(dp_rank, job_config, vocab_size)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--variant", choices=VARIANTS, default="stock")
    add("--layers", type=int, default=48)
    add("--batch-size", type=int, default=2)
    add("--seq-len", type=int, default=4096)
    add("--tiny", action="store_true", help="sizes for CPU ranks")
    add("--results", type=results_path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
