"""Splits a model into pipeline stages: removes other ranks' modules, and checks stage inputs.

Legend: B sequences, T tokens of a sequence, D model dim, k multi-token prediction modules.

    remove_other_stages    replaces modules of other ranks' stages by `AbsentModule`
    __call__       tokens, labels, ..  -> embedding -> layers -> norm -> mtp -> head -> loss
                   hidden [B, T, D]    ------------>|                 |      |
                   hidden [1 + k, B, T, D] -------------------------->|      |
                                                    hidden of the next stage

Every rank has all inputs of a micro-batch, so stages send only hidden states. Before the final norm
they are the residual stream. After it they are the stack of normed states [h_0 .. h_k] of the
decoder and of the MTP modules that have run (`MTPLayer` in `models/block.py`). A model without MTP
modules runs the final norm in the stage of the head.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from moecore.base.fields import check_arguments
from moecore.parallel.pipeline.layout import Stage


class AbsentModule(nn.Module):
    """A module without parameters that returns its input, in place of another rank's module."""

    is_of_other_stage = True  # for code that cannot import this class

    def __init__(self, module: nn.Module, *, num_outputs: int = 1) -> None:
        super().__init__()
        self._results = num_outputs
        # transformers models read string attributes of layers, such as the attention type.
        named = ChainMap(vars(module), *map(vars, type(module).__mro__))  # type: ignore[arg-type]
        for name, value in named.items():
            if isinstance(value, str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return x. If the replaced module has several results, return (x, None, ...)."""
        return x if self._results == 1 else (x, *[None] * (self._results - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageParts:
    """The names of a model's submodules that `remove_other_stages` divides between stages."""

    embedding: str
    towers: tuple[str, ...] = ()  # encoders of images and audio, in the stage of the embedding
    layers: str  # the ModuleList of transformer layers
    final_modules: tuple[str, ...]  # modules between the last layer and the head, norm last
    head: str
    mtp: str | None = None  # the ModuleList of multi-token prediction modules
    tied: bool = False  # whether the head reads the embedding table
    results: int = 1  # number of values that a layer returns, hidden states first
    # Layers that read further results of the layer before, so no stage can begin with them.
    bound_layers: frozenset[int] = frozenset()

    def make_placeholder(self, module_name: str, module: nn.Module) -> AbsentModule:
        """Return the placeholder that replaces a module on ranks without the module."""
        is_layer = module_name.startswith(f"{self.layers}.")
        return AbsentModule(module, num_outputs=self.results if is_layer else 1)


@runtime_checkable
class StagedModel(Protocol):
    """A model that can run pipeline stages (`Family.make_staged_model`)."""

    def stage_parts(self) -> StageParts:
        """Return the names of the stages' modules; unchanged by `remove_other_stages`."""

    def hidden_shape(self, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of a stage's input hidden states for the forward arguments `inputs`."""

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise a ValueError if stages cannot run with a micro-batch's arguments."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module of the model with the qualified name `target`."""

    def set_submodule(self, target: str, module: nn.Module) -> None:
        """Replace the module of the model with the qualified name `target`."""

    def __call__(self, *, hidden: Tensor | None, stage: Stage, **inputs: Any) -> Tensor:
        """Run one stage; return hidden states, or the loss (logits without labels).

        `hidden` is the output of the previous stage; None if the stage has the embedding.
        """


def remove_other_stages(model: StagedModel, stages: Sequence[Stage]) -> None:
    """Replace the modules that these stages do not need by `AbsentModule`, in place.

    Call it once, before `parallelize_moe`. A ValueError is raised if stages lack a module.
    """
    check_arguments(remove_other_stages, locals())
    parts, (num_layers, num_mtp) = model.stage_parts(), count_layers_and_mtp(model)
    local_modules: dict[str, nn.Module] = {}
    for stage in stages:
        _check_stage_indices(stage, "layers", stage.layers, num_layers)
        _check_stage_indices(stage, "mtp", stage.mtp, num_mtp)
        local_modules |= dict(_list_needed_modules(model, parts, stage, num_mtp))
    for name, module in local_modules.items():
        if isinstance(module, AbsentModule):
            raise ValueError(
                f"stages ({[stage.index for stage in stages]}) must be of a model that has {name}: "
                "take them of the whole model, once"
            )
    lists = [name for name in (parts.layers, parts.mtp) if name is not None]
    entries = [f"{name}.{i}" for name in lists for i in range(_count_entries(model, name))]
    for name in (parts.embedding, *parts.towers, *entries, *parts.final_modules, parts.head):
        if name not in local_modules:
            model.set_submodule(name, parts.make_placeholder(name, model.get_submodule(name)))


def get_hidden_shape(
    model: StagedModel, stage: Stage, inputs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the local shape of a stage's input; ValueError for the first or an empty stage."""
    if stage.embedding or not (stage.layers or stage.mtp or stage.loss):
        raise ValueError(
            f"stage ({stage.index}) must get hidden states and run something: nothing enters the "
            "first, and into an empty one comes what comes into the next"
        )
    return model.hidden_shape(stage, inputs)


def count_layers_and_mtp(model: StagedModel) -> tuple[int, int]:
    """Return the numbers of layers and of multi-token prediction modules of a model."""
    parts = model.stage_parts()
    num_mtp = 0 if parts.mtp is None else _count_entries(model, parts.mtp)
    return _count_entries(model, parts.layers), num_mtp


def get_loss(output: Any) -> Tensor:
    """Return a forward's output if it is a tensor, otherwise its `loss`; ValueError for None."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            f"forward's output ({type(output).__name__}) must be the loss, or have it as .loss: "
            "pass labels, and set config.return_dict = True for a model of transformers"
        )
    return cast(Tensor, loss)


def runs_final_norm(stage: Stage, num_mtp: int) -> bool:
    """Whether a stage runs the final norm, in a model with `num_mtp` MTP modules."""
    return 0 in stage.mtp or (stage.loss and num_mtp == 0)


def check_stage_modules(model: StagedModel, parts: StageParts, stage: Stage, num_mtp: int) -> None:
    """Raise a ValueError if this rank lacks a module of a stage. Does nothing in torch.compile."""
    if torch.compiler.is_compiling():
        return
    for name, module in _list_needed_modules(model, parts, stage, num_mtp):
        if isinstance(module, AbsentModule):
            raise ValueError(
                f"stage ({stage.index}) must be one that this rank has, but {name} is elsewhere: "
                "pass one of those given to remove_other_stages"
            )


def require_arguments(inputs: Mapping[str, Any], *names: str) -> None:
    """Raise a ValueError if `inputs` lacks an argument; a name "a or b" requires either."""
    for name in names:
        if all(inputs.get(part) is None for part in name.split(" or ")):
            raise ValueError(
                f"{name} (None) must be in every micro-batch of pipeline stages, which return "
                "losses: pass it on all ranks"
            )


def check_hidden_states(
    hidden_states: Tensor | None, stage: Stage, expected_shape: tuple[int, ...]
) -> None:
    """Raise a ValueError unless the input has `expected_shape`, or is None in the first stage."""
    if (hidden_states is None) != stage.embedding:
        shape_text = None if hidden_states is None else tuple(hidden_states.shape)
        raise ValueError(
            f"hidden ({shape_text}) must be None in the stage with the embedding and given in "
            f"every other: stage {stage.index} {'has it' if stage.embedding else 'is another'}"
        )
    if hidden_states is None:
        return
    is_empty = not (stage.layers or stage.mtp or stage.loss)  # its input may be a stack
    input_shape = hidden_states.shape[-len(expected_shape) :] if is_empty else hidden_states.shape
    if input_shape != expected_shape or not hidden_states.is_floating_point():
        raise ValueError(
            f"hidden {tuple(hidden_states.shape)} ({hidden_states.dtype}) must be floating with "
            f"the shape {expected_shape}, which enters stage {stage.index}: pass what the stage "
            "before returns"
        )


def _list_needed_modules(
    model: StagedModel, parts: StageParts, stage: Stage, num_mtp: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each module that a stage runs, or whose parameters it reads."""
    if stage.embedding or stage.mtp or (stage.loss and parts.tied):
        yield parts.embedding, model.get_submodule(parts.embedding)
    if stage.embedding:
        yield from ((name, model.get_submodule(name)) for name in parts.towers)
    for name, indices in ((parts.layers, stage.layers), (parts.mtp, stage.mtp)):
        if name is not None and indices:
            entries = list(cast(nn.ModuleList, model.get_submodule(name)))
            yield from ((f"{name}.{index}", entries[index]) for index in indices)
    if runs_final_norm(stage, num_mtp):
        yield from ((name, model.get_submodule(name)) for name in parts.final_modules)
    if stage.loss:
        yield parts.head, model.get_submodule(parts.head)


def _check_stage_indices(stage: Stage, field: str, indices: Sequence[int], num_layers: int) -> None:
    if any(not 0 <= index < num_layers for index in indices):
        raise ValueError(
            f"stage {stage.index} {field} ({indices}) must be of the {num_layers} of the model: "
            "make the layout for its numbers"
        )


def _count_entries(model: StagedModel, list_name: str) -> int:
    return len(cast(nn.ModuleList, model.get_submodule(list_name)))
