import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.attention import (
    AttentionMask,
    attention_backward,
    attention_forward,
    cudnn,
    flash,
    flash4,
    reference,
)
from moecore.kernels.attention import attention as rule
from moecore.kernels.attention.contract import AttentionKernel, QKVBlock
from moecore.kernels.invariant import batch_invariant
from moecore.kernels.meta import treat_meta_as

SCALE = 0.3
DOCUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_length_q", "max_length_k")


def forward_of(kernel: Any, *args: Any) -> tuple[Tensor, Tensor]:
    return kernel.forward(QKVBlock(*args))  # type: ignore[no-any-return]


def backward_of(kernel: Any, do: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse, mask, scale = args
    return kernel.backward(QKVBlock(q, k, v, mask, scale), do, o, lse)  # type: ignore[no-any-return]


def skip_without_package(kernel: Any) -> None:
    if kernel is flash4:
        pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")


def packed(lengths_q: list[int], lengths_k: list[int], device: str = "cpu", **kw: Any) -> Any:
    """Return a mask of documents of these lengths."""
    both = lengths_q, lengths_k
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0).int() for n in both)
    lengths = dict(max_length_q=max(lengths_q), max_length_k=max(lengths_k))
    return AttentionMask(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **lengths, **kw)


# B, T, S, H, h, d, v and the mask
CASES: dict[str, tuple[tuple[int, ...], Any]] = {
    "causal": ((2, 5, 5, 4, 2, 8, 8), AttentionMask()),
    "all": ((2, 3, 5, 4, 1, 8, 16), AttentionMask(causal=False)),
    "a chunk's queries": ((1, 2, 5, 2, 2, 8, 8), AttentionMask()),
    "queries before keys": ((2, 5, 3, 2, 1, 8, 8), AttentionMask()),
    "window": ((2, 6, 6, 2, 1, 8, 8), AttentionMask(window=2)),
    "window of one, shifted": ((1, 3, 7, 2, 1, 8, 8), AttentionMask(window=1)),
    "documents": ((2, 5, 5, 4, 2, 24, 16), packed([3, 2, 1, 4, 0, 0], [3, 2, 1, 4, 0, 0])),
    "documents, other keys": ((1, 7, 9, 2, 1, 8, 8), packed([3, 0, 4, 0], [2, 3, 4, 0])),
    "documents, all": ((1, 4, 6, 2, 2, 8, 8), packed([1, 3, 0], [3, 1, 2], causal=False)),
    "documents, window": ((1, 8, 8, 2, 1, 8, 8), packed([5, 3], [5, 3], window=2)),
    "no queries": ((1, 0, 3, 2, 1, 8, 8), AttentionMask(causal=False)),
    "no keys": ((1, 3, 0, 2, 1, 8, 8), AttentionMask(causal=False)),
}


