from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import (
    ExpertMLPOptions,
    ExpertWeights,
    LowRankUpdate,
    UnsummedInput,
)
from moecore.kernels.meta import record_launches_on_meta
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.grids import grid
from tests.helpers.operations import Operations
from tests.helpers.saved import list_saved
from tests.kernels.conftest import check_twice
from tests.kernels.experts.chosen import expert_mlp
from tests.kernels.experts.test_expert_mlp import expert_mlp_ref, make, rows_of

SIZES: dict[str, Any] = dict(S=37, D=128, F=128, e=5, K=2)
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """Which matrices have updates, and what else is asked of the operation."""

    on: tuple[int, ...] = (1, 2)
    saves_h: bool = True
    unsummed: bool = False
    base: bool = False  # whether the matrices train, too


FORMS = {
    "both": Form(),
    "w1, keeps x": Form(on=(1,), saves_h=False),
    "w2, base": Form(on=(2,), base=True),
    "unsummed, base": Form(unsummed=True, base=True),
}


def leaves_of(kind: str, form: Form, rank: int = 8, **sizes: Any) -> tuple[Leaves, Tensor]:
    """Leaves of the operation with random updates."""
    leaves, ids = make(kind, **sizes)
    (e, C, D), F = leaves["w1"].shape, leaves["w2"].shape[2]
    shapes = {"a1": (rank, D), "b1": (C, rank), "a2": (rank, F), "b2": (D, rank)}
    for name in [name for i in form.on for name in (f"a{i}", f"b{i}")]:
        leaf = torch.randn(e, *shapes[name]) / shapes[name][1] ** 0.5
        leaves[name] = leaf.to(leaves["w1"]).requires_grad_()
    for name in ("w1", "w2"):
        leaves[name].requires_grad_(form.base)
    return leaves, ids


def weights_of(leaves: Leaves) -> ExpertWeights:
    updates = [
        LowRankUpdate(leaves[f"a{i}"], leaves[f"b{i}"]) if f"a{i}" in leaves else None
        for i in (1, 2)
    ]
    matrices = dict(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"])
    return ExpertWeights(**matrices, update1=updates[0], update2=updates[1])


def formed(leaves: Leaves) -> tuple[Tensor, Tensor]:
    """The matrices with their updates inside, differentiably."""
    w1, w2 = (
        leaves[f"w{i}"] + (leaves[f"b{i}"] @ leaves[f"a{i}"] if f"a{i}" in leaves else 0)
        for i in (1, 2)
    )
    return w1, w2


def copied(leaves: Leaves, dtype: torch.dtype | None = None) -> Leaves:
    return {
        n: t.detach().to(dtype or t.dtype, copy=True).requires_grad_(t.requires_grad)
        for n, t in leaves.items()
    }


def dy_of(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)


def run(leaves: Leaves, ids: Tensor, options: ExpertMLPOptions, form: Form) -> Leaves:
    """Output and gradients of the operation."""
    leaves = copied(leaves)
    index = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    options = replace(options, saves_h=form.saves_h)
    if not form.unsummed:
        y = expert_mlp(Rows(leaves["x"]), weights_of(leaves), index, options)
        y.backward(dy_of(y))
    else:
        y = unsummed(leaves, index, options)
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def unsummed(leaves: Leaves, index: ExpertIndex, options: ExpertMLPOptions) -> Tensor:
    """The same by a dispatcher that adds expert rows; NaN where there are none."""
    x, used = leaves["x"], int(index.num_rows)
    grad_handle_RD = x.new_empty(1).expand(index.row_ids_R.shape[0], x.shape[1]).requires_grad_()
    part = UnsummedInput(grad_handle_RD)
    y_RD = expert_mlp(Rows(x.detach()), weights_of(leaves), index, options, unsummed=part)
    where = (index.row_ids_R, index.slots_SK, index.num_rows)
    y = sum_rows(y_RD.detach(), *where)
    dy_RD = torch.full_like(y_RD, torch.nan)
    dy_RD[:used] = dy_of(y)[index.row_ids_R[:used].long()]
    y_RD.backward(dy_RD)
    assert grad_handle_RD.grad is not None
    x.grad = sum_rows(grad_handle_RD.grad, *where)
    return y


def reference(leaves: Leaves, ids: Tensor, kind: str, dtype: torch.dtype | None = None) -> Leaves:
    """Output and gradients with formed matrices, expert by expert."""
    leaves = copied(leaves, dtype)
    index = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    y = expert_mlp_ref(leaves["x"], *formed(leaves), index, ActivationOptions(kind=kind))
    y.backward(dy_of(y))
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


@grid(form=FORMS.values(), kind=["swiglu", "relu2"], S=[0, 1, 23])
def test_torch_products_equal_formed_matrices(S: int, kind: str, form: Form) -> None:
    leaves, ids = leaves_of(kind, form, rank=4, S=S)
    found = run(leaves, ids, ExpertMLPOptions(activation=ActivationOptions(kind=kind)), form)
    truth = reference(leaves, ids, kind, torch.float64)
    assert found.keys() == truth.keys() and ("w1" in truth) == form.base
    for name, expected in truth.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5)


