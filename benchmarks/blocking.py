"""How long a background save blocks a training step, against a plain copy and torch's DCP.

    python -m benchmarks.bench_checkpoint --blocking --gib 8 [--optimizer] [--prepare] [--no-dcp]

One GPU has bf16 tensors of the sizes that a rank of Qwen3-30B-A3B has with ep=8, with as many
layers as give `--gib` GiB; `--optimizer` adds fp32 moments, four times as much. Before each save
the tensors are overwritten and the device is idle. The time is that of the blocking call;
afterwards the writes are awaited and their files removed.

The plain copy transfers the same tensors to pinned memory in one go and waits once. Its memory is a
ring of 2 GiB, larger than any cache, so that it needs no second set of host copies.

Rows go to benchmarks/results/checkpoint/<day>-<gpu>.jsonl; without a GPU to no file by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from benchmarks.records import RESULTS, Environment, append_row
from moecore.io import Saver

# Of a rank of Qwen3-30B-A3B with ep=8: 16 of 128 experts, everything else whole.
LAYER = {
    "w1": (16, 2, 768, 2048),
    "w2": (16, 2048, 768),
    "router": (128, 2048),
    "q": (4096, 2048),
    "k": (512, 2048),
    "v": (512, 2048),
    "o": (2048, 4096),
    "q_norm": (128,),
    "k_norm": (128,),
    "norm1": (2048,),
    "norm2": (2048,),
}
LAYER_BYTES = 2 * sum(torch.Size(shape).numel() for shape in LAYER.values())
RING_BYTES = 2 << 30
Row = dict[str, Any]


def build_layers(
    num_bytes: int, device: torch.device, *, optimizer: bool
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return bf16 layers of `num_bytes` bytes, and optionally AdamW with fp32 moments.

    If `num_bytes` is less than a layer, one layer with narrower tensors is made.
    """
    layers = max(1, round(num_bytes / LAYER_BYTES))
    scale = min(1.0, num_bytes / LAYER_BYTES)
    model = nn.ModuleList()
    for _ in range(layers):
        layer = nn.Module()
        for name, shape in LAYER.items():
            narrow = (*shape[:-1], max(1, int(shape[-1] * scale)))
            data = torch.empty(narrow, dtype=torch.bfloat16, device=device)
            layer.register_parameter(name, nn.Parameter(data))
        model.append(layer)
    if not optimizer:
        return model, None
    adam = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        moments = {
            s: torch.empty_like(param, dtype=torch.float32) for s in ("exp_avg", "exp_avg_sq")
        }
        adam.state[param] = {"step": torch.tensor(1.0), **moments}
    return model, adam


