"""Text that exists without a network: sources and pages of the Python installation.

The standard library and every installed package, so mostly code and the English of its docstrings
and pages. The text depends on the installed packages: `Text.digest` identifies it.

Legend: N bytes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = {".py", ".pyi", ".rst", ".md", ".txt"}
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
LEAST_BYTES, MOST_BYTES = (
    1 << 10,
    256 << 10,
)  # of a file: shorter ones are headers, longer ones data
ASCII = bytes(range(128))
MOST_OTHERS = 0.03  # share of bytes that are not ASCII
LONGEST_LINES = 160  # mean: above it a file is data
HELD_OUT = 32  # one file of so many is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text for training, and held-out text of other files.

    Attributes:
        train_N: uint8.
        held_out_N: uint8.
        num_files: of both.
        digest: of the files' digests in their order.
    """

    train_N: Tensor
    held_out_N: Tensor
    num_files: int
    digest: str


def list_installed_folders() -> list[Path]:
    """Return the folders of the standard library and of installed packages, each once."""
    paths = sysconfig.get_paths()
    found = [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    found.append(Path(torch.__file__).parents[1])
    return list(dict.fromkeys(path.resolve() for path in found))


def read_text(folders: Iterable[Path], *, most_bytes: int) -> Text:
    """Return the text of all files in the folders, at most `most_bytes`.

    Files are sorted by a digest of their relative path, so neighbours are from different packages.
    Copies are left out. The content of a file determines whether it is held out.

    Raises:
        ValueError: if there is no text for training or none to hold out.
    """
    seen: set[bytes] = set()
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total, order = 0, hashlib.sha256()
    for path in sort_files(folders):
        content = read_if_text(path)
        digest = hashlib.sha256(content).digest() if content else b""
        if not content or digest in seen:
            continue
        seen.add(digest)
        order.update(digest)
        parts[digest[0] % HELD_OUT == 0].append(content)
        total += len(content)
        if total >= most_bytes:
            break
    if not parts[False] or not parts[True]:
        raise ValueError(
            f"folders ({len(seen)} files of text) must have text to train on and to hold out: "
            "give folders with more"
        )
    return Text(
        train_N=_join(parts[False]),
        held_out_N=_join(parts[True]),
        num_files=len(seen),
        digest=order.hexdigest()[:16],
    )


def sort_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that may be text, sorted by a digest of their relative path."""
    found: dict[Path, str] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.suffix in SUFFIXES and not SKIPPED_FOLDERS & set(inside.parts):
                found.setdefault(path, hashlib.sha256(str(inside).encode()).hexdigest())
    yield from sorted(found, key=lambda path: (found[path], path))


def read_if_text(path: Path) -> bytes | None:
    """Return a file's bytes if they are text of a usual length and width, else None."""
    try:
        if not LEAST_BYTES <= path.stat().st_size <= MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    num_others = len(content.translate(None, ASCII))
    is_wide = len(content) > LONGEST_LINES * (content.count(b"\n") + 1)
    if b"\0" in content or is_wide or num_others > MOST_OTHERS * len(content):
        return None
    return content


def _join(parts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
