"""Transfer of weights to another program: over a process group, or by CUDA IPC on one GPU.

    send_weights(stream, group)      ==== metas, flat ====>   receive_weights(group, device)
    share_bucket(bucket)             ---- a few bytes ---->   open_bucket(handle)

The group is separate from the training's groups: rank 0 is a training rank, and the other ranks
belong to an inference engine. A failure of the engine ends a stream but not the training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from moecore.base.fields import CountOrZero, Device, check_arguments, quote
from moecore.io.checkpoint.manifest import DTYPE_NAMES
from moecore.io.hf.buckets import WeightBucket, WeightMeta, align_bytes
from moecore.io.hf.stream import WeightStream

SENT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
# A header has about 100 bytes per tensor, so 64 MiB suffice for 600,000 tensors.
MAX_HEADER, MAX_BUCKET, MAX_DIMS = 1 << 26, 1 << 40, 64
DEVICE_ARGUMENT = 6  # index of the device among the arguments of torch's rebuild function


@runtime_checkable
class BroadcastGroup(Protocol):
    """Protocol of a process group such as `dist.ProcessGroupNCCL(store, rank, size)`."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Start a broadcast from rank `root` into `tensor`; return a work with `wait()`."""

    def size(self) -> int:
        """Return the number of ranks in the group."""


def send_weights(stream: WeightStream, group: BroadcastGroup | None) -> None:
    """Broadcast all buckets of a stream to a group. Collective over the training's ranks.

    Args:
        stream: this rank's stream, from `stream_weights`.
        group: a group in which this rank is rank 0 and every other rank calls `receive_weights`;
            None on training ranks that send nothing. Several ranks may have a group each.

    Raises:
        RuntimeError: on every training rank if a receiver ended or exceeded the group's timeout,
            and for the reasons of `WeightStream.buckets`. Training can continue, but the group is
            unusable.
    """
    check_arguments(send_weights, locals())
    with closing(stream.buckets()) as buckets:
        while (bucket := next(buckets, None)) is not None:
            if group is not None:
                _send_metas(group, bucket.metas, bucket.flat.device)
                _broadcast(group, bucket.flat)
            del bucket
    if group is not None:
        _send_metas(group, (), stream.device)


def receive_weights(group: BroadcastGroup, device: Device) -> Iterator[tuple[str, Tensor]]:
    """Receive one pass of rank 0's `send_weights`; return an iterator of (name, tensor).

    Args:
        group: a group in which this rank is not rank 0 and not a training rank.
        device: of the tensors; the group's backend must support it.

    Raises:
        RuntimeError: during iteration, if another rank ended or timed out, or a bucket does not
            fit the device's memory.
        ValueError: during iteration, for a header that `send_weights` does not write.
    """
    check_arguments(receive_weights, locals())
    return _receive_tensors(group, torch.device(device))


