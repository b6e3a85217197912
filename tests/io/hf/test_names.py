from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moecore.io.hf.names import infer_hf_layout, map_hf_copies, plan_hf_tensors
from moecore.io.hf.pieces import map_file_shapes
from moecore.models import Decoder, preset
from tests.io.hf.states import hf_state, native_state
from tests.models.hf_pairs import PAIRS, make_pair

CASES = [(name, layout) for name in PAIRS for layout in ("fused", "per_expert", "mixtral")]
EXPERTS_OF_MIXTRAL = ("qwen3", "mixtral", "olmoe")  # no selection bias, no shared expert
ONE_LAYOUT = ("qwen3, dense", "qwen2", "llama", "llama, biases", "mistral", "mistral, yarn")
ONE_LAYOUT += ("mistral, window", "gpt-oss")
CASES = [c for c in CASES if c[1] != "mixtral" or c[0] in EXPERTS_OF_MIXTRAL]
CASES = [c for c in CASES if c[1] == "fused" or c[0] not in ONE_LAYOUT]


def tiny(**changes) -> tuple[dict[str, Tensor], object]:
    """A native state dict of tiny-deepseek-v3, every value its own, and the config."""
    config = replace(preset("tiny-deepseek-v3"), **changes)
    state = Decoder(config).state_dict()
    g = torch.Generator().manual_seed(1)
    for name, value in state.items():
        state[name] = torch.randn(value.shape, generator=g)
        if "expert_bias" not in name:  # kept in fp32
            state[name] = state[name].bfloat16()
    return state, config


def assert_equal(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_there_and_back_is_bit_exact(name, layout):
    pytest.importorskip("transformers")
    hf, config = make_pair(name)
    state = hf.state_dict()
    native = native_state(state, config)
    assert native.keys() == Decoder(config, device="meta").state_dict().keys()
    theirs = hf_state(native, config, layout=layout)
    assert infer_hf_layout(theirs.keys()) == layout
    assert_equal(native_state(theirs, config), native)
    if layout == "fused":
        tied = {"lm_head.weight"} if config.tie_embeddings else set()
        assert_equal(theirs, {n: t for n, t in state.items() if n not in tied})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_multi_token_prediction_comes_after_the_last_layer(layout, depth):
    state, config = tiny(num_mtp_layers=depth)
    theirs = hf_state(state, config, layout=layout)
    last = f"model.layers.{2 + depth}."
    assert torch.equal(
        theirs[f"{last}shared_head.norm.weight"], state[f"mtp.{depth - 1}.norm.weight"]
    )
    assert torch.equal(
        theirs[f"{last}input_layernorm.weight"],
        state[f"mtp.{depth - 1}.block.input_layernorm.weight"],
    )
    assert {n.removeprefix(last) for n in theirs if n.startswith(last)} > {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "embed_tokens.weight",
        "shared_head.head.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
    }
    assert not any(n.startswith("mtp.") for n in theirs)
    assert_equal(native_state(theirs, config), state)


def test_names_of_published_qwen3_next():
    config = replace(preset("qwen3-next-80b-a3b"), num_mtp_layers=1, mtp_loss_coef=0.3)
    shapes = map_file_shapes(plan_hf_tensors(config, "per_expert"))
    want = {
        "mtp.fc.weight": (2048, 4096),
        "mtp.pre_fc_norm_embedding.weight": (2048,),
        "mtp.pre_fc_norm_hidden.weight": (2048,),
        "mtp.norm.weight": (2048,),
        "mtp.layers.0.self_attn.q_proj.weight": (8192, 2048),
        "mtp.layers.0.mlp.experts.511.gate_proj.weight": (512, 2048),
    }
    assert want.items() <= shapes.items() and map_hf_copies(config) == {}
    with pytest.raises(NotImplementedError, match=r"num_mtp_layers \(2\) must be 1 or 0 in files"):
        plan_hf_tensors(replace(config, num_mtp_layers=2), "per_expert")


def test_names_and_shapes_of_published_deepseek_v3():
    shapes = map_file_shapes(plan_hf_tensors(preset("deepseek-v3"), "per_expert"))
    want = {
        "model.layers.60.mlp.experts.255.gate_proj.weight": (2048, 7168),
        "model.layers.60.mlp.experts.0.down_proj.weight": (7168, 2048),
        "model.layers.60.mlp.shared_experts.up_proj.weight": (2048, 7168),
        "model.layers.61.enorm.weight": (7168,),
        "model.layers.61.hnorm.weight": (7168,),
        "model.layers.61.eh_proj.weight": (7168, 14336),
        "model.layers.61.shared_head.norm.weight": (7168,),
        "model.layers.61.mlp.experts.255.up_proj.weight": (2048, 7168),
        "lm_head.weight": (129280, 7168),
    }
    assert want.items() <= shapes.items()
    # 58 MoE layers and the module: 3 per expert, 5 more; 10 per attention and its norms; 3 dense
    # MLPs; eh_proj and three norms; embedding, last norm and head.
    assert len(shapes) == 59 * (3 * 256 + 5) + 62 * 9 + 3 * 3 + 4 + 3
    assert map_hf_copies(preset("deepseek-v3")) == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("change", "layout", "name"),
    [
        (dict(shared_gate=True), "mixtral", "mlp.router.expert_bias"),
        (dict(shared_gate=True, num_shared_experts=2), "fused", "mlp.shared.w1"),
        (dict(router_bias=True), "fused", "mlp.router.bias"),
        (dict(fc1_bias=True), "per_expert", "mlp.experts.b1"),
        (dict(fc2_bias=True), "per_expert", "mlp.experts.b2"),
        (dict(activation="relu2"), "fused", "mlp.experts.w1"),
        (dict(), "mixtral", "mlp.router.expert_bias"),
        (dict(expert_bias=False), "mixtral", "mlp.shared.w1"),
    ],
)
def test_tensors_without_a_name_are_refused(change, layout, name):
    config = preset("tiny-deepseek-v3")
    balance = replace(config.moe.balance, bias_update_rate=0.0)
    config = replace(config, moe=replace(config.moe, balance=balance, **change))
    message = rf"layers.1.{name} .* must have a Hugging Face n"
    with pytest.raises(NotImplementedError, match=message):
        plan_hf_tensors(config, layout)
