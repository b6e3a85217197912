from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from tools import affected

ROOT = Path(__file__).parents[1]
SCRIPTS = ["tests/benchmarks", "tests/examples", "tests/recipes", "tests/integrations"]
COMPILED = [name for name in affected.ONLY_AFTER if name.endswith("compile.py")]


def test_only_what_no_change_concerns_is_left_out() -> None:
    every = [*SCRIPTS, *COMPILED]
    assert affected.leave_out(None) == []
    assert affected.leave_out([]) == affected.leave_out(["docs/api.md", "README.md"]) == every
    assert affected.leave_out(["docs/api.md", "examples/first.py"]) == [
        name for name in every if name != "tests/examples"
    ]
    assert affected.leave_out(["src/moecore/families/adopt.py"]) == [*SCRIPTS[:3], *COMPILED]
    assert affected.leave_out(["benchmarks/harness.py"]) == every[1:]
    assert affected.leave_out(["src/moecore/kernels/common.py"]) == SCRIPTS
    assert affected.leave_out(["tests/helpers/ranks.py"]) == []


@pytest.mark.parametrize("name", COMPILED)
def test_all_that_a_test_of_compiling_imports_concerns_it(name: str) -> None:
    for file in affected.closure(ROOT / name):
        assert name not in affected.leave_out([str(file.relative_to(ROOT))]), file


@pytest.mark.parametrize("folder", affected.ONLY_AFTER)
def test_the_table_names_what_is_there(folder: str) -> None:
    assert (ROOT / folder).exists()
    files = [str(p.relative_to(ROOT)) for top in ("src", "tests") for p in (ROOT / top).rglob("*")]
    files += [str(p.relative_to(ROOT)) for p in [*ROOT.glob("*"), *ROOT.glob("*/*")]]
    for pattern in affected.ONLY_AFTER[folder]:
        assert any(re.fullmatch(pattern, file) for file in files), pattern


@pytest.mark.parametrize("folder", SCRIPTS)
def test_what_scripts_put_together_concerns_them(folder: str) -> None:
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("*.py")]
    for name in ("step", "parallelize", "checkpoint/store"):
        found = [f for f in files if re.fullmatch(rf"src/moecore/(.*/)?{name}\.py", f)]
        assert found and all(folder not in affected.leave_out([file]) for file in found)


def test_each_file_has_a_test_that_runs_when_it_changes() -> None:
    imported = dict[str, set[Path]]()  # by the folder that may be left out; "" = by other tests
    for test in (ROOT / "tests").rglob("test_*.py"):
        name = str(test.relative_to(ROOT))
        folder = next((one for one in affected.ONLY_AFTER if name.startswith(one)), "")
        imported.setdefault(folder, set()).update(affected.closure(test))
    # What packages and the command line import by name.
    by_name = {"__init__.py", "__main__.py", "commands.py", "options.py"}
    for file in (ROOT / "src").rglob("*.py"):
        if file.name not in by_name:
            left_out = affected.leave_out([str(file.relative_to(ROOT))])
            run = [files for folder, files in imported.items() if folder not in left_out]
            assert any(file in files for files in run), file


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A repository with a commit on main; the function runs git in it."""
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.delenv("MOECORE_BASE", raising=False)

    def run(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    commit(run, tmp_path / "first")
    return run


def commit(git, path: Path) -> None:
    path.write_text("")
    git("add", ".")
    git("commit", "-q", "-m", path.name)


def test_changes_are_those_since_the_parent_of_the_landing(git, tmp_path, monkeypatch) -> None:
    commit(git, tmp_path / "second")
    assert affected.changes() is None, "main itself, of commits in a line: nobody knows where from"
    git("checkout", "-q", "-b", "branch")
    commit(git, tmp_path / "third")
    commit(git, tmp_path / "fourth")
    (tmp_path / "fifth").write_text("not committed")
    assert sorted(affected.changes() or []) == ["fifth", "fourth", "third"]
    (tmp_path / "fifth").unlink()
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-m", "landing", "branch")
    assert affected.changes() is None, "a merge may be one of several since the landing before"
    monkeypatch.setenv("MOECORE_BASE", "HEAD~1")
    assert sorted(affected.changes() or []) == ["fourth", "third"]
    monkeypatch.setenv("MOECORE_BASE", "0123456789")
    assert affected.changes() is None, "a commit that a shallow clone lacks"


def test_no_repository_means_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("MOECORE_BASE", raising=False)
    assert affected.changes() is None


def test_tests_for_a_file_are_those_whose_imports_end_there() -> None:
    (bins,) = ROOT.glob("src/moecore/**/packing/bins.py")
    found = affected.tests_for(str(bins.relative_to(ROOT)))
    assert "tests/packing/test_bins.py" in found and "tests/parallel/test_mesh.py" not in found
    assert affected.tests_for("examples/first.py") == ["tests/examples"]
    assert affected.tests_for("docs/api.md") == []


def test_names_of_a_package_lead_to_their_files(tmp_path, monkeypatch) -> None:
    """Names that it imports, also under TYPE_CHECKING: those are imported on first use."""
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    files = {
        "src/parcel/__init__.py": "from parcel.now import early\nif TYPE_CHECKING:\n"
        "    from parcel.inner.then import late",
        "src/parcel/now.py": "",
        "src/parcel/inner/__init__.py": "",
        "src/parcel/inner/then.py": "from parcel.now import early",
        "src/parcel/other.py": "",
        "tests/test_early.py": "from parcel import early",
        "tests/test_late.py": "def test():\n    from parcel import late",
        "tests/test_other.py": "import parcel.other",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    early, late, other = (f"tests/test_{name}.py" for name in ("early", "late", "other"))
    assert affected.tests_for("src/parcel/now.py") == [early, late]
    assert affected.tests_for("src/parcel/inner/then.py") == [late]
    assert affected.tests_for("src/parcel/other.py") == [other]


def test_names_that_left_out_folders_import_exist() -> None:
    """A name that moves in src must not break scripts whose tests a change leaves out."""
    scripts = [p for folder in ("examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    asked = {
        (node.module, alias.name)
        for script in scripts
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("moecore", "tests."))
        for alias in node.names
    }
    assert len(asked) > 100
    for module, name in sorted(asked):
        try:
            found = importlib.import_module(str(module))
        except ImportError as error:
            assert " needs " in str(error)  # an optional package, named
            continue
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
