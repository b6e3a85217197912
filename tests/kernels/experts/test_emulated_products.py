from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts import contract, quantised_products
from moecore.kernels.experts.products import find_products_problem
from moecore.kernels.meta import record_launches_on_meta
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.packed import pack_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.saved import list_saved
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import make, rows_of
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


def options_of(recipe: Recipe, kind: str = "swiglu", **more: Any) -> contract.ExpertMLPOptions:
    activation = ActivationOptions(kind=kind)
    return contract.ExpertMLPOptions(
        activation=activation, products="triton", recipe=recipe, **more
    )


def oracle(leaves: dict[str, Tensor], ids: Tensor, recipe: Recipe, kind: str) -> Result:
    plain = {n: t.detach() for n, t in leaves.items()}
    where = (ids, plain["weights"], gradient_of(plain["x"]))
    return experts(plain["x"], plain["w1"], plain["w2"], *where, recipe=recipe, kind=kind)


# Only the order of sums differs. Where that moves a value over a tie it goes to the next number, of
# E2M1 up to a third of itself; where it moves bits that are drawn from, to either neighbour.
BOUNDS = {"mxfp8": 1e-3, "nvfp4": 5e-3}


@both
def test_more_than_a_block_of_one_expert_and_bf16(recipe: Recipe) -> None:
    leaves, ids = make("swiglu", S=70, D=64, F=96, e=3, K=1, dtype=torch.bfloat16)
    ids = torch.where(ids >= 0, 1, -1).to(torch.int32)
    found = run(leaves, ids, options_of(recipe))
    check(found, oracle(leaves, ids, recipe, "swiglu"), 2 * BOUNDS[recipe.scaling])
    assert {found[n].dtype for n in ("y", "x", "w1", "w2")} == {torch.bfloat16}


@both
def test_x_and_h_are_saved_in_the_format(recipe: Recipe) -> None:
    """At most 0.55 and 0.30 of the bytes of bf16."""
    leaves, ids = make("swiglu", S=43, D=128, F=96, dtype=torch.bfloat16)
    index = rows_of(ids, leaves["weights"], 5)
    shapes = {"x": leaves["x"].shape, "h": (index.row_ids_R.shape[0], leaves["w1"].shape[1])}
    share = {"mxfp8": 0.55, "nvfp4": 0.30}[recipe.scaling]
    x, x_scales, h, h_scales = list_saved(lambda: apply(leaves, index, options_of(recipe)))[:4]
    for shape, saved in ((shapes["x"], (x, x_scales)), (shapes["h"], (h, h_scales))):
        assert saved[0].shape[0] == saved[1].shape[0] == shape[0]
        assert sum(t.nbytes for t in saved) <= share * shape[0] * shape[1] * 2
    wide = replace(recipe, keep_hidden="wide")
    x, h = list_saved(lambda: apply(leaves, index, options_of(wide)))[:2]
    assert (x.dtype, x.shape, h.dtype, h.shape) == (x.dtype, shapes["x"], x.dtype, shapes["h"])


@both
@pytest.mark.parametrize("keep_hidden", ["auto", "wide"])
def test_gradients_are_those_of_the_saved_values(recipe: Recipe, keep_hidden: Any) -> None:
    """A second FC1 gives the bits of a saved H, which it rounds alike."""
    recipe = replace(recipe, keep_hidden=keep_hidden)
    leaves, ids = make("swiglu", **SIZES)
    found = run(leaves, ids, options_of(recipe))
    check(found, oracle(leaves, ids, recipe, "swiglu"), BOUNDS[recipe.scaling])
    again = run(leaves, ids, options_of(recipe, saves_h=False))
    assert all(torch.equal(found[name], again[name]) for name in OUTPUTS)


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


def test_rows_that_travelled_as_fp8_are_widened() -> None:
    leaves, ids = make("swiglu", S=23, D=128, F=96)
    packed = pack_rows(leaves["x"].detach())
    rows = Rows.from_bytes(packed, 128, torch.float32)
    weights = contract.ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    index = rows_of(ids, leaves["weights"], 5)
    for recipe in BOTH:
        results = []
        for given in (rows, Rows(rows.widen())):
            grad_handle_RD = leaves["x"].new_empty(1).expand(index.row_ids_R.shape[0], 128)
            unsummed = contract.UnsummedInput(grad_handle_RD.requires_grad_())
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
    spec = contract.ExpertSpec(gated=True, dim=dim, hidden_dim=hidden_dim, recipe=recipe)
    with pytest.raises(ValueError, match=message):
        raise ValueError(find_products_problem("triton", spec))
    assert find_products_problem("triton", replace(spec, dim=64, hidden_dim=64)) is None


def launched_kernels(recipe: Recipe) -> list[str]:
    """Return the kernels that a forward and backward of experts in bf16 launch, run on meta."""
    leaves, ids = make("swiglu", S=40, D=128, F=96, dtype=torch.bfloat16)
    index = rows_of(ids, leaves["weights"].detach(), 5)
    on_meta = {n: t.detach().to("meta").requires_grad_() for n, t in leaves.items()}
    index = ExpertIndex(*(t.detach().to("meta") for t in index[:4]))
    names: list[str] = []
    with record_launches_on_meta(lambda name, _: names.append(name)):
        y = apply(on_meta, index, options_of(recipe))
        y.backward(torch.empty_like(y))
    assert on_meta["w1"].grad is not None and on_meta["w1"].grad.dtype == torch.bfloat16
    return names


def launched_products(recipe: Recipe) -> list[str]:
    return [name for name in launched_kernels(recipe) if "gemm" in name or "wgrad" in name]


@both
def test_products_are_kernels_of_bf16(recipe: Recipe) -> None:
    """What a forward and backward launch on Hopper; nothing reads the device on the host."""
    products = launched_products(recipe)
    assert sorted(set(products)) == ["_grouped_gemm_fwd_kernel", "sm90_bf16_grouped_wgrad_kernel"]
    assert len(products) == 4 + 2


def test_the_activation_is_quantised_to_mxfp8_by_its_kernel() -> None:
    """Once in forward, and once in backward for three operands; X, dY and weights have another."""
    names = launched_kernels(RECIPES["mxfp8"])
    assert not any(name.startswith("weighted_activation") for name in names)
    assert names.count("microscaled_activation_kernel") == 2
    # X, X and dY transposed, dY, and both weights in forward and in backward
    assert names.count("quantise_microscaled_kernel") == 4 + 4


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_kernels_change_no_bit(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only quantisers differ, and the order in which gradients of routing weights are summed."""
    leaves, ids = make("swiglu", S=700, D=256, F=128, device="cuda", dtype=torch.bfloat16)
    ids[ids == 2] = -1
    found = run(leaves, ids, options_of(recipe))
    for module in (microscaled, quantised_products):
        monkeypatch.setattr(module, "has_cast_kernel", lambda _: False)
    expected = run(leaves, ids, options_of(recipe))
    assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS if n != "weights")
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-5, atol=1e-5)


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
