"""torchtitan blocks on one process, the decoder on four ranks, and what a job may not ask."""

import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    DispatchOptions,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.integrations.torchtitan.options import MoECore, make_parallelize_arguments
from moecore.models import PRESETS, Decoder
from moecore.moe.forced_routing import force_even_load
from moecore.precision.amax import list_amax_histories
from tests.helpers.grids import asked_for, beside
from tests.helpers.ranks import run_ranks
from tests.integrations import titan_runs
from tests.integrations.titan_options import JOBS, NOT_ASKED, RESUMED, native, resumed, trained

if not titan_runs.TITAN:  # not imported here: `prepare` comes first
    pytest.skip("torchtitan is not installed", allow_module_level=True)
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
if not titan_runs.V03:
    BLOCKS["on input"] = dict(bias=True, top_k=1, score_before_experts=True)
CHOICES = {
    "moecore__dispatch__name": "allgather",
    "moecore__fsdp__prefetch_blocks": 2,
    "moecore__fsdp__blocks_per_unit": 2,
    "moecore__expert_backend": "sequential",
}
# A micro-batch balances itself, so all have one sample.
DECODERS: dict[str, dict[str, Any]] = {
    "ep": {titan_runs.EP: 2, titan_runs.AC: "full"},
    "tp": {titan_runs.EP: 2, titan_runs.TP: 2, **titan_runs.TWO_BATCHES},
    "fsdp": {titan_runs.AC: "selective"},
    "compiled": {titan_runs.EP: 2, **titan_runs.COMPILE},
    "choices": {titan_runs.EP: 2, **CHOICES},
}
NIGHTLY = ["fsdp"]  # the jobs below have its mesh
SAVE = {"checkpoint__enable": True, "checkpoint__interval": 1}
WIDE = {"name": "moecore_wide_decoder", titan_runs.PP: 2, titan_runs.BATCH: 2}
SPMD = "parallelism__spmd_backend"
# Of the decoder, if no other model is named.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tp alone": (
        {titan_runs.TP: 2},
        r"expert_parallel_degree \(1\) must be > 1 with tensor_parallel_degree",
    ),
    "cp": (
        {"name": "moecore_tiny_qwen3", "parallelism__context_parallel_degree": 2},
        r"context_parallel_degree \(2\) must be 1",
    ),
    "offload": ({"training__enable_cpu_offload": True}, r"enable_cpu_offload \(True\) must be Fal"),
    "nvlink": ({titan_runs.EP: 2, "moecore__dispatch__name": "nvlink"}, r"name \('nvlink'\) must"),
    "factor": (
        {titan_runs.EP: 2, **CHOICES, "moecore__dispatch__nvlink__row_factor": 1.5},
        r"moecore.dispatch.nvlink \(NVLinkOptions.*\) must go with name \(.allgather.\) = .nvlink.",
    ),
    "length": (
        {"training__seq_len": 128},
        r"training.seq_len \(128\) must be <= DecoderConfig.max",
    ),
    "odd length": (
        {titan_runs.EP: 2, titan_runs.TP: 2, "training__seq_len": 17},
        # torchtitan 0.3 refuses it itself.
        r"\(17\) must be (a multiple of tensor parallelism \(2\)|divisible by 2)",
    ),
    "validation": ({titan_runs.VALIDATION: True}, r"enable \(True\) must be False"),
    "cp way": (
        {titan_runs.CP: 2, "parallelism__context_parallel_load_balancer": "ptrr"},
        r"parallelism.context_parallel_load_balancer \('ptrr'\) must be 'headtail', or replaced by",
    ),
    "no cp": (
        {"moecore__context__way": "p2p"},
        r"moecore.context.way \('set'\) must be absent where context_parallel_degree is 1",
    ),
    "pp": (
        {"name": "moecore_tiny_qwen3", titan_runs.PP: 2, titan_runs.BATCH: 2},
        r"pipeline_parallel_degree \(2\) must be 1 for \w+: use moecore's decoder",
    ),
    "pp order": (
        WIDE | {"parallelism__pipeline_parallel_schedule": "GPipe"},
        r"pipeline_parallel_schedule \('GPipe'\) must be '1F1B', or replaced by moecore.pipeline",
    ),
    "pp passes": (
        WIDE | {"training__global_batch_size": 8},
        r"training.global_batch_size \(8\) must be 2, one pass of the pipeline",
    ),
    "pp copies": (
        {titan_runs.PP: 2, titan_runs.BATCH: 2},
        r"DecoderConfig.num_mtp_layers \(1\) must be 0 with pipeline",
    ),
    "no pp": (
        {"moecore__pipeline__chunks": 2},
        r"moecore.pipeline.chunks \('set'\) must be absent where pipeline_parallel_degree is 1",
    ),
    "checkpoint": (
        {titan_runs.AC: "full", "moecore__memory__recompute": "norm"},
        r"activation_checkpoint \(.*ull.*\) must be none with moecore.memory",
    ),
    "compiled": (
        titan_runs.COMPILE | {"moecore__memory__offload": "experts"},
        r"compile.backend \('aot_eager'\) must be 'inductor' with moecore.memory",
    ),
    "strategy": (
        {
            "parallelism__fsdp_reshard_after_forward": "never",
            "moecore__fsdp__dense_strategy": "no_shard",
        },
        r"reshard_after_forward \('never'\) must be 'default' with moecore.fsdp.dense_strategy",
    ),
    "documents": (
        {"name": "moecore_tiny_qwen3", "moecore__documents": True},
        r"moecore.documents \(True\) must be False for torchtitan's own models",
    ),
    "clones": (
        {"moecore__dispatch__clones__enable": True},
        r"clones \(.*\) is not used: ep is 1: drop it from section moecore",
    ),
    "off": (
        {"moecore__dispatch__clones__per_rank": 3},
        r"dispatch.clones.per_rank must go with moecore.dispatch.clones.enable \(False\) = True",
    ),
    "part": (
        {"moecore__memory__recompute": "attention"},
        r"moecore.memory.recompute \(\('attention',\)\) must be a tuple, each one of 'norm'",
    ),
    "weights": (
        {"name": "moecore_tiny_qwen3", "moecore__hf_weights": "x"},
        r"moecore.hf_weights \('x'\) must be absent for torchtitan's own models",
    ),
}
if titan_runs.V03:
    OWN = {"name": "moecore_tiny_qwen3", titan_runs.EP: 2}
    REFUSED |= {
        "tp types": (
            OWN | {titan_runs.TP: 2},
            r"spmd_backend \('spmd_types'\) must be 'partial_dtensor'",
        ),
        "tp whole": (
            OWN | titan_runs.OWN_TP | {"parallelism__enable_sequence_parallel": False},
            r"enable_sequence_parallel \(False\) must be T",
        ),
        "tp compiled": (
            OWN | titan_runs.OWN_TP | titan_runs.COMPILE,
            r"compile.components .* without 'model'",
        ),
        "backend": (OWN | {SPMD: "full_dtensor"}, r"spmd_backend \('full_dten"),
        "graphs": ({"training__disable_cuda_graphs": False}, r"disable_cuda_graphs \(False\) mus"),
        "muon": (
            {"moecore__muon__enable": True},
            r"moecore.muon.enable \('set'\) must be absent, because optimizers of 0.3 are its own",
        ),
        "experts": (
            {"name": "moecore_tiny_converted"},
            r"MoE inner_experts \(ExactExperts\) must be Gr",
        ),
    }
