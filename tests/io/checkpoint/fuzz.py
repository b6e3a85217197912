"""Random damage to a checkpoint, and the check that it is found.

    python -m tests.io.checkpoint.fuzz


Two kinds of case, each from a seed of its own:

- bytes: some bytes of the manifest or of a shard's header are changed, inserted or removed;
- forged: a value in the manifest is replaced and the manifest signed anew, as an attacker would.

Loading must raise ValueError or OSError, in seconds, with everything left as it was. A forged
manifest may load where the value is the caller's own (such as extra): then all tensors are right.
"""

import argparse
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore.io import load, save
from moecore.io.checkpoint.manifest import MANIFEST, _compute_digest, _dump_json
from moecore.io.checkpoint.shard_file import Meter, ShardWriter, compute_layout

Model = tuple[nn.Module, torch.optim.Optimizer]
SECONDS = 10
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**62, 2**63, 2**64, 10**4000, 1.5, float("nan"), 1e308),
    *("", "x", "../../etc/passwd", "/dev/zero", "rank-00000.safetensors", "rank-00009.safetensors"),
    *("F32", "F64", "BOOL", "__metadata__", "\ud800", "0" * 64, "model.weight", "a\x00b"),
    *([], [0], [-1], [2**40, 2**40], [1] * 100, {}, {"a": 1}, [[]], [None], {"__class__": "os"}),
)


def build() -> Model:
    """A model whose tensors all differ, with moments."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        moments = {"exp_avg": torch.randn_like(param), "exp_avg_sq": torch.rand_like(param)}
        optimizer.state[param] = {"step": torch.tensor(3.0), **moments}
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        for slot, value in optimizer.state[param].items():
            found[f"{slot}.{name}"] = value.clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_two_files(path: Path) -> None:
    """Give half of the tensors of a one-rank checkpoint to a second rank's file."""
    values = json.loads((path / MANIFEST).read_text())
    first = path / "rank-00000.safetensors"
    data = load_file(first)
    first.unlink()
    names = sorted(data)
    for rank, half in enumerate((names[::2], names[1::2])):
        file = f"rank-{rank:05d}.safetensors"
        layout = compute_layout({name: (data[name].dtype, data[name].shape) for name in half})
        with ShardWriter(path / file, layout.header, pinned=False, meter=Meter()) as shard:
            for name in layout.begins:
                shard.add(data[name])
            stored = shard.finish()
        values["files"][file] = {"size": stored.size, "sha256": stored.sha256}
        for name in half:
            values["tensors"][name]["chunks"][0]["file"] = file
    write_signed(path, values)


def write_signed(path: Path, values: dict[str, Any]) -> None:
    values = {key: value for key, value in values.items() if key != "sha256"}
    (path / MANIFEST).write_text(_dump_json(values | {"sha256": _compute_digest(values)}) + "\n")


def spoil(data: bytes, dice: random.Random) -> bytes:
    """Change, insert, remove or repeat some bytes."""
    spoiled = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 3, 20))):
        at = dice.randrange(len(spoiled) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            spoiled[at:at] = dice.randbytes(dice.randrange(1, 9))
        elif kind == 2:
            del spoiled[at : at + dice.randrange(1, 40)]
        else:
            spoiled[at:at] = spoiled[at : at + dice.randrange(1, 200)] or b"["
        if not spoiled:
            break
    return bytes(spoiled)


def mutate(values: Any, dice: random.Random) -> None:
    """Replace, remove or add one value somewhere in a JSON object, in place."""
    parent = values
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = dice.choice(keys)
        inner = parent[key]
        if isinstance(inner, dict | list) and inner and dice.random() < 0.85:
            parent = inner
            continue
        break
    kind = dice.random()
    if kind < 0.7:
        parent[key] = dice.choice(VALUES)
    elif kind < 0.8:
        del parent[key]
    elif isinstance(parent, dict):
        parent[str(dice.choice(VALUES[14:]))] = inner
    else:
        parent.append(dice.choice(VALUES))


def spoil_bytes(path: Path, dice: random.Random) -> None:
    if dice.random() < 0.5:
        file = path / MANIFEST
        file.write_bytes(spoil(file.read_bytes(), dice))
        return
    file = dice.choice(sorted(path.glob("*.safetensors")))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(spoil(data[:end], dice) + data[end:])


def forge_manifest(path: Path, dice: random.Random) -> None:
    values = json.loads((path / MANIFEST).read_text())
    for _ in range(dice.choice((1, 1, 2))):
        mutate(values, dice)
    try:
        write_signed(path, values)
    except ValueError:  # Python itself writes no number of 4000 digits
        (path / MANIFEST).write_text("[" * 100_000)


CASES: dict[str, Callable[[Path, random.Random], None]] = {
    "bytes": spoil_bytes,
    "forged": forge_manifest,
}


def fuzz(folder: Path, num_cases: int) -> Counter[str]:
    """Run cases, one kind after the other, and return how many were refused or harmless.

    Raises:
        AssertionError: with the seed of a case that was neither.
    """
    model, optimizer = build()
    saved = tensors_of(model, optimizer)
    path = save(folder, 1, model, optimizer, {"note": "x", "ids": torch.arange(3)})
    in_two_files(path)
    load(path, model, optimizer)
    whole = {file: file.read_bytes() for file in path.iterdir()}
    outcomes: Counter[str] = Counter()
    for seed in range(num_cases):
        name = list(CASES)[seed % len(CASES)]
        outcomes[f"{name}: {one_case(path, whole, name, seed, saved)}"] += 1
    return outcomes


def one_case(path, whole, name, seed, saved):
    for file, data in whole.items():
        file.write_bytes(data)
    CASES[name](path, random.Random(seed))
    if all(file.read_bytes() == data for file, data in whole.items()):
        return "unchanged"
    model, optimizer = build()
    for param in model.parameters():
        nn.init.zeros_(param)
    before = tensors_of(model, optimizer)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        load(path, model, optimizer)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error), f"{name} {seed}: {error}"
        assert same(tensors_of(model, optimizer), before), f"{name} {seed}: changed, then {error}"
        return "refused"
    finally:
        signal.alarm(0)
    assert name == "forged", f"{name} {seed}: loaded"
    assert same(tensors_of(model, optimizer), saved), f"{name} {seed}: loaded something else"
    return "harmless"


def _too_long(*_: object) -> None:
    raise AssertionError(f"a case took more than {SECONDS} s")  # TimeoutError is an OSError


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    with tempfile.TemporaryDirectory() as root:
        for outcome, count in sorted(fuzz(Path(root), parser.parse_args().cases).items()):
            print(f"{count:6d} {outcome}")
