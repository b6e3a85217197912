"""Estimator: approximate bytes and seconds of a layout, by which a search sorts layouts.

    a dry run of one node -> bytes of its activations -> estimated bytes of a rank, per layout
                          -> work of its parts        -> estimated seconds of a step, per layout

An estimate divides all bytes and all work of the node's run equally among the ranks of a layout.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import chain, combinations
from typing import NamedTuple

from moecore.base.options.fsdp import FSDPOptions
from moecore.kernels.meta import treat_meta_as
from moecore.models import DecoderConfig
from moecore.models.tp_products import GATHER_SLICES, is_slice_large_enough
from moecore.parallel.mesh import build_meshes
from moecore.parallelize import parallelize_moe
from moecore.planning.costs import CostTable
from moecore.planning.explain import list_compute_args
from moecore.planning.gpus import get_gpu
from moecore.planning.layouts import (
    Layout,
    OptionSet,
    SearchRequest,
    list_option_sets,
    make_option_set,
    make_run,
)
from moecore.planning.record import PASSES, Pass, Work
from moecore.planning.run import (
    OptimizerOptions,
    TrainingRun,
    count_state_bytes,
    enter_run_world,
    list_stages,
)
from moecore.planning.segments import MIDDLE, SampledRun
from moecore.train.memory.saved_bytes import ModelSavedBytes, count_saved_bytes

MESSAGES = 2  # messages of a layer's tokens in each pass, among the ranks of tp and of cp
BY_EXPERTS = ("collective", "grouped product")
# Planned seconds over estimated seconds, as searches assume and correct them.
MIN_RATIO = 0.85  # the smallest ratio of any layout
SPREAD = 0.95  # the smallest ratio over the ratio of another layout with the same pp and ep
LAYERS = 3  # layers with unsharded weights or gradients at once, if micro-batches all-gather them


class _Weights(NamedTuple):
    """Sizes of the dense parameters, or of the experts, that a rank unshards for computation."""

    size: float  # the number of parameters
    ranks: int  # the number of ranks that shard the parameters
    node_ranks: int  # the number of these ranks in one node
    copies: int  # 2 if a rank's shards are parts of experts and are copied; 1 if they are views


class _Seconds(NamedTuple):
    """Seconds of forwards or backwards: `network` of collectives, `compute` of other operations."""

    compute: float
    network: float


class Estimator:
    """Estimates bytes and step seconds of a search's layouts, from dry runs of one node."""

    def __init__(self, request: SearchRequest, table: CostTable) -> None:
        self._request, self._table = request, table
        self._model = model = request.planned_model
        self._params, self._experts, self._tp_params = model.count_parameters()
        self._ep = (
            1 if model.moe is None else math.gcd(model.moe.num_experts, request.ranks_per_domain)
        )
        sets = list_option_sets(request)
        self._base, self._last = sets[0], sets[-1]
        # Choices have all low-overhead options, and one subset of the medium-overhead options.
        medium = [option for option in sets[-1].options if option.overhead == "medium"]
        subsets = chain.from_iterable(combinations(medium, n) for n in range(len(medium) + 1))
        choices = (
            tuple(o for o in sets[-1].options if o.overhead == "low" or o in subset)
            for subset in subsets
        )
        self._choices = [sets[0], *(make_option_set(request, choice) for choice in choices)]
        # Planned bytes over estimated bytes by pp, on the device and on the host.
        self._byte_ratios, self._host_ratios = (
            defaultdict[int, float](lambda: 1.0) for _ in range(2)
        )
        # The smallest planned seconds over estimated seconds, by pp and ep.
        self._time_ratios = defaultdict[tuple[int, int], float](lambda: MIN_RATIO)
        self._segments = cache(
            lambda options: SampledRun.from_run(self._make_node_run(options, MIDDLE)).segments
        )
        self._part, self._share = cache(self._time_part), cache(self._time_rank_share)
        self._stage, self._parts = cache(self._time_stage), cache(self._list_stage_parts)
        self._saved_bytes = cache(self._count_saved_bytes)
        self.num_bytes, self.seconds = cache(self._estimate_bytes), cache(self._estimate_seconds)

    def compute_sort_key(self, layout: Layout) -> tuple[float, ...]:
        """Return (False, estimated seconds) for a layout that fits, or (True, estimated bytes)."""
        options = self.choose_options(layout)
        if options is None:
            return True, self.num_bytes(layout)
        return False, self._time_ratios[layout.pp, layout.ep] * self.seconds(layout, options)

    def choose_options(self, layout: Layout) -> OptionSet | None:
        """Return the fastest option set with which a layout is estimated to fit, or None."""
        byte_ratio, host_ratio = self._byte_ratios[layout.pp], self._host_ratios[layout.pp]
        fitting = (
            choice
            for choice in self._choices
            if byte_ratio * self.num_bytes(layout, choice) <= self._request.max_gpu_bytes
            and host_ratio * self.estimate_host_bytes(layout, choice)
            <= self._request.max_host_bytes
        )
        return min(fitting, key=lambda choice: self.seconds(layout, choice), default=None)

    def raise_byte_estimates(
        self, layout: Layout, options: OptionSet, planned_bytes: int, planned_host_bytes: int
    ) -> None:
        """Scale up the byte estimates of all layouts with equal pp to the bytes of a plan."""
        pp, ratio = layout.pp, planned_bytes / self.num_bytes(layout, options)
        self._byte_ratios[pp] = max(ratio, self._byte_ratios[pp])
        if planned_host_bytes:
            ratio = planned_host_bytes / self.estimate_host_bytes(layout, options)
            self._host_ratios[pp] = max(ratio, self._host_ratios[pp])

    def correct_time_estimates(self, layout: Layout, options: OptionSet, seconds: float) -> None:
        """Scale the time estimates of all layouts with equal pp and ep to a plan's `seconds`."""
        key, ratio = (layout.pp, layout.ep), seconds / self.seconds(layout, options)
        self._time_ratios[key] = min(self._time_ratios.get(key, math.inf), SPREAD * ratio)

    def _estimate_bytes(self, layout: Layout, options: OptionSet | None = None) -> float:
        """Return the largest rank's estimated bytes; `options` None = all that save memory."""
        # The sum of three parts: unsharded weights and fp32 gradients; the rank's shards of
        # weights, gradients and optimizer state; and the saved activations of a micro-batch over
        # tp * cp, times the micro-batches in flight on the first pipeline rank.
        options, num_gpus = options or self._last, self._request.num_gpus
        layers = self._model.num_layers / layout.pp
        share = min(1.0, LAYERS / layers) if _has_sharded_weights(options) else 1.0
        weights = self._list_weights(layout)
        num_weights = share * sum(weight.copies * weight.size for weight in weights)
        num_grads = share * sum(w.copies * w.size for w in weights if w.ranks > 1)
        if layout.pp > 1:  # the first or last stage has the complete embedding or head
            end = self._model.vocab_size * self._model.dim
            num_weights, num_grads = num_weights + end, num_grads + end
        # FP8 weights have two copies besides the bf16 one, unless they are gathered as FP8.
        fp8_gather = options.fsdp.fp8_param_gather
        weight_bytes = 1 if fp8_gather else 2 if options.precision is None else 3
        param_bytes = options.optimizer.param_dtype.itemsize
        state = (1 - options.optimizer.offload_fraction) * count_state_bytes(options.optimizer)
        sharded_bytes = (2 * param_bytes + state) * self._params
        saved_bytes, _ = self._saved_bytes(options)
        unsharded_bytes = weight_bytes * num_weights + 4 * num_grads
        in_flight = _compute_in_flight_over_pp(layout) * saved_bytes * _count_rank_rows(layout)
        return unsharded_bytes + sharded_bytes / num_gpus + in_flight

    def estimate_host_bytes(self, layout: Layout, options: OptionSet) -> float:
        """Return the estimated bytes of host memory that the ranks of a server pin."""
        _, offloaded_bytes = self._saved_bytes(options)
        num_gpus = self._request.num_gpus
        state = options.optimizer.offload_fraction * count_state_bytes(options.optimizer)
        rows = _compute_in_flight_over_pp(layout) * _count_rank_rows(layout)
        ranks = min(get_gpu(self._request.gpu).server, num_gpus)
        return ranks * (rows * offloaded_bytes + state * self._params / num_gpus)

    def _estimate_seconds(self, layout: Layout, options: OptionSet) -> float:
        """Return the estimated seconds of a step without clipping and the optimizer."""
        # The pipeline rank with most work runs all micro-batches, and waits while the pipeline
        # fills. All-gathers and reductions of weights and offload overlap with that work. In pairs
        # of a forward and a backward, computation overlaps with exchanges. Tokens and weights
        # share the network.
        run = make_run(self._request, layout, options)
        like, pp = self._choices[options is not self._base], layout.pp
        degrees = layout._replace(pp=1, chunks=1)
        stages = self._parts(layout._replace(ep=1, etp=1), like)
        passes = [self._stage(parts, degrees, like) for parts in stages]
        across = layout.ep * layout.etp > self._request.ranks_per_domain
        is_paired = across and layout.chunks > 1 and run.nvlink is None
        hides = self._table.pairs_hide if is_paired else 0.0
        stage_seconds = [c + network - min(c, hides * network) for c, network in passes]
        busiest = max(sum(stage_seconds[rank::pp]) for rank in range(pp))
        _, offloaded_bytes = self._saved_bytes(options)
        copy_bytes = 2 * offloaded_bytes * _count_rank_rows(layout) / layout.pp  # out and back
        busiest = max(busiest, self._time_host_copy(copy_bytes, "bfloat16"))
        if _has_sharded_weights(options):
            network = max(sum(stage.network for stage in passes[rank::pp]) for rank in range(pp))
            busiest = max(
                busiest, self._time_weight_collectives(layout, options) + across * network
            )
        # The copies of the optimizer state overlap with the first forward and the last backward.
        per_param = 2 * options.optimizer.offload_fraction * count_state_bytes(options.optimizer)
        state_bytes = per_param * self._params / self._request.num_gpus
        waits = max(0.0, self._time_host_copy(state_bytes, "uint8") - busiest)
        fills = sum(stage_seconds) * (pp - 1) / len(stage_seconds)
        if hides:  # more forwards and backwards than in other schedules run unpaired
            serial_seconds, chunks = [c + network for c, network in passes], layout.chunks
            fills = 2 * sum(serial_seconds) * (pp - 1) / len(serial_seconds)
            first = min(run.num_micro_batches, ((chunks + 1) * pp - 1) / chunks)
            fills += first * (sum(serial_seconds) - sum(stage_seconds)) / pp
        return run.num_micro_batches * busiest + fills + waits

    def _list_weights(self, layout: Layout) -> list[_Weights]:
        """Return the sizes of a rank's unsharded dense and expert parameters, in this order."""
        pp, tp, _, ep, etp, _, _ = layout
        stage, node = self._request.num_gpus // pp, self._request.ranks_per_domain
        dense = self._params - self._experts - self._tp_params + self._tp_params / tp
        weights, experts = [], ep * etp
        for size, ranks in ((dense, tp), (self._experts / experts, experts)):
            sharing = stage // ranks
            weights.append(_Weights(size / pp, sharing, max(1, min(stage, node) // ranks), 1))
        moe = self._model.moe
        if moe is not None and weights[1].ranks > moe.num_experts // ep:
            weights[1] = weights[1]._replace(copies=2)
        return weights

    def _time_weight_collectives(self, layout: Layout, options: OptionSet) -> float:
        """Return the seconds of a micro-batch's two weight all-gathers and gradient reduction."""
        seconds, width = 0.0, 2 * (1 if options.fsdp.fp8_param_gather else 2) + 4
        for size, ranks, node_ranks, _ in self._list_weights(layout):
            num_bytes = round(2 * width * size * (ranks - 1) / ranks)
            gather = Work("all_gather", "collective", 0, num_bytes, (ranks,), "bfloat16")
            seconds += self._table.seconds(gather, node_ranks) if ranks > 1 else 0
        return seconds

    def _time_host_copy(self, num_bytes: float, dtype: str) -> float:
        """Return the seconds of a copy of `num_bytes` to the host, as measured with this dtype."""
        copy = Work("copy to host", "copy", 0, round(num_bytes), (), dtype)
        return self._table.seconds(copy) if copy.num_bytes else 0.0

    def _list_stage_parts(
        self, layout: Layout, options: OptionSet
    ) -> list[tuple[tuple[str, Pass], ...]]:
        """Return by stage the (part, forward or backward) pairs, such as ("layer 3", "F")."""
        segments = self._segments(options)
        stages = list_stages(make_run(self._request, layout, options))
        pairs = [
            [(p, x) for x in PASSES for p in segments.list_recorded_modules(s, x)] for s in stages
        ]
        return list(map(tuple, pairs))

    def _time_stage(
        self, parts: Iterable[tuple[str, Pass]], layout: Layout, options: OptionSet
    ) -> _Seconds:
        """Return the seconds of a micro-batch in a stage with these (part, pass) pairs."""
        seconds = [self._part(*part, layout, options) for part in parts]
        return _Seconds(*map(sum, zip(*seconds, strict=True)))

    def _time_part(
        self, part: str, direction: Pass, layout: Layout, options: OptionSet
    ) -> _Seconds:
        """Return the seconds of a forward or backward of a model part such as "layer 3"."""
        segments = self._segments(options)
        expert_ranks = layout.ep * layout.etp
        rows = Fraction(layout.batch_size, layout.tp * layout.cp)
        compute, network = list[float](), list[float]()
        for segment in segments.list_part_segments(part, direction, MIDDLE // 2):
            for launch in (segments.queued[i] for i in segment.launches):
                work = launch.work
                seconds = self._share(work, rows, expert_ranks * (work.kind in BY_EXPERTS))
                if seconds is not None:
                    seconds_of_kind = network if work.kind == "collective" else compute
                    seconds_of_kind.append(launch.times * seconds)
        if part.startswith(("layer", "predictions")):
            network += self._time_tp_cp_collectives(layout, options)
        # If the host launches more slowly than the device computes, the host's time counts.
        host = (len(compute) + len(network)) * self._table.host_seconds
        return _Seconds(max(host - sum(network), sum(compute)), sum(network))

    def _time_rank_share(self, work: Work, rank_rows: Fraction, expert_ranks: int) -> float | None:
        """Return a rank's seconds of a node's `work` on one row; None = the rank has no share."""
        # `rows` of a micro-batch per rank are below 1 if several ranks share a row.
        shape = work.shape
        if work.kind == "collective":
            if expert_ranks == 1:
                return None
            shape = (expert_ranks,)
        elif work.kind == "grouped product":
            e, R, N, K = shape
            shape = (max(1, round(e * self._ep / expert_ranks)), int(R * rank_rows), N, K)
        elif shape:
            shape = (max(1, int(shape[0] * rank_rows)), *shape[1:])
        num_bytes = max(1, int(work.num_bytes * rank_rows))
        share = replace(work, shape=shape, flops=int(work.flops * rank_rows), num_bytes=num_bytes)
        node_ranks = min(self._request.ranks_per_domain, *shape) if work.kind == "collective" else 0
        return self._table.seconds(share, node_ranks)

    def _time_tp_cp_collectives(self, layout: Layout, options: OptionSet) -> Iterator[float]:
        """Yield the seconds of each tp, then of each cp collective of a layer's pass."""
        request, tp = self._request, "all_gather"
        slice_bytes = 2 * self._model.dim * request.seq_len // (layout.tp * layout.cp)
        is_plain = isinstance(request.model, DecoderConfig) and options.precision is None
        if is_plain and is_slice_large_enough(slice_bytes) and request.num_peers % layout.tp == 0:
            tp = GATHER_SLICES
        for name, ranks in ((tp, layout.tp), ("all_gather", layout.cp)):
            num_bytes = 2 * layout.batch_size * slice_bytes * (ranks - 1)
            message = Work(name, "collective", 0, num_bytes, (ranks,), "bfloat16")
            if ranks > 1:
                node_ranks = min(ranks, request.ranks_per_domain)
                yield from MESSAGES * [self._table.seconds(message, node_ranks)]

    def _count_saved_bytes(self, options: OptionSet) -> tuple[int, int]:
        """Return the bytes that a micro-batch saves for backward: on the device, on the host."""
        small, like = SampledRun.from_run(self._make_node_run(options, 1))
        fsdp = FSDPOptions(param_dtype=options.fsdp.param_dtype)  # sharding saves no activations
        counts = count_saved_bytes_by_block(replace(small, optimizer=OptimizerOptions(), fsdp=fsdp))
        blocks = [counts.blocks[i] for i in like["F"]]
        blocks += counts.blocks[small.planned_model.num_layers :]
        offloaded_bytes = sum(sum(block.host.values()) for block in blocks)
        return sum(block.num_bytes for block in (*blocks, counts.outside)), offloaded_bytes

    def _make_node_run(self, options: OptionSet, num_micro_batches: int) -> TrainingRun:
        """Return the request's run on one node's ep ranks, with micro-batches of one sequence."""
        rows = num_micro_batches * self._ep
        request = replace(self._request, num_gpus=self._ep, global_batch=rows, nvlink=None)
        return make_run(request, Layout(ep=self._ep), options)


@lru_cache(maxsize=256)
def count_saved_bytes_by_block(run: TrainingRun) -> ModelSavedBytes:
    """Return the bytes that each block saves for backward per micro-batch, without a dry run."""
    model = run.planned_model.build(run.dtype)
    run.planned_model.merge_loss_chunks(model, run.batch_size * run.seq_len)
    inputs = run.planned_model.make_inputs(run.make_tokens())
    with enter_run_world(run), treat_meta_as("cuda"):
        meshes = build_meshes(run.parallel, "cpu")
        parallelize_moe(model, meshes, dispatch="alltoall", precision=run.precision, fsdp=run.fsdp)
        parts = run.planned_model.collect_parts(model)
        return count_saved_bytes(
            model,
            [*parts.layers, *parts.mtp],
            lambda copy: copy(**inputs),
            options=run.memory,
            **list_compute_args(model) | {"device_type": "cuda"},
        )


def _count_rank_rows(layout: Layout) -> float:
    """Return the rows of a micro-batch per rank: batch_size / (tp * cp)."""
    return layout.batch_size / (layout.tp * layout.cp)


def _compute_in_flight_over_pp(layout: Layout) -> float:
    """Return the micro-batches in flight on the first pipeline rank, divided by pp."""
    return 1 + 1 / layout.chunks if layout.chunks > 1 else 1


def _has_sharded_weights(options: OptionSet) -> bool:
    """Return whether each micro-batch all-gathers the dense weights."""
    return options.fsdp.dense_strategy == "optim_grads_params"
