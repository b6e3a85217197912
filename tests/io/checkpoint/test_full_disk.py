"""A file system that is really full: a tmpfs of 16 MB. Skipped where mounting is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moecore.io import Saver, latest, load, save, verify
from tests.io.checkpoint.kills import build, loaded_step

WIDTH = 256  # 3 MB with moments
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a tmpfs is refused: {error}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def free_pages(disk: Path) -> int:
    return os.statvfs(disk).f_bavail


def fill_up(disk: Path, left: int) -> Path:
    """Write a file that leaves so many pages."""
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * PAGE * (free_pages(disk) - left))
    assert free_pages(disk) == left
    return ballast


def pages_of_a_save(disk: Path) -> int:
    before = free_pages(disk)
    save(disk / "first", 1, *build(1.0, WIDTH), {"step": 1})
    save(disk / "first", 2, *build(2.0, WIDTH), {"step": 2})
    pages = (before - free_pages(disk)) // 2
    subprocess.run(["rm", "-r", str(disk / "first")], check=True)
    return pages


@pytest.mark.parametrize("wait", [True, False], ids=["plain", "background"])
def test_a_full_disk(disk: Path, wait: bool) -> None:
    """Room for nothing, for a part, for all but the last pages: each is one error."""
    root, pages = disk / "run", pages_of_a_save(disk)
    first = save(root, 1, *build(1.0, WIDTH), {"step": 1})
    outcomes = []
    for left in (0, 1, 2, pages // 2, *range(pages - 4, pages + 3)):
        ballast = fill_up(disk, left)
        before = sorted(os.listdir(root))
        try:
            with Saver(root, *build(2.0, WIDTH)) as saver:
                saver.save(2, {"step": 2}, wait=wait)
            outcomes.append("saved")
            assert loaded_step(root, WIDTH) == 2
            break
        except OSError as error:
            outcomes.append("full")
            assert "No space left on device" in str(error)
            assert "\n" not in str(error)
            assert sorted(os.listdir(root)) == before, "nothing is left behind"
            assert latest(root) == first and free_pages(disk) == left
            verify(first)
            assert loaded_step(root, WIDTH) == 1
        ballast.unlink()
    assert len(outcomes) > 6 and set(outcomes[:-1]) == {"full"} and outcomes[-1] == "saved"
    (disk / "ballast").unlink()
    save(root, 3, *build(3.0, WIDTH), {"step": 3})
    assert load(root / "step-000003", *build(0.0, WIDTH))["step"] == 3
