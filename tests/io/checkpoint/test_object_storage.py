import errno
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from moecore.cli import main
from moecore.io import Saver, latest, load, prune, read_manifest, save, set_latest, verify
from moecore.io.checkpoint.directory import find_complete_checkpoints
from moecore.io.checkpoint.lock import REMOTE_OWNER
from moecore.io.checkpoint.object_storage import RemotePath, make_path
from tests.io.checkpoint import faulty_store
from tests.io.checkpoint.faulty_store import Requests
from tests.io.checkpoint.kills import CRASH_EXIT, build, fill, in_child, loaded_step


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(faulty_store, "requests", new := Requests())
    return new


@pytest.fixture
def root(tmp_path: Path, requests: Requests) -> RemotePath:
    """The URL of a run in a store that has its first checkpoint."""
    url = f"faulty://{tmp_path}/bucket/run"
    save(url, 1, *build(1.0), {"step": 1})
    requests.made.clear()
    return RemotePath(url)


def objects(root: RemotePath) -> dict[str, list[str]]:
    """Names of the run's objects by prefix, without the attempts in them."""
    folder = Path(root.url.partition("://")[2])
    names: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.name[:10] + path.suffix if path.name.startswith("rank-") else path.name
        names.setdefault(str(path.parent.relative_to(folder)), []).append(name)
    return names


LOCKED = {".": [REMOTE_OWNER, "latest"]}
WHOLE = ["moecore.json", "rank-00000.safetensors"]


def test_runs_in_memory_and_in_a_directory_are_saved_and_loaded(tmp_path: Path) -> None:
    for url in ("memory://bucket/run", f"file://{tmp_path}/run"):
        assert latest(url) is None
        model, optimizer = build(0.0)
        with Saver(f"{url}/", model, optimizer, keep=2) as saver:
            for step in (1, 2, 3):
                fill(model, optimizer, float(step))
                path = saver.save(step, {"step": step}, wait=step == 2)
                fill(model, optimizer, -7.0)
        assert str(path) == f"{url}/step-000003" and path == latest(url)
        assert loaded_step(make_path(url)) == 3
        assert [path.name for path in find_complete_checkpoints(make_path(url))] == [
            "step-000002",
            "step-000003",
        ]
        assert verify(path).facts.step == read_manifest(str(path)).facts.step == 3
        set_latest(f"{url}/step-000002")
        assert loaded_step(make_path(url)) == 2
        save(url, 3, *build(3.0), {"step": 3})  # again, of the run that was rolled back
        assert loaded_step(make_path(url)) == 3
        assert [path.name for path in prune(url, 1)] == ["step-000002"]
        assert [path.name for path in find_complete_checkpoints(make_path(url))] == ["step-000003"]
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_downloaded_run_is_a_local_run_and_an_uploaded_one_a_remote_one(tmp_path, root) -> None:
    shutil.copytree(root.url.removeprefix("faulty://"), tmp_path / "local")
    assert loaded_step(tmp_path / "local") == 1
    save(tmp_path / "local", 2, *build(2.0), {"step": 2})
    uploaded = make_path(f"faulty://{tmp_path}/local")
    assert loaded_step(uploaded) == 2
    save(uploaded, 3, *build(3.0), {"step": 3}, keep=2)
    assert loaded_step(uploaded) == 3


