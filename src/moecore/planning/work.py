"""Work: one operation of a step on the device, as numbers: what a recording has, what costs time.

recording of a step -> Queued(work), .. -> CostTable.seconds(work) -> Step (`step_time.py`)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from moecore.base.fields import Bound, CountOrZero, Rules, check_fields

Kind = Literal["product", "grouped product", "attention", "rows", "collective", "copy"]
Many = Annotated[int, Bound(">=", 0), Bound("<", 2**63)]
DIMS = {
    "product": ("M", "N", "K"),
    "grouped product": ("experts", "rows", "N", "K"),
    "attention": ("B", "H", "T", "d", "v"),
    "collective": ("ranks",),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One operation on the device.

    Attributes:
        name: the kernel's or torch operation's name, such as "aten.mm".
        kind: what its time depends on.
        flops: of products and attention.
        num_bytes: read and written; of a collective, sent and received by this rank; of a copy from
            or to the host, those that pass.
        shape: (M, N, K) of a product, (experts, rows, N, K) of a grouped product with the rows of
            all experts, (B, H, T, d, v) of attention, (ranks,) of a collective; else anything.
        dtype: of what is multiplied or moved, such as "bfloat16" or "float8_e4m3fn".
    """

    name: str
    kind: Kind
    flops: Many
    num_bytes: Many
    shape: tuple[CountOrZero, ...]
    dtype: str

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        dims = DIMS.get(self.kind, self.shape)
        if len(self.shape) != len(dims):
            yield "shape", f"be ({', '.join(map(str, dims))}) of kind {self.kind!r}: pass these"


class Queued(NamedTuple):
    """Work where a step's host queues it.

    Attributes:
        work: what it is.
        stream: whose work runs in the order in which it is queued.
        behind: numbers of what must have ended before it starts.
        host_behind: of what the host has waited for since it queued the work before.
        node_ranks: of a collective: how many of its ranks this rank's node has.
        phases: marks that it is within, the outermost first.
    """

    work: Work
    stream: int
    behind: frozenset[int]
    host_behind: frozenset[int]
    node_ranks: int = 0
    phases: tuple[str, ...] = ()


class Placed(NamedTuple):
    """Queued work in any queue, by distance: copies of a part of a queue are the same objects.

    Attributes:
        queued: what it is; the numbers in it are those of the queue that it was recorded in.
        behind: how many places before it there is what must have ended before it starts.
        host_behind: likewise what the host has waited for.
    """

    queued: Queued
    behind: tuple[int, ...]
    host_behind: tuple[int, ...]


def placed(queued: Iterable[Queued]) -> list[Placed]:
    """Return a whole queue, as it was recorded."""
    return [
        Placed(one, tuple(i - n for n in one.behind), tuple(i - n for n in one.host_behind))
        for i, one in enumerate(queued)
    ]
