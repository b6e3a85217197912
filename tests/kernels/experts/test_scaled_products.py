from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moecore.base.options.precision import Recipe, Scaling
from moecore.kernels.experts import quantised_products
from moecore.kernels.experts.contract import OPERANDS, ExpertMLPOptions, ExpertWeights, Magnitudes
from moecore.kernels.grouped import scaled
from moecore.kernels.grouped.scaled import scaled_gemm, scaled_wgrad
from moecore.kernels.grouped.scaled_rows import (
    pad_offsets,
    pad_rows,
    quantise_expert_matrices,
    quantise_expert_rows,
)
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import NAMES, make, rows_of
from tests.kernels.experts.test_fp8_products import OUTPUTS, check, gradient_of, run
from tests.moe.fp8_reference import Result, experts_scaled

SIZES: dict[str, Any] = {"S": 23, "D": 32, "F": 48}
SCALINGS: tuple[Scaling, ...] = ("rowwise", "tensorwise")


def options_of(scaling: Scaling, kind: str = "swiglu", **recipe: Any) -> ExpertMLPOptions:
    chosen = Recipe(scaling=scaling, **recipe)
    activation = ActivationOptions(kind=kind)
    return ExpertMLPOptions(activation=activation, products="triton", recipe=chosen)


def oracle(leaves: dict[str, Tensor], ids: Tensor, scaling: str, **how: Any) -> Result:
    plain = {n: t.detach() for n, t in leaves.items()}
    where = (ids, plain["weights"], gradient_of(plain["x"]))
    return experts_scaled(plain["x"], plain["w1"], plain["w2"], *where, scaling=scaling, **how)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_hybrid_equals_the_oracle(scaling: Scaling, power_of_two: bool) -> None:
    """Gradients in E5M2 beside rows and matrices in E4M3."""
    leaves, ids = make("swiglu", **SIZES)
    how: dict[str, Any] = dict(power_of_two=power_of_two, grad_format="e5m2")
    found = run(leaves, ids, options_of(scaling, **how))
    check(found, oracle(leaves, ids, scaling, **how), 1e-3)
    in_e4m3 = run(leaves, ids, options_of(scaling, power_of_two=power_of_two))
    assert torch.equal(found["y"], in_e4m3["y"])
    for name in NAMES:  # a bit of mantissa less
        wrong = (found[name] - in_e4m3[name]).norm() / in_e4m3[name].norm()
        assert 0.01 < wrong < 0.1, name


