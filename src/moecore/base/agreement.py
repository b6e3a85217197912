"""What must be equal on every rank, compared before anything is sharded.

Ranks that differ would otherwise mix shards, compute other gradients in silence, or issue other
collectives and wait for each other. An entry costs 16 bytes of one all-reduce, whatever its value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import shown
from moecore.base.torch_names import tree_map_only

Group = dist.ProcessGroup | None  # None = all ranks
T = TypeVar("T")
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)  # as numbers in notes


def check_same(entries: Mapping[str, Any], device_type: str, *, group: Group = None) -> None:
    """Raise on every rank of the group when an entry is not the same on all. A host sync."""
    # Collective. Entries are equal where their `repr` is; every rank must bring the same names in
    # the same order. A mapping among the values is opened to name what in it differs: an entry
    # before it must have compared its keys.
    problem = difference(entries, device_type, group=group)
    if problem is not None:
        problem += f" on every rank{_of_stage(group)}: build the model and call moecore alike "
        problem += "everywhere"
    raise_on_all(problem, device_type, group=group)


def difference(entries: Mapping[str, Any], device_type: str, *, group: Group = None) -> str | None:
    """Return an error's beginning for entries that differ, else None: `check_same`."""
    # Collective over `group` alone, a host sync.
    names = _differing(entries, device_type, group)
    if not names:
        return None
    name, more = names[0], len(names) - 1
    value = entries[name]
    if isinstance(value, Mapping):
        inner = _differing(value, device_type, group)
        name, value, more = f"{name} of {inner[0]}", value[inner[0]], more + len(inner) - 1
    others = f" and {more} more" if more else ""
    return f"{name} ({shown(value)} on rank {dist.get_rank()}){others} must be the same"


def check_notes(
    what: str,
    notes: Sequence[Sequence[int]],
    shown: Mapping[str, Callable[[int], str]],
    group: dist.ProcessGroup,
) -> None:
    """Raise when ranks of a group differ in notes: of each rank a number per entry of `shown`."""
    for (name, show), values in zip(shown.items(), zip(*notes, strict=True), strict=True):
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"{name} in {what} ({show(values[0])} on rank {ranks[0]}, {show(values[other])} on "
                f"rank {ranks[other]}) must be the same on all ranks that share it: give every "
                "rank the same forwards, modes, trained parameters and micro-batches"
            )


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as entries, by "Class.field"."""
    cls = type(record).__name__
    return {f"{cls}.{field.name}": getattr(record, field.name) for field in fields(record)}


def trained_entries(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return what of a training must be the same on the ranks that share parameters."""
    params = dict(model.named_parameters())
    names = {param: name for name, param in params.items()}
    options: dict[str, Any] = {}
    for place, one in enumerate(optimizers):
        prefix = f"optimizer {place}" if len(optimizers) > 1 else "optimizer"
        own: Callable[[], dict[str, Any]] = getattr(one, "own_options", dict)
        options |= {f"{prefix}.{key}": value for key, value in own().items()}
        for number, group in enumerate(one.param_groups):
            plain = {**group, "params": [names.get(p) for p in group["params"]]}
            plain = tree_map_only(object, comparable, plain)
            options |= {f"{prefix}.param_groups[{number}].{k}": v for k, v in plain.items()}
    return {
        "names of parameters": list(params),
        "requires_grad": {name: param.requires_grad for name, param in params.items()},
        "classes of optimizers": [type(one).__name__ for one in optimizers],
        "names of optimizers' options": list(options),
        "value": options,
    }


