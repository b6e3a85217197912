"""Experts and linears in MXFP8 and NVFP4 on tensor cores that multiply scales of blocks.

Interpreted on a CPU; a GPU without such tensor cores multiplies what they would, in bf16.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels import common
from moecore.kernels.experts import contract, quantised_products
from moecore.kernels.experts.contract import ExpertSpec, ExpertWeights
from moecore.kernels.experts.products import find_products_problem, quantise_matrices
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair
from moecore.precision import emulated
from moecore.precision.apply import make_linear_products
from moecore.precision.linear import LinearCall
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_emulated_products import (
    BOUNDS,
    launched_products,
    options_of,
    oracle,
)
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.kernels.experts.test_fp8_products import OUTPUTS, check, gradient_of, run
from tests.kernels.grouped.test_block_scaled import skip_old_triton
from tests.kernels.rows.microscaling_oracle import linear

RECIPES = {"mxfp8": Recipe(scaling="mxfp8"), "nvfp4": Recipe(scaling="nvfp4")}
both = pytest.mark.parametrize("name", RECIPES)
SIZES: dict[str, Any] = {"S": 23, "D": 64, "F": 32}


@pytest.fixture(autouse=True)
def block_scaled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tensor cores multiply scales, or what stands for them."""
    for module in (quantised_products, contract, emulated):
        monkeypatch.setattr(module, "has_block_scaled_kernels", lambda *_: True)
    skip_old_triton(request)


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are quantised in plain PyTorch, with the same bits and in less time."""
    monkeypatch.setattr(microscaled, "has_cast_kernel", lambda _: False)


def moved(leaves: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {n: t.detach().to(device).requires_grad_() for n, t in leaves.items()}


@both
def test_experts(name, device, monkeypatch, request) -> None:
    """An oracle in fp64; on a GPU the emulated products, which round to bf16 as these do."""
    recipe, on_gpu = RECIPES[name], device == "cuda"
    sizes: dict[str, Any] = dict(S=700, D=256, F=128, dtype=torch.bfloat16) if on_gpu else SIZES
    leaves, ids = make("swiglu", **sizes)
    if not on_gpu:  # where quantisers are interpreted for long
        request.getfixturevalue("by_reference")
    on_device, bound = moved(leaves, device), BOUNDS[recipe.scaling]
    found = run(on_device, ids.to(device), options_of(recipe))
    if not on_gpu:
        check(found, oracle(leaves, ids, recipe, "swiglu"), bound)
        return
    again = run(on_device, ids.to(device), options_of(recipe))
    monkeypatch.setattr(quantised_products, "has_block_scaled_kernels", lambda *_: False)
    expected = run(on_device, ids.to(device), options_of(recipe))
    for output in OUTPUTS:
        wrong = (found[output].float() - expected[output].float()).norm()
        assert wrong <= 10 * bound * expected[output].float().norm(), output
        assert torch.equal(found[output], again[output]), output


@pytest.mark.gpu
def test_kernels_that_quantise_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels have the bits of each operand in `rows/test_microscaled.py`."""
    leaves, ids = make("swiglu", S=700, D=256, F=128, dtype=torch.bfloat16)
    arguments = moved(leaves, "cuda"), ids.cuda(), options_of(RECIPES["nvfp4"])
    found = run(*arguments)
    monkeypatch.setattr(microscaled, "has_cast_kernel", lambda _: False)
    expected = run(*arguments)
    assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS)


