from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.sparse_attention import (
    IndexerHeads,
    KeySpans,
    LatentHeads,
    attention,
    sparse_attention,
)
from moecore.kernels.sparse_attention.gathered import attend_to_selected
from moecore.kernels.sparse_attention.index import compute_span_scores, round_to_fp8
from moecore.kernels.sparse_attention.keys import SpanOfKeys
from tests.helpers.waits import syncs_are_errors
from tests.kernels.conftest import check_twice
from tests.kernels.sparse_attention.oracle import sparse_attention_ref
from tests.kernels.sparse_attention.test_sparse_attention import (
    DOCUMENTS,
    HOW,
    LEAVES,
    check_keys_as_values,
    found_by,
    leaves_of,
    quantise_by_hand,
)

pytestmark = pytest.mark.gpu
H, n, r, L, v, h, i = 16, 128, 64, 512, 128, 16, 128  # dims of DeepSeek-V3.2, fewer heads
SCALE = (n + r) ** -0.5


def large_leaves(tokens: int, device: str = "cuda") -> list[Tensor]:
    g = torch.Generator(device).manual_seed(0)
    shapes = [(tokens, H, n + r), (tokens, L + r), (H, n, L), (H, L, v)]
    shapes += [(tokens, h, i), (tokens, i), (tokens, h)]
    leaves = [torch.randn(s, generator=g, device=device) for s in shapes]
    leaves[2] *= n**-0.5
    leaves[3] *= L**-0.5
    return [x.bfloat16() for x in leaves[:6]] + leaves[6:]


def spans_of(tokens: int, device: str = "cuda") -> KeySpans:
    own = torch.arange(tokens, device=device)
    return KeySpans(torch.zeros_like(own), own, 1, tokens)


def step(leaves: list[Tensor], **how: Any) -> dict[str, Any]:
    """Return outputs and gradients of one document."""
    own = [x.detach().clone().requires_grad_() for x in leaves]
    spans = spans_of(len(own[0]), own[0].device.type)
    out = sparse_attention(
        LatentHeads(*own[:4]), spans, scale=SCALE, indexer=IndexerHeads(*own[4:]), **how
    )
    g = torch.Generator(own[0].device).manual_seed(1)
    do = torch.randn(out.o_tHv.shape, generator=g, device=own[0].device).to(out.o_tHv.dtype)
    loss = (out.o_tHv * do).sum()
    if out.divergence_t is not None:
        loss = loss + out.divergence_t.sum()
    grads = torch.autograd.grad(loss, own, allow_unused=True)
    return {**dict(zip(LEAVES, grads, strict=True)), **out._asdict()}


def dense(leaves: list[Tensor], selected_tK: Tensor) -> dict[str, Tensor]:
    """Return the same of plain PyTorch with scores and a mask of all pairs."""
    own = [x.detach().clone().requires_grad_() for x in leaves[:4]]
    q, keys, up, down = own
    latents, turned = keys[:, :L], keys[:, L:]
    k_HTd = torch.cat((latents @ up.mT, turned.expand(H, -1, -1)), dim=-1)
    mask = torch.full((len(q), len(q) + 1), -torch.inf, device=q.device)
    mask.scatter_(1, selected_tK.long().where(selected_tK >= 0, len(q)), 0.0)
    scores = SCALE * (q.transpose(0, 1) @ k_HTd.mT) + mask[:, :-1]
    p_HTT = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    o_tHv = (p_HTT @ (latents @ down)).transpose(0, 1)
    g = torch.Generator(q.device).manual_seed(1)
    do = torch.randn(o_tHv.shape, generator=g, device=q.device).to(q.dtype)
    grads = torch.autograd.grad((o_tHv * do).sum(), own)
    return {**dict(zip(LEAVES, grads, strict=False)), "o_tHv": o_tHv}


@pytest.mark.parametrize("name", ["selected, divergences", "all, divergences"])
def test_fp32_is_that_of_the_definition(name: str) -> None:
    leaves, how = leaves_of(DOCUMENTS[-1], torch.float32), HOW[name]
    want = found_by(sparse_attention_ref, DOCUMENTS, [x.double() for x in leaves], **how)
    got = found_by(_on_gpu, DOCUMENTS, [x.cuda() for x in leaves], **how)
    for name, expected in want.items():
        if expected is None or not expected.is_floating_point():
            assert expected is None or torch.equal(got[name].cpu(), expected), name
        else:
            error = (got[name].detach().cpu() - expected.detach()).abs().max()
            assert error <= 1e-5 * expected.abs().max(), name


def _on_gpu(heads: LatentHeads, spans: KeySpans, **how: Any) -> Any:
    device = heads.q_tHd.device
    spans = spans._replace(first_t=spans.first_t.to(device), last_t=spans.last_t.to(device))
    return sparse_attention(heads, spans, **how)


