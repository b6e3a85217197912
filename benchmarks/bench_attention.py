"""Attention through `attend`, forward and backward, against torch's kernels on the same heads.

    rows    one document per row; baseline: F.scaled_dot_product_attention, which uses cuDNN
    ring    the computation of one of 8 context parallel ranks without communication; baseline: one
            call with as many FLOP
    packed  documents of skewed lengths in one row; baseline: torch's FlashAttention of the same
            documents, called directly, without the checks of moecore

TFLOP/s count 2 (d + v) per head and pair of tokens that attend to each other, and 2.5 times that
for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, records
from benchmarks.records import Row
from benchmarks.session import Ceilings, Session
from moecore.attention.context_parallel import ring
from moecore.attention.context_parallel.local_tokens import ChunkLayout
from moecore.attention.function import attend
from moecore.attention.sequence import Sequence, make_packed_sequence
from moecore.kernels.attention import AttentionMask, attention_backward, attention_forward

NUM_TOKENS = {"cuda": (4096, 16384, 65536), "cpu": (64,)}
NUM_DOCUMENTS = 16
RING, RANK = 8, 3


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key/value heads, and the dims of a query and of a value."""

    queries: int
    keys: int
    dim: int
    value_dim: int


HEADS = {"grouped": Heads(32, 4, 128, 128), "latent": Heads(32, 32, 192, 128)}


def make_lengths(num_tokens: int) -> list[int]:
    """Return document lengths that sum to `num_tokens`: lognormal, the same in every run."""
    g = torch.Generator().manual_seed(0)
    shares = torch.randn(NUM_DOCUMENTS, generator=g).exp()
    lengths = (shares / shares.sum() * (num_tokens - NUM_DOCUMENTS)).int() + 1
    lengths[0] += num_tokens - lengths.sum()
    return [int(n) for n in lengths]


def make_call(
    attention: Callable[..., Tensor], heads: tuple[Tensor, ...], do: Tensor
) -> Callable[[], None]:
    """Return a call that runs forward and backward of `attention`."""

    def call() -> None:
        torch.autograd.grad(attention(*heads), heads, do)

    return call


@pytest.mark.proven_by("tests/kernels/attention/test_attention.py")
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_attention(session: Session, ceilings: Ceilings, name: str, packed: bool) -> None:
    device, shape = session.device, HEADS[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    scale = shape.dim**-0.5
    for T in NUM_TOKENS[device.type]:
        lengths = make_lengths(T) if packed else [T]

        def make(num_heads: int, dim: int, T: int = T) -> Tensor:
            return torch.randn(1, T, num_heads, dim, device=device, dtype=dtype, requires_grad=True)

        q = make(shape.queries, shape.dim)
        k = make(shape.keys, shape.dim)
        v = make(shape.keys, shape.value_dim)
        do = torch.randn(1, T, shape.queries, shape.value_dim, device=device, dtype=dtype)
        sequence = Sequence()
        if packed:
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            sequence = make_packed_sequence(ends, None, (1, T), device)
        bare = make_torch_attention(sequence, scale)
        calls = {
            "attend": make_call(
                lambda q, k, v, s=sequence: attend(q, k, v, s, scale=scale), (q, k, v), do
            ),
            "bare": make_call(bare, (q, k, v), do),
        }
        timings = harness.time_variants(calls, device=device, effort=session.effort)
        ms = timings["attend"].ms
        pairs = sum(n * n for n in lengths) / 2
        tflops = 3.5 * 2 * pairs * shape.queries * (shape.dim + shape.value_dim) / ms / 1e9
        session.add(
            Row(
                op="attention_packed" if packed else "attention",
                shape=f"{name}, {T} tokens",
                routing="-",
                backend="attend",
                **records.make_timing_fields(timings["attend"]),
                baseline="torch's kernels",
                baseline_ms=timings["bare"].ms,
                ratio=ms / timings["bare"].ms,
                tflops=tflops,
                fraction=tflops / ceilings.tflops,
                peak_bytes=harness.measure_peak(calls["attend"], device=device),
                launches=harness.count_launches(calls["attend"], device=device),
                syncs=harness.count_syncs(calls["attend"], device=device),
            )
        )
        assert math.isfinite(tflops)


def make_torch_attention(sequence: Sequence, scale: float) -> Callable[..., Tensor]:
    """Return torch's attention of the sequence's documents."""
    cu_seqlens = sequence.cu_seqlens
    if cu_seqlens is None or not cu_seqlens.is_cuda:
        return lambda q, k, v: F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """FlashAttention; values are padded to the dim of queries, which the operation requires."""
        v_padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        longest = sequence.max_seqlen
        where = cu_seqlens, cu_seqlens, longest, longest
        o, *_ = torch.ops.aten._flash_attention_forward(
            q[0], k[0], v_padded[0], *where, 0.0, True, False, scale=scale
        )
        return o[None, ..., : v.shape[-1]]

    return flash


class FakeRing:
    """Process group of a ring in which only this rank exists."""

    def size(self) -> int:
        """Return the number of ranks."""
        return RING

    def rank(self) -> int:
        """Return the number of this rank."""
        return RANK


@pytest.mark.proven_by("tests/attention/test_context_parallel.py")
def test_ring(session: Session, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank has this one's keys and values.
    monkeypatch.setattr(ring, "_send_to_next", lambda x, _: ring._RingTransfer(x, x, []))
    device, shape = session.device, HEADS["grouped"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    scale = shape.dim**-0.5
    T = NUM_TOKENS[device.type][-1]
    own = T // RING

    def make(tokens: int, num_heads: int, dim: int) -> Tensor:
        return torch.randn(1, tokens, num_heads, dim, device=device, dtype=dtype)

    q, do = make(own, shape.queries, shape.dim), make(own, shape.queries, shape.value_dim)
    dims = (shape.dim, shape.value_dim)
    heads = (q.clone(), *(make(own, shape.keys, dim) for dim in dims))
    where = None, ChunkLayout(RING, T), FakeRing(), scale
    of_ring = make_call(
        lambda *qkv: ring.RingAttention.apply(*qkv, *where),
        tuple(x.requires_grad_() for x in heads),
        do,
    )
    seen = (T + own) // 2  # keys of a query, in the mean
    k, v = (make(seen, shape.keys, dim) for dim in dims)
    mask = AttentionMask(causal=False)

    def one_call() -> None:
        o, lse = attention_forward(q, k, v, mask, scale)
        attention_backward(do, q, k, v, o, lse, mask, scale)

    calls = {"ring": of_ring, "one call": one_call}
    timings = harness.time_variants(calls, device=device, effort=session.effort)
    ms, flops = timings["ring"].ms, 3.5 * 2 * own * seen * shape.queries * sum(dims)
    session.add(
        Row(
            op="attention_ring",
            shape=f"grouped, {T} tokens, cp {RING}",
            routing="-",
            backend="p2p",
            **records.make_timing_fields(timings["ring"]),
            baseline="one call",
            baseline_ms=timings["one call"].ms,
            ratio=ms / timings["one call"].ms,
            tflops=flops / ms / 1e9,
            fraction=flops / ms / 1e9 / ceilings.tflops,
            peak_bytes=harness.measure_peak(calls["ring"], device=device),
            launches=harness.count_launches(calls["ring"], device=device),
            syncs=harness.count_syncs(calls["ring"], device=device),
        )
    )
