"""`experts_implementation="moecore"` computes what "eager" does, in every family and training loop.

The reference is transformers' own loop over experts. Trainer, peft, compilation, checkpointing and
generation run here in one process; FSDP2, DDP and DTensors in test_transformers_experts_ranks.py.
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.17")

import transformers
from transformers.integrations import finegrained_fp8, moe, mxfp4

from moecore.families.family import swap_blocks
from moecore.integrations.transformers import register_experts
from moecore.integrations.transformers.experts import NAME, PLAN, experts_forward
from tests.families.transformers import hf_models as hm
from tests.families.transformers.family_models import (
    BOUNDS,
    batch,
    family_names,
    loss_of,
    tiny_model,
)

# Their classes of experts do not read `experts_implementation`, neither "grouped_mm".
WITHOUT_INTERFACE = {
    "dbrx": "DbrxExperts",
    "jetmoe": "JetMoeParallelExperts",
    "llama4": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "nllb_moe": "NllbMoeExperts",
    "step3p7": "Step3p7Experts",
    "switch_transformers": "SwitchTransformersExperts",
}
DEAR = ("muse_spark",)  # 40 s; `test_remote_experts` has its experts
SENSITIVE = ("gemma4",)  # fp32 gradients of eager itself are 1.1e-5 from those in fp64
ONE_OF_EACH = ("qwen3-moe", "gpt-oss")  # one kernel; products under autograd


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    register_experts()
    yield
    for interface in (moe.ExpertsInterface, finegrained_fp8.FP8ExpertsInterface):
        del interface._global_mapping[NAME]


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_bias")]


def step_of_family(family, implementation, dtype=torch.float32):
    """Logits and gradients of one step."""
    model = tiny_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    inputs = batch(model, 0)
    loss_of(model, inputs).backward()
    with torch.no_grad():
        numbers = {"logits": model(**inputs).logits}
    assert any(hasattr(m, PLAN) for m in experts_of(model)) == (implementation == NAME)
    named = model.named_parameters()
    return numbers | {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in DEAR else name
        for name in family_names()
        if name not in {*WITHOUT_INTERFACE, *SENSITIVE}
    ],
)
def test_a_family_equals_eager(family: str) -> None:
    error, name = hm.worst(step_of_family(family, NAME), step_of_family(family, "eager"))
    assert error <= BOUNDS.get(family, 1e-5), f"{name}: {error}"


@pytest.mark.parametrize("family", SENSITIVE)
def test_a_sensitive_family_is_as_near_to_fp64_as_eager(family: str) -> None:
    """At most twice the error of eager, in the worst gradient."""
    exact = step_of_family(family, "eager", torch.float64)
    error, eager = (hm.worst(step_of_family(family, name), exact)[0] for name in (NAME, "eager"))
    assert error <= 2 * eager < 1e-4


@pytest.mark.parametrize("family", WITHOUT_INTERFACE)
def test_families_whose_experts_have_no_interface(family: str) -> None:
    model = tiny_model(family)
    assert not model._can_set_experts_implementation() and not experts_of(model)
    assert WITHOUT_INTERFACE[family] in {type(m).__name__ for m in model.modules()}


def test_the_page_names_these_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert dict(re.findall(r"^\| (\w+) \| `(\w+)` \|$", text, re.MULTILINE)) == WITHOUT_INTERFACE


def muse_spark_experts() -> Any:
    """Return experts with a norm of each expert's output."""
    name = "transformers.models.muse_spark.modeling_muse_spark"
    module = pytest.importorskip(name, reason="transformers 5.17 has no Muse Spark")
    sizes = dict(num_local_experts=8, moe_hidden_size=32, moe_intermediate_size=16)
    return module.MuseSparkExperts(SimpleNamespace(hidden_act="silu", post_norm_eps=1e-6, **sizes))


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: experts_of(hm.random_model(name))[0] for name in ONE_OF_EACH},  # type: ignore[misc]
    "nemotron_h": lambda: experts_of(tiny_model("nemotron_h"))[0],
    "muse_spark": muse_spark_experts,
}


