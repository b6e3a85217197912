from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

from moecore.kernels.sparse_attention import (
    IndexerHeads,
    KeySpans,
    LatentHeads,
    attention,
    sparse_attention,
)
from moecore.kernels.sparse_attention import index as index_module
from moecore.kernels.sparse_attention.index import (
    _has_index_kernel,
    compute_index_scores,
    compute_span_scores,
    round_to_fp8,
    select_keys,
)
from moecore.kernels.sparse_attention.keys import SpanOfKeys
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks, find_document_ids
from tests.helpers.operations import Operations
from tests.kernels.sparse_attention.oracle import sparse_attention_ref

H, n, r, L, v, h, i = 3, 5, 4, 6, 7, 2, 8
SCALE = 0.7
DOCUMENTS = [0, 1, 12, 12, 30]
LEAVES = ("q", "keys", "up", "down", "index q", "index k", "index w")


def spans_of(documents: list[int]) -> KeySpans:
    first = [a for a, b in pairwise(documents) for _ in range(a, b)]
    longest = max(b - a for a, b in pairwise(documents))
    return KeySpans(torch.tensor(first), torch.arange(documents[-1]), 1, longest)


def leaves_of(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    t = num_tokens
    shapes = [(t, H, n + r), (t, L + r), (H, n, L), (H, L, v), (t, h, i), (t, i), (t, h)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def found_by(function, documents, leaves, **how) -> dict[str, Any]:
    """Return outputs and gradients of all leaves."""
    own = [x.detach().clone().requires_grad_() for x in leaves]
    if "selected_tK" not in how:
        how["indexer"] = IndexerHeads(*own[4:])
    out = function(LatentHeads(*own[:4]), spans_of(documents), scale=SCALE, **how)
    g = torch.Generator().manual_seed(1)
    loss = (out.o_tHv * torch.randn(out.o_tHv.shape, generator=g).to(out.o_tHv)).sum()
    if out.divergence_t is not None:
        weights = torch.rand(len(out.divergence_t), generator=g).to(out.divergence_t)
        loss = loss + (out.divergence_t * weights).sum()
    if "sinks_H" in how:
        loss.backward(inputs=[how["sinks_H"]], retain_graph=True)
    grads = torch.autograd.grad(loss, own, allow_unused=True)
    return {**dict(zip(LEAVES, grads, strict=True)), **out._asdict()}


def assert_close(got: dict[str, Any], want: dict[str, Any], bound: float) -> None:
    for name, expected in want.items():
        if expected is None or not expected.is_floating_point():
            same = expected is None or torch.equal(got[name], expected)
            assert (got[name] is None) == (expected is None) and same, name
        else:
            error = (got[name] - expected).abs().max()
            assert error <= bound * expected.abs().max(), (name, float(error))


HOW: dict[str, dict[str, Any]] = {
    "selected": dict(top_k=4),
    "selected, divergences": dict(top_k=4, returns_divergences=True),
    "more than there are": dict(top_k=64, returns_divergences=True),
    "all, divergences": dict(returns_divergences=True),
    "of another layer": dict(selected_tK=True),
}


@pytest.mark.parametrize("numbers", [1, 400, 2**27])  # one query, some, and all in a chunk
@pytest.mark.parametrize("name", HOW)
def test_equals_the_definition(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", numbers)
    how, leaves = dict(HOW[name]), leaves_of(DOCUMENTS[-1])
    if how.get("selected_tK"):
        heads, indexer = LatentHeads(*leaves[:4]), IndexerHeads(*leaves[4:])
        before = sparse_attention_ref(
            heads, spans_of(DOCUMENTS), scale=SCALE, indexer=indexer, top_k=3
        )
        how["selected_tK"] = before.selected_tK
    want = found_by(sparse_attention_ref, DOCUMENTS, leaves, **how)
    got = found_by(sparse_attention, DOCUMENTS, leaves, **how)
    assert_close(got, want, 1e-12)
    has_gradient = how.get("returns_divergences", False)
    assert all((got[leaf] is not None) == has_gradient for leaf in LEAVES[4:])


@pytest.mark.parametrize("numbers", [1, 400, 2**27])
def test_sinks_equal_the_definition(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", numbers)
    leaves, grads = leaves_of(DOCUMENTS[-1]), {}
    for function in (sparse_attention_ref, sparse_attention):
        sinks_H = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
        grads[function] = found_by(function, DOCUMENTS, leaves, top_k=4, sinks_H=sinks_H)
        grads[function]["sinks"] = sinks_H.grad
    assert_close(grads[sparse_attention], grads[sparse_attention_ref], 1e-12)
    without = found_by(sparse_attention, DOCUMENTS, leaves, top_k=4)["o_tHv"]
    assert (without - grads[sparse_attention]["o_tHv"]).abs().max() > 0.1


def test_documents_are_as_apart() -> None:
    leaves, how = leaves_of(DOCUMENTS[-1]), dict(top_k=4, returns_divergences=True)
    whole = found_by(sparse_attention, DOCUMENTS, leaves, **how)
    for a, b in pairwise(DOCUMENTS):
        if a == b:
            continue
        own = [x[a:b] if len(x) == DOCUMENTS[-1] else x for x in leaves]
        alone = found_by(sparse_attention, [0, b - a], own, **how)
        torch.testing.assert_close(alone["o_tHv"], whole["o_tHv"][a:b])
        width = alone["selected_tK"].shape[1]
        shifted = whole["selected_tK"][a:b, :width] - a
        assert torch.equal(alone["selected_tK"], shifted.clamp(min=-1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bounds_have_all_keys_of_the_queries_of_a_rank(size: int) -> None:
    cu_seqlens = torch.tensor([0, 12, 12, 36, 48])
    first, slack = cu_seqlens[find_document_ids(cu_seqlens, 48)], []
    for own in assign_tokens_to_cp_ranks(cu_seqlens, 48, size) if size > 1 else [torch.arange(48)]:
        spans = KeySpans(first[own], own, size, 24)
        for begin, end in combinations(range(len(own) + 1), 2):
            low, high = spans.get_bounds(begin, end, 48)
            slack.append(
                [spans.first_t[begin:end].min() - low, high - spans.last_t[begin:end].max()]
            )
            assert low >= 0 and high <= 48
    assert torch.tensor(slack).amin(0).tolist() == [0, 1]  # all, and none is asked for in vain
    assert KeySpans(first, first, 1, 24).get_bounds(30, 33, 48) == (7, 33)


def test_of_equal_scores_the_earlier_keys_are_selected() -> None:
    inf = float("inf")
    scores = torch.tensor([[2.0, 0, 0, 3, 0], [-inf, -0.0, 0, -1, -inf], [5, 5, 5, 5, 5]])
    assert select_keys(scores, 10, 3).tolist() == [[10, 11, 13], [11, 12, 13], [10, 11, 12]]
    assert select_keys(scores[1:2], 10, 4).tolist() == [[11, 12, 13, -1]]
    assert select_keys(scores[:, :2], 0, 3).tolist() == [[0, 1, -1], [1, -1, -1], [0, 1, -1]]


@pytest.mark.parametrize(
    ("keys", "top_k"), [(1, 1), (40, 64), (300, 64), (5000, 2048), (5000, 300)]
)
def test_the_kernel_selects_the_same_keys(
    keys: int, top_k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SAMPLE", 512)  # the last case has lists
    g = torch.Generator().manual_seed(keys)
    scores = torch.randn(9, keys, generator=g)
    scores[:6] = scores[:6].relu_() * 3e38 ** torch.linspace(-1, 1, 6)[:, None]
    scores *= torch.where(torch.rand(9, keys, generator=g) < 0.2, -1, 1)  # zeros of both signs
    scores[2, keys // 2 :] = -torch.inf
    scores[3] = -torch.inf
    scores[6, ::9] += 9  # the sample has all of the largest scores, and row 7 has few others
    scores[7, 1:] = scores[7, 1:].where(torch.arange(1, keys) % 7 == 0, -torch.inf)
    scores[8] = (torch.arange(keys) > keys - 100).float()  # more equal scores than a list has
    got = select_keys(scores.to(device), 7, top_k)
    assert torch.equal(got.cpu(), select_keys(scores.double(), 7, top_k))  # plain PyTorch


@pytest.mark.interpret
@pytest.mark.parametrize("sinks", [False, True])
def test_kernels_are_at_most_twice_as_wrong_as_plain_pytorch(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter truncates casts to bf16.
    for name, size in (("L", 32), ("r", 16)):
        monkeypatch.setitem(globals(), name, size)
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", 4000)  # several chunks
    leaves = [x.half() for x in leaves_of(DOCUMENTS[-1])]
    how: dict[str, Any] = {}
    heads, indexer = LatentHeads(*leaves[:4]), IndexerHeads(*leaves[4:])
    args = (heads, spans_of(DOCUMENTS))
    how["selected_tK"] = sparse_attention(*args, scale=SCALE, indexer=indexer, top_k=7).selected_tK
    calls: list[Any] = []
    run = attention.differentiate_selected
    monkeypatch.setattr(
        attention,
        "differentiate_selected",
        lambda *args, **how: calls.append(1) or run(*args, **how),
    )
    found = {}
    for function, dtype in (
        (sparse_attention, torch.float16),
        (sparse_attention_ref, torch.float16),
        (sparse_attention_ref, torch.float64),
    ):
        if sinks:
            values = torch.tensor([-1.0, 0.5, 3.0], dtype=dtype, requires_grad=True)
            how["sinks_H"] = values
        found[function, dtype] = found_by(function, DOCUMENTS, [x.to(dtype) for x in leaves], **how)
        if sinks:
            found[function, dtype]["sinks"] = values.grad
    assert len(calls) > 1
    got, plain, exact = found.values()
    for leaf in ("o_tHv", *LEAVES[:4], *["sinks"] * sinks):
        want = exact[leaf].detach()
        error, of_plain = (x[leaf].detach().double() - want for x in (got, plain))
        assert error.norm() <= 2 * of_plain.norm() + 2**-9 * want.norm(), leaf
        error, of_plain, want = (x.view(len(x), -1).norm(dim=1) for x in (error, of_plain, want))
        assert error.max() <= 2 * of_plain.max() + 2**-9 * want.max(), leaf


def attend_by_hand(
    q: Tensor, keys: Tensor, selected: Tensor, sinks: Tensor, do: Tensor
) -> dict[str, Tensor]:
    """Return the output of keys that are values, and gradients by their formulas, in fp64."""
    q, keys, sinks, do = (x.double() for x in (q, keys, sinks, do))
    seen = torch.zeros(len(q), len(keys) + 1, dtype=torch.bool, device=q.device)
    seen.scatter_(1, selected.long().where(selected >= 0, len(keys)), True)
    scores = (SCALE * (q @ keys.T)).masked_fill(~seen[:, None, :-1], -torch.inf)
    lse = torch.logaddexp(scores.logsumexp(-1), sinks)
    p = (scores - lse[..., None]).exp()
    o = p @ keys
    delta = (do * o).sum(-1)
    ds = SCALE * p * (do @ keys.T - delta[..., None])
    dkeys = torch.einsum("ths,thd->sd", ds, q) + torch.einsum("ths,thd->sd", p, do)
    dsinks = -((sinks - lse).exp() * delta).sum(0)
    return {"o": o, "q": ds @ keys, "keys": dkeys, "sinks": dsinks}


def check_keys_as_values(
    num_heads: int, dim: int, dtype: torch.dtype, device: str, least: int = 16
) -> None:
    """Compare no projections with formulas, and with identities and `least` zeros per key."""
    g = torch.Generator().manual_seed(0)
    shapes = (40, num_heads, dim), (90, dim), (num_heads,), (40, num_heads, dim)
    inputs = [torch.randn(s, generator=g).to(device, dtype) for s in shapes]
    inputs[0] *= dim**-0.5
    first, number = torch.arange(40), torch.arange(40) % 21
    selected = first[:, None] + 2 * torch.arange(21)
    selected = selected.masked_fill(torch.arange(21) > number[:, None], -1).int().to(device)
    want = attend_by_hand(*inputs[:2], selected, *inputs[2:])
    eye = torch.eye(dim, dtype=dtype, device=device).expand(num_heads, -1, -1)
    places = torch.arange(40, device=device)
    found = []
    for pads in (False, True):
        q, keys, sinks = (x.clone().requires_grad_() for x in inputs[:3])
        heads = LatentHeads(q, keys)
        if pads:
            heads = LatentHeads(*(pad(x, (0, least)) for x in (q, keys)), eye, eye)
        spans = KeySpans(places, places, 1, 90)
        o = sparse_attention(heads, spans, scale=SCALE, sinks_H=sinks, selected_tK=selected).o_tHv
        grads = torch.autograd.grad(o, (q, keys, sinks), inputs[3])
        found.append(dict(zip(want, (o, *grads), strict=True)))
    bound = 1e-12 if dtype == torch.float64 else 2**-7 if dtype == torch.bfloat16 else 2**-10
    for got in found:
        for name, expected in want.items():
            error = (got[name].double() - expected).norm()
            assert error <= bound * expected.norm(), (name, float(error / expected.norm()))
    for name, expected in found[1].items():
        assert (found[0][name] - expected).norm() <= bound / 4 * expected.norm(), name


@pytest.mark.parametrize("numbers", [1, 2**14, 2**27])  # one query, some, and all in a chunk
def test_keys_that_are_values_equal_identity_projections(
    numbers: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", numbers)
    for dtype in (torch.float64, torch.float16):
        check_keys_as_values(3, 32, dtype, device)


@pytest.mark.interpret
def test_deterministic_backward_has_no_atomic_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("L", 32), ("r", 16)):
        monkeypatch.setitem(globals(), name, size)
    leaves = [x.bfloat16() for x in leaves_of(DOCUMENTS[-1])]
    grads = found_by(sparse_attention, DOCUMENTS, leaves, top_k=7)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(attention, "differentiate_selected", None)
    expected = found_by(sparse_attention, DOCUMENTS, leaves, top_k=7)
    assert torch.equal(grads["o_tHv"], expected["o_tHv"])
    for leaf in LEAVES[:4]:
        error = (grads[leaf] - expected[leaf]).float().norm()
        assert error <= 2**-6 * expected[leaf].float().norm(), leaf


@pytest.mark.parametrize("name", ["selected, divergences", "all, divergences"])
def test_bf16_is_at_most_twice_as_wrong_as_plain_pytorch(name: str) -> None:
    # The keys that bf16 selects are read by all, and products of the indexer are exact in fp32.
    leaves = [x.bfloat16() for x in leaves_of(DOCUMENTS[-1])]
    how = dict(HOW[name])
    got = found_by(sparse_attention, DOCUMENTS, leaves, **how)
    exact = found_by(sparse_attention_ref, DOCUMENTS, [x.double() for x in leaves], **how)
    plain = found_by(sparse_attention_ref, DOCUMENTS, leaves, **how)
    if how.pop("top_k", None):
        assert torch.equal(got["selected_tK"], exact["selected_tK"])
    for leaf in ("o_tHv", *LEAVES):
        of_plain = (plain[leaf].double() - exact[leaf]).norm()
        error = (got[leaf].double() - exact[leaf]).norm()
        assert error <= 2 * of_plain + 2**-9 * exact[leaf].norm(), leaf


def count_made(func: Any, out: Any) -> int:
    """Return the elements, of 4 bytes, of the largest tensor that an operation makes."""
    made = (t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor))
    return max(made, default=0) // 4


@pytest.mark.parametrize("name", ["selected, divergences", "all, divergences"])
def test_no_tensor_has_an_element_of_every_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, budget = 600, 2**14
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", budget)
    leaves = leaves_of(tokens, torch.float32)
    with Operations(count_made) as made:
        found_by(sparse_attention, [0, tokens], leaves, **HOW[name])
    inputs = max(x.numel() for x in leaves)
    assert max(made.found) <= max(2 * budget, inputs) < tokens**2 / 8


# queries [begin, end) of keys [first, last), the first key of each query's document
SPANS = {
    "a row": (0, 70, 0, 300, 0),
    "its end": (600, 700, 0, 700, 0),
    "documents": (300, 400, 100, 600, 150),
    "one query": (5, 6, 0, 6, 2),
}


def quantise_by_hand(x: Tensor) -> Tensor:
    """Return rotated rows in fp64, rounded to e4m3 times the least power of two that holds them."""
    turn = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while len(turn) < x.shape[-1]:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1)))
    rotated = (x.double() @ turn / len(turn) ** 0.5).to(x.dtype).double()
    amax = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scales = torch.exp2((amax / 448).log2().ceil())
    return (rotated / scales).float().to(torch.float8_e4m3fn).double() * scales


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]
)
@pytest.mark.parametrize("name", SPANS)
def test_scores_are_those_of_plain_pytorch(
    name: str, dtype: torch.dtype, fp8: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end, first, last, document = SPANS[name]
    g = torch.Generator().manual_seed(0)
    h, i, C = 3, 64 if fp8 else 16, end - begin
    # Sixteenths: sums of a rotation are exact in fp32.
    q = torch.randint(-64, 65, (C, h, i), generator=g).div(16).to(device, dtype)
    k = torch.randint(-64, 65, (last + 9, i), generator=g).div(16).to(device, dtype)
    k[first] = 0
    w = torch.randn(C, h, generator=g).to(device)
    own_C = torch.arange(begin, end, device=device)
    first_C = torch.where(own_C % 2 == 0, document, own_C - 1).clamp(min=first)
    span, index = SpanOfKeys(first, last, first_C, own_C), IndexerHeads(q, k, w)
    assert _has_index_kernel(index)
    heads, k_scales = round_to_fp8(index) if fp8 else (index, None)
    assert (k_scales is not None) == fp8
    got = compute_span_scores(heads, span, k_scales)
    exact = IndexerHeads(*map(quantise_by_hand if fp8 else Tensor.double, (q, k)), w.double())
    want = compute_index_scores(exact, span)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want > -torch.inf
    error = (got.double() - want)[seen].abs().max()
    # The tensor cores of Hopper align the products of a sum in FP8 to 13 bits or more.
    bound = 2**-12 if fp8 and device == "cuda" else 1e-6
    assert error <= bound * want[seen].abs().max()
    if fp8:  # GPUs without FP8
        monkeypatch.setattr(index_module, "can_multiply_fp8", lambda _: False)
        rounded, scales = round_to_fp8(index)
        assert scales is None
        emulated = compute_span_scores(rounded, span)
        assert (emulated.double() - want)[seen].abs().max() <= 1e-6 * want[seen].abs().max()
