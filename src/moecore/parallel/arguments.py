"""Arguments of forwards, compared by the ranks that compute parts of the same rows.

The tp, cp and pp ranks of a data rank each compute a part of the rows that all of them receive.
If one of these ranks receives other tokens, documents or labels, the gradient is wrong without an
error, and other shapes let its collectives wait forever. So these ranks compare the arguments of
every forward, and of every schedule of a pipeline, before the model runs:

    shapes, dtypes, Python values,     digest on the host -> all-reduce of 32 bytes between hosts
    contents of CPU tensors
    contents of tensors on a device    checksums on the device, see `contents.py`

No comparison waits for the device, except that of the first forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import publish_errors
from moecore.base.rank_checks import comparable, difference, raise_on_world, where_different
from moecore.base.torch_private import is_inside, tree_leaves
from moecore.parallel.contents import Contents
from moecore.parallel.mesh import host_group

ROW_COMPARISON = "the comparison of rows, which ranks take by meshes.data_rank"
OF_OWN_TOKENS = "hidden"  # argument of a native decoder's stage; it differs between these ranks
ADVICE = (
    " on ranks that share rows (tp, cp, pp): seed and shard data by meshes.data_rank of "
    "meshes.data_ranks"
)
Ranks = tuple[dist.ProcessGroup, ...]  # groups whose product is the ranks that share rows


class SharedArguments:
    """Raises a ValueError on the ranks that share rows when they receive different arguments.

    Args:
        groups: groups of the model's device, by cp of dynamic context parallelism; 0 = of all other
            forwards. A forward with a cp that has no entry uses entry 0.
        device_type: the device type of the model.
    """

    def __init__(self, groups: Mapping[int, Ranks], device_type: str) -> None:
        self._groups, self._device_type = groups, device_type
        self._host_groups = {
            cp: tuple(host_group(group) for group in ranks) for cp, ranks in groups.items()
        }
        self._contents = Contents()
        self._is_first = True  # until a forward with gradients

    @torch.compiler.disable
    def check(self, arguments: Mapping[str, Any], cp: int | None) -> None:
        """Raise if the arguments of a forward, or of all micro-batches of a pipeline, differ.

        It is collective over the ranks that share the rows. The first check with gradients is
        collective over the world, so that all ranks raise, and has a host sync.
        """
        if is_inside():
            return
        place = cp if isinstance(cp, int) and cp in self._groups else 0
        names = sorted(name for name in arguments if name != OF_OWN_TOKENS)
        device_tensors: dict[str, Tensor] = {}
        facts = {name: _facts(arguments[name], name, device_tensors) for name in names}
        on_device = {
            n: x for n, x in sorted(device_tensors.items()) if x.device.type == self._device_type
        }
        is_first = self._is_first and torch.is_grad_enabled()
        with publish_errors(ROW_COMPARISON):
            problem = self._difference({"names of arguments": names, "value": facts}, place)
            if problem is None and on_device:
                self._contents.compare(on_device, self._groups[place])
                problem = self._contents.wait() if is_first else None
            if problem is not None:
                problem += ADVICE
            if is_first:
                self._is_first = False
                raise_on_world(problem, self._device_type)
            elif problem is not None:
                raise ValueError(problem)

    def before_forward(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Forward pre-hook of the model."""
        named = {f"argument {place}": value for place, value in enumerate(args)}
        self.check({**named, **kwargs}, kwargs.get("cp"))

    def before_schedule(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Compare the micro-batches of a pipeline."""
        named = {
            f"micro_batches[{place}].{name}": value
            for place, inputs in enumerate(micro_batches)
            for name, value in inputs.items()
        }
        self.check(named, None)

    def end_step(self) -> Tensor | None:
        """Return whether contents of this step's forwards differ, a bool on the device.

        None = no contents were compared on the device. No host sync.
        """
        return self._contents.end_step()

    def drop_step(self) -> None:
        """Forget which forwards belong to the step, which does not take place."""
        self._contents.drop_step()

    def raise_late(self) -> None:
        """Raise the error of earlier forwards whose contents differ. Host sync."""
        problem = self._contents.wait()
        if problem is not None:
            raise ValueError(problem + ADVICE)

    def _difference(self, entries: Mapping[str, Any], place: int) -> str | None:
        """Return an error's beginning if host facts differ, or contents of earlier forwards."""
        groups = self._host_groups[place]
        if not groups:
            return None
        digest = hashlib.sha256(repr(entries).encode()).digest()[:7]
        # A rank may see the verdict on an earlier forward before the others do. All raise in the
        # same forward, because each one tells the others.
        has_late = int(self._contents.has_difference())
        numbers = torch.tensor([int.from_bytes(digest, "little"), has_late])
        differing = where_different(numbers, groups)
        if has_late or 1 in differing:
            return self._contents.wait() or "arguments of an earlier forward must be the same"
        if not differing:
            return None
        return difference(entries, "cpu", group=groups)


def _facts(value: Any, name: str, on_device: dict[str, Tensor]) -> Any:
    """Return a description whose `repr` is compared; add device tensors to `on_device`."""
    if isinstance(value, Mapping):
        items = ((comparable(key), entry) for key, entry in value.items())
        return {key: _facts(entry, f"{name}[{key!r}]", on_device) for key, entry in items}
    if is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return type(value).__name__, _facts(entries, name, on_device)
    if isinstance(value, list | tuple):
        return [_facts(entry, f"{name}[{i}]", on_device) for i, entry in enumerate(value)]
    if isinstance(value, Tensor):
        return _tensor_facts(value, name, on_device)
    leaves = tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return comparable(value)
    places = enumerate(leaves)
    return [type(value).__name__, [_facts(x, f"{name}[{i}]", on_device) for i, x in places]]


def _tensor_facts(x: Tensor, name: str, on_device: dict[str, Tensor]) -> str:
    facts = f"{x.dtype} {tuple(x.shape)} on {x.device.type}"
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta:
        return facts  # its bytes are not contents, or it has none
    x = x.detach().resolve_conj().resolve_neg()
    if not is_on_host(x):
        on_device[name] = x
        return facts
    if x.numel() == 1:
        return f"{facts}, {x.item()}"
    data = x.contiguous().flatten().view(torch.uint8).numpy()
    return f"{facts}, sha256 {hashlib.sha256(data).hexdigest()[:16]}"  # type: ignore[arg-type]


def is_on_host(x: Tensor) -> bool:
    """Return whether the host reads a tensor without a wait."""
    return x.device.type == "cpu"
