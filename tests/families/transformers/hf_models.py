"""Tiny random transformers models, and everything that one training step of them computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", minversion="5")

COMMON: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
)


def build(prefix: str, sizes: dict[str, Any], **kwargs: Any) -> nn.Module:
    """Return transformers' causal language model of a class prefix, such as "Qwen3Moe"."""
    config = getattr(transformers, f"{prefix}Config")(**COMMON | sizes | kwargs)
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return model


EIGHT_OF_TWO = dict(num_experts_per_tok=2, num_local_experts=8, intermediate_size=16)
DEEPSEEK_V3 = dict(
    **dict(num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=16, v_head_dim=8),
    **dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2),
    **dict(first_k_dense_replace=1, num_hidden_layers=3, kv_lora_rank=16, q_lora_rank=16),
    **dict(qk_rope_head_dim=8, qk_nope_head_dim=8),
)
QWEN2_MOE = dict(
    **dict(intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24),
    **dict(num_experts=8, num_experts_per_tok=3),
)
QWEN3_MOE = dict(
    **dict(head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2),
    **dict(intermediate_size=48, norm_topk_prob=True),
)
qwen2_moe = partial(build, "Qwen2Moe", QWEN2_MOE)
qwen3_moe = partial(build, "Qwen3Moe", QWEN3_MOE)
mixtral = partial(build, "Mixtral", EIGHT_OF_TWO)
olmoe = partial(build, "Olmoe", dict(intermediate_size=16, num_experts=8, num_experts_per_tok=3))
deepseek_v3 = partial(build, "DeepseekV3", DEEPSEEK_V3)
gpt_oss = partial(
    build, "GptOss", EIGHT_OF_TWO | dict(head_dim=8, sliding_window=4, swiglu_limit=0.5)
)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "qwen2-moe": qwen2_moe,
    "qwen2-moe-normalized": partial(qwen2_moe, norm_topk_prob=True),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-raw": partial(qwen3_moe, norm_topk_prob=False),
    "qwen3-moe-sparse-step": partial(qwen3_moe, decoder_sparse_step=2, num_hidden_layers=4),
    "mixtral": mixtral,
    "olmoe": olmoe,
    "olmoe-normalized": partial(olmoe, norm_topk_prob=True),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-raw": partial(deepseek_v3, norm_topk_prob=False, n_shared_experts=2),
    "gpt-oss": gpt_oss,
}
ARCHITECTURES = ["qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "deepseek-v3", "gpt-oss"]
WITH_BALANCE_LOSS = [name for name in ARCHITECTURES if name != "deepseek-v3"]


def random_model(name: str, **kwargs: Any) -> nn.Module:
    """Weights large enough that no expert, bias or sink is invisible."""
    model = MODELS[name](**kwargs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                # Group limits with negative sums: excluded experts must stay excluded.
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.5 - 1.0)
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (2, 11), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def padding_mask() -> Tensor:
    """For `batch`: one row padded on the right, the other on the left, as in generation."""
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 8:] = 0
    mask[1, :2] = 0
    return mask


def learned(labels: Tensor, mask: Tensor) -> Tensor:
    """Ignore labels of padding, and of a token that is predicted from padding on its left."""
    return labels.masked_fill((mask * mask.roll(1, 1)) == 0, -100)


def run(model: nn.Module, mask: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
    """Logits of real tokens, loss, every gradient, and the balance loss if asked for.

    Args:
        model: plain or parallelized; its gradients are kept.
        mask: attention mask, see `learned`.
        kwargs: more arguments of the model's forward.
    """
    ids, labels = batch()
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    labels = labels if mask is None else learned(labels, mask)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **kwargs)
    found = {"logits": out.logits.detach()[real], "loss": out.loss.detach()}
    out.loss.backward()
    if getattr(out, "aux_loss", None) is not None:
        found["aux_loss"] = out.aux_loss.detach()
        for i, logits_TE in enumerate(out.router_logits):
            found[f"router_logits/{i}"] = logits_TE.detach()[real.flatten()]
    return found | whole_gradients(model)


def enable_checkpointing(model: nn.Module) -> None:
    """transformers' own gradient checkpointing, under its old or new name."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert (grad is not None) == parameter.requires_grad, name
        if grad is None:
            continue
        found[f"grad/{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of an element relative to its tensor's largest one, and where it is.

    A gradient of one element is a sum over tokens that can cancel. Its error is relative to the
    largest gradient of its module, whose sums have terms of the same size.
    """
    assert found.keys() == expected.keys()
    errors = []
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        alike, module = [name], name.rpartition(".")[0]
        if "grad/" in name and expected[name].numel() == 1:
            alike = [other for other in expected if other.rpartition(".")[0] == module]
        scale = max(expected[other].abs().max() for other in alike).clamp(min=1e-8)
        error = (found[name] - expected[name]).abs().max() / scale
        errors.append((float(error.nan_to_num(nan=float("inf"))), name))
    return max(errors)


def assert_equal_numbers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    error, name = worst(found, expected)
    assert error <= 1e-5, f"{name}: {error}"


class LargestStorage(TorchDispatchMode):
    """Records the bytes of the largest storage that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.num_bytes = max([self.num_bytes, *(t.untyped_storage().nbytes() for t in tensors)])
        return out
