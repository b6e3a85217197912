"""DeepSeek-V4's attention layers of true heads on a GPU, against transformers' own forward."""

import copy

import pytest
import torch
from torch import Tensor, nn

from moecore.families.transformers.compressed_attention import use_compressed_attention

pytestmark = pytest.mark.gpu
TOKENS = 300  # all windows are read
KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")


def make_layer(kind: str, device: str) -> tuple[nn.Module, nn.Module]:
    """Return the layer in fp32, with values of bf16, and its rotary embedding."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

    sizes = dict(hidden_size=256, q_lora_rank=128, o_lora_rank=32, index_n_heads=8)
    config = DeepseekV4Config(**sizes)
    config._attn_implementation = "eager"
    layer = stock.DeepseekV4Attention(config, config.layer_types.index(kind))
    g = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        values = torch.randn(weight.shape, generator=g)
        values = values * 256**-0.5 if weight.dim() > 1 else 1 + 0.1 * values
        weight.data = values.bfloat16().float()
    return layer.to(device), stock.DeepseekV4RotaryEmbedding(config).to(device)


def run(layer: nn.Module, rotary: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output, and gradients of the input and of weights."""
    layer = copy.deepcopy(layer).to(dtype)
    device = layer.sinks.device
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, TOKENS, 256, generator=g).bfloat16().to(device, dtype) for _ in "xy")
    places = torch.arange(TOKENS, device=device)[None]
    angles = {
        name: rotary(x, position_ids=places, layer_type=name) for name in ("main", "compress")
    }
    distance = places.T - places
    is_seen = (distance >= 0) & (distance < layer.sliding_window)
    mask = torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
    leaf = x.requires_grad_()
    y = layer(
        leaf, position_embeddings=angles, position_ids=places, attention_mask=mask[None, None]
    )
    weights = dict(layer.named_parameters())
    grads = torch.autograd.grad(y[0], [leaf, *weights.values()], dy, allow_unused=True)
    found = dict(zip(["input", *weights], grads, strict=True)) | {"output": y[0].detach()}
    return {name: value.float() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_at_most_twice_as_wrong_as_the_stock_layer(kind: str, device="cuda") -> None:
    layer, rotary = make_layer(kind, device)
    exact, plain = (run(layer, rotary, dtype) for dtype in (torch.float32, torch.bfloat16))
    use_compressed_attention(layer)
    got = run(layer, rotary, torch.bfloat16)
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        error, of_plain = ((x[name] - want).norm() for x in (got, plain))
        assert error <= 2 * of_plain + 2**-9 * want.norm(), name
