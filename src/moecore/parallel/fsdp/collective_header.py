"""CollectiveHeader: numbers that all ranks of an all-gather must have in common.

If ranks differ, they issue different collectives afterwards: gloo then ends the process, or a rank
receives another unit's values. On CPUs a header of 64 bytes is therefore sent with the shards of
each all-gather. It costs no collective, and all ranks of the group raise before anything differs.
NCCL sends no header, because the host would have to wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moecore.base.rank_checks import DTYPES, check_notes
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.fsdp.unit import Unit


class CollectiveHeader:
    """The headers of a model's units. `start` sets the numbers that a forward's headers share."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], device_type: str) -> None:
        self._root, self._device_type = root, device_type
        self._index = {unit: index for index, unit in enumerate(units)}
        self._of_forward = [0, 0, 0, 0]
        names = [unit.options.name for unit in units]
        self._describe: dict[str, Callable[[int], str]] = {
            "the unit": names.__getitem__,
            "torch.is_grad_enabled()": lambda n: str(bool(n)),
            "model.training": lambda n: str(bool(n)),
            "autocast": lambda n: str(DTYPES[n]),
            "the micro-batch": lambda n: f"{n >> 32} of {n % (1 << 32)}" if n else "none",
            "requires_grad": lambda n: f"{n >> 32} parameters",
        }

    def start(self, progress: Progress | None) -> None:
        """Begin an outermost forward."""
        autocast = None
        if torch.is_autocast_enabled(self._device_type):
            autocast = torch.get_autocast_dtype(self._device_type)
        is_open = progress is not None and progress.is_open
        self._of_forward = [
            torch.is_grad_enabled(),
            self._root.training,
            DTYPES.index(autocast),
            (progress.num_done + 1 << 32) + progress.number if is_open else 0,  # type: ignore[union-attr]
        ]

    def of(self, unit: Unit) -> list[int]:
        """Return this rank's header of a unit."""
        trained = bytes(param.sharded.requires_grad for param in unit.params)
        return [self._index[unit], *self._of_forward, (sum(trained) << 32) + zlib.crc32(trained)]

    def check(self, unit: Unit, headers: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group when their headers differ."""
        check_notes(f"the all-gather of {unit.options.name}", headers, self._describe, group)
