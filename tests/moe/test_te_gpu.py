"""Transformer Engine itself on a GPU: its functions beside their definition, and layers by it.

Run where it is installed: `python -m pytest -m gpu tests/moe/test_te_gpu.py`.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore import parallelize_moe as parallelize
from moecore.base import transformer_engine as te
from moecore.base.options.precision import ROLES, Precision, Recipe
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.experts import Experts
from moecore.moe.records import ExpertInput
from moecore.precision.apply import make_linear_products
from moecore.train import AdamW
from tests.helpers import te_definition
from tests.helpers.te_definition import RECIPES, te_defined
from tests.helpers.waits import syncs_are_errors
from tests.kernels.experts.test_expert_mlp import make
from tests.kernels.experts.test_fp8_products import OUTPUTS, check
from tests.kernels.experts.test_te_products import options_of, oracle, run
from tests.moe.moe_cases import assert_twice_as_good
from tests.moe.test_te import decoder, train
from tests.precision.plain import relative_error
from tests.precision.test_linear import operands, values

pytestmark = pytest.mark.gpu

DELAYED = Recipe(backend="te", scaling="tensorwise", amax_history=2)
BF16, CUDA = torch.bfloat16, "cuda"
CONFIG = MoEConfig(dim=128, hidden_dim=96, num_experts=8, top_k=3)
ROUTINGS = ["random", "empty experts", "all to the last", "k equals e", "one row", "no rows"]
recipes = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    for num in (1 << 26, 1 << 20, 1 << 12):  # NaN in freed memory, where unwritten outputs find it
        torch.full((num,), float("nan"), device=CUDA)


def recipe_here(name: str) -> Recipe:
    """Return a recipe; skip where this GPU has no products for it."""
    problem = te.find_recipe_problem(RECIPES[name], torch.device(CUDA))
    if problem is not None:
        pytest.skip(problem)
    return RECIPES[name]


PYTORCH = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    *(name for name in te.AVAILABLE.values()),
]
PRODUCTS = ["general_gemm", "general_grouped_gemm"]


@pytest.mark.parametrize("name", [*PYTORCH, *PRODUCTS])
def test_names_take_what_their_definitions_take(name: str) -> None:
    found = te.import_transformer_engine()
    theirs = getattr(found.products if name in PRODUCTS else found.pytorch, name)
    ours = list(inspect.signature(getattr(te_definition, name)).parameters)
    parameters = list(inspect.signature(theirs).parameters)
    assert set(ours) <= set(parameters) and ours[:2] == parameters[:2]


def test_names_without_signatures() -> None:
    extension = te.import_transformer_engine().extension
    for argument in ("tensor", "split_sections", "quantizer_list"):
        assert argument in extension.split_quantize.__doc__
    for dtype in te_definition.DType:
        assert hasattr(extension.DType, dtype.name)


def defined(compute: Callable[[str], Any]) -> Any:
    """Return what the definitions compute on the CPU."""
    te._make_block_quantizer.cache_clear()
    with te_defined():
        return compute("cpu")


def of_experts(recipe, splits: list[int], t: Tensor, operand: Any, over_rows: bool) -> Any:
    """Return the matrices of three experts, or rows of each, as products take them."""
    parts = [t.shape[1]] * 3 if t.ndim == 3 else splits
    t = t.detach().reshape(-1, t.shape[-1])
    if recipe is None:
        return t.split(parts)
    return te.quantise_experts(t, parts, recipe, operand, over_rows=over_rows)


def products(recipe: Recipe | None, device: str) -> dict[str, Tensor]:
    """The three products of a linear, alone and of experts with 0, 128 and 256 rows."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(shape, generator=generator).to(BF16)  # noqa: E731
    x, dy = drawn(384, 256).to(device), drawn(384, 384).to(device)
    w_eNK = drawn(3, 384, 256).to(device)
    splits, found = [0, 128, 256], {}

    def one(t: Tensor, operand: Any, over_rows: bool) -> Any:
        if recipe is None:
            return t
        return te.quantise(t, recipe, operand, over_rows=over_rows)

    many = partial(of_experts, recipe, splits)
    w, rows, both = w_eNK[0], False, True
    found["y"] = te.multiply_quantised(
        one(w, "weight", rows), one(x, "activation", rows), "TN", BF16
    )
    found["dx"] = te.multiply_quantised(
        one(w, "weight", both), one(dy, "gradient", rows), "NN", BF16
    )
    for dtype in (BF16, torch.float32):
        pair = (one(x, "activation", both), one(dy, "gradient", both))
        found[f"dw {dtype}"] = te.multiply_quantised(*pair, "NT", dtype)
    for key, layout, parts, columns in (
        ("y of experts", "TN", many(x, "activation", rows), 384),
        ("dx of experts", "NN", many(dy, "gradient", rows), 256),
    ):
        found[key] = torch.full((384, columns), torch.nan, dtype=BF16, device=device)
        matrices = many(w_eNK, "weight", layout == "NN")
        te.multiply_quantised_experts(matrices, parts, layout, [found[key]], splits)
    for dtype in (BF16, torch.float32):
        for adds in (False, True):
            out = torch.ones(3, 384, 256, dtype=dtype, device=device)
            pair = (many(x, "activation", both), many(dy, "gradient", both))
            te.multiply_quantised_experts(*pair, "NT", list(out.unbind()), splits, accumulates=adds)
            found[f"dw of experts {dtype} {adds}"] = out
    return found


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_products_are_those_of_the_definition(name: str | None) -> None:
    recipe = None if name is None else recipe_here(name)
    found, expected = products(recipe, CUDA), defined(lambda device: products(recipe, device))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # One rounding to bf16 apart; in FP8 a value here and there lies over a tie.
        assert relative_error(found[key].cpu(), value.double()) < 2**-8, key


