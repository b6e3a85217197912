"""Experts in MXFP8 and NVFP4: values, gradients, what rows of no expert may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import launches_on_meta
from moecore.kernels.experts.contract import (
    ExpertMLPOptions,
    ExpertSpec,
    ExpertWeights,
    UnsummedInput,
)
from moecore.kernels.experts.products import products_problem, quantise_matrices
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.move import sum_rows
from moecore.kernels.rows.packed import pack_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.grids import beside
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.kernels.experts.test_fp8_products import OUTPUTS, apply, check, gradient_of, run
from tests.kernels.rows.microscaling_oracle import experts
from tests.moe.fp8_reference import Result

SIZES: dict[str, Any] = {"S": 43, "D": 64, "F": 96}
RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "nvfp4, fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
    "nvfp4, no transform": Recipe(scaling="nvfp4", hadamard=False),
    "nvfp4, nearest": Recipe(scaling="nvfp4", stochastic_rounding=False),
}
BOTH = [RECIPES["mxfp8"], RECIPES["nvfp4"]]
both = pytest.mark.parametrize("recipe", BOTH, ids=["mxfp8", "nvfp4"])


def options_of(recipe: Recipe, kind: str = "swiglu", **more: Any) -> ExpertMLPOptions:
    activation = ActivationOptions(kind=kind)
    return ExpertMLPOptions(activation=activation, products="triton", recipe=recipe, **more)


def oracle(leaves: dict[str, Tensor], ids: Tensor, recipe: Recipe, kind: str) -> Result:
    plain = {n: t.detach() for n, t in leaves.items()}
    where = (ids, plain["weights"], gradient_of(plain["x"]))
    return experts(plain["x"], plain["w1"], plain["w2"], *where, recipe=recipe, kind=kind)


# Only the order of sums differs. Where that moves a value over a tie it goes to the next number, of
# E2M1 up to a third of itself; where it moves bits that are drawn from, to either neighbour.
BOUNDS = {"mxfp8": 1e-3, "nvfp4": 5e-3}


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_equals_the_oracle(recipe: Recipe, kind: str) -> None:
    leaves, ids = make(kind, **SIZES)
    found = run(leaves, ids, options_of(recipe, kind))
    check(found, oracle(leaves, ids, recipe, kind), BOUNDS[recipe.scaling])


@both
def test_more_than_a_block_of_one_expert_and_bf16(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", S=300, D=64, F=96, e=3, K=1, dtype=torch.bfloat16)
    ids = torch.where(ids >= 0, 1, -1).to(torch.int32)
    found = run(leaves, ids, options_of(recipe))
    check(found, oracle(leaves, ids, recipe, "swiglu"), 2 * BOUNDS[recipe.scaling])
    assert {found[n].dtype for n in ("y", "x", "w1", "w2")} == {torch.bfloat16}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_repeats_and_all_ways_of_keeping_give_the_same_bits(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES)
    expected = run(leaves, ids, options_of(recipe))
    for options in (options_of(recipe), options_of(recipe, keep_h=False)):
        found = run(leaves, ids, options)
        assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS)
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    pair = tuple(quantise_matrices(leaves[n], recipe) for n in ("w1", "w2"))
    index = rows_of(ids, leaves["weights"], 5)
    y = expert_mlp(Rows(leaves["x"]), replace(weights, quantised=pair), index, options_of(recipe))
    y.backward(gradient_of(y))
    assert all(torch.equal(leaves[n].grad, expected[n]) for n in NAMES)  # type: ignore[arg-type]


def test_each_option_changes_gradients_alone() -> None:
    leaves, ids = make("swiglu", **SIZES)
    whole = run(leaves, ids, options_of(RECIPES["nvfp4"]))
    untransformed = run(leaves, ids, options_of(RECIPES["nvfp4, no transform"]))
    nearest = run(leaves, ids, options_of(RECIPES["nvfp4, nearest"]))
    for name in OUTPUTS:
        changed = [not torch.equal(whole[name], found[name]) for found in (untransformed, nearest)]
        expected = {"y": [False, False], "w1": [True, True], "w2": [True, True]}
        # Input gradients are not transformed, and have been rounded at random.
        assert changed == expected.get(name, [False, True]), name


@both
@pytest.mark.parametrize("S", [0, 1])
def test_few_rows(S: int, recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES | {"S": S})
    found = run(leaves, ids, options_of(recipe))
    if S:
        check(found, oracle(leaves, ids, recipe, "swiglu"), BOUNDS[recipe.scaling])
    else:
        assert not any(found[n].any() for n in OUTPUTS)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_rows_past_the_last_one_may_hold_anything(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES)
    expected = run(leaves, ids, options_of(recipe))
    for filler in (torch.nan, 1e30):
        for leaf in leaves.values():
            leaf.grad = None
        index = build_index(ids, leaves["weights"], first=0, num_local=5, length=200)
        used = int(index.num_rows)
        handle_RD = leaves["x"].new_empty(1).expand(200, 64).requires_grad_()
        y_RD = apply(leaves, index, options_of(recipe), unsummed=UnsummedInput(handle_RD))
        where = (index.row_ids_R, index.slots_SK, index.num_rows)
        assert torch.equal(sum_rows(y_RD.detach(), *where), expected["y"])
        dy_RD = torch.full_like(y_RD, filler)
        dy_RD[:used] = gradient_of(leaves["x"])[index.row_ids_R[:used]]
        y_RD.backward(dy_RD)
        assert handle_RD.grad is not None
        assert torch.equal(sum_rows(handle_RD.grad, *where), expected["x"])
        for name in ("w1", "w2", "weights"):
            assert torch.equal(leaves[name].grad, expected[name]), name  # type: ignore[arg-type]


@both
def test_an_infinity_reaches_its_tokens_and_its_expert_alone(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES)
    expected = run(leaves, ids, options_of(recipe))
    bad = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    with torch.no_grad():
        bad["x"][4, 7] = torch.inf
    found = run(bad, ids, options_of(recipe))
    others = torch.arange(43) != 4
    assert torch.equal(found["y"][others], expected["y"][others])
    assert not found["y"][4].isfinite().all()
    spared = [i for i in range(5) if i not in ids[4].tolist()]
    assert spared
    assert all(torch.equal(found["w1"][i], expected["w1"][i]) for i in spared)


@both
@pytest.mark.parametrize("frozen", [("w1",), ("w2",), ("x",), ("weights", "x", "w1")], ids=str)
def test_frozen_inputs(frozen: tuple[str, ...], recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES)
    whole = run(leaves, ids, options_of(recipe))
    for name in frozen:
        leaves[name].requires_grad_(False)
    part = run(leaves, ids, options_of(recipe))
    assert part.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(grad, whole[name]) for name, grad in part.items())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_compiles_to_the_same_bits(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", **SIZES)

    def block(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        return apply({"x": x, "w1": w1, "w2": w2}, rows_of(ids, weights, 5), options_of(recipe))

    results = []
    for f in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        args = [leaves[n].detach().clone().requires_grad_() for n in NAMES]
        y = f(*args)
        y.backward(gradient_of(y))
        results.append([y, *(a.grad for a in args)])
    assert all(torch.equal(eager, other) for eager, other in zip(*results, strict=True))


def test_rows_that_travelled_as_fp8_are_widened() -> None:
    leaves, ids = make("swiglu", S=23, D=128, F=96)
    packed = pack_rows(leaves["x"].detach())
    rows = Rows.from_bytes(packed, 128, torch.float32)
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    index = rows_of(ids, leaves["weights"], 5)
    for recipe in BOTH:
        results = []
        for given in (rows, Rows(rows.widen())):
            handle_RD = leaves["x"].new_empty(1).expand(index.row_ids_R.shape[0], 128)
            unsummed = UnsummedInput(handle_RD.requires_grad_())
            results.append(expert_mlp(given, weights, index, options_of(recipe), unsummed=unsummed))
        used = int(index.num_rows)
        assert torch.equal(results[0][:used], results[1][:used])


@pytest.mark.parametrize(
    ("recipe", "sizes", "message"),
    [
        (BOTH[0], (64, 48), r"hidden_dim / etp \(48\) must be a multiple of 32"),
        (BOTH[0], (48, 64), r"MoEConfig.dim \(48\) must be a multiple of 32"),
        (BOTH[1], (64, 24), r"hidden_dim / etp \(24\) must be a multiple of 16"),
    ],
)
def test_blocks_lie_within_a_rank(recipe: Recipe, sizes: Any, message: str) -> None:
    dim, hidden_dim = sizes
    spec = ExpertSpec(gated=True, dim=dim, hidden_dim=hidden_dim, recipe=recipe)
    with pytest.raises(ValueError, match=message):
        raise ValueError(products_problem("triton", spec))
    assert products_problem("triton", replace(spec, dim=64, hidden_dim=64)) is None


@both
def test_products_are_kernels_of_bf16(recipe: Recipe) -> None:
    """What a forward and backward launch on Hopper; nothing reads the device on the host."""
    leaves, ids = make("swiglu", S=40, D=128, F=96, dtype=torch.bfloat16)
    index = rows_of(ids, leaves["weights"].detach(), 5)
    on_meta = {n: t.detach().to("meta").requires_grad_() for n, t in leaves.items()}
    index = ExpertIndex(*(t.detach().to("meta") for t in index))
    names: list[str] = []
    with launches_on_meta(lambda name, _: names.append(name)):
        y = apply(on_meta, index, options_of(recipe))
        y.backward(torch.empty_like(y))
    products = [name for name in names if "gemm" in name or "wgrad" in name]
    assert sorted(set(products)) == ["_grouped_gemm_fwd_kernel", "sm90_bf16_grouped_wgrad_kernel"]
    assert len(products) == 4 + 2
    assert on_meta["w1"].grad is not None and on_meta["w1"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", beside(RECIPES, [name for name in RECIPES if "," in name]))
def test_kernels_change_no_bit(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantisers are what differs between the two; one expert has no rows."""
    on_gpu, recipe = device == "cuda", RECIPES[name]
    sizes = dict(S=700, D=256, F=128) if on_gpu else dict(S=11, D=32, F=32)
    leaves, ids = make("swiglu", **sizes, dtype=torch.bfloat16 if on_gpu else torch.float32)
    ids[ids == 2] = -1
    leaves = {n: t.detach().to(device).requires_grad_() for n, t in leaves.items()}
    found = run(leaves, ids.to(device), options_of(recipe))
    monkeypatch.setattr(microscaled, "has_kernel", lambda _: False)
    expected = run(leaves, ids.to(device), options_of(recipe))
    assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_gpu_equals_a_cpu(recipe: Recipe) -> None:
    """Its products round to bf16, which moves some values of H over a tie, by one step."""
    leaves, ids = make("swiglu", S=700, D=256, F=128, dtype=torch.bfloat16)
    expected = run(leaves, ids, options_of(recipe))
    on_gpu = {n: t.detach().cuda().requires_grad_() for n, t in leaves.items()}
    found, again = (run(on_gpu, ids.cuda(), options_of(recipe)) for _ in range(2))
    for name in OUTPUTS:
        wrong = (found[name].cpu().float() - expected[name].float()).norm()
        assert wrong <= 10 * BOUNDS[recipe.scaling] * expected[name].float().norm(), name
        assert torch.equal(found[name], again[name]), name
