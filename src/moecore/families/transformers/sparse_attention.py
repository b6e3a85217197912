"""Sparse attention layers of transformers whose indexer selects keys, as in DeepSeek-V3.2.

    class                    differs from DeepSeek-V3.2 in
    GlmMoeDsaAttention       layers that share the keys of an earlier layer
    AXK2Attention            gates on outputs, which one linear computes together with queries
    Dots3NoteTextAttention   factors on latents, a norm of rotary keys, one gate per head
    HYV4Attention            shared keys, gates, sinks, rotary dims as two halves
    HYV4VLAttention          as HYV4Attention, but rotary dims are pairs

The stock forwards allocate scores and masks of all pairs of tokens. The replacement forward calls
the layer's own projections, norms, rotary embeddings and indexer modules in the same order. It
calls `attention/sparse.py` for scores, selection and attention.

Legend: B rows, T tokens of a row, H heads, n and r dims of a head without and with positions, L
dims of a latent, v dims of a value, h heads of the indexer, i dims of one, K selected keys.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.attention.sparse import KeyChoice, attend_sparse
from moecore.base.options.indexer import IndexerConfig
from moecore.families.transformers.linear_attention import SEQUENCE
from moecore.families.transformers.stock import find_modules, find_names_in_forward
from moecore.kernels.sparse_attention import IndexerHeads, LatentHeads
from moecore.models.mla import compute_mean_divergence, make_key_choice
from moecore.moe.aux_loss import AuxLoss

# Classes whose forward `_run_sparse_attention` replaces. The indexers of other classes pool keys,
# or their layers share keys and values.
CLASSES = (
    *("DeepseekV32Attention", "GlmMoeDsaAttention", "AXK2Attention"),
    *("Dots3NoteTextAttention", "HYV4Attention", "HYV4VLAttention"),
)
LAST_DIMS = ("HYV4Indexer", "HYV4VLIndexer")  # they rotate the last dims of queries and keys
CONFIG = "_moecore_indexer"  # attribute of layers whose indexers are trained
BY_PAIRS, BY_HALVES = "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb"


def find_sparse_attention(model: nn.Module) -> list[Any]:
    """Return a model's sparse attention modules, in which an indexer selects keys per query."""
    layers = find_modules(model, *CLASSES)
    return [layer for layer in layers if layer.indexer is not None or hasattr(layer, "skip_topk")]


def use_sparse_attention(model: nn.Module) -> None:
    """Make sparse attention layers compute the documents of a `Sequence` argument, in place."""
    for module in find_sparse_attention(model):
        module.forward = MethodType(_run_sparse_attention, module)


def add_indexer_losses(model: nn.Module, config: IndexerConfig) -> None:
    """Use `config` in each indexer of a model, and add its auxiliary loss, in place."""
    for layer in find_sparse_attention(model):
        setattr(layer, CONFIG, config)
        if layer.indexer is not None and config.stage != "frozen":
            layer.aux_loss = AuxLoss()


