"""Saving and loading through moecore.io against torch.distributed.checkpoint (DCP).

    python -m benchmarks.bench_checkpoint --gigabytes 1.5 --folder /dev/shm --folder /tmp

The same tensors (a model and its AdamW moments) on one CPU process. Rates are bytes of tensors per
second, best of the repeats; the variants alternate within each repeat. Both savers fsync. moecore's
also hash every byte with SHA-256; `load full` hashes every byte first, `load sizes` does not. Files
stay in the page cache, so loads compare software, not disks; saves to a disk are bound by the disk.

`--blocking` instead measures, on a GPU, how long a background save blocks; see blocking.py.

`pytest benchmarks` runs both with a few megabytes as a smoke test.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks import blocking
from benchmarks.records import Environment, results_path
from moecore.io import Saver, load, save

pytestmark = pytest.mark.proven_by(
    "tests/io/checkpoint/test_store.py",
    "tests/io/checkpoint/test_shard_file.py",
    "tests/train/memory/test_host_copies.py",
)
Model = tuple[nn.Module, torch.optim.Optimizer]
VARIANTS = ("dcp save", "save", "background save blocks", "dcp load", "load full", "load sizes")


def build(num_bytes: int) -> Model:
    """Return a model of matrices (at most 64 MB each) and vectors with filled AdamW moments."""
    side = min(4096, int((num_bytes / 12 / 2) ** 0.5))
    count = max(1, round(num_bytes / 12 / side**2))
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        moments = {slot: torch.randn_like(param) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def name_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all parameters and moments by name."""
    found = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{slot}.{name}": value for slot, value in optimizer.state[param].items()}
    return found


def measure(folder: Path, num_bytes: int, repeats: int) -> dict[str, float]:
    """Return the best seconds of each variant, and the bytes of the tensors as "bytes"."""
    model, optimizer = build(num_bytes)
    tensors = name_tensors(model, optimizer)
    total = sum(tensor.nbytes for tensor in tensors.values())
    best = dict.fromkeys(VARIANTS, float("inf")) | {"bytes": float(total)}
    saver = Saver(folder / "background", model, optimizer, keep=1)
    saver.save(0, wait=False)  # the first one allocates the host copies
    for repeat in range(repeats):
        ours, theirs = folder / f"ours-{repeat}", folder / f"dcp-{repeat}"
        saver.check()
        saver._wait_for_previous_save()
        actions: dict[str, Callable[[], object]] = {
            "dcp save": lambda p=theirs: dcp.save(tensors, checkpoint_id=p),
            "save": lambda p=ours: save(p, 1, model, optimizer),
            "background save blocks": lambda r=repeat: saver.save(r + 1, wait=False),
            "dcp load": lambda p=theirs: dcp.load(tensors, checkpoint_id=p),
            "load full": lambda p=ours: load(p / "step-000001", model, optimizer),
            "load sizes": lambda p=ours: load(p / "step-000001", model, optimizer, verify="sizes"),
        }
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - start)
            if name.startswith("background"):
                saver._wait_for_previous_save()
        assert all(p.isfinite().all() for p in model.parameters())
        for path in (ours, theirs):
            shutil.rmtree(path)
    saver.close()
    return best


def format_table(best: dict[str, float]) -> list[str]:
    """Return a Markdown table: seconds, GB/s and time relative to DCP of each variant."""
    lines = ["| what | s | GB/s | time / plain DCP |", "|---|---|---|---|"]
    for name in VARIANTS:
        plain = best["dcp load" if "load" in name else "dcp save"]
        rate = best["bytes"] / 1e9 / best[name]
        lines.append(f"| {name} | {best[name]:.2f} | {rate:.2f} | {best[name] / plain:.2f} |")
    return lines


def test_checkpoint_bandwidth(tmp_path: Path) -> None:
    best = measure(tmp_path, 6_000_000, repeats=1)
    print("\n".join(format_table(best)))
    assert 5e6 < best["bytes"] < 7e6 and all(0 < best[name] < 60 for name in VARIANTS)


@pytest.mark.parametrize("optimizer", [False, True])
def test_checkpoint_blocking(tmp_path: Path, optimizer: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, adam = blocking.build_layers(6_000_000, device, optimizer=optimizer)
    run = blocking.Blocking(tmp_path / "files", model, adam)
    rows = list(blocking.measure(run, repeats=2, seconds=60, prepare=True, with_dcp=True))
    print("\n".join(map(blocking.describe, rows)))
    assert 5e6 < run.num_bytes / (5 if optimizer else 1) < 7e6
    ops = [row["op"] for row in rows]
    assert ops[:4] == [
        "device_to_host_copy",
        "saver_prepare",
        "save_blocks_first",
        "save_blocks_later",
    ]
    assert ops[4:6] == ["dcp_async_save_first", "dcp_async_save_later"]
    environment = Environment.here()
    for row in rows:
        blocking.append(tmp_path, environment, row)
    lines = (tmp_path / environment.file_name).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    fields = "gpu torch commit date op bytes ms baseline_ms ratio"
    assert len(found) == len(rows) and all(set(fields.split()) <= set(row) for row in found)
    assert list((tmp_path / "files" / "run").glob("step-*")) == []


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.5)
    add("--folder", type=Path, action="append", help="may be repeated, but for --blocking")
    add("--repeats", type=int, default=3)
    group = parser.add_argument_group("--blocking", "how long a background save blocks, on a GPU")
    add = group.add_argument
    add("--blocking", action="store_true")
    add("--gib", type=float, default=8.0, help="GiB of bf16 parameters")
    add("--optimizer", action="store_true", help="fp32 moments too, four times as much")
    add("--prepare", action="store_true", help="call Saver.prepare before the first save")
    add("--no-dcp", action="store_true", help="leave out torch's async_save")
    add("--seconds", type=float, default=90.0, help="no save starts that may end later")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def main() -> None:
    """Measure what the command line selects, and print it."""
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if args.blocking:
        blocking.main(args)
        return
    for folder in args.folder or [Path(tempfile.gettempdir())]:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            best = measure(Path(name), int(args.gigabytes * 1e9), args.repeats)
        threads = torch.get_num_threads()
        print(
            f"{folder}: {best['bytes'] / 1e9:.2f} GB, torch {torch.__version__}, "
            f"{os.cpu_count()} cores, {threads} threads, best of {args.repeats}"
        )
        print("\n".join(format_table(best)), flush=True)


if __name__ == "__main__":
    main()