def test_the_commands_take_urls(root: RemotePath, capsys: Any) -> None:
    save(root, 2, *build(2.0), {"step": 2})
    assert main(["checkpoint", "inspect", root.url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 2 and facts["steps"] == ["step-000001", "step-000002"]
    assert main(["checkpoint", "verify", f"{root}/step-000001"]) == 0
    assert capsys.readouterr().out.startswith(f"{root}/step-000001: whole, 1 files")
    for options, verb in ((["--dry-run"], "would remove"), ([], "removed")):
        assert main(["checkpoint", "prune", root.url, "--keep", "1", *options]) == 0
        assert capsys.readouterr().out == f"{verb} {root}/step-000001\n"
    assert main(["checkpoint", "verify", f"{root}/step-000001"]) == 2
    assert "must hold a moecore.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        ("memory://", "it names no bucket or prefix"),
        (Path("s3://bucket/run"), r"path \(s3:/bucket/run\) must be a str"),
    ],
)
def test_wrong_urls_are_refused(url: Any, problem: str) -> None:
    for action in (
        lambda: save(url, 1, *build(1.0)),
        lambda: Saver(url, *build(1.0)),
        lambda: load(url, *build(1.0)),
        lambda: latest(url),
        lambda: prune(url, 1),
    ):
        with pytest.raises(ValueError, match=problem) as info:
            action()
        assert "\n" not in str(info.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"gcsfs.*: pip install .\.\[storage\]."):
        latest("gs://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"fsspec.*: pip install .\.\[storage\]."):
        save("memory://bucket/run", 1, *build(1.0))


def save_and_crash(root: RemotePath, step: int, nth: int, keep: int) -> None:
    """Save, and die before the nth request."""

    def crash(operation: str, path: str) -> None:
        if len(faulty_store.requests.made) == nth:
            os._exit(CRASH_EXIT)

    faulty_store.requests.fault = crash
    save(root, step, *build(float(step)), {"step": step}, keep=keep)


@pytest.mark.slow
def test_a_job_that_dies_at_any_request_leaves_the_old_or_the_new_checkpoint(root: Any) -> None:
    step, nth, left = 1, 1, []
    while in_child(save_and_crash, root, step + 1, nth, 1) == CRASH_EXIT:
        left.append(loaded_step(root) - step)
        step, nth = step + 1, nth + 1
        if not left[-1]:
            save(root, step, *build(float(step)), {"step": step}, keep=1)
        prune(root, 1)  # or the next job would have more to remove
        assert loaded_step(root) == step
    assert set(left) == {0, 1} and len(left) > 20
    save(root, step + 2, *build(step + 2.0), {"step": step + 2}, keep=1)
    assert loaded_step(root) == step + 2
    assert objects(root) == LOCKED | {f"step-{step + 2:06d}": WHOLE}, "no leftovers"


def test_an_incomplete_step_is_never_the_latest_and_is_saved_again(root, requests) -> None:
    folder = Path(root.url.removeprefix("faulty://"))
    (folder / "step-000002").mkdir()
    whole = next((folder / "step-000001").glob("rank-*"))
    shutil.copy(whole, folder / "step-000002")  # all files of a job that died before the manifest
    assert loaded_step(root) == 1
    with pytest.raises(ValueError, match=r"must be a whole checkpoint"):
        load(root / "step-000002", *build(0.0))
    (root / "latest").unlink()
    assert loaded_step(root) == 1
    save(root, 2, *build(2.0), {"step": 2})
    assert loaded_step(root) == 2
    files = {name for name in os.listdir(folder / "step-000002") if name != "moecore.json"}
    assert len(files) == 2 and whole.name in files


TOOK_OVER = r"must be written to by one job, but 'pid \d+ on .* since .*' took it over: end one"


@pytest.mark.parametrize("pause", ["part", "manifest", "latest"])
def test_a_stalled_job_and_its_successor_do_not_mix(root, requests, pause) -> None:
    """The first job stands still at a request, while the second one saves the same step."""
    stalled, go, errors = threading.Event(), threading.Event(), []

    def stall(operation: str, path: str) -> None:
        name = {"moecore.json": "manifest"}.get(os.path.basename(path), os.path.basename(path))
        is_stall = threading.current_thread() is zombie and pause in (operation, name)
        if is_stall and operation in ("put", "part") and not stalled.is_set():
            stalled.set()
            assert go.wait(60)

    def save_first() -> None:
        try:
            save(root, 2, *build(2.0), {"step": 2, "job": "first"})
        except OSError as error:
            errors.append(str(error))

    zombie = threading.Thread(target=save_first)
    requests.fault = stall
    zombie.start()
    assert stalled.wait(60)
    model, optimizer = build(2.0)
    with Saver(root, model, optimizer) as saver:
        saver.save(2, {"step": 2, "job": "second"}, wait=True)
        go.set()
        zombie.join()
        # A request that was under way arrives late; what it names is there.
        job = "first" if pause == "manifest" else "second"
        path = latest(root)
        assert path is not None and load(path, *build(0.0))["job"] == job
        assert verify(path) and loaded_step(root) == 2
        fill(model, optimizer, 3.0)
        saver.save(3, {"step": 3}, wait=True)
    if pause == "latest":
        assert errors == []
    else:
        (error,) = errors
        assert "\n" not in error and "took it over: end one of them" in error
    assert loaded_step(root) == 3


def test_a_job_that_was_replaced_saves_no_more(root: RemotePath) -> None:
    first, second = Saver(root, *build(2.0)), Saver(root, *build(3.0))
    with pytest.raises(OSError, match=TOOK_OVER):
        first.save(2, {"step": 2}, wait=True)
    second.save(3, {"step": 3}, wait=False)
    first.close()
    second.close()
    assert loaded_step(root) == 3
    assert objects(root) == LOCKED | {"step-000001": WHOLE, "step-000003": WHOLE}


def test_listings_that_lag_are_not_believed(root: RemotePath, requests: Requests) -> None:
    save(root, 2, *build(2.0), {"step": 2})
    save(root, 3, *build(3.0), {"step": 3})
    requests.unlisted = {"step-000002", "step-000003", "moecore.json"}
    requests.removed = {"step-000009"}
    assert loaded_step(root) == 3
    with pytest.raises(ValueError, match=r"step \(2\) must be > 3"):
        save(root, 2, *build(2.0), {"step": 2})
    save(root, 4, *build(4.0), {"step": 4}, keep=1)
    requests.unlisted = {"step-000003", "step-000004"}
    assert loaded_step(root) == 4
    (root / "latest").unlink()  # then the listing is all there is: older, but whole
    assert loaded_step(root) == 2
    requests.unlisted = ()
    assert loaded_step(root) == 4


def expired(operation: str, path: str) -> None:
    raise PermissionError(errno.EACCES, "The provided token has expired.\nRequest again")


def test_a_store_that_refuses_is_not_an_empty_run(root: RemotePath, requests: Requests) -> None:
    """A run that took it for empty would begin again at step 0."""
    requests.fault = expired
    for action in (
        lambda: latest(root),
        lambda: prune(root, 1),
        lambda: read_manifest(root / "step-000001"),
        lambda: load(root / "step-000001", *build(0.0)),
        lambda: verify(root / "step-000001"),
        lambda: save(root, 2, *build(2.0)),
        lambda: Saver(root, *build(2.0)),
        lambda: set_latest(root / "step-000001"),
    ):
        with pytest.raises(OSError, match=r"faulty://.*token has expired") as info:
            action()
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "background"])
def test_a_full_bucket_fails_the_save_at_any_request_and_loses_nothing(root, requests, wait):
    model, optimizer = build(2.0)
    saver, num_failed = Saver(root, model, optimizer), 0
    refused: list[tuple[str, str]] = []

    def refuse(operation: str, path: str) -> None:
        writes = [made for made in requests.made if made[0] in ("put", "part", "complete")]
        if operation in ("put", "part", "complete") and len(writes) > num_failed:
            refused.append((operation, path))
            raise OSError(errno.EDQUOT, "QuotaExceeded: the bucket is full")

    while True:
        requests.made.clear()
        requests.fault = refuse
        try:
            saver.save(2, {"step": 2}, wait=wait)
            saver._wait_for_previous_save()
            break
        except OSError as error:
            assert "the bucket is full" in str(error) and "\n" not in str(error)
        requests.fault = lambda operation, path: None
        num_failed += 1
        assert loaded_step(root) == 1
        assert ("abort", refused[-1][1]) in requests.made or refused[-1][0] == "put"
    assert {operation for operation, _ in refused} == {"put", "part", "complete"}
    saver.close()
    assert loaded_step(root) == 2


