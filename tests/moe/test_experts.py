"""Experts: grouped against sequential against a loop over experts written out here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from moecore import MoEConfig
from moecore.base.params import compute_global_indices
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.kernels.experts import grouped_products as expert_products
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe import backends
from moecore.moe.expert_layout import ExpertLayout, compute_expert_shapes
from moecore.moe.experts import Experts
from moecore.moe.records import ExpertInput
from moecore.planning import fake_world
from tests.moe.moe_cases import BASE, assert_equal_to_scale

ACTIVATIONS = ["swiglu", "geglu", "relu2", "clamped_swiglu", "limited_swiglu", "situ_glu"]
LAYOUTS = {
    "own": ExpertLayout(),
    "concatenated": ExpertLayout(gate_up="concatenated"),
    "interleaved": ExpertLayout(gate_up="interleaved"),
    "separate": ExpertLayout(gate_up="separate"),
    "transposed": ExpertLayout(transposed=True, gate_up="concatenated"),
    "gpt-oss": ExpertLayout(
        w1="gate_up_proj", w2="down_proj", b1="gub", b2="db", transposed=True, gate_up="interleaved"
    ),
}
BACKENDS = ["torch", "sequential"]


def make_experts(config: MoEConfig, layout: ExpertLayout, seed: int = 0) -> Experts:
    module = Experts(config, layout=layout)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def expert_by_hand(module: Experts, x_D: Tensor, weight: Tensor, e: int) -> Tensor:
    """One token through one expert, reading the stored layout element by element."""
    config, layout = module.config, module.layout
    w1, w2 = getattr(module, layout.w1)[e].flatten(0, -2), getattr(module, layout.w2)[e]
    if module.is_separate:
        w1 = torch.cat([w1, getattr(module, layout.w3)[e]])
    if layout.transposed:
        w1, w2 = w1.T, w2.T
    h = w1.reshape(-1, config.dim) @ x_D  # "split" has a dim of 2 for gate and up
    if config.fc1_bias:
        h = h + getattr(module, layout.b1)[e].reshape(-1)
    if config.activation == "relu2":
        a = torch.relu(h) ** 2
    else:
        F = config.hidden_dim
        gate, up = (h[::2], h[1::2]) if layout.gate_up == "interleaved" else (h[:F], h[F:])
        if config.activation == "swiglu":
            a = gate * torch.sigmoid(gate) * up
        elif config.activation == "geglu":
            a = torch.nn.functional.gelu(gate, approximate="tanh") * up
        elif config.activation == "situ_glu":
            limit = config.activation_limit
            gate = limit * torch.tanh(gate / limit) * torch.sigmoid(gate)
            a = gate * limit * torch.tanh(up / limit)
        else:
            limit, alpha = config.activation_limit, config.activation_alpha
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            a = gate * torch.sigmoid(alpha * gate) * (up + 1)
            if config.activation == "limited_swiglu":
                a = gate * torch.sigmoid(gate) * up
    y = w2 @ (a * weight)
    return y + getattr(module, layout.b2)[e] * weight if config.fc2_bias else y


def layer_by_hand(module: Experts, x_SD: Tensor, ids_SK: Tensor, weights_SK: Tensor) -> Tensor:
    rows = []
    for s, ids in enumerate(ids_SK.tolist()):
        y_D = torch.zeros_like(x_SD[s])
        for k, e in enumerate(ids):
            if e >= 0:
                y_D = y_D + expert_by_hand(module, x_SD[s], weights_SK[s, k], e)
        rows.append(y_D)
    # Every gradient exists, zero included.
    tie = sum(t.sum() for t in (x_SD, weights_SK, *module.parameters())) * 0
    return (torch.stack(rows) if rows else x_SD) + tie


def make_input(x_SD: Tensor, ids_SK: Tensor, weights_SK: Tensor, num_experts: int) -> ExpertInput:
    index = build_index(ids_SK.int(), weights_SK, first_expert=0, num_local_experts=num_experts)
    return ExpertInput(Rows(x_SD), index, None)


def output_gradient(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)


def gradients(module, x_SD, ids_SK, weights_SK, backend) -> dict[str, Tensor]:
    """y and every gradient, from a fixed random gradient of y."""
    module.zero_grad()
    x, w = x_SD.detach().clone().requires_grad_(), weights_SK.detach().clone().requires_grad_()
    if backend == "hand":
        y = layer_by_hand(module, x, ids_SK, w)
    else:
        module.set_backend(backend)  # type: ignore[arg-type]
        y = module(make_input(x, ids_SK, w, module.config.num_experts))
    y.backward(output_gradient(y))
    found = {"y": y.detach(), "x": x.grad, "weights": w.grad}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        found[name] = torch.zeros_like(parameter) if grad is None else grad.clone()
    return found  # type: ignore[return-value]


def random_routing(S: int, K: int, E: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(S, E, generator=generator).argsort(1)[:, :K]
    return torch.randn(S, 32, generator=generator), ids, torch.rand(S, K, generator=generator)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_equal_to_scale(found[name], expected[name], name)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_gradients_by_hand(activation: Any, layout: str, bias: bool) -> None:
    config = replace(
        BASE, activation=activation, activation_limit=0.7, fc1_bias=bias, fc2_bias=bias
    )
    if activation == "relu2" and LAYOUTS[layout].gate_up == "interleaved":
        config = replace(config, fc1_bias=False)  # nothing to interleave without a gate
    if layout == "separate":
        config = replace(config, fc1_bias=False)  # which is refused
    module = make_experts(config, LAYOUTS[layout])
    args = random_routing(11, 2, 8)
    expected = gradients(module, *args, "hand")
    for backend in BACKENDS:
        compare(gradients(module, *args, backend), expected)


WITH_BIASES = replace(BASE, fc1_bias=True, fc2_bias=True)


def routing_case(name: str) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = random_routing(10, 2, 8)
    if name == "empty experts":
        ids = torch.tensor([[0, 5]]).repeat(10, 1)
    elif name == "all to one":
        ids, weights = torch.full((10, 1), 3), weights[:, :1]
    elif name == "all to the last":
        ids, weights = torch.full((10, 1), 7), weights[:, :1]
    elif name == "k equals e":
        x, ids, weights = random_routing(10, 8, 8)
    elif name == "some dropped":
        ids[::3, 1], ids[4] = -1, -1
    elif name == "all dropped":
        ids = torch.full_like(ids, -1)
    elif name == "one row":
        x, ids, weights = random_routing(1, 2, 8)
    elif name == "zero rows":
        x, ids, weights = random_routing(0, 2, 8)
    return x, ids, weights


ROUTINGS = [
    "empty experts",
    "all to one",
    "all to the last",
    "k equals e",
    "some dropped",
    "all dropped",
    "one row",
    "zero rows",
]


@pytest.mark.parametrize("config", [BASE, WITH_BIASES], ids=["plain", "biases"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_by_hand(name: str, backend: str, config: MoEConfig) -> None:
    module = make_experts(config, ExpertLayout())
    args = routing_case(name)
    compare(gradients(module, *args, backend), gradients(module, *args, "hand"))
    for parameter in module.parameters():
        assert parameter.grad is not None, "unused experts have a zero gradient, not None"


class _FillPast(torch.autograd.Function):
    """NaN in the rows past n: in the value, or in the gradient that flows back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Tensor, where: str) -> Tensor:
        ctx.n, ctx.where = int(n), where
        x = x.clone()
        if where == "value":
            x[ctx.n :] = float("nan")
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone()
        if ctx.where == "gradient":
            grad[ctx.n :] = float("nan")
        return grad, None, None


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """grouped_mm leaves rows past the last offset uninitialised; here they are NaN, both ways."""
    real, calls = backends.grouped_mm, []

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(int(offs[-1]))
        if b.ndim == 2:  # a weight gradient: reads no row past the last offset
            return real(a, b, offs=offs)
        y = real(_FillPast.apply(a, offs[-1], "gradient"), b, offs=offs)
        return _FillPast.apply(y, offs[-1], "value")

    for module in (backends, expert_products):
        monkeypatch.setattr(module, "grouped_mm", grouped_mm)
    yield calls


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", ["some dropped", "all dropped"])
def test_rows_past_num_rows_may_hold_anything(poisoned, name, bias, activation) -> None:
    config = replace(BASE, activation=activation, fc1_bias=bias, fc2_bias=bias)
    module = make_experts(config, ExpertLayout())
    args = routing_case(name)
    found = gradients(module, *args, "torch")
    assert len(poisoned) == (2 if bias else 6)  # autograd's own calls are the real ones
    compare(found, gradients(module, *args, "hand"))


