"""A step in pieces, one per module and pass, from which steps of other depths are put together.

    a dry run of few layers -> Pieces: what the host queues for each module, forward and backward
                            -> queue of any stage and micro-batch

A layer stands for those of its kind that are between the ends (`timed_layers`). The first, a middle
and the last micro-batch of a step differ, because weights arrive in the one and gradients leave in
the other. Work of a piece comes behind what it came behind there: in the piece or in the two before
it what is as far from its start, of earlier ones the newest copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from moecore.models import Decoder
from moecore.pipeline.layout import Stage
from moecore.planning.alike import Likes
from moecore.planning.work import Queued

END = "end"  # clipping and the optimizer
Pass = Literal["F", "B"]
PASSES: tuple[Pass, ...] = get_args(Pass)
MIDDLE = 3  # micro-batches of a dry run: the first, one between, the last


class Start(NamedTuple):
    """Where the host begins a module's pass.

    Attributes:
        of: forward or backward.
        part: "embedding", "layer 3", "predictions" (all modules of them), "head"; END behind all.
        first: how much it has queued.
        level: bytes that are allocated.
        top: most bytes until the next one.
    """

    of: Pass
    part: str
    first: int
    level: int
    top: int


class Piece(NamedTuple):
    """What a step does between two starts.

    Attributes:
        place: from where to where in the queue.
        delta: bytes that are allocated more behind it than before it.
        rise: most of them within it.
    """

    place: range
    delta: int
    rise: int


def cut(model: Decoder, begin: Callable[[Pass, str], None]) -> None:
    """Have `begin` called wherever a part of a model begins a pass."""
    calls: dict[str, int] = {}

    def watch(module: nn.Module, part: str) -> None:
        def before(*_: Any) -> None:
            calls[part] = calls.get(part, 0) + 1
            begin("F", name())

        def behind(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                own = name()
                output.register_hook(lambda _: begin("B", own))

        def name() -> str:  # later embeddings of a micro-batch are those of predictions
            return "predictions" if part == "embedding" and calls[part] > 1 else part

        module.register_forward_pre_hook(before)
        module.register_forward_hook(behind)

    model.register_forward_pre_hook(lambda *_: calls.clear())
    watch(model.model.embed_tokens, "embedding")
    for i, layer in enumerate(model.layers):
        watch(layer, f"layer {i}")
    for layer in model.mtp:
        watch(layer, "predictions")
    watch(model.lm_head, "head")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A step that was cut.

    Attributes:
        queued: what its host queues.
        held: bytes between steps.
        like: of each pass, the layer that each layer of the whole model is like.
        found: (micro-batch, pass, part) -> pieces in order.
        end: what follows all gradients: clipping and the optimizer.
    """

    queued: Sequence[Queued]
    held: int
    like: Likes
    found: dict[tuple[int, Pass, str], list[Piece]]
    end: Piece

    @classmethod
    def of(cls, queued: Sequence[Queued], starts: Sequence[Start], like: Likes) -> Pieces:
        """Return the pieces between starts; what comes before the first one is that one's."""
        found: dict[tuple[int, Pass, str], list[Piece]] = {}
        held, last = starts[0].level, starts[-1]
        micro_batch, before = -1, "B"
        for i, (start, behind) in enumerate(pairwise(starts)):
            micro_batch += (before, start.of) == ("B", "F")
            before = start.of
            place = range(start.first if i else 0, behind.first)
            piece = Piece(place, behind.level - start.level, start.top - start.level)
            found.setdefault((micro_batch, start.of, start.part), []).append(piece)
        end = Piece(range(last.first, len(queued)), held - last.level, last.top - last.level)
        return cls(queued=queued, held=held, like=like, found=found, end=end)

    @property
    def num_micro_batches(self) -> int:
        """Of the step that was cut."""
        return 1 + max(micro_batch for micro_batch, _, _ in self.found)

    def of_stage(self, stage: Stage, of: Pass, micro_batch: int) -> list[Piece]:
        """Return the pieces of a stage's pass, in order.

        Args:
            stage: of the whole model.
            of: which pass.
            micro_batch: of the step that was cut.
        """
        parts = ["embedding"] * stage.embedding
        parts += [f"layer {self.like[of][layer]}" for layer in stage.layers]
        parts += ["predictions"] * bool(stage.mtp) + ["head"] * stage.loss
        if of == "B":
            parts.reverse()
        return [piece for part in parts for piece in self.found.get((micro_batch, of, part), ())]

    def joined(self, pieces: Iterable[Piece]) -> list[Queued]:
        """Return the queue of pieces one after the other."""
        found: list[Queued] = []
        newest: dict[int, int] = {}  # number in `queued` -> in `found`
        starts: list[int] = []  # of pieces in `found`

        def new(number: int, place: range) -> int | None:
            end = len(found)
            for start in reversed(starts[-3:]):
                if number >= place.start:
                    return min(start + number - place.start, end - 1)
                place, end = self._before.get(place.start, range(0)), start
            return newest.get(number)

        for place, _, _ in pieces:
            starts.append(len(found))
            for i in place:
                one = self.queued[i]
                newest[i] = len(found)
                behind, host_behind = (
                    frozenset(at for n in numbers if (at := new(n, place)) is not None)
                    for numbers in (one.behind, one.host_behind)
                )
                found.append(one._replace(behind=behind, host_behind=host_behind))
        return found

    @cached_property
    def _before(self) -> dict[int, range]:
        """Start of each piece -> the piece before it."""
        found = [piece.place for pieces in self.found.values() for piece in pieces]
        found = [*sorted(found, key=attrgetter("start")), self.end.place]
        return {place.start: before for before, place in pairwise(found)}
