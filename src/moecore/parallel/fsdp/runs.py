"""Records of the forwards of hooked modules, and hooks on the activations between modules.

A hook on an activation fires when its gradient arrives: the consumer's backward is then complete,
and the producer's backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moecore.base.torch_private import tree_map_only
from moecore.parallel.fsdp.unit import Unit


class ExchangeLayer(Protocol):
    """An MoE layer that dispatches tokens to experts on other ranks."""

    config: Any
    dispatcher: Any

    def run_on_zero_tokens(self, x_0D: Tensor) -> Tensor:
        """Run the layer on `x_0D` without tokens, to join its communication; return [0, D]."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the layer and its submodules."""


@dataclass(eq=False)
class ModuleNode:
    """A module with the engine's hooks, as a node in the tree of all modules with hooks."""

    module: nn.Module
    units: list[Unit]  # the units whose hooks the module has
    parent: ModuleNode | None  # the next enclosing module with hooks
    layer: ExchangeLayer | None = None  # the MoE layer whose experts this module has
    has_separate_backward: bool = False  # whether its backward may run without its parent's
    index: int = 0  # in `parent.children`
    children: list[ModuleNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.index = len(self.parent.children)
            self.parent.children.append(self)

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and its descendants, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class EmptyRun(NamedTuple):
    """Input and output of an MoE layer's forward on zero tokens, saved until its backward runs."""

    x_0D: Tensor
    y_0D: Tensor
    is_skipped: bool  # whether all ranks skipped the layer


class Output(NamedTuple):
    """Graph edge, shape, dtype and device of a module's output; its values are not saved."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class ForwardVisit:
    """The record of one forward of a module with hooks, or of a forward that this rank skips.

    `node` is the module. `parent` is the record of the enclosing module's forward; None = the
    outermost module. `forward_idx` counts the forwards of the outermost module.
    """

    def __init__(
        self, node: ModuleNode, parent: ForwardVisit | None, forward_idx: int, *, is_skipped: bool
    ) -> None:
        self.node, self.parent, self.forward_idx = node, parent, forward_idx
        self.is_skipped = is_skipped
        # Whether the outermost forward records gradients. This forward may run without them, under
        # `no_grad` or in a reentrant checkpoint, which recomputes it.
        self.joins: bool = torch.is_grad_enabled() or (parent is not None and parent.joins)
        self.next = 0  # index of the first child that the forward has not reached
        self.children: list[ForwardVisit] = []  # in forward order, until their backward has ended
        self.runs: list[ForwardRun] = []  # one per unit, until their backward has ended
        self.is_in_backward = False  # whether its backward has begun, or this rank has joined it
        self.needs_grad = False  # whether an output requires a gradient
        # Whether an input requires a gradient although the forward runs without gradients. Such a
        # forward is the first of a reentrant checkpoint, which also contains the forwards after it.
        self.has_inputs = False
        self.empty: EmptyRun | None = None
        self.inputs: list[GradientEdge] = []  # if `node.has_separate_backward`
        self.outputs: list[Output] = []

    def add_to_pending_backwards(self, unit: Unit) -> None:
        """Add this forward, which has no `ForwardRun`, to the backwards that a unit expects."""
        unit.pending_backwards.add(self)

    def record_inputs(self, arguments: Any) -> Any:
        """Replace activations that require a gradient by views; return the nested arguments.

        `inputs` records the views' graph edges, at which a backward of only this forward stops. If
        the module has no separate backward, or `inputs` is not empty, the arguments are returned
        unchanged.
        """
        if not self.node.has_separate_backward or self.parent is None or self.inputs:
            return arguments

        def record(x: Tensor) -> Tensor:
            if not x.requires_grad or isinstance(x, nn.Parameter):
                return x
            view = x.view_as(x)
            self.inputs.append(get_gradient_edge(view))
            return view

        return tree_map_only(Tensor, record, arguments)

    def record_output(self, output: Tensor) -> None:
        """Record that `output` needs a gradient; save its edge if a separate backward may run."""
        self.needs_grad = True
        if self.node.has_separate_backward and self.parent is not None:
            edge = get_gradient_edge(output)
            self.outputs.append(Output(edge, output.shape, output.dtype, output.device))

    def drop_graph_edges(self) -> None:
        """Drop the recorded graph edges of this forward and of its submodules' forwards."""
        self.inputs.clear()
        self.outputs.clear()
        for child in self.children:
            child.drop_graph_edges()


class ForwardRun:
    """Record of a forward with gradients of a unit's module, until its backward has ended."""

    def __init__(self, unit: Unit, module: nn.Module, *, step_idx: int, forward_idx: int) -> None:
        self.unit, self.module = unit, module
        self.step = step_idx  # the engine's step in which the forward ran
        self.forward_idx = forward_idx  # number of the outermost forward
        self.is_active = False  # whether its backward has begun and not ended
        self.visit: ForwardVisit | None = None  # None = the forward has no record
        self.versions: list[int] = []  # versions of the unit's parameters in the forward
        self.inputs = 0  # number of inputs that require a gradient
        self.pending = 0  # number of inputs whose gradient has not arrived in backward
        self._pending_in: list[Unit] = []

    def check_unchanged(self) -> None:
        """Raise a RuntimeError if a parameter of the unit was changed in place since forward."""
        versions = self.unit.list_versions()
        if versions != self.versions:
            pairs = zip(self.unit.params, self.versions, versions, strict=True)
            name = next(param.slot.param for param, before, after in pairs if before != after)
            raise RuntimeError(
                f"{name} must not change between a forward and its backward, which would read the "
                "new values: call backward first, or run the forward again"
            )

    def add_to_pending_backwards(self, unit: Unit) -> None:
        """Add this forward to the backwards that a unit expects, until its backward has ended."""
        unit.pending_backwards.add(self)
        self._pending_in.append(unit)

    def remove_from_pending_backwards(self) -> None:
        """Remove this forward from the backwards that units expect."""
        for unit in self._pending_in:
            unit.pending_backwards.discard(self)
        self._pending_in.clear()


class GradBoundary:
    """A tensor hook on an activation between two modules, which calls the engine in backward.

    When the gradient arrives, the backward of the forwards that read the activation (`ends`) is
    complete. Then the backward of the forwards that returned the activation (`begins`) starts, last
    forward first. A leaf tensor keeps its hook, which drops forwards whose backward has ended.
    """

    __torch_unserializable__ = True  # copies of the value have no boundary; no warning

    def __init__(self, engine: Any, tensor_version: int, *, is_leaf: bool) -> None:
        self.engine, self.is_leaf = engine, is_leaf  # a `UnitEngine`
        self.version = tensor_version  # a change in place gives the activation a new boundary
        self.ends: list[ForwardRun] = []
        self.begins: list[ForwardRun] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, _grad: Tensor) -> None:
        """End the consumers' backwards, and begin the producers' backwards."""
        for run in reversed(self.ends):
            self.engine.post_backward(run)
        if self.is_leaf:
            self.ends = [run for run in self.ends if run in run.unit.pending_backwards]
        for run in reversed(self.begins):
            self.engine.pre_backward(run)
