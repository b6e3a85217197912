"""Sinks: one more key of every query, of a learned score and no value.

A sink takes part in lse alone, so o and lse with it are those without it, rescaled.

Source: attention sinks as of gpt-oss (arXiv:2508.10925).
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(o_BTHv: Tensor, lse_BHT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return o and lse with a sink of each head."""
    lse = torch.logaddexp(lse_BHT, sinks_H[:, None].to(lse_BHT.dtype))
    shares_BTH = (lse_BHT - lse).exp().transpose(1, 2)
    return (o_BTHv * shares_BTH[..., None]).to(o_BTHv.dtype), lse


def sinks_gradient(do_BTHv: Tensor, o_BTHv: Tensor, lse_BHT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks, of o and lse with them."""
    delta_BHT = (do_BTHv.to(lse_BHT.dtype) * o_BTHv).sum(-1).transpose(1, 2)
    shares_BHT = (sinks_H[:, None].to(lse_BHT.dtype) - lse_BHT).exp()
    return -(shares_BHT * delta_BHT).sum((0, 2)).to(sinks_H.dtype)