def test_a_scale_and_the_largest_magnitude() -> None:
    recipe, x = recipe_here("tensorwise"), torch.randn(64, 128, device=CUDA, dtype=BF16)
    w, seen, scale = x.clone(), torch.zeros(1, device=CUDA), torch.full((1,), 64.0, device=CUDA)
    how: Any = dict(over_rows=False, scale=scale)
    a = te.quantise(w, recipe, "weight", **how)
    b = te.quantise(x, recipe, "activation", **how, amax_out=seen)
    assert seen.item() == x.abs().max().item()
    found = te.multiply_quantised(a, b, "TN", torch.float32)
    rounded = (x.float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 64
    # Hopper's FP8 tensor cores add products with 13 bits behind the largest one's first.
    assert relative_error(found, (rounded.double() @ rounded.double().T)) < 1e-3
    largest, x[3, 5] = seen.clone(), torch.nan
    te.quantise(x, recipe, "activation", **how, amax_out=seen)
    assert torch.equal(seen, largest)


@pytest.mark.parametrize("name", [None, "blockwise"])
def test_products_are_those_of_its_own_grouped_linear(name: str | None) -> None:
    """Bit for bit: our recipe is Transformer Engine's."""
    recipe = None if name is None else recipe_here(name)
    pytorch = te.import_transformer_engine().pytorch
    from transformer_engine.common.recipe import Float8BlockScaling

    splits = [32, 0, 96]
    module = pytorch.GroupedLinear(3, 256, 384, bias=False, params_dtype=BF16, device=CUDA)
    w_eNK = torch.stack([getattr(module, f"weight{i}").detach() for i in range(3)])
    x = torch.randn(128, 256, device=CUDA, dtype=BF16, requires_grad=True)
    dy = torch.randn(128, 384, device=CUDA, dtype=BF16)
    own = None if recipe is None else Float8BlockScaling()
    with pytorch.autocast(enabled=recipe is not None, recipe=own):
        y = module(x, splits)
    y.backward(dy)

    many = partial(of_experts, recipe, splits)
    found = torch.empty_like(y)
    matrices, rows = many(w_eNK, "weight", False), many(x, "activation", False)
    te.multiply_quantised_experts(matrices, rows, "TN", [found], splits)
    dx = torch.empty_like(x)
    matrices, rows = many(w_eNK, "weight", True), many(dy, "gradient", False)
    te.multiply_quantised_experts(matrices, rows, "NN", [dx], splits)
    dw = torch.empty_like(w_eNK)
    pair = (many(x, "activation", True), many(dy, "gradient", True))
    te.multiply_quantised_experts(*pair, "NT", list(dw.unbind()), splits)
    assert torch.equal(found, y) and x.grad is not None and torch.equal(dx, x.grad)
    for i in range(3):
        assert torch.equal(dw[i], getattr(module, f"weight{i}").grad)


def routing_case(name: str, config: MoEConfig) -> tuple[Tensor, Tensor]:
    E, K = config.num_experts, config.top_k
    S = {"one row": 1, "no rows": 0}.get(name, 300)
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(S, E, generator=generator).argsort(1)
    ids = order if name == "k equals e" else order[:, :K]
    if name == "empty experts":
        ids = torch.tensor([[0, 5]]).repeat(S, 1)
    elif name == "all to the last":
        ids = torch.full((S, 1), E - 1)
    weights = torch.rand(ids.shape, generator=generator)
    weights[3:4, 0] = 0.0  # a weight of zero still has a gradient
    return ids.int(), weights


def experts_run(name: str, backend: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """y and every gradient; all that goes in is rounded to bf16 first."""
    ids, weights = routing_case(name, CONFIG)
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(BF16).to(CUDA, dtype)

    experts = Experts(CONFIG, backend=backend, device=CUDA, dtype=dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(drawn(*parameter.shape) * 0.2)
    x, dy = drawn(ids.shape[0], CONFIG.dim).requires_grad_(), drawn(ids.shape[0], CONFIG.dim)
    weights = weights.to(CUDA).requires_grad_()
    index = build_index(ids.to(CUDA), weights, first_expert=0, num_local_experts=CONFIG.num_experts)
    y = experts(ExpertInput(Rows(x), index, None))
    y.backward(dy)
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


@pytest.mark.parametrize("name", ROUTINGS)
def test_bf16_is_at_most_twice_as_far_from_fp32_as_torch(name: str) -> None:
    truth = experts_run(name, "sequential", torch.float32)
    plain, ours = experts_run(name, "torch", BF16), experts_run(name, "te", BF16)
    assert ours.keys() == truth.keys()
    for key, value in truth.items():
        assert ours[key].shape == value.shape and ours[key].dtype == plain[key].dtype, key
        if value.numel():
            assert_twice_as_good(ours[key], plain[key], value, key)


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@recipes
def test_experts_equal_the_oracle(name: str, kind: str) -> None:
    """As near to fp32 without quantisation as the oracle is, and near to the oracle.

    Sums of 13 bits move roundings of H, dA, A and dH to bf16, and with them values over a tie of
    FP8, a step of 2^-4 each.
    """
    recipe = recipe_here(name)
    leaves, ids = make(kind, S=300, D=256, F=256, dtype=BF16)
    on_gpu = {n: t.detach().to(CUDA).requires_grad_() for n, t in leaves.items()}
    found = run(on_gpu, ids.to(CUDA), options_of(recipe, kind))
    truth = oracle(leaves, ids, recipe, kind)
    check({n: t.cpu() for n, t in found.items()}, truth, 2**-6, worst=2**-4)
    wide = {n: t.detach().float().requires_grad_() for n, t in leaves.items()}
    exact = run(wide, ids, options_of(None, kind, products="torch"))
    for key in OUTPUTS:
        ours, theirs = (
            (t.cpu().double() - exact[key]).reshape(-1, exact[key].shape[-1]).norm(dim=1)
            for t in (found[key], getattr(truth, key))
        )
        assert ours.norm() <= 1.1 * theirs.norm() and ours.max() <= 1.5 * theirs.max(), key
    assert {found[n].dtype for n in ("y", "x", "w1", "w2")} == {BF16}


@pytest.mark.parametrize("name", [None, "blockwise"])
def test_one_host_sync(name: str | None) -> None:
    recipe = None if name is None else recipe_here(name)
    torch.manual_seed(0)
    config = MoEConfig(dim=128, hidden_dim=128, num_experts=8, top_k=3)
    layer = MoELayer(config, device=CUDA, dtype=BF16)
    layer.get_part("experts").set_backend("te", recipe=recipe)
    x = torch.randn(200, 128, device=CUDA, dtype=BF16, requires_grad=True)
    grad = torch.randn_like(x)
    layer(x).backward(grad)
    torch.cuda.synchronize()
    with syncs_are_errors():
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = layer(x)
        torch.cuda.set_sync_debug_mode("error")
        y.backward(grad)
    assert sum("synchronizing" in str(w.message) for w in caught) == 1


def test_what_this_gpu_lacks_is_refused_in_one_line() -> None:
    device = torch.device(CUDA)
    for recipe in RECIPES.values():
        problem = te.find_recipe_problem(recipe, device)
        assert problem is None or ("needs (" in problem and "\n" not in problem)
    with pytest.raises(ValueError, match=r"dtype of the experts \(torch.float32\) must be"):
        experts_run("random", "te", torch.float32)
    message = te.find_recipe_problem(None, torch.device("cpu"))
    assert message == "device (cpu) must be cuda for Transformer Engine: move the model"


LINEARS = [(name, (T, 256, 384)) for name in [*RECIPES, "delayed"] for T in (70, 512)]
LINEARS += [("blockwise", (100, 144, 176))]  # no multiples of a scale's block


@pytest.mark.parametrize(("name", "sizes"), LINEARS, ids=str)
def test_linears_are_those_of_the_definition(name: str, sizes: tuple[int, int, int]) -> None:
    recipe = DELAYED if name == "delayed" else recipe_here(name)
    found = [t.detach().to(BF16) for t in operands(**dict(zip("TKN", sizes, strict=True)))]

    def compute(device: str) -> Any:
        *leaves, dy = (t.to(device) for t in found)
        products = make_linear_products(recipe)
        got = values(products, *(t.requires_grad_() for t in leaves), dy=dy)
        seen = {} if products.history is None else products.history.current_amax
        return [t.detach().cpu() for t in (*got, *seen.values())]

    ours = compute(CUDA)
    for one, wanted in zip(ours, defined(compute), strict=True):
        assert one.dtype == wanted.dtype and relative_error(one, wanted.double()) < 2**-7


@pytest.mark.parametrize("name", [None, "blockwise", "tensorwise", "delayed"])
def test_a_model_trains_as_with_moecores_own(name: str | None) -> None:
    recipe = None
    if name == "delayed":
        recipe = DELAYED
    elif name is not None:
        recipe = recipe_here(name)
    losses = []
    for backend in ("te", "moecore"):
        how: dict[str, Any] = dict(expert_backend="te" if backend == "te" else "auto")
        if recipe is not None:
            roles: Any = ("mlp", "attention") if name == "delayed" else ROLES
            how = dict(precision=Precision(recipe=replace(recipe, backend=backend), roles=roles))
        model: nn.Module = decoder().to(BF16)
        parallelize(model, build_meshes(ParallelConfig(), CUDA), **how)
        losses.append(train(model, AdamW(model.parameters(), lr=1e-3), 3))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0][-1] < losses[0][0]
