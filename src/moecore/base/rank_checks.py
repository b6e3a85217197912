"""Comparison of values between ranks, before parameters are sharded; ids of ranks and hosts.

Ranks with different values would mix shards, compute wrong gradients without an error, or hang in
different collectives. A comparison of equal entries costs one all-reduce of 32 bytes. If ranks
differ, further collectives find the entry that differs and exchange its values.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import quote
from moecore.base.torch_private import tree_map_only

Group = dist.ProcessGroup | None  # None = all ranks
Groups = Group | tuple[dist.ProcessGroup, ...]  # several = the ranks of their product
T = TypeVar("T")
MAX_TEXT = 10_000  # characters of a value that a rank sends to the others
OF_PARAMETERS = ("params", "param_names", "layouts")  # optimizer options: one item per parameter
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)  # as numbers in notes


class Verbatim(str):
    """A string whose `repr` has no quotes, such as the qualified name of a class."""

    __slots__ = ()
    __repr__ = str.__str__


MISSING = Verbatim("missing")  # the value of an entry that a rank does not have


def check_equal(entries: Mapping[str, Any], device_type: str, *, group: Group = None) -> None:
    """Raise a ValueError on every rank of the group if an entry differs between ranks. Host sync.

    Collective on tensors of `device_type`. `entries` maps names to values, which are compared by
    `repr`; nested mappings are compared entry by entry, in any order. An entry that only some ranks
    have is a difference.
    """
    problem = find_difference(entries, device_type, group=group)
    if problem is not None:
        fix = "build the model and call moecore alike everywhere"
        problem += f" on every rank{_format_stage_suffix(group)}: {fix}"
    raise_problem_on_all_ranks(problem, device_type, group=group)


def find_difference(
    entries: Mapping[str, Any], device_type: str, *, group: Groups = None
) -> str | None:
    """Compare entries between ranks and return an error text for the first difference, or None.

    Values are compared by their `repr`. The text has the value of this rank and of the first rank
    with a different value. Collective, with a host sync. With several groups, a rank without a
    difference in its groups returns the text of another rank.
    """
    if not isinstance(group, tuple):
        return _find_in_group(entries, device_type, group)
    problem: str | None = None
    for subgroup in group:
        problem = _find_in_group(entries, device_type, subgroup) or problem
        problem = next(filter(None, gather_objects(problem, subgroup)), None)
    return problem


def _find_in_group(entries: Mapping[str, Any], device_type: str, group: Group) -> str | None:
    """Return an error text for the first entry that differs in a group, or None. Collective."""
    prefix, num_further = "", 0
    while names := _find_differing_names(entries, device_type, group):
        value, num_further = entries.get(names[0], MISSING), num_further + len(names) - 1
        if not all(gather_objects(isinstance(value, Mapping), group)):
            suffix = f" and {num_further} more" if num_further else ""
            values = _format_both_values(value, group)
            return f"{prefix}{names[0]} ({values}){suffix} must be the same"
        prefix, entries = f"{prefix}{names[0]} of ", value
    return None


def _format_both_values(value: Any, group: Group) -> str:
    """Return this rank's value and the first different value of a rank as text. Collective."""
    texts = gather_objects(" ".join(_format_value(value).split())[:MAX_TEXT], group)
    ranks, local = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank(group)
    other = next((i for i, text in enumerate(texts) if text != texts[local]), local)
    pairs = zip(texts[local], texts[other], strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    start = max(0, first - 30) if first > 60 else 0  # an error shows 80 characters of a value
    ellipsis = "..." if start else ""
    return ", ".join(
        f"{quote(Verbatim(ellipsis + texts[i][start:]))} on rank {ranks[i]}"
        for i in dict.fromkeys((local, other))
    )


def check_collective_headers(
    collective_name: str,
    numbers_by_rank: Sequence[Sequence[int]],
    formatters: Mapping[str, Callable[[int], str]],
    group: dist.ProcessGroup,
) -> None:
    """Raise a ValueError if the ranks of a group called a collective with different numbers.

    No communication. `numbers_by_rank` has, for each rank in group order, one number per entry of
    `formatters`: name of the number -> function that formats it for the error.
    """
    for i, (name, show) in enumerate(formatters.items()):
        values = [numbers[i] for numbers in numbers_by_rank]
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"{name} in {collective_name} ({show(values[0])} on rank {ranks[0]}, "
                f"{show(values[other])} on rank {ranks[other]}) must be the same on all "
                "ranks that share it: give every rank the same forwards, modes, trained "
                "parameters and micro-batches"
            )


