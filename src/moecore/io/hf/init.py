"""Weights of a transformers model from a seed: where no directory is loaded."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from moecore.base.fields import Seed, check_arguments
from moecore.io.checkpoint.buffers import fresh_buffers
from moecore.moe.params import clean_name, init_normal_


@torch.no_grad()
def init_hf(model: nn.Module, seed: Seed = 0) -> None:
    """Fill every parameter and buffer of a transformers model: the same values on every layout.

    transformers' own initialisation knows no DTensors and no MoELayers. Norms are 1, biases 0
    (gpt-oss's router bias and DeepSeek-V3's selection bias too), everything else is N(0, s^2) with
    s the config's `initializer_range`; buffers that no file holds (rotary frequencies) are worked
    out anew. No communication.

    Args:
        model: plain or parallelized, with storage; has a `config`.
        seed: different seeds give independent models.

    Raises:
        ValueError: for a model that is not transformers'.
        NotImplementedError: when a module's buffers cannot be worked out from its config.

    Note: CPU and CUDA draw different values from the same seed.
    """
    check_arguments(init_hf, locals())
    std = getattr(cast(Any, model).config, "initializer_range", None)
    if std is None:
        raise ValueError(
            f"model ({type(model).__name__}) must be a transformers model, whose config has an "
            "initializer_range: a Decoder has init_weights(seed)"
        )
    for name, param in model.named_parameters():
        key = clean_name(name)
        if key.endswith("bias"):
            param.zero_()
        elif param.ndim == 1 and key.endswith("weight"):  # only norms have such weights
            param.fill_(1)
        else:
            init_normal_(param, std=std, key=key, seed=seed)
    for name, buffer in model.named_buffers():
        if clean_name(name).endswith("bias"):
            buffer.zero_()
    for buffer, value in fresh_buffers(model):
        buffer.copy_(value)
