from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="the client of S3, which extra `storage` has")
pytest.importorskip("moto.server", reason="the server of S3, which extra `oracles` has")

import s3fs
from moto.server import ThreadedMotoServer

from moecore.io import Saver, latest, load, prune, save, set_latest, verify
from moecore.io.checkpoint import shard_file
from moecore.io.checkpoint.directory import find_complete_checkpoints
from moecore.io.checkpoint.object_storage import make_path
from tests.io.checkpoint.kills import build, fill, loaded_step

PART_BYTES = 5 * 2**20  # the least that S3 takes
WIDTH = 640  # 4 layers and moments: 20 MB, of several parts


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setattr(s3fs.S3FileSystem, "default_block_size", PART_BYTES)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/runs/a"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def test_saves_loads_and_prunes(url: str) -> None:
    assert latest(url) is None
    model, optimizer = build(0.0, WIDTH)
    with Saver(url, model, optimizer, keep=2) as saver:
        for step in (1, 2, 3):
            fill(model, optimizer, float(step))
            saver.save(step, {"step": step}, wait=False)
    root = make_path(url)
    assert loaded_step(root, WIDTH) == 3
    assert [path.name for path in find_complete_checkpoints(root)] == ["step-000002", "step-000003"]
    (file,) = verify(root / "step-000003").files.values()
    assert file.size > 3 * PART_BYTES
    set_latest(f"{url}/step-000002")
    save(url, 3, *build(3.5, WIDTH), {"step": 3}, keep=2)
    assert next(reloaded(latest(url)).parameters()).min().item() == 3.5
    assert [path.name for path in prune(url, 1)] == ["step-000002"]
    names = {name.rpartition("/")[2][:5] for name in s3fs.S3FileSystem().find(url)}
    assert names == {"lates", "moeco", ".owne", "rank-"}


def reloaded(path: Any) -> Any:
    model, optimizer = build(0.0, WIDTH)
    load(path, model, optimizer)
    return model


def test_a_save_that_fails_leaves_no_upload(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url.replace("/a", "/b")
    save(url, 1, *build(1.0, WIDTH), {"step": 1})
    finish = shard_file.ShardWriter.finish

    def fail(writer: shard_file.ShardWriter) -> Any:
        writer._flush_buffer()  # whose parts are there
        raise OSError("the network is gone")

    monkeypatch.setattr(shard_file.ShardWriter, "finish", fail)
    with pytest.raises(OSError, match="the network is gone"):
        save(url, 2, *build(2.0, WIDTH), {"step": 2})
    monkeypatch.setattr(shard_file.ShardWriter, "finish", finish)
    system = s3fs.S3FileSystem()
    assert not system.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
    assert not system.exists(f"{url}/step-000002") and loaded_step(make_path(url), WIDTH) == 1


def test_a_missing_bucket_and_refused_keys_are_errors(url, monkeypatch) -> None:
    with pytest.raises(OSError, match=r"path \(s3://no-bucket/.*could not be accessed") as info:
        save("s3://no-bucket/run", 1, *build(1.0))
    assert "\n" not in str(info.value)

    async def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError("The provided token has expired.")

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", refused)
    for action in (lambda: latest(url), lambda: load(f"{url}/step-000003", *build(0.0, WIDTH))):
        with pytest.raises(OSError, match=r"s3://bucket/.*token has expired"):
            action()
