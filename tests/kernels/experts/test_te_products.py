"""Experts by Transformer Engine, whose functions are defined in plain PyTorch: `te_definition.py`.

What is proven here is all around them: order, layouts, padding, what is kept, what is refused.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from moecore.kernels.common import iterate_expert_slices
from moecore.kernels.experts import te_products
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertSpec, ExpertWeights, GradTarget
from moecore.kernels.experts.products import choose_products, find_products_problem, make_products
from moecore.kernels.meta import record_launches_on_meta
from moecore.kernels.rows.activation import ActivationOptions, activate_rows
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows
from tests.helpers import te_definition
from tests.helpers.te_definition import RECIPES
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.kernels.experts.test_fp8_products import gradient_of, run
from tests.kernels.rows.microscaling_oracle import experts as experts_in_microscaling
from tests.moe.fp8_reference import Result, fp8

SIZES: dict[str, Any] = {"S": 37, "D": 256, "F": 128}
FEWER: dict[str, Any] = {"S": 37, "D": 64, "F": 32}  # for an oracle of small blocks
# What transforms reads bf16 alone.
# Only the order of sums differs. Where that moves a value over a tie, it moves by one step of its
# format. "nvfp4" is in bf16, as in test_emulated_products.py.
BOUNDS = {"nvfp4": 1e-2}
DTYPES = {"nvfp4": torch.bfloat16}


@pytest.fixture(autouse=True)
def defined() -> Iterator[None]:
    with te_definition.te_defined():
        yield


def sizes_of(recipe: Recipe) -> dict[str, Any]:
    return FEWER if recipe.scaling in ("mxfp8", "nvfp4") else SIZES


def options_of(recipe, kind="swiglu", products="te", **more) -> ExpertMLPOptions:
    activation = ActivationOptions(kind=kind)
    return ExpertMLPOptions(activation=activation, products=products, recipe=recipe, **more)


def index_of(ids: Tensor, weights: Tensor, recipe: Recipe | None) -> ExpertIndex:
    return rows_of(ids, weights, 5, row_multiple=1 if recipe is None else recipe.row_multiple)


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("S", [0, 1, 43])
def test_wide_products_are_torchs(kind: str, S: int) -> None:
    """An empty expert, dropped choices; the order of sums alone differs."""
    leaves, ids = make(kind, S=S)
    found = run(leaves, ids, options_of(None, kind))
    expected = run(leaves, ids, options_of(None, kind, "torch"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_low_rank_updates_are_added_as_torchs_products_add_them() -> None:
    leaves, ids = make("swiglu", D=32, F=32)
    found = []
    for products in ("te", "torch"):
        leaf = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
        torch.manual_seed(1)
        pairs = [torch.randn(5, *s).requires_grad_() for s in ((8, 32), (64, 8), (8, 32), (32, 8))]
        weights = ExpertWeights(w1_eCD=leaf["w1"], w2_eDF=leaf["w2"]).replace_updates(pairs)
        index = index_of(ids, leaf["weights"], None)
        y = expert_mlp(Rows(leaf["x"]), weights, index, options_of(None, products=products))
        y.backward(gradient_of(y))
        found.append([y.detach(), *(t.grad for t in (*leaf.values(), *pairs))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def quantised(x: Tensor, recipe: Recipe, over_rows: bool, is_weight: bool, fmt: str) -> Tensor:
    """Return the numbers of an operand, by another quantiser where E4M3 is rounded."""
    if recipe.scaling == "blockwise":
        block = (128, 128) if is_weight else (128, 1) if over_rows else (1, 128)
        return fp8(x, *block, recipe.power_of_two)
    if fmt == "e4m3":
        return fp8(x, *x.shape, recipe.power_of_two) if x.numel() else x.double()
    return te_definition.by_blocks(x, tuple(x.shape), recipe.power_of_two, fmt).double()


def oracle(leaves: dict[str, Tensor], ids: Tensor, recipe: Recipe, kind: str) -> Result:
    """Return the output and gradients, expert by expert and in fp64, without padding."""
    plain = {n: t.detach() for n, t in leaves.items()}
    x, w1, w2, weights = (plain[n] for n in NAMES)
    dy = gradient_of(x)
    if recipe.scaling in ("mxfp8", "nvfp4"):
        where = (x, w1, w2, ids, weights, dy)
        return experts_in_microscaling(*where, recipe=recipe, kind=kind)
    out = Result(*(torch.zeros(t.shape, dtype=torch.float64) for t in (x, x, w1, w2, weights)))

    def product(a: Tensor, b: Tensor, *, a_rows: bool, b_rows: bool, **of: Any) -> Tensor:
        first = quantised(a, recipe, a_rows, False, of.get("a_fmt", "e4m3"))
        second = quantised(b, recipe, b_rows, of.get("is_weight", False), "e4m3")
        return (first.T if a_rows else first) @ (second if b_rows else second.T)

    grad: Any = dict(a_fmt=recipe.grad_format)
    for i in range(w1.shape[0]):
        s, k = torch.where(ids == i)
        if not s.numel():
            continue
        factor = weights[s, k, None].double()
        of_w: Any = dict(is_weight=True)
        h = product(x[s], w1[i], a_rows=False, b_rows=False, **of_w).to(x.dtype)
        leaf = h.double().requires_grad_()
        act = activate_rows(leaf, ActivationOptions(kind=kind))
        a = (act.detach() * factor).to(x.dtype)
        y = product(a, w2[i], a_rows=False, b_rows=False, **of_w).to(x.dtype)
        out.y.index_add_(0, s, y.double())
        da = product(dy[s], w2[i], a_rows=False, b_rows=True, **of_w, **grad).to(x.dtype)
        (dh,) = torch.autograd.grad(act, leaf, da.double() * factor)
        out.weights[s, k] = (da.double() * act.detach()).sum(1)
        dh = dh.to(x.dtype)
        dx = product(dh, w1[i], a_rows=False, b_rows=True, **of_w, **grad).to(x.dtype)
        out.x.index_add_(0, s, dx.double())
        out.w1[i] = product(dh, x[s], a_rows=True, b_rows=True, **grad)
        out.w2[i] = product(dy[s], a, a_rows=True, b_rows=True, **grad)
    return out


def bound_of(recipe: Recipe) -> float:
    return BOUNDS.get(recipe.scaling, 1e-3)


def test_rows_of_padding_are_zero_in_all_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """X, A, dY and dH, although row ids of padding name source row 0."""
    recipe, seen = RECIPES["blockwise"], []
    leaves, ids = make("swiglu", **SIZES)
    ids = torch.where(ids == ids[0, 0], -1, ids)  # source row 0 is of no expert but the second
    index = index_of(ids, leaves["weights"], recipe)
    named = torch.zeros(index.row_ids_R.numel(), dtype=torch.bool)
    named[index.slots_SK[index.slots_SK >= 0].long()] = True
    used = int(index.num_rows)
    assert used > int(named.sum()) and leaves["x"][0].any()
    original = te_definition.split_quantize

    def split_quantize(tensor: Tensor, *how: Any) -> Any:
        if tensor.shape[0] == used:
            seen.append(tensor.clone())
        return original(tensor, *how)

    monkeypatch.setattr(te_definition, "split_quantize", split_quantize)
    run(leaves, ids, options_of(recipe))
    assert len(seen) == 8  # X and A, dY and dH in both directions
    for x in seen:
        assert not x[~named[:used]].any() and x[named[:used]].any()


@pytest.mark.parametrize("recipe", [None, RECIPES["blockwise"]], ids=["wide", "blockwise"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_go_to_their_targets(recipe, scale, dtype) -> None:
    leaves, ids = make("swiglu", **SIZES)
    index = index_of(ids, leaves["weights"].detach(), recipe)
    w1, w2 = leaves["w1"].detach(), leaves["w2"].detach()
    options = options_of(recipe)
    products = make_products(options, index, ExpertWeights(w1_eCD=w1, w2_eDF=w2))
    rows = Rows(leaves["x"].detach())
    h, a = products.fc1(rows, saves_h=True)
    dy = products.prepare_output_grad(gradient_of(rows.values), has_expert_rows=False)
    dh, _, a = products.activation_bwd(dy, h)
    products.drop_weights()  # as where sinks compute later
    for compute, of in ((products.fc1_wgrad, (rows, dh)), (products.fc2_wgrad, (dy, a))):
        plain = compute(*of, GradTarget())
        assert compute(*of, GradTarget(dtype=dtype, scale=scale)).dtype == dtype
        out = torch.ones_like(plain, dtype=dtype)
        assert compute(*of, GradTarget(out, accumulate=False, scale=scale)) is out
        torch.testing.assert_close(out.float(), plain * scale, rtol=2**-7, atol=1e-6)
        assert compute(*of, GradTarget(out, accumulate=True, scale=scale)) is out
        torch.testing.assert_close(out.float(), 2 * plain * scale, rtol=2**-6, atol=1e-6)


def test_one_host_sync_in_forward_and_none_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = te_products.read_rows_per_expert, []

    def splits(*args: Any) -> list[int]:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(te_products, "read_rows_per_expert", splits)
    leaves, ids = make("swiglu", **SIZES)
    run(leaves, ids, options_of(RECIPES["blockwise"]))
    assert len(calls) == 1


def test_products_have_the_rows_of_the_index() -> None:
    leaves, ids = make("swiglu")
    index = index_of(ids, leaves["weights"], None)
    rows = [r.stop - r.start for r in iterate_expert_slices(index.offsets_e)]
    assert te_products.read_rows_per_expert(index, None) == rows
    with pytest.raises(ValueError, match=r"must be multiples of 16 .*: build_index\(\.\.\., mult"):
        te_products.read_rows_per_expert(index, Recipe(backend="te"))


@pytest.mark.parametrize("recipe", [None, RECIPES["blockwise"]], ids=["wide", "blockwise"])
def test_on_meta_moecores_products_have_the_shapes(recipe: Recipe | None) -> None:
    leaves, ids = make("swiglu", **SIZES, dtype=torch.bfloat16)
    meta = {n: t.detach().to("meta").requires_grad_() for n, t in leaves.items()}
    nobody_calls = patch.object(te, "import_transformer_engine", None)
    with nobody_calls, record_launches_on_meta(lambda name, args: None):
        found = run(meta, ids.to("meta"), options_of(recipe))
    assert {n: found[n].shape for n in NAMES} == {n: leaves[n].shape for n in NAMES}


BF16 = frozenset([torch.bfloat16])
CUDA = torch.device("cuda")
REFUSED = [
    (dict(fc1_bias=True), None, r"MoEConfig.fc1_bias \(True\) must be False .*'te'"),
    (dict(transposed=True), None, r"ExpertLayout.transposed \(True\) must be False"),
    (dict(dim=192), Recipe(backend="te"), r"MoEConfig.dim \(192\) must be a multiple of 128"),
    (
        dict(hidden_dim=48),
        Recipe(backend="te", scaling="mxfp8"),
        r"hidden_dim / etp \(48\) must be a multiple of 32",
    ),
    (
        {},
        Recipe(backend="te", scaling="tensorwise", amax_history=4),
        r"Recipe.amax_history \(4\) must be 0 for experts",
    ),
    (dict(device=CUDA), None, r"device \(cuda\) must be cpu for Transformer Engine"),
    (
        dict(device=CUDA, dtypes=frozenset([torch.float32])),
        None,
        r"dtype of the experts \(torch.float32\) must be torch.bfloat16",
    ),
    ({}, Recipe(), r"expert_backend \('te'\) must be 'auto' or 'triton', or Recipe.backend"),
]


@pytest.mark.parametrize(("fields", "recipe", "message"), REFUSED)
def test_refusals(fields: dict[str, Any], recipe: Recipe | None, message: str) -> None:
    known: dict[str, Any] = dict(gated=True, dim=256, hidden_dim=128, dtypes=BF16)
    spec = ExpertSpec(**known | fields, recipe=recipe)
    with pytest.raises(ValueError, match=message) as caught:
        choose_products("te", spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_a_recipe_of_transformer_engine_is_for_it_alone(name: Any) -> None:
    recipe = Recipe(backend="te")
    spec = ExpertSpec(gated=True, recipe=recipe)
    assert "must be 'auto' or 'te' for experts in FP8" in (find_products_problem(name, spec) or "")
    with pytest.raises(ValueError, match=r"products \('\w+'\) must be 'auto' or 'te'"):
        options_of(recipe, products=name)