def block(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Return q, k, v and the gradient of o; heads of q lie in wider rows."""
    B, T, S, H, h, d, v = shape
    draw = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, d + 8), (B, S, h, d), (B, S, h, v), (B, T, H, v))
    made = [torch.randn(s, generator=draw).to(device, dtype) for s in shapes]
    return [made[0][..., :d], *made[1:]]


def documents(mask: AttentionMask, B: int, T: int, S: int) -> list[tuple[range, range]]:
    """Return the queries and keys of each document among all rows of the batch."""
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        return [(range(b * T, (b + 1) * T), range(b * S, (b + 1) * S)) for b in range(B)]
    cu_q, cu_k = mask.cu_seqlens_q.tolist(), mask.cu_seqlens_k.tolist()
    pairs = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
    return [(range(*of_q), range(*of_k)) for of_q, of_k in pairs]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Return o and lse: every query against the list of the keys that it sees."""
    (B, T, H, _), (_, S, h, _) = q.shape, k.shape
    o, lse = v.new_zeros(B, T, H, v.shape[-1]), torch.full((B, H, T), -math.inf, dtype=v.dtype)
    q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
    for queries, keys in documents(mask, B, T, S):
        for i, row in enumerate(queries):
            place = i + len(keys) - len(queries)
            last = place if mask.causal else len(keys) - 1
            first = 0 if mask.window is None else max(0, place - mask.window + 1)
            seen = [keys[j] for j in range(first, last + 1) if j >= 0]
            for head in range(H if seen else 0):
                s = k_[seen, head * h // H] @ q_[row, head] * SCALE
                lse[row // T, head, row % T] = s.logsumexp(0)
                o[row // T, row % T, head] = s.softmax(0) @ v_[seen, head * h // H]
    return o, lse


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_attention_token_by_token(case: str) -> None:
    shape, mask = CASES[case]
    q, k, v, do = block(shape, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o_want, lse_want = token_by_token(*leaves, mask)
    o, lse = attention_forward(q, k, v, mask, SCALE)
    torch.testing.assert_close((o, lse), (o_want, lse_want))
    loss = (o_want * do).sum() + sum(0 * x.sum() for x in leaves)  # of no keys, too
    want = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(attention_backward(do, q, k, v, o, lse, mask, SCALE), want)


def test_sums_are_in_fp32() -> None:
    q, k, v, do = block((2, 64, 64, 4, 2, 16, 16), torch.bfloat16)
    o, lse = attention_forward(q, k, v, AttentionMask(), SCALE)
    wide = [x.float() for x in (q, k, v)]
    o_want, lse_want = attention_forward(*wide, AttentionMask(), SCALE)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(o, o_want.bfloat16()) and torch.equal(lse, lse_want)
    grads = attention_backward(do, q, k, v, o, lse, AttentionMask(), SCALE)
    want = attention_backward(do.float(), *wide, o.float(), lse, AttentionMask(), SCALE)
    assert all(torch.equal(g, w.bfloat16()) for g, w in zip(grads, want, strict=True))


def test_blocks_of_keys_and_a_sink_add_up() -> None:
    """Two blocks merged by their lse, a sink folded in: one call each gives whole gradients."""
    q, k, v, do = block((2, 3, 8, 4, 2, 8, 8), torch.float64)
    sinks_H = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    # A sink is a key whose score is given and whose value is 0.
    s = torch.einsum("bthd,bshd->bhts", leaves[0], leaves[1].repeat_interleave(2, 2)) * SCALE
    future = torch.arange(8) > torch.arange(5, 8)[:, None]
    s = torch.cat((s.masked_fill(future, -math.inf), sinks_H[:, None, None].expand(2, 4, 3, 1)), -1)
    p = s.softmax(-1)[..., :-1]
    o_want = torch.einsum("bhts,bshd->bthd", p, leaves[2].repeat_interleave(2, 2))
    masks = [AttentionMask(causal=False), AttentionMask()]
    parts = [(k[:, :5], v[:, :5]), (k[:, 5:], v[:, 5:])]
    found = [attention_forward(q, *kv, m, SCALE) for kv, m in zip(parts, masks, strict=True)]
    lse = torch.stack([lse for _, lse in found] + [sinks_H[:, None].expand(2, 4, 3)])
    lse = lse.logsumexp(0)
    o = sum(o * (one - lse).exp().transpose(1, 2)[..., None] for o, one in found)
    assert isinstance(o, Tensor)
    torch.testing.assert_close(o, o_want)
    pairs = zip(parts, masks, strict=True)
    grads = [attention_backward(do, q, *kv, o, lse, m, SCALE) for kv, m in pairs]
    want = torch.autograd.grad((o_want * do).sum(), leaves)
    torch.testing.assert_close(grads[0][0] + grads[1][0], want[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat((grads[0][i], grads[1][i]), 1), want[i])


def test_refusals() -> None:
    cu = torch.tensor([0, 4], dtype=torch.int32)
    whole: Any = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_length_q=4, max_length_k=4)
    for change, message in (
        (dict(causal=False, window=2), r"AttentionMask.window \(2\) must be None without causal"),
        (dict(window=0), r"AttentionMask.window \(0\) must be a whole number >= 1"),
        (whole | {"cu_seqlens_k": None}, r"cu_seqlens_k \(None\) must be given with cu_seqlens_q"),
        (whole | {"cu_seqlens_q": cu.long()}, r"cu_seqlens_q .* must be int32 \[n \+ 1\]"),
        (whole | {"cu_seqlens_k": cu[:1]}, r"cu_seqlens_k .* must have the shape of cu_seqlens_q"),
        ({"max_length_q": 4}, r"max_length_q \(4\) must be given with cu_seqlens_q"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionMask(**change)
    q, k, v, _ = block((1, 4, 4, 4, 2, 8, 8), torch.float32)
    with pytest.raises(ValueError, match=r"k \(1, 4, 3, 8\) and v .* with h a divisor of 4"):
        attention_forward(q, k[:, :, :1].expand(1, 4, 3, 8), v, AttentionMask(), SCALE)
    with pytest.raises(ValueError, match=r"k \(torch.float64\) .* must have the dtype of q"):
        attention_forward(q, k.double(), v, AttentionMask(), SCALE)


def test_a_hopper_without_the_fast_package_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = "flash-attn-4 must be installed and have its functions (none): install it"
    monkeypatch.setattr(flash4, "_find_import_problem", lambda: reason)
    flash4.warn_if_missing.cache_clear()
    monkeypatch.setattr(cudnn, "find_problem", lambda *x: "no" if x[3].is_packed else None)
    monkeypatch.setattr(flash, "find_problem", lambda *_: None)
    heads = [torch.empty(1, 4, 2, 8, device="meta") for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rule.choose_attention_kernel(*heads, AttentionMask()) is cudnn
        assert rule.choose_attention_kernel(*heads, packed([4], [4])) is flash  # no GPU
    with pytest.warns(UserWarning, match="FlashAttention 2, at about half the speed: flash-attn-4"):
        flash4.warn_if_missing(torch.device("cuda", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash4.warn_if_missing(torch.device("cuda", 0))
    flash4.warn_if_missing.cache_clear()


def test_each_implementation_names_what_it_cannot_compute() -> None:
    q, k, v, _ = block((1, 4, 6, 2, 1, 8, 8), torch.bfloat16)
    assert rule.choose_attention_kernel(q, k, v, AttentionMask()) is reference
    few, wide = (1, 6, 4, 2, 1, 8, 8), (1, 4, 4, 2, 1, 192, 64)
    for kernel, shape, mask, message in (
        (cudnn, few, AttentionMask(), r"queries \(6\) must be at most as many as keys \(4\)"),
        (cudnn, wide, AttentionMask(), r"head dims \(192, 64\) must be up to 128, values'"),
        (cudnn, None, AttentionMask(), r"device \(cpu\) must be cuda"),
        (cudnn, None, AttentionMask(window=3), r"window \(3\) must be None"),
        (cudnn, None, packed([4], [6]), "cu_seqlens_q must be None"),
        (flash, None, packed([4], [6], window=2), r"device \(cpu\) must be cuda"),
        (flash4, None, packed([4], [6], window=2), r"device \(cpu\) must be cuda"),
    ):
        heads = (q, k, v) if shape is None else block(shape, torch.bfloat16)[:3]
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(kernel.find_problem(*heads, mask))


@pytest.mark.parametrize("queries", [3, 8])
def test_cudnn_takes_the_last_queries_in_two_blocks(monkeypatch, queries) -> None:
    """Its calls, by the reference: no key twice, causal squares alone, o and do in one layout."""
    keys = []

    def check(causal: bool, q: Tensor, k: Tensor) -> AttentionMask:
        assert q.shape[1] == k.shape[1] or not causal
        keys.append(k.shape[1])
        return AttentionMask(causal=causal)

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        return forward_of(reference, q, k, v, check(causal, q, k), scale)

    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Any) -> Any:
        lse, causal, scale = rest
        assert do.is_contiguous() and o.is_contiguous() and lse.is_contiguous()
        return backward_of(reference, do, q, k, v, o, lse, check(causal, q, k), scale)

    monkeypatch.setattr(cudnn, "_run_forward", forward)
    monkeypatch.setattr(cudnn, "_run_backward", backward)
    q, k, v, do = block((2, queries, 8, 4, 2, 8, 8), torch.float64)
    mask = AttentionMask()
    o_want, lse_want = forward_of(reference, q, k, v, mask, SCALE)
    torch.testing.assert_close(forward_of(cudnn, q, k, v, mask, SCALE), (o_want, lse_want))
    more = torch.logaddexp(lse_want, torch.ones_like(lse_want))  # others' keys
    o_more = o_want * (lse_want - more).exp().transpose(1, 2)[..., None]
    want = backward_of(reference, do, q, k, v, o_more, more, mask, SCALE)
    scattered = (heads_first(do), q, k, v, heads_first(o_more), more.mT.contiguous().mT)
    torch.testing.assert_close(backward_of(cudnn, *scattered, mask, SCALE), want)
    assert keys == 2 * ([8] if queries == 8 else [5, 3])


FLASH4 = ["causal", "all", "a chunk's queries", "window", "window of one, shifted"]
FLASH4 += [case for case in CASES if case.startswith("documents")]


@pytest.mark.parametrize("case", FLASH4)
def test_flash4_passes_on_heads_and_masks(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Its functions by the reference: [B, T, H, d] or packed [T, H, d], windows of keys before."""

    def whole(how: dict[str, Any], *heads: Tensor) -> tuple[list[Tensor], AttentionMask]:
        left, right = how["window_size_left"], how["window_size_right"]
        assert (left is None) == (right is None) and not (how["causal"] and right == 0)
        names = {"max_length_q": "max_seqlen_q", "max_length_k": "max_seqlen_k"}
        documents = {name: how[names.get(name, name)] for name in DOCUMENTS}
        window = None if left is None else left + 1
        mask = AttentionMask(causal=how["causal"] or right == 0, window=window, **documents)
        return [x if x.ndim == 4 else x[None] for x in heads], mask

    def forward(*heads: Tensor, return_lse: bool, **how: Any) -> tuple[Tensor, ...]:
        wide, mask = whole(how, *heads)
        o, lse = forward_of(reference, *wide, mask, how["softmax_scale"])
        return (o, lse) if mask.cu_seqlens_q is None else (o[0], lse[0])

    def backward(*heads: Tensor, deterministic: bool, **how: Any) -> tuple[Tensor, ...]:
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        assert not heads[-1].isneginf().any()  # of rows that see nothing
        (q, k, v, o, do), mask = whole(how, *heads[:-1])
        lse = heads[-1].masked_fill(heads[-1].isinf(), -math.inf)
        lse = lse if mask.cu_seqlens_q is None else lse[None]
        grads = backward_of(reference, do, q, k, v, o, lse, mask, how["softmax_scale"])
        return tuple(x if mask.cu_seqlens_q is None else x[0] for x in grads)

    monkeypatch.setattr(flash4, "_import_functions", lambda: flash4._Functions(forward, backward))
    shape, mask = CASES[case]
    q, k, v, do = block(shape, torch.float64)
    want = forward_of(reference, q, k, v, mask, SCALE)
    found = forward_of(flash4, q, k, v, mask, SCALE)
    torch.testing.assert_close(found, want)
    args = (do, q, k, v, *want, mask, SCALE)
    torch.testing.assert_close(backward_of(flash4, *args), backward_of(reference, *args))


def heads_first(x_BTHv: Tensor) -> Tensor:
    """Return the same with memory in the order B, H, T, v."""
    return x_BTHv.transpose(1, 2).contiguous().transpose(1, 2)


ON_GPU: dict[str, tuple[AttentionKernel, tuple[int, ...], Any]] = {
    "cudnn, causal": (cudnn, (2, 300, 300, 8, 2, 128, 128), AttentionMask()),
    "cudnn, values of another dim": (cudnn, (2, 256, 256, 4, 4, 128, 64), AttentionMask()),
    "cudnn, latent": (cudnn, (2, 256, 256, 4, 4, 192, 128), AttentionMask()),
    "cudnn, latent, all": (cudnn, (2, 256, 384, 4, 4, 192, 128), AttentionMask(causal=False)),
    "cudnn, latent, shifted": (cudnn, (2, 256, 640, 4, 4, 192, 128), AttentionMask()),
    "cudnn, shifted": (cudnn, (2, 256, 640, 8, 2, 128, 128), AttentionMask()),
    "cudnn, all": (cudnn, (1, 256, 512, 4, 2, 64, 64), AttentionMask(causal=False)),
    "flash, causal": (flash, (2, 300, 300, 8, 2, 128, 128), AttentionMask()),
    "flash, shifted": (flash, (2, 100, 300, 8, 2, 128, 128), AttentionMask()),
    "flash, nothing seen": (flash, (2, 300, 200, 8, 2, 128, 128), AttentionMask()),
    "flash, window": (flash, (2, 300, 300, 8, 2, 64, 64), AttentionMask(window=37)),
    "flash, documents": (flash, (1, 600, 600, 8, 2, 128, 128), ([1, 130, 400, 69, 0, 0], None, {})),
    "flash, rows": (flash, (2, 300, 300, 8, 2, 128, 128), ([200, 100, 7, 293], None, {})),
    "flash, latent rows": (flash, (2, 256, 256, 4, 4, 192, 128), AttentionMask()),
    "flash, latent": (flash, (1, 600, 600, 4, 4, 192, 128), ([1, 530, 69, 0], None, {})),
    "flash, keys": (flash, (1, 300, 500, 4, 1, 64, 64), ([100, 0, 200, 0], [50, 50, 400, 0], {})),
    "flash, narrow": (flash, (1, 300, 300, 4, 1, 64, 64), ([100, 200], None, {"window": 17})),
}
ON_GPU |= {
    case.replace("flash", "flash4"): (flash4, shape, mask)
    for case, (kernel, shape, mask) in ON_GPU.items()
    if kernel is flash
}


def on_gpu(case: str, device: str) -> tuple[AttentionKernel, tuple[int, ...], AttentionMask]:
    """Return the case with a mask on a device."""
    kernel, shape, mask = ON_GPU[case]
    if not isinstance(mask, AttentionMask):
        lengths, of_keys, options = mask
        mask = packed(lengths, of_keys or lengths, device, **options)
    return kernel, shape, mask


@pytest.mark.parametrize("case", [case for case in ON_GPU if ON_GPU[case][0] is not flash4])
def test_torch_has_the_operators(case: str) -> None:
    """Their names, arguments and shapes, without a GPU."""
    kernel, shape, mask = on_gpu(case, "meta")
    q, k, v, do = block(shape, torch.bfloat16, "meta")
    o, lse = forward_of(kernel, q, k, v, mask, SCALE)
    assert o.shape == do.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    grads = backward_of(kernel, do, q, k, v, o, lse, mask, SCALE)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [None, 9])
def test_batch_invariance(window: int | None, place: str, dtype: torch.dtype) -> None:
    """A document has the same bits alone and between others."""
    lengths = [1, 20, 7, 33, 12] if place == "cpu" else [1, 20, 200, 133, 700]
    total = sum(lengths)
    q, k, v, _ = block((1, total, total, 8, 2, 64, 64), dtype, place)
    with batch_invariant(place):
        o, lse = attention_forward(q, k, v, packed(lengths, lengths, place, window=window), SCALE)
        for i, length in enumerate(lengths):
            at = slice(sum(lengths[:i]), sum(lengths[:i]) + length)
            mask = packed([length], [length], place, window=window)
            alone, lse_alone = attention_forward(q[:, at], k[:, at], v[:, at], mask, SCALE)
            assert torch.equal(alone, o[:, at]) and torch.equal(lse_alone, lse[..., at])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ON_GPU)
def test_a_fused_kernel_is_the_reference(case: str, dtype: torch.dtype) -> None:
    kernel, shape, mask = on_gpu(case, "cuda")
    skip_without_package(kernel)
    q, k, v, do = block(shape, dtype, "cuda")
    assert kernel.find_problem(q, k, v, mask) is None
    wide = [x.double() for x in (q, k, v)]
    o_want, lse_want = forward_of(reference, *wide, mask, SCALE)
    want = backward_of(reference, do.double(), *wide, o_want, lse_want, mask, SCALE)
    o, lse = forward_of(kernel, q, k, v, mask, SCALE)
    grads = backward_of(kernel, do, q, k, v, o, lse, mask, SCALE)
    plain_o, plain_lse = forward_of(reference, q, k, v, mask, SCALE)
    plain = backward_of(reference, do, q, k, v, plain_o, plain_lse, mask, SCALE)
    torch.testing.assert_close(lse.double(), lse_want, rtol=1e-4, atol=1e-4)
    assert o.dtype == dtype and lse.dtype == torch.float32
    for got, rounded, exact in zip((o, *grads), (plain_o, *plain), (o_want, *want), strict=True):
        bound = 4 * (rounded.double() - exact).abs().max() + 1e-6
        assert (got.double() - exact).abs().max() <= bound, (case, got.shape)
    # Others' keys: final o and lse of more than this block, in each layout.
    more = torch.logaddexp(lse_want, torch.zeros_like(lse_want))
    o_more = o_want * (lse_want - more).exp().transpose(1, 2)[..., None]
    want = backward_of(reference, do.double(), *wide, o_more, more, mask, SCALE)
    for lay_out in (Tensor.contiguous, heads_first):
        given = lay_out(do), q, k, v, lay_out(o_more.to(dtype)), more.float()
        grads = backward_of(kernel, *given, mask, SCALE)
        for got, exact in zip(grads, want, strict=True):
            bound = dict(rtol=0.02, atol=0.02 * exact.abs().max())
            torch.testing.assert_close(got.double(), exact, **bound)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_exclude_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no such backward of cuDNN, and FlashAttention 4 has none for SM 12."""
    q, k, v, _ = block((2, 8, 8, 4, 2, 64, 64), torch.bfloat16, "meta")
    with treat_meta_as("cuda"):
        assert rule.choose_attention_kernel(q, k, v, AttentionMask()) is flash
        torch.use_deterministic_algorithms(True, warn_only=True)  # what torch excludes cuDNN by
        assert rule.choose_attention_kernel(q, k, v, AttentionMask()) is cudnn
    monkeypatch.setattr(flash4, "find_16_bit_problem", lambda *_: None)
    monkeypatch.setattr(flash4, "_find_import_problem", lambda: None)
    q, k, v, _ = block((2, 8, 8, 4, 2, 64, 64), torch.bfloat16)
    for major, is_supported in ((9, True), (10, True), (12, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert (flash4.find_problem(q, k, v, AttentionMask()) is None) == is_supported


DETERMINISTIC = {
    "causal": ((2, 2048, 2048, 16, 4, 128, 128), AttentionMask()),
    "window": ((2, 2048, 2048, 16, 4, 128, 128), AttentionMask(window=700)),
    "documents": ((1, 4096, 4096, 16, 4, 128, 128), ([100, 1900, 2096], None, {})),
    "latent": ((1, 4096, 4096, 16, 16, 192, 128), ([100, 1900, 2096], None, {})),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kernel", [flash, flash4], ids=["flash", "flash4"])
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_a_backward_has_the_same_bits(case: str, kernel: AttentionKernel) -> None:
    skip_without_package(kernel)
    shape, mask = DETERMINISTIC[case]
    if not isinstance(mask, AttentionMask):
        mask = packed(mask[0], mask[0], "cuda")
    q, k, v, do = block(shape, torch.bfloat16, "cuda")
    o, lse = forward_of(kernel, q, k, v, mask, SCALE)
    want = backward_of(kernel, do, q, k, v, o, lse, mask, SCALE)
    for _ in range(20):
        assert all(map(torch.equal, forward_of(kernel, q, k, v, mask, SCALE), (o, lse)))
        assert all(map(torch.equal, backward_of(kernel, do, q, k, v, o, lse, mask, SCALE), want))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["cudnn, causal", "flash, rows", "flash4, rows", "flash4, window"])
def test_a_fused_kernel_runs_on_the_current_stream(case: str) -> None:
    """In a CUDA graph: what runs elsewhere ends its capture, or is not in it."""
    kernel, shape, mask = on_gpu(case, "cuda")
    skip_without_package(kernel)
    q, k, v, do = block(shape, torch.bfloat16, "cuda")

    def run() -> tuple[Tensor, ...]:
        o, lse = forward_of(kernel, q, k, v, mask, SCALE)
        return o, lse, *backward_of(kernel, do, q, k, v, o, lse, mask, SCALE)

    want, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    for got, x in zip(found, want, strict=True):
        torch.testing.assert_close(got, x, rtol=0.02, atol=0.02)  # sums of dq have no order
