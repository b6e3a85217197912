"""The kernel of the indexer's scores against plain PyTorch in fp64: documents, tiles, rests."""

from __future__ import annotations

import pytest
import torch

from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.index import (
    _has_kernel,
    compute_index_scores,
    compute_span_scores,
)
from moecore.kernels.sparse_attention.keys import SpanOfKeys

# queries [begin, end) of keys [first, last), the first key of each query's document
CASES = {
    "a row": (0, 70, 0, 300, 0),
    "its end": (600, 700, 0, 700, 0),
    "documents": (300, 400, 100, 600, 150),
    "one query": (5, 6, 0, 6, 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_plain_pytorch(name: str, dtype: torch.dtype, device: str) -> None:
    begin, end, first, last, document = CASES[name]
    g = torch.Generator().manual_seed(0)
    h, i, C = 3, 16, end - begin
    q = torch.randn(C, h, i, generator=g).to(device, dtype)
    k = torch.randn(last + 9, i, generator=g).to(device, dtype)
    w = torch.randn(C, h, generator=g).to(device)
    own_C = torch.arange(begin, end, device=device)
    first_C = torch.where(own_C % 2 == 0, document, own_C - 1).clamp(min=first)
    span, index = SpanOfKeys(first, last, first_C, own_C), IndexerHeads(q, k, w)
    assert _has_kernel(index)
    got = compute_span_scores(index, span)
    want = compute_index_scores(IndexerHeads(q.double(), k.double(), w.double()), span)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want > -torch.inf
    error = (got.double() - want)[seen].abs().max()
    assert error <= 1e-6 * want[seen].abs().max()
