import json
import os
import pickle
import random
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moecore.io import latest, load, read_manifest, save, set_latest, verify
from moecore.io.checkpoint.directory import POINTER
from moecore.io.checkpoint.manifest import MANIFEST, ManifestChunk, check_chunk_grid
from moecore.io.checkpoint.shard_file import Meter, compute_layout, find_file_problem
from tests.io.checkpoint.fuzz import build, fuzz, in_two_files, same, tensors_of, write_signed

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
ANY_FILE = (POINTER, MANIFEST, FIRST, SECOND)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint of two shard files."""
    root = tmp_path_factory.mktemp("saved")
    path = save(root, 1, *build(), {"note": "x"})
    in_two_files(path)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "root")
    set_latest(tmp_path / "root" / "step-000001")
    return tmp_path / "root"


def file_of(root: Path, name: str) -> Path:
    return root / name if name == POINTER else root / "step-000001" / name


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_link(file: Path) -> None:
    file.rename(file.parents[1] / "aside")
    file.symlink_to(file.parents[1] / "aside")


def make_device(file: Path) -> None:
    file.unlink()
    os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


DAMAGES = (flip, cut, extend, empty, make_folder, make_fifo, make_link, make_device)


def load_latest(root: Path) -> None:
    """Load as a run that starts again does; nothing may change when it fails."""
    model, optimizer = build()
    for param in model.parameters():
        nn.init.zeros_(param)
    before = tensors_of(model, optimizer)
    try:
        path = latest(root)
        assert path is not None
        load(path, model, optimizer)
    except BaseException:
        assert same(tensors_of(model, optimizer), before)
        raise


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ANY_FILE)
def test_damage_is_found(root: Path, name: str, damage: Callable[[Path], None]) -> None:
    load_latest(root)
    try:
        damage(file_of(root, name))
    except PermissionError as error:
        pytest.skip(f"devices may not be made: {error}")
    with pytest.raises((ValueError, OSError), match=name) as info:
        load_latest(root)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("damage", [make_fifo, make_link], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [POINTER, MANIFEST])
def test_a_save_goes_on_beside_special_files(root, name, damage):
    damage(file_of(root, name))
    if name == MANIFEST:
        for action in (verify, set_latest, read_manifest):
            with pytest.raises(ValueError, match="must be a"):
                action(root / "step-000001")
    path = save(root, 2, *build())
    assert latest(root) == path and (root / POINTER).is_file() and not (root / POINTER).is_symlink()
    load_latest(root)


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_deleted_and_swapped_shards_are_found(root: Path, name: str) -> None:
    path = root / "step-000001"
    other = SECOND if name == FIRST else FIRST
    (path / name).rename(root / "aside")
    with pytest.raises(ValueError, match=rf"{name}\) must be as it was saved, but is missing"):
        load_latest(root)
    (path / other).rename(path / name)
    (root / "aside").rename(path / other)
    with pytest.raises(ValueError, match=r"must be as it was saved, but has"):
        load_latest(root)


def test_every_bit_of_the_pointer(root: Path) -> None:
    data = (root / POINTER).read_bytes()
    shutil.copytree(root / "step-000001", root / "step-000003")  # a flipped step finds something
    for position in range(len(data)):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[position] ^= 1 << bit
            (root / POINTER).write_bytes(spoiled)
            try:
                found = latest(root)
            except ValueError:
                continue
            # It names a step that is not there, or whose manifest is the very same.
            assert found is not None and position < len("step-000001")
            assert read_manifest(found).text == read_manifest(root / "step-000001").text


def test_every_byte_of_the_manifest(root: Path) -> None:
    file = root / "step-000001" / MANIFEST
    data, dice = file.read_bytes(), random.Random(0)
    for position in range(0, len(data), 3):
        spoiled = bytearray(data)
        spoiled[position] ^= 1 << dice.randrange(8)
        file.write_bytes(spoiled)
        with pytest.raises(ValueError, match="must be a whole manifest"):
            read_manifest(root / "step-000001")


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_every_byte_of_a_shard(root: Path, name: str) -> None:
    path = root / "step-000001"
    manifest, file = read_manifest(path), path / name
    layout, stored = compute_layout(manifest.list_file_entries(name)), manifest.files[name]
    data = file.read_bytes()
    assert len(layout.header) < len(data) == layout.size
    header = range(len(layout.header))
    for position in (*header, *range(len(header), len(data), 11), len(data) - 1):
        spoiled = bytearray(data)
        spoiled[position] ^= 1 << position % 8
        file.write_bytes(spoiled)
        full = find_file_problem(file, layout, stored, full=True, meter=Meter())
        sizes = find_file_problem(file, layout, stored, full=False, meter=Meter())
        if position < len(layout.header):
            assert full == sizes == "has a header that is not the manifest's"
        else:
            assert full == "has another sha256 than the manifest" and sizes is None


class Exploit:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_pickles_in_the_directory_are_never_opened(root: Path) -> None:
    path, proof = root / "step-000001", root / "code-ran"
    names = [".metadata", "__0_0.distcp", "data.pkl", "rank-00002.safetensors", "model.pt"]
    for name in names:
        (path / name).write_bytes(pickle.dumps(Exploit(proof)))
    torch.save(Exploit(proof), path / "optimizer.pt")
    events: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        if listening and event in ("open", "pickle.find_class", "exec", "os.mkdir"):
            events.append(f"{event} {args[0]}")

    listening = True
    sys.addaudithook(hook)  # stays for good, hence the switch
    load_latest(root)
    verify(path)
    listening = False
    assert not proof.exists() and any("rank-00000" in event for event in events)
    assert not [event for event in events if event.startswith("pickle") or proof.name in event]
    assert not [e for e in events if any(n in e for n in (*names, "optimizer.pt"))]


def test_fuzzed_manifests_and_headers(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 500)
    refused = sum(count for name, count in outcomes.items() if name.endswith("refused"))
    assert sum(outcomes.values()) == 500 and refused > 430


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [110, 330, 600, 900, 5000])
def test_what_nests_deep_is_refused_on_both_ways(root: Path, depth: int) -> None:
    message = r"extra deep \(dict\) must be JSON-able or a tensor: "
    with pytest.raises(ValueError, match=message) as info:
        save(root, 2, *build(), {"deep": nested(depth)})
    assert "\n" not in str(info.value)
    path = save(root, 2, *build(), {"deep": nested(90)})
    assert load(path, *build())["deep"] == nested(90)
    file = root / "step-000001" / MANIFEST
    text = file.read_text().replace(
        '"note": "x"', '"note": ' + '{"a": ' * depth + "1" + "}" * depth
    )
    values = json.loads(text) if depth < 500 else None
    if values is None:
        file.write_text(text)  # Python cannot sign it; nesting is seen before the digest
    else:
        write_signed(file.parent, values)
    with pytest.raises(ValueError, match="must be a whole manifest: it nests too deep"):
        load(file.parent, *build())


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), 10**400, "0.1"], ids=lambda value: f"{value!r:.5}"
)
@pytest.mark.parametrize("where", ["lr", "betas", "initial_lr", "base_lrs"])
def test_a_forged_learning_rate_is_refused(tmp_path: Path, where: str, value: Any) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, optimizer = build()
        return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)

    model, optimizer, scheduler = made()
    path = save(tmp_path, 1, model, optimizer, scheduler=scheduler)
    values = json.loads((path / MANIFEST).read_text())
    if where == "base_lrs":
        values["scheduler"]["base_lrs"] = [value]
    else:
        values["optimizer"][0][where] = [0.9, value] if where == "betas" else value
    write_signed(path, values)
    model, optimizer, scheduler = made()
    before = tensors_of(model, optimizer)
    with pytest.raises(ValueError, match=rf"{where}.* in the checkpoint") as info:
        load(path, model, optimizer, scheduler=scheduler)
    assert "\n" not in str(info.value) and same(tensors_of(model, optimizer), before)
    if where == "initial_lr":  # an optimizer without a scheduler would take it as it is
        model, optimizer = build()
        with pytest.raises(ValueError, match=r"initial_lr.* in the checkpoint"):
            load(path, model, optimizer)


def test_grid_of_the_docstring() -> None:
    def chunks(*blocks: tuple[tuple[int, int], tuple[int, int]]) -> list[ManifestChunk]:
        return [
            ManifestChunk(file="f", key=str(i), offsets=o, sizes=s)
            for i, (o, s) in enumerate(blocks)
        ]

    check_chunk_grid("x", (4, 6), chunks(((0, 0), (2, 6)), ((2, 0), (2, 6))))
    with pytest.raises(ValueError, match="leave a gap or overlap"):
        check_chunk_grid("x", (4, 6), chunks(((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))))
    with pytest.raises(ValueError, match="3 chunks must be the 4 cells of a grid"):
        check_chunk_grid("x", (4, 6), chunks(((0, 0), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))))
    with pytest.raises(ValueError, match="end at 4 of 6 in dim 1"):
        check_chunk_grid("x", (4, 6), chunks(((0, 0), (4, 4))))
    with pytest.raises(ValueError, match="empty and must have no chunks"):
        check_chunk_grid("x", (0, 6), chunks(((0, 0), (0, 6))))
