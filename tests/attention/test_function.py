import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moecore.attention.function as function
from moecore.attention.function import attend
from moecore.attention.linear import causal_conv1d
from moecore.attention.sequence import Sequence, make_packed_sequence, split_documents
from moecore.base.regions import recompute_products
from moecore.train.memory.recompute import recompute, share_region_outputs

CPU = torch.device("cpu")
LENGTHS = [5, 1, 4, 0]
CU_SEQLENS = torch.tensor([0, 5, 6, 10, 10])
PACKED = make_packed_sequence(CU_SEQLENS, None, (2, 5), CPU)
SCALE = 0.3


def heads(B: int = 2, T: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k and v with 4 query heads, 2 of keys, and sinks."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((B, T, 4, 8), (B, T, 2, 8), (B, T, 2, 6), (4,))
    return [torch.randn(s, generator=draw, dtype=dtype).requires_grad_() for s in shapes]


def by_scores(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Return the attention of one document, [1, T, ...], out of a softmax over all its scores."""
    T = q.shape[1]
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    ago = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (ago < 0) | (ago >= (window or T))
    scores = (torch.einsum("bthd,bshd->bhts", q, k) * SCALE).masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(1, 4, T, 1)), dim=-1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., :T], v)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_each_document_is_alone(packed: bool, with_sinks: bool, window: int | None) -> None:
    q, k, v, sinks = heads()
    given = sinks if with_sinks else None
    lengths = LENGTHS if packed else [5, 5]
    rows = [x.flatten(0, 1).split(lengths) for x in (q, k, v)]
    want = torch.cat(
        [by_scores(*(x[None] for x in one), window, given) for one in zip(*rows, strict=True)], 1
    ).view(2, 5, 4, 6)
    o = attend(q, k, v, PACKED if packed else Sequence(), scale=SCALE, window=window, sinks_H=given)
    torch.testing.assert_close(o, want)
    leaves = [q, k, v, sinks] if with_sinks else [q, k, v]
    do = torch.randn(o.shape, dtype=o.dtype)
    grads = [torch.autograd.grad(y, leaves, do, retain_graph=True) for y in (o, want)]
    torch.testing.assert_close(*grads)


def test_plain_rows_are_torchs_own() -> None:
    q, k, v, _ = heads(dtype=torch.float32)
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v[..., [0, *range(6), 5]])),
        is_causal=True,
        enable_gqa=True,
    )
    got = attend(q, k, v[..., [0, *range(6), 5]], Sequence(), scale=8**-0.5)
    assert torch.equal(got, want.transpose(1, 2))


def test_what_it_keeps_and_what_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention keeps its inputs, o and lse; a region runs it once, and twice as a product."""
    q, k, v, sinks = heads()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        o = attend(q, k, v, PACKED, scale=SCALE, sinks_H=sinks)
    assert sorted(kept) == sorted([*(x.shape for x in (q, k, v, sinks, o)), (2, 4, 5), (5,)])
    want = torch.autograd.grad(o.square().sum(), (q, k, v))
    runs: list[int] = []
    forward = function.attention_forward
    monkeypatch.setattr(function, "attention_forward", lambda *a: [runs.append(1), forward(*a)][1])

    def part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.sin().asin() for x in (q / 8, k / 8, v / 8))
        return attend(q * 8, k * 8, v * 8, PACKED, scale=SCALE, sinks_H=sinks)

    def part_again(*heads: Tensor) -> Tensor:
        with recompute_products():
            return part(*heads)

    for run, num in ((part, 1), (part_again, 2)):
        runs.clear()
        with share_region_outputs():
            o = recompute("part", run, (q, k, v)) * 1.0
        torch.testing.assert_close(torch.autograd.grad(o.square().sum(), (q, k, v)), want)
        assert len(runs) == num


def test_a_compiler_sees_one_operation_and_no_second_derivative() -> None:
    q, k, v, sinks = heads(dtype=torch.float32)

    def part(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q * 2, k, v, PACKED, scale=SCALE, window=3, sinks_H=sinks) * 2

    compiled: Any = torch.compile(part, fullgraph=True, backend="aot_eager")
    found = [one(q, k, v, sinks) for one in (compiled, part)]
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v, sinks)) for o in found]
    torch.testing.assert_close((found[0], grads[0]), (found[1], grads[1]))
    o = attend(q, k, v, PACKED, scale=SCALE)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_bwd"):
        dq.sum().backward()


