"""Tiny decoders to record and replay, and everything that their training computes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from moecore import BalanceConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.models import Decoder, DecoderConfig, preset
from moecore.models.block import Block
from moecore.rl import RouterReplay
from moecore.rl.choices import Choices

Mode = Literal["none", "non-reentrant", "reentrant"]
MODES: tuple[Mode, ...] = ("none", "non-reentrant", "reentrant")
LOSSES = BalanceConfig(micro_batch_coef=0.1, sequence_coef=0.1, z_loss_coef=0.01)
SHARED = preset("tiny-shared")
assert SHARED.moe is not None


def with_moe(**changes: Any) -> DecoderConfig:
    moe = replace(SHARED.moe, **dict(balance=LOSSES) | changes)  # type: ignore[type-var]
    return replace(SHARED, moe=moe)


PLAIN: dict[str, Any] = dict(score_function="softmax", num_groups=1, top_groups=1)
CONFIGS: dict[str, DecoderConfig] = {
    "shared": with_moe(),
    "deepseek-mtp": preset("tiny-deepseek-v3"),
    "capacity": with_moe(**PLAIN, capacity=CapacityConfig(factor=0.7)),
    "capacity-position": with_moe(**PLAIN, capacity=CapacityConfig(factor=0.7, drop="position")),
    "post": with_moe(**PLAIN, score_order="post", expert_bias=False),
    "expert-choice": with_moe(
        **PLAIN,
        assignment="expert_choice",
        expert_bias=False,
        capacity=CapacityConfig(factor=1.2),
        balance=BalanceConfig(z_loss_coef=0.01),
    ),
    "sinkhorn": with_moe(**PLAIN, assignment="sinkhorn", expert_bias=False),
    "quantile": with_moe(
        num_groups=1,
        top_groups=1,
        balance=BalanceConfig(bias_update="quantile", bias_update_rate=1.0),
    ),
}


def make_model(config: DecoderConfig, mode: Mode = "none", seed: int = 0) -> Decoder:
    """Weights large enough for uneven routing; blocks checkpointed as `mode` says."""
    model = Decoder(config)
    randomize(model, seed)
    return checkpointed(model, mode)


def randomize(model: nn.Module, seed: int, only: str = "") -> None:
    """Fill all but norms, or what has `only` in its name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if only in name and "norm" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


def checkpointed(model: Any, mode: Mode, block: type[nn.Module] = Block) -> Any:
    if mode != "none":
        impl = CheckpointImpl.REENTRANT if mode == "reentrant" else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, block),
        )
    return model


def batches(count: int, sequences: int = 2, length: int = 12) -> list[Tensor]:
    """Token ids of equal shape: a wrong pairing would not show in a shape."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 128, (sequences, length), generator=generator) for _ in range(count)]


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def reset(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    for layer in layers_of(model):
        layer.tracker.counts = None
        layer.tracker.reset()


def train(model, inputs, backward, padding_mask=None) -> dict[str, Tensor]:
    """All forwards, then backwards; losses, every gradient and all that the layers counted."""
    reset(model)
    losses = []
    for x in inputs:
        labels = x.roll(-1, 1)
        if padding_mask is not None:
            labels = labels.masked_fill(padding_mask, -100)
        losses.append(model(x, labels, padding_mask_BT=padding_mask))
    backward(losses)
    found = results(model, losses)
    # Now, not before the next forward: after a forward without gradient FSDP2's root shows its
    # gathered parameters, which are not those that hold the gradients.
    model.zero_grad(set_to_none=True)
    return found


def results(model: nn.Module, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    found = {f"loss/{i}": loss.detach() for i, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            name = name.replace("_checkpoint_wrapped_module.", "")
            found[f"grad/{name}"] = parameter.grad.clone()
    for i, layer in enumerate(layers_of(model)):
        if layer.tracker.counts is not None:
            for j, tensor in enumerate(layer.tracker.counts.list_tensors()):
                found[f"counts/{i}/{j}"] = tensor.clone()
    return found


def lifo(losses: list[Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def fifo(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def together(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


ORDERS = {"lifo": lifo, "fifo": fifo, "together": together}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest element error over the largest element of its tensor."""
    assert found.keys() == expected.keys()
    errors = []
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).abs().max()
        errors.append(error / tensor.double().abs().max().clamp(min=1e-12))
    return float(torch.stack(errors).max())  # nan if one is


def recorded(model: nn.Module, inputs: list[Tensor], **kwargs: Any) -> Choices:
    """Choices of forwards without gradient."""
    replay = RouterReplay(model)
    with replay.record(), torch.no_grad():
        for x in inputs:
            model(x, x.roll(-1, 1), **kwargs)
    return replay.choices()


def same_choices(a: Choices, b: Choices) -> bool:
    """Whether both have the same layers, forwards, types and ids."""
    assert a.keys() == b.keys()
    pairs = [pair for name in b for pair in zip(a[name], b[name], strict=True)]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def other_choices(a: Choices, b: Choices) -> bool:
    """Whether every layer chose otherwise in every forward, so that a mix-up must show."""
    pairs = [(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)]
    return all(not torch.equal(x.sort().values, y.sort().values) for x, y in pairs)
