import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ranks import ranks_fixture
from tests.integrations.titan_runs import IMPORTED, TITAN, prepare

if not TITAN.startswith("0.2"):  # not imported here: `prepare` comes first
    pytest.skip("torchtitan 0.2 is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

SEQ_LEN, VOCAB = 4, 2048  # of debugmodel_moe
MODELS = ("local_qwen3", "local_moecore_qwen3", "local_moecore")


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    prepare()
    from examples.torchtitan.local_tokens import LocalTokens, build_local_tokens, read_tokens
    from torchtitan.protocols.train_spec import get_train_spec

    found: dict[str, Any] = {}
    tokens_N = np.arange(33, dtype=np.int32)  # 6 rows of 5, the rest is not read
    sizes: dict[str, Any] = dict(num_ranks=2, batch=2, seq_len=SEQ_LEN)
    loaders = [LocalTokens(tokens_N, rank=r, **sizes) for r in range(2)]
    streams = [iter(loader) for loader in loaders]
    found["batches"] = [[next(s) for _ in range(2)] for s in streams]
    again = LocalTokens(tokens_N, rank=1, **sizes)
    again.load_state_dict(loaders[1].state_dict())
    found["third"] = (next(streams[1]), next(iter(again)))
    found["specs"] = {n: get_train_spec(n).build_tokenizer_fn for n in MODELS}
    training = SimpleNamespace(dataset_path=None, local_batch_size=1, seq_len=SEQ_LEN)
    model = SimpleNamespace(name="local_qwen3", flavor="debugmodel_moe")
    job = SimpleNamespace(training=training, model=model)
    found["random"] = [
        next(iter(build_local_tokens(dp_rank=0, dp_world_size=1, job_config=job))) for _ in range(2)
    ]
    np.save(f"{folder}/wide.npy", np.array([0, VOCAB]))
    found["errors"] = [
        _message(lambda: read_tokens(f"{folder}/wide.npy", VOCAB)),
        _message(lambda: LocalTokens(tokens_N[:19], rank=0, **sizes)),
    ]
    return found


def _message(call: Any) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


found = ranks_fixture(1, worker, in_folder=True, imported=IMPORTED)


def test_ranks_and_steps_read_rows_in_turn(found: dict[str, Any]) -> None:
    firsts = [[int(labels[0, 0]) for _, labels in batches] for batches in found["batches"]]
    assert firsts == [[1, 21], [11, 1]]  # rows 0, 4 and 2, then 6, which is row 0 again
    inputs, labels = found["batches"][0][0]
    assert inputs["input"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert torch.equal(labels, inputs["input"] + 1)
    # A loader goes on from its state.
    (inputs, labels), (again, labels_again) = found["third"]
    assert torch.equal(inputs["input"], again["input"]) and torch.equal(labels, labels_again)


def test_random_ids_cover_the_vocabulary_and_repeat(found: dict[str, Any]) -> None:
    (first, _), (second, _) = found["random"]
    assert torch.equal(first["input"], second["input"]) and first["input"].shape == (1, SEQ_LEN)
    assert 0 <= int(first["input"].min()) <= int(first["input"].max()) < VOCAB
    assert found["specs"] == dict.fromkeys(MODELS)  # no tokenizers


def test_what_does_not_fit_is_refused(found: dict[str, Any]) -> None:
    wide, short = found["errors"]
    assert "must hold ids (2048) < the model's vocabulary (2048)" in wide
    assert "(19 tokens) must hold one batch of all ranks (4 x 5)" in short


def test_text_writes_ids_below_the_vocabulary(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("def f(x):\n    return x\n" * 20)
    script = Path(__file__).parents[2] / "examples" / "torchtitan" / "text.py"
    command = [sys.executable, str(script), str(tmp_path / "out"), "--source", str(source)]
    subprocess.run([*command, "--suffix", ".py", "--vocab-size", "300"], check=True)
    ids_N = np.load(tmp_path / "out" / "tokens.npy")
    assert ids_N.dtype == np.int32
    assert 0 < len(ids_N) < 460  # pairs were merged
    assert ids_N.max() < 300 and (tmp_path / "out" / "tokenizer.json").exists()
    none = subprocess.run([*command, "--suffix", ".rs"], capture_output=True, text=True)
    assert none.returncode == 1 and "must hold files that end in .rs" in none.stderr
