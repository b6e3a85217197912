"""StagedCausal: pipeline stages of a causal language model of transformers.

    take_stages finds      embedding -> one list of layers -> norm -> head, by name
    a stage's forward      the model's own, with `inputs_embeds` in place of tokens and, for the
                           call, `Elsewhere` in place of every part of another stage

So masks, positions and rotary embeddings are made by the model in every stage, of the same inputs,
and a layer keeps its index. Where the head is elsewhere the model's logits are its hidden states.

What a model does to hidden states beside its parts (factors of embeddings or logits, streams that
layers exchange) would be done in every stage. So a stage's first forward compares what each part
gets with what the part before has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moecore.base.torch_names import version
from moecore.families.transformers.rows import READER, SEQUENCE, RowReader, tokens_of
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import (
    Elsewhere,
    StageParts,
    check_held,
    check_hidden,
    runs_norm,
)
from moecore.parallel.shard.units import find_blocks

PARTS = "_moecore_stage_parts"  # attribute of a model
CHECKED = "_moecore_checked_stages"  # attribute of a model: stages that have run once
IS_CUT = "_moecore_is_cut"  # attribute of a model: parts are elsewhere
RUNS_STAGE = "_moecore_runs_stage"  # attribute of a model: a stage's forward has begun
LABELS = ("labels", "shift_labels", "log_prob_loss")
REFUSED = (
    "inputs_embeds",
    "logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "use_cache",
)


class StagedCausal:
    """What `StagedModel` asks of a causal language model, whole or cut by `take_stages`."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        if not hasattr(model, PARTS):
            setattr(model, PARTS, _find_parts(model))
            setattr(model, CHECKED, set())
        self._reader: RowReader | None = getattr(model, READER, None)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the model by its name."""
        found: nn.Module = self.model.get_submodule(target)
        return found

    def set_submodule(self, target: str, module: nn.Module) -> None:
        """Put a module in the place of one of the model."""
        self.model.set_submodule(target, module)
        if isinstance(module, Elsewhere) and not hasattr(self.model, IS_CUT):
            setattr(self.model, IS_CUT, True)
            self.model.register_forward_pre_hook(_refuse_whole)

    def stage_parts(self) -> StageParts:
        """Return what pipeline stages are made of."""
        parts: StageParts = getattr(self.model, PARTS)
        return parts

    def hidden_shape(self, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of what enters a stage, [B, T / cp, D]."""
        B, T = inputs["input_ids"].shape
        cp = None if self._reader is None else self._reader.ranks_of(inputs.get("cp"))
        hidden_size: int = self.model.config.get_text_config().hidden_size
        return B, T // (1 if cp is None else cp.size), hidden_size

    def __call__(self, *, hidden: Tensor | None, stage: Stage, **inputs: Any) -> Tensor:
        """Run one stage; see `moecore.parallel.pipeline.stages.StagedModel`."""
        check_held(self, self.stage_parts(), stage, 0)
        self._check(hidden, stage, inputs)
        shape = self.hidden_shape(stage, inputs)
        if self._reader is not None:
            inputs[SEQUENCE] = self._reader.sequence_of(tokens_of((), inputs), inputs)
        if hidden is not None:
            inputs = {n: v for n, v in inputs.items() if n != "input_ids"}
            inputs["inputs_embeds"] = hidden
        if not stage.loss:
            inputs = {n: v for n, v in inputs.items() if n not in LABELS}
        with self._alone(stage):
            if stage in getattr(self.model, CHECKED):
                return self._run(inputs)
            stream = _ResidualStream(self.model)
            with stream.follow(self.stage_parts(), stage):
                out = self._run(inputs)
        if not stage.loss:
            stream.end(out, shape)
        if not out.is_meta:
            getattr(self.model, CHECKED).add(stage)
        return out

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        setattr(self.model, RUNS_STAGE, True)
        try:
            out = self.model(**{**inputs, "use_cache": False, "return_dict": True})
        finally:
            setattr(self.model, RUNS_STAGE, False)
        found: Tensor = out.logits if getattr(out, "loss", None) is None else out.loss
        return found

    def _check(self, hidden: Tensor | None, stage: Stage, inputs: Mapping[str, Any]) -> None:
        given = [n for n in REFUSED if not (inputs.get(n) is None or inputs[n] is False)]
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            given.append("output_router_logits")
        for name in given:
            raise ValueError(
                f"{name} must be left out of a pipeline stage, which has a part of the layers: "
                "pass input_ids, and balance experts by parallelize_moe(balance=...)"
            )
        if inputs.get("input_ids") is None:
            raise ValueError("input_ids (None) must be given to every pipeline stage: pass them")
        check_hidden(hidden, stage, self.hidden_shape(stage, inputs))

    @contextmanager
    def _alone(self, stage: Stage) -> Iterator[None]:
        """Put `Elsewhere` in the place of what no part of a stage is."""
        parts = self.stage_parts()
        layers = enumerate(self.model.get_submodule(parts.layers))
        others = {f"{parts.layers}.{i}": layer for i, layer in layers if i not in stage.layers}
        names = [] if runs_norm(stage, 0) else [parts.norm]
        names += [] if stage.loss else [parts.head]
        others |= {name: self.model.get_submodule(name) for name in names}
        own = {name: m for name, m in others.items() if not isinstance(m, Elsewhere)}
        try:
            for name in own:
                self.model.set_submodule(name, Elsewhere(own[name]))
            yield
        finally:
            for name, module in own.items():
                self.model.set_submodule(name, module)


