from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore.kernels.rows import index as index_module
from moecore.kernels.rows.index import ExpertIndex, build_index, build_index_ref
from tests.kernels.conftest import check_without_host, poison

Routed = tuple[Tensor, Tensor, dict[str, int]]


def routing(S, K, E, *, device="cpu", dropped=0.1, skew=0.0) -> tuple[Tensor, Tensor]:
    """K distinct experts of E per row, some dropped; skew favours the first experts."""
    generator = torch.Generator().manual_seed(S * 31 + K * 7 + E)
    scores = torch.rand(S, E, generator=generator) + skew * torch.linspace(1, 0, E)
    ids_SK = scores.argsort(1, descending=True)[:, :K]
    ids_SK = ids_SK.masked_fill(torch.rand(S, K, generator=generator) < dropped, -1)
    weights_SK = torch.rand(S, K, generator=generator) + 0.5
    return ids_SK.to(device, torch.int32), weights_SK.to(device)


def by_hand(ids, first_expert, num_local_experts, row_multiple) -> list[Any]:
    """Per expert row below the end: its (s, k), or None for padding; then the offsets."""
    rows: list[tuple[int, int] | None] = []
    offsets = []
    for expert in range(first_expert, first_expert + num_local_experts):
        rows += [(s, k) for s, row in enumerate(ids) for k, e in enumerate(row) if e == expert]
        rows += [None] * (-len(rows) % row_multiple)
        offsets.append(len(rows))
    return [rows, offsets]


def check_by_hand(index: ExpertIndex, ids_SK: Tensor, weights_SK: Tensor, **options: int) -> None:
    rows, offsets = by_hand(ids_SK.tolist(), **options)
    rows += [None] * (index.row_ids_R.numel() - len(rows))
    slots = torch.full_like(ids_SK, -1)
    for r, pair in enumerate(rows):
        if pair:
            slots[pair] = r
    assert index.offsets_e.tolist() == offsets
    assert index.row_ids_R.tolist() == [pair[0] if pair else 0 for pair in rows]
    assert index.weights_R.tolist() == [float(weights_SK[p]) if p else 0.0 for p in rows]
    assert torch.equal(index.slots_SK, slots)


def test_worked_example() -> None:
    ids = torch.tensor([[3, 0], [2, 3], [5, 3]], dtype=torch.int32)
    weights = torch.arange(1.0, 7.0).view(3, 2)
    index = build_index(ids, weights, first_expert=2, num_local_experts=2, row_multiple=2)
    assert index.row_ids_R.tolist() == [1, 0, 0, 1, 2, 0, 0, 0]
    assert index.weights_R.tolist() == [3.0, 0.0, 1.0, 4.0, 6.0, 0.0, 0.0, 0.0]
    assert index.slots_SK.tolist() == [[2, -1], [0, 3], [-1, 4]]
    assert index.offsets_e.tolist() == [2, 6]
    dtypes = [t.dtype for t in index[:4]]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]
    index = build_index(ids, weights, first_expert=2, num_local_experts=2, max_pairs=4)
    assert index.row_ids_R.tolist() == [1, 0, 1, 2]


@st.composite
def routings(draw: st.DrawFn) -> Routed:
    """ids with dropped and foreign experts (distinct per row), weights, and the options."""
    E = draw(st.integers(1, 9))
    K, S = draw(st.integers(1, E)), draw(st.integers(0, 8))
    first = draw(st.integers(0, E - 1))
    num_local = draw(st.integers(1, E - first))
    multiple = draw(st.sampled_from([1, 1, 2, 16]))
    ids, weights = routing(S, K, E, dropped=draw(st.sampled_from([0.0, 0.3, 1.0])))
    return (
        ids,
        weights,
        dict(first_expert=first, num_local_experts=num_local, row_multiple=multiple),
    )


@settings(max_examples=150, deadline=None, database=None)
@given(routings(), st.integers(-1, 5))
def test_properties(routed: Routed, spare: int) -> None:
    """Positions invert, counts sum, order is stable, unused rows are zero."""
    ids_SK, weights_SK, options = routed
    used = by_hand(ids_SK.tolist(), **options)[1][-1]
    unpadded = by_hand(ids_SK.tolist(), **options | {"row_multiple": 1})[1][-1]
    length = None if spare < 0 else unpadded + spare
    index = build_index(ids_SK, weights_SK, **options, max_pairs=length)
    R = index.row_ids_R.numel()
    assert used <= R and R % options["row_multiple"] == 0
    if length is not None and options["row_multiple"] == 1:
        assert length == R
    check_by_hand(index, ids_SK, weights_SK, **options)