def numbers_of(
    experts: Any,
    implementation: str,
    *,
    num_tokens: int = 22,
    dtype: torch.dtype = torch.float32,
    remote: bool = False,
    forward: Any = None,
) -> dict[str, Tensor]:
    """Output and gradients of an experts module; with `remote` some experts are of other ranks."""
    experts = experts.to(dtype)
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    E, transposed = experts.num_experts, experts.is_transposed
    generator = torch.Generator().manual_seed(3)
    D = experts.down_proj.shape[2 if transposed else 1]
    x_TD = torch.randn(num_tokens, D, generator=generator).to(dtype).requires_grad_()
    weights_TK, ids_TK = torch.rand(num_tokens, E, generator=generator).topk(2)
    if remote:
        ids_TK[::3, 1] = ids_TK[5] = E
    weights_TK = weights_TK.to(dtype).requires_grad_()
    forward = experts if forward is None else forward
    is_remote_TK = ids_TK == E
    if remote and implementation == "eager":  # which not every class runs with these ids
        y_TD = forward(x_TD, ids_TK % E, weights_TK.masked_fill(is_remote_TK, 0))
    else:
        y_TD = forward(x_TD, ids_TK, weights_TK)
    assert y_TD.dtype == dtype
    y_TD.float().square().sum().backward()
    grads = {name: p.grad.float() for name, p in experts.named_parameters()}
    assert not weights_TK.grad[is_remote_TK].any()
    numbers = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
    return {name: tensor.float() for name, tensor in numbers.items()} | grads


def filled(name: str) -> Any:
    experts = EXPERTS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return experts


@pytest.mark.parametrize("name", EXPERTS)
def test_remote_experts(name: str) -> None:
    """Ids from `num_experts` on are of experts of other ranks: no output, no gradient."""
    experts = filled(name)
    hm.assert_equal_numbers(
        numbers_of(experts, NAME, remote=True), numbers_of(experts, "eager", remote=True)
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_one_token_and_experts_without_tokens(name: str) -> None:
    experts = filled(name)
    result = numbers_of(experts, NAME, num_tokens=1)
    hm.assert_equal_numbers(result, numbers_of(experts, "eager", num_tokens=1))
    assert (result["down_proj"].flatten(1).abs().sum(1) > 0).sum() == 2


@pytest.mark.parametrize("name", EXPERTS)
def test_bf16_is_as_near_to_fp32_as_eager(name: str) -> None:
    experts = filled(name).bfloat16()
    ours = numbers_of(experts, NAME, dtype=torch.bfloat16)
    eager = numbers_of(experts, "eager", dtype=torch.bfloat16)
    reference = numbers_of(experts, "eager")
    for key, right in reference.items():
        error, bound = ((n[key] - right).norm() / right.norm() for n in (ours, eager))
        assert error <= 1.5 * bound + 1e-3, key


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_autocast_multiplies_in_its_dtype(name: str) -> None:
    experts = filled(name)
    reference = numbers_of(experts, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        error, _ = hm.worst(numbers_of(experts, NAME), reference)
    assert 1e-4 < error < 5e-2


@pytest.mark.parametrize("name", EXPERTS)
def test_without_gradients(name: str) -> None:
    experts, results = filled(name), []
    for implementation in (NAME, "eager"):
        experts.config._experts_implementation = implementation
        D = experts.down_proj.shape[2 if experts.is_transposed else 1]
        x_TD = torch.linspace(-1, 1, 5 * D).view(5, D)
        ids_TK = torch.tensor([[0, 1]] * 5)
        with torch.no_grad():
            results.append(experts(x_TD, ids_TK, torch.full((5, 2), 0.5)))
    assert not results[0].requires_grad
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_weights_are_views_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moecore.integrations.transformers import experts as module

    compute, addresses = module._compute_experts, list[int]()

    def record(x: Tensor, ids: Tensor, w: Tensor, weights: Any, *rest: Any) -> Tensor:
        addresses.extend((weights.w1_eCD.data_ptr(), weights.w2_eDF.data_ptr()))
        return compute(x, ids, w, weights, *rest)

    monkeypatch.setattr(module, "_compute_experts", record)
    experts = filled(name)
    numbers_of(experts, NAME)
    assert addresses == [experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "fullgraph"),
    [
        ("qwen3-moe", torch.float32, True),
        ("gpt-oss", torch.bfloat16, True),
        ("gpt-oss", torch.float32, False),
    ],
)
def test_compile(name: str, dtype: torch.dtype, fullgraph: bool) -> None:
    """One graph, also where the first forward is compiled; only fp32 with biases breaks it."""
    experts = filled(name)
    assert not hasattr(experts, PLAN)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=fullgraph)
    result = numbers_of(experts, NAME, dtype=dtype, forward=compiled)
    expected = numbers_of(experts, NAME, dtype=dtype)
    hm.assert_equal_numbers(result, expected)
    if not fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compiler.reset()
            compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
            numbers_of(experts, NAME, dtype=dtype, forward=compiled)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = hm.random_model(name)
    model.set_experts_implementation("eager")
    expected = hm.run(model)
    model.zero_grad()
    model.set_experts_implementation(NAME)
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    else:
        hm.enable_checkpointing(model)
    hm.assert_equal_numbers(hm.run(model), expected)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_generate(name: str) -> None:
    model, ids_BT, tokens = hm.random_model(name).eval(), torch.tensor([[3, 5, 7, 11]]), []
    for implementation in ("eager", NAME):
        model.set_experts_implementation(implementation)
        options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
        tokens.append(model.generate(ids_BT, **options))
    assert tokens[1].shape == (1, 9) and torch.equal(*tokens)


