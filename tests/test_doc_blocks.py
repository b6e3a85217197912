"""Blocks of pages run as they stand there, with nothing but a tiny model in a directory beside."""

import importlib.metadata
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# Page and places of blocks that run together, with no others. Other tests run all blocks of a page.
ALONE = {
    "a first run": ("guide", 0),
    "a run of Megatron-LM": ("from_megatron", 0),
    "a balance loss": ("balancing", 0),
    "a step": ("parallelize", 0),
    "an exchange": ("dispatchers", 0),
    "a layer": ("models", 1),
    "strategies": ("sharding", 0),
    "two parts": ("sharding", 1),
    "a corpus": ("pretraining", 0),
    "memory options": ("memory", 0),
    "object storage": ("object_storage", 0),
    "memory of hosts": ("object_storage", 1),
    "an adapter": ("extending", 0),
    "an expert backend": ("extending", 3),
    "a rule of the router": ("extending", 4),
    "a precision by name": ("extending", 5),
    "an adapter of experts": ("extending", 0, 1),
    "experts by name": ("transformers", 6),
    "TRL": ("transformers", 1),
    "documents of a Trainer": ("transformers", 0, 2, 3),
}


def code_of(page: str, *places: int) -> str:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return "".join(blocks[place] for place in places)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, as its pages make it."""
    root = tmp_path_factory.mktemp("tiny")
    run_ranks(1, make_tiny, str(root / "runs" / "tiny"))
    return root


def make_tiny(rank: int, device: torch.device, path: str) -> None:
    importlib.import_module("moecore.recipes.tiny_model").write_tiny_model(Path(path))


def worker(rank: int, device: torch.device, root: str, code: str) -> list[str]:
    os.chdir(root)
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return [name for name, value in names.items() if name == "loss" and value.isfinite()]


@pytest.mark.parametrize("name", ALONE)
def test_a_block_runs_alone(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(*ALONE[name])
    if name == "TRL":
        for module in ("trl", "datasets"):
            pytest.importorskip(module)
        if Version(importlib.metadata.version("transformers")) < Version("5.23"):
            # generate raises with output_router_logits, which SFTTrainer has set.
            code, grpo, _ = code.partition("def few_tokens")
            assert grpo
    monkeypatch.setenv("MOECORE_HOST", f"pages-{os.getpid()}")
    run_ranks(1, worker, str(tiny), code)
    shutil.rmtree(f"/dev/shm/moecore-{os.getuid()}-pages-{os.getpid()}", ignore_errors=True)


def test_the_block_of_context_parallelism_runs_on_two_ranks(tiny: Path) -> None:
    code = code_of("context_parallel", 0)
    assert code.count("ep=8") == 1
    assert run_ranks(2, worker, str(tiny), code.replace("ep=8", "ep=2")) == ["loss"]


def test_the_block_of_a_dispatcher_runs_on_two_ranks(tiny: Path) -> None:
    code = code_of("extending", 2) + "assert received and min(received) > 0\n"
    assert run_ranks(2, worker, str(tiny), code) == ["loss"]
