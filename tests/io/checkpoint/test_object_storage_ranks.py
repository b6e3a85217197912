"""Four ranks and an object store: other layouts load ranges; an error of a rank is all ranks'."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.base.rank_checks import gather_objects
from moecore.io import Saver, latest, load, read_manifest, save
from tests.helpers.ranks import run_ranks
from tests.io.checkpoint import faulty_store
from tests.io.checkpoint.test_layouts import build, differing, local, locals_of, put, whole_state

pytestmark = pytest.mark.slow
WORLD = 4
SAVED, LOADED = "ep2-edp2", ("ep4", "dp", "tp2-ep2-replicate2")
CONTIGUOUS = LOADED[:2]  # whose shards are rows, without bytes of other ranks between


def worker(rank: int, device: torch.device, url: str) -> dict[str, Any]:
    whole, requests = whole_state("native"), faulty_store.requests
    model, optimizer = build("native", SAVED)
    put(whole, model, optimizer)
    save(url, 1, model, optimizer, {"step": 1})
    results: dict[str, Any] = {name: load_as(name, url, whole) for name in LOADED}
    results["errors"] = [
        fail(rank, url, model, optimizer, operation, wait=wait)
        for operation in ("part", "complete", "put")
        for wait in (True, False)
    ]
    requests.fault = expired if rank == 3 else (lambda operation, path: None)
    results["load"] = all_errors(lambda: load(f"{url}/step-000001", model, optimizer))
    requests.fault = lambda operation, path: None
    save(url, 2, model, optimizer, {"step": 2})
    before = locals_of(model, optimizer)
    put({name: torch.zeros_like(t) for name, t in whole.items()}, model, optimizer)
    path = latest(url)
    assert path is not None
    results["saved"] = (
        load(path, model, optimizer)["step"],
        differing(locals_of(model, optimizer), before),
    )
    return results


def load_as(name: str, url: str, whole: dict[str, torch.Tensor]) -> list[Any]:
    """Load what another layout saved; return each rank's differences, and bytes read and needed."""
    model, optimizer = build("native", name)
    put(whole, model, optimizer)
    wanted = locals_of(model, optimizer)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local(tensor).fill_(7.0)
    optimizer.state.clear()
    gather_objects(None)
    faulty_store.requests.read_bytes = 0
    assert load(f"{url}/step-000001", model, optimizer, verify="sizes") == {"step": 1}
    found = locals_of(model, optimizer)
    num_bytes = sum(tensor.nbytes for tensor in found.values())
    return gather_objects((differing(found, wanted), faulty_store.requests.read_bytes, num_bytes))


def expired(operation: str, path: str) -> None:
    raise PermissionError(errno.EACCES, "The provided token has expired.\nRequest another")


def fail(rank: int, url: str, model: Any, optimizer: Any, operation: str, *, wait: bool) -> Any:
    """Save while one rank's requests of a kind are refused; return the errors and the latest."""

    def refuse(made: str, path: str) -> None:
        if made == operation and ".owner" not in path:
            expired(made, path)

    saver = Saver(url, model, optimizer)
    fails = rank == (0 if operation == "put" else 2)  # the manifest is rank 0's
    faulty_store.requests.fault = refuse if fails else (lambda made, path: None)

    def save_and_wait() -> None:
        saver.save(2, {"step": 2}, wait=wait)
        saver._wait_for_previous_save()

    errors = all_errors(save_and_wait)
    faulty_store.requests.fault = lambda made, path: None
    saver.close()
    return errors, str(latest(url))


def all_errors(action: Any) -> list[str]:
    try:
        action()
    except OSError as error:
        return gather_objects(str(error))
    return gather_objects("")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"faulty://{tmp_path_factory.mktemp('store')}/bucket/run"


@pytest.fixture(scope="module")
def results(url: str) -> dict[str, Any]:
    return run_ranks(WORLD, worker, url)


@pytest.mark.parametrize("name", LOADED)
def test_other_layouts_load_the_same_bits_from_the_ranges_of_their_shards(results, url, name):
    manifest = read_manifest(f"{url}/step-000001")
    others = len(manifest.text) + sum(16_384 + file.size // 50 for file in manifest.files.values())
    whole = sum(tensor.nbytes for tensor in whole_state("native").values())
    for wrong, read, needed in results[name]:
        assert wrong == [] and needed < whole
        if name in CONTIGUOUS:
            assert needed <= read <= needed + others


def test_an_error_of_one_rank_is_one_line_on_all(results: dict[str, Any], url: str) -> None:
    for errors, newest in results["errors"]:
        assert len(set(errors)) == 1 and newest == f"{url}/step-000001"
        assert "token has expired" in errors[0] and "\n" not in errors[0]
    errors = results["load"]
    assert len(set(errors)) == 1 and "token has expired" in errors[0] and "\n" not in errors[0]
    assert results["saved"] == (2, [])


def test_attempts_that_failed_leave_no_files(results: dict[str, Any], url: str) -> None:
    step = Path(url.partition("://")[2]) / "step-000002"
    assert len(list(step.glob("rank-*"))) == len(read_manifest(f"{url}/step-000002").files) == WORLD