def test_autocast_multiplies_in_its_dtype() -> None:
    q, k, v, _ = heads(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = attend(q, k, v, PACKED, scale=SCALE)
        plain = attend(q, k, v, Sequence(), scale=SCALE)
    assert o.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(o, attend(*(x.bfloat16() for x in (q, k, v)), PACKED, scale=SCALE))


def test_places_in_packed_rows() -> None:
    assert PACKED.positions_BT is not None and PACKED.max_seqlen == 5
    assert PACKED.positions_BT.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    x = torch.arange(1, 11).view(2, 5)
    assert PACKED.shift_tokens(x, 1, 0).tolist() == [[2, 3, 4, 5, 0], [0, 8, 9, 10, 0]]
    assert PACKED.shift_tokens(x, 3, -1).tolist() == [[4, 5, -1, -1, -1], [-1, 10, -1, -1, -1]]
    assert PACKED.shift_tokens(x > 3, 1, True).tolist() == [[False] * 2 + [True] * 3, [True] * 5]
    assert Sequence().shift_tokens(x, 1, 0).tolist() == [[2, 3, 4, 5, 0], [7, 8, 9, 10, 0]]


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        ([0, 5, 9], None, r"cu_seqlens \(first and last \(0, 9\)\) must rise from 0 to .* \(10\)"),
        ([1, 10], None, r"first and last \(1, 10\)"),
        ([0, 6, 5, 10], None, "must rise from 0"),
        ([10], None, "must rise from 0"),
        ([0, 5, 10], 4, r"max_seqlen \(4\) must be >= the longest document \(5\)"),
        ([[0, 10]], None, r"cu_seqlens \(1, 2\) \(torch.int64\) must be int32 \[n \+ 1\]"),
        ([0.0, 10.0], None, r"cu_seqlens \(2,\) \(torch.float32\) must be int32"),
    ],
)
def test_documents_that_are_not_those_of_the_rows(cu_seqlens, max_seqlen, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_packed_sequence(torch.tensor(cu_seqlens), max_seqlen, (2, 5), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_packed_documents_on_a_gpu(dims: tuple[int, int], window: int | None) -> None:
    """Against fp64 on the CPU; a CUDA graph follows other documents of the same number."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 512, h, d) for h, d in ((8, dims[0]), (2, dims[0]), (2, dims[1])))
    sinks, do = torch.randn(8), torch.randn(1, 512, 8, dims[1])
    given = [x.cuda().bfloat16().requires_grad_() for x in (q, k, v)]
    given.append(sinks.cuda().requires_grad_())
    cu_seqlens = torch.tensor([0, 1, 300, 512, 512], device="cuda", dtype=torch.int32)
    grad = do.cuda().bfloat16()

    def run() -> tuple[Tensor, ...]:
        sequence = make_packed_sequence(cu_seqlens, 400, (1, 512), cu_seqlens.device)
        *qkv, sinks_H = given
        o = attend(*qkv, sequence, scale=0.08, window=window, sinks_H=sinks_H)
        return o, *torch.autograd.grad(o, given, grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm-up, as capture wants it
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for documents in ([0, 1, 300, 512, 512], [0, 200, 201, 401, 512]):
        cu_seqlens.copy_(torch.tensor(documents, dtype=torch.int32))
        graph.replay()
        leaves = [x.detach().cpu().double().requires_grad_() for x in given]
        sequence = make_packed_sequence(torch.tensor(documents), None, (1, 512), CPU)
        *qkv, sinks_H = leaves
        o = attend(*qkv, sequence, scale=0.08, window=window, sinks_H=sinks_H)
        want = (o, *torch.autograd.grad(o, leaves, grad.cpu().double()))
        for found in (captured, run()):
            for got, exact in zip(found, want, strict=True):
                error = (got.detach().cpu().double() - exact).abs().max()
                assert error <= 0.02 * exact.abs().max(), (got.shape, error)


def test_linear_attention_runs_after_a_run_with_fake_tensors() -> None:
    filters = torch.ones(3, 2), None
    with FakeTensorMode():
        causal_conv1d(torch.empty(2, 5, 3), torch.empty(3, 2), None, Sequence(), apply_silu=False)
    found = causal_conv1d(torch.ones(2, 5, 3), *filters, Sequence(), apply_silu=False)
    assert found[:, 0].eq(1).all() and found[:, 1:].eq(2).all()


@pytest.mark.parametrize(
    ("cu_seqlens", "size", "expected"),
    [
        ([0, 5, 8], 2, [0, 2, 4, 5, 7, 8]),
        ([0, 8, 8], 3, [0, 3, 6, 8]),
        ([0, 4, 8], 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (None, 3, [0, 3, 4, 7, 8]),
    ],
)
def test_chunks_begin_with_documents(cu_seqlens, size, expected) -> None:
    sequence = Sequence()
    if cu_seqlens is not None:
        sequence = make_packed_sequence(torch.tensor(cu_seqlens), None, (2, 4), CPU)
    chunks = split_documents(sequence, (2, 4), size, CPU)
    assert chunks.cu_seqlens is not None and chunks.cu_seqlens.dtype == torch.int32
    found = chunks.cu_seqlens.tolist()
    assert found[: len(expected)] == expected and set(found[len(expected) :]) <= {8}
    assert chunks.max_seqlen == size and chunks.positions_BT is sequence.positions_BT


def test_short_documents_are_not_cut() -> None:
    sequence = make_packed_sequence(torch.tensor([0, 3, 8]), None, (2, 4), CPU)
    assert split_documents(sequence, (2, 4), 5, CPU) is sequence
