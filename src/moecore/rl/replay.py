"""RouterReplay: records the experts that a model's routers chose, and replays these choices.

Legend: T tokens of this rank, K experts per token, E experts.

    replay = RouterReplay(model)
    with replay.record():
        model(tokens)                        # any number of forwards
    choices = replay.choices("cpu")          # layer name -> list of int32 [T, K], one per forward
    with replay.replay(choices):
        loss(model(tokens)).backward()       # the recorded experts, weights of the current router
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moecore.base.failures import share_errors
from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.params import clean_name
from moecore.moe.layer import MoELayer
from moecore.moe.routed_experts import RoutedExperts
from moecore.moe.router import Router
from moecore.parallel.model.parallel_state import find_staged_module
from moecore.rl.choices import (
    Choices,
    check_choices,
    check_weights,
    convert_from_engine_indices,
)
from moecore.rl.tapes import ChoiceRecorder, TapeReplay, check_no_active_tapes, remove_tapes

Unrecorded = Literal["drop", "route"]


class RouterReplay:
    """Records and replays the expert ids ("choices") that the routers of a model select.

    Layers are identified by qualified name without prefixes of torch.compile and checkpoint
    wrappers, so a recording fits the plain, the wrapped and the parallelized model. A replay fixes
    the expert ids, and the combine weights if the caller passes weights. Otherwise the router
    computes weights from current logits with a gradient. Capacity, padding and balance counts are
    recomputed for the replayed ids.

    Args:
        model: a model with MoELayers, parallelized or not, or one pipeline stage, which may have no
            MoELayer. With activation checkpointing, forwards must call `model` itself, not a
            submodule.
        layers: names of the layers that are recorded and replayed; None = all.

    Raises:
        ValueError: if the model has no MoELayer, such as a transformers model before
            `parallelize_moe`, or if a name is not the name of an MoELayer.
    """

    def __init__(self, model: nn.Module, *, layers: Sequence[str] | None = None) -> None:
        check_arguments(RouterReplay.__init__, locals())
        moe_layers = {clean_name(n): m for n, m in model.named_modules() if isinstance(m, MoELayer)}
        if not moe_layers and find_staged_module(model)[1] is None:
            own_router = (n for n, m in model.named_modules() if isinstance(m, RoutedExperts))
            fix = "call parallelize_moe(model, meshes) first"
            if (name := next(own_router, None)) is not None:
                fix = (
                    f"the experts {clean_name(name)!r} have a router of the model itself, so use a "
                    'family whose router is "moecore\'s" in docs/huggingface.md'
                )
            raise ValueError(f"model ({type(model).__name__}) must hold MoELayers: {fix}")
        for name in layers or ():
            if name not in moe_layers:
                raise ValueError(
                    f"layers ({name!r}) must be one of {', '.join(map(repr, moe_layers))}"
                )
        self.model = model
        self.layers = {n: m for n, m in moe_layers.items() if layers is None or n in layers}
        self._routers: dict[str, Router] = {n: m.get_part("router") for n, m in self.layers.items()}
        self._records: Choices | None = None
        self._replaying: TapeReplay | None = None

    @property
    def layer_names(self) -> list[str]:
        """Names of the recorded and replayed layers, in the order of the model."""
        return list(self.layers)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the expert ids of each forward in the context; `choices()` then returns them.

        Ids are copied on the device, 4 * T * K bytes per layer and forward; no host sync. Forwards
        that activation checkpointing recomputes are not recorded. An exception discards the ids.

        Raises:
            ValueError: if a router is already recorded or replayed.
            NotImplementedError: in the context, if a CUDA graph captures a forward.
        """
        check_no_active_tapes(self._routers)
        self._records = None
        records: Choices = {name: [] for name in self.layers}
        tapes = {self._routers[name]: ChoiceRecorder(ids) for name, ids in records.items()}
        for router, tape in tapes.items():
            router.tape = tape
        try:
            yield
        finally:
            remove_tapes(tapes)
        self._records = records

    def choices(self, device: torch.device | str | None = None) -> Choices:
        """Return the expert ids of the last `record()`: layer name -> int32 [T, K] per forward.

        Padding is -1. A layer that ran twice in a forward has two entries. A layer that never ran
        has an empty list. ValueError if nothing was recorded.

        Args:
            device: device of the returned tensors; None = no copy. "cpu" causes a host sync.
        """
        check_arguments(RouterReplay.choices, locals())
        if self._records is None:
            raise ValueError(
                "choices (None) must have been recorded: run forwards inside record() and leave it"
            )
        return {
            name: [ids if device is None else ids.to(device) for ids in layer_records]
            for name, layer_records in self._records.items()
        }

    @contextmanager
    def replay(
        self,
        choices: Mapping[str, Sequence[Tensor]],
        *,
        weights: Mapping[str, Sequence[Tensor]] | None = None,
        unrecorded: Unrecorded = "drop",
        strict: bool = True,
        check: bool = True,
    ) -> Iterator[None]:
        """Replay recorded expert ids in the context: forward i uses entry i of each layer's list.

        Backwards may run in the context or afterwards, in any order. A forward that activation
        checkpointing recomputes uses the ids of its first run. Ids are checked and copied to the
        device on entry. Forwards have no additional host sync. A `GraphedForwardBackward` can
        contain the context with `check=False`, if the ids are among its inputs.

        Args:
            choices: layer name -> integer [T, K] per forward, of this rank's tokens.
            weights: layer name -> floating [T, K] per forward, >= 0: the combine weights after
                normalization and scaling. The router's only gradient is then from balance losses.
                With None, and in rows of -1, the router computes differentiable weights.
            unrecorded: the routing of a token whose ids are all -1. "drop": no routed expert.
                "route": the router selects experts.
            strict: whether an entry that no forward used is an error at the end.
            check: whether ids and weights are checked on entry, which has host syncs on a GPU.

        Raises:
            ValueError: on entry, for ids that are invalid for a layer, or on all data-parallel
                ranks for invalid weights, or if a router is already recorded or replayed; in the
                context, if a forward has no entry, or an entry with another number of tokens.
            RuntimeError: if entries are unused at the end, unless another exception is raised; in
                the context, if a forward follows a failed forward.
            NotImplementedError: for "route" with expert-choice routing; in the context, if a CUDA
                graph captures a forward and not the entry; in backward, if a recompute matches no
                forward and no entry is selected.
        """
        arguments = locals()
        groups = [layer.tracker.groups.global_batch for layer in self.layers.values()]
        group = groups[0] if groups else None
        with nullcontext() if group is None or not check else share_errors(group):
            check_arguments(RouterReplay.replay, arguments)
            if check:
                check_choices(choices, self.layers)
            if check and weights is not None:
                check_weights(weights, choices)
            for name, layer in self.layers.items():
                if unrecorded == "route" and layer.config.assignment == "expert_choice":
                    raise NotImplementedError(
                        f"unrecorded ('route') must be 'drop' for layer {name!r}, where experts "
                        "choose and a row of -1 is a choice: leave it out with RouterReplay(model, "
                        "layers=...)"
                    )
            check_no_active_tapes(self._routers)
        records: Choices = {}
        for name, layer in self.layers.items():
            to = (layer.get_part("router").weight.device, torch.int32)
            records[name] = [ids.to(*to, copy=True).contiguous() for ids in choices[name]]
        device_weights: dict[str, list[Tensor]] | None = None
        if weights is not None:  # 0 for an id -1, and -1 in a row whose ids are all -1
            device_weights = {
                name: [
                    weights_TK.to(ids.device, torch.float32)
                    .masked_fill(ids < 0, 0)
                    .masked_fill((ids < 0).all(1, keepdim=True), -1)
                    for weights_TK, ids in zip(weights[name], every, strict=True)
                ]
                for name, every in records.items()
            }
        run = TapeReplay(
            self.model, self._routers, records, device_weights, fills_missing=unrecorded == "route"
        )
        self._replaying = run
        run.start_replay()
        try:
            yield
        finally:
            self._replaying = None
            run.end_replay()
        if strict:
            run.check_complete()

    def select(self, forward: CountOrZero | None) -> None:
        """Make forwards use entry `forward` of each layer's list until `replay` ends.

        None = each forward uses the next entry. Use this if forwards run in another order than in
        the recording, or more than once. A recompute whose original forward is unknown uses the
        selected entry, or fails without one. ValueError outside of `replay`, or if negative.
        """
        check_arguments(RouterReplay.select, locals())
        if self._replaying is None:
            raise ValueError(f"select({forward}) must be called inside replay(): enter it first")
        self._replaying.selected = forward

    def from_engine(self, indices: Any, layer_names: Sequence[str | None] | None = None) -> Choices:
        """Convert an inference engine's expert ids to this rank's `choices`, int32. Not collective.

        Entry [b, s] has the experts of the model's input token at position s of sequence b. Each tp
        rank selects its slice of every sequence.

        Args:
            indices: integers [batch, sequence, layers, K] of this data-parallel rank's sequences, a
                tensor or array, -1 = no expert; or a list with one such entry per forward.
            layer_names: this model's name of each engine layer; an entry None skips the layer, such
                as a dense layer. None = the engine's layers are `self.layer_names` in order.

        Raises:
            ValueError: for wrong shapes, dtypes or ids, layers that are not named exactly once, or
                a sequence length that is not divisible by tp.
        """
        check_arguments(RouterReplay.from_engine, locals())
        names = list(self.layers) if layer_names is None else layer_names
        forwards = indices if isinstance(indices, list | tuple) else [indices]
        choices = [convert_from_engine_indices(ids, self.layers, names) for ids in forwards]
        return {name: [by_layer[name] for by_layer in choices] for name in self.layers}
