"""moecore's options through the routers of families with a `RouterRecord`; test_families.py has
their numbers on two ranks.

By day one family of each structure runs, and all under --nightly.
"""

import copy
from math import ceil
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from moecore import Meshes, MoELayer, parallelize_moe
from moecore.base.copies import copy_modules, make_meta_parameter
from moecore.base.options.layer import BalanceConfig, CapacityConfig
from moecore.families.family import swap_blocks
from moecore.families.fp32_modules import is_selection_bias
from moecore.families.transformers.blocks import RECORDS
from moecore.moe.routed_experts import RoutedExperts
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.rl import RouterReplay
from tests.families.transformers.family_cases import OWN_ROUTERS
from tests.families.transformers.family_models import (
    IS_BEFORE_5_23,
    MODELS,
    batch,
    family_names,
    tiny_model,
)
from tests.helpers.grids import beside

SINCE = {  # transformers 5.17, by the first version that was tested
    "5.24": {"HYV4VLMoE", "Inkling2LoopSparseMoeBlock", "LaraMiniSparseMoeBlock"},
    "5.23": {
        *("BailingHybridMoE", "BeamMoE", "Dots3NoteTextMoE", "FlintSparseMoeBlock"),
        *("Inkling2SparseMoeBlock", "Kolibri1SparseMoeBlock", "MistralLarge4TextMoE"),
        "UnlimitedOcrTextMoe",
    },
}
BY_DAY = {
    "minimax_m2": "the block has the selection bias",
    "ernie4_5_moe": "a child of the gate has the selection bias, [1, E]",
    "afmoe": "the gate's matrix is a linear's, and the block's bias a parameter",
    "longcat_flash": "experts that return their input, a bias beside the linear",
    "nemotron_h": "projections to a latent dim",
    "axk1": "a norm of the block's output",
    "cohere2_moe": "a mean of routed and shared experts",
    "granitemoe": "softmax over the chosen logits",
    "mistral4": "groups of softmax scores",
}
RATE = 0.125


def families() -> list[str]:
    """Return the families with a block that has a record."""
    texts = {n: (MODELS / n / f"modeling_{n}.py").read_text() for n in family_names()}
    return [n for n, text in texts.items() if any(f"class {cls}(" in text for cls in RECORDS)]


FAMILIES = families()
EACH = beside(FAMILIES, [f for f in FAMILIES if f not in BY_DAY])
BIASED = tuple(f for f in BY_DAY if f not in ("cohere2_moe", "granitemoe", "mistral4"))


def layers_of(model: nn.Module) -> dict[str, Any]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    assert layers and not any(isinstance(m, RoutedExperts) for m in model.modules())
    return layers


def run(model: nn.Module) -> Tensor:
    """Return the cross entropy without the model's own balance loss; compute gradients."""
    inputs = batch(model, 0)
    torch.manual_seed(0)  # of noise
    logits = model(**inputs).logits
    targets = inputs["input_ids"].flatten() % logits.shape[-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
    loss.backward()
    return loss.detach()


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items() if is_selection_bias(n)}


@pytest.mark.parametrize("family", EACH)
def test_a_balance_loss_and_the_bias_update(family: str, meshes: Meshes) -> None:
    model = tiny_model(family)
    stock, before = copy.deepcopy(model), biases_of(model)
    rate = RATE if before else 0.0
    balance = BalanceConfig(micro_batch_coef=0.5, bias_update_rate=rate)
    parallelize_moe(model, meshes, moe={"balance": balance})
    torch.testing.assert_close(run(model), run(stock))  # the value of the loss does not change
    stock_grads = {n: p.grad for n, p in stock.named_parameters()}
    for name, layer in layers_of(model).items():
        path = f"{name}.{layer.get_part_name('router')}.weight"
        grad = model.get_parameter(path).grad
        assert (grad.full_tensor() - stock_grads[path]).abs().max() > 1e-3 * grad.abs().max()
    chosen = get_moe_state(model).finish_step().tokens_per_expert
    after = biases_of(model)
    assert after.keys() == before.keys()
    for key, bias in before.items():
        load = next(n for name, n in chosen.items() if key.startswith(f"{name}.")).float()
        expected = rate * torch.sign(load.mean() - load)
        torch.testing.assert_close((after[key] - bias).flatten(), expected)


@pytest.mark.parametrize("family", [case for case in EACH if case.values != ("longcat_flash",)])
def test_capacity(family: str, meshes: Meshes) -> None:
    """Of all but LongCat, where experts that return their input have none."""
    model, kept = tiny_model(family), []
    parallelize_moe(model, meshes, moe={"capacity": CapacityConfig(factor=0.5)})
    for layer in layers_of(model).values():
        router = layer.get_part("router")
        router.register_forward_hook(lambda *args: kept.append(args[-1].expert_ids_TK))
    run(model)
    config = layer.config
    N, K, E = 18, config.top_k, config.num_experts
    for ids_TK in kept:
        counts = ids_TK[ids_TK >= 0].bincount(minlength=E)
        assert ids_TK.shape == (N, K) and 0 < counts.max() <= ceil(0.5 * N * K / E)


