"""Pipeline stages in one checkpoint: who writes what, and what all of them have together.

    save    names and groups of each stage -> one manifest; of copies the first stage's is written
    load    names and groups of each stage -> what other stages have is not missed on this rank

Names are those of the whole model, so neither knows how it was cut. One rank of each stage sends
names; without stages nothing is sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import chain

import torch.distributed as dist

from moecore.io.checkpoint.ranks import Group, gather
from moecore.io.checkpoint.snapshot import Snapshot
from moecore.io.checkpoint.state import OF_STAGES
from moecore.parallel.pipeline.stage_replicas import AllStages


@dataclass(frozen=True, slots=True)
class StagePart:
    """What a stage has, or all of them together."""

    names: frozenset[str]
    groups: list[list[str]]  # names of the parameters of each group of the optimizers
    meshes: list[dict[str, int]]  # as in `ManifestFacts`


def is_first_of_stage(stages: AllStages) -> bool:
    """Whether this rank is the one that sends for its stage."""
    return dist.get_rank() % (dist.get_world_size() // stages.pp) == 0


def whole_of(part: StagePart, stages: AllStages | None, group: Group = None) -> StagePart:
    """Return what all stages have together; collective where there are several."""
    return part if stages is None else _merge_parts(_parts(part, stages, group))


def join_stages(snapshot: Snapshot, group: Group = None) -> Snapshot:
    """Return what this rank writes, with the facts of all stages; collective with several."""
    stages, facts = snapshot.stages, snapshot.facts
    if stages is None:
        return snapshot
    prefixes = tuple(f"{kind}." for kind in OF_STAGES)
    local_part = StagePart(
        frozenset(name for name in snapshot.tensors if name.startswith(prefixes)),
        [options["params"] for options in facts.optimizer or []],
        facts.meshes,
    )
    parts = _parts(local_part, stages, group)
    earlier_names = set(chain.from_iterable(part.names for part in parts[: stages.pp_rank]))
    union = _merge_parts(parts)
    optimizer = facts.optimizer
    if optimizer is not None:
        pairs = zip(optimizer, union.groups, strict=True)
        optimizer = [{**options, "params": names} for options, names in pairs]
    return replace(
        snapshot,
        tensors={n: t for n, t in snapshot.tensors.items() if n not in earlier_names},
        facts=replace(facts, optimizer=optimizer, meshes=union.meshes),
    )


def _parts(part: StagePart, stages: AllStages, group: Group) -> list[StagePart]:
    """Return the part of each stage."""
    rank_parts = gather(part if is_first_of_stage(stages) else None, group)
    return [stage_part for stage_part in rank_parts if stage_part is not None]


def _merge_parts(parts: list[StagePart]) -> StagePart:
    # A stage with fewer groups is refused where groups are compared.
    groups = [
        list(dict.fromkeys(chain.from_iterable(p.groups[i] for p in parts if i < len(p.groups))))
        for i in range(max(len(p.groups) for p in parts))
    ]
    meshes = {json.dumps(sizes): sizes for part in parts for sizes in part.meshes}
    return StagePart(
        frozenset(chain.from_iterable(part.names for part in parts)),
        groups,
        [meshes[key] for key in sorted(meshes)],
    )
