"""--deterministic: the same bits from the same command, and one line where that cannot be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moecore.models import Decoder, preset
from moecore.recipes.determinism import (
    ENVIRONMENT,
    check_deterministic,
    use_deterministic_algorithms,
)
from tests.recipes.test_train import (
    KILLING_LOGGER,
    MICRO,
    STEPS,
    assert_same_run,
    run,
    run_in_forks,
)

WORDS = f"--steps {STEPS} --num-layers 2 --deterministic"
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave torch and the environment as they were."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_command_has_the_same_bits_after_a_kill_and_in_another_run(tmp_path: Path) -> None:
    """The ranks of a fork and of a command hash strings by other seeds."""
    straight, again, killed = (tmp_path / name for name in ("straight", "again", "killed"))
    for run_dir in (straight, again):
        run_in_forks(run_dir, WORDS)
    assert_same_run(again, straight)
    modules = tmp_path / "modules"
    modules.mkdir()
    logger = KILLING_LOGGER.replace('parents[1] / "run"', 'parents[1] / "killed"')
    (modules / "wandb.py").write_text(logger)
    shorter = WORDS.replace(f"--steps {STEPS}", f"--steps {STEPS - 1} --schedule-steps {STEPS}")
    run(killed, f"{shorter} --wandb x", modules=modules, code=-signal.SIGKILL)
    assert "from step 4" in run_in_forks(killed, WORDS)
    assert_same_run(killed, straight)


@pytest.mark.parametrize("words", ["", "--deterministic"])
@pytest.mark.usefixtures("settings")
def test_a_rank_selects_algorithms_before_its_model(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    seen: list[tuple[bool, set[str]]] = []

    def stop(*_: object, **__: object) -> int:
        seen.append((torch.are_deterministic_algorithms_enabled(), ENVIRONMENT.keys() & os.environ))
        return 3

    monkeypatch.setattr("moecore.recipes.loop.run_stage", stop)
    args = train.parse_arguments([*f"{MICRO} {words}".split(), "--run-dir", str(tmp_path)])
    assert train.run_rank(args) == 3
    assert seen == [(True, set(ENVIRONMENT)) if words else (False, set())]


@pytest.mark.usefixtures("settings")
def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    use_deterministic_algorithms()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(ValueError, match=r"NCCL_NVLS_ENABLE \(1\) must be 0 with --deterministic"):
        use_deterministic_algorithms()


@pytest.mark.usefixtures("settings")
def test_a_rank_prints_one_line(
    train: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    words = [*MICRO.split(), "--deterministic", "--run-dir", str(tmp_path)]
    assert train.run_rank(train.parse_arguments(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO (1) must be 0 with --deterministic" in line


def test_nccl_ep_is_refused(train: ModuleType) -> None:
    args = train.parse_arguments([*MICRO.split(), "--dispatcher", "nccl_ep", "--deterministic"])
    with pytest.raises(ValueError, match=r"--dispatcher \(nccl_ep\) must be another one with"):
        train.check(args, 2)


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
