"""An object store in a folder, at faulty://FOLDER: as S3, without rename, and with faults to plant.

An object appears when its upload is complete. Ranks and jobs of one host share the folder. Each
process plants its own faults: `requests.fault(operation, path)` runs before each request, and may
raise what a store would, wait, or end the process.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Requests:
    """What this process has asked the store, and what the store does wrong."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self.read_bytes = 0
        self.fault: Callable[[str, str], None] = lambda operation, path: None
        self.unlisted: Collection[str] = ()  # names that listings do not have yet
        self.removed: Collection[str] = ()  # names that listings still have
        self.lost_bytes = 0  # of the end of each upload

    def make(self, operation: str, path: str) -> None:
        self.made.append((operation, path))
        self.fault(operation, path)


requests = Requests()


class FaultyStore(AbstractFileSystem):
    protocol = "faulty"
    root_marker = "/"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        requests.make("list", path)
        folder = Path(path)
        if not folder.exists():
            raise FileNotFoundError(path)
        if folder.is_file():
            entries = [self._describe(folder)]
        else:
            children = [p for p in folder.iterdir() if p.name not in requests.unlisted]
            children = [
                p for p in children if p.is_file() or any(q.is_file() for q in p.rglob("*"))
            ]
            entries = [self._describe(p) for p in children if not p.name.startswith(".upload-")]
            ghosts = (str(folder / name) for name in requests.removed)
            entries += [{"name": name, "size": 0, "type": "directory"} for name in ghosts]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        requests.make("head", path)
        if not Path(path).exists():
            raise FileNotFoundError(path)
        return self._describe(Path(path))

    def _describe(self, path: Path) -> dict[str, Any]:
        is_file = path.is_file()
        size = path.stat().st_size if is_file else 0
        return {"name": str(path), "size": size, "type": "file" if is_file else "directory"}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        requests.make("get", path)
        with open(path, "rb") as file:
            file.seek(start or 0)
            data = file.read() if end is None else file.read(end - (start or 0))
        requests.read_bytes += len(data)
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        requests.make("put", path)
        put(path, value)

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        requests.make("delete", path)
        if Path(path).is_file():
            os.unlink(path)

    rm_file = _rm

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Upload:
        assert mode == "wb", "whole objects are read by ranges"
        return Upload(self, path, mode, block_size=2**15)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object store has no rename")


class Upload(AbstractBufferedFile):
    """A multi-part upload: parts are invisible until the last one completes the object."""

    parts: list[bytes]

    def _initiate_upload(self) -> None:
        self.parts = []

    def _upload_chunk(self, final: bool = False) -> bool:
        requests.make("part", self.path)
        self.parts.append(self.buffer.getvalue())
        if final:
            requests.make("complete", self.path)
            data = b"".join(self.parts)
            put(self.path, data[: len(data) - requests.lost_bytes])
        return True

    def discard(self) -> None:
        requests.made.append(("abort", self.path))


def put(path: str, data: bytes) -> None:
    """Make or replace an object at once, as a store does."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".upload-{uuid.uuid4().hex}")
    draft.write_bytes(data)
    draft.replace(target)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
