"""Fault-tolerant replicas: torchft's Manager around a `TrainStep`. Replicas may leave and rejoin.

A replica is a separate torch.distributed world with its own parallel degrees. Replicas exchange
gradients and token counts, and a rejoining replica receives the state of a peer.

Replicas that lose their connection may each run a step with the same number. A lineage, a hash of
the first weights and of the replicas in each step, therefore identifies the history of a replica.
If the lineages of a step's replicas differ, all replicas drop the step, and the replicas outside of
the largest group raise an error. After a restart they rejoin with the state of the group.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base import get_install_command
from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import Count, CountOrZero, Positive, check_arguments
from moecore.base.params import chunk_by_size
from moecore.base.torch_private import get_local_tensor
from moecore.io.checkpoint.hyperparameters import Schedulers
from moecore.io.checkpoint.snapshot import collect_rank_state, load_rank_state
from moecore.io.checkpoint.state import Optimizers
from moecore.parallel.model.parallel_state import list_parallel_states
from moecore.train.step import TrainStep
from moecore.train.step_result import StepResult

try:
    from torchft import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"moecore.integrations.torchft needs torchft ({error}): {get_install_command('torchft')}"
    ) from error

BUCKET = 1 << 26  # bytes of gradients in one all-reduce
LINEAGE_BITS = 62
STRAY = (
    "first weights and steps of this replica must be those of the others, but some differ: end all "
    "of its processes and start them again, with the same seed or checkpoint"
)


class ReplicaPlace(NamedTuple):
    """A step's number, the number of replicas in the step, and this replica's index."""

    step: int
    replica: int
    num_replicas: int


class Replicas:
    """Runs the steps of a `TrainStep` on replicas that may leave and rejoin.

    All ranks construct it. A replica is one copy of the model on its own ranks. If a replica
    leaves, `finish` drops the step, and the remaining replicas repeat it. A rejoining replica
    receives weights, optimizer, scheduler, loss scale and generator states from a peer in `begin`.
    Gradients are averaged, and expert biases are updated, over all replicas of a step. If one
    replica skips a step (such as for a gradient of nan), all replicas skip it.

    Args:
        model: parallelized with loss="mean"; identical weights on all replicas.
        optimizer: optimizer of `step`, or a list of optimizers.
        step: the model's TrainStep; call `step.forward_backward` in each step.
        scheduler: included in the state that a rejoining replica receives; the caller steps it.
        first_step: number of optimizer steps of a loaded checkpoint.
        min_replicas: minimum number of replicas of a step; fewer replicas wait.
        timeout_s: seconds after which a replica that does not answer counts as left. The value must
            exceed any step's duration, including compilation. Votes have twice and quorums three
            times this timeout.

    Raises:
        ValueError: if the loss is a sum; from `begin`, if the model has a `QKClip`.
        RuntimeError: from `begin` or `finish`, if this replica's history of steps differs from the
            other replicas': restart its processes.

    Example:
        replicas = Replicas(model, optimizer, step)
        while replicas.step < 1000:
            place = replicas.begin()
            losses = step.forward_backward(batches(place.step, place.replica, place.num_replicas))
            result = replicas.finish()  # None: a replica left, and the step is repeated
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
            self._records = list_parallel_states(model)
            request = self._records[0].request
            if request.loss != "mean":
                raise ValueError(
                    f"loss ({request.loss!r}) of parallelize_moe must be 'mean' with replicas: "
                    "their number, and so the tokens of a step, changes"
                )
        self._model, self._optimizer, self._step = model, optimizer, step
        self._scheduler = scheduler
        self._device = request.meshes.device
        start_id = self._make_int64_tensor([secrets.randbits(LINEAGE_BITS)])
        dist.broadcast(start_id, 0)
        self._start_id = int(start_id)  # identifies this start of the replica
        self._lineage = self._compute_first_lineage(first_step)
        self._place: ReplicaPlace | None = None
        timeout = timedelta(seconds=timeout_s)
        is_cpu = request.meshes.device_type == "cpu"
        self._group = ProcessGroupGloo(timeout) if is_cpu else ProcessGroupNCCL(timeout)
        # Another rank or replica may wait in a collective for `timeout` before it votes or joins.
        self._manager = Manager(
            pg=self._group,
            load_state_dict=self._load_state,
            state_dict=self._make_state,
            min_replica_size=min_replicas,
            init_sync=False,  # ranks of a replica would receive states of different replicas
            use_async_quorum=False,  # a rejoining replica needs its state before its forward
            timeout=2 * timeout,
            quorum_timeout=3 * timeout,
            connect_timeout=timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=os.environ["MASTER_ADDR"],
            store_port=int(os.environ["MASTER_PORT"]),
        )
        self._manager.load_state_dict({"step": first_step, "batches_committed": 0})

    @property
    def step(self) -> int:
        """Number of completed steps of the job; this replica may have missed some of them."""
        return int(self._manager.current_step())

    def begin(self) -> ReplicaPlace:
        """Begin a step when at least `min_replicas` are connected. Collective."""
        if any(getattr(module, "observe_scores", None) for module in self._model.modules()):
            raise ValueError(
                "QKClip must not watch the model of Replicas, each of which would clip by logits "
                "of its own: call its close()"
            )
        self._manager.start_quorum()
        replica = self._manager.participating_rank()
        assert replica is not None, "replicas that have been healed take part"
        lineages = self._make_int64_tensor([self._lineage, -self._lineage])
        dist.all_reduce(lineages, dist.ReduceOp.MAX)
        if lineages[0] != -lineages[1]:  # this replica's ranks differ
            raise RuntimeError(STRAY)
        self._place = ReplicaPlace(self.step, replica, self._manager.num_participants())
        return self._place

    def finish(self) -> StepResult | None:
        """Average gradients over replicas and run the optimizer step, if all ranks vote for it.

        Collective. None = the vote failed, as after a replica left: gradients are dropped, and
        `begin` repeats the step.
        """
        lineages, start_ids = self._gather_lineages()
        self._average_gradients()
        self._reduce_counts()
        # Over NCCL a replica that left fails no call; the aborted group reports it after a sync.
        failed = self._manager.errored() or self._group.errored()
        is_lost = False
        if not failed and len(set(lineages)) > 1:
            self._manager.report_error(RuntimeError(STRAY))
            # The first of two lineages that are equally frequent.
            is_lost = self._lineage != max(lineages, key=lineages.count)
        if not self._manager.should_commit():
            self._step.drop()
            if is_lost:
                raise RuntimeError(STRAY)
            return None
        self._lineage = hash((self._lineage, *start_ids)) % (1 << LINEAGE_BITS)
        return self._step.finish()

    def close(self) -> None:
        """Leave the job: stop this rank's threads and servers."""
        self._manager.shutdown()

    def _make_int64_tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _make_state(self) -> dict[str, Any]:
        """Return this rank's training state and lineage, which a rejoining replica loads."""
        lineage = torch.tensor(self._lineage, dtype=torch.int64, device="cpu")
        extra = self._step.state_dict() | {"lineage": lineage}
        return collect_rank_state(self._model, self._optimizer, extra, scheduler=self._scheduler)

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load a peer's state from `_make_state` into model, optimizer and TrainStep."""
        extra = load_rank_state(state, self._model, self._optimizer, scheduler=self._scheduler)
        self._step.load_state_dict(extra)
        self._lineage = int(extra["lineage"])

    def _compute_first_lineage(self, first_step: int) -> int:
        """Return a hash of `first_step` and of the weights on all ranks of this replica."""
        tensors = [get_local_tensor(x.detach()) for x in self._model.state_dict().values()]
        sums = torch.stack([x.double().sum() for x in tensors]).cpu()
        digest = hashlib.sha256(bytes(sums.view(torch.uint8).tolist())).digest()
        total = self._make_int64_tensor([int.from_bytes(digest[:4], "big")])
        dist.all_reduce(total)
        return hash((first_step, int(total))) % (1 << LINEAGE_BITS)

    def _gather_lineages(self) -> tuple[list[int], list[int]]:
        """Return each replica's lineage and random start id, both by replica index. Collective."""
        assert self._place is not None, "begin() comes before finish()"
        ids_2R = torch.zeros(2, self._place.num_replicas, dtype=torch.int64, device=self._device)
        ids_2R[:, self._place.replica] = self._make_int64_tensor([self._lineage, self._start_id])
        self._all_reduce_over_replicas([ids_2R], dist.ReduceOp.SUM)
        lineages, start_ids = ids_2R.tolist()
        return lineages, start_ids

    def _average_gradients(self) -> None:
        """Average gradients over replicas in place; missing gradients count as zeros. Host sync."""
        params = [param for param in self._model.parameters() if param.requires_grad]
        has_grad_P = self._make_int64_tensor([param.grad is not None for param in params])
        self._all_reduce_over_replicas([has_grad_P], dist.ReduceOp.SUM)
        # All replicas must reduce the same gradients.
        for param, number in zip(params, has_grad_P.tolist(), strict=True):
            if number and param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [get_local_tensor(param.grad) for param in params if param.grad is not None]
        capacities = [record.capacity for record in self._records if record.capacity is not None]
        owners = [owner for record in capacities for owner in record.owners if owner is not None]
        filled = [grad for grad in grads if grad.numel()]
        if owners and filled:  # after an overflow of a dispatch buffer, all replicas skip the step
            shortage = torch.stack(
                [owner.compute_min_capacity_factor(self._device) for owner in owners]
            )
            filled[0].masked_fill_(shortage.amax() > 0, torch.nan)
        self._all_reduce_over_replicas(grads, dist.ReduceOp.AVG)

    def _reduce_counts(self) -> None:
        """Sum the MoE layers' token counts over replicas; average auxiliary losses, in place."""
        states = [record.state for record in self._records if record.state is not None]
        layers = [layer for state in states for layer in state.layers.values()]
        counts = [layer.tracker.counts for layer in layers if layer.tracker.counts is not None]
        losses = [count.losses for count in counts]
        numbers = [x for count in counts for x in count.list_tensors() if x is not count.losses]
        self._all_reduce_over_replicas(numbers, dist.ReduceOp.SUM)
        self._all_reduce_over_replicas(losses, dist.ReduceOp.AVG)

    def _all_reduce_over_replicas(
        self, tensors: Iterable[Tensor], op: dist.ReduceOp.RedOpType
    ) -> None:
        """All-reduce tensors over replicas, in place. An error fails the next vote."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            by_dtype.setdefault(x.dtype, []).append(x)
        buckets: list[list[Tensor]] = []
        for group in by_dtype.values():
            buckets += chunk_by_size(group, lambda x: x.nbytes, BUCKET)
        flats = [torch.cat([x.flatten() for x in bucket]) for bucket in buckets]
        works = [self._manager.allreduce(flat, reduce_op=op) for flat in flats]
        for bucket, flat, work in zip(buckets, flats, works, strict=True):
            work.wait()
            for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))
