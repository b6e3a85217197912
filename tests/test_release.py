import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import moecore

ROOT = Path(__file__).parent.parent


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {moecore.__version__} " in (ROOT / "CHANGELOG.md").read_text()


EXTRAS = (
    *("transformers", "tokenizers", "safetensors", "peft", "datasets", "tensorboard"),
    *("matplotlib", "tqdm", "accelerate", "trl", "triton"),
)


def test_commands_import_with_the_packages_of_a_plain_install() -> None:
    """guide.md: `pip install .`, which has no extra, is enough for moecore's own decoder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", line)[0] for line in project["dependencies"]}
    missing = {name: None for name in EXTRAS if name not in names}
    modules = "moecore.io, moecore.recipes.pretrain, moecore.planning.commands"
    code = f"import sys; sys.modules.update({missing}); import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_archives_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"src"} and {"CHANGELOG.md", "LICENSE", "README.md"} < names
    wheel = tmp_path / build.build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (path,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(path).decode())
    assert metadata["Version"] == moecore.__version__ and metadata["License-Expression"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "moecore/py.typed" in files and any(name.endswith("/tiny.toml") for name in files)
    assert {os.path.dirname(name).partition("/")[0] for name in files} == {
        "moecore",
        path.partition("/")[0],
    }
