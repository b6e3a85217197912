"""Stages of a model: what a pipeline rank keeps of it, and the forward of one stage.

Legend: B sequences, T tokens of a sequence, D model dim, k multi-token prediction modules.

    take_stages    the model -> the parts of this rank's stages; `Elsewhere` in place of the others
    __call__       tokens, labels, ..  -> embedding -> layers -> norm -> mtp -> head -> loss
                   hidden [B, T, D]    ------------>|                 |      |
                   hidden [1 + k, B, T, D] -------------------------->|      |
                                                    hidden of the next stage

Every rank has all inputs of a micro-batch, so that hidden states alone travel. They are the
residual stream until the final norm has run, and from then on the stack of normed states
[h_0 .. h_k] of the decoder and of the modules that have run (see `MTPLayer` in `models/block.py`).
A model without such modules has its norm where its head is.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from moecore.base.fields import check_arguments
from moecore.parallel.pipeline.layout import Stage


class Elsewhere(nn.Module):
    """Stands for a module that another rank has, and returns as many values. No parameters."""

    def __init__(self, module: nn.Module, *, results: int = 1) -> None:
        super().__init__()
        self._results = results
        # Models of transformers read a layer's kind.
        named = ChainMap(vars(module), *map(vars, type(module).__mro__))  # type: ignore[arg-type]
        for name, value in named.items():
            if isinstance(value, str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return x itself, and None for further results."""
        return x if self._results == 1 else (x, *[None] * (self._results - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParts:
    """What of a model stages are made of, by name of module."""

    embedding: str
    layers: str  # the ModuleList of transformer layers
    final_modules: tuple[
        str, ...
    ]  # what runs between the last layer and the head, the final norm last
    head: str
    mtp: str | None = None  # the ModuleList of multi-token prediction modules
    tied: bool = False  # whether the head reads the embedding table
    results: int = 1  # that a layer returns, hidden states first
    bound: frozenset[int] = frozenset()  # layers that read the further ones: no stage begins there

    def elsewhere(self, name: str, module: nn.Module) -> Elsewhere:
        """Return what stands for a part on other ranks."""
        is_layer = name.startswith(f"{self.layers}.")
        return Elsewhere(module, results=self.results if is_layer else 1)


@runtime_checkable
class StagedModel(Protocol):
    """What a pipeline asks of a model, or of what runs its stages (`Family.staged`)."""

    def stage_parts(self) -> StageParts:
        """Return what stages are made of, the same before and after `take_stages`."""

    def hidden_shape(self, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of what enters a stage; see `hidden_shape`."""

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError for a micro-batch that stages cannot run; every rank calls it first."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the model by its name."""

    def set_submodule(self, target: str, module: nn.Module) -> None:
        """Put a module in the place of one of the model."""

    def __call__(self, *, hidden: Tensor | None, stage: Stage, **inputs: Any) -> Tensor:
        """Run the forward of one stage.

        `hidden` has this rank's tokens, as the stage before returned them, None with the embedding;
        `inputs` are arguments of the model's forward by name, the same in every stage. It returns
        hidden states for the next stage; with the head the loss, or the logits without labels.
        """


def take_stages(model: StagedModel, stages: Sequence[Stage]) -> None:
    """Keep of a model what these stages need, in place; call it before `parallelize_moe`."""
    check_arguments(take_stages, locals())
    parts, (num_layers, num_mtp) = model.stage_parts(), num_parts(model)
    local_modules: dict[str, nn.Module] = {}
    for stage in stages:
        _check_range(stage, "layers", stage.layers, num_layers)
        _check_range(stage, "mtp", stage.mtp, num_mtp)
        local_modules |= dict(_input_problem(model, parts, stage, num_mtp))
    for name, module in local_modules.items():
        if isinstance(module, Elsewhere):
            raise ValueError(
                f"stages ({[stage.index for stage in stages]}) must be of a model that has {name}: "
                "take them of the whole model, once"
            )
    lists = [name for name in (parts.layers, parts.mtp) if name is not None]
    entries = [f"{name}.{i}" for name in lists for i in range(_length(model, name))]
    for name in (parts.embedding, *entries, *parts.final_modules, parts.head):
        if name not in local_modules:
            model.set_submodule(name, parts.elsewhere(name, model.get_submodule(name)))


def hidden_shape(model: StagedModel, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of what enters a stage on this rank. No communication."""
    if stage.embedding or not (stage.layers or stage.mtp or stage.loss):
        raise ValueError(
            f"stage ({stage.index}) must get hidden states and run something: nothing enters the "
            "first, and into an empty one comes what comes into the next"
        )
    return model.hidden_shape(stage, inputs)


def num_parts(model: StagedModel) -> tuple[int, int]:
    """Return how many layers and multi-token prediction modules a model has."""
    parts = model.stage_parts()
    return _length(model, parts.layers), 0 if parts.mtp is None else _length(model, parts.mtp)


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a model's forward returns: itself, or transformers' `.loss`."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"forward's output ({type(output).__name__}) must be the loss, or have it as .loss: "
            "pass labels, and set config.return_dict = True for a model of transformers"
        )
    return cast(Tensor, loss)


def runs_norm(stage: Stage, num_mtp: int) -> bool:
    """Whether the final norm runs in a stage of a model with so many MTP modules."""
    return 0 in stage.mtp or (stage.loss and num_mtp == 0)


def check_stage(model: StagedModel, parts: StageParts, stage: Stage, num_mtp: int) -> None:
    """Raise ValueError when a part of a stage is elsewhere, but not under torch.compile."""
    if torch.compiler.is_compiling():
        return
    for name, module in _input_problem(model, parts, stage, num_mtp):
        if isinstance(module, Elsewhere):
            raise ValueError(
                f"stage ({stage.index}) must be one that this rank has, but {name} is elsewhere: "
                "pass one of those given to take_stages"
            )


def need(inputs: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError for a micro-batch without one of these; "a or b" is either."""
    for name in names:
        if all(inputs.get(part) is None for part in name.split(" or ")):
            raise ValueError(
                f"{name} (None) must be in every micro-batch of pipeline stages, which return "
                "losses: pass it on all ranks"
            )


def check_hidden(hidden: Tensor | None, stage: Stage, shape: tuple[int, ...]) -> None:
    """Raise ValueError for hidden states that are not those that enter a stage."""
    if (hidden is None) != stage.embedding:
        shape_text = None if hidden is None else tuple(hidden.shape)
        raise ValueError(
            f"hidden ({shape_text}) must be None in the stage with the embedding and given in "
            f"every other: stage {stage.index} {'has it' if stage.embedding else 'is another'}"
        )
    if hidden is None:
        return
    is_empty = not (stage.layers or stage.mtp or stage.loss)  # a stack may enter it too
    received_shape = hidden.shape[-len(shape) :] if is_empty else hidden.shape
    if received_shape != shape or not hidden.is_floating_point():
        raise ValueError(
            f"hidden {tuple(hidden.shape)} ({hidden.dtype}) must be floating with the shape "
            f"{shape}, which enters stage {stage.index}: pass what the stage before returns"
        )


def _input_problem(
    model: StagedModel, parts: StageParts, stage: Stage, num_mtp: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a stage needs, with their names."""
    if stage.embedding or stage.mtp or (stage.loss and parts.tied):
        yield parts.embedding, model.get_submodule(parts.embedding)
    for name, indices in ((parts.layers, stage.layers), (parts.mtp, stage.mtp)):
        if name is not None and indices:
            entries = list(cast(nn.ModuleList, model.get_submodule(name)))
            yield from ((f"{name}.{index}", entries[index]) for index in indices)
    if runs_norm(stage, num_mtp):
        yield from ((name, model.get_submodule(name)) for name in parts.final_modules)
    if stage.loss:
        yield parts.head, model.get_submodule(parts.head)


def _check_range(stage: Stage, field: str, indices: Sequence[int], count: int) -> None:
    if any(not 0 <= index < count for index in indices):
        raise ValueError(
            f"stage {stage.index} {field} ({indices}) must be of the {count} of the model: make "
            "the layout for its numbers"
        )


def _length(model: StagedModel, name: str) -> int:
    return len(cast(nn.ModuleList, model.get_submodule(name)))
