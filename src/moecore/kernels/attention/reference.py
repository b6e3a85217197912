"""Attention in plain PyTorch on any device: the oracle of the other implementations.

The functions compute in fp32 (fp64 for fp64), with all B * H * T * S scores at once. Packed rows on
the CPU whose documents do not cross rows are computed row by row, other packed rows with (B * T)^2
scores per head. Under batch invariance documents are computed one by one, with a host sync on a
GPU. Letters as in `contract.py`, and g = H / h.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.attention.contract import AttentionMask, QKVBlock
from moecore.kernels.invariant import is_batch_invariant


def find_problem(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> None:
    """Return None, because plain PyTorch supports all inputs."""
    return


def make_bool_mask(mask: AttentionMask, T: int, S: int, device: torch.device) -> Tensor | None:
    """Return bool [T, S], True for the keys that each query sees; None = all keys.

    If `mask` has documents, T and S count the tokens of all rows of the batch.
    """
    # Example, causal, window 2, T = 2 queries at the end of S = 4 keys: [0 1 1 0], [0 0 1 1].
    places_T1 = torch.arange(S - T, S, device=device)[:, None]
    places_S = torch.arange(S, device=device)
    seen_TS = None
    if mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None:
        cu_q, cu_k = mask.cu_seqlens_q.long(), mask.cu_seqlens_k.long()
        num = len(cu_q) - 1
        rows_T = torch.arange(T, device=device)
        doc_T = torch.searchsorted(cu_q, rows_T, right=True) - 1
        doc_S = torch.searchsorted(cu_k, places_S, right=True) - 1
        seen_TS = (doc_T[:, None] == doc_S) & (doc_T < num)[:, None]
        # Both ends of a document are at one place.
        end_T = cu_k[(doc_T + 1).clamp(max=num)] - cu_q[(doc_T + 1).clamp(max=num)]
        places_T1 = (rows_T + end_T)[:, None]
    if mask.causal:
        causal_TS = places_S <= places_T1
        seen_TS = causal_TS if seen_TS is None else seen_TS & causal_TS
    if mask.window is not None and seen_TS is not None:
        seen_TS = seen_TS & (places_S > places_T1 - mask.window)
    return seen_TS


def _list_separate_parts(
    mask: AttentionMask, q: Tensor, k: Tensor
) -> list[tuple[int, AttentionMask]] | None:
    """Return (tokens, mask) of each row or document to compute separately; None = one call."""
    (B, T), cu_q, cu_k = q.shape[:2], mask.cu_seqlens_q, mask.cu_seqlens_k
    if cu_q is None or cu_k is None or k.shape[1] != T or not B * T:
        return None
    splits_documents = is_batch_invariant()
    if (not splits_documents and (B == 1 or q.device.type != "cpu")) or not cu_q.equal(cu_k):
        return None
    if splits_documents:
        document_mask = AttentionMask(causal=mask.causal, window=mask.window)
        return [(length, document_mask) for length in cu_q.diff().tolist()]
    if not torch.isin(torch.arange(0, B * T + 1, T, device=cu_q.device), cu_q).all():
        return None
    cu_of_rows = [(cu_q - row * T).clamp(0, T) for row in range(B)]
    return [(T, replace(mask, cu_seqlens_q=cu, cu_seqlens_k=cu)) for cu in cu_of_rows]


def _split_block(
    block: QKVBlock, parts: list[tuple[int, AttentionMask]], *tensors: Tensor
) -> Iterator[Any]:
    """Split the inputs and `tensors` [B, T, ...] into `parts`; yield (inputs, *tensors) of each."""
    lengths, masks = zip(*parts, strict=True)
    tokens = [x.flatten(0, 1)[None].split(lengths, dim=1) for x in (*block[:3], *tensors)]
    for mask, q, k, v, *rest in zip(masks, *tokens, strict=True):
        yield QKVBlock(q, k, v, mask, block.scale), *rest


def _merge_parts(parts: Iterable[Tensor], like: Tensor) -> Tensor:
    """Concatenate results [1, tokens, ...] along tokens, and reshape them to [B, T] of `like`."""
    return torch.cat(list(parts), dim=1).unflatten(1, like.shape[:2])[0]  # type: ignore[no-any-return]


def _compute_scores(q: Tensor, k: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Return scaled scores, -inf if masked: [B, kv heads, query heads per kv head, T, S]."""
    s = torch.einsum("bthgd,bshd->bhgts", q, k) * scale
    seen_TS = make_bool_mask(mask, q.shape[1], k.shape[1], q.device)
    return s if seen_TS is None else s.masked_fill(~seen_TS, -math.inf)


