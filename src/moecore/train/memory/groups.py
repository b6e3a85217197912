"""What a forward has offloaded: storages, by part and layer, and who has yet to ask for them.

    Chunk   one forward of blocks whose backward is announced
    Layer   one forward of a block
    Group   what a part of it saves
    Copy    a storage
    Use     what a handle stands for: a storage, in a group

A storage belongs to the group that saved it first. Handles count in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.saved import UsedRows
from moecore.base.streams import Stream
from moecore.base.torch_names import version
from moecore.train.memory.streams import CopyMark

Key = tuple[str, int]  # a part's name, and how often its layer has entered that name before
REST: Key = ("", 0)  # what a block saves outside of parts


@dataclass(slots=True)
class Readers:
    """The handles of something, and how many of them backward has yet to ask in this turn."""

    alive: int = 0
    left: int = 0
    turn: int = 0

    def join(self) -> int:
        """Count a new handle; return the turn in which it is asked next."""
        self.alive += 1
        self.left += 1
        return self.turn

    def asked(self, turn: int) -> tuple[int, bool]:
        """Return a handle's next turn, and whether it was the last of this turn."""
        if turn != self.turn:
            return turn, False
        self.left -= 1
        return turn + 1, self._is_over()

    def leave(self, turn: int) -> bool:
        """Count a handle's death; return whether it was the last of this turn."""
        self.alive -= 1
        if turn != self.turn:
            return False
        self.left -= 1
        return self._is_over()

    def _is_over(self) -> bool:
        if self.left:
            return False
        self.turn, self.left = self.turn + 1, self.alive
        return True


@dataclass(eq=False, slots=True)
class HostCopy:
    """One saved storage: on the device, in a store, or both.

    Attributes:
        ref: of the storage that was saved.
        counter: shares the version of the saved tensors, without their memory.
        data: the storage on the device, uint8; None while it lies in the store alone.
        home: stream that waits before `data` is freed.
        used: rows that are in use; None = all.
        piece: where it lies in its store; None where it stays.
        busy: when a copy that runs has read or written `data`.
        is_back: whether `data` was brought back.
    """

    size: int
    ref: StorageWeakRef
    counter: Tensor
    version: int
    data: Tensor | None
    home: Stream | None
    used: UsedRows | None
    piece: Any = None
    out: CopyMark | None = None
    busy: CopyMark | None = None
    is_back: bool = False
    readers: Readers = field(default_factory=Readers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it has the values of a tensor that is saved, and holds on to its storage."""
        if self.data is None or self.is_back:
            return False
        is_whole = self.size == tensor.untyped_storage().nbytes()
        return is_whole and self.version == version(tensor)

    def free(self) -> None:
        """Free the device memory, when nothing that runs uses it."""
        if self.busy is not None:
            self.busy.hold(self.home)
        self.data, self.busy, self.is_back = None, None, False

    def is_as_saved(self) -> bool:
        """Whether the storage on the device has its memory and its values still."""
        assert self.data is not None
        has_memory = self.data.untyped_storage().nbytes() == self.size
        return has_memory and version(self.counter) == self.version


@dataclass(eq=False, slots=True)
class StorageGroup:
    """What one part of a layer saves in one forward.

    Attributes:
        fresh: storages that it was the first to save, in order.
        before: groups that are brought back once this one has run backward.
        is_asked: whether backward has asked for one of its handles.
    """

    key: Key
    layer: Layer
    weights: frozenset[int]
    fresh: list[HostCopy] = field(default_factory=list)
    before: list[StorageGroup] = field(default_factory=list)
    readers: Readers = field(default_factory=Readers)
    is_asked: bool = False

    def retire(self) -> None:
        """Free the device memory of what was copied out."""
        for copy in self.fresh:
            if copy.busy is not None and not copy.is_back:
                copy.free()


@dataclass(eq=False, slots=True)
class Layer:
    """One forward of a block.

    Attributes:
        groups: by key, in the order in which parts began; of the last one that had some.
    """

    index: int
    is_last: bool
    stream: Stream | None
    groups: dict[Key, StorageGroup] = field(default_factory=dict)

    def follow(self, previous: Layer | None) -> None:
        """Link its groups to those of the layer before, whose backward comes after theirs."""
        self.groups = {key: group for key, group in self.groups.items() if group.readers.alive}
        others = dict(previous.groups) if previous is not None else {}
        if not self.groups:
            self.groups = others
            return
        for key, group in self.groups.items():
            if key in others:
                group.before.append(others.pop(key))
        first_in_backward = next(reversed(self.groups.values()))
        first_in_backward.before += others.values()


@dataclass(eq=False, slots=True)
class OffloadChunk:
    """One forward of blocks whose backward is announced, such as that of a pipeline's stage.

    Attributes:
        leaves_whole: whether what its last block keeps leaves the device, too.
        leaving: groups whose device memory is not freed yet.
    """

    leaves_whole: bool
    layers: list[Layer] = field(default_factory=list)
    leaving: list[StorageGroup] = field(default_factory=list)


@dataclass(slots=True)
class StorageUse:
    """What a handle stands for, and the turns in which it is asked next."""

    copy: HostCopy
    group: StorageGroup
    copy_turn: int
    group_turn: int


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
