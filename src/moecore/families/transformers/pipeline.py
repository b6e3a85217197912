"""StagedCausal: pipeline stages of a causal language model of transformers.

    parts      embedding -> one list of layers -> norm -> head, found by name
    a stage    the model's own forward of the same inputs. `AbsentModule` replaces parts of other
               stages during the call. The part before the stage's first part returns the hidden
               states of the previous stage. The part after its last part receives the output.

The model therefore computes masks, positions and rotary embeddings in every stage, and a layer
keeps its index. Operations before the first layer, such as an embedding's factor, take effect in
the stage of that layer, and operations after the last layer in the stage of the head. Operations
between layers are not supported. A run of the model without its parts, on the CPU of every rank,
checks this before the model is split into stages. Towers of multimodal models have no inputs in
stages: their parameters are on the ranks with the embedding, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from moecore.base.copies import copy_modules, make_meta_parameter
from moecore.base.torch_private import sum_version_counters
from moecore.families.transformers import stock
from moecore.families.transformers.rows import READER, RowReader
from moecore.parallel.fsdp.units import find_blocks
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import (
    AbsentModule,
    StageParts,
    check_hidden_states,
    check_stage_modules,
    require_arguments,
)

PARTS = "_moecore_stage_parts"  # attribute of a model
SIZES = "_moecore_stage_sizes"  # attribute of a model: the layers' input shape after [B, T]
IS_CUT = "_moecore_is_cut"  # attribute of a model: this rank lacks some parts
RUNS_STAGE = "_moecore_runs_stage"  # attribute of a model: a stage's forward is running
LABELS = ("labels", "shift_labels", "log_prob_loss")
REFUSED = (
    *("inputs_embeds", "logits_to_keep", "output_hidden_states", "output_router_logits"),
    *stock.CACHES,
    *("use_cache", "adapter_ids"),
)


class StagedCausal:
    """A transformers causal language model that can run one of its stages: a `StagedModel`.

    The first construction checks the model: it runs a copy of the model without layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        if not hasattr(model, PARTS):
            parts, sizes = _trace_parts(model, _find_parts(model))
            setattr(model, PARTS, parts)
            setattr(model, SIZES, sizes)
        self._reader: RowReader | None = getattr(model, READER, None)
        self._placeholders: dict[str, AbsentModule] = {}  # replacements of this rank's other stages

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the model by its name."""
        module: nn.Module = self.model.get_submodule(target)
        return module

    def set_submodule(self, target: str, module: nn.Module) -> None:
        """Replace a module; after the first `AbsentModule`, direct calls of the model raise."""
        self.model.set_submodule(target, module)
        if isinstance(module, AbsentModule) and not hasattr(self.model, IS_CUT):
            setattr(self.model, IS_CUT, True)
            self.model.register_forward_pre_hook(_refuse_direct_call)

    def stage_parts(self) -> StageParts:
        """Return the names of embedding, layers, norm and head."""
        parts: StageParts = getattr(self.model, PARTS)
        return parts

    def hidden_shape(self, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape [B, T / cp, ...] of the hidden states that a stage receives.

        If another stage has the embedding, the stage with layer 0 receives [B, T / cp, D].
        """
        cp = None if self._reader is None else self._reader.select_ranks(inputs.get("cp"))
        B, T = inputs["input_ids"].shape
        sizes = (self._hidden_size,) if 0 in stage.layers else getattr(self.model, SIZES)
        return B, T // (1 if cp is None else cp.size), *sizes

    @property
    def _hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError if an argument is unsupported, or if input_ids or labels are missing."""
        refused_inputs = [n for n in REFUSED if not (inputs.get(n) is None or inputs[n] is False)]
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            refused_inputs.append("output_router_logits")
        for name in refused_inputs:
            raise ValueError(
                f"{name} must be left out of a pipeline stage, which has a part of the layers: "
                "pass input_ids, and balance experts by parallelize_moe(moe={'balance': ...})"
            )
        stock.refuse_tower_inputs(self.model, inputs, "pipeline stages")
        require_arguments(inputs, "input_ids", "labels or log_prob_loss")

    def __call__(self, *, hidden: Tensor | None, stage: Stage, **inputs: Any) -> Tensor:
        """Run one stage; return hidden states, or in the last stage loss or logits."""
        if hidden is not None and not (stage.layers or stage.loss):
            return hidden
        check_stage_modules(self, self.stage_parts(), stage, 0)
        check_hidden_states(hidden, stage, self.hidden_shape(stage, inputs))
        if not stage.loss:
            inputs = {n: v for n, v in inputs.items() if n not in LABELS}
        with self._replace_other_stages(stage, hidden):
            setattr(self.model, RUNS_STAGE, True)
            try:
                out = self.model(**{**inputs, "use_cache": False, "return_dict": True})
            finally:
                setattr(self.model, RUNS_STAGE, False)
        if not stage.loss:
            return cast(Tensor, out)
        output: Tensor = out.logits if getattr(out, "loss", None) is None else out.loss
        return output

    @contextmanager
    def _replace_other_stages(self, stage: Stage, hidden: Tensor | None) -> Iterator[None]:
        """Replace modules of other stages by `AbsentModule`; the stage's output is the model's."""
        parts, get = self.stage_parts(), self.get_submodule
        layers = _list_layer_names(self, parts)
        line = [parts.embedding, *layers, *parts.final_modules, parts.head]
        stage_names = [parts.embedding] * stage.embedding + [layers[i] for i in stage.layers]
        stage_names += [*parts.final_modules, parts.head] * stage.loss
        first, last = line.index(stage_names[0]), line.index(stage_names[-1])
        outputs: list[Tensor] = []
        with ExitStack() as ends:

            def hook(name: str, run: Callable[..., Any]) -> None:
                ends.callback(get(name).register_forward_hook(run).remove)

            for name in line:
                module = get(name)
                if name not in stage_names and not isinstance(module, AbsentModule):
                    ends.callback(self.model.set_submodule, name, module)
                    if name not in self._placeholders:
                        self._placeholders[name] = parts.make_placeholder(name, module)
                    self.model.set_submodule(name, self._placeholders[name])
            for i in stage.layers:
                hook(layers[i], self._check_output)
            if hidden is not None:
                nothing = hidden.new_zeros(()).expand(*hidden.shape[:2], self._hidden_size)
                instead: Any = get(parts.embedding)
                instead.weight = nothing  # models read its device
                ends.callback(delattr, instead, "weight")
                hook(parts.embedding, lambda *_: nothing)
                hook(line[first - 1], lambda *call: _replace_first_result(call[-1], hidden))
            if not stage.loss:
                head: Any = get(parts.head)
                # Models read the weight's dtype.
                head.weight = torch.empty(0, dtype=torch.float32, device="cpu")
                ends.callback(delattr, head, "weight")
                # An embedding's output is sent unchanged.
                hook(
                    line[last and last + 1],
                    lambda *call: outputs.append(_get_first_result(call[-1])),
                )
                # It runs before FSDP's hook, which needs the tensor where backward begins.
                first_hook = self.model.register_forward_hook(
                    lambda *_: outputs.pop(), prepend=True
                )
                ends.callback(first_hook.remove)
            yield

    def _check_output(self, layer: nn.Module, _args: Any, output: Any) -> None:
        """Forward hook of a layer: NotImplementedError if it returns more than hidden states."""
        if (1 if isinstance(output, Tensor) else len(output)) != self.stage_parts().results:
            problem = f"{type(layer).__name__} returns more than hidden states"
            raise _make_refusal(self.model, problem)


def _trace_calls(
    model: Any, stage_parts: StageParts
) -> tuple[Tensor, list[tuple[str, Any, int]], Exception | None]:
    """Run a CPU copy of a model whose embedding, layers, norm and head do nothing.

    Returns the embedding's output, zeros [1, T, D]; of each call of a part the name, the first
    argument, and the argument's version; and the error of the run.
    """
    shell: Any = copy_modules(model, make_meta_parameter, removes_wrappers=True)[model]
    config, dtype = model.config.get_text_config(), model.get_input_embeddings().weight.dtype
    # One row, so that code which unpacks hidden states as several tensors raises.
    ids = torch.zeros(1, 8, dtype=torch.int64, device="cpu")
    embedded = torch.zeros(1, 8, config.hidden_size, dtype=dtype, device="cpu")
    calls, error = list[tuple[str, Any, int]](), None

    def record_call(part_name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args and isinstance(args[0], Tensor) else None
        calls.append((part_name, x, 0 if x is None else sum_version_counters(x)))

    line = [*_list_layer_names(shell, stage_parts), *stage_parts.final_modules, stage_parts.head]
    for name in (stage_parts.embedding, *line):
        shell.set_submodule(name, stage_parts.make_placeholder(name, shell.get_submodule(name)))
    for module in shell.modules():  # on the CPU, where the model may be on meta
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for name in line:
        shell.get_submodule(name).register_forward_pre_hook(partial(record_call, name))
    for name in (stage_parts.embedding, stage_parts.head):  # models read its device, or its dtype
        shell.get_submodule(name).weight = embedded
    shell.get_submodule(stage_parts.embedding).register_forward_hook(lambda *_: embedded)
    keywords = {"use_cache": False, "return_dict": True}
    if hasattr(config, "output_router_logits"):  # otherwise `check_inputs` refuses it
        keywords["output_router_logits"] = False
    try:
        with torch.no_grad():
            shell(ids, **keywords)
    except Exception as failure:  # of any kind: the model's own code
        error = failure
    return embedded, calls, error


def _trace_parts(model: Any, stage_parts: StageParts) -> tuple[StageParts, tuple[int, ...]]:
    """Check a model by a run without its parts; return parts in call order, and the layers' [D]."""
    embedded, calls, error = _trace_calls(model, stage_parts)
    layers = _list_layer_names(model, stage_parts)
    names, num_layers = [name for name, *_ in calls], len(layers)
    early = next((name for name in names[:num_layers] if name not in layers), None)
    if early is not None:
        raise _make_refusal(model, f"it runs {early} in front of a layer")
    if error is not None:
        location = (
            f"where {names[-1]} returns hidden states alone" if names else "without its layers"
        )
        reason = " ".join(str(error).split())
        raise _make_refusal(model, f"its forward fails {location} ({reason})") from error
    line = [*layers, *stage_parts.final_modules, stage_parts.head]
    if (
        names[:num_layers] != layers
        or names[-1] != stage_parts.head
        or sorted(names) != sorted(line)
    ):
        raise _make_refusal(model, "it does not run its layers in turn, once each")
    _, hidden, outputs = calls[0]
    if hidden is None or hidden.shape[:2] != embedded.shape[:2]:
        raise _make_refusal(model, f"no hidden states enter {layers[0]}")
    for name, x, _ in calls[: num_layers + 1]:
        if x is None or x.shape != hidden.shape or x.data_ptr() != hidden.data_ptr():
            raise _make_refusal(model, f"it changes hidden states in front of {name}")
    if sum_version_counters(embedded) or sum_version_counters(hidden) != outputs:
        raise _make_refusal(model, "it changes hidden states in place")
    return replace(stage_parts, final_modules=tuple(names[num_layers:-1])), tuple(hidden.shape[2:])


