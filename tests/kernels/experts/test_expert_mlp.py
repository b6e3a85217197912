import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import iterate_expert_slices
from moecore.kernels.experts.contract import (
    ComputeGrad,
    ExpertMLPOptions,
    ExpertWeights,
    GradTarget,
    UnsummedInput,
)
from moecore.kernels.experts.grouped_products import TorchMatmuls
from moecore.kernels.rows.activation import KINDS, ActivationOptions, activate_rows
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.move import sum_rows, sum_rows_ref
from moecore.kernels.rows.packed import pack_rows_ref, view_packed_rows
from moecore.kernels.rows.record import Rows
from tests.helpers.grids import grid
from tests.helpers.operations import Operations
from tests.helpers.saved import list_saved
from tests.kernels.conftest import check_twice
from tests.kernels.experts.chosen import expert_mlp

NAMES = ("x", "w1", "w2", "weights")


def expert_mlp_ref(x_SD, w1_eCD, w2_eDF, index, options) -> Tensor:
    """Return y expert by expert, in plain differentiable PyTorch. Host sync."""
    parts = []
    for i, rows in enumerate(iterate_expert_slices(index.offsets_e)):
        x = x_SD.index_select(0, index.row_ids_R[rows])
        a = activate_rows(x @ w1_eCD[i].T, options) * index.weights_R[rows, None]
        parts.append(a.to(x.dtype) @ w2_eDF[i].T)
    return sum_rows_ref(torch.cat(parts), index.row_ids_R, index.slots_SK, None)


def make(kind, *, S=23, D=24, F=40, e=5, K=2, device="cpu", dtype=torch.float32, drop=True):
    """Leaves x, w1, w2 and weights_SK, and ids with an empty expert and dropped choices."""
    torch.manual_seed(0)
    C = 2 * F if ActivationOptions(kind=kind).gated else F
    tensors = {
        "x": torch.randn(S, D),
        "w1": torch.randn(e, C, D) / D**0.5,
        "w2": torch.randn(e, D, F) / F**0.5,
        "weights": torch.rand(S, K) + 0.1,
    }
    ids = torch.stack([torch.randperm(e)[:K] for _ in range(S)]) if S else torch.empty(0, K)
    ids = ids.to(torch.int32)
    if S > 2 and drop:
        ids[ids == 1] = -1
        ids[2] = -1
    leaves = {
        n: t.to(device, torch.float32 if n == "weights" else dtype) for n, t in tensors.items()
    }
    return {n: t.requires_grad_() for n, t in leaves.items()}, ids.to(device)


def rows_of(ids: Tensor, weights_SK: Tensor, e: int, **more: int) -> ExpertIndex:
    return build_index(ids, weights_SK, first_expert=0, num_local_experts=e, **more)


def apply(x, w1, w2, index, options, **more) -> Tensor:
    return expert_mlp(Rows(x), ExpertWeights(w1_eCD=w1, w2_eDF=w2), index, options, **more)


def run(leaves, ids, options) -> dict[str, Tensor]:
    """Output and gradients of expert_mlp, or of the reference when given an activation."""
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in leaves.items()}
    rows = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    run_one = apply if isinstance(options, ExpertMLPOptions) else expert_mlp_ref
    y = run_one(leaves["x"], leaves["w1"], leaves["w2"], rows, options)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    grads = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    return {"y": y.detach(), **grads}


def exact(leaves: dict[str, Tensor], ids: Tensor, kind: str) -> dict[str, Tensor]:
    doubles = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    return run(doubles, ids, ActivationOptions(kind=kind))


