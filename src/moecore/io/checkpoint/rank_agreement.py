"""Check, before a save writes, that ranks agree on values that only one rank will write.

Without the check, one rank's step count or learning rate would silently become the value of all
ranks. Three kinds of state are not compared: shards of DTensors, generator states, which each rank
writes, and the config, which rank 0 writes and which may name a rank or a host.

Ranks of one pipeline stage must agree on all values. Ranks of different stages must agree on values
that both ranks have, except the parameter names of optimizer groups.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.failures import run_and_share_errors
from moecore.base.fields import format_name
from moecore.base.rank_checks import Group, gather_objects
from moecore.io.checkpoint.shard_file import get_memory_view
from moecore.io.checkpoint.snapshot import Snapshot
from moecore.io.checkpoint.state import STAGE_KINDS

# Hashed bytes of a plain tensor of model or optimizer. Replicas that differ do so in all elements.
HASHED_BYTES = 1 << 16
FIXES = {
    "extra": "gather what each rank has into one value",
    "model": "make it equal, or a buffer with persistent=False",
    "optimizer": "step on every rank with a gradient, zeros where it has none",
    "amax": "end each step on all ranks, by TrainStep.finish()",
    "param_groups": "set it on all ranks alike",
    "scheduler": "step it on all ranks alike, such as with a loss that was reduced",
    "save": "call it with the same arguments on every rank",
}


Key = tuple[str, str]  # kind of `FIXES`, name
Hashes = dict[Key, str]


def check_rank_agreement(snapshot: Snapshot, group: Group = None) -> None:
    """Raise ValueError on every rank for the first value that ranks disagree on. Collective."""
    if not dist.is_initialized():
        return
    local_hashes = run_and_share_errors(lambda: _hash_snapshot(snapshot), group)
    digests = gather_objects(_hash_json(local_hashes), group)
    if len(set(digests)) == 1:
        return
    size = len(digests) // (1 if snapshot.stages is None else snapshot.stages.pp)
    firsts = range(0, len(digests), size)
    if all(digest == digests[i // size * size] for i, digest in enumerate(digests)):
        hashes = gather_objects(local_hashes if dist.get_rank() % size == 0 else {}, group)
        _check_stage_agreement([(rank, hashes[rank]) for rank in firsts])
        return
    hashes = gather_objects(local_hashes, group)
    for first in firsts:
        for rank in range(first, first + size):
            for key in hashes[first] | hashes[rank]:
                if hashes[first].get(key) != hashes[rank].get(key):
                    is_present = key in hashes[first] and key in hashes[rank]
                    _raise_disagreement(key, first, rank, is_present=is_present)


def _check_stage_agreement(hashes: list[tuple[int, Hashes]]) -> None:
    """Raise ValueError if the hashes of the first ranks of pipeline stages disagree."""
    seen: dict[Key, tuple[int, str]] = {}
    for rank, rank_hashes in hashes:
        for key, value in rank_hashes.items():
            first, first_value = seen.setdefault(key, (rank, value))
            differs_by_stage = key[0] == "param_groups" and key[1].endswith("['params']")
            if value != first_value and not differs_by_stage:
                _raise_disagreement(key, first, rank, is_present=True)
    first = hashes[0][0]
    for rank, rank_hashes in hashes:
        for key in seen:
            if key not in rank_hashes and key[0] not in STAGE_KINDS:
                at = seen[key][0]
                _raise_disagreement(key, at if at != rank else first, rank, is_present=False)


def _raise_disagreement(key: Key, first_rank: int, rank: int, *, is_present: bool) -> None:
    """Raise ValueError that the value `key` of two ranks differs, or that only one rank has it."""
    kind, name = key
    wrong = f"of rank {rank} must equal that of rank {first_rank}, because only one is kept"
    if not is_present:
        wrong = f"must be on every rank, but is on only one of rank {first_rank} and rank {rank}"
    raise ValueError(f"{format_name(name)} {wrong}: {FIXES[kind]}")


def _hash_snapshot(snapshot: Snapshot) -> Hashes:
    """Return (kind, name) -> text of each value and tensor that ranks must agree on. Host sync."""
    facts = snapshot.facts
    values: dict[Key, Any] = {
        ("save", "step"): facts.step,
        ("save", "optimizer"): facts.optimizer_class,
    }
    for i, options in enumerate(facts.optimizer or []):
        for name, value in options.items():
            values["param_groups", f"optimizer.param_groups[{i}][{name!r}]"] = value
    for name, value in (facts.scheduler or {}).items():
        values["scheduler", f"scheduler {name}"] = value
    for name, value in facts.extra.items():
        values["extra", f"extra {name}"] = value
    hashes = {key: _hash_json(value) for key, value in values.items()}
    parts: dict[Key, Tensor] = {}  # bytes to hash
    for name, tensor in snapshot.tensors.items():
        kind = name.partition(".")[0]
        if kind == "rng":
            continue
        key = (kind, name.replace("extra.", "extra ", 1) if kind == "extra" else name)
        hashes[key] = f"{tensor.dtype} {tuple(tensor.shape)}"
        if not isinstance(tensor, DTensor):  # each rank writes its shard
            flat = tensor.detach().reshape(-1)
            if kind != "extra":
                flat = flat[: HASHED_BYTES // tensor.dtype.itemsize]
            if flat.stride(0) != 1:  # such as of an expanded tensor
                flat = flat.clone(memory_format=torch.contiguous_format)
            parts[key] = flat.view(torch.uint8)
    for key, part in _copy_to_host(parts).items():
        hashes[key] += " " + hashlib.sha256(get_memory_view(part)).hexdigest()
    return hashes


def _copy_to_host(tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """Copy uint8 tensors to the host with one host sync per device."""
    host_parts = {key: part for key, part in tensors.items() if part.device.type == "cpu"}
    for device in {part.device for part in tensors.values()} - {torch.device("cpu")}:
        group = {key: part for key, part in tensors.items() if part.device == device}
        flat = torch.cat(list(group.values())).cpu()
        host_parts |= zip(group, flat.split([len(part) for part in group.values()]), strict=True)
    return host_parts


def _hash_json(value: Any) -> str:
    """Return the hex SHA-256 of a JSON value; equal dicts in another order have equal digests."""
    if isinstance(value, dict):
        value = sorted([str(key), entry] for key, entry in value.items())
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
