from dataclasses import replace

import pytest
import torch
from benchmarks.harness import count_launches
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.kernels.common import has_hopper_kernels
from tests.helpers.waits import syncs_are_errors
from tests.moe.reference import moe_reference

pytestmark = pytest.mark.gpu

CONFIGS = {
    "softmax": MoEConfig(dim=128, hidden_dim=96, num_experts=16, top_k=4),
    "sigmoid-groups": MoEConfig(
        dim=128,
        hidden_dim=64,
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        num_groups=4,
        top_groups=2,
        expert_bias=True,
        routed_scaling_factor=2.5,
        shared_hidden_dim=64,
        shared_gate=True,
    ),
    "biases": MoEConfig(
        dim=64,
        hidden_dim=64,
        num_experts=8,
        top_k=8,
        score_order="post",
        router_bias=True,
        activation="clamped_swiglu",
        fc1_bias=True,
        fc2_bias=True,
    ),
    # One normalised weight is always 1, and its gradient pure rounding: so no normalisation.
    "relu2": MoEConfig(
        dim=64, hidden_dim=128, num_experts=8, top_k=1, activation="relu2", normalize_weights=False
    ),
    "quantile": MoEConfig(
        dim=64,
        hidden_dim=64,
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(
            bias_update="quantile", bias_update_rate=1.0, bias_per_micro_batch=True
        ),
    ),
}
COUNTS = (0, 1, 37, 512)


