"""What the experts' products of every recipe keep, whoever multiplies.

Values and gradients are those of an oracle in fp64, every way of keeping has the same bits, and
what rows of no expert hold reaches nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertWeights, UnsummedInput
from moecore.kernels.experts.products import quantise_matrices
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows
from moecore.kernels.rows.record import Rows
from tests.helpers import te_definition
from tests.kernels.experts import test_emulated_products as emulated
from tests.kernels.experts import test_fp8_products as blockwise
from tests.kernels.experts import test_scaled_products as scaled
from tests.kernels.experts import test_te_products as te
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.kernels.experts.test_fp8_products import OUTPUTS, apply, check, gradient_of, run
from tests.moe.fp8_reference import Result

Leaves = dict[str, Tensor]


def of_blocks(leaves: Leaves, ids: Tensor, recipe: Recipe, kind: str) -> Result:
    hidden = "wide" if recipe.keep_hidden == "wide" else "fp8"
    how = dict(power_of_two=recipe.power_of_two, keep_hidden=hidden)
    return blockwise.oracle(leaves, ids, kind, **how)


def of_rows(leaves: Leaves, ids: Tensor, recipe: Recipe, kind: str) -> Result:
    how = dict(kind=kind, power_of_two=recipe.power_of_two)
    return scaled.oracle(leaves, ids, recipe.scaling, **how)


@dataclass(frozen=True)
class Case:
    """A recipe with its oracle, the sizes that it takes, and the bound of relative errors.

    Only the order of sums differs. Where that moves a value over a tie, it moves by one step of its
    format; of one row an element that does so is up to a step of 1/8 of E4M3.
    """

    recipe: Recipe
    oracle: Callable[[Leaves, Tensor, Recipe, str], Result]
    sizes: dict[str, Any]
    bound: float = 1e-3
    dtype: torch.dtype = torch.float32

    def make(self, kind: str = "swiglu", **sizes: int) -> tuple[Leaves, Tensor]:
        return make(kind, **self.sizes | sizes, dtype=self.dtype)

    def options(self, kind: str = "swiglu", **more: Any) -> ExpertMLPOptions:
        products: Any = "te" if self.recipe.backend == "te" else "triton"
        activation = ActivationOptions(kind=kind)
        return ExpertMLPOptions(
            activation=activation, products=products, recipe=self.recipe, **more
        )

    def index(self, ids: Tensor, weights: Tensor, **more: Any) -> ExpertIndex:
        return rows_of(ids, weights, 5, row_multiple=self.recipe.row_multiple, **more)


CASES = {
    "blockwise": Case(Recipe(), of_blocks, blockwise.SIZES),
    "blockwise, fp32 scales": Case(Recipe(power_of_two=False), of_blocks, blockwise.SIZES),
    "blockwise, hidden wide": Case(Recipe(keep_hidden="wide"), of_blocks, blockwise.SIZES),
    "rowwise": Case(Recipe(scaling="rowwise"), of_rows, scaled.SIZES),
    "rowwise, fp32 scales": Case(
        Recipe(scaling="rowwise", power_of_two=False), of_rows, scaled.SIZES
    ),
    "tensorwise": Case(Recipe(scaling="tensorwise"), of_rows, scaled.SIZES),
    **{
        name: Case(recipe, emulated.oracle, emulated.SIZES, emulated.BOUNDS[recipe.scaling])
        for name, recipe in emulated.RECIPES.items()
    },
    **{
        f"{name} by te": Case(
            recipe,
            te.oracle,
            te.sizes_of(recipe),
            te.bound_of(recipe),
            te.DTYPES.get(recipe.scaling, torch.float32),
        )
        for name, recipe in te.RECIPES.items()
    },
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = CASES[request.param]
    with te_definition.te_defined() if case.recipe.backend == "te" else nullcontext():
        yield case


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_equals_the_oracle(case: Case, kind: str) -> None:
    leaves, ids = case.make(kind)
    found = run(leaves, ids, case.options(kind))
    check(found, case.oracle(leaves, ids, case.recipe, kind), case.bound)


@pytest.mark.parametrize("S", [0, 1])
def test_few_rows(case: Case, S: int) -> None:
    leaves, ids = case.make(S=S)
    found = run(leaves, ids, case.options())
    if S:
        truth = case.oracle(leaves, ids, case.recipe, "swiglu")
        check(found, truth, max(case.bound, 1 / 32 if case.recipe.backend == "te" else 0))
    else:
        assert not any(found[n].any() for n in OUTPUTS)


def test_repeats_and_all_ways_of_keeping_give_the_same_bits(case: Case) -> None:
    leaves, ids = case.make()
    expected = run(leaves, ids, case.options())
    for options in (case.options(), case.options(saves_h=False)):
        found = run(leaves, ids, options)
        assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS)
    if case.recipe.backend == "te":  # which quantises for itself
        return
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    pair = tuple(quantise_matrices(leaves[n], case.recipe) for n in ("w1", "w2"))
    index = case.index(ids, leaves["weights"])
    y = expert_mlp(Rows(leaves["x"]), replace(weights, quantised=pair), index, case.options())
    y.backward(gradient_of(y))
    assert all(torch.equal(leaves[n].grad, expected[n]) for n in NAMES)  # type: ignore[arg-type]


@pytest.mark.parametrize("filler", [torch.nan, 1e30])
def test_rows_past_the_last_one_and_padding_may_hold_anything(case: Case, filler: float) -> None:
    """An index longer than its rows, and a gradient of any numbers there."""
    leaves, ids = case.make()
    expected = run(leaves, ids, case.options())
    index = case.index(ids, leaves["weights"], max_pairs=200)
    R, D = index.row_ids_R.numel(), leaves["x"].shape[1]
    grad_handle_RD = leaves["x"].new_empty(1).expand(R, D).requires_grad_()
    y_RD = apply(leaves, index, case.options(), unsummed=UnsummedInput(grad_handle_RD))
    where = (index.row_ids_R, index.slots_SK, index.num_rows)
    assert torch.equal(sum_rows(y_RD.detach(), *where), expected["y"])
    dy_RD = torch.full_like(y_RD, filler)
    slots = index.slots_SK[index.slots_SK >= 0].long()
    dy_RD[slots] = gradient_of(leaves["x"])[index.row_ids_R[slots].long()]
    y_RD.backward(dy_RD)
    assert leaves["x"].grad is None and grad_handle_RD.grad is not None
    assert torch.equal(sum_rows(grad_handle_RD.grad, *where), expected["x"])
    for name in ("w1", "w2", "weights"):
        assert torch.equal(leaves[name].grad, expected[name]), name  # type: ignore[arg-type]


# Of "tensorwise" one scale is of all rows, so every row has the infinity.
@pytest.mark.parametrize("case", [name for name in CASES if name != "tensorwise"], indirect=True)
def test_an_infinity_reaches_its_tokens_and_its_expert_alone(case: Case) -> None:
    """Of source row 0, whose number is that of padding."""
    leaves, ids = case.make()
    expected = run(leaves, ids, case.options())
    bad = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    with torch.no_grad():
        bad["x"][0, 7] = torch.inf
    found = run(bad, ids, case.options())
    assert not found["y"][0].isfinite().all() and found["y"][1:].isfinite().all()
    if case.recipe.scaling != "tensorwise":
        assert torch.equal(found["y"][1:], expected["y"][1:])
    spared = [i for i in range(5) if i not in ids[0].tolist()]
    assert spared and all(torch.equal(found["w1"][i], expected["w1"][i]) for i in spared)


@pytest.mark.parametrize("frozen", [("w1",), ("w2",), ("x",), ("weights", "x", "w1")], ids=str)
def test_frozen_inputs(case: Case, frozen: tuple[str, ...]) -> None:
    leaves, ids = case.make()
    whole = run(leaves, ids, case.options())
    for name in frozen:
        leaves[name].requires_grad_(False)
    part = run(leaves, ids, case.options())
    assert part.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(grad, whole[name]) for name, grad in part.items())


@pytest.mark.parametrize("name", [name for name in CASES if "te" not in name.split()])
def test_compiles_to_the_same_bits(name: str) -> None:
    torch._dynamo.reset()  # whose limit of recompilations is of one function
    case = CASES[name]
    leaves, ids = case.make()

    def block(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        tensors = {"x": x, "w1": w1, "w2": w2}
        return apply(tensors, case.index(ids, weights), case.options())

    results = []
    for f in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        args = [leaves[n].detach().clone().requires_grad_() for n in NAMES]
        y = f(*args)
        y.backward(gradient_of(y))
        results.append([y, *(a.grad for a in args)])
    assert all(torch.equal(eager, other) for eager, other in zip(*results, strict=True))
