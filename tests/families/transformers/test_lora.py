import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore import (
    Meshes,
    MoEConfig,
    ParallelConfig,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.families.transformers.lora_options import LoRAOptions, add_adapters
from moecore.io import (
    export_hf,
    init_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
    stream_weights,
)
from moecore.io.hf.lora import collect_adapter_tensors
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import Experts
from moecore.moe.low_rank import LowRank
from tests.families.transformers import lora_cases as lc
from tests.families.transformers.family_models import batch, loss_of, tiny_model
from tests.families.transformers.hf_models import enable_checkpointing, random_model, worst

PAGE = Path(__file__).parents[3] / "docs" / "quantised_base.md"


@pytest.fixture
def meshes(no_group_left: None) -> Meshes:
    """One process: build_meshes starts the group by itself."""
    return build_meshes(ParallelConfig(), "cpu")


def one_layer(name: str = "qwen3-moe") -> nn.Module:
    return random_model(name, num_hidden_layers=1)


def assert_one_line(error: pytest.ExceptionInfo[Exception]) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(target_parameters=["mlp.gate.weight"]),
            r"LoRA on \S+mlp.gate.weight \(8, 32\) must be on stacked matrices of experts: adapt",
        ),
        (dict(modules_to_save=["gate"]), r"mlp.gate \(ModulesToSaveWrapper\) must not be of a MoE"),
        (dict(modules_to_save=["experts"], target_parameters=[]), r"mlp.experts \(ModulesToSaveW"),
        (dict(modules_to_save=["mlp"], target_parameters=[]), r"0.mlp \(ModulesToSaveWrapper\)"),
        (
            dict(trainable_token_indices=[3]),
            r"embed_tokens \(TrainableTokensWrapper\) must not be .* single tokens",
        ),
    ],
)
def test_adapters_that_have_no_place(meshes: Meshes, options: dict[str, Any], message: str) -> None:
    model = lc.peft.get_peft_model(one_layer(), lc.lora_config(**options))
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(NotImplementedError, match=message) as error:
        parallelize_moe(model, meshes)
    assert_one_line(error)
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "llama4",
            r"is_transposed \(False\) of Llama4TextExperts, by which peft .* must be True: set it",
        ),
        (
            "longcat_flash",
            r"LoRA on \S+experts.gate_up_proj \(7 matrices\) must be on 4 experts, since experts",
        ),
    ],
)
def test_matrices_of_experts_that_are_no_updates_place(meshes, family, message) -> None:
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = lc.peft.get_peft_model(tiny_model(family), lc.lora_config(target_parameters=names))
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        parallelize_moe(model, meshes)
    assert_one_line(error)


def test_a_refused_model_has_its_wrappers_back(meshes: Meshes) -> None:
    model = lc.adapted_model("qwen3-moe", dict(num_hidden_layers=1))
    before, expected = str(model), lc.logits(model)
    block = model.get_base_model().model.layers[0].mlp
    block.gate.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="must have no hooks"):
        parallelize_moe(model, meshes)
    assert str(model) == before and torch.equal(lc.logits(model), expected)


def test_adapted_experts_in_fp8_that_recompute_fc1(meshes: Meshes) -> None:
    sizes = dict(num_hidden_layers=1, hidden_size=128, moe_intermediate_size=128)
    model = lc.adapted_model("qwen3-moe", sizes)
    plain = copy.deepcopy(model)
    recompute = MemoryOptions(recompute=("expert_fc1",))
    precision = Precision(recipe=Recipe(), roles=("experts",))
    parallelize_moe(model, meshes, precision=precision, memory=recompute)
    grads = []
    for one in (model, plain):
        one(**lc.batches(0)[0], use_cache=False).loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in one.parameters())
        grads.append(lc.in_peft_form(one, grads=True))
    for name, expected in grads[1].items():
        assert (grads[0][name] - expected).norm() <= 0.15 * expected.norm(), name


