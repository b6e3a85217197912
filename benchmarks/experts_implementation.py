"""A transformers Qwen3-MoE model in a stock loop on one GPU, by `experts_implementation`.

    python -m benchmarks.experts_implementation --preset qwen3-30b-a3b --layers 4

One model with random weights in bf16 (fp32 on CPUs) trains on random tokens like `Trainer`: forward
with labels, backward, clipping, fused AdamW. Only `set_experts_implementation` differs between
steps. The implementations alternate, so they share weights, routing and clocks. A step's time is
between two events around it; the median of the timed steps counts, and the largest peak of memory.
An implementation that cannot run is printed with its error and left out.

Before the steps, the first experts module computes output and gradients of the same tokens with
each implementation. Their errors against "eager" in fp32 must be at most 1.5 times those of the
first implementation that runs. `--results` appends a row per implementation and batch size.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench_hf import MAX_NORM
from benchmarks.hf_configs import make_hf_config
from benchmarks.records import append_rows, results_path
from moecore.integrations.transformers import register_experts
from moecore.recipes.metrics import Moment

Row = dict[str, Any]
IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "sonicmoe", "moecore"]
ERROR_FACTOR = 1.5  # of errors beside those of the first implementation
CHECKED_TOKENS = 512


def main() -> int:
    """Check gradients, time all implementations, and report."""
    args = parse_arguments()
    register_experts()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(args, device)
    names = check_gradients(model, args.implementations, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    rows = []
    for batch_size in args.batch_sizes:
        for row in time_steps(model, optimizer, names, batch_size, args):
            rows.append(row)
            print(format_row(row), flush=True)
    if args.results is not None:
        append_rows(args.results, "benchmarks.experts_implementation", rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b", help="a Qwen3-MoE one, whose sizes the model has")
    add("--layers", type=int, default=4)
    add("--batch-sizes", type=int, nargs="+", default=[1, 4])
    add("--seq-len", type=int, default=4096)
    add("--warm-up", type=int, default=3, help="steps of each that do not count")
    add("--timed", type=int, default=10, help="steps of each that do")
    add("--lr", type=float, default=1e-5)
    add("--implementations", nargs="+", default=IMPLEMENTATIONS, help='"eager" is slow')
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def build(args: argparse.Namespace, device: torch.device) -> Any:
    """Return the model with transformers' initial weights, in training mode."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            make_hf_config(args.preset, args.layers), dtype=dtype
        )
    return model.train()


def check_gradients(model: Any, names: list[str], device: torch.device) -> list[str]:
    """Return the implementations that run; raise ValueError for a too large error."""
    experts = model.model.layers[0].mlp.experts
    reference = compute_experts(copy.deepcopy(experts).float(), "eager", experts.down_proj.dtype)
    limits: dict[str, float] = {}
    runnable = []
    for name in names:
        try:
            numbers = compute_experts(experts, name, experts.down_proj.dtype)
        except Exception as error:
            if name == "moecore":
                raise
            print(f"{name:<12}left out: {get_first_line(error)}", flush=True)
            continue
        errors = {
            key: float((numbers[key].float() - right).norm() / right.norm())
            for key, right in reference.items()
        }
        limits = limits or {key: ERROR_FACTOR * error + 1e-5 for key, error in errors.items()}
        wrong = {key: error for key, error in errors.items() if not error <= limits[key]}
        if wrong:
            raise ValueError(
                f"errors of {name} ({wrong}) must be at most {limits}: see its kernels"
            )
        print(f"{name:<12}error of gradients {max(errors.values()):.1e}", flush=True)
        runnable.append(name)
    free(model, device)
    return runnable


def compute_experts(experts: Any, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return output and gradients of an experts module, for tokens rounded to `dtype`."""
    weight = experts.down_proj
    generator = torch.Generator(weight.device).manual_seed(1)
    config, experts.config = experts.config, copy.copy(experts.config)
    experts.config._experts_implementation = name
    shape = (CHECKED_TOKENS, config.hidden_size)
    x_TD = torch.randn(shape, generator=generator, device=weight.device).to(dtype)
    scores_TE = torch.rand(len(x_TD), len(weight), generator=generator, device=weight.device)
    weights_TK, ids_TK = scores_TE.topk(config.num_experts_per_tok)
    leaves = [t.to(dtype).to(weight.dtype).requires_grad_() for t in (x_TD, weights_TK)]
    params = dict(experts.named_parameters())
    try:
        y_TD = experts(leaves[0], ids_TK, leaves[1])
        dy_TD = torch.randn(y_TD.shape, generator=generator, device=weight.device)
        grads = torch.autograd.grad(
            y_TD, [*leaves, *params.values()], dy_TD.to(dtype).to(y_TD.dtype)
        )
    finally:
        experts.config = config
    keys = ["x", "weights", *params]
    return {"y": y_TD.detach()} | dict(zip(keys, grads, strict=True))


def time_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    batch_size: int,
    args: argparse.Namespace,
) -> list[Row]:
    """Return a row per implementation; their steps alternate."""
    device = model.device
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = dict.fromkeys(names, 0.0)
    losses: dict[str, float] = {}
    for round_idx in range(args.warm_up + args.timed):
        generator = torch.Generator().manual_seed(round_idx)
        shape = (batch_size, args.seq_len)
        tokens_BT = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)
        for name in list(seconds):
            model.set_experts_implementation(name)
            try:
                duration, peak, losses[name] = run_step(model, optimizer, tokens_BT)
            except torch.OutOfMemoryError as error:
                print(f"{name:<12}left out: {get_first_line(error)}", flush=True)
                del seconds[name]
            else:
                seconds[name].append(duration)
                peaks[name] = max(peaks[name], peak)
                continue
            free(model, device)  # here, since the error kept the step's tensors
    rows = []
    for name, durations in seconds.items():
        step_s = statistics.median(durations[args.warm_up :])
        rows.append(
            {
                "op": "experts_implementation",
                "variant": name,
                "preset": args.preset,
                "layers": args.layers,
                "batch_size": batch_size,
                "seq_len": args.seq_len,
                "step_ms": step_s * 1e3,
                "tokens_per_second": batch_size * args.seq_len / step_s,
                "peak_gib": peaks[name],
                "loss": round(losses[name], 5),
            }
        )
    return rows


def run_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT: Tensor
) -> tuple[float, float, float]:
    """Run a training step; return its seconds, peak memory in GiB and loss."""
    device = tokens_BT.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = Moment(device)
    loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    end = Moment(device)
    end.wait_for_gpu()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return begin.seconds_until(end), peak, float(loss)


def free(model: nn.Module, device: torch.device) -> None:
    """Free gradients and cached memory of an implementation that failed."""
    model.zero_grad()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def get_first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"


def format_row(row: Row) -> str:
    """Return the row as a line."""
    return (
        f"{row['variant']:<12}batch {row['batch_size']:>2} {row['step_ms']:>9.1f} ms "
        f"{row['tokens_per_second']:>9.0f} tokens/s {row['peak_gib']:>6.1f} GiB "
        f"loss {row['loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
