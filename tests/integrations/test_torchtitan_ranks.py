"""Real `torchtitan.train` runs on four CPU ranks: torchtitan's own models against moecore's.

The oracle is stock torchtitan without tensor parallelism: under tp, the router gradients of 0.2.2
(torch 2.13) differ from it, see docs/torchtitan.md.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import STEPS, Run, assert_close, close, train

if find_spec("torchtitan") is None:  # not imported here: `cpu.prepare` comes first
    pytest.skip("torchtitan is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

EP, TP, ETP = (f"parallelism__{n}_parallel_degree" for n in ("expert", "tensor", "expert_tensor"))
REPLICATE, SHARD = (f"parallelism__data_parallel_{n}_degree" for n in ("replicate", "shard"))
AC, BATCH, GLOBAL = "activation_checkpoint__mode", "training__local_batch_size", "global_batch_size"
SELECTIVE = "activation_checkpoint__selective_ac_option"
# Every graph is made, none is turned into C++: that takes minutes here.
COMPILE = {"compile__enable": True, "compile__backend": "aot_eager"}
TWO_BATCHES = {f"training__{GLOBAL}": 4}  # of one sample each on two data ranks

# Every run sees four samples a step.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 stock": ("stock_tiny_qwen3", {EP: 2}),
    "qwen3 hsdp": ("moecore_tiny_qwen3", {EP: 2, REPLICATE: 2, SHARD: 2, AC: "full"}),
    "qwen3 tp": ("moecore_tiny_qwen3", {EP: 2, TP: 2, AC: "selective", **TWO_BATCHES}),
    "qwen3 dense mesh": ("moecore_tiny_qwen3", {AC: "selective", SELECTIVE: "op"}),
    "qwen3 compiled": ("moecore_tiny_qwen3", {EP: 2, AC: "selective", **COMPILE}),
    "deepseek_v3 stock": ("stock_tiny_deepseek_v3", {EP: 2}),
    "deepseek_v3 ep4": ("moecore_tiny_deepseek_v3", {EP: 4, TP: 2, BATCH: 2}),
    "deepseek_v3 compiled": ("moecore_tiny_deepseek_v3", {EP: 4, TP: 2, BATCH: 2, **COMPILE}),
    "deepseek_v3 etp": ("moecore_tiny_deepseek_v3", {EP: 2, TP: 2, ETP: 2, BATCH: 2}),
}
BF16 = {"training__mixed_precision_param": "bfloat16"}
LOW = {"stock": ("stock_tiny_qwen3", {EP: 2}), "moecore": ("moecore_tiny_qwen3", {EP: 2})}
ACCELERATED = [name for name in RUNS if "stock" not in name]


def saving(name: str) -> dict[str, Any]:
    if name in ("qwen3 stock", "qwen3 tp"):
        return dict(checkpoint__enable=True, checkpoint__last_save_in_hf=True)
    every = dict(checkpoint__enable=True, checkpoint__interval=2)
    return every if name in ("deepseek_v3 stock", "deepseek_v3 ep4") else {}


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Run]:
    from examples.torchtitan.cpu import prepare

    prepare()
    runs = {}
    for name, (spec, options) in RUNS.items():
        runs[name] = train(spec, f"{folder}/{name}", **options, **saving(name))
    for source, target in (("stock", "ep4"), ("ep4", "stock")):
        spec, options = RUNS[f"deepseek_v3 {target}"]
        runs[f"{source} to {target}"] = train(
            spec,
            f"{folder}/{source} to {target}",
            **options,
            checkpoint__enable=True,
            checkpoint__initial_load_path=f"{folder}/deepseek_v3 {source}/checkpoint/step-2",
            checkpoint__initial_load_model_only=False,
        )
    for source, target in (("stock", "tp"), ("tp", "stock")):
        spec, options = RUNS[f"qwen3 {target}"]
        runs[f"hf {source} to {target}"] = train(
            spec,
            f"{folder}/hf {source} to {target}",
            **options,
            training__steps=1,
            checkpoint__enable=True,
            checkpoint__initial_load_path=f"{folder}/qwen3 {source}/checkpoint/step-{STEPS}",
            checkpoint__initial_load_in_hf=True,
        )
    for name, (spec, options) in LOW.items():
        runs[f"bf16 {name}"] = train(spec, folder, **options, **BF16)
    return runs


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(4, worker, os.path.join(folder, "titan"))


def oracle(runs: dict[str, Run], name: str) -> Run:
    return runs[name.split()[0] + " stock"]


@pytest.mark.parametrize("name", ACCELERATED)
def test_losses_and_norms_are_those_of_stock(runs: dict[str, Run], name: str) -> None:
    run, stock = runs[name], oracle(runs, name)
    assert len(run.losses) == STEPS
    assert close(run.losses, stock.losses), (run.losses, stock.losses)
    assert close(run.norms, stock.norms), (run.norms, stock.norms)


@pytest.mark.parametrize("name", ACCELERATED)
def test_every_gradient_is_that_of_stock(runs: dict[str, Run], name: str) -> None:
    assert_close(runs[name].grads, oracle(runs, name).grads)


@pytest.mark.parametrize("name", ACCELERATED)
def test_state_after_the_steps_is_that_of_stock(runs: dict[str, Run], name: str) -> None:
    run, stock = runs[name], oracle(runs, name)
    assert_close(run.state, stock.state, 2e-5)  # three updates
    biases = [n for n in run.state if n.endswith("expert_bias")]
    assert biases
    for bias in biases:
        assert bool(run.state[bias].any()) == ("deepseek" in name)


@pytest.mark.parametrize("name", ACCELERATED)
def test_every_parameter_is_a_dtensor_and_experts_are_found(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    assert not run.plain
    for names in run.expert_meshes:
        assert ("ep" in names) == ("dense mesh" not in name), names


@pytest.mark.parametrize("route", ["stock to ep4", "ep4 to stock"])
def test_a_checkpoint_of_one_continues_in_the_other(runs: dict[str, Run], route: str) -> None:
    stock = runs["deepseek_v3 stock"]
    assert len(runs[route].losses) == 1  # step 3 alone
    assert close(runs[route].losses, stock.losses[2:])
    assert close(runs[route].norms, stock.norms[2:])
    assert_close(runs[route].state, stock.state, 2e-5)


def test_hugging_face_files_of_one_load_in_the_other(runs: dict[str, Run]) -> None:
    own, stock = runs["hf stock to tp"], runs["hf tp to stock"]
    assert close(own.losses, stock.losses)
    assert close(own.norms, stock.norms)
    assert_close(own.grads, stock.grads, 2e-5)  # weights after three updates
    assert own.losses[0] < runs["qwen3 stock"].losses[0] - 0.1  # trained on these samples before


def test_bf16_error_is_at_most_twice_that_of_stock(runs: dict[str, Run]) -> None:
    exact = runs["qwen3 stock"].grads
    error = {
        kind: {n: float((g - exact[n]).norm()) for n, g in runs[f"bf16 {kind}"].grads.items()}
        for kind in LOW
    }
    for name, own in error["moecore"].items():
        assert own <= 2 * error["stock"][name] + 1e-6, name


@pytest.mark.parametrize("name", ACCELERATED)
def test_the_load_is_in_the_log(runs: dict[str, Run], name: str) -> None:
    for metrics in runs[name].metrics:
        assert 1 <= metrics["moe/load_max_over_mean_avg"] <= metrics["moe/load_max_over_mean"] <= 8
        assert metrics["moe/aux_loss"] == 0


@pytest.mark.parametrize("name", ACCELERATED)
def test_only_a_compiled_run_has_graphs(runs: dict[str, Run], name: str) -> None:
    # Before and after an MoE layer, a dense block and the loss; with checkpointing some again.
    assert (1 <= runs[name].graphs <= 8) == ("compiled" in name), runs[name].graphs
