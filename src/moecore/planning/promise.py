"""Promise: estimates of a folding's bytes and seconds, which decide which foldings are planned.

    a dry run of one node -> bytes of its activations -> estimated bytes of a rank, per folding
                          -> work of its parts        -> estimated seconds of a step, per folding

An estimate only sorts foldings: it takes a rank's share of all bytes and of all work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache
from math import gcd
from typing import NamedTuple

import torch

from moecore.kernels.common import meta_as
from moecore.models import Decoder
from moecore.models.size import num_params
from moecore.parallel.mesh import build_meshes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallelize import parallelize_moe
from moecore.planning.costs import CostTable
from moecore.planning.foldings import Folding, SearchRequest, run_of, rungs_of
from moecore.planning.levers import OVERHEADS, Levers
from moecore.planning.pieces import MIDDLE, Pieces, passes_of, timed_layers, timed_stages
from moecore.planning.record import PASSES, Pass, Work
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world, quiet
from moecore.train.memory.kept import ModelKept, kept_bytes

MESSAGES = 2  # messages of a layer's tokens in each pass, among the ranks of tp and of cp
BY_EXPERTS = ("collective", "grouped product")
LAYERS = 3  # layers with whole weights or gradients at once, if micro-batches all-gather them


class _Held(NamedTuple):
    """Parameters with which a rank computes, the ranks that share them, and those of one node."""

    size: float
    ranks: int
    node_ranks: int


class _Seconds(NamedTuple):
    """Seconds of passes: those of device or host without collectives, and those of collectives."""

    computed: float
    sent: float


class Promise:
    """Estimates of the foldings of a request."""

    def __init__(self, request: SearchRequest, table: CostTable) -> None:
        self._request, self._table = request, table
        model = request.model
        self._everything, self._experts, self._ep = num_params(model), 0, 1
        if model.moe is not None:
            matrix = model.moe.expert_dim * model.moe.hidden_dim
            layers = model.num_moe_layers + model.num_mtp_layers
            self._experts = layers * model.moe.num_experts * 3 * matrix
            self._ep = gcd(model.moe.num_experts, request.gpus_per_node)
        rungs = rungs_of(request)
        whole = [i for i, rung in enumerate(rungs) if _is_light(rung, rungs[0])][-1]
        self._rungs = (rungs[0], *(r for r in rungs[whole:] if r.overhead != OVERHEADS[-1]))
        self._last = rungs[-1]
        self._kept, self._pieces = cache(self._kept_by), cache(self._pieces_of)
        self._part, self._share = cache(self._seconds_of), cache(self._share_of)

    def key(self, folding: Folding) -> tuple[float, ...]:
        """Return the sort key: foldings that seem to fit first, by seconds; others by bytes."""
        rung = self.rung(folding)
        if rung is None:
            return True, self.num_bytes(folding)
        return False, self.seconds(folding, rung)

    def rung(self, folding: Folding) -> Levers | None:
        """Return the first of a few rungs with which a folding is estimated to fit, or None."""
        limit = self._request.limit
        return next((r for r in self._rungs if self.num_bytes(folding, r) <= limit), None)

    def num_bytes(self, folding: Folding, rung: Levers | None = None) -> float:
        """Return the estimated bytes of the largest rank with the levers of a rung; None = all."""
        # Sum of: bf16 weights and fp32 gradients of the parameters that are whole in a step; fp32
        # weights and gradients and bf16 moments of the rank's shards; and saved activations of a
        # micro-batch over tp * cp, times those in flight on the first pipeline rank.
        rung, chunks = rung or self._last, folding.chunks
        layers = self._request.model.num_layers / folding.pp
        share = min(1.0, LAYERS / layers) if _gathers(rung) else 1.0
        held = sum(one.size * (share if one.ranks > 1 else 1) for one in self._held(folding))
        stored = (12 - 4 * rung.optimizer.offload_fraction) * self._everything
        in_flight = 1 + 1 / chunks if chunks > 1 else 1
        kept, _ = self._kept(rung)
        rows = folding.batch_size / (folding.tp * folding.cp)
        return 6 * held + stored / self._request.num_gpus + in_flight * kept * rows

    def seconds(self, folding: Folding, rung: Levers) -> float:
        """Return the estimated seconds of a step without clipping and the optimizer."""
        # The pipeline rank with most work runs all micro-batches, and waits while the pipeline
        # fills. That work hides all-gathers and reductions of weights, and offload. The network
        # carries tokens and weights one after the other.
        run = run_of(self._request, folding, rung)
        like, pp = self._rungs[rung is not self._rungs[0]], folding.pp
        passes = [self._stage(stage, folding, like) for stage in timed_stages(run)]
        each = list(map(sum, passes))
        busiest = max(sum(each[rank::pp]) for rank in range(pp))
        busiest = max(busiest, self._copies(folding, rung))
        if _gathers(rung):
            across = folding.ep * folding.etp > self._request.gpus_per_node
            sent = max(sum(one.sent for one in passes[rank::pp]) for rank in range(pp))
            busiest = max(busiest, self._gathers(folding) + across * sent)
        return run.num_micro_batches * busiest + sum(each) * (pp - 1) / len(each)

    def _held(self, folding: Folding) -> list[_Held]:
        """Return the parameters with which a rank computes: dense ones, then experts."""
        pp, tp, _, ep, etp, _, _ = folding
        stage, node = self._request.num_gpus // pp, self._request.gpus_per_node
        parts = ((self._everything - self._experts, tp), (self._experts, ep * etp))
        return [
            _Held(size / (pp * ranks), stage // ranks, max(1, min(stage, node) // ranks))
            for size, ranks in parts
        ]

    def _gathers(self, folding: Folding) -> float:
        """Return the seconds of a micro-batch's two bf16 all-gathers and one fp32 reduction."""
        found = 0.0
        for size, ranks, node_ranks in self._held(folding):
            gather = Work("all_gather", "collective", 0, round(2 * size), (ranks,), "bfloat16")
            found += 4 * self._table.seconds(gather, node_ranks) if ranks > 1 else 0
        return found

    def _copies(self, folding: Folding, rung: Levers) -> float:
        """Return the seconds of the offload of a micro-batch's activations, out and back."""
        _, away = self._kept(rung)
        rows = folding.batch_size / (folding.tp * folding.cp)
        num_bytes = round(2 * away * rows / folding.pp)
        copy = Work("copy to host", "copy", 0, num_bytes, (), "bfloat16")
        return self._table.seconds(copy) if num_bytes else 0.0

    def _stage(self, stage: Stage, folding: Folding, rung: Levers) -> _Seconds:
        """Return the seconds of a micro-batch's passes through a stage."""
        pieces, degrees = self._pieces(rung), folding._replace(pp=1, chunks=1)
        parts = ((part, of) for of in PASSES for part in pieces.parts(stage, of))
        found = [self._part(*part, degrees, rung) for part in parts]
        return _Seconds(*map(sum, zip(*found, strict=True)))

    def _seconds_of(self, part: str, of: Pass, folding: Folding, rung: Levers) -> _Seconds:
        """Return the seconds of a part's pass: the larger of the host's and the device's."""
        pieces = self._pieces(rung)
        own = (
            pieces.queued[i].work for p in pieces.of_part(part, of, MIDDLE // 2) for i in p.place
        )
        experts, rows = (
            folding.ep * folding.etp,
            Fraction(folding.batch_size, folding.tp * folding.cp),
        )
        computed, sent = list[float](), list[float]()
        for work in own:
            seconds = self._share(work, rows, experts * (work.kind in BY_EXPERTS))
            if seconds is not None:
                (sent if work.kind == "collective" else computed).append(seconds)
        sent += self._messages(folding) if part.startswith(("layer", "predictions")) else ()
        host = (len(computed) + len(sent)) * self._table.host_seconds
        return _Seconds(max(host - sum(sent), sum(computed)), sum(sent))

    def _share_of(self, work: Work, rows: Fraction, experts: int) -> float | None:
        """Return the seconds of a rank's share of work of one node's run; None if it is empty."""
        # `rows` is less than 1 if ranks share a row; `experts` is 0 if the work has none.
        shape = work.shape
        if work.kind == "collective":
            shape = (experts,)
            if shape == (1,):
                return None
        elif work.kind == "grouped product":
            e, R, N, K = shape
            shape = (max(1, round(e * self._ep / experts)), int(R * rows), N, K)
        elif shape:
            shape = (max(1, int(shape[0] * rows)), *shape[1:])
        num_bytes = max(1, int(work.num_bytes * rows))
        share = replace(work, shape=shape, flops=int(work.flops * rows), num_bytes=num_bytes)
        here = min(self._request.gpus_per_node, *shape) if work.kind == "collective" else 0
        return self._table.seconds(share, here)

    def _messages(self, folding: Folding) -> Iterator[float]:
        """Yield the seconds of messages among the ranks of tp, and among those of cp."""
        tokens = folding.batch_size * self._request.seq_len // (folding.tp * folding.cp)
        for ranks in (folding.tp, folding.cp):
            num_bytes = 2 * self._request.model.dim * tokens * (ranks - 1)
            message = Work("all_gather", "collective", 0, num_bytes, (ranks,), "bfloat16")
            if ranks > 1:
                here = min(ranks, self._request.gpus_per_node)
                yield from MESSAGES * [self._table.seconds(message, here)]

    def _kept_by(self, rung: Levers) -> tuple[int, int]:
        """Return the bytes that a micro-batch saves for backward: on the device, on the host."""
        small, like = timed_layers(self._node(rung, 1), 1)
        found = _kept_of(replace(small, optimizer=OptimizerOptions()))
        blocks = [found.blocks[i] for i in like["F"]] + [*found.blocks[small.model.num_layers :]]
        away = sum(sum(block.host.values()) for block in blocks)
        return sum(block.num_bytes for block in (*blocks, found.outside)), away

    def _pieces_of(self, rung: Levers) -> Pieces:
        return passes_of(self._node(rung, MIDDLE))

    def _node(self, rung: Levers, num_micro_batches: int) -> TrainingRun:
        """Return a run on one node, whose number of ranks divides the number of experts."""
        rows = num_micro_batches * self._ep
        request = replace(self._request, num_gpus=self._ep, global_batch=rows, nvlink=None)
        return run_of(request, Folding(ep=self._ep), rung)


@lru_cache(maxsize=256)
def _kept_of(run: TrainingRun) -> ModelKept:
    """Return the bytes that a forward of one micro-batch saves, in a tenth of a dry run's time."""
    model = Decoder(run.model, device="meta", dtype=run.dtype)
    tokens_BT = torch.zeros(run.batch_size, run.seq_len, dtype=torch.int64)
    with fake_world(run.num_gpus), quiet(), meta_as("cuda"):
        meshes = build_meshes(run.parallel, "cpu")
        how = dict(precision=run.precision, fsdp=run.fsdp)
        parallelize_moe(model, meshes, dispatcher="alltoall", **how)  # type: ignore[arg-type]
        return kept_bytes(
            model,
            [*model.layers, *model.mtp],
            lambda copy: copy(tokens_BT, tokens_BT),
            options=run.memory,
            device_type="cuda",
            dtype_of=lambda param: run.fsdp.param_dtype or param.dtype,
        )


def _is_light(rung: Levers, first: Levers) -> bool:
    """Return whether a rung has the sharding and the offload of the first rung."""
    return (rung.fsdp, rung.memory.offload, rung.optimizer.offload_fraction) == (
        first.fsdp,
        first.memory.offload,
        first.optimizer.offload_fraction,
    )


def _gathers(rung: Levers) -> bool:
    return rung.fsdp.dense_strategy == "optim_grads_params"
