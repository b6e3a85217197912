"""The activations between an expert's two matrices, computed in fp32 and rounded once.

Legend: R expert rows, F hidden dim. Gated activations read 2F columns: gate then up, or gate and
up alternating when the weights are stored interleaved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.config import MoEConfig


def activate(h_RF: Tensor, config: MoEConfig, *, interleaved: bool = False) -> Tensor:
    """Return the activated hidden rows [R, F] in fp32.

    Args:
        h_RF: FC1 output, [R, 2F] for gated activations, else [R, F].
        config: names the activation; `activation_limit` and `activation_alpha` belong to
            "clamped_swiglu": (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and
            up on both sides (Source: gpt-oss).
        interleaved: whether gate and up columns alternate.
    """
    h_RF = h_RF.to(torch.promote_types(h_RF.dtype, torch.float32))
    if config.activation == "relu2":
        return F.relu(h_RF).square()
    gate, up = (h_RF[..., 0::2], h_RF[..., 1::2]) if interleaved else h_RF.chunk(2, dim=-1)
    if config.activation == "swiglu":
        return F.silu(gate) * up
    if config.activation == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    limit = config.activation_limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(config.activation_alpha * gate)