@pytest.mark.parametrize("family", EACH)
def test_replay(family: str, meshes: Meshes) -> None:
    model = parallelize_moe(tiny_model(family), meshes)
    replay, chosen = RouterReplay(model), []
    with replay.record():
        run(model)
    recorded, layers = replay.choices("cpu"), layers_of(model)
    assert list(recorded) == list(layers)
    with torch.no_grad():
        for layer in layers.values():
            router = layer.get_part("router")
            router.weight.neg_()
            router.register_forward_hook(lambda *args: chosen.append(args[-1].chosen_ids_TK))
    run(model)
    of_layers = [ids_TK for (ids_TK,) in recorded.values()]
    assert not all(map(torch.equal, chosen, of_layers)), "other weights choose other experts"
    chosen.clear()
    with replay.replay(recorded):
        run(model)
    assert all(map(torch.equal, chosen, of_layers)) and len(chosen) == len(layers)


# Families of which transformers < 5.23 records no router logits.
UNRECORDED = (
    *("axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v4", "longcat_flash"),
    *("mimo_v2_flash", "mistral4", "nemotron_h", "solar_open", "step3p7"),
)


@pytest.mark.parametrize("family", EACH)
def test_router_logits(family: str, meshes: Meshes) -> None:
    """transformers records them, and adds its own balance loss to the loss only once."""
    model, found = tiny_model(family), []
    if family in UNRECORDED and IS_BEFORE_5_23:
        parallelize_moe(model, meshes)
        with pytest.raises(NotImplementedError, match=r"router_logits recorded \(0\) must equal"):
            model(**batch(model, 0), output_router_logits=True)
        return
    with torch.no_grad():
        for each in (model, parallelize_moe(copy.deepcopy(model), meshes)):
            out = each(**batch(each, 0), output_router_logits=True)
            found.append((out.logits, getattr(out, "router_logits", None)))
            found[-1] += (getattr(out, "aux_loss", None),)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", BIASED)
def test_the_bias_is_fp32_and_of_its_own_copy(family: str) -> None:
    model = tiny_model(family)
    swap_blocks(model, {})
    expected = biases_of(model)
    state = {n: t.bfloat16() for n, t in model.state_dict().items()}
    twins = [copy.deepcopy(model), copy_modules(model, make_meta_parameter)[model]]
    for twin in twins:
        for layer in layers_of(twin).values():
            owner = layer.get_part("router").bias_owner
            assert any(owner is m for m in layer.modules())
    for layer in layers_of(model).values():
        layer.get_part("router").selection_bias.zero_()
    assert not any(bias.any() for bias in biases_of(model).values())
    torch.testing.assert_close(biases_of(twins[0]), expected)
    model.load_state_dict(twins[0].bfloat16().state_dict())
    torch.testing.assert_close(biases_of(model), expected, rtol=0, atol=0)
    model.load_state_dict(state, assign=True)
    for layer in layers_of(model).values():
        assert layer.get_part("router").selection_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("laguna", {"moe_router_logit_softcapping": 30.0}),
        ("longcat_flash", {"router_bias": True}),
        ("minimax_m2", {"router_jitter_noise": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}),
        ("axk2", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    ],
)
def test_options_that_moecore_lacks_leave_the_router(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family, **options)
    stock, layers = copy.deepcopy(model), swap_blocks(model, {})
    assert layers and all(isinstance(layer, RoutedExperts) for layer in layers.values())
    torch.testing.assert_close(run(model), run(stock))


def test_a_linear_with_adapters_leaves_the_router() -> None:
    peft = pytest.importorskip("peft", reason="the adapters are those of peft")
    model = tiny_model("hunyuan_v1_moe")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["wg"]))
    layers = swap_blocks(model, {})
    assert layers and all(isinstance(layer, RoutedExperts) for layer in layers.values())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("nemotron_h", {"moe_latent_size": None}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
        ("cohere2_moe", {"norm_topk_prob": False, "num_shared_experts": 0}),
        ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
        ("laguna", {"moe_routed_scaling_factor": 2.5}),
        ("mistral4", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
        ("kolibri1", {"norm_topk_prob": False}),
    ],
)
def test_options_of_blocks(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family, **options)
    stock = copy.deepcopy(model)
    assert all(isinstance(layer, MoELayer) for layer in swap_blocks(model, {}).values())
    torch.testing.assert_close(run(model), run(stock))
    grads = {n: p.grad for n, p in stock.named_parameters() if p.requires_grad}
    for name, param in model.named_parameters():
        scale = float(grads[name].abs().max())
        torch.testing.assert_close(param.grad, grads[name], rtol=0, atol=1e-5 * scale, msg=name)


def test_classes_exist() -> None:
    text = "".join((MODELS / n / f"modeling_{n}.py").read_text() for n in family_names())
    missing = {n for n in [*RECORDS, *OWN_ROUTERS] if f"class {n}(" not in text}
    installed = Version(transformers.__version__)
    later = (names for version, names in SINCE.items() if installed < Version(version))
    assert missing == set().union(*later)