def exact_merge(base: dict[str, Tensor], model: Any, names: list[str]) -> dict[str, Tensor]:
    """Return what adapters change, W + s B A by peft's layout of A and B, in fp64."""
    found = dict[str, Tensor]()
    for adapter in names:
        stored = collect_adapter_tensors(model, adapter)
        own = {n: one.convert_to_file(lc.whole(one.tensor)).double() for n, one in stored.items()}
        config = model.peft_config[adapter]
        s = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
        for name, delta in lc.updates(own, dim=32, scale=s):
            found.setdefault(name, base[name].double()).add_(delta)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("names", [["default"], ["default", "second"]], ids=len)
def test_merged_weights_are_rounded_once(meshes, tmp_path, dtype, use_rslora, names) -> None:
    """By the stream, by `merge_adapters` and in files; stock peft has at least that error."""
    options = dict(r=3, lora_alpha=7, use_rslora=use_rslora)
    model: Any = lc.adapted_model("qwen3-moe", dict(num_hidden_layers=1), **options)
    if "second" in names:
        model.add_adapter("second", lc.lora_config(**options | dict(lora_alpha=2)))
        model.base_model.set_adapter(names)
    torch.manual_seed(5)
    for key, param in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(param, std=0.1)
    model.to(dtype)
    stock = copy.deepcopy(model).merge_and_unload().state_dict()
    base = dict(stream_weights(copy.deepcopy(model).unload()))
    parallelize_moe(model, meshes)
    exact = exact_merge(base, model, names)
    assert len(exact) == 4 + 8 * 3
    got = {n: t.clone() for n, t in stream_weights(model)}
    merge_adapters(model)
    export_hf(model, tmp_path / "merged")
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert got.keys() == written.keys()
    assert all(torch.equal(tensor, written[n]) for n, tensor in got.items())
    errors = dict[str, float]()
    for name, value in exact.items():
        assert got[name].dtype == dtype
        once = value.to(dtype)
        # Sums in fp32 round otherwise where fp64 lies next to the middle of two values.
        assert (got[name] != once).double().mean() < 2e-3
        errors[name] = float((got[name].double() - value).abs().mean())
        assert errors[name] <= 1.0001 * float((once.double() - value).abs().mean())
        if name in stock:
            assert errors[name] <= float((stock[name].double() - value).abs().mean())
    assert all(torch.equal(got[n], base[n]) for n in base if n not in exact)


def test_adapters_that_come_too_late(meshes: Meshes) -> None:
    model = one_layer()
    parallelize_moe(model, meshes)
    late = lc.peft.get_peft_model(model, lc.lora_config())
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM must be attached before para") as e:
        late(**lc.batches(0)[0])
    assert_one_line(e)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_that_cannot_be_updated(transposed: bool) -> None:
    config = MoEConfig(dim=8, hidden_dim=8, num_experts=2, top_k=1)
    update = LowRank({}, {})
    separate = Experts(config, layout=ExpertLayout(w1="g", w3="u", gate_up="separate"))
    with pytest.raises(ValueError, match=r"LoRA of experts \(g\) must be on g or w2, and FC1"):
        separate.add_low_rank_updates("g", update)
    layout = ExpertLayout(gate_up="concatenated", transposed=transposed)
    with pytest.raises(ValueError, match=r"LoRA of experts \(b1\) must be on w1 or w2"):
        Experts(config, layout=layout).add_low_rank_updates("b1", update)


