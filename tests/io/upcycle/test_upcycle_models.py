import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore import MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.io.upcycle.models import (
    MLPNames,
    upcycle_config,
    upcycle_decoder,
    upcycle_modules,
    upcycle_state_dict,
)
from moecore.io.upcycle.upcycle import UpcycleOptions
from moecore.models import Decoder, DecoderConfig
from tests.moe.moe_cases import assert_equal_to_scale

DENSE = DecoderConfig(
    vocab_size=61,
    dim=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_hidden_dim=48,
    max_seq_len=32,
)
OPTIONS = UpcycleOptions.parse("E4G2T4")
DOCS = Path(__file__).parents[3] / "docs" / "huggingface.md"


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))


def randomised(model: nn.Module, std: float = 0.3) -> nn.Module:
    """Weights large enough that the MLPs are a good part of the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def dense_decoder(config: DecoderConfig = DENSE, dtype: torch.dtype | None = None) -> Decoder:
    model = randomised(Decoder(config, dtype=dtype))
    assert isinstance(model, Decoder)
    return model


def grads_of_rest(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of what both models have: attention, norms, embeddings."""
    out = model(tokens())
    logits = out if isinstance(out, Tensor) else out.logits
    logits.logsumexp(-1).mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if "mlp" not in n}
    assert all(grad is not None for grad in grads.values())
    return {"logits": logits.detach()} | {n: g for n, g in grads.items() if g is not None}


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    ours, dense = grads_of_rest(found), grads_of_rest(expected)
    assert ours.keys() == dense.keys()
    for name in dense:
        assert_equal_to_scale(ours[name], dense[name], name)


@pytest.mark.parametrize("name", ["E8G1T1", "E8G1T2", "E4G2T2", "E8G2T4", "E2G4T8"])
@pytest.mark.parametrize("normalize", [True, False])
def test_decoder(name: str, normalize: bool) -> None:
    options = UpcycleOptions.parse(name)
    model = upcycle_decoder(dense_decoder(), options, normalize_weights=normalize)
    assert model.config.num_moe_layers == 3 and model.config.mlp_hidden_dim == 0
    assert_same_model(model, dense_decoder())


def test_some_layers_and_tied_embeddings() -> None:
    config = replace(DENSE, tie_embeddings=True)
    model = upcycle_decoder(
        dense_decoder(config), OPTIONS, layers=[2, 0], score_function="sigmoid", expert_bias=True
    )
    assert model.config.dense_layers == (1,) and model.config.mlp_hidden_dim == 48
    assert [isinstance(block.mlp, MoELayer) for block in model.layers] == [True, False, True]
    assert_same_model(model, dense_decoder(config))
    routers = [model.layers[i].mlp.router.weight for i in (0, 2)]
    assert not torch.equal(*routers)  # layers choose independently


def test_multi_token_prediction_modules_follow_the_last_layer() -> None:
    config = replace(DENSE, num_mtp_layers=1, mtp_loss_coef=0.3)
    dense, moe = dense_decoder(config), upcycle_decoder(dense_decoder(config), OPTIONS)
    assert sum(isinstance(m, MoELayer) for m in moe.modules()) == 4
    losses = [model(tokens(), tokens().roll(-1, 1)) for model in (moe, dense)]
    assert_equal_to_scale(*losses)
    assert_equal_to_scale(moe.mtp_losses, dense.mtp_losses)


def test_state_dict_needs_no_module(tmp_path: Path) -> None:
    dense = dense_decoder()
    torch.save(dense.state_dict(), tmp_path / "dense.pt")
    state = torch.load(tmp_path / "dense.pt", mmap=True)
    config = upcycle_config(dense.config, OPTIONS)
    made = upcycle_state_dict(state, config=config, options=OPTIONS)
    model = Decoder(config)
    model.load_state_dict(made)
    assert_same_model(model, dense_decoder())
    again = upcycle_state_dict(dense.state_dict(), config=config, options=OPTIONS)
    assert all(torch.equal(made[name], again[name]) for name in again)
    assert state.keys() == dense.state_dict().keys()


