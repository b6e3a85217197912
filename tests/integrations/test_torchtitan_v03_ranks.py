"""Real `torchtitan.train` runs of 0.3 on two CPU ranks: its own models against moecore's.

The oracle is stock torchtitan with ep 2.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import Run, assert_close, close, follow
from tests.integrations.titan_v03_runs import build_trainer

pytestmark = pytest.mark.slow

STEPS = 3
EP = "--parallelism.expert_parallel_degree=2"
TP = "--parallelism.tensor_parallel_degree=2"
TWO_AT_ONCE = "--training.local_batch_size=2"
TWO_IN_TURN = "--training.global_batch_size=4"  # of one sample each, if nothing else is said
PARTIAL = "--parallelism.spmd_backend=partial_dtensor"
FOUR_AT_ONCE = "--training.local_batch_size=4"  # with tp there is one data rank
REPLICATE = ["--parallelism.data_parallel_replicate_degree=2"]
REPLICATE += ["--parallelism.data_parallel_shard_degree=1"]
FULL, SELECTIVE = "activation_checkpoint:full", "activation_checkpoint:selective"
# Every graph is made, none is turned into C++: that takes minutes here.
COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
CHOICES = ["--moecore.dispatcher=allgather", "--moecore.expert_backend=sequential"]
BF16 = "--training.mixed_precision_param=bfloat16"

# Every run sees four samples a step. Without ep experts are FSDP2 units in a checkpointed block,
# and so is a router under bf16.
RUNS: dict[str, tuple[str, list[str]]] = {
    "qwen3 stock": ("stock_qwen3", [EP, TWO_AT_ONCE]),
    "qwen3 ep": ("moecore_qwen3", [EP, TWO_IN_TURN]),
    "qwen3 dense mesh": ("moecore_qwen3", [TWO_AT_ONCE, SELECTIVE]),
    "qwen3 replicas": ("moecore_qwen3", [TWO_AT_ONCE, *REPLICATE]),
    "qwen3 partial": ("moecore_qwen3", [EP, TWO_AT_ONCE, PARTIAL, FULL]),
    "qwen3 compiled": ("moecore_qwen3", [EP, TWO_AT_ONCE, *COMPILE, SELECTIVE]),
    "qwen3 tp": ("moecore_qwen3", [EP, TP, PARTIAL, FOUR_AT_ONCE, SELECTIVE]),
    "qwen3 choices": ("moecore_qwen3", [EP, TWO_AT_ONCE, *CHOICES, SELECTIVE]),
    "deepseek_v3 stock": ("stock_deepseek_v3", [EP, TWO_AT_ONCE]),
    "deepseek_v3 ep": ("moecore_deepseek_v3", [EP, TWO_AT_ONCE]),
    "deepseek_v3 dense mesh": ("moecore_deepseek_v3", [TWO_IN_TURN, FULL]),
    "deepseek_v3 tp": ("moecore_deepseek_v3", [EP, TP, PARTIAL, TWO_AT_ONCE, TWO_IN_TURN]),
    "deepseek_v3 compiled": ("moecore_deepseek_v3", [EP, TWO_AT_ONCE, *COMPILE]),
}
LOW = {"stock": "stock_bf16_qwen3", "moecore": "moecore_qwen3"}
# A micro-batch balances itself, so here all have one sample.
DECODERS: dict[str, list[str]] = {
    "ep": [EP, TWO_IN_TURN, FULL],
    "fsdp": [TWO_IN_TURN, PARTIAL, SELECTIVE],
    "tp": [EP, TP, TWO_IN_TURN],
    "compiled": [EP, TWO_IN_TURN, *COMPILE],
}
SAVED = ("deepseek_v3 stock", "deepseek_v3 ep")
Jobs = dict[str, tuple[str, str, list[str]]]  # name -> arguments of `train`
ACCELERATED = [name for name in RUNS if "stock" not in name]


def worker(rank: int, device: torch.device, jobs: Jobs) -> dict[str, Run]:
    from examples.torchtitan.cpu_v03 import prepare

    prepare()
    return {name: train(*job) for name, job in jobs.items()}


def decoder_oracle(rank: int, device: torch.device) -> Run:
    from examples.torchtitan.cpu_v03 import prepare

    prepare()
    return oracle()


def loading(source: str, target: str, folder: str) -> tuple[str, str, list[str]]:
    config, words = RUNS[target]
    path = f"{folder}/{source}/checkpoint/step-2"
    options = ["--checkpoint.enable", "--checkpoint.no-initial-load-model-only"]
    options.append(f"--checkpoint.initial_load_path={path}")
    return config, f"{folder}/{source} to {target}", [*options, *words]


def train(config: str, folder: str, words: list[str]) -> Run:
    """Run `torchtitan.train`'s Trainer from its command line to the end. Collective."""
    return follow(build_trainer(config, folder, words))


