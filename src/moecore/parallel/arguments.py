"""Compares forward arguments between the ranks that process the same sequences.

The tp, cp and pp ranks of a data rank receive the same sequences ("rows") and share their
computation. If tokens, documents or labels differ between these ranks, the gradient is wrong
without an error. If shapes differ, collectives hang. Before the model runs, these ranks therefore
compare the arguments of every forward and of every pipeline schedule:

    shapes, dtypes, Python values,     digest on the host -> all-reduce of 32 bytes between hosts
    contents of CPU tensors
    contents of tensors on a device    checksums on the device

Only the comparison of the first forward synchronises host and device. Checksums are compared so:

    forward n      checksums -> MAX all-reduce of [sums, ~sums], launched without a wait
    forward n + 1  copy of the result to the host, launched without a wait
    later forward  the copy is complete: the host compares, and all these ranks raise

`TrainStep` reads the results on the device when it clips the gradients. A clipped step with a
difference is therefore skipped on every rank before any host has read the result.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import publish_errors
from moecore.base.rank_checks import (
    compute_checksum,
    find_difference,
    find_differences,
    make_comparable,
    raise_problem_on_world,
)
from moecore.base.streams import HostCopyOfTensor, get_current_stream, is_capturing
from moecore.base.torch_private import is_inside_custom_ops, tree_leaves
from moecore.parallel.mesh import make_host_group


@dataclass(kw_only=True, slots=True)
class _ContentsCheck:
    """The pending or complete comparison of one forward's device tensors between ranks."""

    names: tuple[str, ...]
    bounds: Tensor  # int64 [2, names]: maxima over ranks of the checksum and of its complement
    work: Any  # the all-reduce; None after it was waited for
    copy: HostCopyOfTensor | None = None

    def start_copy(self) -> None:
        """Launch the copy of the all-reduced checksums to the host; later calls do nothing."""
        if self.work is not None:
            self.work.wait()
            self.work, self.copy = None, HostCopyOfTensor(self.bounds)

    def find_problem(self) -> str | None:
        """Return the start of an error text if contents differ, otherwise None. Host sync."""
        self.start_copy()
        assert self.copy is not None, "it was started"
        largest, complement = self.copy.read()
        names = [self.names[i] for i in (largest != ~complement).nonzero().flatten().tolist()]
        if not names:
            return None
        suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"contents of {names[0]}{suffix} in an earlier forward (its step is skipped if "
            "TrainStep clips it) must be the same"
        )


ROW_COMPARISON = "the comparison of rows, which ranks take by meshes.data_rank"
LOCAL_ARGUMENT = "hidden"  # argument of a native decoder's stage; it differs between these ranks
ADVICE = (
    " on ranks that share rows (tp, cp, pp): seed and shard data by meshes.data_rank of "
    "meshes.data_ranks"
)
Ranks = tuple[dist.ProcessGroup, ...]  # groups whose product is the ranks that share rows


