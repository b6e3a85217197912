"""Hidden states up and their gradients down, between the ranks of neighbouring stages.

    forward of stage s, micro-batch m     its output   -> the rank of stage s + 1
    backward of stage s, micro-batch m    its input's gradient -> the rank of stage s - 1

Messages are sent as soon as they are there, and nobody waits for a send. A rank knows the whole
schedule, so it knows in which order each other rank sends to it, and posts its receives in that
order, when an action needs one. Messages that go up in rank and those that go down have a
communicator each, so neither waits for the other.

What was sent is freed when an answer has come: a message of a rank is an answer to all that it had
read before. The host, far ahead of the GPU, would hold it for a step.

Note "early receives": NCCL's kernels occupy a GPU until both sides are there. What waits for the
whole GPU meanwhile (a new communicator, a kernel that is loaded) waits for the other rank. So
communicators are made before the first message (`connect`), and no receive is posted before all
that its sender may wait for has been launched. The host runs ahead of the GPU, so nothing is lost.

A stage whose neighbour is on the same rank (the turn of a V) hands its tensors over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.parallel.pipeline.orders import Action, actions_of
from moecore.parallel.pipeline.schedule import Schedule

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # of `Meshes.pipeline_groups`
ShapeOf = Callable[[int, int], tuple[int, ...]]  # of what enters a stage, for a micro-batch


class PipelineError(RuntimeError):
    """A neighbour of this rank's stage is gone, or did not answer in time."""


class _Message(NamedTuple):
    """What leaves a stage: the output of its forward, or the gradient of its input."""

    is_forward: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "output" if self.is_forward else "gradient"
        return f"{what} of stage {self.stage} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class _Received:
    tensor: Tensor
    work: dist.Work


@dataclass(frozen=True, slots=True)
class _SentMessage:
    tensor: Tensor  # until it has left
    work: dist.Work
    message: _Message
    target: int


@contextmanager
def _reaching(what: str, rank: int) -> Iterator[None]:
    """Say what has not come, and from whom, where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"{what} pipeline rank {rank}, which is gone or did not answer: {error}"
        ) from error


class StageTransport:
    """The messages of one run of a schedule, on one rank.

    Args:
        rank: this one among the pipeline ranks.
        groups: for messages up in rank, and for those down.
        shape_of: shape of the hidden states that enter a stage.
        dtype: of hidden states and their gradients.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        groups: Groups,
        *,
        shape_of: ShapeOf,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._schedule, self._rank, self._groups = schedule, rank, groups
        self._shape_of, self._dtype, self._device = shape_of, dtype, device
        self._to_come = {
            source: deque(m for m in _sent(schedule, source) if self._target(m) == rank)
            for source in set(schedule.rank_of) - {rank}
        }
        self._received: dict[_Message, _Received] = {}
        self._here: dict[_Message, Tensor] = {}  # handed over on this rank
        self._sends: list[_SentMessage] = []
        self._items = {source: _items_of(schedule, source) for source in self._to_come}

    def receive(self, action: Action) -> Tensor | None:
        """Return what an action needs: hidden states or a gradient; None = nothing.

        Raises:
            PipelineError: when the sender is gone.
        """
        message = _needed_by(action, self._schedule.num_stages)
        if message is None:
            return None
        source = self._source(message)
        if source == self._rank:
            return self._here.pop(message)
        while message not in self._received:
            self._post(self._to_come[source].popleft(), source)
        found = self._received.pop(message)
        with _reaching(f"{message} from", source):
            found.work.wait()
        self._free(source, self._items[source].made[message])
        return found.tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send what an action has made to who needs it.

        Raises:
            PipelineError: when the receiver is gone.
        """
        message = _made_by(action)
        target = self._target(message)
        assert target is not None, "the loss and the gradient of the tokens stay"
        if target == self._rank:
            self._here[message] = tensor
            return
        tensor = tensor.contiguous()
        with _reaching(f"{message} for", target):
            work = dist.isend(tensor, group=self._group(self._rank, target), group_dst=target)
        assert work is not None
        self._sends.append(_SentMessage(tensor, work, message, target))
        self._sends = [sent for sent in self._sends if not sent.work.is_completed()]

    def finish(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            PipelineError: when a receiver is gone.
        """
        self._wait_for(lambda sent: True)

    def _free(self, target: int, item: int) -> None:
        """Free what another rank has read in its items up to this one."""
        read = self._items[target].read
        self._wait_for(lambda sent: sent.target == target and read[sent.message] <= item)

    def _wait_for(self, has_left: Callable[[_SentMessage], bool]) -> None:
        """Let this stream go on behind some of what was sent, and free it."""
        for sent in filter(has_left, self._sends):
            with _reaching(f"{sent.message} for", sent.target):
                sent.work.wait()
        self._sends = [sent for sent in self._sends if not has_left(sent)]

    def _post(self, message: _Message, source: int) -> None:
        stage = message.stage + 1 if message.is_forward else message.stage
        shape = self._shape_of(stage, message.micro_batch)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        with _reaching(f"{message} from", source):
            work = dist.irecv(tensor, group=self._group(source, self._rank), group_src=source)
        assert work is not None
        self._received[message] = _Received(tensor, work)

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return _group_of(self._groups, source, target)

    def _source(self, message: _Message) -> int:
        return self._schedule.rank_of[message.stage]

    def _target(self, message: _Message) -> int | None:
        """Return the rank that needs a message; None = nobody."""
        stage = message.stage + (1 if message.is_forward else -1)
        return self._schedule.rank_of[stage] if 0 <= stage < self._schedule.num_stages else None


