"""Sends hidden states to the next stage's rank, and gradients to the previous stage's rank.

    forward of stage s, micro-batch m     output               -> the rank of stage s + 1
    backward of stage s, micro-batch m    gradient of its input -> the rank of stage s - 1

Each message is sent when its action has run, and no rank waits for its sends. From the schedule a
rank derives the order in which each other rank sends to it. It posts its receives in that order,
when an action needs one. Messages to higher ranks and to lower ranks have a communicator each, so
neither direction waits for the other. Two neighbouring stages on one rank (the turn of a V) pass
their tensors without a message.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.failures import RankError, explain_transport_error
from moecore.parallel.pipeline.orders import Action, list_actions
from moecore.parallel.pipeline.schedule import Schedule

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # result of `Meshes.pipeline_groups`
ShapeOf = Callable[[int, int], tuple[int, ...]]  # (stage, micro-batch) -> shape of its input


class PipelineError(RankError):
    """Raised if a neighbouring stage's process has ended, or did not respond before the timeout."""


class _Message(NamedTuple):
    """The identity of a tensor that a stage sends: forward's output, or its input's gradient."""

    is_forward: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        kind = "output" if self.is_forward else "gradient"
        return f"{kind} of stage {self.stage} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class _PostedMessage:
    """A posted send or receive of a message."""

    tensor: Tensor  # the tensor that is sent or filled; must live until `work` is complete
    work: dist.Work
    message: _Message
    peer: int  # pipeline rank of the other end


@contextmanager
def _explain_errors(operation: str, pp_rank: int) -> Iterator[None]:
    """Return a context in which a RuntimeError of communication becomes a `PipelineError`."""
    try:
        yield
    except RuntimeError as error:
        operation += f" pipeline rank {pp_rank}"
        cause = explain_transport_error(f"the exchange of {operation}", error)
        raise PipelineError(f"{operation}, which is gone or did not answer: {cause}") from error