def _get_first_result(results: Any) -> Tensor:
    first: Tensor = results if isinstance(results, Tensor) else results[0]
    return first


def _replace_first_result(results: Any, new_result: Tensor) -> Any:
    return new_result if isinstance(results, Tensor) else (new_result, *results[1:])


def _list_layer_names(model: Any, stage_parts: StageParts) -> list[str]:
    return [
        f"{stage_parts.layers}.{i}" for i in range(len(model.get_submodule(stage_parts.layers)))
    ]


def _find_parts(model: Any) -> StageParts:
    """Return the names of embedding, layers, norm and head, which have all parameters."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise _make_refusal(model, "has an encoder")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise _make_refusal(model, "has no embedding, or no head")
    blocks = find_blocks(stock.get_text_decoder(model))
    name_of = {module: name for name, module in model.named_modules()}
    owners = {name_of[block].rpartition(".")[0] for block in blocks}
    lists = [name for name in owners if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(owners) != 1 or len(lists) != 1 or len(model.get_submodule(lists[0])) != len(blocks):
        raise _make_refusal(model, f"has its layers in {sorted(owners)}, not in one list")
    siblings = list(model.get_submodule(lists[0].rpartition(".")[0]).children())
    siblings = siblings[siblings.index(model.get_submodule(lists[0])) + 1 :]
    # Layers with sparse attention may return their selected keys, which later layers use.
    hand_on = "prev_topk_indices" in signature(blocks[0].forward).parameters
    kinds = model.config.get_text_config().indexer_types if hand_on else ()
    parts = StageParts(
        embedding=name_of[embedding],
        towers=tuple(stock.find_towers(model)),
        layers=lists[0],
        results=2 if hand_on else 1,
        bound_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "shared"),
        final_modules=tuple(name_of[m] for m in siblings if next(m.parameters(), None) is not None),
        head=name_of[head],
        tied=any(p is q for p in head.parameters() for q in embedding.parameters()),
    )
    names = (parts.embedding, *parts.towers, parts.layers, *parts.final_modules, parts.head)
    prefixes = tuple(f"{name}." for name in names)
    for name, _ in model.named_parameters():
        if not name.startswith(prefixes):
            raise _make_refusal(model, f"has {name} beside its layers")
    return parts


def _make_refusal(model: nn.Module, problem: str) -> NotImplementedError:
    return NotImplementedError(
        f"model ({type(model).__name__}) must be embedding, layers, norm and head alone to be cut "
        f"to pipeline stages, but {problem}"
    )


def _refuse_direct_call(model: nn.Module, _args: Any) -> None:
    """Forward pre-hook that raises outside of a stage's run, such as for a call by `generate`."""
    if not getattr(model, RUNS_STAGE, False):
        raise ValueError(
            f"forward of {type(model).__name__} (this rank's stages) must be run by TrainStep's "
            "forward_backward or losses: generate from a model with pp=1, or from its export"
        )
