"""Notes: what ranks that gather a unit must have in common, sent with the shards on CPUs.

Ranks that differ issue other collectives later: gloo then ends the process, or hands one unit's
values to another. A note is 64 bytes beside the shards of each all-gather, so it costs no
collective, and all ranks of the group raise before anything differs. NCCL sends none: the host
would have to wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moecore.base.agreement import DTYPES, check_notes
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.fsdp.unit import Unit


class Notes:
    """The notes of a model's units, of which `start` sets what a forward has for all of them."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], device_type: str) -> None:
        self._root, self._device_type = root, device_type
        self._places = {unit: place for place, unit in enumerate(units)}
        self._of_forward = [0, 0, 0, 0]
        names = [unit.options.name for unit in units]
        self._shown: dict[str, Callable[[int], str]] = {
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
            (progress.done + 1 << 32) + progress.number if is_open else 0,  # type: ignore[union-attr]
        ]

    def of(self, unit: Unit) -> list[int]:
        """Return this rank's note of a unit."""
        trained = bytes(param.sharded.requires_grad for param in unit.params)
        return [self._places[unit], *self._of_forward, (sum(trained) << 32) + zlib.crc32(trained)]

    def check(self, unit: Unit, notes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group when their notes differ."""
        check_notes(f"the all-gather of {unit.options.name}", notes, self._shown, group)