@pytest.mark.parametrize("saves_h", [True, False], ids=["keep h", "keep x"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_products_equal_the_reference(kind: str, saves_h: bool) -> None:
    leaves, ids = make(kind)
    options = ExpertMLPOptions(activation=ActivationOptions(kind=kind), saves_h=saves_h)
    found, truth = run(leaves, ids, options), exact(leaves, ids, kind)
    assert found.keys() == truth.keys() == {"y", *NAMES}
    for name, expected in truth.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5)


@grid(kind=KINDS, products=["triton", "torch"], S=[0, 1, 23])
def test_error_is_at_most_twice_that_of_plain_torch(kind, products, S, device) -> None:
    many = 40 if device == "cuda" else 1
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    leaves, ids = make(kind, S=S * many, device=device, dtype=dtype)
    options = ExpertMLPOptions(activation=ActivationOptions(kind=kind), products=products)
    found = run(leaves, ids, options)
    plain, truth = run(leaves, ids, options.activation), exact(leaves, ids, kind)
    for name, expected in truth.items():
        check_twice(found[name], plain[name], expected, name)
    if products == "triton" and device == "cuda":
        again = run(leaves, ids, options)
        assert all(torch.equal(found[name], again[name]) for name in truth)


@grid(kind=["swiglu", "relu2"], products=["triton", "torch"])
def test_unsummed_rows_and_gradients_add_up_to_the_same_bits(kind, products, device) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    leaves, ids = make(kind, device=device, dtype=dtype)
    options = ExpertMLPOptions(activation=ActivationOptions(kind=kind), products=products)
    summed = run(leaves, ids, options)
    weights = leaves["weights"].detach().requires_grad_()
    x, w1, w2 = (leaves[n].detach().requires_grad_() for n in ("x", "w1", "w2"))
    rows = rows_of(ids, weights, w1.shape[0])
    index = (rows.row_ids_R, rows.slots_SK, rows.offsets_e[-1])
    R, used = rows.row_ids_R.shape[0], int(rows.offsets_e[-1])
    expert_rows = x.detach().new_empty(1).expand(R, x.shape[1]).requires_grad_()
    y_RD = apply(x, w1, w2, rows, options, unsummed=UnsummedInput(expert_rows))
    y = sum_rows(y_RD.detach(), *index)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    dy_RD = torch.full_like(y_RD, float("nan"))  # past the used rows nobody reads
    dy_RD[:used] = dy[rows.row_ids_R[:used].long()]
    y_RD.backward(dy_RD)
    assert x.grad is None and expert_rows.grad is not None
    dx = sum_rows(expert_rows.grad, *index)
    found = {"y": y, "x": dx, "w1": w1.grad, "w2": w2.grad, "weights": weights.grad}
    assert not [n for n, t in summed.items() if not torch.equal(t, found[n])]  # type: ignore[arg-type]


@pytest.mark.parametrize("products", ["triton", "torch"])
def test_expert_choice(products: str, device: str) -> None:
    """K = E: column e holds e or -1; a row has up to all experts, or none."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    leaves, _ = make("swiglu", S=19, e=9, K=9, device=device, dtype=dtype)
    taken = torch.rand(19, 9) < torch.linspace(0, 1, 19)[:, None]
    ids = torch.where(taken, torch.arange(9, dtype=torch.int32), -1).to(device)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), products=products)
    found, plain = run(leaves, ids, options), run(leaves, ids, options.activation)
    for name, expected in exact(leaves, ids, "swiglu").items():
        check_twice(found[name], plain[name], expected, name)


@pytest.mark.parametrize("frozen", [("w1",), ("w2",), ("w1", "w2"), ("x",), ("weights", "x", "w1")])
def test_frozen_inputs_get_no_gradient_and_cost_no_product(frozen: tuple[str, ...]) -> None:
    leaves, ids = make("swiglu")
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    whole = run(leaves, ids, options)
    for name in frozen:
        leaves[name].requires_grad_(False)
    with torch.profiler.profile() as profile:
        part = run(leaves, ids, options)
    assert part.keys() == whole.keys() - set(frozen)
    for name, grad in part.items():
        assert torch.equal(grad, whole[name]), name
    calls = {event.key: event.count for event in profile.key_averages()}
    skipped = len({"w1", "w2"} & set(frozen)) + ("x" in frozen)
    skipped += frozen == ("weights", "x", "w1")  # then the activation's gradient is not needed
    assert calls["aten::_grouped_mm"] == 6 - skipped


@pytest.mark.parametrize("saves_h", [True, False])
def test_saves_x_and_h_only(saves_h: bool) -> None:
    leaves, ids = make("swiglu", S=512, D=64, F=32)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), saves_h=saves_h)
    rows = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    parameters = {leaves[n].data_ptr() for n in ("w1", "w2")}
    saved = list_saved(lambda: apply(leaves["x"], leaves["w1"], leaves["w2"], rows, options))
    sizes = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in parameters}
    S, D, R, C = 512, 64, 1024, 64
    index = 4 * (R + R + S * 2 + 5)  # row ids, weights, slots, offsets
    assert sum(sizes.values()) == 4 * (S * D + (R * C if saves_h else 0)) + index


class Sink:
    """Adds a weight's gradient to a tensor of its own, as `.grad` of another dtype would."""

    def __init__(self, add_to: Tensor) -> None:
        self.add_to, self.taken = add_to, 0

    def accumulate(self, compute: ComputeGrad, *operands: Any) -> None:
        assert compute(*operands, GradTarget(self.add_to, accumulate=True)) is self.add_to
        self.taken += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_the_gradients_of_the_weights(dtype: torch.dtype) -> None:
    leaves, ids = make("swiglu")
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    whole = run(leaves, ids, options)
    index = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    sinks = tuple(Sink(torch.ones_like(leaves[n], dtype=dtype)) for n in ("w1", "w2"))
    weights = ExpertWeights(w1_eCD=leaves["w1"], w2_eDF=leaves["w2"], sinks=sinks)  # type: ignore[arg-type]
    versions = [sink.add_to._version for sink in sinks]
    for _ in range(2):
        y = expert_mlp(Rows(leaves["x"]), weights, index, options)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y), retain_graph=True)
    assert leaves["w1"].grad is None and leaves["w2"].grad is None
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for sink, name, version in zip(sinks, ("w1", "w2"), versions, strict=True):
        assert sink.taken == 2 and sink.add_to._version > version
        expected = 1 + 2 * whole[name]
        torch.testing.assert_close(sink.add_to.float(), expected, rtol=tolerance, atol=tolerance)


