"""Experts through Transformer Engine against the sequential backend.

On a GPU with Transformer Engine: the 2x rule. Everywhere: the error messages, and the same
journey with a stand-in that keeps Transformer Engine's rules in plain PyTorch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecore.moe.experts_te as experts_te
from moecore import MoEConfig
from moecore.kernels.experts.contract import ExpertWeights
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.activation import activation_options
from moecore.moe.experts import ExpertLayout, Experts
from moecore.moe.experts_te import is_available, te_experts
from moecore.moe.records import ExpertInput
from tests.moe.moe_cases import BASE, assert_twice_as_good

BIASES = replace(BASE, fc1_bias=True, fc2_bias=True)
GPU_CONFIG = MoEConfig(dim=128, hidden_dim=96, num_experts=8, top_k=3)
GPU_BIASES = replace(GPU_CONFIG, fc1_bias=True, fc2_bias=True)

ROUTINGS = [
    "random",
    "empty experts",
    "all to one",
    "all to the last",
    "k equals e",
    "some dropped",
    "padded to 16",
    "experts 4 to 7",
    "all dropped",
    "one row",
    "zero rows",
]


def routing_case(name: str, num_rows: int, config: MoEConfig) -> tuple[Tensor, Tensor, dict]:
    """ids_SK, weights_SK and how `build_index` reads them."""
    E, K = config.num_experts, config.top_k
    S = {"zero rows": 0, "one row": 1}.get(name, num_rows)
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(S, E, generator=generator).argsort(1)[:, :K]
    how = {"first": 0, "num_local": E, "multiple": 1}
    if name == "empty experts":
        ids = torch.tensor([[0, 5]]).repeat(S, 1)
    elif name in ("all to one", "all to the last"):
        ids = torch.full((S, 1), 3 if name == "all to one" else E - 1)
    elif name == "k equals e":
        ids = torch.rand(S, E, generator=generator).argsort(1)
    elif name in ("some dropped", "padded to 16"):
        ids[::3, 1], ids[4] = -1, -1
        how["multiple"] = 16 if name == "padded to 16" else 1
    elif name == "experts 4 to 7":
        how |= {"first": 4, "num_local": 4}
    elif name == "all dropped":
        ids = torch.full_like(ids, -1)
    weights = torch.rand(ids.shape, generator=generator)
    weights[3:4, 0] = 0.0  # a weight of zero still has a gradient
    return ids.int(), weights, how


def make_experts(config: MoEConfig, num_local: int, transposed: bool = False) -> Experts:
    layout = ExpertLayout(transposed=transposed, gate_up="concatenated")
    module = Experts(replace(config, num_experts=num_local, top_k=1), layout=layout)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def experts(
    inp: ExpertInput,
    fc1: tuple[Tensor, Tensor | None],
    fc2: tuple[Tensor, Tensor | None],
    config: MoEConfig,
) -> Tensor:
    weights = ExpertWeights(w1_eCD=fc1[0], w2_eDF=fc2[0], b1_eC=fc1[1], b2_eD=fc2[1])
    return te_experts(inp, weights, activation_options(config))


def run(
    config: MoEConfig,
    routing: tuple[Tensor, Tensor, dict],
    *,
    who: str,
    dtype: torch.dtype,
    rounded: bool = True,
    device: str = "cpu",
    transposed: bool = False,
    frozen: tuple[str, ...] = (),
) -> dict[str, Tensor | None]:
    """y and every gradient; all that goes in is rounded to bf16 first unless told otherwise."""
    ids, weights, how = routing
    start = torch.bfloat16 if rounded else dtype
    module = make_experts(config, how["num_local"], transposed).to(device, start).to(dtype)
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ids.shape[0], config.dim, generator=generator).to(device, start).to(dtype)
    factor = torch.randn(x.shape, generator=generator).to(device, start).to(dtype)
    weights = weights.to(device, torch.promote_types(dtype, torch.float32), copy=True)
    weights.requires_grad_()
    x.requires_grad_()
    index = build_index(ids.to(device), weights, **how)
    inp = ExpertInput(Rows(x), index, None)
    if who == "te":
        w1, w2 = module.w1, module.w2
        if transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        b1, b2 = (getattr(module, name, None) for name in ("b1", "b2"))
        y = experts(inp, (w1, b1), (w2, b2), module.config)
    else:
        module.set_backend("sequential")
        y = module(inp)
    y.backward(factor)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | {
        name: p.grad for name, p in module.named_parameters()
    }


# --------------------------------------------------------------------------- stand-in


class GroupedLinearStandIn(nn.Module):
    """Weights by number, splits as ints, plain pointers, bias gradients beside weight ones."""

    def __init__(
        self, num: int, in_dim: int, out_dim: int, *, bias: bool, params_dtype: Any, device: str
    ) -> None:
        super().__init__()
        self.num, self.bias = num, bias
        for i in range(num):
            weight = torch.empty(out_dim, in_dim, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            empty = torch.empty(out_dim if bias else 0, dtype=params_dtype, device=device)
            setattr(self, f"bias{i}", nn.Parameter(empty) if bias else empty)

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        assert len(splits) == self.num and all(type(n) is int for n in splits)
        assert x.shape[0] == sum(splits) > 0
        parts = []
        for i, part in enumerate(x.split(splits)):
            weight, bias = getattr(self, f"weight{i}"), getattr(self, f"bias{i}")
            assert weight.is_contiguous() and not weight.is_meta and not bias.is_meta
            parts.append(part @ weight.T)
            if self.bias:
                parts[-1] = parts[-1] + (bias if weight.requires_grad else bias.detach())
        return torch.cat(parts)


class StandIn:
    """What `te_experts` asks of Transformer Engine."""

    GroupedLinear = GroupedLinearStandIn

    @staticmethod
    def moe_permute(x: Tensor, mask: Tensor, *, num_out_tokens: int) -> tuple[Tensor, Tensor]:
        assert mask.dtype == torch.int32 and mask.shape[0] == x.shape[0]
        ids = mask.T.nonzero()[:, 1]
        assert ids.numel() == num_out_tokens > 0
        return x[ids], ids

    @staticmethod
    def moe_unpermute(y: Tensor, ids: Tensor, *, restore_shape: torch.Size) -> Tensor:
        assert y.shape[0] == ids.numel()
        return y.new_zeros(restore_shape).index_add(0, ids, y)

    @staticmethod
    def autocast(*, enabled: bool) -> nullcontext:
        assert not enabled
        return nullcontext()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    experts_te._template.cache_clear()
    monkeypatch.setattr(experts_te, "_te", lambda: StandIn)
    monkeypatch.setattr(experts_te, "supports", lambda spec: None)
    yield
    experts_te._template.cache_clear()


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("config", [BASE, BIASES], ids=["plain", "biases"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_journey_with_a_stand_in(stand_in: None, name: str, config: MoEConfig) -> None:
    options = dict(dtype=torch.float64, rounded=False)
    routing = routing_case(name, 10, config)
    expected = run(config, routing, who="sequential", **options)
    assert_equal(run(config, routing, who="te", **options), expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["natural", "transposed"])
@pytest.mark.parametrize(
    "frozen", [("w1",), ("w1", "w2"), ("w1", "b1"), ("b1", "b2"), ("w1", "w2", "b1", "b2")]
)
def test_frozen_parameters_with_a_stand_in(
    stand_in: None, frozen: tuple[str, ...], transposed: bool
) -> None:
    """A trainable bias beside a frozen weight gets its gradient, though the library has none."""
    options = dict(dtype=torch.float64, rounded=False, frozen=frozen, transposed=transposed)
    routing = routing_case("some dropped", 10, BIASES)
    expected = run(BIASES, routing, who="sequential", **options)
    assert_equal(run(BIASES, routing, who="te", **options), expected)


def test_autocast_changes_no_bit_with_a_stand_in(stand_in: None) -> None:
    """The bias of FC2 is added in fp32, where autocast would multiply in bf16."""
    routing = routing_case("some dropped", 10, BIASES)
    expected = run(BIASES, routing, who="te", dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(BIASES, routing, who="te", dtype=torch.bfloat16)
    assert torch.equal(found["y"], expected["y"])


@pytest.mark.parametrize("activation", ["geglu", "relu2", "clamped_swiglu"])
def test_activations_with_a_stand_in(stand_in: None, activation: Any) -> None:
    config = replace(BASE, activation=activation, activation_limit=0.7)
    options = dict(dtype=torch.float64, rounded=False)
    routing = routing_case("random", 10, config)
    expected = run(config, routing, who="sequential", **options)
    assert_equal(run(config, routing, who="te", **options), expected)


@pytest.mark.parametrize("config", [BASE, BIASES], ids=["plain", "biases"])
def test_rows_without_a_choice_and_their_gradients_are_not_read(
    stand_in: None, config: MoEConfig
) -> None:
    """Holes of a dispatcher are uninitialised, in its rows and in the gradient it gives."""
    ids, weights, how = routing_case("some dropped", 10, config)
    holes = (ids < 0).all(1)
    assert holes.sum() == 1
    found = []
    for fill in (0.0, float("nan")):
        module = make_experts(config, how["num_local"]).double()
        generator = torch.Generator().manual_seed(3)
        x, dy = (torch.randn(10, config.dim, generator=generator).double() for _ in range(2))
        x[holes], dy[holes] = fill, fill
        x.requires_grad_()
        index = build_index(ids, weights.double().requires_grad_(), **how)
        inp = ExpertInput(Rows(x), index, None)
        b1, b2 = (getattr(module, name, None) for name in ("b1", "b2"))
        y = experts(inp, (module.w1, b1), (module.w2, b2), module.config)
        y.backward(dy)
        grads = {n: p.grad for n, p in module.named_parameters()}
        found.append({"y": y.detach(), "x": x.grad, **grads})
    assert_equal(found[1], found[0])
    assert all(t is not None and t.isfinite().all() for t in found[1].values())


# --------------------------------------------------------------------------- index and errors


def example(offsets: list[int], slots: list[list[int]]) -> ExpertInput:
    weights = torch.arange(offsets[-1] + 1.0)
    ids = torch.zeros(offsets[-1] + 1, dtype=torch.int32)
    ends = torch.tensor(offsets, dtype=torch.int32)
    x = torch.zeros(len(slots), 8, dtype=torch.bfloat16)
    index = ExpertIndex(ids, weights, torch.tensor(slots, dtype=torch.int32), ends)
    return ExpertInput(Rows(x), index, 0)


def test_worked_example_of_mask_and_counts() -> None:
    mask, counts = experts_te._mask_and_counts(example([1, 3], [[0, 1], [2, -1]]).index)
    assert mask.tolist() == [[1, 1], [0, 1]] and counts == [1, 2]


def test_worked_example_of_weights() -> None:
    index = example([2, 4], [[0, 2], [3, -1]]).index
    mask, counts = experts_te._mask_and_counts(index)
    assert counts == [1, 2]
    assert experts_te._weights(index, mask, 3).tolist() == [0.0, 2.0, 3.0]


def test_an_expert_chosen_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_ids_TK \(3 choices\) must name .* \(2 left\)"):
        experts_te._mask_and_counts(example([3, 3], [[0, 1], [2, -1]]).index)


def call(dim: int = 8, hidden_dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> None:
    x = torch.zeros(2, dim, dtype=dtype)
    inp = replace(example([1, 3], [[0, 1], [2, -1]]), rows=Rows(x))
    w1 = torch.zeros(2, 2 * hidden_dim, dim, dtype=dtype)
    w2 = torch.zeros(2, dim, hidden_dim, dtype=dtype)
    experts(inp, (w1, None), (w2, None), BASE)


def test_missing_library_is_an_error_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_te.importlib.util, "find_spec", lambda name: None)
    assert not is_available()
    with pytest.raises(
        ValueError, match=r"expert_backend \('te'\) must .* missing: pip install '.\[te\]'"
    ):
        call()


def test_asking_for_the_library_does_not_import_it() -> None:
    before = set(sys.modules)
    is_available()
    assert not any(name.startswith("transformer_engine") for name in set(sys.modules) - before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(dtype=torch.float32),
            r"dtype of the experts \(torch.float32\) must be torch.bfloat16",
        ),
        (dict(), r"device of the experts \(cpu\) must be a GPU .* expert_backend='torch'"),
    ],
)
def test_unfit_input_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, arguments: dict, message: str
) -> None:
    monkeypatch.setattr(experts_te, "is_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        call(**arguments)


# --------------------------------------------------------------------------- the library itself


@pytest.fixture
def installed() -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    for num in (1 << 26, 1 << 20, 1 << 12):  # NaN in freed memory, where unwritten outputs find it
        torch.full((num,), float("nan"), device="cuda")


def assert_two_times_rule(config: MoEConfig, name: str, **options: Any) -> None:
    routing = routing_case(name, 300, config)
    options |= {"device": "cuda"}
    truth = run(config, routing, who="sequential", dtype=torch.float32, **options)
    plain = run(config, routing, who="sequential", dtype=torch.bfloat16, **options)
    ours = run(config, routing, who="te", dtype=torch.bfloat16, **options)
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        found = ours[key]
        if value is None:
            assert found is None, key
            continue
        assert found is not None and plain[key] is not None, key
        assert found.shape == value.shape and found.dtype == plain[key].dtype, key
        if value.numel() and value.any():
            assert_twice_as_good(found, plain[key], value, key)
        else:
            assert not found.any(), f"{key}: zero, not garbage"


@pytest.mark.gpu
@pytest.mark.parametrize("config", [GPU_CONFIG, GPU_BIASES], ids=["plain", "biases"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_two_times_rule(installed: None, name: str, config: MoEConfig) -> None:
    assert_two_times_rule(config, name)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["geglu", "relu2", "clamped_swiglu"])
def test_two_times_rule_of_activations(installed: None, activation: Any) -> None:
    assert_two_times_rule(replace(GPU_BIASES, activation=activation), "some dropped")


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 13])
def test_two_times_rule_of_odd_expert_counts(installed: None, num_experts: int) -> None:
    config = replace(GPU_BIASES, num_experts=num_experts, top_k=min(3, num_experts))
    assert_two_times_rule(config, "random")


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["natural", "transposed"])
@pytest.mark.parametrize("frozen", [(), ("w1",), ("w1", "w2"), ("b1", "b2")])
def test_two_times_rule_of_frozen_parameters(
    installed: None, frozen: tuple[str, ...], transposed: bool
) -> None:
    assert_two_times_rule(GPU_BIASES, "some dropped", frozen=frozen, transposed=transposed)


@pytest.mark.gpu
def test_bias_gradients_of_many_rows_are_added_in_fp32(installed: None) -> None:
    """4096 rows of gradient 1 on one expert: a bf16 running sum would stop at 256."""
    rows, bf16 = 4096, dict(dtype=torch.bfloat16, device="cuda")
    b1, b2 = (torch.full((2, n), 1.0, **bf16).requires_grad_() for n in (32, 32))
    w1, w2 = torch.zeros(2, 32, 32, **bf16), torch.full((2, 32, 16), 1 / 32, **bf16)
    ids = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
    index = build_index(ids, torch.ones(rows, 1, device="cuda"), first=0, num_local=2)
    inp = ExpertInput(Rows(torch.zeros(rows, 32, **bf16)), index, None)
    y = experts(inp, (w1, b1), (w2, b2), BASE)
    y.backward(torch.ones_like(y))
    assert b1.grad is not None and b2.grad is not None
    slope = torch.tensor(1.0).sigmoid()  # d silu(1) * 1, then silu(1)
    expected = rows * torch.stack([slope + slope * (1 - slope), slope]).repeat_interleave(16)
    torch.testing.assert_close(b1.grad[0].float().cpu(), expected, rtol=2**-6, atol=0)
    assert (b2.grad[0] == rows).all() and not b1.grad[1].any() and not b2.grad[1].any()


@pytest.mark.gpu
def test_rows_without_a_choice_may_be_nan(installed: None) -> None:
    config, device = GPU_CONFIG, "cuda"
    ids, weights, how = routing_case("some dropped", 300, config)
    module = make_experts(config, config.num_experts).to(device, torch.bfloat16)
    x = torch.randn(300, config.dim, device=device, dtype=torch.bfloat16)
    x[4] = float("nan")  # all its choices are dropped
    x.requires_grad_()
    index = build_index(ids.to(device), weights.to(device), **how)
    inp = ExpertInput(Rows(x), index, None)
    y = experts(inp, (module.w1, None), (module.w2, None), config)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and module.w1.grad is not None and module.w2.grad is not None
    for t in (y, x.grad, module.w1.grad, module.w2.grad):
        assert t.isfinite().all()
    assert not y[4].any() and not x.grad[4].any()


@pytest.mark.gpu
def test_repeats_are_bit_identical(installed: None) -> None:
    routing = routing_case("random", 300, GPU_BIASES)
    options = dict(who="te", dtype=torch.bfloat16, device="cuda")
    first, second = (run(GPU_BIASES, routing, **options) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.gpu
def test_one_host_sync(installed: None) -> None:
    config, device = GPU_CONFIG, "cuda"
    ids, weights, how = routing_case("random", 300, config)
    module = make_experts(config, config.num_experts).to(device, torch.bfloat16)
    x = torch.randn(300, config.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    index = build_index(ids.to(device), weights.to(device), **how)
    inp = ExpertInput(Rows(x), index, None)
    grad = torch.randn_like(x)
    experts(inp, (module.w1, None), (module.w2, None), config).backward(grad)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = experts(inp, (module.w1, None), (module.w2, None), config)
        torch.cuda.set_sync_debug_mode("error")
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(w.message) for w in caught) == 1
