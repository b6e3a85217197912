"""Experts in blockwise FP8: values and gradients against an oracle, what is kept and skipped."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts import fp8_products
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertWeights, Refetch, UnsummedInput
from moecore.kernels.experts.products import quantise_matrices
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.packed import pack_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.operations import Operations
from tests.helpers.saved import list_saved
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.moe.fp8_reference import Result, experts_fp8

SIZES: dict[str, Any] = {"S": 23, "D": 256, "F": 128}
OUTPUTS = ("y", *NAMES)


def options_of(kind: str = "swiglu", *, saves_h: bool = True, **recipe: Any) -> ExpertMLPOptions:
    activation = ActivationOptions(kind=kind)
    chosen: Any = {"products": "triton", "saves_h": saves_h, "recipe": Recipe(**recipe)}
    return ExpertMLPOptions(activation=activation, **chosen)


def apply(leaves, index, options, **more) -> Tensor:
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    return expert_mlp(Rows(leaves["x"]), weights, index, options, **more)


def gradient_of(y: Tensor) -> Tensor:
    places = torch.arange(y.numel(), device=y.device).view_as(y)
    return torch.cos(0.7 * places).to(y.dtype)


def run(leaves: dict[str, Tensor], ids: Tensor, options: ExpertMLPOptions) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in leaves.items()}
    multiple = 1 if options.recipe is None else options.recipe.row_multiple
    index = rows_of(ids, leaves["weights"], leaves["w1"].shape[0], row_multiple=multiple)
    y = apply(leaves, index, options)
    y.backward(gradient_of(y))
    return {"y": y.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}}


def oracle(leaves: dict[str, Tensor], ids: Tensor, kind: str, **recipe: Any) -> Result:
    plain = {n: t.detach() for n, t in leaves.items()}
    dy = gradient_of(plain["x"])
    where = (ids, plain["weights"], dy)
    return experts_fp8(plain["x"], plain["w1"], plain["w2"], *where, kind=kind, **recipe)


def check(found, truth, bound, worst=None) -> None:
    """Relative error of the tensor, and of the worst row (None = twice that)."""
    worst = 2 * bound if worst is None else worst
    for name in OUTPUTS:
        expected = getattr(truth, name)
        if not expected.numel():
            assert found[name].shape == expected.shape
            continue
        wrong = (found[name].double() - expected).reshape(-1, expected.shape[-1])
        rows = expected.reshape(-1, expected.shape[-1]).norm(dim=1)
        assert wrong.norm() <= bound * rows.norm(), name
        assert wrong.norm(dim=1).max() <= worst * rows.max(), name


def test_tiles_of_one_expert_and_bf16() -> None:
    """More than 128 rows of one expert; H, dA and rows that are added are rounded to bf16."""
    leaves, ids = make("swiglu", S=300, D=256, F=128, e=3, K=1, dtype=torch.bfloat16)
    ids = torch.where(ids >= 0, 1, -1).to(torch.int32)
    found = run(leaves, ids, options_of())
    check(found, oracle(leaves, ids, "swiglu"), 2**-8)
    assert {found[n].dtype for n in ("y", "x", "w1", "w2")} == {torch.bfloat16}


def test_rows_that_travelled_are_multiplied_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, ids = make("swiglu", **SIZES)
    x = Rows.from_bytes(pack_rows(leaves["x"].detach()), 256, torch.float32)
    quantised: list[tuple[int, ...]] = []
    real = fp8_products.quantise_rows

    def counted(x: Tensor, **how: Any) -> Rows:
        quantised.append(tuple(x.shape))
        return real(x, **how)

    monkeypatch.setattr(fp8_products, "quantise_rows", counted)
    index = rows_of(ids, leaves["weights"].detach(), 5)
    fetched: list[int] = []

    def fetch(values: Tensor, scales: Tensor) -> Rows:
        fetched.append(1)
        return Rows(values, scales, torch.float32)

    results, rows_R = [], index.row_ids_R.shape[0]
    refetch = Refetch(fetch, (x.values, x.scales))  # type: ignore[arg-type]
    for rows, again in ((x, None), (x, refetch), (Rows(x.widen()), None)):
        own = {n: leaves[n].detach().clone().requires_grad_() for n in ("w1", "w2")}
        weights = ExpertWeights(w1_eCD=own["w1"], w2_eDF=own["w2"])
        grad_handle_RD = x.widen().new_empty(1).expand(rows_R, 256).requires_grad_()
        part = UnsummedInput(grad_handle_RD, refetch=again)
        quantised.clear()
        y_RD = expert_mlp(rows, weights, index, options_of(), unsummed=part)
        y_RD.backward(gradient_of(y_RD))
        used = int(index.num_rows)
        results.append([y_RD[:used], grad_handle_RD.grad[:used], own["w1"].grad, own["w2"].grad])
        # dY alone, and X where it came wide.
        assert quantised == ([(23, 256)] if rows is not x else []) + [(rows_R, 256)]
    assert fetched == [1]
    for ours in zip(*results, strict=True):
        assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])


@pytest.mark.parametrize(
    "frozen", [(), ("w1",), ("w2",), ("w1", "w2"), ("x",), ("weights", "x", "w1")], ids=str
)
def test_what_nobody_wants_costs_no_product(frozen, monkeypatch) -> None:
    leaves, ids = make("swiglu", **SIZES)
    whole = run(leaves, ids, options_of())
    for name in frozen:
        leaves[name].requires_grad_(False)
    calls: Counter[str] = Counter()
    for name in ("fp8_gemm", "fp8_wgrad", "quantise_weights"):
        real = getattr(fp8_products, name)

        def counted(*args: Any, name: str = name, real: Any = real, **how: Any) -> Any:
            calls[name] += 1
            return real(*args, **how)

        monkeypatch.setattr(fp8_products, name, counted)
    part = run(leaves, ids, options_of())
    assert part.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(grad, whole[name]) for name, grad in part.items())
    only_w2 = frozen == ("weights", "x", "w1")
    assert calls["fp8_wgrad"] == 2 - len({"w1", "w2"} & set(frozen))
    assert calls["fp8_gemm"] == 4 - ("x" in frozen) - only_w2
    # Backward quantises a matrix again only for an input gradient through it.
    assert calls["quantise_weights"] == 4 - ("x" in frozen) - only_w2


@pytest.mark.parametrize("keep_hidden", ["wide", "fp8"])
def test_keeps_one_byte_per_element(keep_hidden: Any) -> None:
    leaves, ids = make("swiglu", S=512, D=256, F=128, dtype=torch.bfloat16)
    index = rows_of(ids, leaves["weights"], 5)
    given = {leaves[n].data_ptr() for n in ("w1", "w2")} | {t.data_ptr() for t in index[:4]}
    saved = list_saved(lambda: apply(leaves, index, options_of(keep_hidden=keep_hidden)))
    sizes = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in given}
    S, D, R, C = 512, 256, 1024, 256
    hidden = R * C * 2 if keep_hidden == "wide" else R * C + R * C // 128 * 4
    assert sum(sizes.values()) == S * D + S * D // 128 * 4 + hidden


def test_gradients_of_wide_weights_are_not_rounded() -> None:
    """Weights in fp32 beside rows in bf16: their gradients are the products' fp32 sums."""
    leaves, ids = make("swiglu", **SIZES)
    leaves["x"] = leaves["x"].detach().bfloat16().requires_grad_()
    found = run(leaves, ids, options_of())
    assert found["y"].dtype == torch.bfloat16 and found["w1"].dtype == torch.float32
    check(found, oracle(leaves, ids, "swiglu"), 2**-8)
    rounded = found["w1"].bfloat16().float()
    assert not torch.equal(found["w1"], rounded)