def two_adapters() -> nn.Module:
    model = lc.adapted_model("mixtral", dict(num_hidden_layers=1))
    model.add_adapter("second", lc.lora_config(r=2, lora_alpha=5))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".second." in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def test_several_adapters(meshes: Meshes, tmp_path: Path) -> None:
    model = two_adapters()
    plain = copy.deepcopy(model)
    parallelize_moe(model, meshes)
    seen: list[Tensor] = []
    for active in ("default", "second", ["default", "second"]):
        for each in (model, plain):
            each.base_model.set_adapter(active)
        expected = lc.logits(plain)
        assert worst({"": lc.logits(model)}, {"": expected})[0] < 1e-5
        seen.append(expected)
    assert min((a - b).abs().max() for a, b in pairwise(seen)) > 0.01
    stock = lc.peft.get_peft_model_state_dict(plain, adapter_name="default")
    assert worst(lc.in_peft_form(model), stock)[0] == 0
    save_adapters(model, tmp_path / "second", adapter="second")
    init_adapters(model)
    load_adapters(model, tmp_path / "second", adapter="second")
    model.base_model.set_adapter("second")
    assert worst({"": lc.logits(model)}, {"": seen[1]})[0] < 1e-5
    with pytest.raises(ValueError, match=r"must fit adapter \('default'\): r \(2\) must be 4") as e:
        load_adapters(model, tmp_path / "second")
    assert_one_line(e)
    weights = tmp_path / "second" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    message = r"must be a whole safetensors file: .*: copy it again"
    with pytest.raises(ValueError, match=message) as e:
        load_adapters(model, tmp_path / "second", adapter="second")
    assert_one_line(e)
    merge_adapters(model)  # only what is active
    assert worst({"": lc.logits(model)}, {"": seen[1]})[0] < 1e-5
    export_hf(model, tmp_path / "merged")


def test_checkpointing_runs_experts_again(meshes: Meshes) -> None:
    model = lc.adapted_model(
        "qwen3-moe", dict(num_hidden_layers=1), target_parameters=lc.EXPERTS[:1]
    )
    plain = copy.deepcopy(model)
    parallelize_moe(model, meshes)
    enable_checkpointing(model)
    model.enable_input_require_grads()
    error, where = worst(lc.train(model, None), lc.train(plain, None))
    assert error < 1e-5, where


def test_adapters_have_gradients_and_a_router_on_demand(meshes: Meshes) -> None:
    model = lc.adapted_model("qwen3-moe", dict(num_hidden_layers=1))
    model.get_base_model().model.layers[0].mlp.gate.weight.requires_grad_(True)
    parallelize_moe(model, meshes)
    model(**lc.batches(0)[0]).loss.backward()
    with_grad = {name for name, p in model.named_parameters() if p.grad is not None}
    names = [name for name, _ in model.named_parameters()]
    assert with_grad == {n for n in names if ".lora_" in n or n.endswith("mlp.gate.weight")}
    assert clip_grad_norm_(model, 1.0).finite


@pytest.mark.parametrize("part", ["mlp.gate", "input_layernorm"])
def test_a_trained_parameter_that_no_adapter_holds(meshes, part, tmp_path) -> None:
    """Written without it, the adapter would be of another base model."""
    model = lc.adapted_model("qwen3-moe", dict(num_hidden_layers=1))
    layer = model.get_base_model().model.layers[0]
    layer.get_parameter(f"{part}.weight").requires_grad_(True)
    parallelize_moe(model, meshes)
    weight = layer.get_parameter(f"{part}.weight")
    message = rf"{part}.weight \(and 0 more\) must be frozen or"
    with pytest.raises(ValueError, match=message) as error:
        save_adapters(model, tmp_path)
    assert_one_line(error)
    assert not list(tmp_path.iterdir())
    weight.requires_grad_(False)
    save_adapters(model, tmp_path)
    stock = lc.peft.PeftModel.from_pretrained(one_layer(), tmp_path)
    torch.testing.assert_close(lc.logits(model), lc.logits(stock))


