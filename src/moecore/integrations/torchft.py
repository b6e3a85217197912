"""Replicas of hosts that may leave a job and come back, by torchft's Manager around a `TrainStep`.

    begin()               who is there; this rank takes its state from a peer if it was away
    forward_backward()    of the TrainStep: gradients of this replica, in `.grad`
    finish()              gradients and counts of all replicas -> vote -> TrainStep.finish or drop

A replica is a world of torch.distributed of its own: ep and every other degree is inside of it.
Between replicas there are gradients, counts of choices and, of one that comes back, state.

Replicas that lost sight of each other may each make a step of the same number. They are told apart
by their lineage: a number of the first weights, of which a step makes another one with the names of
all who made it. It comes along with state. Where replicas of a step differ in it, the step is
dropped, and those that are not of the largest part end, to come back with the state of the others.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import Count, CountOrZero, Positive, check_arguments
from moecore.base.torch_private import local_of
from moecore.io.checkpoint.hyperparameters import Schedulers
from moecore.io.checkpoint.snapshot import load_rank_state, rank_state
from moecore.io.checkpoint.state import Optimizers
from moecore.parallel.model.parallel_state import parallel_states
from moecore.train.step import TrainStep
from moecore.train.step_result import StepResult

try:
    from torchft import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"moecore.integrations.torchft needs torchft ({error}): pip install 'moecore[torchft]'"
    ) from error

BUCKET = 1 << 26  # bytes of gradients that travel together
LINEAGE_BITS = 62
STRAY = (
    "first weights and steps of this replica must be those of the others, but some differ: end all "
    "of its processes and start them again, with the same seed or checkpoint"
)


class ReplicaPlace(NamedTuple):
    """What a replica does in a step: its data are those of `replica` of `num_replicas`."""

    step: int
    replica: int
    num_replicas: int


class Replicas:
    """Runs the steps of a `TrainStep` together with those of other replicas. Made on every rank.

    A replica that leaves costs the others the step in flight, which `finish` drops and they repeat
    without it. One that comes back takes weights, optimizer, scheduler, loss scale and generators
    from a peer in `begin`, rank by rank, and is part of that step. Gradients are means over the
    replicas that are there, and expert biases move by the choices of all. A step that one of them
    skips, because of a gradient or of rows that did not fit, all skip.

    Args:
        model: parallelized, with loss="mean"; with the same weights on all replicas.
        optimizer: that of the step, or its list.
        step: steps the model, with that optimizer. Forwards go through `forward_backward`.
        scheduler: goes along with the state of a replica that comes back; the caller steps it.
        first_step: the number of steps that weights and optimizer have, of a loaded checkpoint.
        min_replicas: fewer do not step: they wait for others.
        timeout_s: seconds after which a replica that does not answer has left. More than any step
            takes, the compilation in the first one too: a replica that waits longer for one ends.

    Raises:
        ValueError: when the loss is a sum, whose divisor would be the tokens of all replicas; from
            `begin` while a `QKClip` watches the model.
        RuntimeError: from `begin` or `finish`, when this replica has the same number of
            steps as the others, but not the same steps: let its processes end and start again. A
            replica with fewer steps receives the state of the others, and loses its own steps.

    Example:
        replicas = Replicas(model, optimizer, step)
        while replicas.step < 1000:
            place = replicas.begin()
            losses = step.forward_backward(batches(place.step, place.replica, place.num_replicas))
            done = replicas.finish()  # None: a replica left, and the step comes again
    """

    @share_call_errors
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        step: TrainStep,
        *,
        scheduler: Schedulers | None = None,
        first_step: CountOrZero = 0,
        min_replicas: Count = 1,
        timeout_s: Positive = 60.0,
    ) -> None:
        arguments = locals()
        with share_errors():
            check_arguments(Replicas.__init__, arguments)
            self._records = parallel_states(model)
            request = self._records[0].request
            if request.loss != "mean":
                raise ValueError(
                    f"loss ({request.loss!r}) of parallelize_moe must be 'mean' with replicas: "
                    "their number, and so the tokens of a step, changes"
                )
        self._model, self._optimizer, self._step = model, optimizer, step
        self._scheduler = scheduler
        self._device = request.meshes.device
        local_name = torch.tensor([secrets.randbits(LINEAGE_BITS)], device=self._device)
        dist.broadcast(local_name, 0)
        self._name = int(local_name)  # of this start of the replica
        self._lineage = self._first_lineage(first_step)
        self._place: ReplicaPlace | None = None
        timeout = timedelta(seconds=timeout_s)
        is_cpu = request.meshes.device_type == "cpu"
        self._group = ProcessGroupGloo(timeout) if is_cpu else ProcessGroupNCCL(timeout)
        self._manager = Manager(
            pg=self._group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=min_replicas,
            init_sync=False,  # ranks of one replica would take the state of several
            use_async_quorum=False,  # a replica that comes back has its state before its forward
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=os.environ["MASTER_ADDR"],
            store_port=int(os.environ["MASTER_PORT"]),
        )
        self._manager.load_state_dict({"step": first_step, "batches_committed": 0})

    @property
    def step(self) -> int:
        """Steps that have been made, by whichever replicas."""
        current: int = self._manager.current_step()
        return current

    def begin(self) -> ReplicaPlace:
        """Begin a step with the replicas that are there; waits for `min_replicas`."""
        if any(getattr(module, "observe_scores", None) for module in self._model.modules()):
            raise ValueError(
                "QKClip must not watch the model of Replicas, each of which would clip by logits "
                "of its own: call its close()"
            )
        self._manager.start_quorum()
        replica = self._manager.participating_rank()
        assert replica is not None, "replicas that have been healed take part"
        self._check_peers()
        self._place = ReplicaPlace(self.step, replica, self._manager.num_participants())
        return self._place

    def finish(self) -> StepResult | None:
        """End the step if all ranks that are there can; None: it was dropped, begin it again."""
        lineages, names = self._meet()
        self._average_gradients()
        self._add_counts()
        # Over NCCL a replica that left fails no call: an aborted group knows it, a host sync later.
        failed = self._manager.errored() or self._group.errored()
        is_lost = not failed and self._find_strays(lineages)
        if not self._manager.should_commit():
            self._step.drop()
            if is_lost:
                raise RuntimeError(STRAY)
            return None
        self._lineage = hash((self._lineage, *names)) % (1 << LINEAGE_BITS)
        return self._step.finish()

    def close(self) -> None:
        """Leave: end the threads and servers of this rank."""
        self._manager.shutdown()

    def _state(self) -> dict[str, Any]:
        extra = {**self._step.state_dict(), "lineage": torch.tensor(self._lineage)}
        return rank_state(self._model, self._optimizer, extra, scheduler=self._scheduler)

    def _load(self, state: dict[str, Any]) -> None:
        extra = load_rank_state(state, self._model, self._optimizer, scheduler=self._scheduler)
        self._step.load_state_dict(extra)
        self._lineage = int(extra["lineage"])

    def _first_lineage(self, first_step: int) -> int:
        """Return a number of the step and of the weights of all ranks of this replica."""
        tensors = [local_of(x.detach()) for x in self._model.state_dict().values()]
        sums = torch.stack([x.double().sum() for x in tensors]).cpu()
        digest = hashlib.sha256(bytes(sums.view(torch.uint8).tolist())).digest()
        number = int.from_bytes(digest[:4], "big")
        total = torch.tensor([number], device=self._device)
        dist.all_reduce(total)
        return hash((first_step, int(total))) % (1 << LINEAGE_BITS)

    def _check_peers(self) -> None:
        """Raise if ranks of this replica have the state of replicas that differ."""
        local_lineage = torch.tensor([self._lineage, -self._lineage], device=self._device)
        dist.all_reduce(local_lineage, dist.ReduceOp.MAX)
        largest, smallest = local_lineage[0], -local_lineage[1]
        if largest != smallest:
            raise RuntimeError(STRAY)

    def _meet(self) -> tuple[list[int], list[int]]:
        """Return lineage and name of each replica of this step."""
        assert self._place is not None, "begin() comes before finish()"
        seen_2R = torch.zeros(2, self._place.num_replicas, dtype=torch.int64, device=self._device)
        local_entry = torch.tensor([self._lineage, self._name], device=self._device)
        seen_2R[:, self._place.replica] = local_entry
        self._reduce([seen_2R], dist.ReduceOp.SUM)
        lineages, names = seen_2R.tolist()
        return lineages, names

    def _find_strays(self, lineages: list[int]) -> bool:
        """Return whether this replica is to end; where lineages differ the vote fails on all."""
        if len(set(lineages)) == 1:
            return False
        self._manager.report_error(RuntimeError(STRAY))
        majority = max(lineages, key=lineages.count)  # the first of those that are as many
        return self._lineage != majority

    def _average_gradients(self) -> None:
        """Make gradients means over replicas; one that any of them has all of them have."""
        params = [param for param in self._model.parameters() if param.requires_grad]
        have = [param.grad is not None for param in params]
        have_P = torch.tensor(have, dtype=torch.int32, device=self._device)
        self._reduce([have_P], dist.ReduceOp.SUM)
        # A host sync: which gradients travel is the same on all replicas.
        for param, number in zip(params, have_P.tolist(), strict=True):
            if number and param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [local_of(param.grad) for param in params if param.grad is not None]
        self._mark_shortage([grad for grad in grads if grad.numel()])
        self._reduce(grads, dist.ReduceOp.AVG)

    def _mark_shortage(self, grads: list[Tensor]) -> None:
        """Let all replicas skip a step whose rows did not fit here: a nan reaches their norms."""
        capacities = [record.capacity for record in self._records if record.capacity is not None]
        holders = [
            holder for record in capacities for holder in record.holders if holder is not None
        ]
        if holders and grads:
            shortage = torch.stack([holder.min_factor(self._device) for holder in holders])
            grads[0].masked_fill_(shortage.amax() > 0, torch.nan)

    def _add_counts(self) -> None:
        """Add the choices of all replicas, and make their auxiliary losses means."""
        states = [record.state for record in self._records if record.state is not None]
        layers = [layer for state in states for layer in state.layers.values()]
        counts = [layer.tracker.counts for layer in layers if layer.tracker.counts is not None]
        losses = [count.losses for count in counts]
        numbers = [x for count in counts for x in count.tensors() if x is not count.losses]
        self._reduce(numbers, dist.ReduceOp.SUM)
        self._reduce(losses, dist.ReduceOp.AVG)

    def _reduce(self, tensors: Iterable[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Reduce tensors over replicas, in place; what fails is known to the vote alone."""
        buckets = [
            (bucket, torch.cat([x.flatten() for x in bucket])) for bucket in _buckets(tensors)
        ]
        works = [self._manager.allreduce(flat, reduce_op=op) for _, flat in buckets]
        for (bucket, flat), work in zip(buckets, works, strict=True):
            work.wait()
            for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype, in order, of `BUCKET` bytes or one tensor."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        buckets = by_dtype.setdefault(x.dtype, [])
        if buckets and sum(y.nbytes for y in buckets) + x.nbytes > BUCKET:
            yield buckets
            buckets = by_dtype[x.dtype] = []
        buckets.append(x)
    yield from (buckets for buckets in by_dtype.values() if buckets)