def oracle() -> Run:
    """The decoder in one process: four forwards a step, and plain AdamW."""
    from moecore.models import Decoder
    from moecore.moe.balance import BalanceGroups
    from moecore.moe.params import init_normal_
    from moecore.moe.state import MoEState
    from tests.integrations import titan_v03_specs as specs

    model = Decoder(specs.DECODER)
    with torch.no_grad():
        model.init_weights(7)
        for name, param in model.named_parameters():
            if param.ndim > 1:
                init_normal_(param, std=0.2 if ".mlp." in name else 0.05, key=name)
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "tracker")}
    state = MoEState(layers, BalanceGroups())
    state.set_num_micro_batches(4)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=specs.LR,
        betas=(0.9, 0.95),
        eps=specs.EPS,
        weight_decay=specs.WEIGHT_DECAY,
    )
    run = Run()
    for step in range(STEPS):
        batch = [specs.samples(4 * step + i, 1, specs.SEQ_LEN) for i in range(4)]
        total = sum((labels != -100).sum() for _, labels in batch)
        losses = [model(tokens, labels, num_tokens=total) for tokens, labels in batch]
        for loss in losses:
            loss.backward()
        run.losses.append(float(sum(loss.detach() for loss in losses)))
        if not step:
            run.grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        metrics = state.finish_step()
        run.metrics.append({"moe/load_max_over_mean": max(metrics.load_max_over_mean().values())})
        run.metrics[-1]["moe/aux_loss"] = metrics.total_aux_loss()
        optimizer.step()
        optimizer.zero_grad()
    run.state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    with tempfile.TemporaryDirectory() as folder:
        jobs: Jobs = {}
        for name, (config, words) in RUNS.items():
            saving = ["--checkpoint.enable", "--checkpoint.interval=2"] if name in SAVED else []
            jobs[name] = (config, f"{folder}/{name}", saving + words)
        for kind, config in LOW.items():
            jobs[f"bf16 {kind}"] = (config, folder, [EP, TWO_AT_ONCE, BF16, SELECTIVE])
        for name, words in DECODERS.items():
            jobs[f"decoder {name}"] = ("moecore_decoder", folder, words)
        for source, target in (SAVED, SAVED[::-1]):
            jobs[f"{source} to {target}"] = loading(source, target, folder)
        results = {"decoder oracle": run_ranks(1, decoder_oracle)}
        # A process trains one stock model: for a second torch 2.14 finds the meshes of the first.
        stock = [name for name in jobs if name.endswith("stock")]
        for name in (n for n in stock if " to " not in n):
            results |= run_ranks(2, worker, {name: jobs[name]})
        results |= run_ranks(2, worker, {n: job for n, job in jobs.items() if n not in stock})
        for name in (n for n in stock if " to " in n):
            results |= run_ranks(2, worker, {name: jobs[name]})
        return results


def stock_of(runs: dict[str, Run], name: str) -> Run:
    return runs[name.split()[0] + " stock"]


