import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import CapacityConfig, MoEConfig, MoELayer
from moecore.families import adopt
from moecore.families.family import swap_blocks
from moecore.families.transformers.blocks import STACKED
from moecore.io import UpcycleOptions, upcycle_modules
from moecore.io.hf.export import export_hf
from tests.families.transformers.hf_models import qwen3_moe, random_model, transformers

IDS = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


class Wrapper(nn.Module):
    """A model and its loss; with its config as a PeftModel has the one of the model in it."""

    def __init__(self, model: nn.Module, *, has_config: bool) -> None:
        super().__init__()
        self.hf = model
        if has_config:
            self.config = model.config


class Adapted(nn.Module):
    """As a LoRA layer in the place of a linear one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A = linear, nn.Linear(linear.in_features, 2, bias=False)


def adapted() -> nn.Module:
    model = random_model("mixtral")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    return model


def resized() -> nn.Module:
    model = random_model("olmoe")
    model.lm_head = nn.Linear(32, 70, bias=False)
    return model


def untied() -> nn.Module:
    model = qwen3_moe(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn(61, 32))
    return model


def with_value_head() -> nn.Module:
    model = qwen3_moe()
    model.value_head = nn.Linear(32, 1)
    return model


def shorter_config() -> nn.Module:
    model = qwen3_moe()
    model.config.num_hidden_layers = 1
    return model


def other_top_k() -> nn.Module:
    model = qwen3_moe()
    swap_blocks(model, {})
    model.config.num_experts_per_tok = 3
    return model


def dropping_in_eval() -> nn.Module:
    model = qwen3_moe()
    for layer in swap_blocks(model, {}).values():
        capacity = CapacityConfig(factor=1.0, eval_factor=1.0)
        layer.set_config(replace(layer.config, capacity=capacity))
    return model


def upcycled(family, spec="E4G1T2", layers=(0, 1), **changes):
    """A dense model whose MLPs, or some of them, are MoE layers."""
    moe = {n: changes.pop(n) for n in ("expert_bias", "activation") if n in changes}
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    options = UpcycleOptions.parse(spec)
    upcycle_modules(model, options, mlps=[f"model.layers.{i}.mlp" for i in layers], **moe)
    return model


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: Wrapper(qwen3_moe(), has_config=True),
            r"model \(Wrapper\) must hold model.embed_tokens.weight of Qwen3MoeF.*: pass model.hf$",
        ),
        (
            lambda: Wrapper(qwen3_moe(), has_config=False),
            r"model \(Wrapper\) must be the Qwen3MoeForCausalLM in it, .*: pass model.hf$",
        ),
        (
            lambda: qwen3_moe().model,
            r"\(Qwen3MoeModel\) must hold model.embed.*: pass the whole Qwen3MoeForCausalLM, w",
        ),
        (
            lambda: random_model("gpt-oss").model.layers[1].self_attn,
            r"\(GptOssAttention\) must hold .*: pass the whole GptOssForCausalLM",
        ),
        (
            adapted,
            r"\(MixtralForCausalLM\) must hold model.layers.1.self_attn.q_proj.weight of Mix.*: "
            "merge adapters first",
        ),
        (resized, r"lm_head.weight \(70, 32\) must be \(61, 32\) in OlmoeForCausalLM"),
        (untied, r"lm_head.weight must equal model.embed_tokens.weight .*: call model.tie_weights"),
        (with_value_head, r"value_head.weight \(1, 32\) must be a tensor of Qwen3MoeForCausalLM, "),
        (other_top_k, r"model.layers.\d.mlp's moe.top_k \(2\) must be 3 as in Qwen3MoeForCausalLM"),
        (dropping_in_eval, r"layers.0.mlp's moe.capacity \(given\) must be None as in Qwen3Moe"),
        (
            shorter_config,
            r"model.layers.1.self_attn.q_proj.weight .* reads the directory: take it off",
        ),
        (
            lambda: upcycled("Gemma", activation="geglu"),
            r"config.model_type \('gemma'\) of an upcycled .* the closest is Mixtral.* lacks 'gegl",
        ),
        (lambda: upcycled("Llama", layers=(1,)), r"layers \(\[0\]\) must be upcycled too"),
        (lambda: upcycled("Llama", "E4G1T1"), r"layer 0's moe.normalize_weights \(False\) must be"),
        (lambda: upcycled("Qwen3", expert_bias=True), r"moe.expert_bias \(True\) must be False in"),
        (lambda: upcycled("Qwen3").model, r"\(Qwen3Model\) must have a head"),
        (
            lambda: upcycled("Llama", attention_bias=True),
            r"q_proj.bias \(32,\) must be a tensor of MixtralForCausalLM",
        ),
        (
            lambda: upcycled("Qwen3", use_sliding_window=True, sliding_window=4),
            r"config.use_sliding_window \(True\) must be False, because Qwen3MoeForCausalLM",
        ),
    ],
)
def test_what_its_class_would_not_read_back_is_refused(made, message, tmp_path):
    model, state = made(), torch.get_rng_state()
    with pytest.raises(ValueError, match=message) as info:
        export_hf(model, tmp_path / "out", layout="fused")
    assert "\n" not in str(info.value) and list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)


def loaded(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that the class of config.json makes of a directory, and its config."""
    config = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval(), config


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize(
    ("made", "model_type"),
    [
        (lambda: upcycled("Qwen3", "E4G2T4", layers=(1,)), "qwen3_moe"),
        (
            lambda: upcycled(
                "Qwen2", layers=(1,), use_sliding_window=True, sliding_window=4, max_window_layers=1
            ),
            "qwen2_moe",
        ),
        (lambda: upcycled("Llama", "E4G2T4", head_dim=16, tie_word_embeddings=True), "mixtral"),
        (lambda: upcycled("Mistral", sliding_window=4), "mixtral"),
    ],
)
def test_an_upcycled_model_becomes_a_class_with_experts(made, model_type, layout, tmp_path):
    model = made()
    export_hf(model, tmp_path / "out", layout=layout)
    found, config = loaded(tmp_path / "out")
    assert config["model_type"] == model_type and type(found).__name__.endswith("ForCausalLM")
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-5, atol=1e-5)


def test_a_vocabulary_that_was_resized(tmp_path):
    model = random_model("qwen3-moe")
    model.resize_token_embeddings(70, mean_resizing=False)
    export_hf(model, tmp_path / "out")
    found, config = loaded(tmp_path / "out")
    assert config["vocab_size"] == 70
    torch.testing.assert_close(logits(found), logits(model))


def test_a_block_that_only_the_caller_knew(tmp_path):
    """Its adapter, which knows its rule, is not among moecore's own."""
    sizes = SIZES | dict(num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1)
    model = transformers.FlexOlmoForCausalLM(transformers.FlexOlmoConfig(**sizes))
    before = logits(model)
    layers = swap_blocks(model, {type(model.model.layers[0].mlp): flex_olmo})
    assert len(layers) == 2
    torch.testing.assert_close(logits(model), before)
    export_hf(model, tmp_path / "out")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")[0]), before)


def flex_olmo(block: Any, model: nn.Module) -> MoELayer:
    E, twice_F, D = block.experts.gate_up_proj.shape
    config = MoEConfig(
        dim=D, hidden_dim=twice_F // 2, num_experts=E, top_k=2, normalize_weights=False
    )
    router, experts = (dict(m.named_parameters()) for m in (block.gate, block.experts))
    return adopt(config, STACKED, router=router, experts=experts)
