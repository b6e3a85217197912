"""Sparse attention by its definition, one query and one head at a time, under autograd."""

import torch
from torch import Tensor

from moecore.kernels.sparse_attention import IndexerHeads, KeySpans, LatentHeads, SparseOutput


def sparse_attention_ref(
    heads: LatentHeads,
    spans: KeySpans,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
    indexer: IndexerHeads | None = None,
    top_k: int | None = None,
    selected_tK: Tensor | None = None,
    returns_divergences: bool = False,
) -> SparseOutput:
    """As `sparse_attention`, of keys and values that every head has its own of."""
    q_tHd, keys_Nl, up_HnL, down_HLv = heads
    L = down_HLv.shape[1]
    latents, turned = keys_Nl[:, :L], keys_Nl[:, L:]
    outputs, chosen, divergences = [], [], []
    for i, q_Hd in enumerate(q_tHd):
        seen = list(range(int(spans.first_t[i]), int(spans.last_t[i]) + 1))
        scores: dict[int, Tensor] = {}
        if indexer is not None:
            for s in seen:
                dots = [torch.dot(q, indexer.k_Ni[s]) for q in indexer.q_thi[i]]
                pairs = zip(indexer.w_th[i], dots, strict=True)
                scores[s] = torch.stack([w * d.clamp(min=0) for w, d in pairs]).sum()
        if top_k is not None:
            best = sorted(seen, key=lambda s: (-float(scores[s].detach()), s))[:top_k]
            seen = sorted(best)
        elif selected_tK is not None:
            seen = [s for s in selected_tK[i].tolist() if s >= 0]
        chosen.append(seen)
        row, mean_p = [], torch.zeros(len(seen), dtype=q_tHd.dtype)
        sinks = [q_Hd.new_tensor(-torch.inf)] * len(q_Hd) if sinks_H is None else sinks_H
        for q_d, up_nL, down_Lv, sink in zip(q_Hd, up_HnL, down_HLv, sinks, strict=True):
            keys = torch.cat((latents[seen] @ up_nL.T, turned[seen]), dim=-1)
            p = torch.cat((scale * (keys @ q_d), sink[None])).softmax(0)[:-1]
            row.append(p @ (latents[seen] @ down_Lv))
            mean_p = mean_p + p.detach() / len(q_Hd)
        outputs.append(torch.stack(row))
        if returns_divergences:
            log_q = torch.stack([scores[s] for s in seen]).log_softmax(0)
            divergences.append((mean_p * (mean_p.log() - log_q)).sum())
    selected = None
    if top_k is not None:
        width = min(top_k, spans.longest)
        padded = [keys + [-1] * (width - len(keys)) for keys in chosen]
        selected = torch.tensor(padded, dtype=torch.int32)
    return SparseOutput(
        torch.stack(outputs), selected, torch.stack(divergences) if returns_divergences else None
    )