def optimizer_entries(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what of optimizers must be the same on all stages, whose groups may differ."""
    found: dict[str, Any] = {"classes of optimizers": [type(o).__name__ for o in optimizers]}
    for place, one in enumerate(optimizers):
        prefix = f"optimizer {place}" if len(optimizers) > 1 else "optimizer"
        defaults = {name: comparable(value) for name, value in one.defaults.items()}
        found[f"defaults of {prefix}"] = sorted(defaults.items())
    return found


def comparable(leaf: Any) -> Any:
    """Return what ranks can have in common of a value: no address; of tensors a checksum."""
    if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta:
        if leaf.numel() == 1:
            return leaf.tolist()
        return f"{leaf.dtype} {tuple(leaf.shape)}, checksum {checksum(leaf).item()}"
    is_plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
    return leaf if is_plain else type(leaf).__name__


@torch.no_grad()
def check_equal_weights(
    tensors: Mapping[str, Tensor], device_type: str, *, group: Group = None
) -> None:
    """Raise on every rank when real weights differ: they would be mixed shard by shard."""
    # Of what is cut over tp already every rank holds another part.
    whole = {n: t for n, t in tensors.items() if not isinstance(t, DTensor)}
    different, problem = differing_tensors(whole, device_type, group=group), None
    if different:
        problem = (
            f"weights of {different[0]} (and {len(different) - 1} more) must be equal on every "
            f"rank{_of_stage(group)} before sharding: seed every rank alike or load one checkpoint"
        )
    raise_on_all(problem, device_type, group=group)


@torch.no_grad()
def differing_tensors(
    tensors: Mapping[str, Tensor], device_type: str, *, group: Group = None
) -> list[str]:
    """Return the names of tensors that are not the same on all ranks of a group. Collective."""
    real = {n: t for n, t in tensors.items() if not t.is_meta and t.numel()}
    if not real or not _has_others(group):
        return []
    sums = torch.stack([checksum(t).to(device_type) for t in real.values()])
    names = list(real)
    return [names[i] for i in _where_different(sums, group)]


def raise_on_all(problem: str | None, device_type: str, *, group: Group = None) -> None:
    """Raise a ValueError on every rank of the world when some have a problem, in one line."""
    if dist.is_initialized() and dist.get_world_size(group) < dist.get_world_size():
        raise_on_others(problem, device_type)
    elif problem is not None:
        raise ValueError(problem)


def raise_on_others(problem: str | None, device_type: str) -> None:
    """Raise a ValueError on every rank when one has a problem. An all-reduce and a host sync."""
    found = torch.tensor(problem is not None, dtype=torch.int64, device=device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if found.item():
        raise ValueError(
            problem or "ranks of another group must agree with each other: see their errors"
        )


def _of_stage(group: Group) -> str:
    is_part = group is not None and dist.get_world_size(group) < dist.get_world_size()
    return " of a pipeline stage" if is_part else ""


def _differing(entries: Mapping[str, Any], device_type: str, group: Group) -> list[str]:
    if not entries or not _has_others(group):
        return []
    digests = [hashlib.sha256(repr(value).encode()).digest()[:7] for value in entries.values()]
    numbers = torch.tensor([int.from_bytes(d, "little") for d in digests], device=device_type)
    names = list(entries)
    return [names[i] for i in _where_different(numbers, group)]


def _where_different(values: Tensor, group: Group) -> list[int]:
    """Return the positions at which ranks hold different int64. One collective, a host sync."""
    bounds = torch.stack([values, ~values])  # ~ turns the order round and cannot overflow
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return (bounds[0] != ~bounds[1]).nonzero().flatten().tolist()


def _has_others(group: Group) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1


def gather(value: T, group: Group = None) -> list[T]:
    """Return the value of every rank of a group, by rank: any that pickle takes. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 sum of the tensor's words of 8 bytes, each mixed with its place."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    total = torch.full((), bits.numel(), dtype=torch.int64, device=tensor.device)
    for i, chunk in enumerate(words.split(1 << 20)):
        places = torch.arange(i << 20, (i << 20) + chunk.numel(), device=tensor.device)
        # Odd factors lose no bit; without the shift, words that changed places would add up alike.
        mixed = (chunk + places * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
        total += (mixed ^ (mixed >> 32)).sum()
    return total