def connect(groups: Groups, rank_of: Sequence[int], rank: int, device: torch.device) -> None:
    """Send one number over each way that messages take. Collective: see the note above.

    Args:
        groups: as of `StageTransport`.
        rank_of: the rank of each stage.
    """
    neighbours = {pair for pair in pairwise(rank_of) if pair[0] != pair[1]}
    number = torch.zeros(1, device=device)
    for source, target in sorted(neighbours | {(b, a) for a, b in neighbours}):
        group = _group_of(groups, source, target)
        if rank == source:
            dist.send(number, group=group, group_dst=target)
        elif rank == target:
            dist.recv(number, group=group, group_src=source)
        if number.is_cuda:
            number.item()  # it has come when this returns


def _group_of(groups: Groups, source: int, target: int) -> dist.ProcessGroup:
    up, down = groups
    return up if source < target else down


class _Items(NamedTuple):
    """In which item of its order a rank makes a message, and in which it reads one."""

    made: Mapping[_Message, int]
    read: Mapping[_Message, int]


def _items_of(schedule: Schedule, rank: int) -> _Items:
    made, read = dict[_Message, int](), dict[_Message, int]()
    for i, item in enumerate(schedule.orders[rank]):
        for action in actions_of(item):
            if action.kind != "W":
                made[_made_by(action)] = i
            if (message := _needed_by(action, schedule.num_stages)) is not None:
                read[message] = i
    return _Items(made, read)


def _made_by(action: Action) -> _Message:
    return _Message(action.kind == "F", action.stage, action.micro_batch)


def _needed_by(action: Action, num_stages: int) -> _Message | None:
    """Return what an action needs from another stage; None = nothing."""
    is_forward = action.kind == "F"
    stage = action.stage + (-1 if is_forward else 1)
    if action.kind == "W" or not 0 <= stage < num_stages:
        return None
    return _Message(is_forward, stage, action.micro_batch)


def _sent(schedule: Schedule, rank: int) -> list[_Message]:
    """Return the results of a rank in the order in which they leave its stages."""
    actions = [action for item in schedule.orders[rank] for action in actions_of(item)]
    return [_made_by(action) for action in actions if action.kind != "W"]