@pytest.mark.parametrize("name", ACCELERATED)
def test_losses_and_norms_are_those_of_stock(runs: dict[str, Run], name: str) -> None:
    run, stock = runs[name], stock_of(runs, name)
    assert len(run.losses) == STEPS
    assert close(run.losses, stock.losses), (run.losses, stock.losses)
    assert close(run.norms, stock.norms), (run.norms, stock.norms)


@pytest.mark.parametrize("name", ACCELERATED)
def test_every_gradient_is_that_of_stock(runs: dict[str, Run], name: str) -> None:
    assert_close(runs[name].grads, stock_of(runs, name).grads)


@pytest.mark.parametrize("name", ACCELERATED)
def test_state_after_the_steps_is_that_of_stock(runs: dict[str, Run], name: str) -> None:
    run, stock = runs[name], stock_of(runs, name)
    assert_close(run.state, stock.state, 2e-5)  # three updates
    biases = [n for n in run.state if n.endswith("expert_bias_E")]
    assert len(biases) == 2
    assert all(run.state[bias].any() for bias in biases)


@pytest.mark.parametrize("name", ACCELERATED)
def test_every_parameter_is_a_dtensor_and_experts_are_found(
    runs: dict[str, Run], name: str
) -> None:
    assert not runs[name].plain
    for names in runs[name].expert_meshes:
        assert ("ep" in names) == (name.split()[1] not in ("dense", "replicas")), names


@pytest.mark.parametrize("name", ACCELERATED)
def test_the_load_is_in_the_log(runs: dict[str, Run], name: str) -> None:
    for metrics in runs[name].metrics:
        assert 1 <= metrics["moe/load_max_over_mean_avg"] <= metrics["moe/load_max_over_mean"] <= 8
        assert metrics["moe/aux_loss"] == 0


@pytest.mark.parametrize("name", ACCELERATED)
def test_only_a_compiled_run_has_graphs(runs: dict[str, Run], name: str) -> None:
    # Before and after an MoE layer, a dense block and the loss; with checkpointing some again.
    assert (1 <= runs[name].graphs <= 8) == ("compiled" in name), runs[name].graphs


def test_the_section_of_the_job_reaches_the_layers(runs: dict[str, Run]) -> None:
    assert runs["qwen3 choices"].dispatchers == {"AllGatherDispatcher"}
    assert runs["qwen3 choices"].backends == {"sequential"}
    assert runs["qwen3 ep"].dispatchers == {"AllToAllDispatcher"}


@pytest.mark.parametrize("route", [SAVED, SAVED[::-1]])
def test_a_checkpoint_of_one_continues_in_the_other(
    runs: dict[str, Run], route: tuple[str, str]
) -> None:
    run, stock = runs[" to ".join(route)], runs["deepseek_v3 stock"]
    assert len(run.losses) == 1  # step 3 alone
    assert close(run.losses, stock.losses[2:])
    assert close(run.norms, stock.norms[2:])
    assert_close(run.state, stock.state, 2e-5)


def test_bf16_error_is_at_most_twice_that_of_stock(runs: dict[str, Run]) -> None:
    exact = runs["qwen3 stock"].grads
    error = {
        kind: {n: float((g - exact[n]).norm()) for n, g in runs[f"bf16 {kind}"].grads.items()}
        for kind in LOW
    }
    for name, own in error["moecore"].items():
        assert own <= 2 * error["stock"][name] + 1e-6, name


@pytest.mark.parametrize("name", DECODERS)
def test_the_decoder_trains_like_one_process(runs: dict[str, Run], name: str) -> None:
    run, one = runs[f"decoder {name}"], runs["decoder oracle"]
    assert close(run.losses, one.losses), (run.losses, one.losses)
    assert close(run.norms, one.norms), (run.norms, one.norms)
    assert_close(run.grads, one.grads)
    assert_close(run.state, one.state, 2e-5)
    assert not run.plain
    for found, wanted in zip(run.metrics, one.metrics, strict=True):
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-5), key
