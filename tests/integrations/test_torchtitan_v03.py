"""torchtitan 0.3: blocks in one process, what a job may not ask, and the version of the package."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import assert_close
from tests.integrations.titan_v03_runs import build_trainer

pytestmark = pytest.mark.slow

BLOCKS: dict[str, dict[str, Any]] = {
    "qwen3": dict(score_func="softmax", route_norm=True, top_k=3),
    "deepseek_v3": dict(
        shared=True,
        route_norm=True,
        route_scale=2.5,
        top_k=2,
        num_expert_groups=4,
        num_limited_groups=2,
    ),
    "raw weights": dict(score_func="softmax", top_k=2, route_scale=3.0),
    "without balance": dict(bias=True, top_k=2, load_balance_coeff=None),
    "balanced": dict(top_k=3, forced=True),
}
EP, TP = (f"--parallelism.{name}_parallel_degree=2" for name in ("expert", "tensor"))
PARTIAL = "--parallelism.spmd_backend=partial_dtensor"
WHOLE = "--parallelism.no-enable-sequence-parallel"
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "tp alone": ("decoder", [TP], r"expert_parallel_degree \(1\) must be > 1 with tensor_parallel"),
    "tp types": ("qwen3", [EP, TP], r"spmd_backend \('spmd_types'\) must be 'partial_dtensor'"),
    "tp whole": (
        "qwen3",
        [EP, TP, PARTIAL, WHOLE],
        r"enable_sequence_parallel \(False\) must be T",
    ),
    "tp compiled": (
        "qwen3",
        [EP, TP, PARTIAL, "--compile.enable"],
        r"compile.components .* withou",
    ),
    "cp": ("qwen3", ["--parallelism.context_parallel_degree=2"], r"context_parallel_degree \(2\)"),
    "backend": ("qwen3", ["--parallelism.spmd_backend=full_dtensor"], r"spmd_backend \('full_dten"),
    "offload": ("qwen3", ["--training.enable_cpu_offload"], r"enable_cpu_offload \(True\) must be"),
    "graphs": (
        "qwen3",
        ["--training.no-disable-cuda-graphs"],
        r"disable_cuda_graphs \(False\) mus",
    ),
    "weights": ("qwen3", ["--moecore.hf_weights=x"], r"moecore.hf_weights \('x'\) must be absent"),
    "factor": (
        "qwen3",
        ["--moecore.dispatcher=allgather", "--moecore.row_factor=1.5"],
        r"moecore.row_factor \(1.5\) must go with moecore.dispatcher \('allgather'\) = 'nvl",
    ),
    "validation": ("decoder", ["--validator.enable"], r"validator.enable \(True\) must be False"),
    "length": ("decoder", ["--training.seq_len=128"], r"seq_len \(128\) must be <= DecoderConfig."),
    "experts": ("converted", [], r"MoE inner_experts \(ExactExperts\) must be GroupedExperts"),
}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    from examples.torchtitan.cpu_v03 import prepare

    prepare()
    results: dict[str, Any] = {"block": {name: blocks(name) for name in BLOCKS}}
    results["refused"] = {name: refusal(*case[:2]) for name, case in REFUSED.items()}
    results["jobs"] = jobs()
    return results


def stock_block(
    *,
    score_func: str = "sigmoid",
    top_k: int,
    shared: bool = False,
    bias: bool = False,
    forced: bool = False,
    load_balance_coeff: float | None = 1e-3,
    **router: Any,
) -> nn.Module:
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    names = ("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD")
    fill: dict[str, Any] = dict.fromkeys(names, nn.init.normal_)
    sizes = dict(num_experts=8, top_k=top_k, dim=16)
    config = make_moe_config(
        num_experts=8,
        load_balance_coeff=load_balance_coeff,
        router=make_router_config(
            **sizes, score_func=score_func, gate_param_init=fill, bias=bias, **router
        ),
        routed_experts=make_routed_experts_config(
            **sizes, hidden_dim=32, param_init=fill, comm_backend="standard"
        ),
        shared_experts=make_ffn_config(
            dim=16, hidden_dim=64, w1_param_init=fill, w2w3_param_init=fill
        )
        if shared
        else None,
    )
    config.router._debug_force_load_balance = forced
    block = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.3, generator=generator)
    return block


def blocks(name: str) -> list[dict[str, Tensor]]:
    """What stock's block computes, names and fills, and what moecore's does."""
    from torchtitan.models.common.moe import MoE

    from moecore.families.family import swap_blocks
    from moecore.integrations.torchtitan.v03.moe import titan_moe
    from tests.integrations.titan_v03_specs import ExactExperts

    stock = stock_block(**BLOCKS[name])
    holder = nn.Sequential(copy.deepcopy(stock))
    swap_blocks(holder, {MoE: titan_moe})
    stock.routed_experts.inner_experts.__class__ = ExactExperts
    results = []
    for block in (stock, holder[0]):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 9, 16, generator=generator, requires_grad=True)
        y = block(x)
        y.backward(torch.randn(y.shape, generator=generator))
        found = {"y": y.detach(), "x": x.grad.clone()}
        found |= {n: p.grad.clone() for n, p in block.named_parameters()}
        names = {f"state {n}": t.clone() for n, t in block.state_dict().items()}
        block.to_empty(device="cpu")
        torch.manual_seed(5)
        with torch.no_grad():
            block.init_states()
        inits = {f"init {n}": t.clone() for n, t in block.state_dict().items()}
        results.append(found | names | inits)
    return results


def refusal(model: str, words: list[str]) -> str:
    try:
        build_trainer(f"moecore_{model}", "/nowhere", words)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "not refused"


def jobs() -> dict[str, str]:
    """What each job of moecore's module trains, and which are refused."""
    from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3_jobs
    from torchtitan.models.llama3 import config_registry as llama3_jobs

    from moecore.integrations.torchtitan.v03 import jobs as titan
    from moecore.models import PRESETS

    names = ["qwen3_moe_debug", "qwen3_30b_a3b", "deepseek_v3_debugmodel", "deepseek_v3_16b"]
    names += ["deepseek_v3_671b", *(f"decoder_{n.replace('-', '_')}" for n in PRESETS)]
    found = {name: type(getattr(titan, name)().model_spec.model).__qualname__ for name in names}

    refused = {
        "mtp": deepseek_v3_jobs.deepseek_v3_debugmodel_mtp,
        "dense": llama3_jobs.llama3_debugmodel,
        "moecore": titan.qwen3_moe_debug,
    }
    for name, job in refused.items():
        with pytest.raises((NotImplementedError, ValueError)) as error:
            titan.accelerated(job())
        found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks(2, worker)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_names_and_fills_like_stock(results: dict[str, Any], name: str) -> None:
    stock, own = results["block"][name]
    assert_close(own, stock)
    assert [n for n in own if "experts" in n] == [n for n in stock if "experts" in n]
    for key in (n for n in stock if n.startswith(("init ", "state "))):
        assert torch.equal(own[key], stock[key]), key


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(results: dict[str, Any], name: str) -> None:
    assert re.search(REFUSED[name][2], results["refused"][name]), results["refused"][name]


def test_the_module_has_the_jobs_that_its_docstring_says(results: dict[str, Any]) -> None:
    jobs = results["jobs"]
    for name, model in jobs.items():
        if name.startswith("decoder_"):
            assert model == "TitanDecoder.Config"
    assert jobs["qwen3_30b_a3b"] == "Qwen3Model.Config"
    assert jobs["deepseek_v3_671b"] == "DeepSeekV3Model.Config"


def test_other_models_and_jobs_are_refused(results: dict[str, Any]) -> None:
    jobs = results["jobs"]
    assert "mtp_layers (1) must be none" in jobs["mtp"]
    assert re.search(r"Llama3Model.Config\) must be the Config of one of Qwen3Model", jobs["dense"])
    assert "MoETrainer.Config) must be torchtitan's Trainer.Config" in jobs["moecore"]


def test_the_module_of_the_other_version_is_named() -> None:
    with pytest.raises(
        ImportError, match=r"torchtitan 0.3 use --module moecore.*torchtitan.v03.jobs"
    ):
        import moecore.integrations.torchtitan.v02.specs  # noqa: F401