def make(config: MoEConfig, num_tokens: int, dtype: torch.dtype) -> tuple[MoELayer, Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(config)
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.normal_(0, 0.1)
    bias = layer.router.selection_bias
    layer.to("cuda", dtype)
    if bias is not None:
        layer.router.expert_bias = bias.cuda()  # stays fp32
    x_TD = torch.randn(1, num_tokens, config.dim).to("cuda", dtype)
    return layer, x_TD


def poison() -> None:
    """Leave NaN in freed memory, where uninitialised rows would find it."""
    torch.full((64 << 20,), float("nan"), device="cuda")


def gradients(config, num_tokens, dtype, who, backend="torch") -> dict[str, Tensor]:
    """Output and all gradients of the layer ("ours"), or of the reference in `dtype` or fp32."""
    layer, x = make(config, num_tokens, dtype)
    layer.experts.set_backend(backend)
    if who == "fp32":
        layer, x = layer.float(), x.float()
    x.requires_grad_()
    poison()
    params = dict(layer.named_parameters()) | dict(layer.named_buffers())
    y = layer(x) if who == "ours" else moe_reference(x, params, config).y_BTD
    y.backward(torch.linspace(-1, 1, config.dim, device="cuda").to(y.dtype).expand_as(y))
    found = {"y": y.detach(), "x": x.grad}
    for name, p in layer.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return {name: t.float() for name, t in found.items()}


def errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the error of the whole tensor, and of the worst row against the largest."""
    if not expected.numel():
        return 0.0, 0.0
    rows = (found - expected).reshape(-1, expected.shape[-1]).norm(dim=-1)
    scale = expected.reshape(-1, expected.shape[-1]).norm(dim=-1)
    return float(rows.norm() / scale.norm().clamp(min=1e-9)), float(rows.max() / scale.max())


@pytest.mark.parametrize("num_tokens", COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["torch", "sequential"])
def test_fp32_equals_reference(name: str, num_tokens: int, backend: str) -> None:
    config = CONFIGS[name]
    expected = gradients(config, num_tokens, torch.float32, "fp32")
    found = gradients(config, num_tokens, torch.float32, "ours", backend)
    for key, value in expected.items():
        scale = float(value.abs().max()) if value.numel() else 1.0
        worst = float((found[key] - value).abs().max()) if value.numel() else 0.0
        assert worst <= 1e-5 * max(scale, 1e-3), (key, worst, scale)


# What each backend can compute on this machine.
IN_BF16 = [(name, "torch") for name in CONFIGS]
if torch.cuda.is_available() and has_hopper_kernels(torch.device("cuda")):
    IN_BF16 += [(name, "triton") for name in CONFIGS if name != "biases"]


@pytest.mark.parametrize("num_tokens", [1, 37, 512, 2111])
@pytest.mark.parametrize(("name", "backend"), IN_BF16)
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(name, backend, num_tokens) -> None:
    config = CONFIGS[name]
    expected = gradients(config, num_tokens, torch.bfloat16, "fp32")
    plain = gradients(config, num_tokens, torch.bfloat16, "plain")
    ours = gradients(config, num_tokens, torch.bfloat16, "ours", backend)
    for key, value in expected.items():
        pairs = zip(errors(ours[key], value), errors(plain[key], value), strict=True)
        assert all(a <= 2 * b + 1e-4 for a, b in pairs), key


@pytest.mark.parametrize(("name", "backend"), IN_BF16)
def test_local_layer_never_syncs_with_the_host(name: str, backend: str) -> None:
    layer, x = make(CONFIGS[name], 512, torch.bfloat16)
    layer.experts.set_backend(backend)
    x.requires_grad_()
    grad = torch.randn_like(x)
    layer(x).backward(grad)
    torch.cuda.synchronize()
    with syncs_are_errors():
        layer(x).backward(grad)


REPRODUCIBLE = [case for case in IN_BF16 if case[0] != "biases"]


@pytest.mark.parametrize(("name", "backend"), REPRODUCIBLE)
def test_repeats_are_bit_identical(name: str, backend: str) -> None:
    runs = [gradients(CONFIGS[name], 2111, torch.bfloat16, "ours", backend) for _ in range(3)]
    for other in runs[1:]:
        for key, value in runs[0].items():
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize(("name", "backend"), IN_BF16)
def test_replayed_graph_equals_eager_though_the_routing_changes(name: str, backend: str) -> None:
    layer, x = make(CONFIGS[name], 512, torch.bfloat16)
    layer.experts.set_backend(backend)
    x.requires_grad_()
    grad, stream = torch.randn_like(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(x).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.backward(grad)
    leaves = {"x": x, **dict(layer.named_parameters())}
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = {"y": y.clone()} | {
            n: t.grad.clone() for n, t in leaves.items() if t.grad is not None
        }
        fresh = x.detach().clone().requires_grad_()
        params = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
        eager_y = torch.func.functional_call(layer, params, (fresh,))
        eager_y.backward(grad)
        eager = {"y": eager_y, "x": fresh.grad} | {n: p.grad for n, p in params.items()}
        for key, value in replayed.items():
            if name == "biases":  # bias gradients add up atomically
                torch.testing.assert_close(value, eager[key], rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(value, eager[key]), key


@pytest.mark.parametrize("backend", sorted({case[1] for case in REPRODUCIBLE}))
def test_keeps_x_and_h_and_launches_few_kernels(backend: str) -> None:
    T, D, F, E, K = 8192, 1024, 768, 64, 8
    config = MoEConfig(dim=D, hidden_dim=F, num_experts=E, top_k=K)
    layer = MoELayer(config, device="cuda", dtype=torch.bfloat16)
    layer.experts.set_backend(backend)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    before, y = torch.cuda.memory_allocated(), layer(x)
    kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    kept += x.numel() * x.element_size()  # X itself was there before
    assert kept <= 1.06 * (2 * D + 4 * K * F) * T
    launches = count_launches(lambda: layer(x), device=x.device)
    assert launches is not None and launches <= 14


@pytest.mark.parametrize("num_tokens", [1, 512])
def test_dropped_choices_read_nothing_uninitialised(num_tokens: int) -> None:
    config = CONFIGS["softmax"]
    layer, x = make(config, num_tokens, torch.bfloat16)
    x = x[0].requires_grad_()
    routing = layer.router(x)
    ids_TK = routing.expert_ids_TK.clone()  # backward needs the ones that were chosen
    ids_TK[:, 1:] = -1
    ids_TK[0] = -1
    poison()
    inp = layer.dispatcher.dispatch(x, replace(routing, expert_ids_TK=ids_TK))
    y = layer.experts(inp)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    assert not y[0].any(), "a token without an expert gives zero"
    assert all(torch.isfinite(p.grad).all() for p in layer.experts.parameters())


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_shared_experts_on_a_stream_of_their_own_change_no_bit(num_backwards: int) -> None:
    results = []
    for stream in (None, torch.cuda.Stream()):
        layer, x_TD = make(CONFIGS["sigmoid-groups"], 512, torch.bfloat16)
        layer.shared_stream = stream
        for i in range(num_backwards):
            poison()
            x = (x_TD + i).requires_grad_()
            y = layer(x)
            y.square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        results.append([y.detach(), x.grad, *grads])
    for plain, aside in zip(*results, strict=True):
        assert torch.equal(plain, aside)  # type: ignore[arg-type]