def test_dropped_rows_may_themselves_be_nan() -> None:
    """A source row that no expert reads is never looked at, though its id may pad the length."""
    module = make_experts(WITH_BIASES, ExpertLayout())
    x, ids, weights = random_routing(6, 2, 8)
    ids[0], x[0] = -1, float("nan")
    for backend in BACKENDS:
        found = gradients(module, x, ids, weights, backend)
        assert (found["y"][0] == 0).all()
        assert all(t.isfinite().all() for t in found.values()), backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_gradients_of_many_rows_are_added_in_fp32(backend: Any) -> None:
    """4096 rows of gradient 1 on one expert: a bf16 running sum would stop at 256."""
    config = replace(WITH_BIASES, num_experts=2, top_k=1)
    module = make_experts(config, ExpertLayout()).bfloat16()
    module.set_backend(backend)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.b1.fill_(1.0)
    rows = 4096
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    x = torch.zeros(rows, 32, dtype=torch.bfloat16)
    y = module(make_input(x, ids, torch.ones(rows, 1), 2))
    y.backward(torch.ones_like(y))
    assert (module.b2.grad[0] == rows).all() and (module.b2.grad[1] == 0).all()
    with torch.no_grad():
        module.w2.fill_(1 / 32)
    module.zero_grad()
    y = module(make_input(x, ids, torch.ones(rows, 1), 2))
    y.backward(torch.ones_like(y))
    slope = torch.tensor(1.0).sigmoid()
    expected = rows * torch.tensor([slope + slope * (1 - slope), slope])  # d silu(1) * 1, silu(1)
    assert_equal_bf16(module.b1.grad[0].float().mean(1), expected)


