"""`KVCache` stores keys and values of the tokens that a decoder has read, for generation.

Legend: B rows, T tokens of a forward with padding, N of them without padding, S tokens so far, H
query heads, h key/value heads, d and v dims of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """The keys and values of all tokens so far, per attention layer, for generation.

    Rows are not packed. The n-th call of `attend` in a forward belongs to the n-th layer. The class
    is plain because FSDP's mixed precision casts the tensors of tuples and dataclasses.

    Attributes:
        length: tokens of earlier forwards.
    """

    def __init__(self) -> None:
        self.length = 0
        self._num_tokens = self._layer_idx = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def begin_forward(self, num_tokens: int) -> None:
        """Begin a forward of `num_tokens` tokens per row; further tokens are padding at the end."""
        self._num_tokens, self._layer_idx = num_tokens, 0

    def attend(
        self,
        q_BTHd: Tensor,
        k_BThd: Tensor,
        v_BThv: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Append the next layer's keys and values; return the attention to all keys of this layer.

        The result [B, T, H, v] is causal, and 0 for padding. `scale` multiplies scores, `window`
        limits keys (None = all), and `sinks_H` has an extra score per head (None = off).
        """
        T, N = q_BTHd.shape[1], self._num_tokens
        k_BShd, v_BShv = k_BThd[:, :N], v_BThv[:, :N]
        if self._layer_idx == len(self._layers):
            self._layers.append((k_BShd, v_BShv))
        else:
            old_k, old_v = self._layers[self._layer_idx]
            k_BShd, v_BShv = torch.cat((old_k, k_BShd), dim=1), torch.cat((old_v, v_BShv), dim=1)
            self._layers[self._layer_idx] = k_BShd, v_BShv
        self._layer_idx += 1
        keys_S = torch.arange(k_BShd.shape[1], device=q_BTHd.device)
        queries_N1 = keys_S[-N:, None]
        mask_NS = keys_S <= queries_N1
        if window is not None:
            mask_NS &= keys_S > queries_N1 - window
        q_BHNd, k_BhSd, v_BhSv = (x.transpose(1, 2) for x in (q_BTHd[:, :N], k_BShd, v_BShv))
        if sinks_H is None:
            y_BHNv = F.scaled_dot_product_attention(
                q_BHNd, k_BhSd, v_BhSv, attn_mask=mask_NS, scale=scale, enable_gqa=True
            )
        else:
            y_BHNv = _attend_with_sinks(q_BHNd, k_BhSd, v_BhSv, mask_NS, scale, sinks_H)
        return F.pad(y_BHNv.transpose(1, 2), (0, 0, 0, 0, 0, T - N))

    def end_forward(self) -> None:
        """Add the tokens of the forward to `length`."""
        self.length += self._num_tokens


def _attend_with_sinks(
    q_BHNd: Tensor, k_BhSd: Tensor, v_BhSv: Tensor, mask_NS: Tensor, scale: float, sinks_H: Tensor
) -> Tensor:
    """Return attention [B, H, N, v]; `sinks_H` is one more score in each head's fp32 softmax.

    `mask_NS` is True where a query reads a key.
    """
    H, h = q_BHNd.shape[1], k_BhSd.shape[1]
    k_BHSd, v_BHSv = (x.repeat_interleave(H // h, dim=1) for x in (k_BhSd, v_BhSv))
    scores_BHNS = (q_BHNd.float() @ k_BHSd.float().mT * scale).masked_fill(~mask_NS, -torch.inf)
    sinks_BHN1 = sinks_H.float().view(-1, 1, 1).expand(*scores_BHNS.shape[:3], 1)
    weights_BHNS = torch.cat((scores_BHNS, sinks_BHN1), dim=-1).softmax(-1)[..., :-1]
    return (weights_BHNS @ v_BHSv.float()).to(v_BHSv.dtype)