def adapted_layers(family: str, layers: str) -> Any:
    """Return a model with random adapters on the modules that the expression `layers` matches."""
    config = lc.peft.LoraConfig(r=2, target_modules=layers)
    model = lc.peft.get_peft_model(tiny_model(family), config)
    for n, (name, param) in enumerate(model.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(n)
            torch.nn.init.normal_(param, std=0.2, generator=generator)
    return model


@pytest.mark.parametrize("family", ["laguna", "mistral_large4", "unlimited_ocr"])
def test_layers_that_peft_renames_while_it_loads(family: str, tmp_path) -> None:
    """Stock peft loses these adapters between its own save_pretrained and from_pretrained."""
    model = adapted_layers(family, r".*\.(shared_experts|language_model\S*attn)\.\w+_proj")
    save_adapters(model, tmp_path)
    loaded = lc.peft.PeftModel.from_pretrained(tiny_model(family), tmp_path)
    expected = lc.peft.get_peft_model_state_dict(model)
    found = lc.peft.get_peft_model_state_dict(loaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    init_adapters(loaded, seed=1)
    load_adapters(loaded, tmp_path)
    found = lc.peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_layer_that_peft_loads_from_no_file(tmp_path) -> None:
    model = adapted_layers("inkling2", r".*weight_proj")
    with pytest.raises(ValueError, match=r"weight_proj\.lora_A.* no file: leave its lay") as error:
        save_adapters(model, tmp_path)
    assert_one_line(error)
    assert not list(tmp_path.iterdir())
    adapted = add_adapters(tiny_model("inkling2"), LoRAOptions(experts=False))
    assert not any("weight_proj" in name for name in adapted.targeted_module_names)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda path: init_adapters(one_layer()),
            ValueError,
            r"\(Qwen3MoeForCausalLM\) must be a PeftModel with LoRA: call peft.get_peft_model",
        ),
        (
            lambda path: save_adapters(with_injected_adapter(), path / "a"),
            ValueError,
            r"\(Qwen3MoeForCausalLM\) must be a PeftModel with LoRA",
        ),
        (
            lambda path: merge_adapters(one_layer()),
            ValueError,
            r"\(Qwen3MoeForCausalLM\) must have active adapters that are not merged",
        ),
        (
            lambda path: merge_adapters(dense_adapters(lora_bias=True)),
            NotImplementedError,
            r"Linear with LoraConfig.lora_bias, .* must not be merged here: save_adapters, and",
        ),
        (
            lambda path: init_adapters(
                dense_adapters(use_dora=True, target_modules=["embed_tokens"])
            ),
            ValueError,
            r"lora_magnitude_vector.default.\w+ must be A or B of LoRA to be filled from a seed",
        ),
        (
            lambda path: init_adapters(
                lc.peft.get_peft_model(one_layer(), dense_config(init_lora_weights="pissa"))
            ),
            ValueError,
            r"LoraConfig.init_lora_weights \('pissa'\) must be True or 'gaussian' to fill",
        ),
        (
            lambda path: export_hf(
                lc.peft.get_peft_model(one_layer(), lc.lora_config()), path / "x"
            ),
            ValueError,
            r"adapters of \S+q_proj must be merged into the weights, .* moecore.io.merge_adapters",
        ),
    ],
)
def test_one_line_errors(call, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message) as found:
        call(tmp_path)
    assert_one_line(found)
    assert list(tmp_path.iterdir()) == []


def with_injected_adapter() -> nn.Module:
    """As transformers' `add_adapter`, which in 5.24 wants a newer peft than there is."""
    return lc.peft.inject_adapter_in_model(lc.lora_config(), one_layer())


def dense_config(**kwargs: Any) -> Any:
    return lc.lora_config(target_parameters=[], **kwargs)


def dense_adapters(**kwargs: Any) -> nn.Module:
    return lc.peft.get_peft_model(one_layer(), dense_config(**kwargs))


