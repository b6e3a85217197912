import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

import moecore
from moecore.recipes.files import find_config, find_model_directory
from moecore.recipes.tiny_model import write_tiny_model

COMMIT = "0123456789" * 4


def test_directories_and_paths_are_no_names(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("missing"), Path("a/b/c")):
        assert find_model_directory(path) == path == find_config(path)


def test_one_process_of_a_host_downloads(tmp_path: Path, monkeypatch: Any) -> None:
    cached: list[str] = []

    def snapshot_download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            time.sleep(0.5)  # the other thread looks into the cache meanwhile
            cached.append(name)
        elif not cached:
            raise LocalEntryNotFoundError("not cached")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(find_model_directory, [Path("org/model")] * 2))
    assert found == [tmp_path / "snapshot"] * 2 and cached == ["org/model"]


@pytest.mark.slow
def test_two_ranks_train_a_model_of_the_cache(tmp_path: Path) -> None:
    """The launcher finds the snapshot without a network, and says so of another name."""
    cache = tmp_path / "cache"
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    write_tiny_model(
        snapshot, hidden_size=32, num_hidden_layers=1, head_dim=8, moe_intermediate_size=16
    )
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    environ = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = str(Path(moecore.__file__).parents[1])

    def moecore_of(words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moecore", *words.split()]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)

    def finetune(model: str) -> subprocess.CompletedProcess[str]:
        words = f"finetune --model {model} --data {snapshot / 'chats.jsonl'} --run-dir run"
        words += " --max-steps 2 --seq-len 128 --batch-size 1 --checkpoint-every 0 --eval-every 0"
        return moecore_of(words)

    run = finetune("org/tiny")
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    refused = finetune("org/other")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "--model (org/other) must be a directory, or a model of the hub" in refused.stderr
    words = "--tokenizer bytes --data python: --seq-len 64 --dry-run"
    planned = moecore_of(f"pretrain --hf-config org/tiny {words}")
    assert 'hf_config = "org/tiny"' in planned.stdout and "peak memory" in planned.stdout
    refused = moecore_of(f"pretrain --hf-config org/other {words}")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "--hf-config (org/other) must be a config.json, its directory, or" in refused.stderr
