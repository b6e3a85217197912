"""`KVCache` stores keys and values of the tokens that a decoder has read, for generation.

Legend: B rows, T tokens of a forward with padding, N of them without padding, S tokens so far, H
query heads, h key/value heads, d and v dims of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """The keys and values of all `length` tokens of earlier forwards, per attention layer.

    Rows are not packed. The n-th call of `attend` in a forward is for the n-th layer. The class is
    plain because FSDP's mixed precision casts the tensors of tuples and dataclasses.
    """

    def __init__(self) -> None:
        self.length = 0
        self._num_tokens = self._layer_idx = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def begin_forward(self, num_tokens: int) -> None:
        """Begin a forward of `num_tokens` tokens per row; tokens after these are padding."""
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

        The result [B, T, H, v] is causal, and 0 for padding. The options are those of `attend`.
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
            # `sinks_H` is one more score in each head's fp32 softmax.
            num_groups = q_BHNd.shape[1] // k_BhSd.shape[1]
            k_BHSd, v_BHSv = (x.repeat_interleave(num_groups, dim=1) for x in (k_BhSd, v_BhSv))
            scores_BHNS = q_BHNd.float() @ k_BHSd.float().mT * scale
            scores_BHNS = scores_BHNS.masked_fill(~mask_NS, -torch.inf)
            sinks_BHN1 = sinks_H.float().view(-1, 1, 1).expand(*scores_BHNS.shape[:3], 1)
            weights_BHNS = torch.cat((scores_BHNS, sinks_BHN1), dim=-1).softmax(-1)[..., :-1]
            y_BHNv = (weights_BHNS @ v_BHSv.float()).to(v_BHSv.dtype)
        return F.pad(y_BHNv.transpose(1, 2), (0, 0, 0, 0, 0, T - N))

    def end_forward(self) -> None:
        """Add the tokens of the forward to `length`."""
        self.length += self._num_tokens
