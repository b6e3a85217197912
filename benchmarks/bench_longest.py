r"""The longest row of tokens that a few layers can train on one GPU, and the time of its step.

    python -m benchmarks.bench_longest --results benchmarks/results/sequences
    python -m benchmarks.bench_longest --preset tiny-qwen3 --layers 2 --least 32 --most 128 \
        --granule 32 --device cpu

    plain     every activation is saved
    levers    `MemoryOptions` of `LEVERS`: MoE layers, norms and projections computed again;
              tensors saved by attention and blocks in host memory

Both have bf16 weights and gradients, AdamW with remainders and FP8 moments. Lengths double until
one does not fit; bisection follows. The search needs only memory, so its attention allocates like
cuDNN's and multiplies nothing. Then a step with true attention verifies the length, or the next one
below. A step of a short row comes before each, so that all state exists.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks import bench_fit
from benchmarks.bench_fit import LEAST_STATE, Variant

import torch  # isort: skip: behind bench_fit, which sets the allocator
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import append_rows, results_path
from moecore import ParallelConfig, build_meshes
from moecore.base.options.memory import MemoryOptions

Row = dict[str, Any]
LEVERS = MemoryOptions(
    recompute=("norm", "rope", "qkv_proj", "moe"),
    offload=("attention", "rest"),
    offload_host_bytes=120 << 30,
)
VARIANTS = {
    "plain": Variant(weights=torch.bfloat16, optimizer=LEAST_STATE),
    "levers": Variant(weights=torch.bfloat16, optimizer=LEAST_STATE, memory=LEVERS),
}


class MemoryOnlyAttention(torch.autograd.Function):
    """apply(q_BHTd, k_BhTd, v_BhTd) -> o_BHTd: allocates like attention, without products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q, which has the shape of o."""
        o = q.clone()
        lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return gradients, after an allocation of the fp32 sum of dq."""
        q, k, v, *_ = ctx.saved_tensors
        summed = torch.empty_like(q, dtype=torch.float32)
        found = tuple(torch.zeros_like(x) for x in (q, k, v))
        del summed
        return found


def allocate_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Replacement of `F.scaled_dot_product_attention` by `MemoryOnlyAttention`."""
    return MemoryOnlyAttention.apply(q, k, v)  # type: ignore[no-any-return]


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    began = time.monotonic()
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    meshes = build_meshes(ParallelConfig(), args.device)
    for name in args.variants:

        def peak(tokens: int, *, true: bool = False, name: str = name) -> int | None:
            stub = patch.object(F, "scaled_dot_product_attention", allocate_attention)
            lengths = (args.least // 16, tokens)
            with nullcontext() if true else stub:
                found = bench_fit.measure_peak(VARIANTS[name], args.layers, args, meshes, lengths)
            gib = "does not fit" if found is None else f"{found / 2**30:.1f} GiB"
            print(f"{name} {tokens} tokens{' with attention' * true}: {gib}", flush=True)
            return found

        row = {"op": "longest", "variant": name, "preset": args.preset, "layers": args.layers}
        row |= find_longest(peak, args, began)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if args.results is not None:
            append_rows(args.results, "benchmarks.bench_longest", [row])
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, default=4)
    add("--least", type=int, default=128 << 10, help="tokens that are tried first")
    add("--most", type=int, default=1 << 20)
    add("--granule", type=int, default=32 << 10, help="of the answer")
    add("--seconds", type=float, default=170, help="after which no true step begins")
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    args = parser.parse_args()
    args.batch_size, args.seq_len = 1, args.least
    return args


def find_longest(peak: Callable[..., int | None], args: argparse.Namespace, began: float) -> Row:
    """Return the row of the longest length that fits; if the time runs out, it is not verified."""
    fits, fails = 0, args.most + args.granule
    tokens = args.least
    while fails - fits > args.granule and tokens >= args.granule:
        if peak(tokens) is None:
            fails = tokens
        else:
            fits = tokens
        doubled = min(2 * fits, args.most) if fails > args.most else 0
        between = (fits + fails) // 2 // args.granule * args.granule
        tokens = doubled if doubled > fits else between
    row: Row = {"searched_tokens": fits, "tokens": None, "peak_gib": None, "step_s": None}
    tokens = fits
    while tokens and time.monotonic() - began < args.seconds:
        start = time.monotonic()
        found = peak(tokens, true=True)
        if found is not None:
            seconds = time.monotonic() - start
            return row | {"tokens": tokens, "peak_gib": found / 2**30, "step_s": seconds}
        tokens -= args.granule
    return row


if __name__ == "__main__":
    sys.exit(main())