@pytest.mark.parametrize("target", ["attention", "experts"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_peft(name: str, target: str) -> None:
    """LoRA of attention, and of experts, whose parameters peft then replaces in each forward."""
    peft = pytest.importorskip("peft")
    expected: dict[str, Tensor] = {}
    for implementation in ("eager", NAME):
        model = hm.random_model(name)
        model.set_experts_implementation(implementation)
        names = {"target_modules": ["q_proj", "v_proj"]}
        if target == "experts":
            stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            names |= {"target_parameters": stacks}
        torch.manual_seed(0)
        options = dict(r=4, init_lora_weights=False, **names)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
        result = hm.run(adapted)
        assert any("lora_" in key for key in result)
        expected = expected or result
    hm.assert_equal_numbers(result, expected)


def test_from_pretrained_copies_and_the_way_back(tmp_path: Path) -> None:
    hm.random_model("qwen3-moe").save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, experts_implementation=NAME, dtype=torch.float32).train()
    expected = hm.run(load(tmp_path, experts_implementation="eager", dtype=torch.float32).train())
    hm.assert_equal_numbers(hm.run(model), expected)
    assert all(hasattr(m, PLAN) for m in experts_of(model))
    twin = copy.deepcopy(model)
    twin.zero_grad()
    hm.assert_equal_numbers(hm.run(twin), expected)
    assert twin.state_dict().keys() == model.state_dict().keys() == set(model.state_dict())
    twin.set_experts_implementation("eager")
    assert type(experts_of(twin)[0]).forward is not experts_forward


def test_parallelize_moe_takes_such_a_model() -> None:
    model = hm.random_model("qwen3-moe")
    model.set_experts_implementation(NAME)
    assert len(swap_blocks(model, {})) == 2


def test_quantised_experts_are_refused() -> None:
    model = hm.random_model("qwen3-moe")
    quantised = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
    finegrained_fp8.replace_with_fp8_linear(model, quantization_config=quantised)
    (experts, *_) = [m for m in model.modules() if type(m).__name__ == "FP8Experts"]
    experts.config._experts_implementation = NAME
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(NotImplementedError, match=r"quantised experts \(FP8Experts\): load .*"):
        experts(torch.zeros(2, 32), ids, weights)
    config = transformers.GptOssConfig(num_local_experts=2, hidden_size=32, intermediate_size=32)
    assert mxfp4.Mxfp4GptOssExperts(config).num_experts == 2
    config._experts_implementation = NAME
    with pytest.raises(NotImplementedError, match=r"\(Mxfp4GptOssExperts\)[^\n]*$"):
        mxfp4.Mxfp4GptOssExperts(config)


def test_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(finegrained_fp8, "FP8ExpertsInterface")
    with pytest.raises(RuntimeError, match=r"must be >= 5.17 for experts_implementation[^\n]*$"):
        register_experts()
