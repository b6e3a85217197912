"""Estimate: about the bytes and seconds of a folding, which decide which foldings are planned.

    a dry run of one node -> bytes of its activations -> estimated bytes of a rank, per folding
                          -> work of its parts        -> estimated seconds of a step, per folding

An estimate only sorts foldings: it takes a rank's share of all bytes and of all work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import chain, combinations
from math import gcd
from typing import NamedTuple

import torch

from moecore.base.options.fsdp import FSDPOptions
from moecore.kernels.common import meta_as
from moecore.models import DecoderConfig
from moecore.models.tp_products import GATHER_SLICES, is_long
from moecore.parallel.mesh import build_meshes
from moecore.parallelize import parallelize_moe
from moecore.planning.costs import CostTable
from moecore.planning.explain import compute_args_of
from moecore.planning.gpus import gpu_of
from moecore.planning.layouts import Folding, SearchRequest, levers_of, run_of, rungs_of
from moecore.planning.option_sets import Levers
from moecore.planning.record import PASSES, Pass, Work
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world, quiet
from moecore.planning.segments import MIDDLE, passes_of, timed_layers, timed_stages
from moecore.planning.stored import state_bytes
from moecore.planning.transformers import refusing
from moecore.train.memory.saved_bytes import ModelSavedBytes, count_saved_bytes

MESSAGES = 2  # messages of a layer's tokens in each pass, among the ranks of tp and of cp
BY_EXPERTS = ("collective", "grouped product")
# Planned seconds over those estimated, as searches take them.
FASTER = 0.85  # the least of them
SPREAD = 0.95  # the least over that of another plan with the same pp and ep
LAYERS = 3  # layers with whole weights or gradients at once, if micro-batches all-gather them


class _Weights(NamedTuple):
    """Parameters with which a rank computes, the ranks that share them, and those of one node.

    There are two copies in memory where ranks have parts of an expert, which are no views.
    """

    size: float
    ranks: int
    node_ranks: int
    copies: int


class _Seconds(NamedTuple):
    """Seconds of passes: those of device or host without collectives, and those of collectives."""

    compute: float
    network: float


class Estimate:
    """Estimates of the foldings of a request."""

    def __init__(self, request: SearchRequest, table: CostTable) -> None:
        self._request, self._table = request, table
        moe = request.planned_model.moe
        self._everything, self._experts, self._tp_params = request.planned_model.sizes()
        self._ep = 1 if moe is None else gcd(moe.num_experts, request.domain)
        self._base, self._last = (rungs := rungs_of(request))[0], rungs[-1]
        self._choices = _choices(request, rungs)
        # Planned over estimated bytes, on the device and on the host, by pp.
        self._byte_factors, self._pinned = (defaultdict[int, float](lambda: 1.0) for _ in range(2))
        # Least planned over estimated seconds; of those that have no plan it is the least known.
        self._slower = defaultdict[Folding, float](lambda: FASTER)
        self._pieces = cache(lambda rung: passes_of(self._node(rung, MIDDLE)))
        self._part, self._share = cache(self._seconds_of), cache(self._share_of)
        self._stage, self._parts = cache(self._seconds_of_stage), cache(self._parts_of)
        self._saved_bytes = cache(self._kept_by)
        self.seconds, self.num_bytes = cache(self._seconds_of_step), cache(self._bytes_of)

    def key(self, folding: Folding) -> tuple[float, ...]:
        """Return the sort key: foldings that seem to fit first, by seconds; others by bytes."""
        levers = self.levers(folding)
        if levers is None:
            return True, self.num_bytes(folding)
        return False, self._slower[_kin(folding)] * self.seconds(folding, levers)

    def levers(self, folding: Folding) -> Levers | None:
        """Return the fastest of a few sets with which a folding is estimated to fit, or None."""
        request, byte_factor, pinned = (
            self._request,
            self._byte_factors[folding.pp],
            self._pinned[folding.pp],
        )
        fitting = (
            choice
            for choice in self._choices
            if byte_factor * self.num_bytes(folding, choice) <= request.limit
            and pinned * self.host_bytes(folding, choice) <= request.host_limit
        )
        return min(fitting, key=lambda choice: self.seconds(folding, choice), default=None)

    def learn(self, folding: Folding, levers: Levers, num_bytes: int, host: int) -> None:
        """Correct the estimates of as many stages by a plan that did not fit."""
        byte_factor = num_bytes / self.num_bytes(folding, levers)
        self._byte_factors[folding.pp] = max(byte_factor, self._byte_factors[folding.pp])
        if host:
            pinned = host / self.host_bytes(folding, levers)
            self._pinned[folding.pp] = max(pinned, self._pinned[folding.pp])

    def learn_seconds(self, folding: Folding, levers: Levers, seconds: float) -> None:
        """Correct the estimates of foldings whose tokens travel as far by a plan that fits."""
        estimate, kin = self.seconds(folding, levers), _kin(folding)
        self._slower[kin] = min(self._slower.get(kin, math.inf), SPREAD * seconds / estimate)

    def _bytes_of(self, folding: Folding, rung: Levers | None = None) -> float:
        """Return the estimated bytes of the largest rank with the levers of a rung; None = all."""
        # Sum of: weights as gathered and fp32 gradients of the parameters that are whole in a step;
        # weights, gradients and state of the rank's shards; and saved activations of a micro-batch
        # over tp * cp, times those in flight on the first pipeline rank.
        rung, chunks = rung or self._last, folding.chunks
        layers = self._request.planned_model.num_layers / folding.pp
        share = min(1.0, LAYERS / layers) if _gathers(rung) else 1.0
        weights = self._weights(folding)
        num_weights = share * sum(weight.copies * weight.size for weight in weights)
        sums = share * sum(weight.copies * weight.size for weight in weights if weight.ranks > 1)
        if folding.pp > 1:  # the first or the last stage has all of the embedding or of the head
            end = self._request.planned_model.vocab_size * self._request.planned_model.dim
            num_weights, sums = num_weights + end, sums + end
        weight_bytes = (
            1 if rung.fsdp.fp8_param_gather else 2 if rung.precision is None else 3
        )  # copies
        state = (1 - rung.optimizer.offload_fraction) * state_bytes(rung.optimizer, _dtype(rung))
        sharded_bytes = (2 * _dtype(rung).itemsize + state) * self._everything
        in_flight = 1 + 1 / chunks if chunks > 1 else 1
        saved_bytes, _ = self._saved_bytes(rung)
        rows = folding.batch_size / (folding.tp * folding.cp)
        unsharded_bytes = weight_bytes * num_weights + 4 * sums
        return (
            unsharded_bytes
            + sharded_bytes / self._request.num_gpus
            + in_flight * saved_bytes * rows
        )

    def host_bytes(self, folding: Folding, rung: Levers) -> float:
        """Return the estimated bytes of host memory that the ranks of a server pin."""
        _, offloaded_bytes = self._saved_bytes(rung)
        chunks, options, num_gpus = folding.chunks, rung.optimizer, self._request.num_gpus
        in_flight = 1 + 1 / chunks if chunks > 1 else 1
        state = options.offload_fraction * state_bytes(options, _dtype(rung)) * self._everything
        rows = folding.batch_size / (folding.tp * folding.cp)
        ranks = min(gpu_of(self._request.gpu).server, num_gpus)
        return ranks * (in_flight * offloaded_bytes * rows + state / num_gpus)

    def _seconds_of_step(self, folding: Folding, rung: Levers) -> float:
        """Return the estimated seconds of a step without clipping and the optimizer."""
        # The pipeline rank with most work runs all micro-batches, and waits while the pipeline
        # fills. That work hides all-gathers and reductions of weights, and offload; in pairs of a
        # forward and a backward computation hides exchanges. The network carries tokens and weights
        # one after the other.
        run = run_of(self._request, folding, rung)
        like, pp = self._choices[rung is not self._base], folding.pp
        degrees = folding._replace(pp=1, chunks=1)
        stages = self._parts(folding._replace(ep=1, etp=1), like)
        passes = [self._stage(parts, degrees, like) for parts in stages]
        across = folding.ep * folding.etp > self._request.domain
        is_paired = across and folding.chunks > 1 and run.nvlink is None
        hides = self._table.pairs_hide if is_paired else 0.0
        stage_seconds = [c + network - min(c, hides * network) for c, network in passes]
        busiest = max(sum(stage_seconds[rank::pp]) for rank in range(pp))
        busiest = max(busiest, self._copies(folding, rung))
        if _gathers(rung):
            network = max(sum(stage.network for stage in passes[rank::pp]) for rank in range(pp))
            busiest = max(busiest, self._gathers(folding, rung) + across * network)
        # The first forward and the last backward hide the state's copies.
        waits = max(0.0, self._state(rung) - busiest)
        fills = sum(stage_seconds) * (pp - 1) / len(stage_seconds)
        if hides:  # the first forwards and the last backwards, more than of other orders, run alone
            serial_seconds, chunks = [c + network for c, network in passes], folding.chunks
            fills = 2 * sum(serial_seconds) * (pp - 1) / len(serial_seconds)
            first = min(run.num_micro_batches, ((chunks + 1) * pp - 1) / chunks)
            fills += first * (sum(serial_seconds) - sum(stage_seconds)) / pp
        return run.num_micro_batches * busiest + fills + waits

    def _weights(self, folding: Folding) -> list[_Weights]:
        """Return the parameters with which a rank computes: dense ones, then experts."""
        pp, tp, _, ep, etp, _, _ = folding
        stage, node = self._request.num_gpus // pp, self._request.domain
        dense = self._everything - self._experts - self._tp_params + self._tp_params / tp
        weights, experts = [], ep * etp
        for size, ranks in ((dense, tp), (self._experts / experts, experts)):
            sharing = stage // ranks
            weights.append(_Weights(size / pp, sharing, max(1, min(stage, node) // ranks), 1))
        moe = self._request.planned_model.moe
        if moe is not None and weights[1].ranks > moe.num_experts // ep:
            weights[1] = weights[1]._replace(copies=2)
        return weights

    def _gathers(self, folding: Folding, rung: Levers) -> float:
        """Return the seconds of a micro-batch's two all-gathers and one fp32 reduction."""
        seconds, width = 0.0, 2 * (1 if rung.fsdp.fp8_param_gather else 2) + 4
        for size, ranks, node_ranks, _ in self._weights(folding):
            num_bytes = round(2 * width * size * (ranks - 1) / ranks)
            gather = Work("all_gather", "collective", 0, num_bytes, (ranks,), "bfloat16")
            seconds += self._table.seconds(gather, node_ranks) if ranks > 1 else 0
        return seconds

    def _copies(self, folding: Folding, rung: Levers) -> float:
        """Return the seconds of the offload of a micro-batch's activations, out and back."""
        _, offloaded_bytes = self._saved_bytes(rung)
        rows = folding.batch_size / (folding.tp * folding.cp)
        num_bytes = round(2 * offloaded_bytes * rows / folding.pp)
        copy = Work("copy to host", "copy", 0, num_bytes, (), "bfloat16")
        return self._table.seconds(copy) if num_bytes else 0.0

    def _state(self, rung: Levers) -> float:
        """Return the seconds of the copies of the optimizer's state, out and back."""
        options = rung.optimizer
        param_bytes = 2 * options.offload_fraction * state_bytes(options, _dtype(rung))
        num_bytes = round(param_bytes * self._everything / self._request.num_gpus)
        copy = Work("copy to host", "copy", 0, num_bytes, (), "uint8")
        return self._table.seconds(copy) if num_bytes else 0.0

    def _parts_of(self, folding: Folding, rung: Levers) -> list[tuple[tuple[str, Pass], ...]]:
        """Return the parts of each stage's passes."""
        pieces, stages = self._pieces(rung), timed_stages(run_of(self._request, folding, rung))
        return [tuple((p, of) for of in PASSES for p in pieces.parts(s, of)) for s in stages]

    def _seconds_of_stage(
        self, parts: Iterable[tuple[str, Pass]], folding: Folding, rung: Levers
    ) -> _Seconds:
        """Return the seconds of a micro-batch's passes through a stage."""
        seconds = [self._part(*part, folding, rung) for part in parts]
        return _Seconds(*map(sum, zip(*seconds, strict=True)))

    def _seconds_of(self, part: str, of: Pass, folding: Folding, rung: Levers) -> _Seconds:
        """Return the seconds of a part's pass: the larger of the host's and the device's."""
        pieces = self._pieces(rung)
        operations = (
            pieces.queued[i] for p in pieces.of_part(part, of, MIDDLE // 2) for i in p.place
        )
        experts, rows = (
            folding.ep * folding.etp,
            Fraction(folding.batch_size, folding.tp * folding.cp),
        )
        compute, network = list[float](), list[float]()
        for operation in operations:
            work = operation.work
            seconds = self._share(work, rows, experts * (work.kind in BY_EXPERTS))
            if seconds is not None:
                seconds_of_kind = network if work.kind == "collective" else compute
                seconds_of_kind.append(operation.times * seconds)
        network += (
            self._messages(folding, rung) if part.startswith(("layer", "predictions")) else ()
        )
        host = (len(compute) + len(network)) * self._table.host_seconds
        return _Seconds(max(host - sum(network), sum(compute)), sum(network))

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
        node_ranks = min(self._request.domain, *shape) if work.kind == "collective" else 0
        return self._table.seconds(share, node_ranks)

    def _messages(self, folding: Folding, rung: Levers) -> Iterator[float]:
        """Yield the seconds of messages among the ranks of tp, and among those of cp."""
        request, tp = self._request, "all_gather"
        slice_bytes = 2 * request.planned_model.dim * request.seq_len // (folding.tp * folding.cp)
        is_plain = isinstance(request.model, DecoderConfig) and rung.precision is None
        if is_plain and is_long(slice_bytes) and request.peers % folding.tp == 0:
            tp = GATHER_SLICES
        for name, ranks in ((tp, folding.tp), ("all_gather", folding.cp)):
            num_bytes = 2 * folding.batch_size * slice_bytes * (ranks - 1)
            message = Work(name, "collective", 0, num_bytes, (ranks,), "bfloat16")
            if ranks > 1:
                node_ranks = min(ranks, self._request.domain)
                yield from MESSAGES * [self._table.seconds(message, node_ranks)]

    def _kept_by(self, rung: Levers) -> tuple[int, int]:
        """Return the bytes that a micro-batch saves for backward: on the device, on the host."""
        small, like = timed_layers(self._node(rung, 1), 1)
        fsdp = FSDPOptions(param_dtype=rung.fsdp.param_dtype)  # shards save as much
        model_bytes = kept_of(replace(small, optimizer=OptimizerOptions(), fsdp=fsdp))
        blocks = [model_bytes.blocks[i] for i in like["F"]]
        blocks += model_bytes.blocks[small.planned_model.num_layers :]
        offloaded_bytes = sum(sum(block.host.values()) for block in blocks)
        return sum(block.num_bytes for block in (*blocks, model_bytes.outside)), offloaded_bytes

    def _node(self, rung: Levers, num_micro_batches: int) -> TrainingRun:
        """Return a run on one node, whose number of ranks divides the number of experts."""
        rows = num_micro_batches * self._ep
        request = replace(self._request, num_gpus=self._ep, global_batch=rows, nvlink=None)
        return run_of(request, Folding(ep=self._ep), rung)


@lru_cache(maxsize=256)
def kept_of(run: TrainingRun) -> ModelSavedBytes:
    """Return the bytes that a forward of one micro-batch saves, in a tenth of a dry run's time."""
    model = run.planned_model.build(run.dtype)
    tokens_BT = torch.empty(run.batch_size, run.seq_len, dtype=torch.int64, device="meta")
    with refusing(run.model), fake_world(run.num_gpus), quiet(), meta_as("cuda"):
        meshes = build_meshes(run.parallel, "cpu")
        parallelize_moe(model, meshes, dispatch="alltoall", precision=run.precision, fsdp=run.fsdp)
        parts = run.planned_model.parts(model)
        return count_saved_bytes(
            model,
            [*parts.layers, *parts.mtp],
            lambda copy: copy(**run.planned_model.inputs(tokens_BT)),
            options=run.memory,
            **compute_args_of(model) | {"device_type": "cuda"},
        )


def _choices(request: SearchRequest, rungs: Sequence[Levers]) -> list[Levers]:
    """Return sets of options to choose from: the first rung's, or all cheap ones and others."""
    options = rungs[-1].options
    dear = [option for option in options if option.overhead == "medium"]
    sets = chain.from_iterable(combinations(dear, n) for n in range(len(dear) + 1))
    cheap = (
        tuple(o for o in options if o.overhead == "low" or o in expensive) for expensive in sets
    )
    return [rungs[0], *(levers_of(request, subset) for subset in cheap)]


def _kin(folding: Folding) -> Folding:
    return Folding(pp=folding.pp, ep=folding.ep)


def _dtype(rung: Levers) -> torch.dtype:
    return torch.bfloat16 if rung.optimizer.master_remainder else torch.float32


def _gathers(rung: Levers) -> bool:
    return rung.fsdp.dense_strategy == "optim_grads_params"