def test_a_new_dora_adapter_changes_nothing(meshes: Meshes) -> None:
    """Its vector has the norms of the rows, as stock peft has them."""
    model = parallelize_moe(dense_adapters(use_dora=True), meshes)
    expected = {n: p.clone() for n, p in lc.in_peft_form(model).items() if "magnitude" in n}
    before = lc.logits(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.fill_(0.5)
    init_adapters(model, seed=1)
    found = lc.in_peft_form(model)
    assert expected and worst({n: found[n] for n in expected}, expected)[0] <= 1e-6
    assert worst({"": lc.logits(model)}, {"": before})[0] <= 1e-5


def test_dora_is_refused_on_experts() -> None:
    message = r"LoRAOptions.experts \(True\) must be False with dora \(True\), which peft has only"
    with pytest.raises(ValueError, match=message) as error:
        LoRAOptions(dora=True)
    assert_one_line(error)
    model = add_adapters(one_layer(), LoRAOptions(rank=2, dora=True, experts=False))
    assert any("lora_magnitude_vector" in name for name, _ in model.named_parameters())


WITHOUT_ADAPTERS = {  # by default
    "deepseek_v3": "gate_proj",
    "deepseek_v4": "o_a_proj",
    "gemma4": "router.proj",
    "hunyuan_v1_moe": "wg",
    "llama4": "router",
    "longcat_flash": "experts.gate_up_proj",
    "nemotron_h": "out_proj",
    "zaya": "fc1",
}


@pytest.mark.parametrize("family", WITHOUT_ADAPTERS)
def test_the_default_layers_with_adapters(family: str, meshes: Meshes) -> None:
    """No router, no linear that peft refuses or changes, and only experts that have weights."""
    tuner: Any = add_adapters(tiny_model(family), LoRAOptions(rank=2, experts=False)).base_model
    assert tuner.targeted_module_names and not tuner.targeted_parameter_names
    model = add_adapters(tiny_model(family), LoRAOptions(rank=2))
    tuner = model.base_model
    names = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    assert not any(name.endswith(WITHOUT_ADAPTERS[family]) for name in names)
    assert any(name.endswith("experts.down_proj") for name in names)
    assert not model.peft_config["default"].rank_pattern
    for module in model.modules():  # adapters are on meta
        if any(param.is_meta for param in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
    init_adapters(model)
    parallelize_moe(model, meshes)
    assert loss_of(model, batch(model.get_base_model(), 0)).isfinite()


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_adapters_of_a_tied_weight_are_not_merged(name: str, meshes: Meshes) -> None:
    """A merge would change the other module, too."""
    base = random_model("qwen3-moe", tie_word_embeddings=True)
    model = lc.peft.get_peft_model(base, lc.lora_config(target_modules=[name]))
    parallelize_moe(model, meshes)
    with pytest.raises(NotImplementedError, match=f"{name} must not be merged, because another mo"):
        merge_adapters(model)


def test_the_name_of_a_layer_is_no_name_of_an_adapter() -> None:
    model = add_adapters(tiny_model("qwen3_moe"), LoRAOptions(rank=2), "0", "chat")
    with pytest.raises(ValueError, match=r"no adapter \(0, chat\) may have the name of a module"):
        collect_adapter_tensors(model, "chat")


def test_an_embedding_and_a_normal_start(meshes: Meshes, tmp_path: Path) -> None:
    config = lc.lora_config(target_modules=["embed_tokens", "q_proj"], init_lora_weights="gaussian")
    model = parallelize_moe(lc.peft.get_peft_model(one_layer(), config), meshes)
    before = lc.logits(model)
    init_adapters(model, seed=1)
    assert torch.equal(lc.logits(model), before)
    for name, tensor in lc.in_peft_form(model).items():
        std = {"lora_A": 1 / 4, "embedding_B": 1.0}
        wanted = next((s for kind, s in std.items() if kind in name), 0.0)
        assert abs(float(tensor.std()) - wanted) <= 0.15 * wanted, name
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.fill_(0.1)
    after = lc.logits(model)
    assert (after - before).abs().max() > 0.05
    merge_adapters(model)
    assert worst({"": lc.logits(model)}, {"": after})[0] < 1e-5


def test_the_page(no_group_left: None, tmp_path: Path, monkeypatch: Any) -> None:
    """In fp32: merging rounds bf16 weights by as much as three small steps move them."""
    monkeypatch.chdir(tmp_path)
    random_model("qwen3-moe").save_pretrained("runs/tiny")
    section = PAGE.read_text().split("\n## Adapters in a loop of your own\n")[1].split("\n## ")[0]
    blocks = [part.split("```")[0] for part in section.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("bfloat16", "float32"), names)
    assert len(blocks) == 2 and names["done"].norm.finite
    trained = lc.peft.PeftModel.from_pretrained(random_model("qwen3-moe"), "runs/adapters")
    expected, base = lc.logits(trained.eval()), lc.logits(trained.unload().eval())
    error = (lc.logits(names["stock"]) - expected).abs().max()
    assert (expected - base).abs().max() > 100 * error
    again: dict[str, Any] = {}
    with pytest.raises(SystemExit, match="runs/merged must not exist yet"):
        exec(blocks[0], again)
    assert "hf" not in again, "no second training before the error"