class StageTransport:
    """Sends and receives the tensors of one pipeline rank and one dtype, for one schedule run."""

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        direction_groups: Groups,
        *,
        shape_of: ShapeOf,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._schedule, self._rank, self._groups = schedule, pp_rank, direction_groups
        self._shape_of, self._dtype, self._device = shape_of, dtype, device
        self._inbox: dict[_Message, _PostedMessage] = {}
        self._local_messages: dict[_Message, Tensor] = {}  # for a neighbouring stage on this rank
        self._sends: list[_PostedMessage] = []
        # The index in each other rank's order of the item that sends or reads a message.
        self._sent_at = defaultdict[int, dict[_Message, int]](dict)
        self._read_at = defaultdict[int, dict[_Message, int]](dict)
        for source in set(schedule.rank_of) - {pp_rank}:
            for i, item in enumerate(schedule.orders[source]):
                for action in list_actions(item):
                    if action.kind != "W":
                        self._sent_at[source][_get_sent_message(action)] = i
                    if (message := _get_needed_message(action, schedule.num_stages)) is not None:
                        self._read_at[source][message] = i
        self._pending_receives = {  # in the order of the sends
            source: deque(m for m in sent_at if self._find_target_rank(m) == pp_rank)
            for source, sent_at in self._sent_at.items()
        }

    def receive_input(self, action: Action) -> Tensor | None:
        """Receive an action's input on the current stream; None = no other stage sends an input."""
        message = _get_needed_message(action, self._schedule.num_stages)
        if message is None:
            return None
        source = self._schedule.rank_of[message.stage]
        if source == self._rank:
            return self._local_messages.pop(message)
        # An NCCL kernel occupies the GPU until both ranks run it. Work that waits for the whole GPU
        # meanwhile (a new communicator, the load of a kernel) waits for the other rank. So no
        # receive is posted before all work that its sender may wait for has been launched. The host
        # runs ahead of the GPU, so late posts cost no time.
        while message not in self._inbox:
            self._post_receive(self._pending_receives[source].popleft(), source)
        receive = self._inbox.pop(message)
        with _explain_errors(f"{message} from", source):
            receive.work.wait()
        # The source has read the messages of all its items up to the item that sent this message.
        # Without this a host far ahead of the GPU would hold sent tensors for a whole step.
        item, read_at = self._sent_at[source][message], self._read_at[source]
        self.wait_for_sends(lambda send: send.peer == source and read_at[send.message] <= item)
        return receive.tensor

    def send_result(self, action: Action, tensor: Tensor) -> None:
        """Send a forward's output to the next stage, or an input gradient to the previous stage."""
        message = _get_sent_message(action)
        target = self._find_target_rank(message)
        assert target is not None, "the loss and the gradient of the tokens stay"
        if target == self._rank:
            self._local_messages[message] = tensor
            return
        tensor = tensor.contiguous()
        group = _choose_group(self._groups, self._rank, target)
        with _explain_errors(f"{message} for", target):
            work = dist.isend(tensor, group=group, group_dst=target)
        assert work is not None
        self._sends.append(_PostedMessage(tensor, work, message, target))
        self._sends = [send for send in self._sends if not send.work.is_completed()]

    def wait_for_sends(self, selects: Callable[[_PostedMessage], bool] = lambda send: True) -> None:
        """Make the current stream wait for sends that `selects` accepts, and free their tensors."""
        for send in filter(selects, self._sends):
            with _explain_errors(f"{send.message} for", send.peer):
                send.work.wait()
        self._sends = [send for send in self._sends if not selects(send)]

    def _post_receive(self, message: _Message, source_rank: int) -> None:
        stage = message.stage + 1 if message.is_forward else message.stage
        shape = self._shape_of(stage, message.micro_batch)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        group = _choose_group(self._groups, source_rank, self._rank)
        with _explain_errors(f"{message} from", source_rank):
            work = dist.irecv(tensor, group=group, group_src=source_rank)
        assert work is not None
        self._inbox[message] = _PostedMessage(tensor, work, message, source_rank)

    def _find_target_rank(self, message: _Message) -> int | None:
        """Return the pipeline rank that receives `message`; None = no stage receives it."""
        stage = message.stage + (1 if message.is_forward else -1)
        return self._schedule.rank_of[stage] if 0 <= stage < self._schedule.num_stages else None


def create_communicators(
    direction_groups: Groups, stage_ranks: Sequence[int], pp_rank: int, device: torch.device
) -> None:
    """Send one number between neighbouring stages, so that NCCL creates their communicators."""
    # A communicator must exist before the first message: see `StageTransport.receive`.
    neighbours = {pair for pair in pairwise(stage_ranks) if pair[0] != pair[1]}
    number = torch.zeros(1, device=device, dtype=torch.float32)
    for source, target in sorted(neighbours | {(b, a) for a, b in neighbours}):
        group = _choose_group(direction_groups, source, target)
        if pp_rank == source:
            dist.send(number, group=group, group_dst=target)
        elif pp_rank == target:
            dist.recv(number, group=group, group_src=source)
        if number.is_cuda:
            number.item()  # host sync: the number has been received


def _choose_group(groups: Groups, source_rank: int, target_rank: int) -> dist.ProcessGroup:
    up, down = groups
    return up if source_rank < target_rank else down


def _get_sent_message(action: Action) -> _Message:
    """Return the message with the result of a forward, or the input gradient of a backward."""
    return _Message(action.kind == "F", action.stage, action.micro_batch)


def _get_needed_message(action: Action, num_stages: int) -> _Message | None:
    """Return the message that an action reads from another stage; None = no message."""
    is_forward = action.kind == "F"
    stage = action.stage + (-1 if is_forward else 1)
    if action.kind == "W" or not 0 <= stage < num_stages:
        return None
    return _Message(is_forward, stage, action.micro_batch)
