"""DeepSeek-V4's attention layers, whose queries read recent keys and compressed earlier keys.

    layer type                    compressed keys           read by a query
    compressed_sparse_attention   one per 4 tokens          `index_topk`, selected by an indexer
    heavily_compressed_attention  one per 128 tokens        all windows before it in its document

A window is `compress_rate` consecutive tokens of a document, counted from its first token. Each
complete window has one compressed key, which later queries of the document read. Each query also
reads the `sliding_window` latest keys of its document, its own included. Keys are also values.

The stock forward counts windows from the start of a row and allocates a mask of all queries and
keys. The replacement forward calls the layer's own projections, norms and rotary embeddings, and
passes the indices of each query's keys to `attend_sparse`. With cp > 1, each rank all-gathers the
inputs of the compression and computes the compressed keys of all windows.

Legend: B rows, T tokens of a row, N tokens of all full rows, t this rank's tokens, H heads, d dims
of a head, E compressed keys, m tokens of a window, K compressed keys of a query, c dims of the
values to compress (d, or 2 d if windows overlap).

Source: DeepSeek-V4 (transformers' modeling_deepseek_v4).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.attention.sparse import KeyChoice, attend_sparse, gather_keys
from moecore.families.transformers.linear_attention import SEQUENCE
from moecore.families.transformers.sparse_attention import refuse_cached_keys
from moecore.families.transformers.stock import find_modules
from moecore.kernels.sparse_attention import IndexerHeads, LatentHeads, select_in_spans

CLASS = "DeepseekV4Attention"
ROTARY = "apply_rotary_pos_emb"


def find_compressed_attention(model: nn.Module) -> list[Any]:
    """Return a model's DeepSeek-V4 attention modules that have compressed keys."""
    return [layer for layer in find_modules(model, CLASS) if layer.compressor is not None]


def use_compressed_attention(model: nn.Module) -> None:
    """Make these layers compute the documents of a `Sequence` argument, in place."""
    for layer in find_compressed_attention(model):
        layer.forward = MethodType(_run_compressed_attention, layer)


class _Windows(NamedTuple):
    """The complete windows of all documents, and how many precede each query of this rank."""

    tokens_Em: Tensor  # int64, indices into N tokens; unused entries repeat the last token
    positions_E: Tensor  # int64, position of the window's first token in its document
    own_t: Tensor  # int64, index of each local query into N tokens
    positions_t: Tensor  # int64, position of each query in its document
    first_t: Tensor  # int64, index of the first window of the query's document
    number_t: Tensor  # int64, number of its document's windows that end at or before the query