def name_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return all tensors by name, sharing their memory."""
    found = {name: param.detach() for name, param in model.named_parameters()}
    if optimizer is not None:
        for name, param in model.named_parameters():
            found |= {f"{slot}.{name}": value for slot, value in optimizer.state[param].items()}
    return found


class Blocking:
    """The measurements of one run, in milliseconds.

    Args:
        folder: for checkpoints; it has one at a time.
        model: on the device.
        optimizer: of the model; None = none.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.tensors = name_tensors(model, optimizer)
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.cuda = any(tensor.is_cuda for tensor in self.tensors.values())

    def time(self, action: Callable[[], object]) -> float:
        """Overwrite the tensors, wait for the device, and time the action."""
        for tensor in self.tensors.values():
            tensor.fill_(1.0)
        self.sync()
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start) * 1e3

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time_copies(self, repeats: int) -> list[float]:
        """Time the plain copy of all tensors to pinned memory."""
        largest = max(tensor.nbytes for tensor in self.tensors.values())
        total = min(RING_BYTES, self.num_bytes)
        ring = torch.empty(max(largest, total), dtype=torch.uint8, pin_memory=self.cuda)
        ring.zero_()

        def copy() -> None:
            begin = 0
            for tensor in self.tensors.values():
                if begin + tensor.nbytes > ring.numel():
                    begin = 0
                target = ring[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor, non_blocking=True)
                begin += -(-tensor.nbytes // 64) * 64
            self.sync()

        return [self.time(copy) for _ in range(repeats + 1)][1:]

    def saves(self, saver: Saver) -> Iterator[float]:
        """Yield the blocking time of each background save; the first one allocates host memory."""
        step = 0
        while True:
            paths: list[Path] = []

            def save(step: int = step, paths: list[Path] = paths) -> None:
                paths.append(saver.save(step, wait=False))

            milliseconds = self.time(save)
            saver._wait_for_previous_save()
            shutil.rmtree(paths[0])
            step += 1
            yield milliseconds

    def dcp_saves(self, *, cached: bool) -> Iterator[float]:
        """Yield the blocking time of each `async_save` of torch's DCP.

        Args:
            cached: use its stager that keeps pinned copies; else its default.
        """
        stager = BlockingAsyncStager(cache_staged_state_dict=True) if cached else None
        while True:
            path = self.folder / "dcp"
            futures: list[Any] = []

            def save(path: Path = path, futures: list[Any] = futures) -> None:
                futures.append(
                    dcp.async_save(self.tensors, checkpoint_id=path, async_stager=stager)
                )

            milliseconds = self.time(save)
            futures[0].result()
            shutil.rmtree(path)
            yield milliseconds


def measure(
    run: Blocking, *, repeats: int, seconds: float, prepare: bool, with_dcp: bool
) -> Iterator[Row]:
    """Yield a row per operation once it is measured, as long as the time allows.

    Args:
        run: the measurements.
        repeats: of the copy, and of saves after the first.
        seconds: no save starts that would end later if it took as long as the one before.
        prepare: before the first save, time `Saver.prepare`, which allocates host memory.
        with_dcp: measure torch's DCP too.
    """
    deadline = time.monotonic() + seconds
    plain = run.time_copies(repeats)
    baseline = statistics.median(plain)
    yield _make_row(run, "device_to_host_copy", plain, None)
    with Saver(run.folder / "run", run.model, run.optimizer) as saver:
        if prepare:
            yield _make_row(run, "saver_prepare", [run.time(saver.prepare)], baseline)
        times = _take_until(run.saves(saver), 1 + repeats, deadline)
    yield from _first_and_later(run, "save_blocks", times, baseline)
    for cached in (False, True) if with_dcp else ():
        if cached and not run.cuda:
            continue
        _free_pinned_memory()
        times = _take_until(run.dcp_saves(cached=cached), 2, deadline)
        name = "dcp_async_save_pinned" if cached else "dcp_async_save"
        yield from _first_and_later(run, name, times, baseline)


def _first_and_later(
    run: Blocking, name: str, times: list[float], baseline_ms: float
) -> Iterator[Row]:
    """Yield a row of the first time and a row of the later times, if there are any."""
    for when, some in (("first", times[:1]), ("later", times[1:])):
        if some:
            yield _make_row(run, f"{name}_{when}", some, baseline_ms)


def _take_until(times: Iterator[float], count: int, deadline: float) -> list[float]:
    """Return the first `count` times, or fewer if the deadline comes first."""
    found: list[float] = []
    took = 0.0
    while len(found) < count and time.monotonic() + took < deadline:
        start = time.monotonic()
        found.append(next(times))
        took = time.monotonic() - start
    return found


def _free_pinned_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch._C._host_emptyCache()


def _make_row(run: Blocking, op: str, times: list[float], baseline_ms: float | None) -> Row:
    ms = statistics.median(times)
    return {
        "op": op,
        "bytes": run.num_bytes,
        "tensors": len(run.tensors),
        "optimizer": run.optimizer is not None,
        "ms": ms,
        "worst_ms": max(times),
        "repeats": len(times),
        "gbps": run.num_bytes / ms / 1e6,
        "baseline": None if baseline_ms is None else "device_to_host_copy",
        "baseline_ms": baseline_ms,
        "ratio": None if baseline_ms is None else ms / baseline_ms,
    }


def describe(row: Row) -> str:
    """Return the row as a line."""
    line = f"{row['op']:<28} {row['ms']:10.1f} ms (worst {row['worst_ms']:.1f} of {row['repeats']})"
    line += f" {row['gbps']:7.2f} GB/s"
    return line if row["ratio"] is None else f"{line}  x{row['ratio']:.3f} of the copy"


def append(folder: Path, environment: Environment, row: Row) -> None:
    """Append a row with its environment to the file of the day."""
    short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
    append_row(folder, environment, short)


def main(args: argparse.Namespace) -> None:
    """Measure, print and record, with the arguments of bench_checkpoint."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    results = args.results or (RESULTS / "checkpoint" if cuda else None)
    command = shlex.join(["python", "-m", "benchmarks.bench_checkpoint", *sys.argv[1:]])
    environment = dataclasses.replace(Environment.here(), command=command)
    model, optimizer = build_layers(int(args.gib * 2**30), device, optimizer=args.optimizer)
    parent = (args.folder or [Path(tempfile.gettempdir())])[0]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        run = Blocking(Path(name), model, optimizer)
        print(f"{run.num_bytes / 1e9:.2f} GB in {len(run.tensors)} tensors, {device}, to {parent}")
        free = shutil.disk_usage(name).free
        if free < 1.05 * run.num_bytes:
            raise SystemExit(
                f"--folder ({parent}) must have room for one checkpoint, {run.num_bytes / 1e9:.1f} "
                f"GB, but has {free / 1e9:.1f}: choose another, or a smaller --gib"
            )
        for row in measure(
            run,
            repeats=args.repeats,
            seconds=args.seconds,
            prepare=args.prepare,
            with_dcp=not args.no_dcp,
        ):
            print(describe(row), flush=True)
            if results is not None:
                append(results, environment, row)
