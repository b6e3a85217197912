"""Small models whose blocks have parts, and the bytes of a call."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moecore.base.torch_private import get_local_tensor
from moecore.models.block import Block
from moecore.models.layers import MLP, Attention, RMSNorm
from moecore.models.mla import LatentAttention
from moecore.moe.experts import Experts
from moecore.moe.shared_experts import SharedExpert
from moecore.train.memory.offload import Offload
from moecore.train.memory.streams import CopyStream, CopyStreams

PARTS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "norm",
    nn.Sequential: "mlp",
    RMSNorm: "norm",
    Attention: "attention",
    LatentAttention: "attention",
    MLP: "mlp",
    SharedExpert: "shared_experts",
    Experts: "experts",
}


def part_of(module: nn.Module) -> str | None:
    return PARTS.get(type(module))


def part_or_block(module: nn.Module) -> str | None:
    return "block" if isinstance(module, Block | PlainBlock) else part_of(module)


class PlainBlock(nn.Module):
    """Two norms and two MLPs, each on a residual stream, in plain torch."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, n * dim), nn.GELU(), nn.Linear(n * dim, dim))
            for n in (1, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


class Plain(nn.Module):
    """Blocks of plain torch that return a loss, of inputs made from tokens."""

    def __init__(self, num_layers: int, dim: int = 16, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(PlainBlock(dim, width) for _ in range(num_layers))

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return (x * self.embedding(labels_BT)).sum()


def offloaded(model, parts=part_of, **options) -> Offload:
    """Return what offloads a model's parts, however small."""
    device = next(model.parameters()).device
    offload = Offload(device, **{"min_bytes": 1} | options)
    offload.attach(list(model.layers), parts)
    return offload


def in_chunks(model: Plain, offload: Offload, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Run all forwards, then all backwards, as a rank of a pipeline does."""
    waiting: deque[tuple[Tensor, Any]] = deque()
    left = None
    for batch in batches:
        with offload.offload_forward(offloads_last_block=True) as chunk:
            waiting.append((model(*batch), chunk))
        if left is not None:
            offload.free_last_block(left)
        left = chunk
    offload.free_last_block(left)
    offload.start_copy_back(waiting[0][1])
    while waiting:
        loss, _ = waiting.popleft()
        if waiting:
            offload.start_copy_back(waiting[0][1])
        loss.backward()


class _Storages(TorchDispatchMode):
    """Follows every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.elsewhere: Callable[[], int] = lambda: 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = {s.data_ptr() for s in map(_storage, tree_leaves((args, kwargs))) if s is not None}
        out = func(*args, **(kwargs or {}))
        for storage in map(_storage, tree_leaves(out)):
            if storage is not None and storage.data_ptr() not in given:
                self.known[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(self.list_live()) - self.elsewhere())
        return out

    def list_live(self) -> list[int]:
        """Return the sizes of those that are still there."""
        self.known = {a: found for a, found in self.known.items() if not found[0].expired()}
        return [size for _, size in self.known.values()]


def _storage(leaf: Any) -> torch.UntypedStorage | None:
    if isinstance(leaf, torch.UntypedStorage):
        return leaf
    local = get_local_tensor(leaf) if isinstance(leaf, Tensor) else None
    is_plain = type(local) in (Tensor, nn.Parameter) and not local.is_meta
    return local.untyped_storage() if is_plain else None


@contextmanager
def counting_bytes(offload: Offload | None = None) -> Iterator[_Storages]:
    """Within, count the bytes of storages on a CPU that operations make; `peak` is the most.

    Those of an offload's host memory do not count.
    """
    mode = _Storages()
    before = 0 if offload is None else offload.host_bytes
    if offload is not None:
        mode.elsewhere = lambda: offload.host_bytes - before
    with mode:
        yield mode


class LateMark:
    """A place in a queue of copies, which run only when somebody waits for it."""

    def __init__(self, queue: list[Callable[[], None]]) -> None:
        self.queue, self.place = queue, len(queue)

    def make_stream_wait(self, stream: object) -> None:
        for i in range(self.place):
            run, self.queue[i] = self.queue[i], _nothing
            run()


def _nothing() -> None:
    pass


class LateCopies(CopyStream):
    """A stream of a CPU whose copies are as late as they may be.

    Args:
        device: a CPU.
        on_device: the field of a job that is on the device: its source, or its target.
    """

    def __init__(self, device: torch.device, on_device: str) -> None:
        super().__init__(device)
        self.on_device, self.queue = on_device, list[Callable[[], None]]()

    def start_copies(self, jobs: Iterable[Any], *after: Any) -> Any:
        for job in jobs:
            device = getattr(job, self.on_device)
            if self.on_device == "target":
                for tensor in filter(_is_there, _as_tuple(device)):
                    tensor.fill_(255)  # NaN in every float dtype
            refs = [weakref.ref(t) if _is_there(t) else None for t in _as_tuple(device)]
            rest, is_one = job._replace(**{self.on_device: None}), isinstance(device, Tensor)
            self.queue.append(partial(_start, rest, self.on_device, refs, is_one, after))
        return LateMark(self.queue)


class LateStreams(CopyStreams):
    """Streams of a CPU whose copies are late.

    What is read before it came back is NaN; device memory that is freed before its copy out ran is
    an error.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.out, self.back = LateCopies(device, "source"), LateCopies(device, "target")

    @property
    def queues(self) -> tuple[list[Callable[[], None]], ...]:
        return self.out.queue, self.back.queue


def _as_tuple(device: Any) -> tuple[Any, ...]:
    return (device,) if isinstance(device, Tensor) else device


def _is_there(tensor: Any) -> bool:
    return tensor is not None


def _start(job: Any, on_device: str, refs: list[Any], is_one: bool, after: tuple[Any, ...]) -> None:
    device = tuple(None if ref is None else ref() for ref in refs)
    is_whole = all((t is None) == (ref is None) for t, ref in zip(device, refs, strict=True))
    assert is_whole, f"the {on_device} of a copy was freed before it ran"
    for mark in after:
        mark.make_stream_wait(None)
    job._replace(**{on_device: device[0] if is_one else device}).launch_on(
        CopyStream(torch.device("cpu"))
    )


class NoisyBlock(nn.Module):
    """A norm, and attention that drops scores and what it returns, in plain torch."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), NoisyAttention(dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.attention(self.norm(x_BTD))


class NoisyAttention(nn.Module):
    """Attention of two heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(dim, dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            f(F.silu(x_BTD)).unflatten(-1, (2, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        o_BhTd = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return F.dropout(self.o_proj(F.gelu(o_BhTd.transpose(1, 2).flatten(-2))), 0.3)
