"""Sparse attention in chunks of queries, without a tensor over all pairs of tokens.

Legend: t queries, N keys, C queries of a chunk, K keys that a query reads, H heads, d = n + r dims
of a query, l = L + r dims of a key, v dims of a value.

A chunk's queries are multiplied by `up_HnL`, so that scores and sums use latents: a gathered key
has l numbers for all heads. The indexer scores the chunk's queries with all keys that they may see,
in fp32, and only the indices of the selected keys are saved. Backward recomputes the scores of
attention from the saved log-sum-exp, and the indexer's scores of the selected keys.

Queries of 16 bits that read selected keys use the kernels of `gathered.py`. The kernels do not
support divergences, and their backward is used only if autograd need not be deterministic.

`CHUNK_NUMBERS` limits the bytes of a chunk for any t and N.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecore.kernels.attention import compute_sinks_grad
from moecore.kernels.common import cdiv
from moecore.kernels.meta import repeat_on_meta
from moecore.kernels.sparse_attention.contract import (
    IndexerHeads,
    KeySpans,
    LatentHeads,
    SparseOutput,
)
from moecore.kernels.sparse_attention.gathered import (
    attend_to_selected,
    differentiate_selected,
    has_gathered_kernels,
)
from moecore.kernels.sparse_attention.index import (
    compute_divergence,
    compute_index_scores,
    compute_span_scores,
    count_workspace_floats,
    differentiate_divergence,
    round_to_fp8,
    select_keys,
)
from moecore.kernels.sparse_attention.keys import Keys, SelectedKeys, SpanOfKeys, multiply_in_fp32

# Numbers in the largest tensor of a chunk: 128 queries, 2048 keys, 576 dims; 576 MiB in fp32.
CHUNK_NUMBERS = 128 * 2048 * 576


def sparse_attention(
    heads: LatentHeads,
    spans: KeySpans,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
    indexer: IndexerHeads | None = None,
    top_k: int | None = None,
    selected_tK: Tensor | None = None,
    returns_divergences: bool = False,
    fp8_scores: bool = False,
) -> SparseOutput:
    """Return the attention output of queries that read at most `top_k` keys each. No host sync.

    Args:
        heads: queries, latent keys and projections of attention (MLA).
        spans: the range of keys that each query may see, at least one key.
        sinks_H: score of each head's sink; None = no sinks. Not with `returns_divergences`.
        indexer: required by `top_k` and `returns_divergences`.
        top_k: number of keys that `indexer` selects; None = the keys `selected_tK`, or all keys.
        selected_tK: keys that an earlier call selected, for example for another layer.
        returns_divergences: also return KL divergences of the indexer from attention, which have
            gradients only for `indexer`.
        fp8_scores: `indexer` selects keys by the FP8 scores of `index.py`. Divergences use scores
            without rounding.
    """
    assert sinks_H is None or not returns_divergences
    places = indexer or _make_empty_indexer(heads.q_tHd)
    width = None if top_k is None else min(top_k, spans.longest)
    options = _SparseOptions(scale, width, returns_divergences, fp8_scores)
    o, selected, kl = _SparseAttention.apply(*heads, *places, selected_tK, sinks_H, spans, options)
    return SparseOutput(o, selected, kl)


def _make_empty_indexer(q_tHd: Tensor) -> IndexerHeads:
    """Return `IndexerHeads` of empty tensors, for attention without an indexer."""
    return IndexerHeads(*[q_tHd.new_empty(len(q_tHd), 0)] * 3)


class _SparseOptions(NamedTuple):
    """The arguments of `sparse_attention` that are not tensors."""

    scale: float
    width: int | None  # keys to select; None = none
    returns_divergences: bool
    fp8_scores: bool


class _Chunk(NamedTuple):
    """The queries [begin, end), which are computed together, and their part of the inputs."""

    begin: int
    end: int
    heads: LatentHeads
    indexer: IndexerHeads
    span: SpanOfKeys  # all keys that they may see

    def slice_queries(self, x_tX: Tensor) -> Tensor:
        """Return the entries of the chunk's queries in a tensor of all queries, a view."""
        return x_tX[self.begin : self.end]

    def slice_indexer(self, indexer: IndexerHeads) -> IndexerHeads:
        """Return an indexer of all queries for the chunk's queries."""
        q, k, w = indexer
        return IndexerHeads(self.slice_queries(q), k, self.slice_queries(w))


