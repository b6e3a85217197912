"""The peak memory of each pipeline rank of a run, by kind.

    ShardPlan of each pipeline rank           -> resident bytes between steps, by kind
    dry run of few layers -> Segments by kind -> allocated bytes in the order of the rank's schedule

A dry run counts temporary memory of operations. It does not count fragmentation of the allocator
and NCCL's buffers. No rank of a pipeline stage needs more memory than its first rank.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moecore.base.fields import check_arguments
from moecore.base.text import format_bytes, format_columns
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.offload import find_next_backwards, list_last_block_offloads
from moecore.parallel.pipeline.orders import Action, Item, list_actions
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.planning.gpus import Gpu
from moecore.planning.record import HOST_COPIES, PASSES, RESIDENT, Pass
from moecore.planning.run import (
    TrainingRun,
    count_optimizer_bytes,
    count_resident_bytes,
    count_state_bytes,
    fake_world,
    list_rank_bytes,
    list_rank_stages,
    list_stages,
)
from moecore.planning.segments import (
    MIDDLE,
    SampledRun,
    Segment,
    Segments,
    make_segments,
    map_micro_batches,
)

ENDS = ("embedding", "head")  # modules of a stage that are no blocks


class _Pass(NamedTuple):
    """A forward or backward of one micro-batch through a pipeline stage, in segments."""

    stage: int
    direction: Pass
    segments: list[Segment]


class _Peak(NamedTuple):
    """The peak bytes in a segment of a rank's step, and the optimizer state then on the host."""

    num_bytes: int
    offloaded_state: int
    passed: int  # passes of the pipeline rank before the segment's pass
    at: int  # segments of the same pass before it
    segment: Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankStep:
    """A pipeline rank's step: stored bytes, passes, and `end` (gradient clipping and AdamW)."""

    resident: Mapping[str, int]
    passes: Sequence[_Pass]
    end: Segment
    offloaded_state: int  # bytes that are on the host between the first pass and the last one
    host: Mapping[str, int]  # bytes that are always on the host, by kind

    def iterate_peaks(self) -> Iterator[_Peak]:
        """Yield the peak bytes of each segment, from one module's pass to the next, in order."""
        level, offloaded, last = sum(self.resident.values()), 0, len(self.passes) - 1
        for number, (_, _, segments) in enumerate(self.passes):
            share = self.offloaded_state // max(1, len(segments))
            for at, segment in enumerate(segments):
                offloaded -= share * (number == last)
                yield _Peak(level - offloaded + segment.peak, offloaded, number, at, segment)
                level += segment.net
                offloaded += share * (number == 0)
        yield _Peak(level - offloaded + self.end.peak, offloaded, last + 1, 0, self.end)

    def find_peak(self) -> _Peak:
        """Return the largest of the segments' peaks."""
        return max(self.iterate_peaks(), key=lambda peak: peak.num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The memory of one rank at its peak, in bytes by kind.

    Activations are listed by part of the model. Temporary memory is listed by the pass (forward,
    backward, optimizer) that allocates it.
    """

    pp_rank: int
    stages: tuple[str, ...]  # letters of its stages in a pipeline layout; ("all",) = no pipeline
    device: Mapping[str, int]  # on the GPU: stored tensors and the step's allocations
    host: Mapping[str, int]  # peak of host memory: offloaded activations, weights and state
    in_flight: tuple[int, ...]  # by stage: micro-batches from forward to the end of backward

    @property
    def num_bytes(self) -> int:
        """The bytes in the GPU's memory at the peak, the sum over all kinds."""
        return sum(self.device.values())

    @property
    def activations(self) -> int:
        """The bytes that forwards have saved for backward."""
        return sum(n for kind, n in self.device.items() if kind.startswith("activations"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of all pipeline ranks of a run, each at its peak."""

    run: TrainingRun
    ranks: tuple[RankMemory, ...]

    @property
    def largest(self) -> RankMemory:
        """The rank with the largest peak in GPU memory."""
        return max(self.ranks, key=lambda rank: rank.num_bytes)

    def count_pinned_bytes(self, gpu: Gpu) -> int:
        """Return a server's pinned host bytes, if all ranks pin the bytes of the largest rank."""
        ranks = min(gpu.server, self.run.num_gpus)
        return ranks * max(sum(rank.host.values()) for rank in self.ranks)

    def table(self) -> str:
        """Return a text table with a row per kind and a column per pipeline rank."""
        kinds = dict.fromkeys(kind for rank in self.ranks for kind in rank.device)
        hosts = dict.fromkeys(kind for rank in self.ranks for kind in rank.host)
        rows: list[tuple[str, list[str]]] = [
            ("pp rank", [str(rank.pp_rank) for rank in self.ranks]),
            ("stages", [" ".join(rank.stages) for rank in self.ranks]),
            ("in flight", [" ".join(map(str, rank.in_flight)) for rank in self.ranks]),
            *((kind, [format_bytes(r.device.get(kind, 0)) for r in self.ranks]) for kind in kinds),
            ("at once", [format_bytes(rank.num_bytes) for rank in self.ranks]),
        ]
        for kind in hosts:
            rows.append((f"host: {kind}", [format_bytes(r.host.get(kind, 0)) for r in self.ranks]))
        return "\n".join(format_columns([(name, *cells) for name, cells in rows]))


def plan_peak_memory(run: TrainingRun) -> tuple[int, ...]:
    """Return each pipeline rank's peak bytes, as `torch.cuda.max_memory_allocated` counts them.

    The buffers of dispatcher "nvlink" are added, because torch's allocator does not count them.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for unsupported options.
    """
    check_arguments(plan_peak_memory, locals())
    return tuple(rank.find_peak().num_bytes for rank in _make_rank_steps(run))


def plan_memory(run: TrainingRun) -> MemoryPlan:
    """Return the memory of each pipeline rank at its peak, by kind. No GPU, no communication.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for unsupported options.
    """
    check_arguments(plan_memory, locals())
    with fake_world(1):
        pass  # refuses a call inside another fake world, even if all dry runs are cached
    segments = make_segments(run)
    pairs = enumerate(zip(_make_rank_steps(run), list_rank_stages(run), strict=True))
    ranks = [_make_rank_memory(run, i, rank, stages, segments) for i, (rank, stages) in pairs]
    return MemoryPlan(run=run, ranks=tuple(ranks))


def _make_rank_memory(
    run: TrainingRun, pp_rank: int, step: _RankStep, stages: Sequence[Stage], segments: Segments
) -> RankMemory:
    """Return the bytes by kind, at its peak, of a pipeline rank that has `stages`."""
    peak = step.find_peak()
    device, in_flight = Counter(step.resident), Counter[int]()
    for number, (stage, direction, passed) in enumerate(step.passes[: peak.passed + 1]):
        is_last = number == peak.passed
        for segment in passed[: peak.at] if is_last else passed:
            device.update(segment.net_kinds)
        in_flight[stage] += 1 if direction == "F" else -(not is_last)
    device.update(peak.segment.peak_kinds)
    device["optimizer state"] -= peak.offloaded_state
    device["other"] += device.pop(RESIDENT, 0)
    device["other"] += peak.num_bytes - sum(device.values())
    host_level, host_peak, copies = 0, 0, dict[int, int]()  # of offloaded activations
    for stage, direction, passed in step.passes:
        if direction == "F":
            works = (segments.queued[i].work for segment in passed for i in segment.launches)
            copies[stage] = sum(work.num_bytes for work in works if work.name == HOST_COPIES[0])
        host_level += copies[stage] if direction == "F" else -copies[stage]
        host_peak = max(host_peak, host_level)
    host = {"activations": host_peak, "optimizer state": step.offloaded_state, **step.host}
    return RankMemory(
        pp_rank=pp_rank,
        stages=("all",) if run.pipeline is None else tuple(stage.letters for stage in stages),
        device=_remove_negative_bytes(device, step.resident.keys() - {"other"}),
        host={kind: n for kind, n in host.items() if n},
        in_flight=tuple(in_flight[stage.index] for stage in stages),
    )


def _remove_negative_bytes(
    bytes_by_kind: Mapping[str, int], resident_kinds: Collection[str]
) -> dict[str, int]:
    """Return `bytes_by_kind` without its negative values, and with the same sum."""
    # A tensor that is allocated once per step may be freed in a layer that stands for several
    # layers, so that its kind becomes negative. These bytes are subtracted from the largest kinds,
    # and from stored kinds last.
    positive = {kind: n for kind, n in bytes_by_kind.items() if n > 0}
    excess = sum(positive.values()) - sum(bytes_by_kind.values())
    for kind in sorted(positive, key=lambda kind: (kind in resident_kinds, -positive[kind])):
        deduction = min(excess, positive[kind])
        positive[kind], excess = positive[kind] - deduction, excess - deduction
    return {kind: n for kind, n in positive.items() if n}


def count_steady_micro_batches(run: TrainingRun) -> int:
    """Return how many micro-batches a dry run needs to reach the peak memory of the full step."""
    # The middle rounds of a pipeline are identical. A run without stages has rounds of one
    # micro-batch. Schedule "gpipe" keeps the activations of all micro-batches.
    number, pp = run.num_micro_batches, run.resolved.pp
    if run.pipeline is not None and run.pipeline.schedule == "gpipe":
        return number
    return min(number, 4 * pp + number % pp)


def _make_rank_steps(run: TrainingRun) -> Iterator[_RankStep]:
    """Yield the `_RankStep` of each pipeline rank, from the dry run of a run of few layers."""
    small, model = SampledRun.from_run(run), run.planned_model
    step, segments = small.recorded_step, small.memory_segments
    sizes = list_rank_bytes(small.run)
    rank_bytes = (sum(count_resident_bytes(small.run, size).values()) for size in sizes)
    # Resident bytes besides stored tensors. Pages are counted for each layer.
    other = segments.resident_bytes - max(rank_bytes) - step.pages
    pages_per_run = step.pages / max(1, small.run.planned_model.num_moe_runs)
    per_element = run.optimizer.offload_fraction * count_state_bytes(run.optimizer)
    passes_of_ranks = _order_passes(run, small, segments)
    ranks = zip(list_rank_bytes(run), passes_of_ranks, list_rank_stages(run), strict=True)
    for size, passes, stages in ranks:
        moe_runs = sum(i not in model.dense for stage in stages for i in stage.layers)
        moe_runs += model.mtp_runs * sum(len(stage.mtp) for stage in stages)
        resident = count_resident_bytes(run, size)
        host = {"frozen experts": size.host}
        if run.memory.offload_params:
            host = {"parameters": size.host, "gradients": size.gradients}
            host["optimizer state"] = count_optimizer_bytes(run, size)
        resident |= {"other": other, "pages": round(pages_per_run * moe_runs)}
        yield _RankStep(
            resident=resident | {"exchange buffers": step.buffers},
            passes=passes,
            end=segments.end,
            offloaded_state=round(per_element / run.dtype.itemsize * size.gradients),
            host=host,
        )


def _order_passes(
    run: TrainingRun, sampled_run: SampledRun, segments: Segments
) -> Iterator[list[_Pass]]:
    """Yield each pipeline rank's forwards and backwards of `run`, in the order of execution."""
    stages, n, pp = list_stages(run), count_steady_micro_batches(run), run.resolved.pp
    like = map_micro_batches(n, segments.num_micro_batches)
    orders: Sequence[Sequence[Item]] = [[Action(kind, 0, i) for i in range(n) for kind in PASSES]]
    if run.pipeline is not None:
        name, chunks = run.pipeline.schedule, len(stages) // pp
        orders = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=n).orders
    sums = list_rank_bytes(sampled_run.run)[0].accumulated
    passes: dict[str, tuple[Pass, ...]] = {"F": ("F",), "B": ("B",), "W": ("B",)}  # D and W are B
    for order, size in zip(orders, list_rank_bytes(run), strict=True):
        rank_stages = {action.stage for item in order for action in list_actions(item)}
        ends = {i for i in rank_stages if stages[i].embedding or stages[i].loss} or rank_stages
        share = (size.accumulated / sums if sums else 1 / pp) / len(ends)
        rank_passes, changes = list[_Pass](), list[Segment]()
        for item, last_blocks in zip(order, _list_last_block_copies(order), strict=True):
            for stage, sign in last_blocks:
                changes.append(_move_blocks(stages[stage], slice(-1, None), sign, segments))
            for kind, stage, i in list_actions(item):
                if kind in "DW":  # W reads most of the tensors that D has copied back
                    before, sign = slice(-1), 1 if kind == "D" else -1
                    changes.append(_move_blocks(stages[stage], before, sign, segments))
                for direction in passes.get(kind, ()):
                    stage_segments = _correct_stage_segments(
                        stages[stage], direction, like[i], segments, share * (stage in ends)
                    )
                    rank_passes.append(_Pass(stage, direction, changes + stage_segments))
                    changes = []
        yield rank_passes


def _list_last_block_copies(order: Sequence[Item]) -> Iterator[list[tuple[int, int]]]:
    """Yield the changes of device memory before each item by last blocks: (stage, 1 or -1).

    A pipeline frees the offloaded tensors of a forward's last block after the next item (-1). It
    copies them back before the item before the backward (1). See `parallel.pipeline.run`.
    """
    on_host, changes = set[tuple[int, int]](), list[tuple[int, int]]()
    forward: tuple[int, int] | None = None  # of the item before, if its last block is offloaded
    pairs = zip(find_next_backwards(order), list_last_block_offloads(order), strict=True)
    for item, (backward, offloads) in zip(order, pairs, strict=True):
        if backward is not None and backward[1:] in on_host:
            on_host.remove(backward[1:])
            changes.append((backward.stage, 1))
        yield changes
        changes = []
        if forward is not None:
            on_host.add(forward)
            changes.append((forward[0], -1))
        forward = list_actions(item)[0][1:] if offloads else None


def _make_change(bytes_by_kind: Mapping[str, int], sign: int) -> Segment:
    """Return a segment without launches that allocates (`sign` 1) or frees (-1) these bytes."""
    net_kinds = {kind: sign * n for kind, n in bytes_by_kind.items()}
    net = sum(net_kinds.values())
    return Segment(range(0), net, max(0, net), net_kinds, net_kinds if net > 0 else {})


def _move_blocks(stage: Stage, blocks: slice, sign: int, segments: Segments) -> Segment:
    """Return the segment that copies offloads of a stage's blocks back (1) or frees them (-1)."""
    names = [part for part in segments.list_recorded_modules(stage, "F") if part not in ENDS]
    bytes_by_kind = Counter[str]()
    for name in names[blocks]:
        bytes_by_kind.update(segments.offloads.get(name, {}))
    return _make_change(bytes_by_kind, sign)


def _list_stage_segments(
    stage: Stage, direction: Pass, micro_batch_idx: int, segments: Segments
) -> list[Segment]:
    """Return the recorded segments of a stage's pass, with the offloads of its own blocks.

    A block's forward frees the offloaded tensors of the block before it, and its backward copies
    them back. If a sampled block represents a block after another kind of block, or the first block
    of a stage, the bytes differ.
    """
    if not any(segments.offloads.values()):
        return segments.list_stage_segments(stage, direction, micro_batch_idx)
    blocks = ["", *(part for part in segments.offloads if part not in ENDS)]
    parts, before = segments.list_recorded_modules(stage, direction), ""
    groups = list[list[Segment]]()
    for part in parts if direction == "F" else parts[::-1]:
        group = [*segments.list_part_segments(part, direction, micro_batch_idx)]
        if part not in ENDS:
            change = Counter(segments.offloads.get(blocks[blocks.index(part) - 1], {}))
            change.subtract(segments.offloads.get(before, {}))
            if direction == "F":
                group.insert(0, _make_change(change, 1))
            else:
                group.append(_make_change(change, -1))
            before = part
        groups.append(group)
    return [segment for group in groups[:: 1 if direction == "F" else -1] for segment in group]


def _correct_stage_segments(
    stage: Stage, direction: Pass, micro_batch_idx: int, segments: Segments, gradient_share: float
) -> list[Segment]:
    """Return the segments of a stage's pass, with the gradient bytes that the stage keeps or frees.

    `micro_batch_idx` is an index of the dry run. `gradient_share`, 0 to 1, is the stage's fraction
    of the gradient bytes that the dry run counts in embedding and head. Only a backward is changed.
    """
    stage_segments = _list_stage_segments(stage, direction, micro_batch_idx, segments)
    if direction == "F" or segments.num_micro_batches < MIDDLE:
        return stage_segments
    # In the recorded step, the segment of the embedding frees or keeps the gradients of all layers
    # at the end of a backward. A middle micro-batch keeps nothing. Another one keeps the difference
    # of its segments to those of the middle one, and of the ends' difference the share.
    layers = replace(stage, embedding=False, loss=False)
    ends = replace(stage, embedding=True, layers=(), mtp=(), loss=True)
    net_bytes = 0.0
    for part, part_share in ((layers, 1.0), (ends, gradient_share)):
        net, middle = (_sum_net_bytes(part, i, segments) for i in (micro_batch_idx, MIDDLE // 2))
        net_bytes += part_share * (net - middle)
    surplus = round(net_bytes) - _sum_net_bytes(stage, micro_batch_idx, segments)
    *first, last = stage_segments or [Segment(range(0), 0, 0, {}, {})]
    peak, kinds = max(0, last.peak + min(0, surplus)), dict(last.net_kinds)
    kinds["backward"] = kinds.get("backward", 0) + surplus
    return [*first, last._replace(net=last.net + surplus, peak=peak, net_kinds=kinds)]


def _sum_net_bytes(stage: Stage, micro_batch_idx: int, segments: Segments) -> int:
    """Return the allocated minus freed bytes of a stage's forward and backward of a micro-batch."""
    return sum(
        s.net
        for direction in PASSES
        for s in _list_stage_segments(stage, direction, micro_batch_idx, segments)
    )
