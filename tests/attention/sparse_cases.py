"""Sparse attention over ranks against one process."""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from moecore.attention.sparse import KeyChoice, attend_sparse
from moecore.kernels.sparse_attention import IndexerHeads, LatentHeads, attention
from tests.attention.linear_cases import shared_tokens

KINDS = {
    "sparse": KeyChoice(top_k=5, returns_divergences=True),
    "all keys": KeyChoice(returns_divergences=True),
    "shared": KeyChoice(top_k=5),  # and once more with what was selected
}


def sparse_errors(cp, batch, packed, kind) -> list[float]:
    """Return the largest errors of outputs and every gradient, and of selected keys (0 or 1)."""
    (B, T, _), g = batch, torch.Generator().manual_seed(0)
    shapes = [(B, T, 2, 7), (B, T, 8), (2, 4, 5), (2, 5, 6), (B, T, 4, 6), (B, T, 6), (B, T, 4)]
    leaves = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    do, dkl = torch.randn(B, T, 2, 6, generator=g), torch.rand(B, T, generator=g)
    sequence, held = shared_tokens(cp, batch, packed)
    of_rows, want = (2, 3), _found(leaves, sequence, kind, do, dkl)
    own = [
        x if i in of_rows else held.slice_local(x.detach()).requires_grad_()
        for i, x in enumerate(leaves)
    ]
    over_ranks = replace(sequence, local_tokens=held)
    with patch.object(attention, "CHUNK_NUMBERS", 4000):  # several chunks
        got = _found(own, over_ranks, kind, held.slice_local(do), held.slice_local(dkl))
    for i in of_rows:  # weights: ranks have parts of their gradients
        torch.distributed.all_reduce(got[f"gradient {i}"], group=cp.group)
    errors = []
    for name, x in got.items():
        expected = want[name] if name[-1:] in map(str, of_rows) else held.slice_local(want[name])
        if x.is_floating_point():
            errors.append(float((x - expected).abs().max() / expected.abs().max()))
        else:
            errors.append(float(not torch.equal(x, expected)))
    return errors


def _found(leaves, sequence, kind, do, dkl) -> dict[str, Tensor]:
    heads, index, choice = LatentHeads(*leaves[:4]), IndexerHeads(*leaves[4:]), KINDS[kind]
    out = attend_sparse(heads, index, sequence, choice, scale=0.4)
    found = {"selected": out.selected_tK}
    if kind == "shared":
        chosen = KeyChoice(selected_BTK=out.selected_tK)
        out = attend_sparse(heads, None, sequence, chosen, scale=0.4)
    loss = (out.o_tHv * do).sum()
    if out.divergence_t is not None:
        loss = loss + (out.divergence_t * dkl).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    found |= {"o": out.o_tHv.detach(), "divergence": out.divergence_t}
    found |= {f"gradient {i}": grad for i, grad in enumerate(grads)}
    return {name: x.detach() for name, x in found.items() if x is not None}