def test_ways_of_keeping_and_gathered_matrices_give_the_same_bits(device, by_reference) -> None:
    recipe = RECIPES["nvfp4"]  # the recipe whose weights may be gathered quantised
    leaves, ids = make(
        "swiglu", **SIZES, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    )
    leaves, ids = moved(leaves, device), ids.to(device)
    expected = run(leaves, ids, options_of(recipe))
    found = run(leaves, ids, options_of(recipe, saves_h=False))
    assert all(torch.equal(found[n], expected[n]) for n in OUTPUTS)
    pairs = [tuple(quantise_matrices(leaves[n], recipe) for n in ("w1", "w2"))]
    pairs.append(tuple(OperandPair(pair.rows, None) for pair in pairs[0]))
    index = rows_of(ids, leaves["weights"], 5)
    for pair in pairs:
        given: Any = dict(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"], quantised=pair)
        y = expert_mlp(Rows(leaves["x"]), ExpertWeights(**given), index, options_of(recipe))
        grads = torch.autograd.grad(
            y, [leaves[n] for n in NAMES], gradient_of(y), retain_graph=True
        )
        assert torch.equal(y, expected["y"])
        assert all(torch.equal(g, expected[n]) for g, n in zip(grads, NAMES, strict=True))


@pytest.mark.parametrize("S", [0, 1])
def test_few_rows(S: int, device: str, by_reference: None) -> None:
    name = "nvfp4"
    leaves, ids = make("swiglu", **SIZES | {"S": S})
    if device == "cuda":
        leaves = {n: t.bfloat16() if n != "weights" else t for n, t in leaves.items()}
    found = run(moved(leaves, device), ids.to(device), options_of(RECIPES[name]))
    if not S:
        assert not any(found[n].any() for n in OUTPUTS)
    elif device == "cpu":
        check(found, oracle(leaves, ids, RECIPES[name], "swiglu"), BOUNDS[name])


@both
def test_linears(name: str, device: str, by_reference: None) -> None:
    """Any number of rows, a bias, and a gradient that is added to sums in fp32."""
    torch.manual_seed(0)
    recipe, (T, K, N) = RECIPES[name], (70, 96, 160)
    x, weight, bias, dy = (torch.randn(n, device=device) for n in ((T, K), (N, K), (N,), (T, N)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = make_linear_products(recipe)(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    truth = linear(x.detach().cpu(), weight.detach().cpu(), dy.cpu(), recipe)
    expected = [truth[0] + bias.detach().cpu().double(), *truth[1:], dy.cpu().double().sum(0)]
    for i, (ours, wanted) in enumerate(zip(found, expected, strict=True)):
        # Tensor cores of Hopper truncate sums. Transformed values of two ways to add may round to
        # different numbers of E2M1 at a tie.
        bound = 1e-5 if device == "cuda" else 1e-6
        bound = 1e-2 if i == 2 and name == "nvfp4" else bound
        assert (ours.cpu().double() - wanted).norm() <= bound * wanted.norm(), i
    out = torch.randn(N, K, device=device)
    target, before = contract.GradTarget(out, accumulate=True, scale=0.5), out.clone()
    kind = emulated.EmulatedLinearProducts
    call = LinearCall(recipe=recipe, dtype=torch.float32)
    assert kind.compute_weight_grad(dy, x.detach(), call, target).shape == (N, K)
    torch.testing.assert_close(out, before + 0.5 * found[2], rtol=1e-6, atol=1e-5)


def test_gathered_linears_have_the_bits(device: str, by_reference: None) -> None:
    recipe = RECIPES["nvfp4"]
    torch.manual_seed(0)
    weight = torch.randn(96, 64, device=device)
    rows = microscaled.quantise_microscaled_matrices(
        weight[None], recipe, columnwise=False, pack=True
    ).rows
    for transposed in (False, True):
        packed = LinearCall(
            weight_rows=rows.values[0],
            weight_scales=rows.scales[0],
            weight_amax=rows.amax,
            recipe=recipe,
        )
        found = emulated._quantise_weight(weight, packed, transposed=transposed)
        whole = emulated._quantise_weight(weight, LinearCall(recipe=recipe), transposed=transposed)
        for ours, theirs in zip(found.tensors(), whole.tensors(), strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours.float(), theirs.float())


@both
def test_what_experts_launch(name: str) -> None:
    """Four products of rows and two of columns, all of bytes; nothing reads the device."""
    multiplied = launched_products(RECIPES[name])
    assert sorted(set(multiplied)) == [
        "block_scaled_grouped_gemm_kernel",
        "block_scaled_grouped_wgrad_kernel",
    ]
    assert len(multiplied) == 4 + 2


@pytest.mark.parametrize(
    ("capability", "version", "scalings"),
    [
        ((9, 0), (3, 9, 0), []),
        ((10, 0), (3, 9, 0), ["mxfp8", "nvfp4"]),
        ((12, 0), (3, 10, 1), ["mxfp8", "nvfp4"]),
        ((10, 0), (3, 6, 0), ["mxfp8"]),
    ],
)
def test_who_has_tensor_cores_for_blocks(capability, version, scalings, monkeypatch) -> None:
    monkeypatch.setattr(common, "HAS_TRITON", True)
    monkeypatch.setattr(common, "INTERPRET", False)
    monkeypatch.setattr(common, "TRITON", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(common, "_get_capability", common._get_capability.__wrapped__)
    decide, devices = common.has_block_scaled_kernels, [torch.device(n) for n in ("cpu", "meta")]
    assert [name for name in RECIPES if decide(torch.device("cuda"), name)] == scalings
    assert not any(decide(device, name) for device in devices for name in RECIPES)


def test_one_place_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recipe = torch.device("cuda"), RECIPES["mxfp8"]
    monkeypatch.setattr(contract, "has_hopper_kernels", lambda _: False)
    spec = ExpertSpec(gated=True, dim=64, hidden_dim=64, device=device, recipe=recipe)
    assert find_products_problem("auto", spec) is None
    blockwise = replace(spec, recipe=Recipe(), dim=128, hidden_dim=128)
    assert "must be a Hopper GPU" in str(find_products_problem("auto", blockwise))
    monkeypatch.setattr(contract, "has_block_scaled_kernels", lambda *_: False)
    refusal = find_products_problem("auto", spec)
    assert refusal is not None and "or with Triton 3.9 for 'nvfp4'" in refusal