class LaterSink:
    """Keeps the computation of a gradient."""

    def __init__(self) -> None:
        self.kept: list[tuple[ComputeGrad, tuple[Any, ...]]] = []

    def accumulate(self, compute: ComputeGrad, *operands: Any) -> None:
        self.kept.append((compute, operands))


@pytest.mark.parametrize(
    "recipe",
    [None, *(Recipe(scaling=s) for s in ("blockwise", "rowwise", "mxfp8", "nvfp4"))],  # type: ignore[arg-type]
)
def test_a_gradient_that_is_computed_later_holds_no_weight(recipe: Recipe | None) -> None:
    leaves, ids = make("swiglu", D=128, F=128)
    products = "torch" if recipe is None else "triton"
    activation = ActivationOptions(kind="swiglu")
    options = ExpertMLPOptions(activation=activation, products=products, recipe=recipe)
    whole = run(leaves, ids, options)
    index = rows_of(ids, leaves["weights"], leaves["w1"].shape[0])
    sinks = (LaterSink(), LaterSink())
    matrices = [leaves.pop(name).detach().clone().requires_grad_() for name in ("w1", "w2")]
    weights = ExpertWeights(w1_eCD=matrices[0], w2_eDF=matrices[1], sinks=sinks)  # type: ignore[arg-type]
    y = expert_mlp(Rows(leaves["x"]), weights, index, options)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert torch.equal(leaves["x"].grad, whole["x"])
    freed = [weakref.ref(matrix) for matrix in matrices]
    del y, weights, matrices
    assert [matrix() for matrix in freed] == [None, None]
    for sink, name in zip(sinks, ("w1", "w2"), strict=True):
        ((compute, operands),) = sink.kept
        assert torch.equal(compute(*operands, GradTarget()), whole[name])


def test_backward_makes_no_gradient_for_h() -> None:
    """Autograd would fill in zeros as large as H for an output that nobody differentiates."""
    leaves, ids = make("swiglu", S=512, D=16, F=64)
    rows = rows_of(ids, leaves["weights"], 5)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    y = apply(leaves["x"], leaves["w1"], leaves["w2"], rows, options)
    with Operations(lambda f, out: (str(f), getattr(out, "shape", None))) as seen:
        y.backward(torch.ones_like(y))
    shapes = [shape for f, shape in seen.found if "zeros" in f]
    assert seen.found and not {(1024, 128), (1024,)} & set(shapes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(dtype=torch.float32),
            r"dtype of the experts \(torch.float32\) must be torch.bfloat16",
        ),
        (dict(), r"device of the experts \(cpu\) must be a Hopper GPU with Triton"),
    ],
)
def test_triton_products_refuse_what_they_cannot_multiply(change: Any, message: str) -> None:
    leaves, ids = make("swiglu", **{"dtype": torch.bfloat16} | change)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"), products="triton")
    with pytest.raises(ValueError, match=message):
        run(leaves, ids, options)


