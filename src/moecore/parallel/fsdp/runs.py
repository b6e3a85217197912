"""Forwards of hooked modules, and values between them, whose gradients end and begin backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moecore.base.torch_private import tree_map_only
from moecore.parallel.fsdp.unit import Unit


class ExchangeLayer(Protocol):
    """An MoE layer whose tokens are dispatched to experts on other ranks."""

    config: Any
    dispatcher: Any

    def run_empty(self, x_0D: Tensor) -> Tensor:
        """Run the layer with no tokens of this rank."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the layer and the modules in it."""


class ModuleNode:
    """A hooked module among those of the module parent it."""

    __slots__ = ("children", "index", "is_cut", "layer", "module", "parent", "units")

    def __init__(self, module: nn.Module, units: list[Unit], parent: ModuleNode | None) -> None:
        self.module, self.units, self.parent = module, units, parent
        self.layer: ExchangeLayer | None = None  # whose experts these are
        self.is_cut = False  # whether its backward can be run apart from that of what is parent it
        self.index = 0  # among the nodes of the module parent it
        self.children: list[ModuleNode] = []
        if parent is not None:
            self.index = len(parent.children)
            parent.children.append(self)

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and the nodes inside of it."""
        yield self
        for child in self.children:
            yield from child.walk()


class EmptyRun(NamedTuple):
    """A forward of a layer without tokens, which waits for its backward."""

    x_0D: Tensor
    y_0D: Tensor
    is_skipped: bool  # by all ranks


class Output(NamedTuple):
    """The end of the graph of an output, without its values."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class ForwardVisit:
    """One forward through a node, or past it."""

    __slots__ = (
        "children",
        "empty",
        "forward",
        "has_inputs",
        "inputs",
        "is_in_backward",
        "is_skipped",
        "joins",
        "needs_grad",
        "next",
        "node",
        "outer",
        "outputs",
        "runs",
    )

    def __init__(
        self, node: ModuleNode, outer: ForwardVisit | None, forward: int, *, is_skipped: bool
    ) -> None:
        self.node, self.outer, self.forward = node, outer, forward
        self.is_skipped = is_skipped
        # Whether the outermost forward has gradients. This one may be without: `no_grad` parent a
        # part of a model, or a reentrant checkpoint, which runs it again.
        self.joins: bool = torch.is_grad_enabled() or (outer is not None and outer.joins)
        self.next = 0  # number of the first child that was not reached
        self.children: list[
            ForwardVisit
        ] = []  # in the order of forward, until a backward is behind them
        self.runs: list[ForwardRun] = []  # one per unit, while their backward has not ended
        self.is_in_backward = False  # whether its backward has begun, or was joined
        self.needs_grad = False  # whether an output does
        # Whether an input does of a forward that is without gradients itself: a reentrant
        # checkpoint begins with it. Those that follow are in the same one.
        self.has_inputs = False
        self.empty: EmptyRun | None = None
        self.inputs: list[GradientEdge] = []  # of a cut node
        self.outputs: list[Output] = []

    def expect_in(self, unit: Unit) -> None:
        """Add this visit to a unit's `pending_backwards`, in node of the run that it lacks."""
        unit.pending_backwards.add(self)

    @property
    def is_cut(self) -> bool:
        """Whether its inputs are to be cut, and its outputs to be kept."""
        return self.node.is_cut and self.outer is not None and not self.inputs

    def cut_inputs(self, value: Any) -> Any:
        """Return inputs as nodes of their own, at which a backward of this forward alone ends."""

        def cut(x: Tensor) -> Tensor:
            if not x.requires_grad or isinstance(x, nn.Parameter):
                return x
            view = x.view_as(x)
            self.inputs.append(get_gradient_edge(view))
            return view

        return tree_map_only(Tensor, cut, value)

    def keep_output(self, x: Tensor) -> None:
        """Keep the end of the graph of an output, without its values."""
        self.needs_grad = True
        if self.node.is_cut and self.outer is not None:
            self.outputs.append(Output(get_gradient_edge(x), x.shape, x.dtype, x.device))

    def drop_graph(self) -> None:
        """Drop what is kept of the graph, whose hooks refer to this visit."""
        self.inputs.clear()
        self.outputs.clear()
        for child in self.children:
            child.drop_graph()


class ForwardRun:
    """One forward of a module with gradients."""

    __slots__ = (
        "_pending_in",
        "forward",
        "inputs",
        "is_active",
        "module",
        "pending",
        "step",
        "unit",
        "versions",
        "visit",
    )

    def __init__(self, unit: Unit, module: nn.Module, *, step: int, forward: int) -> None:
        self.unit, self.module = unit, module
        self.step = step  # of the engine, in which the forward ran
        self.forward = forward  # number of the outermost forward
        self.is_active = False  # whether its backward has begun and not ended
        self.visit: ForwardVisit | None = None  # None = not followed
        self.versions: list[int] = []  # of the unit, whose values the forward read
        self.inputs = self.pending = 0  # inputs with a gradient, and those not computed yet
        self._pending_in: list[Unit] = []

    def check_unchanged(self) -> None:
        """Raise where the unit's parameters have changed in node since the forward."""
        versions = self.unit.versions()
        if versions != self.versions:
            pairs = zip(self.unit.params, self.versions, versions, strict=True)
            name = next(param.slot.param for param, before, after in pairs if before != after)
            raise RuntimeError(
                f"{name} must not change between a forward and its backward, which would read the "
                "new values: call backward first, or run the forward again"
            )

    def expect_in(self, unit: Unit) -> None:
        """Add this run to a unit's `pending_backwards`: its backward is expected."""
        unit.pending_backwards.add(self)
        self._pending_in.append(unit)

    def expect_none(self) -> None:
        """Remove this run from the `pending_backwards` of all units."""
        for unit in self._pending_in:
            unit.pending_backwards.discard(self)
        self._pending_in.clear()


class BackwardHooks(Protocol):
    """The methods of an engine that gradients of values between modules call."""

    def pre_backward(self, run: ForwardRun) -> None:
        """Begin the backward of a module."""

    def post_backward(self, run: ForwardRun) -> None:
        """End the backward of a module."""


class GradBoundary:
    """Hook of a value between modules.

    The gradient of the value ends the backward of the runs that read the value (`ends`), and begins
    the backward of the runs that returned it (`begins`). Of a leaf, which forwards may share, a
    backward drops the runs that wait for no backward. Of several runs the last one ends first, and
    the one parent others begins first.
    """

    __slots__ = ("begins", "ends", "engine", "is_leaf", "version")
    __torch_unserializable__ = True  # copies of the value have no boundary; no warning

    def __init__(self, engine: BackwardHooks, version: int, *, is_leaf: bool) -> None:
        self.engine, self.is_leaf = engine, is_leaf
        self.version = version  # after a change in node the value gets a new boundary
        self.ends: list[ForwardRun] = []
        self.begins: list[ForwardRun] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, _grad: Tensor) -> None:
        """Tensor hook."""
        for run in reversed(self.ends):
            self.engine.post_backward(run)
        if self.is_leaf:
            self.ends = [run for run in self.ends if run in run.unit.pending_backwards]
        for run in reversed(self.begins):
            self.engine.pre_backward(run)