def _find_windows(sequence: Sequence, shape: torch.Size, size: int, device: Any) -> _Windows:
    """Find the windows of `size` tokens; `shape` is (B, T) of this rank's tokens. No host sync."""
    B, T = shape[0], shape[1] * _get_num_ranks(sequence)
    positions_BT = sequence.positions_BT
    if positions_BT is None:
        positions_BT = torch.arange(T, device=device).expand(B, T)
    positions_N = positions_BT.flatten()
    tokens_N = torch.arange(B * T, device=device)
    # The token `size - 1` later is in the same document if its position is larger by `size - 1`.
    is_complete_N = positions_N.roll(1 - size) == positions_N + (size - 1)
    begins_N = (positions_N % size == 0) & is_complete_N
    starts = tokens_N.masked_fill(~begins_N, B * T).sort().values
    first_E = starts[: max(1, B * T // size)].clamp(max=B * T - 1)
    in_window = torch.arange(size, device=device)
    own_t = sequence.slice_local(tokens_N.view(B, T)).flatten()
    positions_t = positions_N[own_t]
    earlier_N = begins_N.cumsum(0) - begins_N.long()
    return _Windows(
        (first_E[:, None] + in_window).clamp(max=B * T - 1),
        positions_N[first_E],
        own_t,
        positions_t,
        earlier_N[own_t - positions_t],
        (positions_t + 1) // size,
    )


def _run_compressed_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Replacement forward of a layer with compressed keys; `hidden_states` are [B, t, D]."""
    if layer.training and layer.attention_dropout:
        raise ValueError(
            f"attention_dropout ({layer.attention_dropout}) must be 0 for use_causal_attention, "
            "which does not compute it in compressed attention: leave the model's own attention"
        )
    x_BTD, d, compressor = hidden_states, layer.head_dim, layer.compressor
    sequence = kwargs.get(SEQUENCE) or Sequence()
    rotate = inspect.unwrap(type(layer).forward).__globals__[ROTARY]
    cos, sin = position_embeddings[layer.rope_layer_type]
    q_a_BTA = layer.q_a_norm(layer.q_a_proj(x_BTD))
    q_BTHd = layer.q_b_norm(layer.q_b_proj(q_a_BTA).unflatten(-1, (-1, d)))
    q_BTHd = rotate(q_BTHd, cos, sin, unsqueeze_dim=2)
    kv_BTd = layer.kv_norm(layer.kv_proj(x_BTD))
    kv_BTd = rotate(kv_BTd.unsqueeze(2), cos, sin, unsqueeze_dim=2).squeeze(2)
    if past_key_values is not None:
        keys, _ = past_key_values.update(kv_BTd[:, None], kv_BTd[:, None], layer.layer_idx)
        refuse_cached_keys(kv_BTd.shape[1], keys.shape[2])
    windows = _find_windows(sequence, x_BTD.shape, compressor.compress_rate, x_BTD.device)
    compressed_Ed = _compress(compressor, x_BTD, windows, sequence, rotate)
    selected_tK = None
    if hasattr(compressor, "indexer"):
        selected_tK = _select_windows(
            compressor.indexer, (x_BTD, q_a_BTA), position_ids, windows, sequence, rotate
        )
    tokens_Nd = gather_keys(kv_BTd, sequence)
    keys_Nd = torch.cat((tokens_Nd, compressed_Ed.to(kv_BTd.dtype)))
    longest = sequence.max_seqlen or len(tokens_Nd) // x_BTD.shape[0]
    keys_tK = _list_keys(layer, selected_tK, windows, len(tokens_Nd), longest)
    out = attend_sparse(
        LatentHeads(q_BTHd, keys_Nd[None]),
        None,
        Sequence(),  # the keys are those of full rows
        KeyChoice(selected_BTK=keys_tK.unflatten(0, x_BTD.shape[:2])),
        scale=layer.scaling,
        sinks_H=layer.sinks,
    )
    # Values are rotated by their positions: the inverse rotation leaves relative positions.
    o_BTHd = rotate(out.o_tHv, cos, -sin, unsqueeze_dim=2)
    groups = o_BTHd.flatten(2).unflatten(-1, (layer.config.o_groups, -1))
    return layer.o_b_proj(layer.o_a_proj(groups).flatten(2)), None


def _compress(
    compressor: Any,
    x_BTD: Tensor,
    windows: _Windows,
    sequence: Sequence,
    rotate: Callable[..., Any],
) -> Tensor:
    """Return one key [E, d] per window: the gated mean of its tokens, normed and rotated.

    If projections have 2 d dims, windows overlap: a key is the mean of the first d dims of the
    document's previous window and the last d dims of its own.
    """
    kv_Emc, gate_Emc = (
        gather_keys(project(x_BTD), sequence)[windows.tokens_Em]
        for project in (compressor.kv_proj, compressor.gate_proj)
    )
    gate_Emc = gate_Emc + compressor.position_bias
    d = compressor.head_dim
    if kv_Emc.shape[-1] == 2 * d:
        is_first_E = windows.positions_E == 0
        kv_Emc, gate_Emc = (
            torch.cat((x[..., :d].roll(1, 0), x[..., d:]), dim=1) for x in (kv_Emc, gate_Emc)
        )
        m = windows.tokens_Em.shape[1]
        of_previous = torch.arange(2 * m, device=x_BTD.device) < m
        hidden = is_first_E[:, None] & of_previous
        gate_Emc = gate_Emc.masked_fill(hidden[..., None], -torch.inf)
    weights_Emc = gate_Emc.softmax(dim=1, dtype=torch.float32).to(kv_Emc.dtype)
    keys_1Ed = compressor.kv_norm((kv_Emc * weights_Emc).sum(1))[None]
    cos, sin = compressor.rotary_emb(
        keys_1Ed, position_ids=windows.positions_E[None], layer_type=compressor.rope_layer_type
    )
    rotated: Tensor = rotate(keys_1Ed[None], cos, sin)[0, 0]
    return rotated


def _list_keys(
    layer: Any, selected_tK: Tensor | None, windows: _Windows, num_tokens: int, longest: int
) -> Tensor:
    """Return int32 [t, keys]: the ascending indices of each query's keys, then -1.

    A query reads the keys of the `sliding_window` latest tokens of its document, its own included.
    A query also reads the keys of the windows in `selected_tK`. None = all windows of its document
    that end at or before the query. Window e has index `num_tokens` + e. `longest` is the length
    of the longest document.
    """
    K = max(1, longest // layer.compressor.compress_rate)
    if selected_tK is not None:
        K = selected_tK.shape[1]
    of_queries = (windows.own_t, windows.positions_t, windows.first_t, windows.number_t)
    own_t1, positions_t1, first_t1, number_t1 = (x.int()[:, None] for x in of_queries)
    num_recent_t1 = (positions_t1 + 1).clamp(max=layer.sliding_window)
    places = torch.arange(layer.sliding_window + K, dtype=torch.int32, device=own_t1.device)
    place_tK = places - num_recent_t1  # among the query's windows
    if selected_tK is None:
        window_tK, is_key_tK = first_t1 + place_tK, place_tK < number_t1
    else:
        window_tK = selected_tK.gather(1, place_tK.clamp(0, K - 1).long())
        is_key_tK = (window_tK >= 0) & (place_tK < K)
    keys_tK = (window_tK + num_tokens).masked_fill_(~is_key_tK, -1)
    return torch.where(place_tK < 0, own_t1 + 1 + place_tK, keys_tK)


def _select_windows(
    indexer: Any,
    of_tokens: tuple[Tensor, Tensor],
    position_ids: Tensor,
    windows: _Windows,
    sequence: Sequence,
    rotate: Callable[..., Any],
) -> Tensor:
    """Return int32 [t, K]: the windows with the best scores of the indexer, ascending, then -1."""
    x_BTD, q_a_BTA = of_tokens
    with torch.no_grad():  # selected keys have no gradient
        cos, sin = indexer.rotary_emb(
            x_BTD, position_ids=position_ids, layer_type=indexer.rope_layer_type
        )
        q_BThi = indexer.q_b_proj(q_a_BTA).unflatten(-1, (-1, indexer.head_dim))
        q_thi = rotate(q_BThi, cos, sin, unsqueeze_dim=2).flatten(0, 1)
        k_Ei = _compress(indexer, x_BTD, windows, sequence, rotate).to(q_thi.dtype)
        scorer = indexer.scorer
        w_BTh = scorer.weights_proj(x_BTD).float() * (scorer.weights_scaling * scorer.softmax_scale)
        heads = IndexerHeads(q_thi, k_Ei, w_BTh.flatten(0, 1))
        last_t = windows.first_t + windows.number_t - 1
        return select_in_spans(
            heads, windows.first_t, last_t, min(indexer.index_topk, len(windows.tokens_Em))
        )


def _get_num_ranks(sequence: Sequence) -> int:
    return 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