def test_an_upload_that_lost_bytes_is_not_published(root: RemotePath, requests: Requests) -> None:
    requests.lost_bytes = 3
    with pytest.raises(OSError, match=r"must have the \d+ bytes that were written, not \d+"):
        save(root, 2, *build(2.0), {"step": 2})
    assert objects(root) == LOCKED | {"step-000001": WHOLE} and loaded_step(root) == 1


def test_damage_is_found(root: RemotePath) -> None:
    folder = Path(root.url.removeprefix("faulty://")) / "step-000001"
    file = next(folder.glob("rank-*"))
    data = file.read_bytes()
    for damaged, problem in (
        (data[:-1], r"has \d+ bytes instead of \d+"),
        (data[:-1] + bytes([data[-1] ^ 1]), "has another sha256"),
        (data[:20] + b"x" + data[21:], "has a header that is not the manifest's"),
        (None, "is missing"),
    ):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"path \(faulty://.*{problem}"):
            load(root / "step-000001", *build(0.0))
    (root / "latest").write(b"step-000001 " + b"0" * 64 + b"\n")
    assert latest(root) == root / "step-000001"  # a manifest that another attempt replaced
    (folder / "moecore.json").write_bytes((folder / "moecore.json").read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"one of both is damaged"):
        latest(root)