def _run_sparse_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    position_ids: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Replacement forward of the classes in `CLASSES`; `hidden_states` are [B, T, D].

    `prev_topk_indices` [B, T, K] are the keys of an earlier layer. Classes that share keys also
    return the selected keys.
    """
    if layer.training and layer.attention_dropout:
        raise ValueError(
            f"attention_dropout ({layer.attention_dropout}) must be 0 for use_causal_attention, "
            "which does not compute it in sparse attention: leave the model's own attention"
        )
    x_BTD, n, r = hidden_states, layer.qk_nope_head_dim, layer.qk_rope_head_dim
    q_BTHd, q_a_BTA, gate_BTHv = _project_queries(layer, x_BTD)
    latent_BTL, k_BTr = layer.kv_a_proj_with_mqa(x_BTD).split((layer.kv_lora_rank, r), dim=-1)
    latent_BTL = layer.kv_a_layernorm(latent_BTL)
    if hasattr(layer, "kv_lora_scale"):
        latent_BTL = latent_BTL * layer.kv_lora_scale
        k_BTr = layer.k_rope_only_layernorm(k_BTr)
    q_turned, turned_BT1r = _get_rotary_function(layer)(
        q_BTHd[..., n:], k_BTr.unsqueeze(2), *position_embeddings, unsqueeze_dim=2
    )
    q_turned, turned_BT1r = q_turned.to(q_BTHd.dtype), turned_BT1r.to(k_BTr.dtype)
    sequence, choice = kwargs.get(SEQUENCE) or Sequence(), _choose_keys(layer, prev_topk_indices)
    index = None
    if layer.indexer is not None:
        with torch.set_grad_enabled(choice.returns_divergences):  # selected keys have no gradient
            of_tokens = x_BTD.detach(), q_a_BTA.detach()
            index = _compute_indexer_heads(layer.indexer, *of_tokens, position_embeddings)
    cache = kwargs.get("past_key_values", cache)  # its name before transformers 5.24
    if cache is not None:
        latent_BTL, turned_BT1r, index = _update_cache(layer, cache, latent_BTL, turned_BT1r, index)
    up_HnL, down_HLv = _split_kv_weight(layer)
    out = attend_sparse(
        LatentHeads(
            torch.cat((q_BTHd[..., :n], q_turned), dim=-1),
            torch.cat((latent_BTL, turned_BT1r.squeeze(2)), dim=-1),
            up_HnL,
            down_HLv,
        ),
        index,
        sequence,
        choice,
        scale=layer.scaling,
        sinks_H=getattr(layer, "sinks", None),
    )
    o_BTHv = out.o_tHv
    if out.divergence_t is not None:
        loss = getattr(layer, CONFIG).loss_coef * compute_mean_divergence(
            out.divergence_t, sequence
        )
        o_BTHv = layer.aux_loss.attach_loss(o_BTHv, loss)
    if gate_BTHv is not None:
        o_BTHv = (o_BTHv * gate_BTHv).to(o_BTHv.dtype)
    selected = prev_topk_indices if out.selected_tK is None else out.selected_tK
    y_BTD = layer.o_proj(o_BTHv.flatten(2))
    return (y_BTD, None, selected) if hasattr(layer, "skip_topk") else (y_BTD, None)


def _project_queries(layer: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries [B, T, heads, head dim], their compressed form, and output gates or None."""
    d, v = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    compressed_BTA = layer.q_a_proj(x_BTD)
    q_a_BTA = layer.q_a_layernorm(compressed_BTA)
    if hasattr(layer, "q_gate_proj"):
        of_heads = layer.q_gate_proj(torch.cat((q_a_BTA, compressed_BTA), dim=-1))
        q_BTHd, gate_BTHv = of_heads.unflatten(-1, (-1, d + v)).split((d, v), dim=-1)
        return q_BTHd, q_a_BTA, gate_BTHv.float().sigmoid()
    if hasattr(layer, "q_lora_scale"):
        q_a_BTA = q_a_BTA * layer.q_lora_scale
    q_BTHd = layer.q_b_proj(q_a_BTA).unflatten(-1, (-1, d))
    if hasattr(layer, "g_proj"):
        return q_BTHd, q_a_BTA, layer.g_proj(x_BTD).unsqueeze(-1).sigmoid()
    if hasattr(layer, "gate_proj"):
        return q_BTHd, q_a_BTA, layer.gate_proj(x_BTD).unflatten(-1, (-1, v)).sigmoid()
    return q_BTHd, q_a_BTA, None


def _choose_keys(layer: Any, selected_BTK: Tensor | None) -> KeyChoice:
    """Return a layer's choice: its indexer's keys, an earlier layer's `selected_BTK`, or all."""
    config: IndexerConfig | None = getattr(layer, CONFIG, None)
    if layer.indexer is not None:
        return make_key_choice(config, layer, layer.indexer.index_topk)
    if config is not None and config.stage == "warm_up":
        return KeyChoice()
    if selected_BTK is None:
        raise ValueError(
            f"indexer_types[{layer.layer_idx}] ('shared') must stand behind a layer with an "
            "indexer: begin with 'full'"
        )
    return KeyChoice(selected_BTK=selected_BTK)


