from pathlib import Path

import pytest
from benchmarks import text

LINE = b"def area(width: int, height: int) -> int:  # of number %d\n"


def page(number: int, lines: int = 40) -> bytes:
    return LINE % (number + 1000) * lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(120):
        inside = tmp_path / f"package{number % 7}"
        inside.mkdir(exist_ok=True)
        (inside / f"module{number}.py").write_bytes(page(number))
    return tmp_path


def read(folder: Path, most_bytes: int = 1 << 30) -> text.Text:
    return text.read_text([folder], most_bytes=most_bytes)


def test_every_file_is_in_one_part_whole(folder: Path) -> None:
    found = read(folder)
    train, held_out = (bytes(part.tolist()) for part in (found.train_N, found.held_out_N))
    assert found.num_files == 120
    for number in range(120):
        assert (page(number) in train) != (page(number) in held_out), number
    assert 0 < len(held_out) < len(train) / 8


def test_copies_count_once_and_order_is_fixed(folder: Path) -> None:
    first = read(folder)
    (folder / "copy.py").write_bytes(page(3))
    again = read(folder)
    assert again.num_files == first.num_files and read(folder).digest == again.digest
    (folder / "package3" / "module3.py").write_bytes(page(5000))
    (folder / "copy.py").unlink()
    assert read(folder).digest != first.digest


def test_it_stops_when_it_has_enough(folder: Path) -> None:
    size = len(page(0))
    found = read(folder, most_bytes=80 * size)
    assert found.num_files == 80


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("short.py", b"x = 1\n"),
        ("long.py", page(1, lines=6000)),
        ("data.txt", b"0123456789" * 400),
        ("foreign.txt", "\u0436\u0438\u0432\u0435\u0442\n".encode() * 400),
        ("binary.py", b"\0" + page(1)),
        ("table.csv", page(1)),
        ("__pycache__/cached.py", page(1)),
    ],
)
def test_what_is_no_text_is_left_out(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert [p for p in text.sort_files([tmp_path]) if text.read_if_text(p)] == []


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folders \(0 files of text\) must have text"):
        read(tmp_path)


def test_python_has_text() -> None:
    found = text.read_text(text.list_installed_folders()[:1], most_bytes=1 << 19)
    assert found.train_N.numel() > 1 << 18 and found.held_out_N.numel() > 1 << 10
