"""Forwards of hooked modules, and values between them, whose gradients end and begin backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from moecore.parallel.fsdp.uneven_ranks import Visit
from moecore.parallel.fsdp.unit import Unit

if TYPE_CHECKING:
    from moecore.parallel.fsdp.engine import UnitEngine


class ForwardRun:
    """One forward of a module with gradients."""

    __slots__ = (
        "_waits_in",
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
        self.visit: Visit | None = None  # None = not followed
        self.versions: list[int] = []  # of the unit, whose values the forward read
        self.inputs = self.pending = 0  # inputs with a gradient, and those not computed yet
        self._waits_in: list[Unit] = []

    def check_unchanged(self) -> None:
        """Raise where the unit's parameters have changed in place since the forward."""
        now = self.unit.versions()
        if now != self.versions:
            pairs = zip(self.unit.params, self.versions, now, strict=True)
            name = next(param.slot.param for param, before, after in pairs if before != after)
            raise RuntimeError(
                f"{name} must not change between a forward and its backward, which would read the "
                "new values: call backward first, or run the forward again"
            )

    def wait_in(self, unit: Unit) -> None:
        """Add this run to a unit's `waiting`: its backward is expected."""
        unit.waiting.add(self)
        self._waits_in.append(unit)

    def end_waiting(self) -> None:
        """Remove this run from the `waiting` of all units."""
        for unit in self._waits_in:
            unit.waiting.discard(self)
        self._waits_in.clear()


class Border:
    """Hook of a value between modules.

    The gradient of the value ends the backward of the runs that read the value (`ends`), and begins
    the backward of the runs that returned it (`begins`). Of a leaf, which forwards may share, a
    backward drops the runs that wait for no backward. Of several runs the last one ends first, and
    the one around others begins first.
    """

    __slots__ = ("begins", "ends", "engine", "is_leaf", "version")
    __torch_unserializable__ = True  # copies of the value have no border; no warning

    def __init__(self, engine: UnitEngine, version: int, *, is_leaf: bool) -> None:
        self.engine, self.is_leaf = engine, is_leaf
        self.version = version  # after a change in place the value gets a new border
        self.ends: list[ForwardRun] = []
        self.begins: list[ForwardRun] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, _grad: Tensor) -> None:
        """Tensor hook."""
        for run in reversed(self.ends):
            self.engine.end(run)
        if self.is_leaf:
            self.ends = [run for run in self.ends if run in run.unit.waiting]
        for run in reversed(self.begins):
            self.engine.begin(run)
