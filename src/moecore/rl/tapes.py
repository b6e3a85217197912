"""Tapes that record or replay the choices of a router, and the entry that each call replays.

Legend: T tokens of this rank, K experts per token.

Note [pairing]. Activation checkpointing calls a layer again in backward, while several forwards may
wait for their backward. The call must replay the choices of its forward. Autograd identifies
the forward: the node that backward executes (and that unpacks recomputed tensors) is upstream of an
output of that forward. A forward stores itself in the metadata of its outputs' nodes. A hook on the
outputs notes where a backward enters. The first recompute of that backward copies the forward to
the upstream nodes, up to nodes that already have a forward. This works for both kinds of
checkpointing and any order of backwards. Nodes of a backward inside a recompute (nested reentrant
checkpointing) have no forward, and their recomputes raise an error.

Note [late backward]. A backward may run after `with replay.replay(...)` has ended. The same hook
then sets the tapes of the routers again until that backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from moecore.base.torch_private import (
    call_after_backward,
    get_current_node,
    is_inside_backward,
    tree_leaves,
)
from moecore.moe.router import Router
from moecore.rl.choices import Choices

FORWARD = "moecore_forward"


class ChoiceRecorder:
    """Records a router's expert ids: each forward appends int32 ids [tokens, K] to `records`."""

    def __init__(self, records: list[Tensor]) -> None:
        self.records = records

    @torch.compiler.disable
    def get_recorded_choice(
        self, num_tokens: int, device: torch.device, choose: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return None, so the router selects experts."""
        return None

    @torch.compiler.disable
    def observe_choice(self, ids_TK: Tensor) -> None:
        """Append the router's ids, unless activation checkpointing recomputes the forward."""
        if not is_inside_backward():
            _check_not_capturing()
            # A copy: torch.compile may reuse the memory of its outputs.
            ids_TK = ids_TK.detach().to(torch.int32)
            self.records.append(ids_TK.clone(memory_format=torch.contiguous_format))

    def make_rewind(self) -> Callable[[], None]:
        """Return a function that removes all ids that are recorded after this call."""
        return partial(self.records.__delitem__, slice(len(self.records), None))


class _TapeForward:
    """A mark of one forward of the model, in `metadata[FORWARD]` of the outputs' autograd nodes."""


class TapeReplay:
    """The replay of recorded expert ids in one `with replay.replay(...)` context.

    The mappings have layer names as keys. If `weights` is None, routers compute weights. If
    `fills_missing`, routers select experts for tokens whose ids are all -1. Each forward replays
    entry `selected` of each list; None = the next entry.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Mapping[str, Router],
        records: Choices,
        weights: Mapping[str, list[Tensor]] | None,
        *,
        fills_missing: bool,
    ) -> None:
        self.model, self.routers, self.fills_missing = model, routers, fills_missing
        self.records, self.weights = records, weights
        self.selected: int | None = None
        self.is_captured = _is_capturing()  # the graph then reads the entries when it replays
        self._tapes = {router: _ReplayTape(self, name) for name, router in routers.items()}
        self._calls: dict[str, list[tuple[_TapeForward | None, int]]] = {n: [] for n in records}
        self._replayed_entries: dict[str, set[int]] = {n: set() for n in records}
        self._next: dict[str, int] = dict.fromkeys(records, 0)
        self._current_forward: _TapeForward | None = None
        # Nodes that the running backward has entered, and whose upstream nodes have no mark yet.
        self._entered_nodes: list[Node] = []
        self._hooks: list[Any] = []

    def start_replay(self) -> None:
        """Set the replay as `tape` of each router, and register hooks on the model's forwards."""
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin_forward),
            self.model.register_forward_hook(self._end_forward),
        ]
        self._install_tapes()

    def end_replay(self) -> None:
        """Remove the replay from routers, and the hooks. Recomputes in later backwards replay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.selected, self._current_forward = [], None, None
        remove_tapes(self._tapes)

    def make_rewind(self, layer_name: str) -> Callable[[], None]:
        """Return a function that resets a layer's replay position to its value at this call."""
        calls, next_entry = len(self._calls[layer_name]), self._next[layer_name]
        replayed_entries = set(self._replayed_entries[layer_name])

        def rewind() -> None:
            del self._calls[layer_name][calls:]
            self._replayed_entries[layer_name] = set(replayed_entries)
            self._next[layer_name] = next_entry

        return rewind

    def check_complete(self) -> None:
        """Raise RuntimeError if a recorded forward was not replayed."""
        for name, records in self.records.items():
            remaining = sorted(set(range(len(records))) - self._replayed_entries[name])
            if remaining:
                raise RuntimeError(
                    f"choices[{name!r}] ({len(records)} forwards) must all be replayed, but forward"
                    f" {remaining[0]} was not: run all forwards, or replay(choices, strict=False)"
                )

    def take_entry_idx(self, layer_name: str) -> int | None:
        """Return the index of the entry that the layer's current call replays; None = ended."""
        if is_inside_backward():  # the entry that the recomputed forward replayed: Note [pairing]
            while self._entered_nodes:
                _mark_upstream_nodes(self._entered_nodes.pop())
            forward, calls = _get_tape_forward(get_current_node()), self._calls[layer_name]
            hits = [i for call_forward, i in calls if call_forward and call_forward is forward]
            if len(hits) == 1:
                return hits[0]
            if self.selected is not None:
                return self.selected
            raise NotImplementedError(
                f"recompute of layer {layer_name!r} must belong to one call in a forward of the "
                f"replayed {type(self.model).__name__}, and matches {len(hits)}: call "
                "select(forward) before its backward, or use plain use_reentrant=False "
                "checkpointing"
            )
        if not self._hooks:  # a late backward failed and left the tapes behind
            remove_tapes(self._tapes)
            return None
        if self.selected is None:
            index = self._next[layer_name]
            self._next[layer_name] += 1
        else:
            index = self.selected
            calls = self._calls[layer_name]
            if calls and calls[-1][0] is self._current_forward is not None:
                raise NotImplementedError(
                    f"select({index}) must not be used with layer {layer_name!r}, which runs more "
                    "than once in a forward: select(None) and keep the recorded order"
                )
        self._calls[layer_name].append((self._current_forward, index))
        self._replayed_entries[layer_name].add(index)
        return index

    @torch.compiler.disable
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        """Start a forward of the model; RuntimeError if the previous forward has failed."""
        if is_inside_backward():
            return
        if self._current_forward is not None:
            raise RuntimeError(
                f"forward of {type(module).__name__} must not follow one that failed inside "
                "replay(): leave it and start again"
            )
        self._current_forward = _TapeForward()
        self._entered_nodes.clear()  # a backward has failed

    @torch.compiler.disable
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the autograd nodes of the outputs with the forward, and hook the outputs."""
        if is_inside_backward() or self._current_forward is None:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                node: Any = leaf.grad_fn
                node.metadata.setdefault(FORWARD, self._current_forward)
                leaf.register_hook(self._enter_backward)
        self._current_forward = None

    def _enter_backward(self, grad: Tensor) -> None:
        """Record the node where a backward enters a forward; reinstall the replay if removed."""
        self._entered_nodes.append(get_current_node())
        call_after_backward(self._entered_nodes.clear)
        if all(router.tape is tape for router, tape in self._tapes.items()):
            return
        check_no_active_tapes(self.routers)
        self._install_tapes()
        call_after_backward(lambda: remove_tapes(self._tapes))

    def _install_tapes(self) -> None:
        for router, tape in self._tapes.items():
            router.tape = tape


class _ReplayTape:
    """Gives the recorded choices of layer `layer_name` to its router."""

    def __init__(self, replay: TapeReplay, layer_name: str) -> None:
        self.replay, self.name = replay, layer_name

    @torch.compiler.disable
    def get_recorded_choice(
        self, num_tokens: int, device: torch.device, choose: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return recorded ids int32 [T, K] and weights fp32 [T, K] or None, for this call.

        None = the replay has ended, and the router chooses. `choose` returns the router's ids, for
        tokens whose recorded ids are all -1.
        """
        if not self.replay.is_captured:
            _check_not_capturing()
        index = self.replay.take_entry_idx(self.name)
        if index is None:
            return None
        records = self.replay.records[self.name]
        if index >= len(records):
            raise ValueError(
                f"choices[{self.name!r}] ({len(records)} forwards) must have forward {index}: "
                "record as many forwards as are replayed"
            )
        ids_TK = records[index]
        if ids_TK.shape[0] != num_tokens:
            raise ValueError(
                f"choices[{self.name!r}][{index}] ({ids_TK.shape[0]} tokens) must have the tokens "
                f"of forward {index} ({num_tokens}): replay the recorded batch on the same layout"
            )
        weights = None if self.replay.weights is None else self.replay.weights[self.name]
        for entries in filter(None, (records, weights)):
            if entries[index].device != device:  # other than that of parameters: offloaded
                entries[index] = entries[index].to(device)
        ids_TK = records[index]
        if self.replay.fills_missing:
            with torch.no_grad():
                ids_TK = torch.where((ids_TK < 0).all(1, keepdim=True), choose(), ids_TK)
        return ids_TK, None if weights is None else weights[index]

    @torch.compiler.disable
    def observe_choice(self, ids_TK: Tensor) -> None:
        """Do nothing, because the choice is recorded."""

    def make_rewind(self) -> Callable[[], None]:
        """Return a function that resets the layer to its replay position at this call."""
        return self.replay.make_rewind(self.name)


