"""A model takes its place among pipeline stages: cut before it is sharded, connected behind."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from moecore.parallel.across import make_all_stages
from moecore.parallel.attached import Attached
from moecore.parallel.checks import check_stages
from moecore.parallel.pipeline.layout import PipelineLayout, Stage
from moecore.parallel.pipeline.run import Pipeline
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.pipeline.stages import blocks_of, num_parts, take_stages
from moecore.parallel.pipeline.transport import connect
from moecore.parallel.request import Request


def cut_stages(model: nn.Module, request: Request) -> tuple[PipelineLayout | None, Sequence[Stage]]:
    """Leave this rank's stages of a model; return those of all ranks, None without stages."""
    pp = request.meshes.parallel.pp
    if pp == 1 or request.pipeline is None:
        return None, ()
    staged = request.family.staged(model)
    layout = request.pipeline.stages(pp, *num_parts(staged))
    check_stages(len(layout.stages), request)
    how = dict(pp=pp, chunks=layout.chunks(pp), num_micro_batches=1)
    rank_of = make_schedule(request.pipeline.schedule, **how).rank_of
    own = [s for s in layout.stages if rank_of[s.index] == request.meshes.pp_rank]
    take_stages(staged, own)
    return layout, own


def apply_pipeline(model: nn.Module, found: Attached) -> None:
    """Give a model its place among the stages, and what it shares with them. Collective."""
    request, meshes = found.request, found.request.meshes
    if found.layout is None:
        return
    assert request.pipeline is not None and meshes.pipeline_groups is not None
    pipeline = found.pipeline = Pipeline(
        model=request.family.staged(model),
        config=request.pipeline,
        layout=found.layout,
        rank=meshes.pp_rank,
        groups=meshes.pipeline_groups,
        dtype=request.fsdp.param_dtype or found.dtype,
        device=meshes.device,
        offload=found.offload,
    )
    connect(pipeline.groups, pipeline.schedule(1).rank_of, pipeline.rank, pipeline.device)
    found.all_stages = make_all_stages(model, meshes)


def chunks_of(
    model: nn.Module, blocks: Sequence[nn.Module], found: Attached
) -> dict[int, list[nn.Module]] | None:
    """Return the blocks that one forward runs, by stage; None = all."""
    if found.layout is None:
        return None
    return blocks_of(found.request.family.staged(model), blocks, found.stages)