def run_delayed(leaves, ids, past, length=None, *, has_all_amax=True, **recipe):
    """Return output and gradients with scales of earlier steps, and this step's magnitudes."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    of_rows: Any = {n: torch.tensor([past[n]]) if n in past else None for n in OPERANDS}
    seen: Any = {n: torch.zeros(1) for n in OPERANDS}
    weights = ExpertWeights(
        w1_eCD=leaves["w1"], w2_eDF=leaves["w2"], magnitudes=Magnitudes(of_rows, has_all_amax, seen)
    )
    index = build_index(
        ids, leaves["weights"], first_expert=0, num_local_experts=5, max_pairs=length
    )
    y = expert_mlp(Rows(leaves["x"]), weights, index, options_of("tensorwise", **DELAYED | recipe))
    y.backward(gradient_of(y))
    found: Any = {"y": y.detach(), **{n: t.grad for n, t in leaves.items()}}
    return found, {n: float(t) for n, t in seen.items()}


DELAYED: dict[str, Any] = dict(amax_history=2, grad_format="e5m2", power_of_two=False)
# Some are less than what comes: it is clipped.
PAST = {"x": 2.0, "a": 3.0, "dy": 1.25, "dh": 0.3}


@pytest.mark.parametrize("length", [None, 100], ids=["rows in use", "more"])
def test_delayed_equals_the_oracle(length: int | None) -> None:
    leaves, ids = make("swiglu", **SIZES)
    how: dict[str, Any] = {n: v for n, v in DELAYED.items() if n != "amax_history"}
    own, largest = run_delayed(leaves, ids, {}, length)  # the first step: scales of its own
    check(own, oracle(leaves, ids, "tensorwise", **how), 1e-3)
    used = (ids >= 0).any(1)
    assert largest["x"] == float(leaves["x"].detach()[used].abs().max())
    assert largest["dy"] == float(gradient_of(leaves["x"])[used].abs().max())
    assert all(value > 0 for value in largest.values()) and largest["x"] > PAST["x"]
    found, seen = run_delayed(leaves, ids, PAST, length)
    check(found, oracle(leaves, ids, "tensorwise", **how, amax=PAST), 1e-3)
    assert (seen["x"], seen["dy"]) == (largest["x"], largest["dy"])  # before they are clipped
    same, _ = run_delayed(leaves, ids, largest, length)
    assert all(torch.equal(same[n], own[n]) for n in OUTPUTS)
    for past, wanted in ((dict.fromkeys(PAST, 0.0), own), (PAST, found)):  # as no step had, as some
        again, _ = run_delayed(leaves, ids, past, length, has_all_amax=False)
        assert all(torch.equal(again[n], wanted[n]) for n in OUTPUTS)


def test_an_infinity_is_no_magnitude_and_stays_no_number() -> None:
    leaves, ids = make("swiglu", **SIZES)
    _, expected = run_delayed(leaves, ids, PAST)
    row = int((ids >= 0).any(1).nonzero()[0])
    leaves["x"] = leaves["x"].detach().clone()
    leaves["x"][row, 3] = torch.inf
    found, seen = run_delayed(leaves, ids, PAST)
    assert found["y"][row].isnan().all() and seen["x"] == expected["x"]


def test_delayed_experts_refuse_what_takes_no_history() -> None:
    leaves, ids = make("swiglu", **SIZES)
    refused = pytest.raises(ValueError, match=r"Recipe.amax_history \(2\) must be 0 for experts")
    with FlopCounterMode(display=False), refused:
        run_delayed(leaves, ids, PAST)
    own: Any = Magnitudes(dict.fromkeys(OPERANDS), True, {})
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"], magnitudes=own)
    index, options = rows_of(ids, leaves["weights"], 5), options_of("tensorwise", **DELAYED)
    y = expert_mlp(Rows(leaves["x"]), weights, index, options)
    with refused:
        torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_in_bf16(scaling: Scaling) -> None:
    leaves, ids = make("swiglu", **SIZES, dtype=torch.bfloat16)
    found = run(leaves, ids, options_of(scaling))
    # A sum that rounds to the other bf16 may round to the other FP8 then.
    check(found, oracle(leaves, ids, scaling), 2e-2)
    assert {found[n].dtype for n in ("y", "x", "w1", "w2")} == {torch.bfloat16}


WANTED: dict[tuple[str, ...], list[tuple[int, bool, bool]]] = {  # columns, rows?, columns?
    (): [(32, True, False), (48, True, False), (32, True, True), (96, True, True)],
    ("w1",): [(32, True, False), (48, True, False), (32, True, True), (96, True, False)],
    ("w2", "x"): [(32, True, False), (48, True, False), (32, True, False), (96, False, True)],
}
COLUMNS_AGAIN = {(): [(48, False, True), (32, False, True)], ("w1",): [(48, False, True)]}


@pytest.mark.parametrize("frozen", WANTED, ids=str)
def test_a_gradient_is_read_once_for_both_layouts(frozen, monkeypatch) -> None:
    """X and A are rows in forward and columns in backward; dY and dH what is asked for, at once."""
    made, real = [], quantised_products.quantise_expert_rows

    def record(x: Tensor, *where: Any, rowwise: bool, columnwise: bool, **how: Any) -> Any:
        made.append((x.shape[1], rowwise, columnwise))
        return real(x, *where, rowwise=rowwise, columnwise=columnwise, **how)

    monkeypatch.setattr(quantised_products, "quantise_expert_rows", record)
    leaves, ids = make("swiglu", **SIZES)
    for name in frozen:
        leaves[name].requires_grad_(False)
    run(leaves, ids, options_of("tensorwise"))
    of_columns = COLUMNS_AGAIN.get(frozen, [(32, False, True)])
    assert sorted(made) == sorted(WANTED[frozen] + of_columns)


def test_padded_rows_worked_example() -> None:
    padded = pad_rows(torch.tensor([3, 20], dtype=torch.int32), 22)
    assert padded.offsets_e.tolist() == [16, 48] and padded.num_rows == 64
    assert padded.position_R.tolist() == [0, 1, 2, *range(16, 33), 64, 64]
    assert padded.expert_R.tolist() == [0] * 3 + [1] * 17 + [2] * 2


@pytest.mark.parametrize("per_row", [True, False])
def test_torch_takes_these_layouts(per_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks of dtypes, strides and scales, on meta tensors of the operands' layouts."""
    real = scaled.scaled_grouped_mm

    def on_meta(*args: Any, **how: Any) -> Tensor:
        how = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in how.items()}
        return real(*(arg.to("meta") for arg in args), **how)

    monkeypatch.setattr(scaled, "scaled_grouped_mm", on_meta)
    monkeypatch.setattr(scaled, "_uses_reference", lambda *_: False)
    how: dict[str, Any] = {"per_row": per_row, "power_of_two": True}
    offsets_e = torch.tensor([3, 3, 20], dtype=torch.int32)
    x, y = torch.randn(22, 32).bfloat16(), torch.randn(22, 48).bfloat16()
    w: Any = quantise_expert_matrices(torch.randn(3, 48, 32), **how)
    padded_e = pad_offsets(offsets_e)
    of_x, of_y = (quantise_expert_rows(rows, offsets_e, padded_e, **how) for rows in (x, y))
    out = scaled_gemm(of_x[0], w.rows, offsets_e, x.dtype)  # type: ignore[arg-type]
    assert out.shape == (22, 48) and out.dtype == torch.bfloat16
    dx = scaled_gemm(of_y[0], w.columns, offsets_e, x.dtype)  # type: ignore[arg-type]
    assert dx.shape == (22, 32)
    grad = scaled_wgrad(of_x[1], of_y[1], padded_e, x.dtype)  # type: ignore[arg-type]
    assert grad.shape == (3, 32, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("grad_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_of_a_gpu_equal_their_reference(scaling: Scaling, grad_format: Any) -> None:
    leaves, ids = make("swiglu", S=700, D=256, F=128, dtype=torch.bfloat16)
    options = options_of(scaling, grad_format=grad_format)
    expected = run(leaves, ids, options)
    on_gpu = {n: t.detach().cuda().requires_grad_() for n, t in leaves.items()}
    found = run(on_gpu, ids.cuda(), options)
    for name in OUTPUTS:
        wrong = (found[name].cpu().float() - expected[name].float()).norm()
        assert wrong <= 2e-2 * expected[name].float().norm(), name
