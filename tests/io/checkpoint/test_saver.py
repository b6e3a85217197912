import logging
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moecore.base.rank_checks import gather_objects
from moecore.io import Saver, latest, load, read_manifest, save, verify
from moecore.io.checkpoint import storage, store
from moecore.io.checkpoint.shard_file import ShardWriter
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks
from tests.io.checkpoint.kills import build, fill, loaded_step

Patch = pytest.MonkeyPatch


class Gate:
    """Holds every write of a shard until it is opened."""

    def __init__(self, patch: Patch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        add = ShardWriter.add

        def waiting(writer: ShardWriter, tensor: torch.Tensor) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            add(writer, tensor)

        patch.setattr(ShardWriter, "add", waiting)


def test_training_goes_on_meanwhile(tmp_path: Path, monkeypatch: Patch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer = build(1.0)
    numbers = torch.ones(4)
    extra = {"step": 1, "list": [1], "numbers": numbers}
    with Saver(tmp_path, model, optimizer) as saver:
        path = saver.save(1, extra, wait=False)
        assert gate.reached.wait(30) and latest(tmp_path) is None
        fill(model, optimizer, 2.0)
        numbers.fill_(2.0)
        extra["list"].append(2)
        optimizer.param_groups[0]["lr"] = 9.0
        saver.check()
        gate.opened.set()
    assert latest(tmp_path) == path == tmp_path / "step-000001" and loaded_step(tmp_path) == 1
    other, other_optimizer = build(0.0)
    found = load(path, other, other_optimizer)
    assert found["list"] == [1] and torch.equal(found["numbers"], torch.ones(4))
    assert other_optimizer.param_groups[0]["lr"] == 1e-3


def test_host_copies_are_reused(tmp_path: Path) -> None:
    model, optimizer = build(1.0)
    with Saver(tmp_path, model, optimizer, keep=1) as saver:
        saver.save(1, {"step": 1}, wait=False)
        first = addresses(saver)
        fill(model, optimizer, 2.0)
        saver.save(2, {"step": 2}, wait=False)
        assert addresses(saver) == first
        fill(model, optimizer, 3.0)
        saver.save(3, {"step": 3}, wait=True)
        assert loaded_step(tmp_path) == 3
    assert addresses(saver) == {}
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step-000003"]
    with pytest.raises(ValueError, match=r"Saver \(closed\) must be open to save"):
        saver.save(4, wait=True)
    saver.close()  # twice is once


def addresses(saver: Saver) -> dict[str, int]:
    return {name: copy.data_ptr() for name, copy in saver._copies._copies.items()}


def test_prepare_makes_the_memory_of_the_first_save(tmp_path: Path) -> None:
    model, optimizer = build(1.0)
    saver = Saver(tmp_path, model, optimizer)
    saver.prepare()
    prepared, path = addresses(saver), saver.save(1, wait=True)
    assert len(prepared) == len(read_manifest(path).tensors)
    saver.save(2, wait=False)
    assert addresses(saver) == prepared
    saver.close()
    with pytest.raises(ValueError, match=r"Saver \(closed\) must be open to save"):
        saver.prepare()


def test_first_wrong_argument_is_found_before_the_copy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep \(-1\)"):
        Saver(tmp_path, *build(1.0), keep=-1)
    with Saver(tmp_path, *build(1.0)) as saver:
        with pytest.raises(ValueError, match="extra thing"):
            saver.save(1, {"thing": object()}, wait=False)
        saver.save(1, {"step": 1}, wait=False)
        with pytest.raises(ValueError, match=r"step \(1\) must not be saved already"):
            saver.save(1, {"step": 1}, wait=False)


@pytest.mark.parametrize("found_by", ["check", "save", "close"])
def test_error_surfaces(tmp_path, monkeypatch, found_by, caplog):
    saver = Saver(tmp_path, *build(1.0))
    saver.save(1, {"step": 1}, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "publish", _no_space)
        saver.save(2, {"step": 2}, wait=False)
        saver._future.exception()  # wait, as a training step would
    with pytest.raises(OSError, match=r"rank 0 could not write it: OSError.28, 'No space"):
        if found_by == "check":
            saver.check()
        elif found_by == "save":
            saver.save(3, {"step": 3}, wait=False)
        else:
            saver.close()
    assert [r.levelno for r in caplog.records if "step 2 failed" in r.message] == [logging.ERROR]
    assert loaded_step(tmp_path) == 1
    if found_by != "close":
        saver.check()  # told once
        saver.save(3, {"step": 3}, wait=False)
        saver.close()
        assert latest(tmp_path) == tmp_path / "step-000003"


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("found_by", ["check", "close"])
def test_a_rank_that_ends_is_an_error_of_the_save(tmp_path, monkeypatch, no_group_left, found_by):
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1\nand a stack")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver(tmp_path, *build(1.0))
    monkeypatch.setattr(store.dcp, "save", lost)
    saver.save(1, wait=False)
    saver._future.exception()
    if found_by == "close":
        monkeypatch.setattr(dist, "all_gather_object", lost)
    message = r"could not write it together, one may have ended: Connection closed by peer \S+$"
    with pytest.raises(OSError, match=message):
        saver.check() if found_by == "check" else saver.close()
    assert found_by == "check" or list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    saver.close()


@pytest.mark.parametrize("background", [False, True])
def test_an_error_after_the_publication_says_so(tmp_path, monkeypatch, no_group_left, background):
    """A rank that ends after it has written leaves the others an error, and a whole checkpoint."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_with_dcp = dcp.save

    def lost(*args: Any, **kwargs: Any) -> None:
        save_with_dcp(*args, **kwargs)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    saver = Saver(tmp_path, *build(1.0))
    saver.save(1, {"step": 1}, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(store.dcp, "save", lost)
        with pytest.raises(OSError, match=r"; but step 2 is saved and `latest` names it: do not s"):
            saver.save(2, {"step": 2}, wait=not background)
            saver._wait_for_previous_save()
        assert latest(tmp_path) == tmp_path / "step-000002"
        patch.setattr(store.dcp, "save", _no_connection)
        with pytest.raises(OSError, match=r"one may have ended: gone$"):
            saver.save(3, {"step": 3}, wait=True)
    with pytest.raises(ValueError, match=r"step \(2\) must not be saved already"):
        saver.save(2, {"step": 2}, wait=True)
    saver.save(3, {"step": 3}, wait=True)
    saver.close()
    assert latest(tmp_path) == tmp_path / "step-000003"


def _no_connection(*_: object, **__: object) -> None:
    raise RuntimeError("gone")


def test_the_group_waits_as_long_as_the_default_one(tmp_path: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        with Saver(tmp_path, *build(1.0)) as saver:
            backend = saver._group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_progress_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moecore.io")
    seen: list[tuple[int, int]] = []
    with Saver(tmp_path, *build(1.0), progress=lambda *n: seen.append(n), config={"a": 1}) as saver:
        path = saver.save(1, {"step": 1}, wait=False)
    size = (path / "rank-00000.safetensors").stat().st_size
    assert seen[-1] == (size, size) and seen == sorted(seen)
    assert any("step 1: copied to host memory in" in r.message for r in caplog.records)
    assert read_manifest(path).facts.config == {"a": 1}


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    """Rank 1 fails in the background; both learn of it, go on, and the next save is whole."""
    root, results = Path(folder), {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = torch.nn.Linear(3, 5, bias=False)  # 5 rows: 3 here, 2 there
    weight = torch.arange(15.0).reshape(5, 3)
    model.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saver = Saver(root, model, optimizer)
    saver.save(1, {"step": 1}, wait=False)
    for _ in range(50):  # collectives of the training, while the background save has its own
        dist.all_reduce(torch.ones(10))
    with torch.no_grad():
        model.weight.to_local().fill_(-1.0)
    write = os.write
    saver._wait_for_previous_save()
    if rank == 1:
        os.write = _no_space  # type: ignore[assignment]
    saver.save(2, {"step": 2}, wait=False)
    saver._future.exception()
    os.write = write
    if rank == 0:  # told here, and not yet on rank 1: the next save tells both
        results["check"] = error_of(saver.check)
    results["save"] = error_of(lambda: saver.save(3, {"step": 3}, wait=False))
    saver.save(3, {"step": 3}, wait=False)
    results["close"] = error_of(saver.close)
    results["latest"] = str(latest(root))
    load(root / "step-000001", model, optimizer)
    results["weight"] = model.weight.full_tensor().detach()
    if rank == 0:
        (root / "step-000003" / "rank-00001.safetensors").write_bytes(b"")
    dist.barrier()
    results["verify"] = gather_objects(error_of(lambda: verify(root / "step-000003")))
    mine = "step-000001" if rank == 0 else "step-000003"
    results["paths"] = gather_objects(error_of(lambda: load(root / mine, model)))
    results["copy"] = gather_objects(copy_fails_on_one(root / "copy", rank, model, optimizer))
    results |= {
        name: gather_objects(text) for name, text in unlike_ranks(root / "unlike", rank, model)
    }
    results["resume"] = gather_objects(resumed(root / "resume", rank, model, optimizer))
    held = root / "held"  # by the process that has started these ranks
    results["second saver"] = gather_objects(error_of(lambda: Saver(held, model, None)))
    results["second save"] = gather_objects(error_of(lambda: save(held, 2, model, None)))
    other = torch.nn.Linear(3, 5 if rank == 0 else 6, bias=False)
    results["one rank's model"] = gather_objects(
        error_of(lambda: load(root / "step-000001", other))
    )
    return results


def copy_fails_on_one(root, rank, model, optimizer):
    """Rank 1 has no memory for its copies; nothing is left behind, and the next save is whole."""
    with Saver(root, model, optimizer) as saver:
        reserve = saver._copies.reserve_like
        if rank == 1:
            saver._copies.reserve_like = _no_memory  # type: ignore[method-assign]
        assert error_of(saver.prepare) == "LocalError: no pinned memory (on rank 1)"
        message = error_of(lambda: saver.save(1, wait=False))
        saver._copies.reserve_like = reserve  # type: ignore[method-assign]
        dist.barrier()  # rank 0 removes the draft
        left = [path.name for path in root.iterdir() if path.name != ".lock"]
        saver.save(1, wait=False)
    assert latest(root) == root / "step-000001"
    return message, left


class LocalError(Exception):
    """Pickle cannot make it again."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)


def _no_memory(*_: object) -> None:
    raise LocalError("no pinned memory", 3)


def unlike_ranks(root: Path, rank: int, model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Saves in which ranks differ; nothing may be written."""
    for name, value in (("json", {"seen": rank}), ("tensor", {"at": torch.arange(rank, rank + 3)})):
        yield f"extra {name}", error_of(lambda v=value: save(root, 1, model, None, v))
    other = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
    yield "other model", error_of(lambda: save(root, 1, other, None))
    yield from unlike_values(root, rank, model)
    with Saver(root, model, None) as saver:
        yield "saver", error_of(lambda: saver.save(1, {"seen": rank}, wait=False))
    dist.barrier()
    assert not root.exists() or not list(root.iterdir())
    same = {"same": [1.5, float("nan")], "ids": torch.zeros(0, 2)}
    save(root, 1, model, None, same, config={"rank": rank})  # for readers: may differ


def unlike_values(root: Path, rank: int, model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """What only one rank's value is kept of, and an optimizer without a step on rank 1."""

    def made(gradient: float = 1.0) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        model.weight.grad = torch.zeros_like(model.weight) if gradient else None
        optimizer.step()
        return optimizer

    yield "step", error_of(lambda: save(root, 1 + rank, model, None))
    optimizer = made()
    mine = None if rank else optimizer
    yield "optimizer", error_of(lambda: save(root, 1, model, mine))
    optimizer.param_groups[0]["lr"] = 0.1 * rank
    yield "lr", error_of(lambda: save(root, 1, model, optimizer))
    without = made(gradient=1.0 - rank)
    yield "no state", error_of(lambda: save(root, 1, model, without))
    optimizer = made()
    for _ in range(rank):
        optimizer.step()
    yield "step count", error_of(lambda: save(root, 1, model, optimizer))
    with Saver(root, model, optimizer) as saver:
        yield "step count, saver", error_of(lambda: saver.save(1, wait=False))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made())
    scheduler.step(1.0 + rank)
    yield "scheduler", error_of(lambda: save(root, 1, model, None, scheduler=scheduler))
    model.register_buffer("seen", torch.full((1,), float(rank)).expand(3))
    yield "buffer", error_of(lambda: save(root, 1, model, None))
    del model.seen
    model.weight.grad = None


def resumed(root: Path, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The example looks for the newest checkpoint on rank 0 only; its error reaches all."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    from moecore.recipes import resume

    (root / "checkpoints").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if rank == 0:
        (root / "checkpoints" / "latest").write_text("damaged")
    else:
        resume.latest = _no_space
    args = SimpleNamespace(run_dir=root, checkpoint_dir=None, memory_checkpoint_every=0)
    rest: Any = (None, None, None)  # TrainStep, moves and sampler, which the error comes before
    return error_of(
        lambda: resume.resume(args, model, [optimizer], {}, *rest, stage=None, chosen_by="")
    )


@pytest.mark.slow
def test_two_ranks_learn_of_one_rank_s_error(tmp_path: Path) -> None:
    with Saver(tmp_path / "held", *build(1.0)) as saver:
        saver.save(1, {"step": 1}, wait=True)
        before = sorted(os.listdir(tmp_path / "held"))
        results = run_ranks(2, worker, str(tmp_path))
        assert sorted(os.listdir(tmp_path / "held")) == before
    assert "rank 1 could not write it: OSError(28, 'No space" in results["check"]
    assert results["save"] == results["check"] and results["close"] == "no error"
    assert results["latest"] == str(tmp_path / "step-000003")
    assert torch.equal(results["weight"], torch.arange(15.0).reshape(5, 3))
    assert results["copy"] == [("LocalError: no pinned memory (on rank 1)", [])] * 2
    for name, wanted in (
        ("verify", "rank-00001.safetensors) must be as it was saved, but has 0 bytes"),
        ("paths", "must be the same on every rank, but rank 0 has step-000001"),
        ("one rank's model", "weight (5, 3) must be (6, 3) as in the model"),
        ("extra json", "extra seen of rank 1 must equal that of rank 0"),
        ("extra tensor", "extra at of rank 1 must equal that of rank 0"),
        ("saver", "extra seen of rank 1 must equal that of rank 0"),
        ("step", "step of rank 1 must equal that of rank 0, because only one is kept: call it"),
        ("optimizer", "optimizer of rank 1 must equal that of rank 0"),
        ("lr", "optimizer.param_groups[0]['lr'] of rank 1 must equal that of rank 0"),
        ("no state", "optimizer.step.weight must be on every rank, but is on only one of rank 0 a"),
        ("step count", "optimizer.step.weight of rank 1 must equal that of rank 0"),
        ("step count, saver", "optimizer.step.weight of rank 1 must equal that of rank 0"),
        ("scheduler", "scheduler best of rank 1 must equal that of rank 0"),
        ("buffer", "model.seen of rank 1 must equal that of rank 0"),
        ("other model", "model.layer0.weight must be on every rank, but is on only one of rank 0"),
        ("second saver", f"must be written to by one job, but 'pid {os.getpid()} on"),
        ("second save", f"must be written to by one job, but 'pid {os.getpid()} on"),
        ("resume", "latest) must be '<checkpoint> <sha256 of its manifest>' but is 'damaged'"),
    ):
        assert all(wanted in message for message in results[name]), name
        assert results[name][0] == results[name][1] or name == "paths"