def _get_tape_forward(node: Any) -> _TapeForward | None:
    """Return the forward to which an autograd node belongs, or None if the node has no mark."""
    forward: _TapeForward | None = node.metadata.get(FORWARD)
    return forward


def _mark_upstream_nodes(node: Any) -> None:
    """Copy a node's forward to its upstream nodes, up to nodes that have a forward."""
    forward, nodes = _get_tape_forward(node), [node]
    while nodes:
        for next_node, _ in nodes.pop().next_functions:
            if next_node is not None and FORWARD not in next_node.metadata:
                next_node.metadata[FORWARD] = forward
                nodes.append(next_node)


def remove_tapes(tapes: Mapping[Router, Any]) -> None:
    """Remove these recorders or replays from routers, unless a newer recorder replaced them."""
    for router, tape in tapes.items():
        if router.tape is tape:
            router.tape = None


def check_no_active_tapes(routers: Mapping[str, Router]) -> None:
    """Raise ValueError if one of these routers is already recorded or replayed."""
    for name, router in routers.items():
        if router.tape is not None:
            raise ValueError(
                f"router of layer {name!r} must not be recorded or replayed already: leave the "
                "other record() or replay() first, and run backwards of its forwards there"
            )


def _check_not_capturing() -> None:
    if _is_capturing():
        raise NotImplementedError(
            "record() and replay() must not begin before a CUDA graph capture, because the graph "
            "would repeat the choices of its capture: enter replay(check=False) in the captured "
            "function, or run the forward eagerly"
        )


def _is_capturing() -> bool:
    """Whether a CUDA graph captures the current stream of this thread."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
