"""Stages whose parameters are given by hand, of a model with copies of its embedding table.

The model has 4 layers (dense, MoE, MoE, MoE), a multi-token prediction module and a tied head, so
up to three stages hold the embedding table.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import BalanceConfig, ParallelConfig, PipelineConfig
from moecore.base.params import compute_global_indices
from moecore.models import Decoder
from tests.parallel.small_decoder import parallel_decoder, small_decoder

TABLE = "model.embed_tokens.weight"
CONFIG = small_decoder(
    16,
    8,
    vocab_size=62,
    num_layers=4,
    num_heads=2,
    tie_embeddings=True,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    max_seq_len=4096,
    dense=24,
    moe=dict(expert_bias=True, balance=BalanceConfig(bias_update_rate=1e-3)),
)
# Pipelines, and which of their ranks hold the table; "whole" is none.
LAYOUTS = {
    "whole": (None, (0,)),
    "halves": (PipelineConfig(layout="Ett|ttmL"), (0, 1)),
    "turns": (PipelineConfig(layout="Et|t|t|tmL", schedule="interleaved"), (0, 1)),
    "quarters": (PipelineConfig(layout="Et|tt|tm|L"), (0, 2, 3)),
}
PP = {"whole": 1, "halves": 2, "turns": 2, "quarters": 4}


def build(layout: str, *, seed: int = 7, **degrees: int) -> Decoder:
    """Return this rank's stage, sharded over the other ranks of its stage, with equal copies."""
    parallel = ParallelConfig(pp=PP[layout], **degrees)
    return parallel_decoder(CONFIG, parallel, seed=seed, pipeline=LAYOUTS[layout][0])


def plain(seed: int = 7) -> Decoder:
    """Return the whole model of one process."""
    model = Decoder(CONFIG)
    model.init_weights(seed)
    return model


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return what this rank must hold of a whole tensor."""
    if not isinstance(tensor, DTensor):
        return whole
    return whole[torch.meshgrid(*compute_global_indices(tensor), indexing="ij")]


def values_of(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return eighths from -1 to 1, whose sums have no rounding errors."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator) / 8


def set_gradients(model: nn.Module, seed: int, *, scale: float = 1.0) -> None:
    """Give each parameter the gradient that its name and the seed decide."""
    for name, param in model.named_parameters():
        param.grad = torch.zeros_like(param)
        local(param.grad).copy_(shard_of(scale * values_of(name, param.shape, seed), param))