class SharedArguments:
    """Raises a ValueError if ranks that process the same sequences receive different arguments.

    Args:
        groups_by_cp: context parallel degree -> process groups on the model's device. Sequential
            all-reduces over all of these groups span the ranks that process the same sequences.
            Entry 0 is used by forwards without the argument `cp`, and by degrees without an entry.
        device_type: the device type of the model.
    """

    def __init__(self, groups_by_cp: Mapping[int, Ranks], device_type: str) -> None:
        self._groups, self._device_type = groups_by_cp, device_type
        self._host_groups = {cp: tuple(map(make_host_group, g)) for cp, g in groups_by_cp.items()}
        self._unread_checks: list[_ContentsCheck] = []
        self._checks_of_step: list[_ContentsCheck] = []
        self._is_first = True  # until a forward with gradients

    @torch.compiler.disable
    def compare_arguments(self, arguments: Mapping[str, Any], cp: int | None) -> None:
        """Raise a ValueError if {name: argument} differs between ranks with the same sequences.

        If the contents of device tensors differ, a later call raises the error. `cp` is the
        forward's context parallel degree; None = the forward has no such argument. Collective. The
        first call with gradients enabled is collective over the world, and synchronises the host.
        """
        if is_inside_custom_ops():
            return
        place = cp if isinstance(cp, int) and cp in self._groups else 0
        names = sorted(name for name in arguments if name != LOCAL_ARGUMENT)
        tensors: dict[str, Tensor] = {}
        facts = {name: _describe_value(arguments[name], name, tensors) for name in names}
        on_device = {n: x for n, x in sorted(tensors.items()) if x.device.type == self._device_type}
        is_first = self._is_first and torch.is_grad_enabled()
        with publish_errors(ROW_COMPARISON):
            problem = self._compare_entries({"names of arguments": names, "value": facts}, place)
            if problem is None and on_device:
                self._compare_contents(on_device, self._groups[place])
                problem = self._read_results() if is_first else None
            if problem is not None:
                problem += ADVICE
            if is_first:
                self._is_first = False
                raise_problem_on_world(problem, self._device_type)
            elif problem is not None:
                raise ValueError(problem)

    def compare_in_pre_hook(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Compare the arguments of a forward, as the model's forward pre-hook. Collective."""
        named = {f"argument {place}": value for place, value in enumerate(args)}
        self.compare_arguments({**named, **kwargs}, kwargs.get("cp"))

    def compare_micro_batches(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Compare all micro-batches' forward arguments before a pipeline schedule. Collective."""
        named = {
            f"micro_batches[{place}].{name}": value
            for place, inputs in enumerate(micro_batches)
            for name, value in inputs.items()
        }
        self.compare_arguments(named, None)

    def end_step(self) -> Tensor | None:
        """Return a 0-dim device bool: whether contents differed in this step; None = no check."""
        checks, self._checks_of_step = self._checks_of_step, []
        if not checks:
            return None
        for check in checks:
            check.start_copy()
        return torch.cat([check.bounds[0] != ~check.bounds[1] for check in checks]).any()

    def drop_step(self) -> None:
        """Exclude this step's comparisons from the result of `end_step`; later errors remain."""
        self._checks_of_step = []

    def raise_pending_errors(self) -> None:
        """Raise a ValueError if argument contents differed in an earlier forward. Host sync."""
        problem = self._read_results()
        if problem is not None:
            raise ValueError(problem + ADVICE)

    def _compare_entries(self, entries: Mapping[str, Any], cp: int) -> str | None:
        """Compare entries and earlier results between ranks; return an error text or None."""
        groups = self._host_groups[cp]
        if not groups:
            return None
        digest = hashlib.sha256(repr(entries).encode()).digest()[:7]
        # A rank may receive the result of an earlier forward before other ranks. All ranks raise in
        # the same forward, because the result is part of this comparison.
        has_earlier_difference = int(self._has_difference())
        values = int.from_bytes(digest, "little"), has_earlier_difference
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        differing = find_differences(numbers, groups)
        if has_earlier_difference or 1 in differing:
            problem = self._read_results()
            return problem or "arguments of an earlier forward must be the same"
        return find_difference(entries, "cpu", group=groups) if differing else None

    def _compare_contents(
        self, tensors: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """All-reduce checksums of {name: tensor} over `groups`; () = none. Collective, no wait."""
        if not groups or _is_capturing(tensors.values()):
            return  # a replay would compare with no rank
        with torch.no_grad():
            sums = torch.stack([compute_checksum(x) for x in tensors.values()])
            bounds = torch.stack([sums, ~sums])
        for group in groups[:-1]:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        work = dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=groups[-1], async_op=True)
        comparison = _ContentsCheck(names=tuple(tensors), bounds=bounds, work=work)
        self._unread_checks.append(comparison)
        if torch.is_grad_enabled():  # no step ends a forward without gradients
            self._checks_of_step.append(comparison)

    def _has_difference(self) -> bool:
        """Whether a complete comparison found different contents. No host sync."""
        if _is_capturing(check.bounds for check in self._unread_checks):
            return False
        for check in self._unread_checks:
            check.start_copy()
        while self._unread_checks:
            copy = self._unread_checks[0].copy
            if copy is None or not copy.has_arrived():
                return False
            if self._unread_checks[0].find_problem() is not None:
                return True
            self._unread_checks.pop(0)
        return False

    def _read_results(self) -> str | None:
        """Wait on the host for all comparisons; return the start of an error text, or None."""
        checks, self._unread_checks = self._unread_checks, []
        problems = [check.find_problem() for check in checks]
        problem = next((text for text in problems if text is not None), None)
        if problem is not None:
            self._checks_of_step = []  # the caller drops this step
        return problem


def _is_capturing(tensors: Iterable[Tensor]) -> bool:
    """Whether a CUDA graph captures the current stream on the device of any tensor."""
    devices = {x.device for x in tensors}
    return any(is_capturing(get_current_stream(device)) for device in devices)


def _describe_value(arg: Any, arg_name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a nested description for ranks to compare; add device tensors to `tensors` by name."""
    if isinstance(arg, Mapping):
        items = ((make_comparable(key), entry) for key, entry in arg.items())
        return {key: _describe_value(item, f"{arg_name}[{key!r}]", tensors) for key, item in items}
    if is_dataclass(arg) and not isinstance(arg, type):
        entries = {field.name: getattr(arg, field.name, None) for field in fields(arg)}
        return type(arg).__name__, _describe_value(entries, arg_name, tensors)
    if isinstance(arg, list | tuple):
        return [_describe_value(entry, f"{arg_name}[{i}]", tensors) for i, entry in enumerate(arg)]
    if isinstance(arg, Tensor):
        return _describe_tensor(arg, arg_name, tensors)
    leaves = tree_leaves(arg)
    if len(leaves) == 1 and leaves[0] is arg:
        return make_comparable(arg)
    return [type(arg).__name__, _describe_value(leaves, arg_name, tensors)]


def _describe_tensor(tensor: Tensor, arg_name: str, tensors: dict[str, Tensor]) -> str:
    """Return dtype, shape and CPU contents of a tensor; add a GPU tensor to `tensors[arg_name]`."""
    facts = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
        return facts  # its bytes are not contents, or it has none
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not is_on_host(tensor):
        tensors[arg_name] = tensor
        return facts
    if tensor.numel() == 1:
        return f"{facts}, {tensor.item()}"
    data = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return f"{facts}, sha256 {hashlib.sha256(data).hexdigest()[:16]}"  # type: ignore[arg-type]


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host can read a tensor without a device sync."""
    return tensor.device.type == "cpu"