def _compute_indexer_heads(
    indexer: Any, x_BTD: Tensor, q_a_BTA: Tensor, cos_sin: tuple[Tensor, Tensor]
) -> IndexerHeads:
    """Return an indexer's queries, keys and head weights from compressed queries `q_a_BTA`."""
    r, i = indexer.qk_rope_head_dim, indexer.head_dim
    q_BThi = indexer.wq_b(q_a_BTA).unflatten(-1, (indexer.n_heads, i))
    k_BT1i = indexer.k_norm(indexer.wk(x_BTD).to(indexer.k_norm.weight.dtype)).unsqueeze(2)
    k_BT1i = k_BT1i.to(x_BTD.dtype)
    begin = i - r if type(indexer).__name__ in LAST_DIMS else 0
    q_turned, k_turned = _get_rotary_function(indexer)(
        *(x[..., begin : begin + r] for x in (q_BThi, k_BT1i)), *cos_sin, unsqueeze_dim=2
    )
    # Scores do not depend on the order of dims that queries and keys have in common.
    rest = slice(0, begin) if begin else slice(r, i)
    w_BTh = indexer.weights_proj(x_BTD.to(indexer.weights_proj.weight.dtype)).float()
    return IndexerHeads(
        torch.cat((q_turned, q_BThi[..., rest]), dim=-1),
        torch.cat((k_turned, k_BT1i[..., rest]), dim=-1).squeeze(2),
        w_BTh * (indexer.n_heads**-0.5 * indexer.softmax_scale),
    )


def _split_kv_weight(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the weights [H, n, L] and [H, L, v] that project latents to keys and to values."""
    # A product with the identity includes adapters, FP8 and tp.
    linear, L = layer.kv_b_proj, layer.kv_lora_rank
    dtype = layer.kv_a_layernorm.weight.dtype
    identity_LL = torch.eye(L, dtype=dtype, device=layer.kv_a_layernorm.weight.device)
    of_heads = linear(identity_LL).unflatten(-1, (-1, layer.qk_nope_head_dim + layer.v_head_dim))
    up_LHn, down_LHv = of_heads.split((layer.qk_nope_head_dim, layer.v_head_dim), dim=-1)
    return up_LHn.permute(1, 2, 0), down_LHv.transpose(0, 1)


def _update_cache(
    layer: Any,
    cache: Any,
    latent_BTL: Tensor,
    rotated_BT1r: Tensor,
    indexer_heads: IndexerHeads | None,
) -> tuple[Tensor, Tensor, IndexerHeads | None]:
    """Append latents, rotated keys and the indexer's keys to an empty cache; return all entries."""
    number = layer.layer_idx
    latents, turned = cache.update(latent_BTL.unsqueeze(1), rotated_BT1r.transpose(1, 2), number)
    refuse_cached_keys(latent_BTL.shape[1], latents.shape[2])
    if indexer_heads is not None:
        indexer_heads = indexer_heads._replace(
            k_Ni=cache.update_indexer(indexer_heads.k_Ni, number)
        )
    return latents.squeeze(1), turned.transpose(1, 2), indexer_heads


def refuse_cached_keys(num_tokens: int, num_keys: int) -> None:
    """Raise ValueError if `num_keys` > `num_tokens`: the other keys are from a key/value cache."""
    if num_keys != num_tokens:
        raise ValueError(
            f"tokens ({num_tokens}) must be as many as their keys ({num_keys}) for "
            "use_causal_attention, which has no mask for those of earlier forwards: pass no cache"
        )


def _get_rotary_function(module: Any) -> Any:
    """Return the global function by which a module's stock forward rotates queries and keys."""
    name = BY_PAIRS if BY_PAIRS in find_names_in_forward(module) else BY_HALVES
    return inspect.unwrap(type(module).forward).__globals__[name]
