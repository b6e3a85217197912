"""How long a schedule takes on ranks that wait for each other: `simulate`.

    (Schedule, Costs of each stage) -> Timeline

A rank runs its order one item after the other, and starts an item when all that it needs has
arrived. Nothing else takes time: the optimizer, and the gradients of a step, come after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moecore.base.fields import CheckedRecord, PositiveOrZero, Rules, check_arguments
from moecore.parallel.pipeline.orders import Action, Item, Overlap, actions_of
from moecore.parallel.pipeline.schedule import Schedule
from moecore.parallel.pipeline.timeline import Span, Timeline

Times = tuple[PositiveOrZero, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs(CheckedRecord):
    """Time of one micro-batch on each stage, in any one unit."""

    forward: Times  # computation of a forward
    backward_inputs: Times  # computation of the gradient of inputs; recomputation counts here
    backward_weights: Times  # computation of the gradients of weights
    # Communication inside of a stage's forward, such as that of experts, that the forward alone
    # does not hide; () = none.
    forward_exchange: Times = ()
    backward_exchange: Times = ()  # likewise of its backward: it belongs to the gradient of inputs
    transfer: PositiveOrZero = 0.0  # hidden states, or their gradient, from one rank to another

    def _rules(self) -> Rules:
        number = len(self.forward)
        if not number:
            yield "forward", "have a time per stage: pass at least one"
        for name in ("backward_inputs", "backward_weights"):
            if len(getattr(self, name)) != number:
                yield name, f"have a time per stage, as forward ({number}): pass as many"
        for name in ("forward_exchange", "backward_exchange"):
            if len(getattr(self, name)) not in (0, number):
                yield name, f"have a time per stage, as forward ({number}): pass as many, or ()"

    @classmethod
    def of_forward(
        cls, forward: Sequence[PositiveOrZero], *, inputs: float = 1.0, weights: float = 1.0
    ) -> Costs:
        """Return costs whose backward takes multiples of the forward, without communication."""
        return cls(
            forward=tuple(forward),
            backward_inputs=tuple(inputs * time for time in forward),
            backward_weights=tuple(weights * time for time in forward),
        )

    def of(self, action: Action) -> tuple[float, float]:
        """Return computation and exchange of an action that runs alone, one after the other."""
        stage, compute = action.stage, 0.0
        if action.kind == "F":
            exchange = self.forward_exchange[stage] if self.forward_exchange else 0.0
            return self.forward[stage], exchange
        if action.kind in "BD":
            compute += self.backward_inputs[stage]
        if action.kind in "BW":
            compute += self.backward_weights[stage]
        has_exchange = self.backward_exchange and action.kind != "W"
        return compute, self.backward_exchange[stage] if has_exchange else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return when each rank runs what.

    In an `Overlap` one stream computes and one communicates, and each of the two actions waits for
    itself alone. So the pair takes the longest of: the computation of both, the exchange of both,
    and either action alone. Its two results leave at its end.

    Raises:
        ValueError: when the costs are of another number of stages.
    """
    check_arguments(simulate, locals())
    if len(costs.forward) != schedule.num_stages:
        raise ValueError(
            f"costs.forward ({len(costs.forward)} stages) must have a time per stage of the "
            f"schedule ({schedule.num_stages}): pass as many"
        )
    exposed = [0.0] * schedule.pp
    spans = spans_of(schedule, lambda item: _duration(item, costs)[1], costs.transfer)
    for rank, items in enumerate(spans):
        for _, _, item in items:
            compute, seconds = _duration(item, costs)
            exposed[rank] += seconds - compute
    return Timeline(spans=spans, exposed_exchange=tuple(exposed))


def spans_of(
    schedule: Schedule, duration: Callable[[Item], float], transfer: float
) -> tuple[tuple[Span, ...], ...]:
    """Return when each rank runs what; `transfer` is the time of a message between ranks."""
    spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
    ends: dict[Action, tuple[int, float]] = {}  # rank and end
    for rank, item in schedule.in_time():
        before = spans[rank][-1].end if spans[rank] else 0.0
        actions = actions_of(item)
        arrivals = (ends[i] for action in actions for i in schedule.inputs_of(action))
        start = max(before, *(end + transfer * (source != rank) for source, end in arrivals), 0.0)
        end = start + duration(item)
        spans[rank].append(Span(start, end, item))
        for action in actions:
            ends[action] = rank, end
            if action.kind == "B":
                ends[action._replace(kind="D")] = rank, end
    return tuple(map(tuple, spans))


def _duration(item: Item, costs: Costs) -> tuple[float, float]:
    """Return the computation of an item, and how long it takes with what is exposed."""
    parts = [costs.of(action) for action in actions_of(item)]
    computes, exchanges = zip(*parts, strict=True)
    unpaired = [compute + exchange for compute, exchange in parts]
    compute = sum(computes)
    seconds = max(compute, sum(exchanges), *unpaired) if isinstance(item, Overlap) else unpaired[0]
    return compute, seconds
