import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gate import ROOT, Gate, compute_key, read_report

GREEN, RED = "tests/kernels/test_green.py", "tests/kernels/test_red.py"
EMPTY, MISSING = "tests/kernels/test_empty.py", "tests/kernels/test_missing.py"


class Memory:
    """Stands in for pytest's cache."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def get(self, key: str, default: object) -> object:
        return self.values.get(key, default)

    def set(self, key: str, value: object) -> None:
        self.values[key] = value


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three test files; the green one leaves a trace each time that it runs."""
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    trace = f"open({str(tmp_path / 'trace')!r}, 'a').write('x')"
    (tmp_path / GREEN).write_text(f"def test_a():\n    {trace}\n")
    (tmp_path / RED).write_text(
        "def test_b():\n    assert True\ndef test_c():\n    assert 1 == 2, 'wrong row'\n"
    )
    (tmp_path / EMPTY).write_text("")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    slow: x\n")
    return tmp_path


def test_red_empty_and_missing_tests_refuse(repository: Path) -> None:
    gate = Gate(repository, None, gpu=False)
    gate.run([GREEN, RED, EMPTY, MISSING])
    assert gate.find_failure([GREEN]) is None
    failure = gate.find_failure([GREEN, RED])
    assert failure is not None and "test_red.py::test_c" in failure and "wrong row" in failure
    assert "no test in tests/kernels/test_empty.py ran" in str(gate.find_failure([EMPTY]))
    assert "does not exist" in str(gate.find_failure([MISSING]))
    assert (repository / "trace").read_text() == "x", "one run for all questions"


def test_green_is_remembered_until_a_source_changes(repository: Path) -> None:
    memory = Memory()
    for _ in range(2):
        assert Gate(repository, memory, gpu=False).find_failure([GREEN]) is None
    assert (repository / "trace").read_text() == "x"
    (repository / "src").mkdir()
    (repository / "src" / "op.py").write_text("")
    assert Gate(repository, memory, gpu=False).find_failure([GREEN]) is None
    assert (repository / "trace").read_text() == "xx"


def test_red_is_not_remembered(repository: Path) -> None:
    memory = Memory()
    assert Gate(repository, memory, gpu=False).find_failure([RED]) is not None
    (repository / RED).write_text("def test_c():\n    pass\n")
    assert Gate(repository, memory, gpu=False).find_failure([RED]) is None


def test_a_file_that_cannot_be_imported_leaves_the_others(repository: Path) -> None:
    (repository / RED).write_text("import does_not_exist\n")
    gate = Gate(repository, None, gpu=False)
    gate.run([RED, GREEN])
    assert gate.find_failure([GREEN]) is None and "does_not_exist" in str(gate.find_failure([RED]))


def test_a_crash_refuses_with_its_last_words(repository: Path) -> None:
    (repository / GREEN).write_text("import os\nprint('last words', flush=True)\nos._exit(3)\n")
    find_failure = Gate(repository, None, gpu=False).find_failure([GREEN])
    assert find_failure is not None and "ended with 3" in find_failure


def test_key_depends_on_tests_and_sources(repository: Path) -> None:
    first = compute_key(repository)
    assert first == compute_key(repository)
    (repository / GREEN).write_text("def test_a():\n    pass\n")
    assert compute_key(repository) != first


def test_a_report_of_skips_and_errors() -> None:
    text = """<testsuites><testsuite>
      <testcase classname="tests.moe.test_a" name="test_1[x]"/>
      <testcase classname="tests.moe.test_a.TestIn" name="test_2"><skipped message="m"/></testcase>
      <testcase classname="tests.moe.test_ab" name="test_3"><skipped message="m"/></testcase>
      <testcase classname="" name="tests.moe.test_c"><error message="no import"/></testcase>
    </testsuite></testsuites>"""
    found = read_report(
        text, ["tests/moe/test_a.py", "tests/moe/test_ab.py", "tests/moe/test_c.py"]
    )
    assert found["tests/moe/test_a.py"] is None
    assert found["tests/moe/test_ab.py"] == "no test in tests/moe/test_ab.py ran here"
    assert "no import" in str(found["tests/moe/test_c.py"])


@pytest.mark.nightly  # `make bench` collects them as well
def test_benchmarks_are_collected_by_name_and_all_say_what_proves_them() -> None:
    command = [sys.executable, "-m", "pytest", "benchmarks", "--collect-only", "-q"]
    run = subprocess.run(
        [*command, "--shape", "fine-7b", "--routing", "learned"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert "benchmarks/bench_layer.py::test_layer[fine-7b-learned]" in run.stdout, run.stdout
    assert "bench_kernels.py::test_kernel[fine-7b-learned-gather_rows]" in run.stdout
    assert "skewed" not in run.stdout and "dsv3" not in run.stdout