def test_parallelized_after_upcycling(no_group_left: None) -> None:
    model = upcycle_decoder(dense_decoder(), OPTIONS)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    assert_equal_to_scale(model(tokens()), dense_decoder()(tokens()))


def test_configs_and_states_that_do_not_fit() -> None:
    config = upcycle_config(DENSE, OPTIONS)
    with pytest.raises(ValueError, match=r"DecoderConfig.moe must be None"):
        upcycle_config(config, OPTIONS)
    for layers in ([], [3], [-1, 0]):
        with pytest.raises(ValueError, match=r"layers .* must be at least one of \[0, num_layers"):
            upcycle_config(DENSE, OPTIONS, layers=layers)
    with pytest.raises(ValueError, match=r'"geglu"\) must be "swiglu"'):
        upcycle_config(DENSE, OPTIONS, activation="geglu")
    with pytest.raises(ValueError, match=r"granularity \(5\) must divide .* \(48\)"):
        upcycle_config(DENSE, UpcycleOptions.parse("E2G5T5"))
    state = dense_decoder().state_dict()
    cases: dict[str, dict[str, Tensor]] = {
        "must hold model.layers.1.mlp.up_proj.weight": without(state, "layers.1.mlp.up_proj"),
        "must hold model.norm.weight": without(state, "model.norm"),
        "extra must belong to the dense decoder": state | {"extra": torch.ones(1)},
        r"embed_tokens.weight \(60, 32\) must have the shape \(61, 32\)": state
        | {"model.embed_tokens.weight": torch.ones(60, 32)},
    }
    for message, broken in cases.items():
        with pytest.raises(ValueError, match=message):
            upcycle_state_dict(broken, config=config, options=OPTIONS)


def without(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if part not in name}


HF: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    attn_implementation="eager",
)
PLAIN = MLPNames(gate=None, up="dense_h_to_4h", down="dense_4h_to_h")
HF_MODELS: dict[str, tuple[dict[str, Any], MLPNames | None, dict[str, Any]]] = {
    "Llama": (dict(num_key_value_heads=2), None, {}),
    "Llama-biases": (dict(mlp_bias=True), None, dict(score_order="post")),
    "Qwen3": (dict(num_key_value_heads=2, head_dim=8), None, dict(normalize_weights=False)),
    "Gemma": (
        dict(num_key_value_heads=2, head_dim=8, hidden_act="gelu_pytorch_tanh"),
        None,
        dict(activation="geglu", score_function="sigmoid"),
    ),
    "Phi3": (dict(pad_token_id=0), MLPNames(gate=None, up="gate_up_proj"), {}),
    "GPTNeoX": ({}, PLAIN, dict(activation="gelu")),
    "GPTNeoX-relu": (dict(hidden_act="relu"), PLAIN, dict(activation="relu")),
}


def is_mlp(name: str, module: nn.Module) -> bool:
    return name.endswith(".mlp")


