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
from moecore.cli import main
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
def test_a_command_trains_a_model_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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

    words = f"finetune --model org/tiny --data {snapshot / 'chats.jsonl'} --run-dir run"
    words += " --max-steps 2 --seq-len 128 --batch-size 1 --checkpoint-every 0 --eval-every 0"
    command = [sys.executable, "-m", "moecore", *words.split(), "--ranks", "1"]
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(words.replace("org/tiny", "org/other").split()) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "--model (org/other) must be a directory, or a model of the hub" in refused
    words = "--tokenizer bytes --data python: --seq-len 64 --dry-run"
    assert main(f"pretrain --hf-config org/tiny {words}".split()) == 0
    planned = capsys.readouterr().out
    assert 'hf_config = "org/tiny"' in planned and "peak memory" in planned
    assert main(f"pretrain --hf-config org/other {words}".split()) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "--hf-config (org/other) must be a config.json, its directory, or" in refused