@grid(form=FORMS.values(), kind=["swiglu", "geglu", "relu2"], products=["triton", "torch"])
def test_error_is_at_most_twice_that_of_formed_matrices(kind, products, form, device) -> None:
    dtype, S = (torch.bfloat16, 920) if device == "cuda" else (torch.float16, 23)
    leaves, ids = leaves_of(kind, form, rank=16, S=S, device=device, dtype=dtype)
    options = ExpertMLPOptions(activation=ActivationOptions(kind=kind), products=products)
    found = run(leaves, ids, options, form)
    plain, truth = (reference(leaves, ids, kind, wide) for wide in (None, torch.float64))
    for name, expected in truth.items():
        check_twice(found[name], plain[name], expected, name)
    if products == "triton" and device == "cuda":
        again = run(leaves, ids, options, form)
        assert all(torch.equal(found[name], again[name]) for name in truth)


SCALINGS = ("blockwise", "rowwise", "mxfp8", "nvfp4")


@grid(form=FORMS.values(), scaling=SCALINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors_in_fp8_are_at_most_twice_those_of_formed_matrices(form, scaling, device) -> None:
    more = dict(device=device, dtype=torch.bfloat16, S=920) if device == "cuda" else {}
    leaves, ids = leaves_of("swiglu", form, rank=16, **SIZES | more)
    activation = ActivationOptions(kind="swiglu")
    recipe = Recipe(scaling=scaling)
    options = ExpertMLPOptions(activation=activation, products="triton", recipe=recipe)
    found, truth = run(leaves, ids, options, form), reference(leaves, ids, "swiglu", torch.float64)
    own = copied(leaves)
    matrices = dict(zip(("w1_eCD", "w2_eDF"), formed(own), strict=True))
    index = rows_of(ids, own["weights"], 5)
    y = expert_mlp(Rows(own["x"]), ExpertWeights(**matrices), index, options)
    y.backward(dy_of(y))
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        grad = own[name].grad if name != "y" else y.detach()
        assert grad is not None
        check_twice(found[name], grad, expected, name)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("products", ["triton", "torch"])
def test_rows_of_several_adapters_equal_experts_of_their_own(products, is_traced, device) -> None:
    """Each (expert, adapter) is an expert of its own whose matrices are the expert's."""
    N, e, form = 3, 5, Form()
    dtype, S = (torch.bfloat16, 920) if device == "cuda" else (torch.float16, 23)
    dtype = torch.float32 if products == "torch" and device == "cpu" else dtype
    leaves, ids = leaves_of("swiglu", form, rank=8, S=S, device=device, dtype=dtype)
    for name in ("a1", "b1", "a2", "b2"):
        leaves[name] = torch.randn_like(leaves[name].repeat_interleave(N, 0)).requires_grad_()
    adapters_S1 = torch.arange(S, device=device, dtype=torch.int32)[:, None] % 4 % N
    groups = (ids * N + adapters_S1).where(ids >= 0, -1)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), products=products)
    found, own = copied(leaves), dict(leaves)
    for name in ("w1", "w2"):
        own[name] = leaves[name].repeat_interleave(N, 0).detach()
    expected = run(own, groups, options, form)
    index = rows_of(groups, found["weights"], e * N)
    index = index._replace(offsets_e=index.offsets_e[N - 1 :: N].contiguous(), offsets_g=index[3])
    with Operations() if is_traced else nullcontext():
        y = expert_mlp(Rows(found["x"]), weights_of(found), index, options)
        y.backward(dy_of(y))
    truth = reference(own, groups, "swiglu", torch.float64)
    assert truth.keys() == expected.keys()
    for name, wanted in truth.items():
        one = y.detach() if name == "y" else found[name].grad
        assert one is not None and wanted.any()
        floor = 1e-6 if dtype == torch.float32 else 1e-3
        check_twice(one, expected[name], wanted, name, floor=floor)


