"""A step in pieces, one per module and pass, from which steps of other depths are put together.

    a dry run of few layers -> Pieces: what the host queues for each module, forward and backward
                            -> queue of any stage and micro-batch

A layer stands for those of its kind that are between the ends (`timed_layers`). The first, a middle
and the last micro-batch of a step differ, because weights arrive in the one and gradients leave in
the other. Work of a piece comes behind what it came behind there: in the piece or in the two before
it what is as far from its start, of earlier ones the newest copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import add, attrgetter
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from moecore.models import Decoder
from moecore.parallel.pipeline.layout import Stage
from moecore.planning.alike import Likes
from moecore.planning.work import Placed, Queued

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


class Far(NamedTuple):
    """A place in a piece, and numbers of earlier work that it comes behind too, as `Queued`."""

    place: int
    behind: list[int]
    host_behind: list[int]


Copy = tuple[list[Placed], list[Far]]


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
        parts = self.parts(stage, of)
        return [piece for part in parts for piece in self.of_part(part, of, micro_batch)]

    def of_part(self, part: str, of: Pass, micro_batch: int) -> Sequence[Piece]:
        """Return the pieces of a part's pass, in order."""
        return self.found.get((micro_batch, of, part), ())

    def parts(self, stage: Stage, of: Pass) -> list[str]:
        """Return the parts that those of a stage's pass are like, in order."""
        parts = ["embedding"] * stage.embedding
        parts += [f"layer {self.like[of][layer]}" for layer in stage.layers]
        parts += ["predictions"] * bool(stage.mtp) + ["head"] * stage.loss
        return parts[::-1] if of == "B" else parts

    def joined(self, pieces: Iterable[Piece]) -> list[Placed]:
        """Return the queue of pieces one after the other."""
        found: list[Placed] = []
        newest: dict[int, int] = {}  # where a piece starts in `queued` -> in `found`
        lengths: tuple[int, ...] = ()
        for place, _, _ in pieces:
            start = len(found)
            copy, far = self._copy(place, lengths)
            found += copy
            for i, *numbers in far:
                one, *near = found[start + i]
                more = (self._distances(each, start + i, newest) for each in numbers)
                found[start + i] = Placed(one, *map(add, near, more))
            newest[place.start] = start
            lengths = len(place), *lengths[:1]
        return found

    def _copy(self, place: range, lengths: tuple[int, ...]) -> Copy:
        """Return a piece behind others, made once.

        Args:
            place: of the piece.
            lengths: of the two pieces that it is behind, the newest first; () = it is the first.
        """
        if (place, lengths) not in self._copies:
            ones, far = list[Placed](), list[Far]()
            for i in place:
                one = self.queued[i]
                distances = [
                    {n: self._distance(n, i, place, lengths) for n in numbers}
                    for numbers in (one.behind, one.host_behind)
                ]
                near = (tuple(d for d in each.values() if d is not None) for each in distances)
                ones.append(Placed(one, *near))
                earlier = ([n for n, d in each.items() if d is None] for each in distances)
                far.append(Far(i - place.start, *earlier))
            far = [each for each in far if each.behind or each.host_behind]
            self._copies[place, lengths] = ones, far
        return self._copies[place, lengths]

    def _distance(self, number: int, i: int, place: range, lengths: Iterable[int]) -> int | None:
        """Return how far before `i`, in a piece, a number is; None = not in the last pieces."""
        at = i - place.start
        start, end = 0, at
        for length in (0, *lengths):
            start -= length
            if number >= place.start:
                return at - min(start + number - place.start, end - 1)
            place, end = self._before.get(place.start, range(0)), start
        return None

    def _distances(
        self, numbers: Iterable[int], i: int, newest: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return how far before `i`, in a joined queue, the newest copies of earlier work are."""
        starts = ((n, self._starts[bisect_right(self._starts, n) - 1]) for n in numbers)
        return tuple(i - (newest[start] + n - start) for n, start in starts if start in newest)

    @cached_property
    def _starts(self) -> list[int]:
        """Where pieces start that have work."""
        return sorted(place.start for place in self._places if place)

    @cached_property
    def _before(self) -> dict[int, range]:
        """Start of each piece -> the piece before it."""
        return {place.start: before for before, place in pairwise(self._places)}

    @cached_property
    def _places(self) -> list[range]:
        found = [piece.place for pieces in self.found.values() for piece in pieces]
        return [*sorted(found, key=attrgetter("start")), self.end.place]

    @cached_property
    def _copies(self) -> dict[tuple[range, tuple[int, ...]], Copy]:
        return {}