def assert_equal_bf16(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=0)


SHAPES = {
    "own": ((8, 2, 16, 32), (8, 32, 16), (8, 2, 16)),
    "concatenated": ((8, 32, 32), (8, 32, 16), (8, 32)),
    "interleaved": ((8, 32, 32), (8, 32, 16), (8, 32)),
    "transposed": ((8, 32, 32), (8, 16, 32), (8, 32)),
    "gpt-oss": ((8, 32, 32), (8, 16, 32), (8, 32)),
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_shapes(layout: str, activation: Any) -> None:
    config = replace(WITH_BIASES, activation=activation)
    names, transposed = LAYOUTS[layout], LAYOUTS[layout].transposed
    w1, w2, b1 = SHAPES[layout]
    if not config.gated:
        w1, b1 = ((8, 32, 16) if transposed else (8, 16, 32)), (8, 16)
    shapes = compute_expert_shapes(config, names)
    assert shapes == {names.w1: w1, names.w2: w2, names.b1: b1, names.b2: (8, 32)}
    module = Experts(config, layout=names)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == shapes
    assert module.get_model_dim_idx(getattr(module, names.w1)) == (1 if transposed else len(w1) - 1)
    assert module.get_model_dim_idx(getattr(module, names.w2)) == (2 if transposed else 1)
    for bias in (names.b1, names.b2):
        assert module.get_model_dim_idx(getattr(module, bias)) is None


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_shards_of_all_ranks_add_up_to_the_whole(activation, layout, ep, etp) -> None:
    """Rank after rank on a fake group: outputs add up, gradients are slices of the whole."""
    if LAYOUTS[layout].gate_up == "concatenated" and etp > 1 and not HAS_SEPARATE_PIECES:
        pytest.skip("this torch cannot differentiate a strided shard; parallelize_moe refuses it")
    config = replace(WITH_BIASES, activation=activation, fc1_bias=layout != "separate")
    x, ids, weights = random_routing(11, 3, 8)
    ids[2, 1] = -1
    whole = make_experts(config, LAYOUTS[layout])
    expected = gradients(whole, x, ids, weights, "sequential")
    factor = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    total, seen = (
        torch.zeros_like(x),
        {n: torch.zeros(p.shape) for n, p in whole.named_parameters()},
    )
    for rank in range(ep * etp):
        with fake_world(ep * etp, rank):
            mesh = init_device_mesh("cpu", (ep, etp), mesh_dim_names=("ep", "etp"))
            module = make_experts(config, LAYOUTS[layout])
            module.shard_parameters(mesh)
            num_local = 8 // ep
            first = rank // etp * num_local
            index = build_index(ids.int(), weights, first_expert=first, num_local_experts=num_local)
            module.set_backend("sequential")
            y = module(ExpertInput(Rows(x), index, None))
            (y * factor).sum().backward()
            total += y.detach()
            for name, parameter in module.named_parameters():
                where = compute_global_indices(parameter)
                grid = torch.meshgrid(*where, indexing="ij")
                assert torch.equal(parameter.to_local(), whole.get_parameter(name)[grid]), name
                assert_equal_to_scale(parameter.grad.to_local(), expected[name][grid], name)
                seen[name][grid] += 1
    assert_equal_to_scale(total, expected["y"])
    for name, times in seen.items():
        assert (times == 1).all(), f"{name}: each element once"


@pytest.mark.parametrize("gate_up", ["split", "separate"])
def test_layouts_that_no_model_has_are_refused(gate_up: Any) -> None:
    message = rf"transposed \(True\) must go with gate_up \('{gate_up}'\)"
    with pytest.raises(ValueError, match=message):
        ExpertLayout(transposed=True, gate_up=gate_up)
    with pytest.raises(ValueError, match=r"MoEConfig.fc1_bias \(True\) must be False with Expert"):
        make_experts(WITH_BIASES, LAYOUTS["separate"])


def test_init_weights_fills_gate_and_up_apart() -> None:
    experts = Experts(BASE, layout=LAYOUTS["separate"])
    experts.init_weights(std=1.0, key="e", seed=0)
    assert experts.w1.shape == experts.w3.shape == (8, 16, 32)
    assert experts.get_model_dim_idx(experts.w3) == 2 and not torch.equal(experts.w1, experts.w3)
    assert float(experts.w3.detach().std()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        (dict(fc1_bias=True), {}, r"MoEConfig.fc1_bias \(True\) .* use expert_backend='torch'"),
        (dict(fc2_bias=True), {}, r"MoEConfig.fc2_bias \(True\)"),
        ({}, dict(transposed=True, gate_up="concatenated"), r"ExpertLayout.transposed \(True\)"),
        ({}, dict(gate_up="interleaved"), r"interleaved ExpertLayout.gate_up \(True\)"),
    ],
)
def test_triton_refuses_what_it_cannot_multiply(change: Any, layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experts(replace(BASE, **change), layout=ExpertLayout(**layout), backend="triton")


def test_recompute_is_refused_where_there_is_none() -> None:
    message = r"recompute \('expert_fc1'\) must not go with expert_backend \('seq"
    with pytest.raises(ValueError, match=message):
        Experts(BASE).set_backend("sequential", recompute_fc1=True)
    with pytest.raises(ValueError, match="must not go with experts with biases"):
        Experts(WITH_BIASES).set_backend("torch", recompute_fc1=True)


@pytest.mark.parametrize(("dim", "hidden_dim"), [(30, 16), (32, 18)])
def test_misaligned_sizes_are_refused_with_the_way_out(dim: int, hidden_dim: int) -> None:
    config = replace(BASE, dim=dim, hidden_dim=hidden_dim, fc1_bias=True)
    module = make_experts(config, ExpertLayout())
    x = torch.randn(5, dim)
    _, ids, weights = random_routing(5, 2, 8)
    module.set_backend("torch")
    with pytest.raises(ValueError, match=r"(dim|hidden_dim).*\(16 bytes\).*sequential"):
        module(make_input(x, ids, weights, 8))
    found = gradients(module, x, ids, weights, "sequential")
    compare(found, gradients(module, x, ids, weights, "hand"))
