"""Tiny peft models, and three steps of training them: stock in one process, or parallelized."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import clip_grad_norm_
from moecore.io.hf.lora import collect_adapter_tensors
from tests.families.transformers.hf_models import random_model
from tests.helpers.parts import on_parts

peft = pytest.importorskip("peft", minversion="0.21")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS, RANKS = 2, 4


def lora_config(**kwargs: Any) -> Any:
    sizes = dict(r=4, lora_alpha=6, target_modules=ATTENTION, target_parameters=EXPERTS)
    return peft.LoraConfig(**sizes | dict(task_type="CAUSAL_LM") | kwargs)


def adapted_model(name: str, sizes: dict[str, Any], **kwargs: Any) -> nn.Module:
    """A stock model with adapters of random A and B, so that none is invisible."""
    model = peft.get_peft_model(random_model(name, **sizes), lora_config(**kwargs))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_" in key:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def batches(step: int, device: torch.device | None = None) -> list[dict[str, Tensor]]:
    """One for each of four data ranks, and another number of tokens for each."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for r in range(RANKS):
        ids = torch.randint(0, 61, (2, 4 + r), generator=generator).to(device)
        found.append({"input_ids": ids, "labels": ids})
    return found


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def in_peft_form(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    """Every tensor of the adapter, or each one's gradient, as peft's file would have it."""
    stored = collect_adapter_tensors(model, "default")
    tensors = {name: one.tensor.grad if grads else one.tensor for name, one in stored.items()}
    return {n: stored[n].convert_to_file(whole(t)) for n, t in tensors.items() if t is not None}


def updates(
    tensors: dict[str, Tensor], *, dim: int, scale: float, num_experts: int = 8
) -> Iterator[tuple[str, Tensor]]:
    """Yield s B A of each matrix with adapters by its published name, from tensors in peft's form.

    `dim` is the model's width, by which FC1 of experts is told from FC2.
    """
    for name, b in tensors.items():
        path = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        if path.endswith(".lora_A.weight"):
            continue
        a, path = tensors[name.replace("lora_B", "lora_A")], path.replace(".base_layer", "")
        if "experts" not in path:
            yield f"{path}.weight", b @ a * scale
            continue
        roles = ("gate_proj", "up_proj") if a.shape[1] == dim else ("down_proj",)
        for e in range(num_experts):
            b_e = b.unflatten(1, (-1, num_experts))[:, :, e]
            delta = b_e @ a.unflatten(0, (num_experts, -1))[e] * scale
            for role, part in zip(roles, delta.chunk(len(roles)), strict=True):
                yield f"{path}.{e}.{role}.weight", part


def train(model: nn.Module, data_rank: int | None, data_ranks: int = RANKS) -> dict[str, Tensor]:
    """Losses of this rank, gradients of the first step, and adapters after the last.

    Args:
        model: with adapters.
        data_rank: of a parallelized model; None = one process, which has all batches.
        data_ranks: which have a batch each.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    # Larger steps magnify rounding: 0.3 took merged weights from 8e-6 to 1.2e-5 on some CPUs.
    optimizer = on_parts(torch.optim.SGD)(trained, lr=0.2, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        every = batches(step, next(model.parameters()).device)[:data_ranks]
        mine = every if data_rank is None else [every[data_rank]]
        for i, batch in enumerate(mine):
            loss = model(**batch, use_cache=False).loss
            (loss / len(mine)).backward()
            found[f"loss/{step}/{data_rank or i}"] = loss.detach()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        if step == 0:
            found |= {f"grad/{n}": t for n, t in in_peft_form(model, grads=True).items()}
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"value/{n}": t for n, t in in_peft_form(model).items()}


def logits(model: nn.Module) -> Tensor:
    """Of one batch; the model stays in the mode it is in."""
    with torch.no_grad():
        batch = batches(9, next(model.parameters()).device)[0]
        found: Tensor = model(**batch, use_cache=False).logits
    return found
