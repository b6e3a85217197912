"""What indexers of sparse attention learn, by the definition: dense, of stock models."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moecore.families.transformers.sparse_attention import BY_PAIRS


def divergence_BT(indexer: Any, given: dict[str, Any], p_BHTS: Tensor) -> Tensor:
    """Return KL_BT of an indexer, from what its layer's forward gave it and the attention's p."""
    x, q_a = given["hidden_states"].detach(), given["q_resid"].detach()
    cos, sin = given["position_embeddings"]
    B, T, h, r = *x.shape[:2], indexer.n_heads, indexer.qk_rope_head_dim
    q = indexer.wq_b(q_a).view(B, T, h, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(x))
    by_pairs = BY_PAIRS in inspect.unwrap(type(indexer).forward).__code__.co_names
    q = torch.cat((turned(q[..., :r], cos[:, :, None], sin[:, :, None], by_pairs), q[..., r:]), -1)
    k = torch.cat((turned(k[..., :r], cos, sin, by_pairs), k[..., r:]), -1)
    dots = torch.einsum("bthi,bsi->bths", q, k) * indexer.head_dim**-0.5
    weights = indexer.weights_proj(x) * h**-0.5
    scores = torch.einsum("bths,bth->bts", dots.relu(), weights)
    p = p_BHTS.detach().mean(1)
    log_q = scores.masked_fill(p == 0, -torch.inf).log_softmax(-1).masked_fill(p == 0, 0)
    return (p * (p.clamp(min=1e-30).log() - log_q)).sum(-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, by_pairs: bool) -> Tensor:
    """Return x with its pairs rotated: (2i, 2i + 1), or (i, i + r / 2)."""
    half = x.shape[-1] // 2
    one, two = (x[..., 0::2], x[..., 1::2]) if by_pairs else (x[..., :half], x[..., half:])
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within, forwards of a stock eager model add the divergences of their indexers, by layer."""
    found: dict[str, list[Tensor]] = {}
    inputs: dict[nn.Module, dict[str, Any]] = {}
    names = ("hidden_states", "q_resid", "position_embeddings")

    def enter(indexer: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[indexer] = dict(zip(names, args, strict=False)) | kwargs

    def leave(name: str, layer: Any, args: Any, output: Any) -> None:
        found.setdefault(name, []).append(
            divergence_BT(layer.indexer, inputs[layer.indexer], output[1])
        )

    hooks = []
    for name, layer in model.named_modules():
        if getattr(layer, "indexer", None) is not None:
            hooks.append(layer.indexer.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(layer.register_forward_hook(lambda *a, name=name: leave(name, *a)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
