"""The baseline through Transformer Engine against the sequential experts.

On a GPU with Transformer Engine: the 2x rule. Everywhere: the same journey with a stand-in that
keeps Transformer Engine's rules in plain PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks import layers, te_experts
from benchmarks.agreement import ROOM, ROUNDING
from benchmarks.shapes import SHAPES
from benchmarks.te_experts import TEExperts
from torch import Tensor, nn

from moecore import MoEConfig
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.experts import Experts
from moecore.moe.records import ExpertInput
from tests.moe.moe_cases import BASE, assert_twice_as_good

FP8_CONFIG = MoEConfig(dim=256, hidden_dim=128, num_experts=8, top_k=3)
GPU_CONFIG = MoEConfig(dim=128, hidden_dim=96, num_experts=8, top_k=3)
ROUTINGS = ["random", "empty experts", "all to the last", "k equals e", "padded to 16", "one row"]


def routing_case(name: str, num_rows: int, config: MoEConfig) -> tuple[Tensor, Tensor, dict]:
    """ids_SK, weights_SK and how `build_index` reads them."""
    E, K, S = config.num_experts, config.top_k, 1 if name == "one row" else num_rows
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(S, E, generator=generator).argsort(1)
    ids = order if name == "k equals e" else order[:, :K]
    how = {"first": 0, "num_local": E, "multiple": 16 if name == "padded to 16" else 1}
    if name == "empty experts":
        ids = torch.tensor([[0, 5]]).repeat(S, 1)
    elif name == "all to the last":
        ids = torch.full((S, 1), E - 1)
    weights = torch.rand(ids.shape, generator=generator)
    weights[3:4, 0] = 0.0  # a weight of zero still has a gradient
    return ids.int(), weights, how


def run(
    config: MoEConfig,
    name: str,
    *,
    who: str,
    dtype: torch.dtype,
    device: str = "cpu",
    recipe: te_experts.Recipe | None = None,
) -> dict[str, Tensor]:
    """y and every gradient; all that goes in is rounded to bf16 first."""
    ids, weights, how = routing_case(name, 300 if device == "cuda" else 10, config)
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    experts = Experts(config, backend="sequential", device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(drawn(*parameter.shape) * 0.2)
    x, dy = drawn(ids.shape[0], config.dim).requires_grad_(), drawn(ids.shape[0], config.dim)
    wide = torch.promote_types(dtype, torch.float32)
    weights = weights.to(device, wide, copy=True).requires_grad_()
    inp = ExpertInput(Rows(x), build_index(ids.to(device), weights, **how), None)
    y = (TEExperts.over(experts, recipe=recipe) if who == "te" else experts)(inp)
    y.backward(dy)
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


# --------------------------------------------------------------------------- stand-in


class GroupedLinearStandIn(nn.Module):
    """Weights by number, splits as ints, plain pointers."""

    def __init__(
        self, num: int, in_dim: int, out_dim: int, *, bias: bool, params_dtype: Any, device: str
    ) -> None:
        super().__init__()
        self.num = num
        for i in range(num):
            weight = torch.empty(out_dim, in_dim, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            setattr(self, f"bias{i}", torch.empty(0, dtype=params_dtype, device=device))

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        assert len(splits) == self.num and all(type(n) is int for n in splits)
        if StandIn.recipe is not None:
            assert all(n % 16 == 0 for n in splits)
            StandIn.quantised += 1
        assert x.shape[0] == sum(splits) > 0
        parts = []
        for i, part in enumerate(x.split(splits)):
            weight = getattr(self, f"weight{i}")
            assert weight.is_contiguous() and not weight.is_meta
            parts.append(part @ weight.T)
        return torch.cat(parts)


class StandIn:
    """What the baseline asks of Transformer Engine."""

    GroupedLinear = GroupedLinearStandIn
    recipe: str | None = None  # of the running autocast
    quantised = 0  # linears that ran in one

    class Fp8Padding(nn.Module):
        """Zeros after each expert's rows, up to a multiple."""

        def __init__(self, num: int, multiple: int) -> None:
            super().__init__()
            self.num, self.multiple = num, multiple

        def padded(self, splits: list[int]) -> list[int]:
            assert len(splits) == self.num
            return [-(-n // self.multiple) * self.multiple for n in splits]

        def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, list[int]]:
            sizes = self.padded(splits)
            pairs = zip(x.split(splits), sizes, strict=True)
            return torch.cat([nn.functional.pad(p, (0, 0, 0, n - len(p))) for p, n in pairs]), sizes

    class Fp8Unpadding(Fp8Padding):
        """The way back."""

        def forward(self, x: Tensor, splits: list[int]) -> Tensor:
            pairs = zip(x.split(self.padded(splits)), splits, strict=True)
            return torch.cat([part[:n] for part, n in pairs])

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

    @classmethod
    @contextmanager
    def autocast(cls, *, enabled: bool, recipe: str | None = None) -> Iterator[None]:
        assert enabled == (recipe is not None)
        cls.recipe = recipe
        yield
        cls.recipe = None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    te_experts._template.cache_clear()
    monkeypatch.setattr(te_experts, "_te", lambda: StandIn)
    monkeypatch.setattr(te_experts, "_scaling", lambda: "Float8BlockScaling")
    monkeypatch.setattr(StandIn, "quantised", 0)
    yield
    te_experts._template.cache_clear()


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_journey_with_a_stand_in(
    stand_in: None, name: str, recipe: te_experts.Recipe | None
) -> None:
    expected = run(BASE, name, who="sequential", dtype=torch.float64)
    found = run(BASE, name, who="te", dtype=torch.float64, recipe=recipe)
    assert StandIn.quantised == (2 if recipe else 0)
    assert found.keys() == expected.keys() == {"y", "x", "weights", "w1", "w2"}
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


def test_a_layer_with_the_baseline_trains_its_own_parameters(stand_in: None) -> None:
    layer, x_TD = layers.make_layer(SHAPES["tiny"], "learned", device=torch.device("cpu"))
    layer.float()
    own, found = layer.part("experts"), []
    for experts in (own, TEExperts.over(own)):
        layer.experts = experts
        layer.zero_grad()
        y = layer(x_TD.float())
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in own.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def index_of(offsets: list[int], slots: list[list[int]]) -> ExpertIndex:
    weights = torch.arange(offsets[-1] + 1.0)
    ids = torch.zeros(offsets[-1] + 1, dtype=torch.int32)
    slots_SK, offsets_e = (torch.tensor(n, dtype=torch.int32) for n in (slots, offsets))
    return ExpertIndex(ids, weights, slots_SK, offsets_e)


def test_worked_examples_of_mask_and_weights() -> None:
    mask, counts = te_experts.mask_and_counts(index_of([1, 3], [[0, 1], [2, -1]]))
    assert mask.tolist() == [[1, 1], [0, 1]] and counts == [1, 2]
    index = index_of([2, 4], [[0, 2], [3, -1]])
    mask, counts = te_experts.mask_and_counts(index)
    assert counts == [1, 2]
    assert te_experts.weights_of_choices(index, mask, 3).tolist() == [0.0, 2.0, 3.0]


# --------------------------------------------------------------------------- the library itself


@pytest.fixture
def installed() -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    for num in (1 << 26, 1 << 20, 1 << 12):  # NaN in freed memory, where unwritten outputs find it
        torch.full((num,), float("nan"), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_two_times_rule(installed: None, name: str) -> None:
    def of(who: str, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(GPU_CONFIG, name, who=who, dtype=dtype, device="cuda")

    truth, plain = of("sequential", torch.float32), of("sequential", torch.bfloat16)
    ours = of("te", torch.bfloat16)
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        assert ours[key].shape == value.shape and ours[key].dtype == plain[key].dtype, key
        assert_twice_as_good(ours[key], plain[key], value, key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["random", "empty experts", "one row"])
def test_a_recipe_rounds_as_fp8_does(installed: None, name: str) -> None:
    truth = run(FP8_CONFIG, name, who="sequential", dtype=torch.float32, device="cuda")
    how = dict(who="te", dtype=torch.bfloat16, device="cuda")
    ours = run(FP8_CONFIG, name, recipe="blockwise", **how)
    for key, roundings in (("y", 6), ("x", 8), ("w1", 8), ("w2", 6)):
        # A few experts may see few rows, so no row by row here.
        error = float((ours[key].float() - truth[key]).norm() / truth[key].norm())
        assert ROUNDING < error < ROOM * ROUNDING * roundings**0.5, key


@pytest.mark.gpu
def test_one_host_sync(installed: None) -> None:
    layer, x_TD = layers.make_layer(SHAPES["tiny"], "learned", device=torch.device("cuda"))
    layer.experts = TEExperts.over(layer.part("experts"))
    grad = torch.randn_like(x_TD.requires_grad_())
    layer(x_TD).backward(grad)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = layer(x_TD)
        torch.cuda.set_sync_debug_mode("error")
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(w.message) for w in caught) == 1
