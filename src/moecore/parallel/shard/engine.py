"""Engine: gathers, frees and reduces the units of a model as its modules run.

    forward of a module        wait for its unit; begin to gather the units ahead; free it behind
    gradient of its outputs    the same for backward
    gradient of its inputs     reduce its unit's gradients; free it
    end of backward            what is left of both; wait for all communication

Outside of forward and backward modules hold their sharded parameters, so one rank alone may read
them. Units that stay from forward to backward (`UnitOptions.stays`) keep their values meanwhile.
All ranks free and reduce these by rules that they share, which are counts:

    to come     forwards with gradients that a step has announced and that have not ended
    waiting     forwards of a unit's modules whose backward has not ended

A step's micro-batches share what stays whole, and run in any order: a unit is reduced and freed
when nothing is to come and nothing of it waits, or at the end of the micro-batches. A forward that
is not announced is a step of its own: it gathers anew, and any backward reduces and frees all.

A backward in two parts (`deferring`) leaves products of weight gradients for later:

    D           backward: gradients of inputs, and what weight gradients autograd computes
    W           `WeightGradients.run`: the products, unit by unit from the last to the first

Each part reduces the gradients that it has computed: D as any backward does, W a unit behind its
last product. So a unit that micro-batches reduce one by one is reduced twice, and holds nothing
between D and W. One that accumulates is reduced once, when also no product of it is left. W reads
no weight, so D frees a unit as any backward does. Products that are left at the end of a step's
micro-batches are run there, in the order of their D's.

Note "pairs": within `paired` one announced forward takes turns with one backward, which begins
after it. What is of a forward (`_depth`, `_outer`, `runs[False]`, `forwards`) and of a backward
(`_active`, `_in_backward`, `runs[True]`, `backwards`) is kept apart, and both see `waiting` and
`_to_come`: a forward is to come until it has ended, for until then units do not wait for all of its
backward. Who goes on finds its units whole again (`resume`): the other may have freed them, or
taken their buffers; units that stay have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.torch_names import (
    call_after_backward,
    continues,
    is_recomputing,
    tree_leaves,
    tree_map_only,
    version,
)
from moecore.parallel.attached import engines_of
from moecore.parallel.shard.progress import Progress
from moecore.parallel.shard.streams import UnitStreams
from moecore.parallel.shard.unit import State, Unit
from moecore.parallel.shard.weight_gradients import WeightGradients

BORDER = "_moecore_border"


class Engine:
    """Runs the units of a model. Hooks the forwards of their modules.

    Args:
        root: the model, one of the modules of its last unit.
        units: all units in the order of forward, the root's last.

    Attributes:
        progress: of the step that owns the model.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], streams: UnitStreams) -> None:
        self.units, self._root, self._streams = tuple(units), root, streams
        self._depth = 0  # forwards of hooked modules that run, one in the other
        self._outer: _ForwardRun | None = None  # of the outermost of these
        self._in_step = False  # announced micro-batches share what stays whole
        self._to_come = 0.0  # their forwards with gradients that have not ended
        self._is_paired = False  # a forward and a backward take turns
        self._step = 0  # how many have ended or were dropped
        self._active: list[_ForwardRun] = []  # whose backward has begun
        self._in_backward = False  # or in one that has failed
        self._left: list[WeightGradients] = []  # in the order of their D's
        self.progress: Callable[[], Progress | None] = lambda: None
        for unit in units:
            for module in unit.modules:
                before, after = partial(self._before, unit), partial(self._after, unit)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                module.register_forward_hook(after, always_call=True)

    def free(self) -> None:
        """Free all units; no backward is waited for. No communication."""
        self._depth, self._outer = 0, None
        for unit in self.units:
            unit.forwards = unit.backwards = 0
            unit.waiting.clear()
            for runs in unit.runs:
                runs.clear()
            unit.free()

    def start_micro_batches(self, *, to_come: float) -> None:
        """Announce micro-batches that share what stays whole with the others of their step.

        Args:
            to_come: forwards of the model with gradients until the last of the step has begun;
                `math.inf` = more will be announced, 0 = whatever runs now is the last micro-batch.
        """
        if not self._in_step:
            self.free()
        self._in_step, self._to_come = True, to_come

    def end_micro_batches(self) -> None:
        """End a step's micro-batches: run and reduce what is left of them, free all.

        Collective where weight gradients are left, and for a forward whose backward did not come.
        """
        self._to_come = 0
        for later in self._left.copy():
            self._run(later)
        self._in_step = False
        for unit in reversed(self.units):
            self._reduce(unit)
        self._streams.join()
        self.free()

    def end_step(self) -> None:
        """Free all units before weights change; a backward of a forward until now will raise."""
        self._step += 1
        self.free()

    def drop_step(self) -> None:
        """Free all units, and drop their gradients and their step's micro-batches."""
        self._in_step, self._to_come = False, 0
        progress = self.progress()
        if progress is not None:
            progress.restart()
        self.end_step()
        for later in self._left:
            later.drop()
        self._left.clear()
        for unit in self.units:
            unit.gradients.drop()

    @contextmanager
    def deferring(self, later: WeightGradients) -> Iterator[None]:
        """Return the context of backwards that leave products of weight gradients.

        The backwards run as of any loss, without `inputs`: gradients go to parameters. Any backward
        within defers.

        Args:
            later: takes them, of this engine alone.
        """
        later.bind(partial(self._run_within_step, later))
        if later not in self._left:
            self._left.append(later)
        for unit in self.units:
            unit.gradients.later = later
        try:
            yield
        finally:
            for unit in self.units:
                unit.gradients.later = None

    def _run_within_step(self, later: WeightGradients) -> None:
        if later in self._left:
            self._check_open("WeightGradients.run()")
            self._run(later)

    def _run(self, later: WeightGradients) -> None:
        """Compute what backwards have left, and reduce its units."""
        self._check_whole()
        self._in_backward = True
        for unit in reversed(self.units):
            products = later.take(unit.gradients)
            if products:
                unit.gradients.compute(products)
                self._reduce(unit)
        self._streams.join()
        self._left.remove(later)
        self._in_backward = False

    @contextmanager
    def paired(self) -> Iterator[None]:
        """Within, a forward and a backward of announced micro-batches take turns."""
        self._check_whole()
        self._is_paired = True
        try:
            yield
        finally:
            self._is_paired = False

    def resume(self, is_backward: bool) -> None:
        """Let what runs of a pair's forward, or of its backward, have its units again."""
        for unit in self.units:
            if unit.runs[is_backward] or (is_backward and unit.backwards):
                self._use(unit, ())

    @torch.compiler.disable
    def _before(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_again = is_recomputing()
        if not self._depth and not is_again:
            self._start()
            args, kwargs = self._streams.on_device((args, kwargs))
        run = _ForwardRun(unit, module, self._step) if torch.is_grad_enabled() else None
        if not is_again:
            if not self._depth:
                self._outer = run
            self._depth += 1
        unit.forwards += 1
        unit.runs[is_again].append(run)  # from here on `_after` ends what has begun
        is_first = module is unit.modules[0] and not is_again
        self._use(unit, unit.ahead_in_forward if is_first else ())
        # A recomputed forward is of a backward that runs. Reentrant checkpoints have no gradients
        # in forward: there the whole forward waits.
        waits = None if is_again else run or self._outer
        if waits is not None:
            waits.wait_in(unit)
        if run is not None:
            for leaf in _leaves((args, kwargs)):
                if _has_grad(leaf) and not isinstance(leaf, nn.Parameter):  # these outlive steps
                    self._border(leaf).ends.append(run)
                    run.inputs += 1
        return _cast((args, kwargs), unit.options.cast_inputs)

    @torch.compiler.disable
    def _after(self, unit: Unit, module: nn.Module, _args: Any, output: Any) -> None:
        is_again = is_recomputing()
        if not unit.runs[is_again]:  # the forward failed before its own hook
            return
        run = unit.runs[is_again].pop()
        unit.forwards -= 1
        if run is not None:
            for leaf in _leaves(output):
                if _has_grad(leaf):
                    self._border(leaf).begins.append(run)
        if is_again:  # behind a recomputed forward comes its backward
            return
        if not (unit.in_use or unit.options.stays):
            unit.free()
        self._depth -= 1
        if not self._depth:
            self._end(module, has_failed=output is None)

    def _start(self) -> None:
        """Begin a forward that is in no other: an optimizer, or the caller, may have written."""
        if not self._is_paired:
            self._check_whole()
        if not self._in_step:
            self.free()
        with torch.no_grad():  # in which it costs a fifth to look at a DTensor's part
            for unit in self.units:
                if not self._in_backward:
                    unit.drop_marks()  # the end of backward has waited for all of them
                unit.refresh()
        self._streams.start()

    def _check_whole(self) -> None:
        if self._in_backward:
            raise RuntimeError(
                "the last backward ended in an exception: gradients, counts and gathered weights "
                "are those of half a step, so start again from a checkpoint, in new processes"
            )

    def _check_open(self, what: str) -> None:
        progress = self.progress()
        if progress is not None and not progress.is_open:
            raise ValueError(
                f"{what} must run within `with step.micro_batch():` of the model's TrainStep: "
                "finish() counts micro-batches and ends their communication"
            )

    def _end(self, module: nn.Module, *, has_failed: bool) -> None:
        """End a forward that is in no other: what stays whole is not for the caller to see."""
        self._outer = None
        if module is self._root and torch.is_grad_enabled():
            self._to_come = max(0, self._to_come - 1)
        if not self._in_step and (has_failed or not torch.is_grad_enabled()):
            self.free()
            return
        for unit in self.units:
            unit.register(whole=False)
            if unit.state is State.GATHERING and not self._shares(unit):
                unit.free()  # gathered for a module that did not run

    def _use(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        """Let modules have a unit's whole parameters, and begin to gather others."""
        unit.wait()
        unit.register(whole=True)
        for other in ahead:
            if other.can_gather():
                other.gather()

    def _border(self, leaf: Tensor) -> _Border:
        """Return what happens when the gradient of a value comes."""
        found: _Border | None = getattr(leaf, BORDER, None)
        if found is None or found.version != version(leaf) or found.engine is not self:
            found = _Border(self, version(leaf), is_leaf=leaf.is_leaf)
            leaf.register_hook(found)
            setattr(leaf, BORDER, found)
        return found

    def begin(self, run: _ForwardRun) -> None:
        """Begin the backward of a forward: the gradient of one of its outputs has come."""
        if torch.is_grad_enabled() and continues():
            raise NotImplementedError(
                "create_graph (True) must be False for a model of parallelize_moe, whose gathered "
                "weights are freed after backward: take second derivatives of a plain model, or "
                "of what follows from its output alone"
            )
        self._check_open("backward")
        if run.step != self._step:
            raise RuntimeError(
                "backward must come before finish() or drop() of its forward's step, which change "
                "weights or drop gradients: run the forward again"
            )
        if run.is_active:
            return
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._end_backward)
        run.is_active, run.pending = True, run.inputs
        self._active.append(run)
        run.unit.backwards += 1
        is_first = run.module is run.unit.modules[-1]
        self._use(run.unit, run.unit.ahead_in_backward if is_first else ())

    def end(self, run: _ForwardRun) -> None:
        """End the backward of a forward, when the gradient of its last input has come."""
        run.pending -= 1
        if run.pending or not run.is_active:
            return
        unit = run.unit
        self._active.remove(run)
        self._close(run)
        if unit.backwards or unit.runs[True]:
            return
        if not unit.options.stays:
            if unit.gradients.are_complete():
                self._reduce(unit)
            if not unit.in_use:
                unit.free()
        elif not (unit.waiting or self._to_come) and unit.gradients.are_complete():
            self._reduce(unit)
            unit.free()

    def _close(self, run: _ForwardRun) -> None:
        run.is_active = False
        run.unit.backwards -= 1
        run.end_waiting()

    def _end_backward(self) -> None:
        for run in self._active:
            self._close(run)
        self._active.clear()
        for unit in reversed(self.units):
            self._reduce(unit)
            if self._gets_more(unit):
                unit.register(whole=False)
            else:
                unit.free()
        self._streams.join()
        self._in_backward = False

    def _reduce(self, unit: Unit) -> None:
        """Reduce gradients, or add them to those of the step where it will bring more."""
        accumulates = unit.options.accumulates and self._shares(unit)
        unit.gradients.reduces = not (
            accumulates and (self._gets_more(unit) or self._is_left(unit))
        )
        unit.gradients.reduce()

    def _is_left(self, unit: Unit) -> bool:
        """Whether backwards have left weight gradients of a unit."""
        return any(later.holds(unit.gradients) for later in self._left)

    def _gets_more(self, unit: Unit) -> bool:
        """Whether later backwards of a step need a unit as it is."""
        return self._shares(unit) and bool(unit.waiting or self._to_come)

    def _shares(self, unit: Unit) -> bool:
        """Whether forwards of a step share a unit."""
        return self._in_step and unit.options.stays


class _ForwardRun:
    """One forward of a module with gradients.

    Attributes:
        step: of the engine, in which it ran.
        is_active: whether its backward has begun and not ended.
        pending: inputs whose gradient has not come in it.
    """

    __slots__ = ("_waits_in", "inputs", "is_active", "module", "pending", "step", "unit")

    def __init__(self, unit: Unit, module: nn.Module, step: int) -> None:
        self.unit, self.module, self.step = unit, module, step
        self.inputs, self.is_active, self.pending = 0, False, 0
        self._waits_in: list[Unit] = []

    def wait_in(self, unit: Unit) -> None:
        """Let a unit know that a backward of this forward is to come."""
        unit.waiting.add(self)
        self._waits_in.append(unit)

    def end_waiting(self) -> None:
        """Let units know that it has come."""
        for unit in self._waits_in:
            unit.waiting.discard(self)
        self._waits_in.clear()


class _Border:
    """A value between modules. Its gradient ends the backward of what read it, and begins others.

    Attributes:
        version: of the value, which a change in place would make another one.
        is_leaf: whether forwards may share it: then each backward drops what waits for none.
    """

    __slots__ = ("begins", "ends", "engine", "is_leaf", "version")
    __torch_unserializable__ = True  # a copy of the value has none, and nobody is warned

    def __init__(self, engine: Engine, version: int, *, is_leaf: bool) -> None:
        self.engine, self.version, self.is_leaf = engine, version, is_leaf
        self.ends: list[_ForwardRun] = []
        self.begins: list[_ForwardRun] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, _grad: Tensor) -> None:
        for run in self.ends:
            self.engine.end(run)
        if self.is_leaf:
            self.ends = [run for run in self.ends if run in run.unit.waiting]
        for run in self.begins:
            self.engine.begin(run)


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the value with its floating tensors cast."""
    if dtype is None or not any(_differs(leaf, dtype) for leaf in _leaves(value)):
        return value
    return tree_map_only(Tensor, lambda x: x.to(dtype) if _differs(x, dtype) else x, value)


def _differs(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype


def free_units(model: nn.Module) -> None:
    """Free what the units of a model hold whole; nothing for a plain one."""
    for engine in engines_of(model):
        engine.free()


def progress_of(model: nn.Module) -> Progress | None:
    """Return where the step of a model is; None for one without a `TrainStep`."""
    found = (engine.progress() for engine in engines_of(model))
    return next((progress for progress in found if progress is not None), None)