@settings(max_examples=50, deadline=None, database=None)
@given(routings())
def test_gradient_of_the_weights_returns_to_their_choices(routed: Routed) -> None:
    ids_SK, weights_SK, options = routed
    weights_SK.requires_grad_()
    index = build_index(ids_SK, weights_SK, **options)
    check_gradient(index, weights_SK)


def check_gradient(index: ExpertIndex, weights_SK: Tensor) -> None:
    R = index.weights_R.numel()
    grad_R = torch.arange(1.0, R + 1, device=index.weights_R.device)
    slots = index.slots_SK.long()
    unused = torch.ones(R + 1, dtype=torch.bool, device=grad_R.device)
    unused[slots.flatten()] = False  # -1 is the spare last entry
    grad_R[unused[:R]] = float("nan")  # unused rows may hold anything
    index.weights_R.backward(grad_R)
    expected = torch.where(slots >= 0, slots + 1.0, 0.0)
    assert torch.equal(weights_SK.grad, expected)  # type: ignore[arg-type]


def test_reference_passes_gradcheck() -> None:
    ids, weights = routing(5, 3, 6)
    weights = weights.double().requires_grad_()
    options = dict(first_expert=1, num_local_experts=4, row_multiple=2, max_rows=20)
    assert torch.autograd.gradcheck(lambda w: build_index_ref(ids, w, **options).weights_R, weights)


def test_weights_of_dropped_choices_may_be_nan() -> None:
    ids = torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    weights = torch.tensor([[1.0, float("nan")], [float("nan"), 2.0]])
    index = build_index(ids, weights, first_expert=0, num_local_experts=2)
    assert index.weights_R.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_what_cannot_be_done_is_refused() -> None:
    ids, weights = routing(4, 2, 3)
    where = dict(first_expert=0, num_local_experts=3)
    with pytest.raises(ValueError, match="int32"):
        build_index(ids.long(), weights, **where)
    with pytest.raises(ValueError, match="shape of ids_SK"):
        build_index(ids, weights[:, :1], **where)
    with pytest.raises(ValueError, match=r"row_multiple \(3\) must be a power of two"):
        build_index(ids, weights, **where, row_multiple=3)
    with pytest.raises(ValueError, match="split the batch"):
        build_index(ids, weights, **where, max_pairs=2**31)
    many = ids[:1, :1].expand(1 << 16, 1 << 15)
    with pytest.raises(ValueError, match="split the batch"):
        build_index(many, weights[:1, :1].expand_as(many), **where)


def check_compiles(device: str) -> None:
    compiled = torch.compile(build_index, fullgraph=True, backend="aot_eager")
    for S in (6, 7, 8):
        ids, weights = routing(S, 2, 3, device=device)
        weights.requires_grad_()
        expected = build_index(ids, weights, first_expert=0, num_local_experts=3, row_multiple=2)
        found = compiled(ids, weights, first_expert=0, num_local_experts=3, row_multiple=2)
        assert all(torch.equal(a, b) for a, b in zip(found[:4], expected[:4], strict=True))
        check_gradient(found, weights)


