from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moecore import BalanceConfig, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.options.layer import CapacityConfig
from moecore.io.upcycle.upcycle import (
    UpcycleOptions,
    check_upcycle,
    compute_weight_sum,
    upcycle_mlp,
)
from tests.moe.moe_cases import assert_equal_to_scale, assert_twice_as_good, error

NAMES = ("E8G1T1", "E8G1T2", "E4G2T2", "E8G2T4", "E2G4T8", "E4G3T6")
D, F_, T = 64, 96, 256
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-scaled": dict(routed_scaling_factor=2.5),
    "softmax-raw": dict(normalize_weights=False),
    "softmax-raw-scaled": dict(normalize_weights=False, routed_scaling_factor=3.0),
    "post": dict(score_order="post", normalize_weights=True, router_bias=True),
    "sigmoid": dict(score_function="sigmoid", expert_bias=True, routed_scaling_factor=2.5),
    "sigmoid-raw": dict(score_function="sigmoid", normalize_weights=False),
    "sqrtsoftplus": dict(score_function="sqrtsoftplus", routed_scaling_factor=1.5),
    "sqrtsoftplus-raw": dict(score_function="sqrtsoftplus", normalize_weights=False),
    "fp64": dict(router_dtype="float64", normalize_weights=False),
    "jitter": dict(router_jitter=0.1),
    "sinkhorn": dict(assignment="sinkhorn"),
    "sinkhorn-raw": dict(assignment="sinkhorn", normalize_weights=False),
}
GATED = ("swiglu", "geglu", "clamped_swiglu", "limited_swiglu", "situ_glu")
ACTIVATIONS = (*GATED, "gelu", "relu", "relu2", "silu")