def _group_heads(x_BTHx: Tensor, num_kv_heads: int, mask: AttentionMask) -> Tensor:
    """Cast x to at least fp32, and view it as [B, T, kv heads, heads per kv head, dim].

    Rows with packed documents are joined to one row, [1, B * T, ...].
    """
    x = x_BTHx.to(torch.promote_types(x_BTHx.dtype, torch.float32))
    x = x.flatten(0, 1)[None] if mask.is_packed else x
    return x.unflatten(2, (num_kv_heads, x.shape[2] // num_kv_heads))  # type: ignore[no-any-return]


def _group_operands(block: QKVBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in at least fp32, with query heads grouped by key/value head."""
    q, k, v = (_group_heads(x, block.k.shape[2], block.mask) for x in block[:3])
    return q, k[..., 0, :], v[..., 0, :]


def forward(block: QKVBlock) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, heads, dim] and log-sum-exps [B, heads, T], by plain PyTorch."""
    q, k, v, mask, scale = block
    parts = _list_separate_parts(mask, q, k)
    if parts is not None:
        outputs = [forward(part) for (part,) in _split_block(block, parts)]
        os, lses = zip(*outputs, strict=True)
        lse = _merge_parts((x.transpose(1, 2) for x in lses), q).transpose(1, 2)
        return _merge_parts(os, q), lse
    B, T, H, _ = q.shape
    qs, ks, vs = _group_operands(block)
    s = _compute_scores(qs, ks, mask, scale)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    o = torch.einsum("bhgts,bshv->bthgv", p, vs)
    lse = lse.flatten(1, 2).view(H, B, T).transpose(0, 1) if mask.is_packed else lse.flatten(1, 2)
    return o.reshape(B, T, H, v.shape[-1]).to(q.dtype), lse


def backward(block: QKVBlock, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. o and lse are output and log-sum-exp over all keys."""
    q, k, v, mask, scale = block
    parts = _list_separate_parts(mask, q, k)
    if parts is not None:
        blocks = _split_block(block, parts, do, o, lse.transpose(1, 2))
        grads = [backward(part, d, o, x.transpose(1, 2)) for part, d, o, x in blocks]
        dq, dk, dv = (_merge_parts(x, q) for x in zip(*grads, strict=True))
        return dq, dk, dv
    h, (qs, ks, vs) = k.shape[2], _group_operands(block)
    dos, os = _group_heads(do, h, mask), _group_heads(o, h, mask)
    if mask.is_packed:
        lse = lse.transpose(0, 1).flatten(1)[None]
    lse = lse.masked_fill(lse == -math.inf, math.inf).unflatten(1, (h, -1))  # exp gives 0
    p = (_compute_scores(qs, ks, mask, scale) - lse[..., None]).exp()
    dv = torch.einsum("bhgts,bthgv->bshv", p, dos)
    dp = torch.einsum("bthgv,bshv->bhgts", dos, vs)
    ds = p * (dp - (dos * os).sum(-1).permute(0, 2, 3, 1)[..., None]) * scale
    dq = torch.einsum("bhgts,bshd->bthgd", ds, ks)
    dk = torch.einsum("bhgts,bthgd->bshd", ds, qs)
    dq, dk, dv = (x.reshape(y.shape).to(y.dtype) for x, y in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv
