"""Saving and loading through moecore.checkpoint against torch.distributed.checkpoint as it is.

    python -m benchmarks.bench_checkpoint --gigabytes 1.5 --folder /dev/shm --folder /tmp

The same tensors (a model, its AdamW moments) on one CPU process; rates are bytes of tensors over
seconds, best of the repeats, variants in turn within each. Both savers fsync. moecore's hash every
byte with SHA-256; `load full` also hashes every byte first, `load sizes` does not. Files stay in
the page cache, so loads compare software, not disks; saves to a disk are bound by it.

`pytest benchmarks` runs it with a few megabytes, as a smoke test.
"""

from __future__ import annotations

import argparse
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

from moecore.checkpoint import Saver, load, save

pytestmark = pytest.mark.proven_by(
    "tests/checkpoint/test_store.py", "tests/checkpoint/test_shard_file.py"
)
Model = tuple[nn.Module, torch.optim.Optimizer]
VARIANTS = ("dcp save", "save", "background save blocks", "dcp load", "load full", "load sizes")


def build(num_bytes: int) -> Model:
    """Matrices of at most 64 MB and as many vectors, three fp32 copies of each."""
    side = min(4096, int((num_bytes / 12 / 2) ** 0.5))
    count = max(1, round(num_bytes / 12 / side**2))
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        moments = {slot: torch.randn_like(param) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{slot}.{name}": value for slot, value in optimizer.state[param].items()}
    return found


def measure(folder: Path, num_bytes: int, repeats: int) -> dict[str, float]:
    """Return variant -> best seconds, and "bytes" -> bytes of the tensors."""
    model, optimizer = build(num_bytes)
    tensors = tensors_of(model, optimizer)
    total = sum(tensor.nbytes for tensor in tensors.values())
    best = dict.fromkeys(VARIANTS, float("inf")) | {"bytes": float(total)}
    saver = Saver(folder / "background", model, optimizer, keep=1)
    saver.save(0, wait=False)  # the first one allocates the host copies
    for repeat in range(repeats):
        ours, theirs = folder / f"ours-{repeat}", folder / f"dcp-{repeat}"
        saver.check()
        saver._finish()
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
                saver._finish()
        assert all(p.isfinite().all() for p in model.parameters())
        for path in (ours, theirs):
            shutil.rmtree(path)
    saver.close()
    return best


def table(best: dict[str, float]) -> list[str]:
    """One line per variant: seconds, GB/s, time over that of plain DCP."""
    lines = ["| what | s | GB/s | time / plain DCP |", "|---|---|---|---|"]
    for name in VARIANTS:
        plain = best["dcp load" if "load" in name else "dcp save"]
        rate = best["bytes"] / 1e9 / best[name]
        lines.append(f"| {name} | {best[name]:.2f} | {rate:.2f} | {best[name] / plain:.2f} |")
    return lines


def test_checkpoint_bandwidth(tmp_path: Path) -> None:
    best = measure(tmp_path, 6_000_000, repeats=1)
    print("\n".join(table(best)))
    assert 5e6 < best["bytes"] < 7e6 and all(0 < best[name] < 60 for name in VARIANTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--folder", type=Path, action="append", help="may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    for folder in args.folder or [Path(tempfile.gettempdir())]:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            best = measure(Path(name), int(args.gigabytes * 1e9), args.repeats)
        threads = torch.get_num_threads()
        print(
            f"{folder}: {best['bytes'] / 1e9:.2f} GB, torch {torch.__version__}, "
            f"{os.cpu_count()} cores, {threads} threads, best of {args.repeats}"
        )
        print("\n".join(table(best)), flush=True)


if __name__ == "__main__":
    main()