def _receive_tensors(group: BroadcastGroup, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Receive buckets until an empty header arrives; yield (name, tensor)."""
    while metas := _receive_metas(group, device):
        try:
            bucket = WeightBucket.empty(metas, device)
        except (RuntimeError, MemoryError):
            num_bytes = sum(align_bytes(meta.nbytes) for meta in metas)
            raise RuntimeError(
                f"a bucket of weights ({num_bytes} bytes) must fit in the memory of {device}: "
                "lower bucket_bytes of stream_weights"
            ) from None
        _broadcast(group, bucket.flat)
        yield from bucket.tensors()


def _send_metas(group: BroadcastGroup, metas: tuple[WeightMeta, ...], device: torch.device) -> None:
    """Broadcast a bucket's header, JSON with each tensor's name, dtype and shape, on `device`."""
    header = [(meta.name, str(meta.dtype).removeprefix("torch."), meta.shape) for meta in metas]
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(device)
    _broadcast(group, torch.tensor([text.numel()], device=device, dtype=torch.int64))
    _broadcast(group, text)


def _receive_metas(group: BroadcastGroup, device: torch.device) -> tuple[WeightMeta, ...]:
    """Receive a bucket's header; return each tensor's name, dtype and shape, () at the end."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    _broadcast(group, size)
    num_bytes = int(size.item())
    if not 0 < num_bytes <= MAX_HEADER:
        raise _make_header_error(f"its size ({num_bytes}) must be 1 to {MAX_HEADER} bytes")
    text = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _broadcast(group, text)
    return _parse_metas(text.cpu().numpy().tobytes())


def _parse_metas(text: bytes) -> tuple[WeightMeta, ...]:
    """Parse a bucket's JSON header; raise a one-line ValueError if it is invalid or too large."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _make_header_error(f"its text ({quote(text[:100])}) must be JSON") from None
    if not isinstance(header, list):
        raise _make_header_error(f"its text ({quote(header)}) must be a list")
    metas, total = dict[str, WeightMeta](), 0
    for entry in header:
        match entry:
            case [str(name), str(dtype), [*shape]] if (
                dtype in SENT_DTYPES
                and name not in metas
                and len(shape) <= MAX_DIMS
                and all(type(n) is int and 0 <= n < MAX_BUCKET for n in shape)
            ):
                metas[name] = WeightMeta(name, SENT_DTYPES[dtype], tuple(shape))
            case _:
                raise _make_header_error(
                    f"its entry ({quote(entry)}) must be a [name, dtype, shape]"
                )
        # Dims of size 0 count as 1, because the strides of such a tensor must not overflow.
        total += align_bytes(math.prod(max(1, n) for n in shape) * metas[name].dtype.itemsize)
        if total > MAX_BUCKET:
            raise _make_header_error(
                f"the tensors up to {quote(name)} must have <= {MAX_BUCKET} bytes"
            )
    return tuple(metas.values())


def _make_header_error(problem: str) -> ValueError:
    """Return the ValueError for a bucket header with this problem."""
    return ValueError(
        f"the header of a bucket of weights must be one of send_weights, but {problem}: call "
        "send_weights of the same moecore on rank 0 of this group"
    )


def _broadcast(group: BroadcastGroup, tensor: Tensor) -> None:
    """Broadcast rank 0's tensor, in place; raise a one-line RuntimeError if a rank has ended."""
    try:
        group.broadcast(tensor, 0).wait()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"ranks ({group.size()}) of a group for weights must all take part until the end, but "
            f"one is gone or late ({reason:.200}): make a new group and begin a new pass"
        ) from None


@dataclass(frozen=True, slots=True)
class BucketHandle:
    """A picklable handle of a bucket: `rebuild(*arguments)` maps the bucket's memory elsewhere."""

    metas: tuple[WeightMeta, ...]
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


def share_bucket(bucket: WeightBucket) -> BucketHandle:
    """Return a handle with which other processes map the bucket's GPU memory, without a copy.

    The memory is freed when the bucket is deleted here and in all processes that opened it. Call
    `torch.cuda.synchronize` before sending the handle.

    Raises:
        ValueError: for a bucket that is not on a GPU.
    """
    check_arguments(share_bucket, locals())
    if not bucket.flat.is_cuda:
        raise ValueError(
            f"device of the bucket ({bucket.flat.device}) must be a GPU to be shared by a handle: "
            "use send_weights"
        )
    rebuild, arguments = reduce_tensor(bucket.flat)
    return BucketHandle(bucket.metas, rebuild, tuple(arguments))


def open_bucket(handle: BucketHandle, device_index: CountOrZero | None = None) -> WeightBucket:
    """Map the memory of a bucket that another process shared, and return the bucket.

    `device_index` is the GPU's index in this process; None = the index in the sharing process.
    """
    check_arguments(open_bucket, locals())
    arguments = list(handle.arguments)
    if device_index is not None:
        arguments[DEVICE_ARGUMENT] = device_index
    return WeightBucket(handle.metas, handle.rebuild(*arguments))
