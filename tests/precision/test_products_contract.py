import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import SINK, GradTarget
from moecore.precision.apply import make_linear_products
from tests.helpers.te_definition import te_defined
from tests.kernels.rows.microscaling_oracle import linear
from tests.moe.test_deferred_linear import Sink
from tests.precision import test_emulated, test_te
from tests.precision.plain import RECIPES, linear_and_gradients, relative_error, worst_row_error
from tests.precision.test_linear import kept_by, operands, values
from tests.precision.test_te import inputs_of

CASES = {
    **RECIPES,
    **test_emulated.RECIPES,
    **{f"te, {name}": recipe for name, recipe in test_te.RECIPES.items() if name != "delayed"},
}
KEEPS_INPUTS = ["mxfp8", "nvfp4", "te, blockwise"]
COMPILED = ["blockwise", "mxfp8", "nvfp4", "te, blockwise"]


@pytest.fixture(params=CASES)
def recipe(request: pytest.FixtureRequest) -> Iterator[Recipe]:
    with te_defined():
        yield CASES[request.param]


@pytest.mark.parametrize("name", [*RECIPES, *test_emulated.RECIPES])
def test_products_are_those_of_quantised_operands(name: str) -> None:
    recipe, (x, weight, bias, dy) = CASES[name], operands(K=160, N=96)
    define = linear if recipe.is_emulated else linear_and_gradients
    y, dx, dweight = define(x.detach(), weight.detach(), dy, recipe)
    truth = y + bias.detach().double(), dx, dweight, dy.double().sum(0)
    # Transformed values of two ways to add may round to different numbers of E2M1 at a tie.
    bounds = (1e-6, 1e-6, 1e-2 if recipe.is_emulated and recipe.hadamard else 1e-6, 1e-6)
    found = values(make_linear_products(recipe), x, weight, bias, dy=dy)
    for ours, wanted, bound in zip(found, truth, bounds, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, wanted) < bound and worst_row_error(ours, wanted) < 10 * bound


@pytest.mark.parametrize("T", [0, 65])
def test_any_number_of_tokens_in_any_shape(recipe: Recipe, T: int) -> None:
    x, weight, bias, dy = inputs_of(recipe, T=2 * T)
    products = make_linear_products(recipe)
    flat = values(products, x, weight, bias, dy=dy)
    deep = values(products, x.view(2, T, 96), weight, bias, dy=dy.view(2, T, 160))
    assert deep[0].shape == (2, T, 160) and deep[1].shape == (2, T, 96)
    for got, truth in zip(deep, flat, strict=True):
        assert torch.equal(got.reshape(truth.shape), truth) and got.isfinite().all()


@pytest.mark.parametrize(
    "recipe",
    ["blockwise", "tensorwise", "mxfp8", "nearest", "te, blockwise", "te, tensorwise", "te, mxfp8"],
    indirect=True,
)
def test_dtypes(recipe: Recipe) -> None:
    x, weight, bias, dy = operands(K=96)
    products = make_linear_products(recipe)
    for dtype in (torch.bfloat16, torch.float16):
        dy16 = (dy * 1e4).to(dtype)
        found = values(products, x.to(dtype), weight.to(dtype), bias, dy=dy16)
        assert [t.dtype for t in found] == [dtype] * 3 + [torch.float32]
        wide = (x.to(dtype).float(), weight.to(dtype).float(), bias)
        for got, wanted in zip(found, values(products, *wide, dy=dy16.float()), strict=True):
            assert relative_error(got, wanted.double()) < 2.0**-8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = products(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy.bfloat16())
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(y, products(x, weight).bfloat16())  # summed in fp32


@pytest.mark.parametrize("recipe", KEEPS_INPUTS, indirect=True)
def test_backward_keeps_only_the_operands_of_its_gradients(recipe: Recipe) -> None:
    x, weight, _, dy = operands(K=96)
    products = make_linear_products(recipe)
    whole = values(products, x, weight, dy=dy)
    y, kept = kept_by(products, x, weight.detach())
    assert [t.data_ptr() for t in kept] == [weight.data_ptr()]
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], whole[1])
    y, kept = kept_by(products, x.detach(), weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    assert torch.equal(torch.autograd.grad(y, weight, dy)[0], whole[2])


def test_repeats_copies_and_checkpoints_have_the_same_bits(recipe: Recipe) -> None:
    *leaves, dy = inputs_of(recipe)
    products = make_linear_products(recipe)
    whole = values(products, *leaves, dy=dy)

    def again(*leaves: Tensor) -> Tensor:
        return checkpoint(products, *leaves, use_reentrant=False)  # type: ignore[no-any-return]

    for make in (products, copy.deepcopy(products), again):
        assert all(map(torch.equal, values(make, *leaves, dy=dy), whole))


@pytest.mark.parametrize("recipe", COMPILED, indirect=True)
def test_compiled_code_has_the_same_bits(recipe: Recipe) -> None:
    torch._dynamo.reset()
    *leaves, dy = inputs_of(recipe)
    products = make_linear_products(recipe)
    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    found, expected = (values(make, *leaves, dy=dy) for make in (compiled, products))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recipe", ["blockwise", *KEEPS_INPUTS], indirect=True)
def test_a_sink_may_defer_the_gradient_of_a_weight(recipe: Recipe) -> None:
    x, weight, _, dy = operands(K=96)
    expected = values(make_linear_products(recipe), x, weight, dy=dy)[2]
    sink = Sink(defers=True)
    parameter = nn.Parameter(weight.detach())
    setattr(parameter, SINK, lambda shape: sink)
    products = make_linear_products(recipe)
    products.defers = True
    products(x.detach(), parameter).backward(dy)
    assert parameter.grad is None
    ((compute, given),) = sink.kept
    out = torch.ones_like(expected)
    compute(*given, GradTarget(out=out, accumulate=True))
    torch.testing.assert_close(out, expected + 1)