# opcheck adds the elements of outputs, which torch does not for FP8 on a CPU.
@pytest.mark.parametrize(("scaling", "hidden"), [("blockwise", "wide"), ("nvfp4", "auto")])
def test_opcheck(scaling: str, hidden: str) -> None:
    leaves, ids = make("swiglu", S=5, D=128, F=128, drop=False)
    rows = rows_of(ids, leaves["weights"].detach(), 5)
    weights = rows.weights_R.detach().requires_grad_()
    none = (None, None, None, None)
    args = (leaves["x"], leaves["w1"], leaves["w2"], *none, weights, None, False, None)
    args += (rows.row_ids_R, rows.slots_SK, rows.offsets_e, None)
    args += ("swiglu", 7.0, 7.0, 1.702, False, "triton", True)
    args += (scaling, True, "e4m3", 0, hidden, True, True, "moecore", torch.float32)
    torch.library.opcheck(torch.ops.moecore.expert_mlp.default, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"D": 192}, r"MoEConfig.dim \(192\) must be a multiple of 128"),
        ({"F": 96}, r"MoEConfig.hidden_dim / etp \(96\) must be a multiple of 128"),
        ({"strided": True}, r"ExpertLayout.transposed \(True\) must be False for experts in FP8"),
        ({"interleaved": True}, r"interleaved ExpertLayout.gate_up \(True\) must be False"),
        ({"F": 24, "scaling": "rowwise"}, r"hidden_dim / etp \(24\) must be a multiple of 16"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    sizes = {n: change.get(n, size) for n, size in SIZES.items()}
    leaves, ids = make("swiglu", **sizes)
    if change.get("strided"):
        leaves["w1"] = leaves["w1"].mT.contiguous().mT
    activation = ActivationOptions(kind="swiglu", interleaved=change.get("interleaved", False))
    recipe = Recipe(scaling=change.get("scaling", "blockwise"))
    options = ExpertMLPOptions(activation=activation, products="auto", recipe=recipe)
    with pytest.raises(ValueError, match=message):
        apply(leaves, rows_of(ids, leaves["weights"], 5), options)


@pytest.mark.parametrize("S", [0, 45])
@pytest.mark.parametrize("recipe", [{}, {"power_of_two": False, "keep_hidden": "wide"}], ids=str)
def test_kernels_equal_the_oracle(recipe: dict[str, Any], S: int, device: str) -> None:
    """The quantisers' kernels, and on a GPU the products': repeat runs have the same bits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves, ids = make("swiglu", S=S, D=128, F=128, device=device, dtype=dtype)
    found = run(leaves, ids, options_of(**recipe))
    if device == "cuda":
        again = run(leaves, ids, options_of(**recipe))
        assert all(torch.equal(found[n], again[n]) for n in OUTPUTS)
    truth = oracle({n: t.detach().cpu() for n, t in leaves.items()}, ids.cpu(), "swiglu", **recipe)
    # A GPU's sums of 128 are rounded more: some H in bf16, and so some A in FP8, are neighbours.
    # Ratios of scales that are no powers of two are rounded to fp16, so an ulp of a scale shows.
    is_exact = device == "cpu" and recipe.get("power_of_two", True)
    bound = 1e-3 if is_exact else 2e-2
    # A row of a gradient may have one large term, and that is off by 1/8 where its code is.
    worst = 1 / 8 if device == "cuda" else None
    check({n: t.cpu() for n, t in found.items()}, truth, bound, worst)


@pytest.mark.parametrize("where", ["backward", "both"])
@pytest.mark.parametrize("scaling", ["blockwise", "rowwise", "nvfp4"])
def test_under_a_dispatch_mode(scaling: Any, where: str) -> None:
    """What the autograd function kept goes to the op; quantised weights are made again there."""
    leaves, ids = make("swiglu", **SIZES)
    fp8 = {"keep_hidden": "wide"} if scaling == "blockwise" else {}
    options = options_of(scaling=scaling, power_of_two=False, **fp8)
    expected = run(leaves, ids, options)
    pair = tuple(quantise_matrices(leaves[n], options.recipe) for n in ("w1", "w2"))
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"], quantised=pair)
    index = rows_of(ids, leaves["weights"], 5)
    with Operations() if where == "both" else nullcontext():
        y = expert_mlp(Rows(leaves["x"]), weights, index, options)
    with Operations():
        y.backward(gradient_of(y))
    assert torch.equal(y, expected["y"])
    assert all(torch.equal(leaves[n].grad, expected[n]) for n in NAMES)  # type: ignore[arg-type]