def list_field_entries(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict with keys "Class.field"."""
    cls = type(record).__name__
    return {f"{cls}.{field.name}": getattr(record, field.name) for field in fields(record)}


def list_training_entries(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the entries of `check_equal` for parameter names, `requires_grad` and optimizers."""
    params = dict(model.named_parameters())
    names = {param: name for name, param in params.items()}
    return {
        "names of parameters": list(params),
        "requires_grad": {name: param.requires_grad for name, param in params.items()},
        **describe_optimizers(optimizers, names),
    }


def describe_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str] | None = None
) -> dict[str, Any]:
    """Return optimizer classes and options as entries for `check_equal`.

    If `names` is None, per-parameter options are omitted: pipeline stages have other parameters.
    """
    options: dict[str, Any] = {}
    for place, optimizer in enumerate(optimizers):
        prefix = f"optimizer {place}" if len(optimizers) > 1 else "optimizer"
        get_options: Callable[[], dict[str, Any]] = getattr(optimizer, "get_class_options", dict)
        records = {"": get_options()}
        for number, group in enumerate(optimizer.param_groups):
            plain = {**group, "params": [names.get(p) for p in group["params"]] if names else []}
            records[f"param_groups[{number}]."] = tree_map_only(object, make_comparable, plain)
        for path, record in records.items():
            keys = [key for key in record if names is not None or key not in OF_PARAMETERS]
            options |= {f"{prefix}.{path}{key}": record[key] for key in keys}
    return {
        "classes of optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "names of optimizers' options": list(options),
        "value": options,
    }


def make_comparable(value: Any) -> Any:
    """Replace a tensor by its value or checksum, and other objects by their class name."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta:
        if value.numel() == 1:
            return value.tolist()
        return f"{value.dtype} {tuple(value.shape)}, checksum {compute_checksum(value).item()}"
    is_plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    return value if is_plain else type(value).__name__


@torch.no_grad()
def check_equal_weights(
    tensors: Mapping[str, Tensor], device_type: str, *, group: Group = None
) -> None:
    """Raise a ValueError on every rank if a weight differs between ranks. Collective."""
    # DTensors are left out: each tp rank has a different shard.
    plain_tensors = {n: t for n, t in tensors.items() if not isinstance(t, DTensor)}
    different, problem = find_differing_tensors(plain_tensors, device_type, group=group), None
    if different:
        problem = (
            f"weights of {different[0]} (and {len(different) - 1} more) must be equal on every "
            f"rank{_format_stage_suffix(group)} before sharding: seed every rank alike or load one "
            "checkpoint"
        )
    raise_problem_on_all_ranks(problem, device_type, group=group)


@torch.no_grad()
def find_differing_tensors(
    tensors: Mapping[str, Tensor], device_type: str, *, group: Group = None
) -> list[str]:
    """Return the names of tensors that differ between ranks, identical on all ranks. Collective."""
    if not _has_peers(group):
        return []
    real = {n: t for n, t in tensors.items() if not t.is_meta and t.numel()}
    sums = [compute_checksum(t).to(device_type) for t in real.values()]
    values = torch.stack(sums).tolist() if sums else []
    return _find_differing_names(dict(zip(real, values, strict=True)), device_type, group)


def raise_problem_on_all_ranks(
    problem: str | None, device_type: str, *, group: Group = None
) -> None:
    """Raise a ValueError with the text `problem` on every rank if any rank has a problem.

    Collective over the world if `group` is smaller than the world. Otherwise there is no
    communication, and `problem` must be equal on all ranks (None = no problem).
    """
    if dist.is_initialized() and dist.get_world_size(group) < dist.get_world_size():
        raise_problem_on_world(problem, device_type)
    elif problem is not None:
        raise ValueError(problem)


def raise_problem_on_world(problem: str | None, device_type: str) -> None:
    """Raise a ValueError on all ranks if one rank has a `problem`. One all-reduce, host sync."""
    has_problem = torch.tensor(problem is not None, dtype=torch.int64, device=device_type)
    dist.all_reduce(has_problem, op=dist.ReduceOp.MAX)
    if has_problem.item():
        first = next(filter(None, gather_objects(problem)), None)
        raise ValueError(problem or first)


def gather_first_problem(problem: str, group: Group = None) -> str:
    """Return the `problem` of the first rank that has one, otherwise "". Collective."""
    of_ranks = gather_objects(problem, group)
    if len(of_ranks) == 1:
        return problem
    return next((f"rank {r}: {text}" for r, text in enumerate(of_ranks) if text), "")


def _format_stage_suffix(group: Group) -> str:
    """Return " of a pipeline stage" for errors of a group smaller than the world, otherwise ""."""
    is_part = group is not None and dist.get_world_size(group) < dist.get_world_size()
    return " of a pipeline stage" if is_part else ""


def _find_differing_names(entries: Mapping[str, Any], device_type: str, group: Group) -> list[str]:
    """Return the names of entries that differ in a group, equal on all ranks. Collective."""
    if not _has_peers(group):
        return []
    names = sorted(entries)
    digests = [_hash_text(_format_value(entries[name])) for name in names]
    # Ranks may have different numbers of entries, so the first all-reduce has a fixed size.
    summary = torch.tensor(
        [_hash_text(repr(names)), _hash_text(repr(digests))], device=device_type, dtype=torch.int64
    )
    unequal = find_differences(summary, group)
    if not unequal:
        return []
    order, missing = list(entries), set[str]()
    if unequal[0] == 0:
        order, missing = _merge_names(order, group)
        names = [name for name in names if name not in missing]
        digests = [_hash_text(_format_value(entries[name])) for name in names]
    numbers = torch.tensor(digests, device=device_type, dtype=torch.int64)
    positions = find_differences(numbers, group) if names else []
    different = {names[i] for i in positions} | missing
    return gather_objects([name for name in order if name in different], group)[0]


def _merge_names(names: list[str], group: Group) -> tuple[list[str], set[str]]:
    """Return the union of all ranks' names, and the names that any rank lacks. Collective."""
    first: list[Any] = [names]
    source = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    dist.broadcast_object_list(first, source, group=group)
    of_first, local_names = dict.fromkeys(first[0]), set(names)
    diffs = gather_objects((local_names - of_first.keys(), of_first.keys() - local_names), group)
    extra_names = sorted(set().union(*(extra for extra, _ in diffs)))
    return [*of_first, *extra_names], {*extra_names}.union(*(absent for _, absent in diffs))