class _ResidualStream:
    """Follows the hidden states of one forward: a part must get what the part before returned."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._at: Tensor | None = None  # what the last part returned
        self._version = 0  # of its values

    @contextmanager
    def follow(self, parts: StageParts, stage: Stage) -> Iterator[None]:
        """Look at the parts of a stage as they run."""
        layers: Any = self._model.get_submodule(parts.layers)
        base = self._model.get_submodule(parts.layers.rpartition(".")[0])
        followed = [*layers, self._model.get_submodule(parts.norm)]
        if not stage.loss:
            followed.append(self._model.get_submodule(parts.head))
        handles = [base.register_forward_pre_hook(self._start, with_kwargs=True)]
        for module in followed:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end(self, out: Tensor, shape: tuple[int, ...]) -> None:
        """Raise where a stage without the head returns other than the last part did."""
        self._compare(out, "its head")
        if out.shape != shape:
            raise _refusal(self._model, f"has hidden states {tuple(out.shape)} and not {shape}")

    def _start(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("inputs_embeds") is not None:
            self._set(kwargs["inputs_embeds"])

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise _refusal(self._model, "does not pass hidden states first")
        self._compare(args[0], "a layer or its norm")

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.shape != args[0].shape:
            raise _refusal(self._model, f"{type(module).__name__} returns more than hidden states")
        self._set(output)

    def _set(self, x: Tensor) -> None:
        self._at, self._version = x, version(x)

    def _compare(self, x: Tensor, place: str) -> None:
        at = self._at
        if at is None:  # what the model makes of embeddings, in the stage that has them
            return
        is_same = x.shape == at.shape and x.data_ptr() == at.data_ptr()
        if not is_same or version(x) != self._version:
            raise _refusal(self._model, f"it changes hidden states next to {place}")


def _find_parts(model: Any) -> StageParts:
    """Return the names of a whole model's parts."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, "has an encoder")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise _refusal(model, "has no embedding, or no head")
    blocks = find_blocks(model)
    name_of = {module: name for name, module in model.named_modules()}
    owners = {name_of[block].rpartition(".")[0] for block in blocks}
    lists = [name for name in owners if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(owners) != 1 or len(lists) != 1 or len(model.get_submodule(lists[0])) != len(blocks):
        raise _refusal(model, f"has its layers in {sorted(owners)}, not in one list")
    behind = list(model.get_submodule(lists[0].rpartition(".")[0]).children())
    behind = behind[behind.index(model.get_submodule(lists[0])) + 1 :]
    norms = [module for module in behind if next(module.parameters(), None) is not None]
    if len(norms) != 1:
        raise _refusal(model, f"has {len(norms)} modules behind its layers, where one norm belongs")
    parts = StageParts(
        embedding=name_of[embedding],
        layers=lists[0],
        norm=name_of[norms[0]],
        head=name_of[head],
        tied=any(p is q for p in head.parameters() for q in embedding.parameters()),
    )
    known = tuple(f"{getattr(parts, f)}." for f in ("embedding", "layers", "norm", "head"))
    for name, _ in model.named_parameters():
        if not name.startswith(known):
            raise _refusal(model, f"has {name} beside its layers")
    return parts


def _refusal(model: nn.Module, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"model ({type(model).__name__}) must be embedding, layers, norm and head alone to be cut "
        f"to pipeline stages, but {what}"
    )


def _refuse_whole(model: nn.Module, _args: Any) -> None:
    """Raise for a forward that is no stage's, such as generate's: it would skip other parts."""
    if not getattr(model, RUNS_STAGE, False):
        raise ValueError(
            f"forward of {type(model).__name__} (this rank's stages) must be run by TrainStep's "
            "forward_backward or losses: generate from a model with pp=1, or from its export"
        )