# S, K, E, first, num_local, multiple
TINY = {
    "plain": (70, 3, 9, 0, 9, 1),
    "middle-of-the-experts": (90, 4, 12, 3, 5, 16),
    "one-token": (1, 2, 4, 0, 4, 1),
    "one-expert": (130, 1, 1, 0, 1, 1),
    "all-experts": (40, 8, 8, 0, 8, 128),
    "no-token": (0, 2, 5, 0, 5, 16),
    "prime": (257, 7, 37, 0, 37, 32),
    "most-choices": (3, 1024, 1024, 1000, 24, 4),
}
REAL = {
    "qwen3-30b": (32768, 8, 128, 0, 128, 128),
    "deepseek-v3-ep8": (65536, 8, 256, 64, 32, 16),
    "many-experts": (4099, 10, 1024, 0, 1024, 1),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
@pytest.mark.parametrize("is_few", [True, False], ids=["few", "many"])
def test_kernel_equals_reference(device, name, skew, is_few, monkeypatch) -> None:
    """Also where few pairs are counted as many are."""
    monkeypatch.setattr(index_module, "FEW_BLOCKS", index_module.FEW_BLOCKS if is_few else -1)
    check_against_reference(device, TINY[name], skew)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("skew", [0.0, 3.0], ids=["even", "skewed"])
def test_kernel_equals_reference_at_real_sizes(name: str, skew: float) -> None:
    poison()
    check_against_reference("cuda", REAL[name], skew)


def check_against_reference(device: str, case: tuple[int, ...], skew: float) -> None:
    S, K, E, first, num_local, multiple = case
    ids, weights = routing(S, K, E, device=device, skew=skew)
    weights.requires_grad_()
    options = dict(first_expert=first, num_local_experts=num_local, row_multiple=multiple)
    index = build_index(ids, weights, **options)
    expected = build_index_ref(ids, weights, **options, max_rows=index.row_ids_R.numel())
    for found, wanted in zip(index[:4], expected[:4], strict=True):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    check_gradient(index, weights)


@pytest.mark.parametrize("E", [8, 130])
def test_kernel_of_expert_choice(device: str, E: int) -> None:
    """K = E: column e holds e or -1, and the caller knows the length."""
    S, chosen = 6, 2
    ids = torch.full((S, E), -1, dtype=torch.int32)
    for e in range(E):
        ids[torch.tensor([e % S, (e + 1 + e % 4) % S]), e] = e
    weights = torch.rand(S, E).masked_fill(ids < 0, float("nan"))
    options = dict(first_expert=0, num_local_experts=E, row_multiple=1)
    leaf = weights.clone().to(device).requires_grad_()
    index = build_index(ids.to(device), leaf, **options, max_pairs=E * chosen)
    assert index.offsets_e.tolist() == [chosen * (e + 1) for e in range(E)]
    check_by_hand(ExpertIndex(*(t.detach().cpu() for t in index[:4])), ids, weights, **options)
    check_gradient(index, leaf)


def test_kernel_reads_strided_input_and_respects_the_length(device: str) -> None:
    ids, weights = routing(50, 3, 6, device=device, dropped=0.0)
    plain = build_index(ids, weights, first_expert=0, num_local_experts=6, max_pairs=200)
    strided = build_index(
        ids.T.contiguous().T,
        weights.repeat(1, 2)[:, :3],
        first_expert=0,
        num_local_experts=6,
        max_pairs=200,
    )
    for a, b in zip(plain[:4], strided[:4], strict=True):
        assert torch.equal(a, b)
    cut = build_index(ids, weights, first_expert=0, num_local_experts=6, max_pairs=100)
    assert torch.equal(cut.row_ids_R, plain.row_ids_R[:100])
    assert torch.equal(cut.slots_SK, plain.slots_SK.where(plain.slots_SK < 100, -1))
    assert int(cut.offsets_e[-1]) == 150, "the offsets tell that the length did not suffice"


def test_ops_tell_the_truth_to_the_compiler(device: str) -> None:
    ids, weights = routing(6, 2, 5, device=device)
    weights.requires_grad_()
    torch.library.opcheck(
        torch.ops.moecore.build_index.default,
        (ids, weights, 1, 3, 2, 16),
        # The others add all outputs up in place, and cannot add fp32 to integers.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    slots = build_index(ids, weights, first_expert=1, num_local_experts=3).slots_SK
    grad_R = torch.rand(12, device=device)
    torch.library.opcheck(torch.ops.moecore.build_index_bwd.default, (grad_R, slots))
    check_compiles(device)


@pytest.mark.gpu
def test_no_sync_same_bits_capture_and_compile() -> None:
    ids, weights = routing(4096, 8, 64, device="cuda")
    options = dict(first_expert=0, num_local_experts=64, row_multiple=16)

    def step(ids: Tensor, weights: Tensor) -> list[Tensor]:
        index = build_index(ids, weights, **options)
        (grad,) = torch.autograd.grad(index.weights_R.square().sum(), weights)
        return [*index[:4], grad]

    others = routing(4096, 8, 64, device="cuda", skew=1.0)
    expected = check_without_host(step, (ids, weights.requires_grad_()), others)
    compiled = torch.compile(build_index, fullgraph=True)(ids, weights, **options)
    assert all(torch.equal(a, b) for a, b in zip(compiled[:4], expected[:4], strict=True))
