"""Hugging Face models in real runs of torchtitan 0.3 on two ranks against plain transformers."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import Run, assert_close, close, follow
from tests.integrations.titan_v03_runs import build_trainer

pytestmark = pytest.mark.slow

MODULE = "tests.integrations.titan_v03_hf_specs"
STEPS, SEED = 3, 7
EP = "--parallelism.expert_parallel_degree=2"
TWO_AT_ONCE = "--training.local_batch_size=2"
TWO_IN_TURN = "--training.global_batch_size=4"
# Every run sees four samples a step.
RUNS: dict[str, tuple[str, list[str]]] = {
    "qwen2_moe": ("qwen2_moe", [EP, TWO_AT_ONCE]),
    "qwen3_moe": ("qwen3_moe", [EP, TWO_IN_TURN, "activation_checkpoint:full"]),
    "mixtral": ("mixtral", [TWO_AT_ONCE]),
    "olmoe": ("olmoe", [EP, TWO_AT_ONCE, "activation_checkpoint:selective"]),
    "deepseek_v3": ("deepseek_v3", [EP, TWO_AT_ONCE]),
    "gpt_oss": ("gpt_oss", [EP, TWO_AT_ONCE]),
}
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "tp": ("qwen3_moe", ["--parallelism.tensor_parallel_degree=2"], r"\(2\) must be 1 for a Hug"),
    "length": ("qwen3_moe", ["--training.seq_len=128"], r"seq_len \(128\) must be <= max_position"),
    "tied": ("tied", [], r"tie_word_embeddings \(True\) of the model's config must be False"),
    "own loss": ("own_loss", [], r"output_router_logits \(True\) of the model's config must"),
    "kind": ("kind", [], r"flavor \(dict\) must be a transformers config or a directory"),
    "no config": ("assets", ["--hf_assets_path=/tmp"], r"hf_assets_path or flavor \(/tmp\) must"),
}


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    from examples.torchtitan.cpu_v03 import prepare

    prepare()
    results: dict[str, Any] = {name: run(*case, folder) for name, case in RUNS.items()}
    results["balanced"] = run("balanced", [EP, TWO_AT_ONCE], folder)
    assets = f"{folder}/assets"
    if rank == 0:
        plain("qwen3_moe").save_pretrained(assets)
    dist.barrier()
    words = [EP, TWO_AT_ONCE, f"--hf_assets_path={assets}", f"--moecore.hf_weights={assets}"]
    saving = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    saving += ["--checkpoint.last_save_model_only"]
    results["loaded"] = run("assets", [*words, *saving, "--debug.seed=9"], folder)
    if rank == 0:
        results["exported"] = exported(f"{folder}/checkpoint/step-{STEPS}")
    results["refused"] = {name: refusal(*case[:2]) for name, case in REFUSED.items()}
    results["oracle"] = {name: oracle(config) for name, (config, _) in RUNS.items()}
    return results


def run(config: str, words: list[str], folder: str) -> Run:
    found = follow(build_trainer(config, folder, words, MODULE))
    for numbers in (found.grads, found.state):
        for name in list(numbers):
            numbers[name.removeprefix("hf.")] = numbers.pop(name)
    return found


def refusal(config: str, words: list[str]) -> str:
    try:
        build_trainer(config, "/nowhere", words, MODULE)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "not refused"


def plain(config: str) -> nn.Module:
    """The model on one process as transformers makes it, with the weights of every run."""
    from transformers import AutoModelForCausalLM

    from moecore.io import init_hf
    from tests.integrations.titan_v03_hf_specs import CONFIGS

    model = AutoModelForCausalLM.from_config(CONFIGS[config]).train()
    init_hf(model, SEED)
    return model


def exported(path: str) -> dict[str, torch.Tensor]:
    """What transformers reads from the files that torchtitan wrote."""
    from transformers import AutoModelForCausalLM

    from tests.integrations.titan_v03_hf_specs import CONFIGS

    CONFIGS["qwen3_moe"].save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def oracle(config: str) -> Run:
    """Plain transformers and AdamW, four samples a step."""
    from tests.integrations.titan_v03_specs import EPS, LR, SEQ_LEN, WEIGHT_DECAY, samples

    model, found = plain(config), Run()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY
    )
    for step in range(STEPS):
        tokens_BT, labels_BT = samples(4 * step, 4, SEQ_LEN)
        logits_NV = model(input_ids=tokens_BT, use_cache=False).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits_NV, labels_BT.flatten())
        loss.backward()
        found.losses.append(loss.item())
        if not step:
            found.grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    found.state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, worker, folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_model_trains_like_plain_transformers(results: dict[str, Any], name: str) -> None:
    run, one = results[name], results["oracle"][name]
    assert close(run.losses, one.losses), (run.losses, one.losses)
    assert close(run.norms, one.norms), (run.norms, one.norms)
    assert_close(run.grads, one.grads)
    assert_close(run.state, one.state, 2e-5)
    assert not run.plain


def test_balance_moves_the_bias_and_the_loss_is_logged(results: dict[str, Any]) -> None:
    run, still = results["balanced"], results["deepseek_v3"]
    biases = [n for n in run.state if n.endswith("e_score_correction_bias")]
    assert biases
    assert all(run.state[n].any() and not still.state[n].any() for n in biases)
    assert run.metrics[0]["moe/aux_loss"] > 0


def test_weights_come_from_files_and_go_back_into_them(results: dict[str, Any]) -> None:
    run, same = results["loaded"], results["oracle"]["qwen3_moe"]
    assert close(run.losses, same.losses), (run.losses, same.losses)
    assert_close(results["exported"], run.state, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(results: dict[str, Any], name: str) -> None:
    assert re.search(REFUSED[name][2], results["refused"][name]), results["refused"][name]
