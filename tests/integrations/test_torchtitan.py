"""torchtitan blocks on one process, the decoder on four ranks, and what a job may not ask."""

from __future__ import annotations

import copy
import re
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import BalanceConfig, MoEConfig, MoELayer, NVLinkOptions
from moecore.integrations.torchtitan.options import MoECore, dispatcher_of, nvlink_options
from moecore.moe.forced import force_even_load
from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import (
    EPS,
    LR,
    SEQ_LEN,
    STEPS,
    WEIGHT_DECAY,
    Run,
    arguments,
    assert_close,
    close,
    train,
)

if find_spec("torchtitan") is None:  # not imported here: `cpu.prepare` comes first
    pytest.skip("torchtitan is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

BLOCKS: dict[str, dict[str, Any]] = {
    "qwen3": dict(num_shared_experts=0, score_func="softmax", route_norm=True, top_k=3),
    "deepseek_v3": dict(
        num_shared_experts=2,
        route_norm=True,
        route_scale=2.5,
        top_k=2,
        num_expert_groups=4,
        num_limited_groups=2,
    ),
    "raw weights": dict(score_func="softmax", top_k=2, route_scale=3.0),
    "on input": dict(gate_bias=True, score_before_experts=True, load_balance_coeff=None),
    "balanced": dict(top_k=3, _debug_force_load_balance=True),
}
EP, TP = "parallelism__expert_parallel_degree", "parallelism__tensor_parallel_degree"
SECTION = {"job__custom_config_module": "moecore.integrations.torchtitan.options"}
CHOICES = {**SECTION, "moecore__dispatcher": "allgather", "moecore__prefetch_blocks": 2}
TOGETHER = {"moecore__blocks_per_unit": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "ep": {EP: 2, "activation_checkpoint__mode": "full"},
    "tp": {EP: 2, TP: 2, "training__global_batch_size": 4},
    "fsdp": {},
    "compiled": {EP: 2, "compile__enable": True, "compile__backend": "aot_eager"},
    "choices": {EP: 2, **CHOICES, **TOGETHER, "moecore__expert_backend": "sequential"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tp alone": ({TP: 2}, r"expert_parallel_degree \(1\) must be > 1 with tensor_parallel_degree"),
    "cp": ({"parallelism__context_parallel_degree": 2}, r"context_parallel_degree \(2\) must be 1"),
    "offload": ({"training__enable_cpu_offload": True}, r"enable_cpu_offload \(True\) must be Fal"),
    "nvlink": (
        {EP: 2, **SECTION, "moecore__dispatcher": "nvlink"},
        r"dispatcher \('nvlink'\) must",
    ),
    "factor": (
        {EP: 2, **CHOICES, "moecore__row_factor": 1.5},
        r"moecore.row_factor \(1.5\) must go with moecore.dispatcher \('allgather'\) = 'nvl",
    ),
    "async tp": ({"parallelism__enable_async_tensor_parallel": True}, r"enable_async_tensor_para"),
    "deepep": ({"parallelism__expert_parallel_comm_backend": "deepep"}, r"comm_backend \('deepep"),
    "converters": ({}, r"model.converters \(\['float8'\]\) must be \[\]"),
    "model": ({}, r"TrainSpec.model_cls \(\w+\) must be one of Qwen3Model, DeepSeekV3Model"),
    "length": (
        {"training__seq_len": 128},
        r"training.seq_len \(128\) must be <= DecoderConfig.max",
    ),
    "odd length": (
        {EP: 2, TP: 2, "training__seq_len": 17},
        r"training.seq_len \(17\) must be a multiple of tensor parallelism \(2\)",
    ),
    "memory budget": (
        {"activation_checkpoint__mode": "memory_budget"},
        r"activation_checkpoint.mode \('memory_budget'\) must be 'none', 'full' or 'selective'",
    ),
    "replicas": (
        {
            "parallelism__data_parallel_replicate_degree": 2,
            "checkpoint__enable": True,
            "checkpoint__last_save_in_hf": True,
        },
        r"data_parallel_replicate_degree \(2\) must be 1 with checkpoint.initial_load_in_hf",
    ),
}
OWN_FUNCTIONS = ("parallelize_fn", "build_optimizers_fn", "build_metrics_processor_fn")


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    from examples.torchtitan.cpu import prepare

    prepare()
    results: dict[str, Any] = {"block": {name: blocks(name) for name in BLOCKS}}
    results["before experts"] = message(score_before_experts=True, top_k=2)
    with tempfile.TemporaryDirectory() as folder:
        for name, options in DECODERS.items():
            results[name] = train("moecore_tiny_decoder", f"{folder}/{rank}", **options)
        results["refused"] = {
            name: refusal(f"{folder}/{rank}", options)
            for name, (options, _) in REFUSED.items()
            if options
        }
    results["refused"] |= {"converters": converters(folder), "model": other_model()}
    results["own functions"] = {name: own_function(name) for name in OWN_FUNCTIONS}
    results["own classes"] = {part: own_class(part) for part in ("router", "experts")}
    results["oracle"] = oracle()
    results["dealt"] = dealt_balance()
    return results


def dealt_balance() -> BalanceConfig:
    """What is left of quantile balancing when the job deals experts out."""
    balance = BalanceConfig(
        z_loss_coef=0.1, bias_update="quantile", bias_update_rate=1.0, bias_per_micro_batch=True
    )
    config = MoEConfig(
        dim=16,
        hidden_dim=16,
        num_experts=4,
        top_k=2,
        score_function="sigmoid",
        expert_bias=True,
        balance=balance,
    )
    layer = MoELayer(config, device="meta")
    force_even_load(layer)
    return layer.config.balance


def stock_block(**options: Any) -> nn.Module:
    from torchtitan.models.moe import MoE, MoEArgs

    defaults = dict(num_experts=8, use_grouped_mm=False, score_before_experts=False)
    block = MoE(MoEArgs(**(defaults | options)), 16, 32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.3, generator=generator)
    return block


def blocks(name: str) -> list[dict[str, Tensor]]:
    """What a stock block and its TitanMoE give: output, gradients, names; then each's own init."""
    from torchtitan.models.moe import MoE

    from moecore.families.family import swap_blocks
    from moecore.integrations.torchtitan.v02.moe import titan_moe

    stock = stock_block(**BLOCKS[name])
    holder = nn.Sequential(copy.deepcopy(stock))
    swap_blocks(holder, {MoE: titan_moe})
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
            if "gate_bias" in BLOCKS[name]:  # stock leaves it as it is
                block.router.gate.bias.zero_()
            block.init_weights(0.1, torch.device("cpu"))
        inits = {f"init {n}": t.clone() for n, t in block.state_dict().items()}
        results.append(found | names | inits)
    return results


def message(**options: Any) -> str:
    from moecore.integrations.torchtitan.v02.moe import titan_moe

    with pytest.raises(NotImplementedError) as error:
        titan_moe(stock_block(**options), nn.Module())
    return str(error.value)


def own_function(field: str) -> str:
    """What a spec with a function of its own is told."""
    from torchtitan.models import qwen3

    from moecore.integrations.torchtitan.v02.specs import accelerated

    spec = replace(qwen3.get_train_spec(), **{field: own_function})
    with pytest.raises(NotImplementedError) as error:
        accelerated(spec)
    return str(error.value)


def own_class(part: str) -> str:
    """What a block is told whose router or experts are of a subclass."""
    from moecore.integrations.torchtitan.v02.moe import titan_moe

    block = stock_block()
    module = block.get_submodule(part)
    module.__class__ = type("Own", (type(module),), {})
    with pytest.raises(NotImplementedError) as error:
        titan_moe(block, nn.Module())
    return str(error.value)


def refusal(folder: str, options: dict[str, Any]) -> str:
    try:
        train("moecore_tiny_decoder", folder, **options)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "not refused"


def converters(folder: str) -> str:
    """Asked directly: torchtitan would build the converter first."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    from moecore.integrations.torchtitan.v02.parallel import check_job

    job = ConfigManager().parse_args(arguments("moecore", folder))
    job.model.converters = ["float8"]
    with pytest.raises(NotImplementedError) as error:
        check_job(job, ParallelDims(1, 4, 1, 1, 1, 1, 1, 4))
    return str(error.value)


def other_model() -> str:
    from torchtitan.models import llama4

    from moecore.integrations.torchtitan.v02.specs import accelerated

    with pytest.raises(NotImplementedError) as error:
        accelerated(llama4.get_train_spec())
    return str(error.value)


def oracle() -> Run:
    """The decoder in one process: four forwards a step, and plain AdamW."""
    from moecore.models import Decoder
    from moecore.moe.balance import BalanceGroups
    from moecore.moe.params import init_normal_
    from moecore.moe.state import MoEState
    from tests.integrations.titan_specs import DECODER, samples

    model = Decoder(DECODER)
    with torch.no_grad():
        model.init_weights(7)
        for name, param in model.named_parameters():
            if param.ndim > 1:
                init_normal_(param, std=0.2 if ".mlp." in name else 0.05, key=name)
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "tracker")}
    state = MoEState(layers, BalanceGroups())
    state.set_num_micro_batches(4)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY
    )
    run = Run()
    for step in range(STEPS):
        batch = [samples(4 * step + i, 1, SEQ_LEN) for i in range(4)]
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
def results() -> dict[str, Any]:
    return run_ranks(4, worker)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_names_and_fills_like_stock(results: dict[str, Any], name: str) -> None:
    stock, own = results["block"][name]
    assert_close(own, stock)
    assert [n for n in own if "experts" in n] == [n for n in stock if "experts" in n]
    for key in (n for n in stock if n.startswith(("init ", "state "))):
        assert torch.equal(own[key], stock[key]), key


def test_weights_before_the_experts_need_one_choice(results: dict[str, Any]) -> None:
    assert (
        "score_before_experts (True) must be False with top_k (2) > 1" in results["before experts"]
    )


@pytest.mark.parametrize("name", DECODERS)
def test_the_decoder_trains_like_one_process(results: dict[str, Any], name: str) -> None:
    run, one = results[name], results["oracle"]
    assert close(run.losses, one.losses), (run.losses, one.losses)
    assert close(run.norms, one.norms), (run.norms, one.norms)
    assert_close(run.grads, one.grads)
    assert_close(run.state, one.state, 2e-5)
    assert not run.plain


@pytest.mark.parametrize("name", DECODERS)
def test_the_log_has_load_and_auxiliary_loss(results: dict[str, Any], name: str) -> None:
    for found, wanted in zip(results[name].metrics, results["oracle"].metrics, strict=True):
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-5), key


def test_the_section_of_the_job_reaches_the_layers(results: dict[str, Any]) -> None:
    assert results["choices"].dispatchers == {"AllGatherDispatcher"}
    assert results["choices"].backends == {"sequential"}
    assert results["ep"].dispatchers == {"AllToAllDispatcher"}


def test_blocks_share_the_graph_of_attention_and_norms(results: dict[str, Any]) -> None:
    # The prediction module stays as it is.
    assert results["compiled"].graphs == 1
    assert results["ep"].graphs == 0


def test_no_bias_moves_when_experts_are_dealt_out(results: dict[str, Any]) -> None:
    assert results["dealt"] == BalanceConfig(z_loss_coef=0.1)


def test_what_moecore_would_replace_is_refused(results: dict[str, Any]) -> None:
    for field, said in results["own functions"].items():
        assert said.startswith(f"TrainSpec.{field} (<function own_function")
        assert "must be torchtitan's own" in said
    for part, said in results["own classes"].items():
        assert re.match(rf"MoE {part} \(Own\) must be \w+ for a moecore model", said)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(results: dict[str, Any], name: str) -> None:
    assert re.search(REFUSED[name][1], results["refused"][name])


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_fused_adamw_is_moecores(implementation: str) -> None:
    from torchtitan.config.job_config import Optimizer

    from moecore.integrations.torchtitan.v02.specs import build_optimizers
    from moecore.train import AdamW

    config = Optimizer(implementation=implementation, lr=0.5, beta2=0.75, eps=0.25)
    (found,) = build_optimizers([nn.Linear(2, 2)], config, parallel_dims=None)
    (group,) = found.param_groups
    assert type(found) is (AdamW if implementation == "fused" else torch.optim.AdamW)
    names = ("lr", "betas", "eps", "weight_decay", "fused")
    assert [group[n] for n in names] == [0.5, (0.9, 0.75), 0.25, 0.1, implementation == "fused"]


@pytest.mark.parametrize(
    ("options", "dispatcher", "nvlink"),
    [
        (dict(), "alltoall", None),
        (dict(row_factor=1.5), "auto", NVLinkOptions(row_factor=1.5)),
        (dict(dispatcher="nvlink"), "nvlink", NVLinkOptions(row_factor=None)),
        (dict(dispatcher="allgather"), "allgather", None),
    ],
)
def test_without_a_row_factor_any_routing_fits(
    options: dict[str, Any], dispatcher: str, nvlink: NVLinkOptions | None
) -> None:
    """No step of torchtitan can run again or be skipped."""
    job = MoECore(**options)
    assert (dispatcher_of(job), nvlink_options(job)) == (dispatcher, nvlink)
