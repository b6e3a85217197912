"""Silent data corruption (SDC): replays of a micro-batch find devices that compute wrong values.

Before a checked step, every rank runs the step's first micro-batch twice, and then the micro-batch
of a neighbor twice: a rank with the same position in its tensor, context and expert parallel groups
that is in other groups. All runs of a micro-batch must have equal bits:

    the two runs of one rank differ                      a transient error of this rank
    two ranks differ, and each of them repeats its bits  a persistent error of one of the two

A rank that differs from both neighbors has the error. With two groups, both ranks are suspects.

Source: `RerunStateMachine` of Megatron-Core; ByteRobust (arXiv:2509.16293).
"""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moecore.base.fields import CheckedRecord, Count
from moecore.base.rank_checks import gather_objects, shift_ranks
from moecore.moe.pairs import get_rng_states, set_rng_states
from moecore.parallel.mesh import ParallelConfig
from moecore.recipes.data import StepBatch, pad_bounds
from moecore.recipes.errors import DivergedError
from moecore.recipes.metrics import Metrics
from moecore.train.result_trace import ResultTrace, trace_results
from moecore.train.step import TrainStep

PER_MICRO_BATCH = "tokens_ABT", "labels_ABT", "padding_ABT", "cu_seqlens_An"  # of a `StepBatch`


@dataclass(frozen=True, kw_only=True, slots=True)
class SDCOptions(CheckedRecord):
    """Options of checks that replay a micro-batch to find silent data corruption.

    Attributes:
        every: steps between checks.
        action: after an error, "stop" ends the run, "log" prints an alarm.
    """

    every: Count = 1000
    action: Literal["stop", "log"] = "stop"

    def check(self, args: Any) -> None:
        """Raise ValueError if replays under the `ShardedConfig` `args` are not bit-equal."""
        for words, is_set in (
            ("with --cuda-graph", args.cuda_graph),
            ("with --graph-dense", args.sharding.graph_dense),
            ("with --offload-params", args.memory.offload_params),
            ("with --dynamic-cp", args.sharding.dynamic_cp is not None),
            ("with --pp", args.get_degree("pp") > 1),
            ("without --deterministic", torch.cuda.is_available() and not args.deterministic),
        ):
            if is_set:
                raise ValueError(
                    f"--sdc-check-every ({self.every}) must not go {words}, because replays then "
                    "have no results of equal bits to compare: change one of the two"
                )


class SDCCheck:
    """Replays the first micro-batch of a step, also on a neighbor rank; compares the results."""

    def __init__(self, options: SDCOptions, parallel: ParallelConfig, owner: TrainStep) -> None:
        self._options, self._owner = options, owner
        # Groups of cp x tp and of ep x etp have consecutive ranks. 0 = no rank is in other groups.
        size = math.lcm(parallel.cp * parallel.tp, parallel.ep * parallel.etp)
        self._distance = size % dist.get_world_size()

    def check(self, step: int, batch: StepBatch, run_batch: Callable[[StepBatch], Any]) -> Metrics:
        """Return the number of suspect ranks by kind of error; {} = the step has no check.

        `run_batch` runs forward and backward of a batch. Gradients, counts and random states are
        restored. Collective in a step with a check. Synchronizes the device.

        Raises:
            DivergedError: with `SDCOptions.action` "stop", on all ranks if any rank has an error.
        """
        if step % self._options.every:
            return {}
        batch, states = pad_bounds(batch), get_rng_states()
        names = [name for name in PER_MICRO_BATCH if getattr(batch, name) is not None]

        def replay(tensors: Sequence[Tensor]) -> tuple[ResultTrace, float]:
            """Run a micro-batch twice; return a trace and the position of the first difference."""
            traces, first = [], dict[str, Any](zip(names, tensors, strict=False))
            for _ in range(2):
                set_rng_states(tensors[len(names) :])
                with trace_results(self._owner.model) as trace:
                    run_batch(replace(batch, **first))
                self._owner.drop()
                traces.append(trace)
            return trace, find_difference(*(trace.read() for trace in traces))

        tensors = [*(getattr(batch, name)[:1] for name in names), *states]
        trace, transient = replay(tensors)
        persistent = math.inf
        if self._distance:
            neighbor_trace, position = replay(self._exchange(tensors))
            transient, checksums = min(transient, position), trace.read()
            size = max(gather_objects(len(checksums)))
            (reference,) = self._exchange([F.pad(checksums, (0, size - len(checksums)))])
            persistent = find_difference(reference, neighbor_trace.read())
        set_rng_states(states)
        positions = {"transient": transient, "persistent": persistent}
        return self._compare_ranks(step, positions, trace.places)

    def _exchange(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send CPU tensors to the next groups; return tensors of equal shapes from the previous."""
        parts = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]
        buffer = torch.empty_like(outgoing := torch.cat(parts))
        shift_ranks(outgoing, buffer, self._distance)
        pieces = buffer.split([len(part) for part in parts])
        return [x.clone().view(t.dtype).view(t.shape) for x, t in zip(pieces, tensors, strict=True)]

    def _compare_ranks(self, step: int, positions: dict[str, float], places: list[str]) -> Metrics:
        """Return the number of suspect ranks by kind of error; print an alarm or raise."""
        reports = gather_objects((socket.gethostname(), positions))
        metrics = {f"sdc_{kind}": 0.0 for kind in positions}
        for kind, distance in (("transient", 0), ("persistent", self._distance)):
            of_ranks = [report[kind] for _, report in reports]
            if not (ranks := find_suspect_ranks(of_ranks, distance)):
                continue
            metrics[f"sdc_{kind}"] = float(len(ranks))
            suspects = " or ".join(f"rank {rank} on {reports[rank][0]}" for rank in ranks)
            place = places[min(int(min(of_ranks)), len(places) - 1)]  # a rank may have more places
            text = f"{suspects} has a {kind} error in {place}"
            if self._options.action == "stop":
                raise DivergedError(
                    f"replays of step {step} (--sdc-check-every {self._options.every}) must have "
                    f"equal bits, but {text}: replace the host, and start again from the last "
                    "checkpoint"
                )
            if dist.get_rank() == 0:
                print(f"alarm at step {step}: {text}", flush=True)
            break  # a transient error may make two ranks differ too
        return metrics


def find_difference(a: Tensor, b: Tensor) -> float:
    """Return the index where vectors of checksums first differ (zero-padded); inf = equal."""
    size = max(len(a), len(b))
    positions = (F.pad(a, (0, size - len(a))) != F.pad(b, (0, size - len(b)))).nonzero()
    return float(positions[0]) if len(positions) else math.inf


def find_suspect_ranks(differences: Sequence[float], distance: int) -> list[int]:
    """Return the ranks whose results differ first from the results of their neighbors; [] = none.

    `differences[r]` compares ranks r - `distance` and r: the position of the first different
    result, or inf. `distance` 0 compares two runs of one rank.

    Example, 4 ranks, distance 1: [inf, 7, 7, inf] -> [1], because rank 1 differs from ranks 0 and
    2. [inf, 7, inf, inf] -> [0, 1].
    """
    shifted = [*differences[distance:], *differences[:distance]]
    comparisons = [(max(pair), min(pair)) for pair in zip(differences, shifted, strict=True)]
    first = min(comparisons)
    return [rank for rank, pair in enumerate(comparisons) if pair == first < (math.inf, math.inf)]