def randn(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def dense_weights(activation: str = "swiglu", biases: bool = False) -> dict[str, Tensor]:
    columns = (2, F_) if activation in GATED else (F_,)
    dense = {"w1": randn(*columns, D, seed=1, std=0.2), "w2": randn(D, F_, seed=2, std=0.2)}
    if biases:
        dense |= {"b1": randn(*columns, seed=3), "b2": randn(D, seed=4)}
    return dense


def dense_mlp(x_TD: Tensor, dense: dict[str, Tensor], activation: str = "swiglu") -> Tensor:
    """The oracle: the dense MLP in torch's own functions."""
    b1 = dense.get("b1")
    if activation in GATED:
        gate, up = (F.linear(x_TD, dense["w1"][i], None if b1 is None else b1[i]) for i in (0, 1))
        if activation == "clamped_swiglu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (1 + up)
        elif activation == "limited_swiglu":
            h = F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
        elif activation == "situ_glu":
            h = 7 * torch.tanh(gate / 7) * torch.sigmoid(gate) * 7 * torch.tanh(up / 7)
        else:
            h = (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    else:
        plain = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        h = F.linear(x_TD, dense["w1"], b1)
        h = F.relu(h).square() if activation == "relu2" else plain[activation](h)
    return F.linear(h, dense["w2"], dense.get("b2"))


def upcycled(name, dense, *, std=None, **fields):
    options = UpcycleOptions.parse(name, router_std=std)
    fields |= dict(fc1_bias="b1" in dense, fc2_bias="b2" in dense)
    config = options.moe_config(dim=D, hidden_dim=F_, **fields)
    layer = MoELayer(config, dtype=dense["w1"].dtype)
    layer.load_state_dict(upcycle_mlp(dense, config=config, options=options, layer_name="mlp"))
    return layer


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


def backward(y: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(y, list(inputs.values()), randn(T, D, seed=9).to(y.dtype))
    return dict(zip(inputs, grads, strict=True))


def chosen_experts(layer: MoELayer, x_TD: Tensor) -> Tensor:
    return layer.get_part("router")(x_TD).expert_ids_TK.sort(-1).values


def assert_same_as_dense(layer: MoELayer, dense: dict[str, Tensor], activation: str) -> None:
    """Output, input gradient, and weight gradients summed over the copies of each shard."""
    G = F_ // layer.config.hidden_dim
    scale = G / compute_weight_sum(layer.config)
    inputs = leaves(dense | {"x": randn(T, D, seed=5)})
    expected_y = dense_mlp(inputs["x"], inputs, activation)
    expected = backward(expected_y, inputs)
    x_TD = randn(T, D, seed=5).requires_grad_()
    params = {n.removeprefix("experts."): p for n, p in layer.named_parameters() if "experts" in n}
    y_TD = layer(x_TD)
    found = backward(y_TD, params | {"x": x_TD})
    assert_equal_to_scale(y_TD, expected_y, "y")
    assert_equal_to_scale(found["x"], expected["x"], "dx")
    for name in dense:
        # d(loss)/d(dense) = sum over copies of d(loss)/d(copy), and 1 / factor of a scaled copy.
        copies = found[name].unflatten(0, (-1, G)).sum(0)  # [G, ...]
        if name == "b2":
            assert_equal_to_scale(copies.sum(0) * scale / G, expected[name], name)
            continue
        if name == "w2":
            joined = copies.movedim(0, 1).flatten(1) * scale
        else:
            dim = 1 if activation in GATED else 0
            joined = copies.movedim(0, dim).flatten(dim, dim + 1)
        assert_equal_to_scale(joined, expected[name], name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_dense_output_and_gradients_for_every_rule(name: str, rule: str) -> None:
    dense = dense_weights(biases=True)
    layer = upcycled(name, dense, **RULES[rule])
    assert_same_as_dense(layer, dense, "swiglu")


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["E8G2T4", "E4G3T6"])
def test_dense_output_and_gradients_for_every_activation(name, activation, biases):
    dense = dense_weights(activation, biases)
    layer = upcycled(name, dense, activation=activation)
    assert_same_as_dense(layer, dense, activation)


@pytest.mark.parametrize("rule", ["softmax", "softmax-raw", "sigmoid"])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_errs_at_most_twice_as_much_as_the_dense_mlp(name: str, rule: str) -> None:
    dense = {n: w.bfloat16() for n, w in dense_weights(biases=True).items()}
    layer = upcycled(name, dense, **RULES[rule])
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    x_TD, results = randn(T, D, seed=5).bfloat16(), []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = leaves({n: t.to(dtype) for n, t in (dense | {"x": x_TD}).items()})
        y_TD = dense_mlp(inputs["x"], inputs)
        results.append((y_TD.detach(), backward(y_TD, inputs)["x"]))
    x_TD.requires_grad_()
    y_TD = layer(x_TD)
    ours = (y_TD.detach(), backward(y_TD, {"x": x_TD})["x"])
    for what, found, truth, plain in zip(("y", "dx"), ours, *results, strict=True):
        assert_twice_as_good(found, plain, truth, what)


def test_a_power_of_two_is_exact() -> None:
    dense = {n: w.bfloat16() for n, w in dense_weights().items()}
    layer = upcycled("E8G2T4", dense)
    w2_EDf = layer.experts.w2
    assert torch.equal(w2_EDf[2], 2 * dense["w2"][:, : F_ // 2])
    assert torch.equal(w2_EDf[3], 2 * dense["w2"][:, F_ // 2 :])
    assert torch.equal(layer.experts.w1[15], dense["w1"][:, F_ // 2 :])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_whole_groups_are_chosen_and_not_one_for_all(name: str, rule: str) -> None:
    layer = upcycled(name, dense_weights(), **RULES[rule])
    options = UpcycleOptions.parse(name)
    X, G = options.expansion, options.granularity
    ids_TK = chosen_experts(layer, randn(1024, D, seed=6)).unflatten(1, (-1, G))
    assert torch.equal(ids_TK - ids_TK[..., :1], torch.arange(G).expand_as(ids_TK))
    assert (ids_TK[..., 0] % G == 0).all()
    load = torch.bincount(ids_TK.flatten(), minlength=X * G).float()
    assert load.max() / load.mean() < 2, load


def test_members_have_bitwise_equal_logits() -> None:
    for X, G in ((8, 1), (4, 2), (8, 2), (2, 4), (8, 3), (16, 8)):
        options = UpcycleOptions(expansion=X, granularity=G, top_k=G)
        config = MoEConfig(dim=D, hidden_dim=F_ // G, num_experts=X * G, top_k=G)
        made = upcycle_mlp(dense_weights(), config=config, options=options, layer_name="mlp")
        layer = MoELayer(config)
        layer.load_state_dict(made)
        for tokens in (1, 3, 64, 333):
            logits = layer.router(randn(tokens, D, seed=tokens)).logits_TE.unflatten(1, (X, G))
            assert torch.equal(logits, logits[..., :1].expand_as(logits))
            assert G * X == 1 or logits.std() > 0


def test_a_tie_of_groups_never_splits_one() -> None:
    """All scores equal, then two groups equal and best: whole groups, lower ids first."""
    layer = upcycled("E4G2T4", dense_weights())
    x_TD = randn(T, D, seed=5)
    with torch.no_grad():
        layer.router.weight.zero_()
        assert torch.equal(chosen_experts(layer, x_TD), torch.arange(4).expand(T, 4))
        assert_equal_to_scale(layer(x_TD), dense_mlp(x_TD, dense_weights()))
        layer.router.weight[2:4] = 1.0
        layer.router.weight[6:8] = 1.0
        best = x_TD[x_TD.sum(-1) > 1]
        assert torch.equal(
            chosen_experts(layer, best), torch.tensor([2, 3, 6, 7]).expand(len(best), 4)
        )
        # One place for two tied groups.
        narrow = upcycled("E4G2T2", dense_weights())
        narrow.router.weight.copy_(layer.router.weight)
        assert torch.equal(chosen_experts(narrow, best), torch.tensor([2, 3]).expand(len(best), 2))


def test_group_limited_choice() -> None:
    dense = dense_weights()
    fields: dict[str, Any] = dict(score_function="sigmoid", num_groups=4, top_groups=2)
    layer = upcycled("E8G2T4", dense, **fields)
    assert_same_as_dense(layer, dense, "swiglu")
    ids_TK = chosen_experts(layer, randn(T, D, seed=5))
    assert all(len(set(row)) <= 2 for row in (ids_TK // 4).tolist())


def test_weights_on_input() -> None:
    dense = dense_weights()
    layer = upcycled("E8G1T1", dense, weights_on_input=True, normalize_weights=True)
    x_TD = randn(T, D, seed=5)
    assert_equal_to_scale(layer(x_TD), dense_mlp(x_TD, dense))


LEARNING = [(n, r) for n in NAMES[2:5] for r in ("softmax", "softmax-raw", "sigmoid", "post")]
LEARNING += [(n, r) for n in NAMES[:2] for r in ("softmax-raw", "sigmoid-raw")]


@pytest.mark.parametrize(("name", "rule"), LEARNING)
def test_router_and_chosen_experts_get_gradients(name: str, rule: str) -> None:
    layer = upcycled(name, dense_weights(), **RULES[rule])
    x_TD = randn(T, D, seed=5)
    (layer(x_TD) - randn(T, D, seed=8)).square().mean().backward()
    per_row = layer.router.weight.grad.abs().amax(1)
    assert (per_row > 1e-3 * per_row.max()).all()
    used = torch.bincount(chosen_experts(layer, x_TD).flatten(), minlength=len(per_row)) > 0
    for weight in (layer.experts.w1, layer.experts.w2):
        assert torch.equal(weight.grad.flatten(1).abs().amax(1) > 0, used)


@pytest.mark.parametrize("name", ["E8G1T1", "E4G2T2", "E8G2T4"])
def test_copies_part_and_the_loss_falls(name: str) -> None:
    G = UpcycleOptions.parse(name).granularity
    balance = BalanceConfig(micro_batch_coef=0.01)
    layer = upcycled(name, dense_weights(), balance=balance)
    w1 = layer.experts.w1
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    assert torch.equal(w1[0], w1[G])
    losses = []
    for step in range(6):
        loss = (layer(randn(T, D, seed=5)) - randn(T, D, seed=8)).square().mean()
        loss.backward()
        if step == 0:
            copies = w1.grad.unflatten(0, (-1, G))
            for other in range(1, copies.shape[0]):
                assert error(copies[0, 0], copies[other, 0]) > 0.1
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    copies = w1.detach().unflatten(0, (-1, G))
    pairs = [(i, j) for i in range(copies.shape[0]) for j in range(i)]
    assert all(float((copies[i] - copies[j]).abs().max()) > 1e-4 for i, j in pairs)


def test_repeats_and_differs_by_seed_and_key() -> None:
    config = MoEConfig(dim=D, hidden_dim=F_ // 2, num_experts=16, top_k=4)

    def rows(seed: int, key: str) -> Tensor:
        torch.manual_seed(seed + 17)  # must not matter
        options = UpcycleOptions(expansion=8, granularity=2, top_k=4, seed=seed)
        made = upcycle_mlp(dense_weights(), config=config, options=options, layer_name=key)
        return made["router.weight"]

    assert torch.equal(rows(0, "a"), rows(0, "a"))
    for other in (rows(1, "a"), rows(0, "b")):
        assert not torch.equal(rows(0, "a"), other)
    assert abs(float(rows(0, "a").std()) / 0.02 - 1) < 0.2


def test_dense_weights_are_left_alone() -> None:
    dense = {n: nn.Parameter(w) for n, w in dense_weights(biases=True).items()}
    before = {n: w.detach().clone() for n, w in dense.items()}
    layer = upcycled("E2G1T1", dense)
    with torch.no_grad():
        for parameter in layer.parameters():
            assert parameter.is_leaf and parameter.requires_grad
            parameter.zero_()
    assert all(torch.equal(dense[n], before[n]) for n in dense)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "zero": (dict(expansion=0), r"UpcycleOptions.expansion \(0\) must be a whole number >= 1"),
    "bool": (dict(top_k=True), r"top_k \(True\) must be a whole number"),
    "part": (dict(top_k=3), r"top_k \(3\) must be a multiple of granularity \(2\).*: use 4"),
    "many": (dict(top_k=18), r"top_k \(18\) must be <= expansion \* granularity \(16\)"),
    "flat": (dict(router_std=0.0), r"router_std \(0.0\) must be a finite number > 0"),
    "nan": (dict(router_std=float("nan")), r"router_std \(nan\) must be a finite number > 0"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_are_not_possible(case: str) -> None:
    change, message = OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        UpcycleOptions(**(dict(expansion=8, granularity=2, top_k=4) | change))


def test_parse() -> None:
    expected = UpcycleOptions(expansion=16, granularity=8, top_k=32, router_std=0.1, seed=3)
    assert UpcycleOptions.parse("E16G8T32", router_std=0.1, seed=3) == expected
    assert expected.num_experts == 128
    for name in ("8G2T4", "E8G2", "e8g2t4", "E8G2T4 ", "E-8G2T4", ""):
        with pytest.raises(ValueError, match=r'must have the form "E8G2T4"'):
            UpcycleOptions.parse(name)


LAYERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "hidden": ("E2G5T5", {}, r"granularity \(5\) must divide the dense hidden dim \(96\)"),
    "shared": ("E4G2T2", dict(shared_hidden_dim=8), r"shared_hidden_dim \(8\) must be off"),
    "latent": ("E4G2T2", dict(latent_dim=8), r"latent_dim \(8\) must be off"),
    "capacity": ("E4G2T2", dict(capacity=CapacityConfig(factor=2)), r"capacity .* must be off"),
    "choice": ("E4G2T2", dict(assignment="expert_choice"), r'"expert_choice"\) must be one of'),
    "limits": (
        "E2G4T4",
        dict(num_groups=4, top_groups=2),
        r"num_groups \(4\) must divide UpcycleOptions.expansion \(2\)",
    ),
    "input": (
        "E4G1T1",
        dict(weights_on_input=True, normalize_weights=True, routed_scaling_factor=2.0),
        r"weights_on_input \(True\) must go with routing weights of 1, not 2",
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_can_not_give_the_dense_output(case: str) -> None:
    name, fields, message = LAYERS[case]
    with pytest.raises(ValueError, match=message):
        UpcycleOptions.parse(name).moe_config(dim=D, hidden_dim=F_, **fields)


@pytest.mark.parametrize("rule", ["softmax-raw", "sigmoid-raw", "sqrtsoftplus-raw"])
def test_a_router_std_that_changes_the_output(rule: str) -> None:
    message = r"router_std \(0.02\) must be <= 6.2e-08 with MoEConfig.normalize_weights \(False\)"
    options = UpcycleOptions.parse("E8G2T4", router_std=0.02)
    with pytest.raises(ValueError, match=message):
        options.moe_config(dim=D, hidden_dim=F_, **RULES[rule])
    upcycled("E8G2T4", dense_weights(), std=5e-8, **RULES[rule])


def test_any_std_where_all_experts_are_active() -> None:
    """A softmax over all experts sums to 1 also unnormalised."""
    dense = dense_weights()
    layer = upcycled("E2G4T8", dense, std=0.5, normalize_weights=False)
    assert_same_as_dense_output(layer, dense)
    layer = upcycled("E8G2T4", dense, std=0.5)
    assert_same_as_dense_output(layer, dense)


def assert_same_as_dense_output(layer: MoELayer, dense: dict[str, Tensor]) -> None:
    x_TD = randn(T, D, seed=5)
    weights_TK = layer.router(x_TD).weights_TK
    assert weights_TK.std() > 0.05
    assert_equal_to_scale(layer(x_TD), dense_mlp(x_TD, dense))


@pytest.fixture
def mesh(no_group_left: None) -> DeviceMesh:
    return build_meshes(ParallelConfig(), "cpu").dense["dp_shard"]


def test_tensors_that_do_not_fit(mesh: DeviceMesh) -> None:
    options = UpcycleOptions.parse("E4G2T2")
    config = options.moe_config(dim=D, hidden_dim=F_)
    good = dense_weights()
    cases: dict[str, tuple[dict[str, Tensor], MoEConfig]] = {
        r"num_experts \(9\) must be the 8 of E4G2T2": (good, replace(config, num_experts=9)),
        r"top_k \(4\) must be the 2 of E4G2T2": (good, replace(config, top_k=4)),
        r"\['w1', 'w2'\] of m.mlp must be \['b1', 'w1', 'w2'\]": (
            good,
            replace(config, fc1_bias=True),
        ),
        r"w2 \(64, 95\) of m.mlp must have the shape \(64, 96\)": (
            good | {"w2": good["w2"][:, 1:]},
            config,
        ),
        r"w1 \(2, 96, 64\) of m.mlp must have the shape \(96, 64\)": (
            good,
            replace(config, activation="relu2"),
        ),
        r"w1 \(on meta\) of m.mlp must be a whole tensor": (
            good | {"w1": good["w1"].to("meta")},
            config,
        ),
        r"w1 \(a DTensor\) of m.mlp must be a whole tensor": (
            good | {"w1": DTensor.from_local(good["w1"], mesh, [Replicate()])},
            config,
        ),
    }
    for message, (dense, layer_config) in cases.items():
        with pytest.raises(ValueError, match=message):
            upcycle_mlp(dense, config=layer_config, options=options, layer_name="m.mlp")
    raw = replace(config, normalize_weights=False)
    halves = {n: w.half() for n, w in good.items()}
    with pytest.raises(
        ValueError, match=r"router std \(6.2e-08\) of m.mlp must be a normal number"
    ):
        upcycle_mlp(halves, config=raw, options=options, layer_name="m.mlp")
    check_upcycle(raw, options)


def test_weight_sums() -> None:
    """The paper's factor E * G^2 / T, its E and G being our expansion and granularity."""
    config = UpcycleOptions.parse("E8G2T4").moe_config(
        dim=D, hidden_dim=F_, normalize_weights=False, routed_scaling_factor=2.0
    )
    assert 2 / compute_weight_sum(config) == 8 * 2**2 / 4 / 2.0
    assert compute_weight_sum(replace(config, normalize_weights=True)) == 2.0
