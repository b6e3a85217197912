"""A decoder layer over tensor parallel ranks: forward and backward, and the cost of exchanges.

    torchrun --nproc-per-node 2 -m benchmarks.bench_tp --results
    torchrun --nproc-per-node 2 -m benchmarks.bench_tp --seq-lens 1024 2048 4096 8192

All ranks are tp ranks of one native decoder layer. The variants alternate in one run:

    in turn     exchanges around products: `TensorParallel.gather_tokens`, `reduce_scatter`
    sliced      exchanges as parts of products, for slices of any size (`tp_products.py`)
    alone       no exchange: tensors of the same shapes from this rank's memory

A step's time is the slowest rank's mean over some steps, the median of all rounds. `exposed` is a
step's time above that of "alone". Before the measurements, outputs and gradients of sliced
exchanges are checked: for few tokens their error against fp32 is at most twice that of exchanges in
turn, and for all tokens they are compared with exchanges in turn. `chosen` is the default without
this benchmark: a sliced exchange if a slice has `MIN_SLICE_BYTES`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.helpers.sliced import REFERENCE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench_pairs import start_group, time_steps
from benchmarks.records import RESULTS, append_rows, results_path
from moecore.attention.sequence import Sequence
from moecore.base.torch_private import get_local_tensor
from moecore.models import DecoderConfig, preset, tp_products
from moecore.models.block import Block
from moecore.models.layers import build_rotary_table
from moecore.models.tensor_parallel import TensorParallel, apply_tensor_parallel
from moecore.models.tp_products import find_sliced_exchange
from moecore.moe.dispatch.collectives import exchange_with_grad

DENSE = DecoderConfig(
    vocab_size=256,
    dim=8192,
    num_layers=1,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    mlp_hidden_dim=28672,
    max_seq_len=1 << 20,
)
LAYERS = {
    "dense 8192": DENSE,
    # Its attention alone: an MLP that nobody calls stands for its experts.
    "qwen3-30b-a3b attention": replace(
        preset("qwen3-30b-a3b"), moe=None, dense_layers=(), mlp_hidden_dim=128, num_layers=1
    ),
    "tiny": replace(DENSE, dim=32, num_heads=8, num_kv_heads=4, head_dim=8, mlp_hidden_dim=48),
}
VARIANTS = ("in turn", "sliced", "alone")
CHECKED_TOKENS = 1024  # of a sequence, in fp32
TIMES_ERROR, MOST_DIFFERENCE = 2.0, 0.02


class WithoutExchange(TensorParallel):
    """A tp rank without exchanges: its memory keeps previous values in place of received ones."""

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Return x_BTD from a buffer; its gradient is this rank's slice."""
        return exchange_with_grad(x_BtD, self._get_buffer, self._slice)

    def reduce_scatter(self, y_BTD: Tensor) -> Tensor:
        """Return this rank's slice; its gradient is a buffer."""
        return exchange_with_grad(y_BTD, self._slice, self._get_buffer)

    def _slice(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.chunk(self.size, dim=1)[self.rank]

    def _get_buffer(self, x_BtD: Tensor) -> Tensor:
        B, t, D = x_BtD.shape
        buffers = vars(self).setdefault("buffers", {})
        key = (B, t * self.size, D)
        if key not in buffers:
            buffers[key] = torch.randn(key, dtype=x_BtD.dtype, device=x_BtD.device)
        found: Tensor = buffers[key]
        return found.view_as(found)


class Layer:
    """This rank's part of a layer, with the same weights in each dtype."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        config = LAYERS[name]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        with torch.device("meta"):
            block = Block(config, 0, dtype=dtype)
        apply_tensor_parallel(block, config, mesh)
        self.block, self.config, self.device = block.to_empty(device=device), config, device
        self.is_attention = name.endswith("attention")
        g = torch.Generator(device).manual_seed(dist.get_rank())
        for param in block.parameters():
            local = get_local_tensor(param)
            values = torch.randn(local.shape, generator=g, device=device) * param.shape[-1] ** -0.5
            local.copy_(values.bfloat16() if local.ndim > 1 else torch.ones_like(local))
        self.params = [
            p
            for n, p in block.named_parameters()
            if not (self.is_attention and n.startswith(("mlp", "post_attention")))
        ]
        self.tp = TensorParallel(mesh.get_group(), mesh.get_local_rank(), mesh.size())
        self.alone = WithoutExchange(self.tp.group, self.tp.rank, self.tp.size)

    def inputs(self, batch_size: int, seq_len: int, dtype: torch.dtype) -> list[Tensor]:
        """Return x_BtD and the gradient of the output."""
        g = torch.Generator(self.device).manual_seed(100 + dist.get_rank())
        size = (2, batch_size, seq_len // self.tp.size, self.config.dim)
        both = torch.randn(size, generator=g, device=self.device).bfloat16()
        return list(both.to(dtype))

    def step(self, x_BtD: Tensor, dy_BtD: Tensor, sequence: Sequence) -> list[Tensor]:
        """Return the output and all gradients."""
        x_BtD = x_BtD.detach().requires_grad_()
        forward: Any = self.block.attend if self.is_attention else self.block
        y_BtD = forward(x_BtD, sequence)
        grads = torch.autograd.grad(y_BtD, [x_BtD, *self.params], dy_BtD)
        return [y_BtD.detach(), *(get_local_tensor(grad) for grad in grads)]

    def make_sequence(self, seq_len: int) -> Sequence:
        """Return a sequence with one document per row."""
        return Sequence(
            rotary=build_rotary_table(self.config, torch.arange(seq_len, device=self.device))
        )

    @contextmanager
    def variant(self, name: str) -> Iterator[None]:
        """Return a context in which the layer exchanges as a variant does."""
        least, exchange_of = 0 if name == "sliced" else 1 << 62, tp_products.select_sliced_exchange
        if self.device.type == "cpu":
            exchange_of = lambda *_: REFERENCE  # noqa: E731
        tp = self.alone if name == "alone" else self.tp
        with ExitStack() as stack:
            for module in self.block.modules():
                if hasattr(module, "tp"):
                    stack.enter_context(patch.object(module, "tp", tp))
            stack.enter_context(patch.object(tp_products, "MIN_SLICE_BYTES", least))
            stack.enter_context(patch.object(tp_products, "select_sliced_exchange", exchange_of))
            yield


def main() -> int:
    """Print and record a row per layer, batch size, length and variant; on ranks of torchrun."""
    args = _parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        print("bench_tp: error: start it with torchrun --nproc-per-node 2 -m", file=sys.stderr)
        return 2
    device = start_group()
    for name in args.layers:
        if LAYERS[name].num_kv_heads % dist.get_world_size():
            if dist.get_rank() == 0:
                print(
                    f"{name}: left out, its heads of keys are too few for these ranks", flush=True
                )
            continue
        errors = measure_errors(name, min(CHECKED_TOKENS, *args.seq_lens), device)
        for seq_len in args.seq_lens:
            for batch_size in args.batch_sizes:
                rows = measure(name, batch_size, seq_len, device, args)
                rows = [row | errors for row in rows]
                if dist.get_rank() == 0:
                    print("\n".join(json.dumps(row) for row in rows), flush=True)
                    print(*_format_rows(rows), sep="\n", flush=True)
                    if args.results is not None:
                        world = dist.get_world_size()
                        append_rows(args.results, "benchmarks.bench_tp", rows, num_gpus=world)
    dist.barrier()
    return 0


def measure_errors(name: str, seq_len: int, device: torch.device) -> dict[str, float]:
    """Return the worst errors of any tensor against fp32; raise for too large sliced ones.

    Collective.
    """
    exact, layer = (Layer(name, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    sequence = layer.make_sequence(seq_len)
    with exact.variant("in turn"):
        truth = exact.step(*exact.inputs(2, seq_len, torch.float32), sequence)
    errors = []
    for variant in ("in turn", "sliced"):
        with layer.variant(variant):
            found = layer.step(*layer.inputs(2, seq_len, torch.bfloat16), sequence)
        errors.append([_compute_difference(a, b) for a, b in zip(found, truth, strict=True)])
    worst = max(b / a for a, b in zip(*errors, strict=True))
    if worst > TIMES_ERROR:
        raise RuntimeError(
            f"errors of sliced exchanges are {worst} times those of exchanges in turn"
        )
    return {"error": max(errors[1]), "times_error": worst}


def _compute_difference(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference over the norm of `want`, the largest of all ranks."""
    found = (got.float() - want.float()).norm() / want.float().norm()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def check_exchange(layer: Layer, x_BtD: Tensor) -> None:
    """Raise if the sliced variant does not use sliced exchanges. Collective."""
    linears = [layer.block.get_submodule("self_attn.q_proj")]
    with layer.variant("sliced"):
        if find_sliced_exchange(layer.tp, x_BtD, *x_BtD.shape[1:], linears) is None:
            raise RuntimeError(f"there is no sliced exchange: {layer.tp.peer_problem}")


def measure(
    name: str, batch_size: int, seq_len: int, device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row per variant; collective."""
    layer = Layer(name, torch.bfloat16, device)
    inputs = *layer.inputs(batch_size, seq_len, torch.bfloat16), layer.make_sequence(seq_len)
    check_exchange(layer, inputs[0])
    step, results = partial(layer.step, *inputs), {}
    for variant in VARIANTS:
        with layer.variant(variant):
            for _ in range(args.warm_up):
                results[variant] = step()
    pairs = zip(results["sliced"], results["in turn"], strict=True)
    difference = max(_compute_difference(a, b) for a, b in pairs)
    if not difference <= MOST_DIFFERENCE:
        raise RuntimeError(
            f"sliced exchanges compute something else: {difference} of a tensor's norm"
        )
    del results
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for n in range(args.rounds):
        for variant in VARIANTS[:: 1 if n % 2 else -1]:
            with layer.variant(variant):
                times[variant].append(time_steps(step, args.steps, device) * 1e3)
    ms = {variant: statistics.median(values) for variant, values in times.items()}
    slice_bytes = inputs[0][0].nbytes
    is_long = slice_bytes >= tp_products.MIN_SLICE_BYTES
    return [
        {
            "op": "tp_layer",
            "layer": name,
            "provider": variant,
            "tp": dist.get_world_size(),
            "batch_size": batch_size,
            "seq_len": seq_len,
            "slice_mib": slice_bytes / 2**20,
            "chosen": variant == ("sliced" if is_long else "in turn"),
            "step_ms": ms[variant],
            "fastest_ms": min(times[variant]),
            "slowest_ms": max(times[variant]),
            "ratio": ms[variant] / ms["in turn"],
            "exposed_ms": ms[variant] - ms["alone"],
            "difference": difference,
        }
        for variant in VARIANTS
    ]


def _format_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per row, with times relative to "in turn"."""
    first = rows[0]
    where = f"batch {first['batch_size']} x {first['seq_len']}, slices {first['slice_mib']:.1f} MiB"
    lines = [f"{first['layer']}, tp {first['tp']}, {where}"]
    for row in rows:
        share = row["exposed_ms"] / first["exposed_ms"] if first["exposed_ms"] else 0.0
        mark = "chosen" if row["chosen"] else ""
        lines.append(
            f"    {row['provider']:9} {row['step_ms']:9.3f} ms {row['ratio']:6.3f}   "
            f"exposed {row['exposed_ms']:8.3f} ms {share:6.3f}   {mark}"
        )
    return lines


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add: Callable[..., Any] = parser.add_argument
    defaults = [name for name in LAYERS if name != "tiny"]
    add("--layers", nargs="+", default=defaults, choices=LAYERS)
    add("--seq-lens", type=int, nargs="+", default=[8192], help="tokens of a row")
    add("--batch-sizes", type=int, nargs="+", default=[1, 2], help="rows")
    add("--warm-up", type=int, default=3, help="steps of each variant that do not count")
    add("--steps", type=int, default=10, help="of a turn")
    add("--rounds", type=int, default=7, help="turns of each variant")
    add("--results", type=results_path, nargs="?", const=str(RESULTS / "tp"))
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