def test_keeps_what_it_keeps_without_updates() -> None:
    found, options = [], ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    for form in (Form(on=()), Form()):
        leaves, ids = leaves_of("swiglu", form)
        index = rows_of(ids, leaves["weights"], 5)
        block = partial(expert_mlp, Rows(leaves["x"]), weights_of(leaves), index, options)
        own = {t.data_ptr() for t in leaves.values()}
        found.append({t.shape for t in list_saved(block) if t.data_ptr() not in own})
    assert found[0] == found[1]


def launched(
    form: Form, options: ExpertMLPOptions, adapters: int = 1, **sizes: Any
) -> dict[str, int]:
    """How often each kernel is launched for a forward and backward on Hopper."""
    leaves, ids = leaves_of("swiglu", form, 16, dtype=torch.bfloat16, **sizes)
    index = rows_of(ids, leaves["weights"].detach(), 5)
    for name in leaves.keys() & {"a1", "b1", "a2", "b2"}:
        leaves[name] = leaves[name].detach().repeat_interleave(adapters, 0).requires_grad_()
    leaves = {n: t.detach().to("meta").requires_grad_(t.requires_grad) for n, t in leaves.items()}
    index = ExpertIndex(*(t.detach().to("meta") for t in index[:4]))
    if adapters > 1:
        index = index._replace(offsets_g=index.offsets_e.repeat_interleave(adapters))
    index = index._replace(weights_R=index.weights_R.requires_grad_())
    names: list[str] = []
    with record_launches_on_meta(lambda name, _: names.append(name)):
        y = expert_mlp(Rows(leaves["x"]), weights_of(leaves), index, options)
        y.backward(torch.empty_like(y))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (leaf.requires_grad and name != "weights"), name
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize("F", [256, 768])
def test_kernels_of_a_frozen_base(F: int) -> None:
    """The base has its four products and no weight gradients; the updates' are those of A and B."""
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), products="triton")
    plain = launched(Form(on=()), options, S=64, D=256, F=F)
    assert not [name for name in plain if "wgrad" in name]
    found = launched(Form(), options, S=64, D=256, F=F)
    assert {n: found[n] for n in found if "grouped" in n} == {
        "sm90_bf16_grouped_kernel": 3,  # FC1, FC2 and FC1's input gradient, with what is added
        "sm90_bf16_grouped_nn_act_bwd_kernel": 1,
        "_grouped_gemm_fwd_kernel": 6,  # u of both, in backward again, and v of both
        "sm90_bf16_grouped_wgrad_kernel": 4,  # of A and B
    }


def test_kernels_of_several_adapters() -> None:
    """No kernel of the base adds an update: the updates' groups are not its experts."""
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), products="triton")
    found = launched(Form(), options, adapters=3, S=64, D=256, F=768)
    assert {n: found[n] for n in found if "grouped" in n} == {
        "sm90_bf16_grouped_kernel": 3,  # FC1, FC2 and FC1's input gradient
        "_grouped_gemm_fwd_kernel": 11,  # FC2's input gradient; the other 6; added products
        "sm90_bf16_grouped_wgrad_kernel": 4,
    }


def test_kernels_of_a_frozen_base_in_fp8() -> None:
    activation = ActivationOptions(kind="swiglu")
    options = ExpertMLPOptions(activation=activation, products="triton", recipe=Recipe())
    found = launched(Form(), options, S=64, D=256, F=384)
    assert found["sm90_fp8_grouped_nt_kernel"] == 4
    assert {n: found[n] for n in found if "wgrad" in n} == {"sm90_bf16_grouped_wgrad_kernel": 4}