def test_other_derivatives_are_refused() -> None:
    leaves, ids = make("swiglu")
    rows = rows_of(ids, leaves["weights"], 5)
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    y = apply(leaves["x"], leaves["w1"], leaves["w2"], rows, options)
    (dx,) = torch.autograd.grad(y.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()

    def f(x: Tensor) -> Tensor:
        return apply(x, leaves["w1"].detach(), leaves["w2"].detach(), detached, options)

    detached = rows_of(ids, leaves["weights"].detach(), 5)
    x = leaves["x"].detach()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(f, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("rows_are", ["summed", "unsummed", "packed"])
def test_opcheck(rows_are: str) -> None:
    leaves, ids = make("swiglu", S=5, drop=False)  # rows that nobody uses are uninitialised
    rows = rows_of(ids, leaves["weights"].detach(), leaves["w1"].shape[0])
    weights = rows.weights_R.detach().requires_grad_()
    x, handle, scales = leaves["x"], None, None
    if rows_are != "summed":
        num_rows = x.shape[0] if rows_are == "packed" else rows.row_ids_R.shape[0]
        handle = torch.zeros(num_rows, x.shape[1], requires_grad=True)
    if rows_are == "packed":
        x, scales = view_packed_rows(pack_rows_ref(x.detach()), x.shape[1])
    low = [torch.randn(5, *shape, requires_grad=True) for shape in ((4, 24), (80, 4))]
    args = (x, leaves["w1"], leaves["w2"], *low, None, None, weights)
    args += (
        handle,
        rows_are == "unsummed",
        scales,
        rows.row_ids_R,
        rows.slots_SK,
        rows.offsets_e,
        None,
    )
    args += ("swiglu", 7.0, 7.0, 1.702, False, "torch", True)
    args += ("", True, "e4m3", 0, "wide", True, True, "moecore", torch.float32)
    # That of the schema adds inputs up, which FP8 cannot.
    checks = ["test_schema"] * (rows_are != "packed")
    checks += ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.moecore.expert_mlp.default, args, test_utils=checks)


class Sender:
    """Records what it gets, beside what else happens."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def start_sending(self, *gradients_and_index: Any) -> None:
        self.events.append(("start", *gradients_and_index))


@pytest.mark.parametrize("frozen", [(), ("w1",), ("w2",), ("weights",), ("rows",)], ids=str)
def test_a_sender_gets_gradients_before_those_of_the_weights(frozen, monkeypatch) -> None:
    leaves, ids = make("swiglu")
    options = ExpertMLPOptions(activation=ActivationOptions(kind="swiglu"))
    events: list[Any] = []
    plain = TorchMatmuls.compute_weight_grad

    def recorded(matmuls: TorchMatmuls, *args: Any) -> Tensor:
        events.append(("weight",))
        return plain(matmuls, *args)

    monkeypatch.setattr(TorchMatmuls, "compute_weight_grad", recorded)

    def gradients(sender: Sender | None) -> list[Tensor | None]:
        own = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in leaves.items()}
        rows = rows_of(ids, own["weights"], own["w1"].shape[0])
        expert_rows_RD = own["x"].detach()[rows.row_ids_R].requires_grad_("rows" not in frozen)
        more = dict(unsummed=UnsummedInput(expert_rows_RD, sender))
        y = apply(own["x"].detach(), own["w1"], own["w2"], rows, options, **more)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        if expert_rows_RD.grad is not None:
            expert_rows_RD.grad[rows.offsets_e[-1] :] = 0  # uninitialised
        return [expert_rows_RD.grad, own["w1"].grad, own["w2"].grad, own["weights"].grad]

    expected = gradients(None)
    events.clear()
    found = gradients(Sender(events))
    for ours, others in zip(found, expected, strict=True):
        assert (ours is None) == (others is None)
        assert ours is None or torch.equal(ours, others)
    starts = [event for event in events if event[0] == "start"]
    if "rows" in frozen:
        assert not starts
        return
    assert events[0] is starts[0] and len(starts) == 1
    assert len(events) == 3 - ("w1" in frozen) - ("w2" in frozen)
    _, drows_RD, dweights_R, *index = starts[0]
    used = rows_of(ids, leaves["weights"], 5)
    num_rows = int(used.offsets_e[-1])
    assert torch.equal(drows_RD[:num_rows], found[0][:num_rows])  # type: ignore[index]
    assert (dweights_R is None) == ("weights" in frozen)
    expected_index = (used.row_ids_R, used.slots_SK, used.offsets_e[-1])
    assert all(torch.equal(a, b) for a, b in zip(index, expected_index, strict=True))