else:
    REFUSED |= {
        "async tp": (
            {"parallelism__enable_async_tensor_parallel": True},
            r"enable_async_tensor_para",
        ),
        "optimizer": (
            {"optimizer__implementation": "foreach", "moecore__muon__enable": True},
            r"optimizer \('AdamW, foreach'\) must be 'AdamW', 'fused', .* beside moecore.muon",
        ),
        "deepep": (
            {"parallelism__expert_parallel_comm_backend": "deepep"},
            r"comm_backend \('deepep",
        ),
        "memory budget": (
            {titan_runs.AC: "memory_budget"},
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
# What is refused without a run: `refused_v02` and `refused_v03` ask.
WITHOUT_RUN: dict[str, str] = (
    {
        "mtp": r"mtp_layers \(1\) must be none",
        "model": r"Llama3Model.Config\) must be one of Qwen3Model.Config, DeepSeekV3Model.Config",
        "moecore": r"MoETrainer.Config\) must be torchtitan's Trainer.Config",
        "post_optimizer_build_fn": r"\(<function [^)]*\) must be torchtitan's own",
    }
    if titan_runs.V03
    else {
        "parallelize_fn": r"TrainSpec.parallelize_fn \(<function [^)]*\) must be torchtitan's own",
        "build_optimizers_fn": r"\(<function [^)]*\) must be torchtitan's own",
        "build_metrics_processor_fn": r"\(<function [^)]*\) must be torchtitan's own",
        "router": r"MoE router \(Own\) must be TokenChoiceTopKRouter for a moecore model",
        "experts": r"MoE experts \(Own\) must be GroupedExperts for a moecore model",
        "before experts": r"score_before_experts \(True\) must be False with top_k \(2\) > 1",
        "model": r"TrainSpec.model_cls \(\w+\) must be one of Qwen3Model, DeepSeekV3Model",
        "converters": r"model.converters \(\['float8'\]\) must be \[\]",
    }
)


def worker(rank: int, device: torch.device, folder: str, decoders: list[str]) -> dict[str, Any]:
    titan_runs.prepare()
    results: dict[str, Any] = {"block": {name: blocks(name) for name in BLOCKS}}
    for name in decoders:
        results[name] = titan_runs.train("moecore_tiny_decoder", folder, **DECODERS[name])
    results["oracle"] = titan_runs.decoder_oracle()
    for name, (options, own) in JOBS.items():
        save = SAVE if name in RESUMED else {}
        results[f"job {name}"] = trained(f"{folder}/{name}", **options, **save), native(**own)
    results["resumed"] = {name: resumed(folder, name) for name in RESUMED}
    results["dealt"] = dealt_balance()
    return results


def refusing_worker(rank: int, device: torch.device, folder: str) -> dict[str, str]:
    titan_runs.prepare()
    found = {
        name: titan_runs.refusal(**({"name": "moecore_tiny_decoder", "folder": folder} | options))
        for name, (options, _) in REFUSED.items()
    }
    return found | (refused_v03() if titan_runs.V03 else refused_v02(folder))


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


def blocks(name: str) -> list[dict[str, Tensor]]:
    """What a stock block and its TitanMoE give: output, gradients, names; then each's own init."""
    from moecore.families.family import swap_blocks

    specs: Any = import_module(titan_runs.SPECS)
    stock = specs.stock_block(**BLOCKS[name])
    holder = nn.Sequential(copy.deepcopy(stock))
    swap_blocks(holder, {specs.MoE: specs.make_titan_moe})
    specs.exact_block(stock)
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
            specs.fill_block(block)
        inits = {f"init {n}": t.clone() for n, t in block.state_dict().items()}
        results.append(found | names | inits)
    return results


def message(call: Callable[[], Any]) -> str:
    with pytest.raises((NotImplementedError, ValueError)) as error:
        call()
    return str(error.value)


def refused_v02(folder: str) -> dict[str, str]:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama4, qwen3

    from moecore.integrations.torchtitan.parallelize import check_job
    from moecore.integrations.torchtitan.v02.specs import V02, accelerated, make_titan_moe
    from tests.integrations.titan_specs import stock_block

    found = {}
    for field in ("parallelize_fn", "build_optimizers_fn", "build_metrics_processor_fn"):
        spec = replace(qwen3.get_train_spec(), **{field: refused_v02})
        found[field] = message(lambda spec=spec: accelerated(spec))
    for part in ("router", "experts"):
        block = stock_block(top_k=2)
        module = block.get_submodule(part)
        module.__class__ = type("Own", (type(module),), {})
        found[part] = message(lambda block=block: make_titan_moe(block, nn.Module()))
    block = stock_block(top_k=2, score_before_experts=True)
    found["before experts"] = message(lambda: make_titan_moe(block, nn.Module()))
    found["model"] = message(lambda: accelerated(llama4.get_train_spec()))
    # Asked directly: torchtitan would build the converter first.
    job = ConfigManager().parse_args(titan_runs.arguments("moecore", folder))
    job.model.converters = ["float8"]
    degrees = ParallelDims(1, 4, 1, 1, 1, 1, 1, 4)
    found["converters"] = message(lambda: check_job(job, degrees, V02, returns_loss=False))
    return found


def refused_v03() -> dict[str, str]:
    from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3_jobs
    from torchtitan.models.llama3 import config_registry as llama3_jobs
    from torchtitan.models.qwen3 import config_registry as qwen3_jobs

    from moecore.integrations.torchtitan.v03 import jobs as titan

    own = qwen3_jobs.qwen3_moe_debug()
    own.model_spec = replace(own.model_spec, post_optimizer_build_fn=refused_v03)
    jobs = {
        "mtp": deepseek_v3_jobs.deepseek_v3_debugmodel_mtp(),
        "model": llama3_jobs.llama3_debugmodel(),
        "moecore": titan.qwen3_moe_debug(),
        "post_optimizer_build_fn": own,
    }
    return {name: message(lambda job=job: titan.accelerated(job)) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    decoders = asked_for(request, "decoder")
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(4, worker, folder, decoders, imported=titan_runs.IMPORTED)


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """What two ranks are told: none of it needs four."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, refusing_worker, folder, imported=titan_runs.IMPORTED)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_names_and_fills_like_stock(results: dict[str, Any], name: str) -> None:
    stock, own = results["block"][name]
    titan_runs.assert_close(own, stock)
    assert [n for n in own if "experts" in n] == [n for n in stock if "experts" in n]
    for key in (n for n in stock if n.startswith(("init ", "state "))):
        assert torch.equal(own[key], stock[key]), key


@pytest.mark.parametrize("decoder", beside(DECODERS, NIGHTLY))
def test_the_decoder_trains_like_one_process(results: dict[str, Any], decoder: str) -> None:
    run, one = results[decoder], results["oracle"]
    assert titan_runs.close(run.losses, one.losses), (run.losses, one.losses)
    assert titan_runs.close(run.norms, one.norms), (run.norms, one.norms)
    titan_runs.assert_close(run.grads, one.grads)
    titan_runs.assert_close(run.state, one.state, 2e-5)
    assert not run.plain
    for found, wanted in zip(run.metrics, one.metrics, strict=True):
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("name", JOBS)
def test_a_job_with_options_trains_like_moecores_own_loop(results, name):
    run, own = results[f"job {name}"]
    assert titan_runs.close(run.losses, own.losses), (run.losses, own.losses)
    assert titan_runs.close(run.norms, own.norms), (run.norms, own.norms)
    titan_runs.assert_close(run.state, own.state, 2e-5)
    asked = {key: value for key, value in JOBS[name][1].items() if key not in NOT_ASKED}
    if "moe" in asked:  # a job changes the balance of the layers, not of the request
        asked["moe"] = {key: value for key, value in asked["moe"].items() if key != "balance"}
    assert {key: getattr(run.request, key) for key in asked} == asked


@pytest.mark.parametrize("name", RESUMED)
def test_a_job_with_options_resumes_on_other_ranks(results: dict[str, Any], name: str) -> None:
    found, whole = results["resumed"][name], results[f"job {name}"][0]
    assert len(found.losses) == 1  # step 2 alone
    assert titan_runs.close(found.losses, whole.losses[1:]), (found.losses, whole.losses)
    assert titan_runs.close(found.norms, whole.norms[1:]), (found.norms, whole.norms)
    held = {n: found.state[n] for n in whole.state}  # a pipeline's rank has its stages
    titan_runs.assert_close(held, whole.state, 2e-5)


def test_the_section_of_the_job_reaches_the_layers(results: dict[str, Any]) -> None:
    assert results["choices"].dispatchers == {"AllGatherDispatcher"}
    assert results["choices"].backends == {"sequential"}
    assert results["ep"].dispatchers == {"AllToAllDispatcher"}
    # Blocks share the graph of attention and norms; the prediction module stays as it is.
    assert results["compiled"].graphs == 1 and results["ep"].graphs == 0
    # No bias moves when experts are dealt out.
    assert results["dealt"] == BalanceConfig(z_loss_coef=0.1)


@pytest.mark.parametrize("name", [*REFUSED, *WITHOUT_RUN])
def test_what_cannot_be_done_is_refused(refused: dict[str, str], name: str) -> None:
    wanted = REFUSED[name][1] if name in REFUSED else WITHOUT_RUN[name]
    assert re.search(wanted, refused[name]), refused[name]


def test_the_module_of_the_other_version_is_named() -> None:
    other = "v02.specs" if titan_runs.V03 else "v03.jobs"
    with pytest.raises(ImportError, match=rf"torchtitan.{other} needs .* with torchtitan 0.\d use"):
        import_module(f"moecore.integrations.torchtitan.{other}")


@pytest.mark.skipif(not titan_runs.V03, reason="torchtitan 0.2 has no jobs")
def test_the_module_has_the_jobs_that_its_docstring_says() -> None:
    titan_runs.prepare()
    from moecore.integrations.torchtitan.v03 import jobs

    models = {"qwen3_moe_debug": "Qwen3Model", "qwen3_30b_a3b": "Qwen3Model"}
    models |= {f"deepseek_v3_{n}": "DeepSeekV3Model" for n in ("debugmodel", "16b", "671b")}
    models |= {f"decoder_{n.replace('-', '_')}": "TitanDecoder" for n in PRESETS}
    for name, model in models.items():
        made = getattr(jobs, name)().model_spec.model
        assert type(made).__qualname__ == f"{model}.Config"


@pytest.mark.skipif(titan_runs.V03, reason="torchtitan 0.3 makes its optimizers itself")
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_fused_adamw_is_moecores(implementation: str) -> None:
    from torchtitan.config.job_config import Optimizer

    from moecore.integrations.torchtitan.parallelize import OPTIONS
    from moecore.integrations.torchtitan.v02.specs import build_optimizers
    from moecore.train import AdamW

    config = Optimizer(implementation=implementation, lr=0.5, beta2=0.75, eps=0.25)
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    options = MoECore()
    options.adamw.master_remainder = implementation == "fused"
    setattr(model, OPTIONS, options)
    (found,) = build_optimizers([model], config, parallel_dims=None)
    (group,) = found.param_groups
    assert type(found) is (AdamW if implementation == "fused" else torch.optim.AdamW)
    assert getattr(found, "master_remainder", False) == (implementation == "fused")
    names = ("lr", "betas", "eps", "weight_decay", "fused")
    assert [group[n] for n in names] == [0.5, (0.9, 0.75), 0.25, 0.1, implementation == "fused"]


@pytest.mark.skipif(titan_runs.V03, reason="torchtitan 0.3 makes its optimizers itself")
def test_histories_of_delayed_scaling_are_saved_with_optimizers(tmp_path: Path) -> None:
    """A resume has the bits of the run; other data ranks have gradients of another size."""
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.components.optimizer import OptimizersContainer

    from moecore.integrations.torchtitan.step import AMAX, register_step_hooks
    from tests.io.checkpoint.test_amax import CONFIG, ROLES

    recipe = Recipe(scaling="tensorwise", amax_history=2, power_of_two=False)
    meshes = build_meshes(ParallelConfig(), "cpu")

    def job(seed: int) -> tuple[Decoder, dict[str, Any]]:
        model = Decoder(CONFIG, device="meta")
        parallelize_moe(model, meshes, precision=Precision(recipe=recipe, roles=ROLES))
        model.to_empty(device="cpu")
        model.init_weights(seed)
        optimizers = OptimizersContainer([model], torch.optim.AdamW, dict(lr=1e-2))
        register_step_hooks(optimizers, [model])
        return model, {"model": ModelWrapper(model), "optimizer": optimizers}

    def step(model: Decoder, states: dict[str, Any], number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens_BT = torch.randint(CONFIG.vocab_size, (2, 17), generator=generator)
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()
        states["optimizer"].step()
        states["optimizer"].zero_grad()
        return [loss.detach(), *past(model).values()]

    def past(model: Decoder) -> dict[tuple[str, str], Tensor]:
        histories = list_amax_histories(model).items()
        return {(name, o): s.clone() for name, h in histories for o, s in h.recorded_amax.items()}

    (source, saved), (again, loaded) = job(0), job(1)
    for number in range(3):
        step(source, saved, number)
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    wanted = past(source)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert past(again).keys() == wanted.keys() and len(wanted) == 3 * 11 + 4
    assert all(torch.equal(steps, wanted[key]) for key, steps in past(again).items())
    ahead = step(source, saved, 3)
    assert all(torch.equal(a, b) for a, b in zip(step(again, loaded, 3), ahead, strict=True))
    state = saved["optimizer"].state_dict()
    state[f"{AMAX}degrees"] = torch.tensor([4, 1, 1])
    loaded["optimizer"].load_state_dict(state)
    unknown = {operand for (_, operand), steps in past(again).items() if not steps.any()}
    assert unknown == {"gradient", "dy", "dh"}


@pytest.mark.parametrize(
    ("options", "dispatcher", "nvlink"),
    [
        (dict(), "alltoall", None),
        (dict(row_factor=1.5), "auto", NVLinkOptions(row_factor=1.5)),
        (dict(name="nvlink"), "nvlink", NVLinkOptions(row_factor=None)),
        (dict(name="allgather"), "allgather", None),
    ],
)
def test_without_a_row_factor_any_routing_fits(options, dispatcher, nvlink):
    """No step of torchtitan can run again or be skipped."""
    job = MoECore()
    job.dispatch.name = options.get("name", "auto")
    job.dispatch.nvlink.row_factor = options.get("row_factor")
    found = make_parallelize_arguments(job, ParallelConfig(dp_shard=2, edp_shard=1, ep=2))
    assert found["dispatch"] == DispatchOptions(name=dispatcher, nvlink=nvlink)  # type: ignore[arg-type]