def check_half(tokens: int, top_k: int, device: str) -> None:
    leaves = large_leaves(tokens, device)
    got = step(leaves, top_k=top_k)
    plain = dense(leaves, got["selected_tK"])
    exact = dense([x.float() for x in leaves], got["selected_tK"])
    for name, want in exact.items():
        error = (got[name].float() - want).norm()
        of_plain = (plain[name].float() - want).norm()
        assert error <= 2 * of_plain + 2**-9 * want.norm(), name
        rows = [(x[name].float() - want).flatten(1).norm(dim=1).max() for x in (got, plain)]
        assert rows[0] <= 2 * rows[1] + 2**-9 * want.flatten(1).norm(dim=1).max(), name


@pytest.mark.parametrize(
    ("num_heads", "tokens", "top_k"), [(16, 2048, 256), (96, 700, 300), (128, 1100, 300)]
)
def test_bf16_is_at_most_twice_as_wrong_as_dense_attention(
    num_heads: int, tokens: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "H", num_heads)
    check_half(tokens, top_k, "cuda")


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_keys_that_are_values_equal_identity_projections(num_heads: int) -> None:
    check_keys_as_values(num_heads, 512, torch.bfloat16, "cuda", least=64)


@pytest.mark.parametrize("num_heads", [64, 96])
def test_a_sink_adds_its_exponential_to_the_denominator(num_heads: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    q, keys, sinks = (
        torch.randn(s, generator=g, device="cuda").bfloat16()
        for s in ((40, num_heads, L + r), (900, L + r), (num_heads,))
    )
    selected = torch.arange(40 * 150, device="cuda", dtype=torch.int32).view(40, 150) % 900
    o, lse = attend_to_selected(q, keys, selected, L, SCALE, None)
    got, got_lse = attend_to_selected(q, keys, selected, L, SCALE, 4 * sinks)
    want_lse = torch.logaddexp(lse, 4 * sinks.float())
    torch.testing.assert_close(got_lse, want_lse)
    want = o.float() * (lse - want_lse).exp()[..., None]
    assert (got.float() - want).norm() <= 2**-8 * want.norm()


def score(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Return scores of all pairs in the dtype of the arguments, -inf for later keys."""
    scores = torch.einsum("ths,th->ts", torch.einsum("thi,si->ths", q, k).relu_(), w)
    return scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("fp8", [False, True])
def test_selects_the_keys_of_exact_scores(fp8: bool) -> None:
    tokens, top_k = 2048, 256
    leaves = large_leaves(tokens)
    selected_tK = step(leaves, top_k=top_k, fp8_scores=fp8)["selected_tK"]
    convert = quantise_by_hand if fp8 else Tensor.double
    scores = score(convert(leaves[4]), convert(leaves[5]), leaves[6].double())
    chosen = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device="cuda")
    chosen.scatter_(1, selected_tK.long().where(selected_tK >= 0, tokens), True)
    chosen = chosen[:, :-1]
    number = (torch.arange(tokens, device="cuda") + 1).clamp(max=top_k)
    assert torch.equal(chosen.sum(1), number)
    least = scores.masked_fill(~chosen, torch.inf).amin(1)
    most = scores.masked_fill(chosen, -torch.inf).amax(1)
    # Sums in fp32; the tensor cores of Hopper align products in FP8 to 13 bits or more.
    bound = 2**-10 if fp8 else 1e-4
    assert ((most - least) <= bound * scores[chosen].abs().max()).all()


def test_fp8_scores_are_at_most_twice_as_wrong_as_plain_pytorch() -> None:
    leaves = large_leaves(2048)
    own = torch.arange(2048, device="cuda")
    span, index = SpanOfKeys(0, 2048, torch.zeros_like(own), own), IndexerHeads(*leaves[4:])
    rounded, k_scales = round_to_fp8(index)
    assert rounded.k_Ni.dtype == torch.float8_e4m3fn
    got = compute_span_scores(rounded, span, k_scales)
    plain = score(*(quantise_by_hand(x).float() for x in leaves[4:6]), leaves[6])
    exact = score(*(x.double() for x in leaves[4:]))
    seen = exact > -torch.inf
    assert torch.equal(got > -torch.inf, seen)
    got, plain, exact = (x.where(seen, 0) for x in (got, plain, exact))
    check_twice(got, plain, exact, floor=2**-12)


def test_the_host_waits_for_nothing_and_no_tensor_is_of_all_pairs(monkeypatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", 2**24)
    tokens = 16384
    leaves = large_leaves(tokens)
    step(leaves, top_k=256, returns_divergences=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with syncs_are_errors():
        found = step(leaves, top_k=256, returns_divergences=True)
    kept = sum(x.nbytes for x in found.values() if x is not None) + sum(x.nbytes for x in leaves)
    assert torch.cuda.max_memory_allocated() - before - kept < 4 * tokens**2
