import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moecore.models import Decoder, preset
from moecore.recipes.process import (
    ENVIRONMENT,
    check_deterministic,
    use_deterministic_algorithms,
)
from tests.recipes.launched import metrics
from tests.recipes.test_train import MICRO, STEPS, run_in_forks, tensors

WORDS = f"--steps {STEPS} --deterministic"
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def settings(monkeypatch: Any) -> Iterator[None]:
    """Leave torch and the environment as they were."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_command_has_the_same_bits_in_another_run_and_after_a_resume(tmp_path: Path) -> None:
    """The ranks of each run hash strings by another seed."""
    straight, resumed = (tmp_path / name for name in ("straight", "resumed"))
    run_in_forks(straight, WORDS)
    run_in_forks(resumed, WORDS.replace(f"--steps {STEPS}", f"--steps 4 --schedule-steps {STEPS}"))
    assert "from step 4" in run_in_forks(resumed, WORDS)
    losses, again = ([line["loss"] for line in metrics(run)] for run in (straight, resumed))
    assert again == losses and len(losses) == STEPS
    blocks, others = (tensors(run, STEPS) for run in (straight, resumed))
    assert others.keys() == blocks.keys()
    assert all(torch.equal(others[name], block) for name, block in blocks.items())


@pytest.mark.parametrize("words", ["", "--deterministic"])
@pytest.mark.usefixtures("settings")
def test_a_rank_selects_algorithms_before_its_model(train, monkeypatch, tmp_path, words) -> None:
    seen: list[tuple[bool, set[str]]] = []

    def stop(*_: object, **__: object) -> int:
        seen.append((torch.are_deterministic_algorithms_enabled(), ENVIRONMENT.keys() & os.environ))
        return 3

    monkeypatch.setattr("moecore.recipes.loop.run_stage", stop)
    args = train.parse_arguments([*f"{MICRO} {words}".split(), "--run-dir", str(tmp_path)])
    assert train.run_rank(args) == 3
    assert seen == [(True, set(ENVIRONMENT)) if words else (False, set())]


@pytest.mark.usefixtures("settings")
def test_values_of_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    use_deterministic_algorithms()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(ValueError, match=r"NCCL_NVLS_ENABLE \(1\) must be 0 with --deterministic"):
        use_deterministic_algorithms()


def test_nccl_ep_is_refused(train: ModuleType) -> None:
    args = train.parse_arguments([*MICRO.split(), "--dispatcher", "nccl_ep", "--deterministic"])
    with pytest.raises(ValueError, match=r"--dispatcher \(nccl_ep\) must be another one with"):
        args.check_sharding()


def test_linear_attention_is_refused_on_gpus() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        native = Decoder(preset("tiny-qwen3-next"))
        config = transformers.Qwen3NextConfig(hidden_size=64, num_hidden_layers=4, vocab_size=64)
        stock = transformers.Qwen3NextForCausalLM(config)
        plain = Decoder(preset("tiny-qwen3"))
    for model in (native, stock):
        check_deterministic(model, CPU)
        with pytest.raises(ValueError, match="must not go with linear attention on GPUs"):
            check_deterministic(model, GPU)
    check_deterministic(plain, GPU)