def _split_into_chunks(
    heads: LatentHeads,
    indexer: IndexerHeads,
    spans: KeySpans,
    keys_per_query: int | None,
    *,
    selects_keys: bool,
    uses_kernels: bool,
) -> Iterator[_Chunk]:
    """Split the queries into chunks of bounded memory; on meta one chunk represents all."""
    (t, H, _), (N, key_dim) = heads.q_tHd.shape, heads.keys_Nl.shape
    reach = min(N, spans.longest if spans.stride == 1 else 3 * spans.longest // 2)
    num_heads = max(H, indexer.q_thi.shape[1])
    if keys_per_query is None:
        of_query = [reach * num_heads]
    elif uses_kernels:
        of_query = [H * max(key_dim, keys_per_query)]
    else:
        of_query = [keys_per_query * max(key_dim, num_heads)]
    if selects_keys:
        of_query.append(reach * count_workspace_floats(indexer))
    size = max(1, CHUNK_NUMBERS // max(of_query))
    begins, number = range(0, t, size), cdiv(t, size)
    if heads.q_tHd.is_meta and number:  # the middle one stands for all
        size = cdiv(t, number)
        begins = range((number - 1) * size // 2, t, t)
    for begin in begins:
        end = min(t, begin + size)
        part = slice(begin, end)
        first, last = spans.get_bounds(begin, end, N)
        span = SpanOfKeys(first, last, spans.first_t[part], spans.last_t[part])
        of_index = indexer._replace(q_thi=indexer.q_thi[part], w_th=indexer.w_th[part])
        of_heads = heads._replace(q_tHd=heads.q_tHd[part])
        with repeat_on_meta(number) if heads.q_tHd.is_meta else nullcontext():
            yield _Chunk(begin, end, of_heads, of_index, span)


def _compute_latent_queries(heads: LatentHeads) -> Tensor:
    """Return queries projected to the dims of latent keys; rotary dims are unchanged."""
    if heads.up_HnL is None:
        return heads.q_tHd
    (C, H, _), (_, n, L) = heads.q_tHd.shape, heads.up_HnL.shape
    q_CHl = heads.q_tHd.new_empty(C, H, heads.keys_Nl.shape[1])
    q_CHl[..., L:] = heads.q_tHd[..., n:]
    _project_heads(heads.q_tHd[..., :n], heads.up_HnL, q_CHl[..., :L])
    return q_CHl


def _project_heads(x_CHa: Tensor, w_Hab: Tensor, out_CHb: Tensor) -> None:
    """Write each head's product to `out_CHb`, which may be strided, without a copy."""
    torch.bmm(x_CHa.transpose(0, 1), w_Hab, out=out_CHb.transpose(0, 1))


def _has_kernels(heads: LatentHeads, selected_tK: Tensor | None, options: _SparseOptions) -> bool:
    """Whether the kernels of `gathered.py` support the call."""
    is_supported = selected_tK is not None and not options.returns_divergences
    key_dim = heads.keys_Nl.shape[1]
    return is_supported and has_gathered_kernels(heads.q_tHd, heads.latent_dim, key_dim)


def _compute_scores(q_CHl: Tensor, rows: Tensor, keys: Keys, scale: float) -> Tensor:
    """Return scaled scores [queries, heads, keys], -inf for keys that the query may not see."""
    scores_CHK = keys.compute_dot_products(q_CHl, rows).mul_(scale)
    return scores_CHK.masked_fill_(~keys.seen_CK[:, None], -torch.inf)


class _SparseAttention(torch.autograd.Function):
    """apply(*heads, *indexer, selected, sinks, spans, options) -> the `SparseOutput` fields."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys_Nl: Tensor,
        up: Tensor | None,
        down: Tensor | None,
        q_thi: Tensor,
        k_Ni: Tensor,
        w_th: Tensor,
        selected: Tensor | None,
        sinks: Tensor | None,
        spans: KeySpans,
        options: _SparseOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        heads, index = LatentHeads(q, keys_Nl, up, down), IndexerHeads(q_thi, k_Ni, w_th)
        (t, H, _), L, new_width = q.shape, heads.latent_dim, options.width
        v = L if down is None else down.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        o, lse = q.new_empty(t, H, v), q.new_empty(t, H, dtype=wide)
        kl = q.new_empty(t, dtype=wide) if options.returns_divergences else None
        if new_width is not None:
            selected = q.new_empty(t, new_width, dtype=torch.int32)
        width = None if selected is None else selected.shape[1]
        uses_kernels = _has_kernels(heads, selected, options)
        scorer, k_scales = index, None
        if options.fp8_scores and new_width is not None:
            scorer, k_scales = round_to_fp8(index)
        for chunk in _split_into_chunks(
            *(heads, index, spans, width),
            selects_keys=new_width is not None,
            uses_kernels=uses_kernels,
        ):
            keys: Keys = chunk.span
            if selected is not None and new_width is not None:
                of_chunk = chunk.slice_indexer(scorer)
                scores_CS = compute_span_scores(of_chunk, chunk.span, k_scales)
                selected_CK = select_keys(scores_CS, chunk.span.first, new_width)
                chunk.slice_queries(selected).copy_(selected_CK)
                del scores_CS, selected_CK
            q_CHl = _compute_latent_queries(chunk.heads)
            if selected is not None and uses_kernels:
                selected_CK = chunk.slice_queries(selected)
                o_CHL, lse_CH = attend_to_selected(
                    q_CHl, keys_Nl, selected_CK, L, options.scale, sinks
                )
            else:
                if selected is not None:
                    keys = SelectedKeys(chunk.slice_queries(selected))
                rows = keys.select_rows(keys_Nl)
                p = _compute_scores(q_CHl, rows, keys, options.scale)
                lse_CH = p.logsumexp(-1)
                if sinks is not None:
                    lse_CH = torch.logaddexp(lse_CH, sinks.to(wide))
                p = p.sub_(lse_CH[..., None]).exp_()
                o_CHL = keys.sum_weighted_rows(p.to(q.dtype), rows[..., :L]).to(q.dtype)
            if down is None:
                chunk.slice_queries(o).copy_(o_CHL)
            else:
                _project_heads(o_CHL, down, chunk.slice_queries(o))
            chunk.slice_queries(lse).copy_(lse_CH)
            if kl is not None:
                chunk.slice_queries(kl).copy_(
                    compute_divergence(p.mean(1), compute_index_scores(chunk.indexer, keys))
                )
        ctx.spans, ctx.options = spans, options
        saved_index = index if options.returns_divergences else _make_empty_indexer(q)
        ctx.save_for_backward(*heads, *saved_index, selected, sinks, o, lse)
        ctx.set_materialize_grads(False)
        if new_width is None:
            return o, None, kl
        ctx.mark_non_differentiable(selected)
        return o, selected, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        do, _, dkl = grads
        *tensors, selected, sinks, o, lse = ctx.saved_tensors
        heads, index = LatentHeads(*tensors[:4]), IndexerHeads(*tensors[4:])
        options, wide = ctx.options, lse.dtype
        if do is None:
            do = torch.zeros_like(o)
        up, down, L = heads.up_HnL, heads.down_HLv, heads.latent_dim
        dq = torch.empty_like(heads.q_tHd)
        totals = [torch.zeros_like(x, dtype=wide) for x in heads[1:] if x is not None]
        dindex = None
        if dkl is not None:
            dk_Ni = torch.zeros_like(index.k_Ni, dtype=wide)
            dindex = torch.empty_like(index.q_thi), dk_Ni, torch.empty_like(index.w_th)
        width = None if selected is None else selected.shape[1]
        uses_kernels = _has_kernels(heads, selected, options)
        uses_kernels &= not torch.are_deterministic_algorithms_enabled()
        for chunk in _split_into_chunks(
            *(heads, index, ctx.spans, width), selects_keys=False, uses_kernels=uses_kernels
        ):
            q_CHl, lse_CH = _compute_latent_queries(chunk.heads), chunk.slice_queries(lse)
            do_CHv, q_CHd = chunk.slice_queries(do), chunk.heads.q_tHd
            do_CHL = do_CHv.contiguous()
            if down is not None:
                do_CHL = q_CHd.new_empty(*do_CHv.shape[:2], L)
                _project_heads(do_CHv, down.mT, do_CHL)
            delta_CH = (do_CHv.to(wide) * chunk.slice_queries(o)).sum(-1)
            if uses_kernels:
                dq_CHl, o_CHL = differentiate_selected(
                    *(q_CHl, heads.keys_Nl, chunk.slice_queries(selected), do_CHL),
                    lse_CH=lse_CH,
                    delta_CH=delta_CH,
                    scale=options.scale,
                    dkeys_Nl=totals[0],
                    num_visible_keys=len(chunk.span.select_rows(heads.keys_Nl)),
                    returns_output=down is not None,
                )
            else:
                keys = (
                    chunk.span if selected is None else SelectedKeys(chunk.slice_queries(selected))
                )
                rows = keys.select_rows(heads.keys_Nl)
                p = _compute_scores(q_CHl, rows, keys, options.scale)
                p = p.sub_(lse_CH[..., None]).exp_()
                if dkl is not None and dindex is not None:
                    parts = differentiate_divergence(
                        chunk.slice_queries(dkl), p.mean(1), chunk.indexer, keys, dindex[1]
                    )
                    for total, part in zip((dindex[0], dindex[2]), parts, strict=True):
                        chunk.slice_queries(total).copy_(part)
                dp = keys.compute_dot_products(do_CHL, rows[..., :L])
                ds = dp.sub_(delta_CH[..., None]).mul_(p).mul_(options.scale).to(q_CHd.dtype)
                p = p.to(q_CHd.dtype)
                dq_CHl = keys.sum_weighted_rows(ds, rows).to(q_CHd.dtype)
                o_CHL = None
                if down is not None:
                    o_CHL = keys.sum_weighted_rows(p, rows[..., :L]).to(q_CHd.dtype)
                keys.add_outer_products(totals[0], (ds, q_CHl), (p, do_CHL))
            dq_CHL, dq_CHd = dq_CHl[..., :L], chunk.slice_queries(dq)
            if up is None or o_CHL is None:
                dq_CHd.copy_(dq_CHl)
                continue
            n = up.shape[1]
            _project_heads(dq_CHL, up.mT, dq_CHd[..., :n])
            dq_CHd[..., n:] = dq_CHl[..., L:]
            totals[1] += multiply_in_fp32(q_CHd[..., :n].permute(1, 2, 0), dq_CHL.transpose(0, 1))
            totals[2] += multiply_in_fp32(o_CHL.permute(1, 2, 0), do_CHv.transpose(0, 1))
        of_heads: list[Tensor | None] = [dq, *(total.to(dq.dtype) for total in totals)]
        of_heads += [None] * (len(heads) - len(of_heads))
        of_index: Any = (None, None, None)
        if dindex is not None:
            of_index = (d.to(x.dtype) for d, x in zip(dindex, index, strict=True))
        dsinks = None
        if sinks is not None:
            dsinks = compute_sinks_grad(do[None], o[None], lse.T[None], sinks)
        return *of_heads, *of_index, None, dsinks, None, None
