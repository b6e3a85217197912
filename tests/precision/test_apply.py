import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, DecoderConfig, MLAConfig
from moecore.moe.experts import Experts
from moecore.precision import apply
from moecore.precision.amax import advance_amax
from moecore.precision.plain import Linear, ProductLinear

MOE = MoEConfig(dim=64, hidden_dim=32, num_experts=4, top_k=2, shared_hidden_dim=32)


def decoder(**options: object) -> Decoder:
    sizes: dict[str, Any] = dict(vocab_size=64, dim=64, num_layers=2, num_heads=4)
    sizes |= dict(num_kv_heads=4, head_dim=32) if "mla" in options else {"num_kv_heads": 2}
    sizes = dict(head_dim=16, mlp_hidden_dim=96, moe=MOE, dense_layers=(0,)) | sizes
    return Decoder(DecoderConfig(**sizes, **options))


ROLES = {
    "model.layers.0.self_attn.q_proj": "attention",
    "model.layers.0.self_attn.kv_a_proj_with_mqa": "attention",
    "layers.0.attention.wkv_b": "attention",
    "model.layers.0.linear_attn.in_proj_qkvz": "attention",
    "model.layers.0.mlp.gate_proj": "mlp",
    "layers.0.feed_forward.w2": "mlp",
    "model.layers.3.mlp.shared_experts.down_proj": "shared_experts",
    "model.layers.3.mlp.shared_expert.up_proj": "shared_experts",
    "layers.3.moe.shared_experts.w1": "shared_experts",
    "model.layers.3.mlp.gate": None,
    "model.layers.3.mlp.shared_expert_gate": None,
    "layers.3.moe.router.gate": None,
    "model.layers.3.mlp.experts.7.gate_proj": None,
    "model.layers.0.linear_attn.in_proj_ba": None,
    "lm_head": None,
    "output": None,
}


@pytest.mark.parametrize("name", ROLES)
def test_roles_by_name(name: str) -> None:
    assert apply.find_linear_role(name) == ROLES[name]


def test_a_decoder_keeps_its_parameters_and_trains() -> None:
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(0, 64, (2, 16))
    wide_loss = model(tokens, tokens)
    table = apply.apply_precision(model, Precision(recipe=Recipe()))
    assert {name: decided.role for name, decided in table.items()} == {
        f"model.layers.{i}.self_attn.{part}": "attention"
        for i in range(2)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj")
    } | {f"model.layers.0.mlp.{part}": "mlp" for part in ("gate_proj", "up_proj", "down_proj")}
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    loss = model(tokens, tokens)
    assert loss != wide_loss and abs(loss - wide_loss) < 0.01 * wide_loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    q_proj = model.layers[0].self_attn.q_proj
    assert isinstance(q_proj, ProductLinear) and isinstance(q_proj, Linear) and not q_proj.residual
    assert "blockwise FP8: e4m3" in repr(q_proj)
    shared = {id(products.inputs) for _, products in apply.list_quantised_linears(model)}
    assert len(shared) == 2 + 2  # of attentions, of gate and up, of down: o_proj gets 64 too
    again = copy.deepcopy(model)
    assert torch.equal(again(tokens, tokens), model(tokens, tokens))


def test_latent_attention() -> None:
    mla = MLAConfig(
        q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
    )
    table = apply.apply_precision(
        decoder(mla=mla), Precision(recipe=Recipe(), roles=("attention",))
    )
    attention = [name for name, decided in table.items() if decided.recipe is not None]
    assert len(attention) == 2 * 5


NO_MATRIX = "is no matrix of multiples of 16"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.o_proj = nn.Linear(48, 32)
        self.down_proj = nn.Linear(20, 32)
        self.up_proj = Scaled(32, 32)
        self.lm_head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) * self.k_proj(x))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_stays_and_why() -> None:
    rowwise, blockwise = Recipe(scaling="rowwise"), Recipe()
    precision = Precision(
        recipe=blockwise, roles=("mlp",), overrides=(("*k_proj", None), ("q*", rowwise))
    )
    model = Model()
    table = apply.apply_precision(model, precision)
    head = "the head's logits keep their precision: Precision(fp8_head=True) is about its loss"
    assert table == {
        "q_proj": apply.LinearPrecision("attention", rowwise, None),
        "k_proj": apply.LinearPrecision("attention", None, "the precision leaves it out"),
        "o_proj": apply.LinearPrecision("attention", None, "the precision leaves it out"),
        "down_proj": apply.LinearPrecision("mlp", None, f"its weight [32, 20] {NO_MATRIX}"),
        "up_proj": apply.LinearPrecision("mlp", None, "Scaled has a forward of its own"),
        "lm_head": apply.LinearPrecision(None, None, head),
    }
    classes = [ProductLinear, *[nn.Linear] * 3, Scaled, nn.Linear]
    assert [type(m) for m in model.children()] == classes
    once_more = apply.apply_precision(model, Precision(recipe=blockwise))
    assert model.q_proj.products.recipe == blockwise and once_more["q_proj"].recipe == blockwise
    assert pickle.loads(pickle.dumps(model)).q_proj.products.recipe == blockwise


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("*.v_proj", "it matches no linear and no experts"),
        ("lm_*", "it matches lm_head, which stays as it is: the head's logits"),
        ("down*", "it matches down_proj, which stays as it is: its weight [32, 20] is no matrix"),
    ],
)
def test_patterns_that_reach_nothing(pattern: str, reason: str) -> None:
    model = Model()
    precision = Precision(recipe=Recipe(), overrides=((pattern, Recipe()),))
    message = f"Precision.overrides ({pattern!r}) must match what can be quantised, but {reason}"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        apply.apply_precision(model, precision)
    assert "\n" not in str(error.value) and type(model.q_proj) is nn.Linear


def test_patterns_may_name_experts_and_wrapped_modules() -> None:
    overrides = (("model.layers.1.mlp.experts", Recipe(scaling="rowwise")),)
    apply.apply_precision(decoder(), Precision(recipe=Recipe(), overrides=overrides))
    titan = nn.ModuleDict({"inner_experts": Experts(MOE)})
    overrides = (("inner_*", Recipe()),)
    apply.apply_precision(titan, Precision(recipe=Recipe(), overrides=overrides))
    model = decoder()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    table = apply.apply_precision(model, Precision(recipe=Recipe(), roles=("mlp",)))
    assert table["model.layers.0.mlp.up_proj"].recipe == Recipe()


def test_on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    recipe = Recipe(scaling="tensorwise", amax_history=2)
    apply.apply_precision(model, Precision(recipe=recipe))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(8, 32)
    for _ in range(3):
        y = model(x)
        y.sum().backward()
        advance_amax(model)
    assert y.isfinite().all()
    history = model.q_proj.products.history
    assert history.get_max_amax("input").item() == x.abs().max().item()
    assert not any("amax" in name for name in model.state_dict())


def test_a_kept_hidden_state_is_asked_of_routed_experts() -> None:
    precision = Precision(recipe=Recipe(), overrides=(("q_*", Recipe(keep_hidden="fp8")),))
    message = r"'q_\*'\) must match routed experts with Recipe.keep_hidden"
    with pytest.raises(ValueError, match=message):
        apply.apply_precision(Model(), precision)
