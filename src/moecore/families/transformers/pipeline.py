"""StagedCausal: pipeline stages of a causal language model of transformers.

    take_stages finds      embedding -> one list of layers -> norm -> head, by name
    a stage's forward      the model's own, with `inputs_embeds` in place of tokens and, for the
                           call, `Elsewhere` in place of every part of another stage

So masks, positions and rotary embeddings are made by the model in every stage, of the same inputs,
and a layer keeps its index. Where the head is elsewhere the model's logits are its hidden states.

What a model does to hidden states beside its parts (factors of embeddings, streams that layers
exchange) would be done in every stage. So a whole model runs once without its parts, on the CPU and
on every rank, before it is cut: each part must get what came. Logits alone may be changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.copies import copy_modules, on_meta
from moecore.base.torch_names import version
from moecore.families.transformers.rows import READER, SEQUENCE, RowReader, tokens_of
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import (
    Elsewhere,
    StageParts,
    check_held,
    check_hidden,
    need,
    runs_norm,
)
from moecore.parallel.shard.units import find_blocks

PARTS = "_moecore_stage_parts"  # attribute of a model
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
            parts = _find_parts(model)
            _check_between(model, parts)
            setattr(model, PARTS, parts)
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

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError for a micro-batch that stages cannot run."""
        given = [n for n in REFUSED if not (inputs.get(n) is None or inputs[n] is False)]
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            given.append("output_router_logits")
        for name in given:
            raise ValueError(
                f"{name} must be left out of a pipeline stage, which has a part of the layers: "
                "pass input_ids, and balance experts by parallelize_moe(balance=...)"
            )
        need(inputs, "input_ids", "labels or log_prob_loss")

    def __call__(self, *, hidden: Tensor | None, stage: Stage, **inputs: Any) -> Tensor:
        """Run one stage; see `moecore.parallel.pipeline.stages.StagedModel`."""
        check_held(self, self.stage_parts(), stage, 0)
        check_hidden(hidden, stage, self.hidden_shape(stage, inputs))
        if self._reader is not None:
            inputs[SEQUENCE] = self._reader.sequence_of(tokens_of((), inputs), inputs)
        if hidden is not None:
            inputs = {n: v for n, v in inputs.items() if n != "input_ids"}
            inputs["inputs_embeds"] = hidden
        if not stage.loss:
            inputs = {n: v for n, v in inputs.items() if n not in LABELS}
        with self._alone(stage) as left:
            setattr(self.model, RUNS_STAGE, True)
            try:
                out = self.model(**{**inputs, "use_cache": False, "return_dict": True})
            finally:
                setattr(self.model, RUNS_STAGE, False)
        if not stage.loss:
            (found,) = left
        else:
            found = out.logits if getattr(out, "loss", None) is None else out.loss
        return found

    @contextmanager
    def _alone(self, stage: Stage) -> Iterator[list[Tensor]]:
        """Put `Elsewhere` in the place of what no part of a stage is; yield what leaves a stage."""
        parts = self.stage_parts()
        layers = enumerate(self.model.get_submodule(parts.layers))
        others = {f"{parts.layers}.{i}": layer for i, layer in layers if i not in stage.layers}
        names = [] if runs_norm(stage, 0) else [parts.norm]
        names += [] if stage.loss else [parts.head]
        others |= {name: self.model.get_submodule(name) for name in names}
        own = {name: m for name, m in others.items() if not isinstance(m, Elsewhere)}
        left: list[Tensor] = []
        mine = [self.model.get_submodule(f"{parts.layers}.{i}") for i in stage.layers]
        handles = [layer.register_forward_hook(self._refuse_more) for layer in mine]
        try:
            for name in own:
                self.model.set_submodule(name, Elsewhere(own[name]))
            if not stage.loss:  # before what a model does to logits
                head = self.model.get_submodule(parts.head)
                handles.append(head.register_forward_hook(lambda *found: left.append(found[-1])))
            yield left
        finally:
            for handle in handles:
                handle.remove()
            for name, module in own.items():
                self.model.set_submodule(name, module)

    def _refuse_more(self, layer: nn.Module, _args: Any, output: Any) -> None:
        """Raise for a layer with results that the next stage would not get."""
        if not isinstance(output, Tensor):
            what = f"{type(layer).__name__} returns more than hidden states"
            raise _refusal(self.model, what)


def _check_between(model: Any, parts: StageParts) -> None:
    """Raise where a model changes hidden states between its parts, or needs what layers return."""
    shell: Any = copy_modules(model, on_meta, unwrapped=True)[model]
    layers = [f"{parts.layers}.{i}" for i in range(len(shell.get_submodule(parts.layers)))]
    line, entered = [*layers, parts.norm, parts.head], list[tuple[str, Any]]()
    for name in (parts.embedding, *line):
        shell.set_submodule(name, Elsewhere(shell.get_submodule(name)))
    for module in shell.modules():  # on the CPU, where the model may be on meta
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for name in line:
        shell.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: entered.append((name, args[0] if args else None))
        )
    # One row: what a model unpacks of it in the place of several tensors is an error.
    config, dtype = model.config.get_text_config(), model.get_input_embeddings().weight.dtype
    hidden = torch.zeros(1, 8, config.hidden_size, dtype=dtype, device="cpu")
    asked = {"use_cache": False, "return_dict": True}
    if hasattr(config, "output_router_logits"):  # else `check_inputs` refuses it
        asked["output_router_logits"] = False
    try:
        with torch.no_grad():
            shell(inputs_embeds=hidden, **asked)
    except Exception as error:  # of any kind: the model's own code
        reason = " ".join(str(error).split())
        raise _refusal(model, f"its forward fails without its layers ({reason})") from error
    if [name for name, _ in entered] != line:
        raise _refusal(model, "it does not run its layers in turn, once each")
    for name, x in entered:
        is_same = isinstance(x, Tensor) and x.shape == hidden.shape
        if not is_same or x.data_ptr() != hidden.data_ptr():
            raise _refusal(model, f"it changes hidden states in front of {name}")
    if version(hidden):
        raise _refusal(model, "it changes hidden states in place")


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
