"""Attention without masks computes what transformers' does, without the host, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moecore.hf import use_causal_attention

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = dict(hidden_size=32, num_hidden_layers=2, vocab_size=99, num_experts_per_tok=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
TOKENS = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def make(*, causal: bool, **options: Any) -> nn.Module:
    experts = dict(num_experts=4, moe_intermediate_size=16)
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **experts, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if causal:
        use_causal_attention(model)
    return model


def loss_of(model: nn.Module, **inputs: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **inputs).loss


def test_loss_and_gradients_are_those_of_transformers_and_nothing_is_read() -> None:
    found, reads = [], []
    for causal in (False, True):
        model = make(causal=causal)
        with HostReads() as host:
            loss = loss_of(model)
        reads.append(host.count)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert reads[0] > 0 == reads[1]
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)


def test_masks_and_positions_are_refused() -> None:
    model = make(causal=True)
    for name in ("attention_mask", "position_ids"):
        with pytest.raises(ValueError, match=f"{name} must be None after use_causal_attention"):
            loss_of(model, **{name: torch.ones_like(TOKENS)})
    with pytest.raises(ValueError, match="must be given by name"):
        model.base_model(TOKENS, torch.ones_like(TOKENS))


def test_keys_of_an_earlier_forward_are_refused() -> None:
    model = make(causal=True)
    cache = model(input_ids=TOKENS[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"tokens \(8\) must be as many as their keys \(16\) for"):
        model(input_ids=TOKENS[:, 8:], past_key_values=cache)


def test_a_sliding_window_is_refused() -> None:
    model = make(causal=True, sliding_window=8, use_sliding_window=True)
    with pytest.raises(ValueError, match=r"sliding_window \(8\) must be None"):
        loss_of(model)
    config = transformers.MixtralConfig(
        **SIZES, **HEADS, num_local_experts=4, intermediate_size=16, sliding_window=8
    )
    mixtral = transformers.AutoModelForCausalLM.from_config(config)
    use_causal_attention(mixtral)
    with pytest.raises(ValueError, match=r"sliding_window \(8\) must be None"):
        loss_of(mixtral)