@pytest.mark.parametrize("name", HF_MODELS)
def test_hugging_face_models(name: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes, names, fields = HF_MODELS[name]
    family = name.split("-")[0]
    config = getattr(transformers, f"{family}Config")(**HF | sizes)
    dense = randomised(getattr(transformers, f"{family}ForCausalLM")(config), 0.2)
    model = copy.deepcopy(dense)
    returned = upcycle_modules(model, OPTIONS, mlps=is_mlp, names=names, **fields)
    assert returned is model and sum(isinstance(m, MoELayer) for m in model.modules()) == 2
    assert_same_model(model, dense)


class Plain(nn.Module):
    """A user's own MLP: other names, nested children, one bias."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, factor: float = 1.0) -> None:
        super().__init__()
        self.act, self.factor = act, factor
        self.inner = nn.ModuleDict({"a": nn.Linear(32, 48, bias=False)})
        self.b = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.inner["a"](x))) * self.factor


OWN: dict[str, Any] = dict(names=MLPNames(gate=None, up="inner.a", down="b"), activation="silu")


def test_own_modules_by_name_shared_and_in_their_mode() -> None:
    shared = randomised(Plain()).eval()
    model = nn.Sequential(shared, nn.Tanh(), shared, randomised(Plain()))
    dense = copy.deepcopy(model)
    upcycle_modules(model, OPTIONS, mlps=["0"], **OWN)
    assert model[0] is model[2] and isinstance(model[0], MoELayer)
    assert not model[0].training and isinstance(model[3], Plain)
    assert model[0].config.fc2_bias and not model[0].config.fc1_bias
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    assert_equal_to_scale(model(x), dense(x))


def test_modules_that_are_not_what_they_are_said_to_be() -> None:
    gelu_tanh = Plain(lambda x: F.gelu(x, approximate="tanh"))
    unequal = nn.ModuleDict({"g": nn.Linear(32, 48), "u": nn.Linear(32, 48, bias=False)})
    unequal["d"] = nn.Linear(48, 32)
    odd = nn.ModuleDict({"u": nn.Linear(32, 47), "d": nn.Linear(47, 32)})
    dropping = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32), nn.Dropout(0.1))
    model = nn.ModuleDict(
        {
            "plain": Plain(),
            "tanh": gelu_tanh,
            "scaled": Plain(factor=1.01),
            "unequal": unequal,
            "odd": odd,
            "dropping": dropping,
        },
    )
    cases: list[tuple[str, str, MLPNames, str]] = [
        ("absent", "silu", OWN["names"], r"mlps \('absent'\) must be modules inside ModuleDict"),
        ("", "silu", OWN["names"], r"mlps \(''\) must be modules inside"),
        ("plain", "swiglu", MLPNames(), r"plain.gate_proj \(NoneType\) must be an nn.Linear"),
        ("plain", "silu", MLPNames(), r"MLPNames.gate \('gate_proj'\) must be None"),
        ("plain", "relu", OWN["names"], r'plain \(Plain\) must compute down\("relu"\(up'),
        ("tanh", "gelu", OWN["names"], r"must compute .* but differs by"),
        ("scaled", "silu", OWN["names"], r"must compute .* but differs by"),
        (
            "unequal",
            "swiglu",
            MLPNames(gate="g", up="u", down="d"),
            "must both have a bias or none",
        ),
        ("odd", "swiglu", MLPNames(gate=None, up="u", down="d"), "47 hidden columns, which must"),
        ("dropping", "silu", MLPNames(gate=None, up="0", down="2"), r"dropping.3.p \(0.1\) must"),
    ]
    before = list(model.modules())
    for name, activation, names, message in cases:
        with pytest.raises(ValueError, match=message):
            mlps = ["plain", name] if name == "scaled" else [name]  # the first one is all right
            fields: dict[str, Any] = dict(names=names, activation=activation)
            upcycle_modules(model, OPTIONS, mlps=mlps, **fields)
    with pytest.raises(ValueError, match="must choose a module of ModuleDict"):
        upcycle_modules(model, OPTIONS, mlps=lambda name, module: False, **OWN)
    with pytest.raises(ValueError, match=r"w1 \(on meta\) of 0 must be a whole tensor"):
        upcycle_modules(nn.Sequential(Plain().to("meta")), OPTIONS, mlps=["0"], **OWN)
    assert list(model.modules()) == before and all(module.training for module in before)


def test_the_code_of_the_docs_runs(no_group_left: None) -> None:
    pytest.importorskip("transformers", minversion="5")
    section = DOCS.read_text().partition("\n## Upcycling\n")[2]
    pieces = [part.split("```")[0] for part in section.split("```python\n")[1:]]
    assert len(pieces) == 2
    for piece in pieces:
        exec(compile(piece, str(DOCS), "exec"), {})
