"""KVCache: keys and values of the tokens that a decoder has read, for generation.

Legend: B rows, T tokens of a forward with padding, N of them without padding, S tokens so far, H
query heads, d dims of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """Keys and values of all tokens so far by attention layer, for generation from unpacked rows.

    The class is plain because FSDP's mixed precision casts the tensors of tuples and dataclasses.

    Attributes:
        length: tokens of earlier forwards.
        num_tokens: tokens of the running forward, without padding at the end; the decoder sets it.
    """

    def __init__(self) -> None:
        self.length = self.num_tokens = 0
        self._kv_by_layer: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: nn.Module,
        q_BTHd: Tensor,
        k_BThd: Tensor,
        v_BThd: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Append this forward's keys and values of `layer`; return causal attention to all so far.

        Outputs [B, T, H, d] are 0 for padding. `window` limits the keys per query; None = all.
        """
        T, N = q_BTHd.shape[1], self.num_tokens
        k_BShd, v_BShd = k_BThd[:, :N], v_BThd[:, :N]
        if layer in self._kv_by_layer:
            k_BShd, v_BShd = (
                torch.cat(pair, dim=1)
                for pair in zip(self._kv_by_layer[layer], (k_BShd, v_BShd), strict=True)
            )
        self._kv_by_layer[layer] = k_BShd, v_BShd
        keys_S = torch.arange(k_BShd.shape[1], device=q_BTHd.device)
        queries_N1 = keys_S[-N:, None]
        mask_NS = keys_S <= queries_N1
        if window is not None:
            mask_NS &= keys_S > queries_N1 - window
        q_BHNd, k_BhSd, v_BhSd = (x.transpose(1, 2) for x in (q_BTHd[:, :N], k_BShd, v_BShd))
        y_BHNd = F.scaled_dot_product_attention(
            q_BHNd, k_BhSd, v_BhSd, attn_mask=mask_NS, scale=scale, enable_gqa=True
        )
        return F.pad(y_BHNd.transpose(1, 2), (0, 0, 0, 0, 0, T - N))

    def end_forward(self) -> None:
        """Add `num_tokens` to `length`, after a forward."""
        self.length += self.num_tokens