def _format_value(value: Any) -> str:
    """Return the `repr` of a value; the items of a mapping are sorted by name."""
    if not isinstance(value, Mapping):
        return repr(value)
    pairs = sorted((str(name), _format_value(item)) for name, item in value.items())
    return "{" + ", ".join(f"{name}: {text}" for name, text in pairs) + "}"


def _hash_text(text: str) -> int:
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:7], "little")


def find_differences(values: Tensor, group: Groups) -> list[int]:
    """Return the indices at which 1-D int64 values differ between ranks. Collective, host sync."""
    bounds = torch.stack([values, ~values])  # ~ reverses the order and cannot overflow
    for subgroup in group if isinstance(group, tuple) else (group,):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=subgroup)
    return (bounds[0] != ~bounds[1]).nonzero().flatten().tolist()


def _has_peers(group: Group) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1


def gather_objects(value: T, group: Group = None) -> list[T]:
    """All-gather a picklable value over a group and return the values in rank order. Collective.

    In a fake group, which sends nothing, each rank has this rank's value.
    """
    if not dist.is_initialized():
        return [value]
    if dist.get_backend(group) == "fake":
        return [value] * dist.get_world_size(group)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shift_ranks(outgoing: Tensor, incoming: Tensor, distance: int) -> None:
    """Send a tensor to rank + `distance`; receive one from rank - `distance`. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, outgoing, (rank + distance) % size)
    receive = dist.P2POp(dist.irecv, incoming, (rank - distance) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def compute_checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim int64 checksum of a tensor's bytes, their order and their number."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    num_bytes, padding = bits.numel(), -bits.numel() % 8
    if padding:
        bits = torch.nn.functional.pad(bits, (0, padding))
    elif bits.storage_offset() % 8:  # a view as int64 must begin at a word
        bits = bits.clone()
    total: Tensor | int = num_bytes
    for i, chunk in enumerate(bits.view(torch.int64).split(1 << 20)):
        places = torch.arange(i << 20, (i << 20) + chunk.numel(), device=tensor.device)
        # Odd factors lose no bit. Without the shift, swapped words would have the same sum.
        mixed = torch.add(chunk, places, alpha=0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
        total = (mixed ^ (mixed >> 32)).sum() + total
    return total  # type: ignore[return-value]  # `split` of no words is one empty chunk


def get_rank_or_zero() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_host_id() -> str:
    """Return this host's boot id, which its containers share, or the host name without one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
