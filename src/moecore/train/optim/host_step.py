"""HostAdamW: AdamW whose largest parameters are stepped by the CPU, with moments in host memory.

    gradients and weights of chunk c + 2   -> pinned memory         stream of the copies
    chunk c                                   torch's fused AdamW   CPU
    weights of chunk c - 1                 -> GPU                   stream of the copies
    all other parameters                      one launch            GPU, at the same time

Moments of these parameters never lie on the GPU, which saves 8 bytes per parameter. Weights and
gradients stay on the GPU. They are copied in chunks of `CHUNK` elements through `NUM_SLOTS` pinned
slots, so pinned memory does not grow with the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from moecore.base.fields import check_value
from moecore.base.torch_private import foreach_add_, local_of
from moecore.train.memory.host import of_host_memory
from moecore.train.memory.streams import CopyMark, CopyStream
from moecore.train.optim.adamw import MOMENTS, AdamW, grad_of, loss_of_closure
from moecore.train.optim.state_offload import Fraction, largest_up_to

CHUNK = 2**24  # elements
VECTOR = 64  # elements: torch's loop rounds elements behind its last whole vector differently
NUM_SLOTS = 3  # one is copied in, one is stepped, one is copied out
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _MomentPiece:
    """Some elements of this rank's shard of a parameter; `step` counts earlier updates."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    def part(self, start: int, stop: int) -> _MomentPiece:
        """Return the elements from start to stop."""
        elements = slice(start, stop)
        return _MomentPiece(
            self.weight[elements],
            self.grad[elements],
            self.exp_avg[elements],
            self.exp_avg_sq[elements],
            self.step,
        )


@dataclass(frozen=True, slots=True)
class _HostChunk:
    """Pieces of one group with equal dtypes of weights and of gradients; <= `CHUNK` elements."""

    pieces: list[_MomentPiece]
    number: int
    group: dict[str, Any]

    def num_bytes(self) -> int:
        """Return the larger of the weights' bytes and the gradients' bytes."""
        first = self.pieces[0]
        size = max(first.weight.element_size(), first.grad.element_size())
        return size * sum(piece.weight.numel() for piece in self.pieces)


class _HostSlot:
    """Pinned memory for a chunk: `num_bytes` for weights, and as many for gradients."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._weights, self._grads = (
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )
        self.mark: CopyMark | None = None  # the end of the copies to it

    def views(self, chunk: _HostChunk) -> tuple[list[Tensor], list[Tensor]]:
        """Return memory for the weights and for the gradients of the pieces."""
        return (
            _cut(self._weights, [piece.weight for piece in chunk.pieces]),
            _cut(self._grads, [piece.grad for piece in chunk.pieces]),
        )


class HostAdamW(AdamW):
    """`AdamW` that steps the largest parameters on the CPU, with their moments in host memory.

    State has torch's names and layout, so `AdamW`, torch's AdamW and this class load each other's
    checkpoints. It skips and scales a step like `AdamW`. `step` has one host sync for these signals
    and returns when the CPU is done.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.
        host_fraction: the part of the parameters' bytes that the host steps at most, 0 to 1. The
            largest parameters that fit are chosen, the same on all ranks.
        moment_dtype: the dtype of moments on the GPU; those on the host are fp32.

    Raises:
        ValueError: when a value has another type or range.

    Source: https://arxiv.org/abs/2101.06840 (ZeRO-Offload).
    """

    checkpoint_class = "AdamW"  # the class whose state and hyperparameters a checkpoint has

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        host_fraction: Fraction = 0.5,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_value("host_fraction", host_fraction, Fraction)
        self.host_fraction = host_fraction
        self._slots: list[_HostSlot] = []
        self._stream: CopyStream | None = None
        super().__init__(params, lr, betas, eps, weight_decay, moment_dtype=moment_dtype)

    def own_options(self) -> dict[str, Any]:
        """Return the options that are not in `param_groups`; ranks must agree on them."""
        return {**super().own_options(), "host_fraction": self.host_fraction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots, self._stream = [], None
        self._choose()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; it may change which parameters are stepped on the host."""
        super().add_param_group(param_group)
        self._choose()

    def moment_dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's moments in a checkpoint."""
        if param in self.host_params:
            return torch.promote_types(param.dtype, torch.float32)
        return super().moment_dtype_of(param)

    def state_device_of(self, param: Tensor) -> torch.device:
        """Return the device of a parameter's state."""
        return CPU if param in self.host_params else param.device

    @torch.no_grad()
    def restore_state(self, param: Tensor, saved_state: dict[str, Tensor]) -> None:
        """Set a parameter's state from that of any AdamW; tensors that fit are not copied."""
        if param not in self.host_params:
            super().restore_state(param, saved_state)
            return
        dtype = self.moment_dtype_of(param)
        with self._of_host_memory():
            moments = {m: saved_state[m].to(CPU, dtype).contiguous() for m in MOMENTS}
        self.state[param] = {"step": saved_state["step"].to(CPU, torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            ValueError: as `AdamW.step`.
            MemoryError: when host memory is short; no parameter or state has changed.
        """
        loss = loss_of_closure(closure)
        grads = {param: param.grad for param in self.host_params if param.grad is not None}
        if not grads:
            inspect.unwrap(AdamW.step)(self)
            return loss
        chunks = self._chunks()
        if self._stream is None:
            self._stream = CopyStream(local_of(next(iter(grads))).device)
        stream = self._stream
        stream.follow()
        signals = _Signals(self, stream)
        for chunk, slot in zip(chunks, self._slots, strict=False):
            _bring(stream, chunk, slot)
        try:
            self._step_on_device(grads)
            if not signals.wait():
                self._step_on_host(chunks, signals, stream)
                foreach_add_([self.state[param]["step"] for param in grads], 1)
        finally:
            stream.hold(stream.mark())  # later work reads updated weights and may free gradients
        return loss

    def _choose(self) -> None:
        """Choose the parameters that the host steps, the same on every rank."""
        params = [param for group in self.param_groups for param in group["params"]]
        movable = {p: _bytes_of(p) if local_of(p).is_contiguous() else 0 for p in params}
        self.host_params = {p for p in largest_up_to(self.host_fraction, movable) if movable[p]}

    def _step_on_device(self, grads: dict[Tensor, Tensor]) -> None:
        """Update the parameters that the GPU steps; the host's have no gradient meanwhile."""
        for param in grads:
            param.grad = None
        try:
            inspect.unwrap(AdamW.step)(self)  # torch's hooks run around `step`, once
        finally:
            for param, grad in grads.items():
                param.grad = grad

    def _step_on_host(
        self, chunks: list[_HostChunk], signals: _Signals, stream: CopyStream
    ) -> None:
        for number, chunk in enumerate(chunks):
            slot = self._slots[number % NUM_SLOTS]
            if slot.mark is not None:
                slot.mark.synchronize()
            weights, grads = slot.views(chunk)
            _update(chunk, weights, grads, signals)
            for piece, weight in zip(chunk.pieces, weights, strict=True):
                stream.copy(piece.weight, weight)
            if number + NUM_SLOTS < len(chunks):
                _bring(stream, chunks[number + NUM_SLOTS], slot)

    def _chunks(self) -> list[_HostChunk]:
        """Return the chunks that the host steps; make missing state and slots."""
        chunks = [
            chunk
            for number, group in enumerate(self.param_groups)
            for pieces in self._pieces(group)
            for chunk in _chunk_pieces(pieces, number, group)
        ]
        num_bytes = max((chunk.num_bytes() for chunk in chunks), default=0)
        if not self._slots or self._slots[0].num_bytes < num_bytes:
            pinned = bool(chunks) and chunks[0].pieces[0].weight.is_cuda
            self._slots = []
            with self._of_host_memory():
                self._slots = [_HostSlot(num_bytes, pinned=pinned) for _ in range(NUM_SLOTS)]
        return chunks

    def _of_host_memory(self) -> AbstractContextManager[None]:
        return of_host_memory(f"host_fraction ({self.host_fraction}) of the optimizer's state")

    def _pieces(self, group: dict[str, Any]) -> list[list[_MomentPiece]]:
        """Return this rank's shards of a group that the host steps, in one list per dtypes."""
        pieces: dict[Any, list[_MomentPiece]] = {}
        for param in group["params"]:
            if param not in self.host_params or param.grad is None:
                continue
            grad, state = grad_of(param), self._host_state(param)
            changed = (local_of(x).view(-1) for x in (param, *(state[m] for m in MOMENTS)))
            weight, exp_avg, exp_avg_sq = changed
            flat_grad = local_of(grad).contiguous().view(-1)
            piece = _MomentPiece(weight, flat_grad, exp_avg, exp_avg_sq, state["step"])
            pieces.setdefault((param.dtype, grad.dtype), []).append(piece)
        return list(pieces.values())

    def _host_state(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter on the host: new, or converted to the host's format."""
        state: dict[str, Tensor] = self.state[param]
        dtype = self.moment_dtype_of(param)
        if not state:
            with self._of_host_memory():
                moments = [torch.zeros_like(param, dtype=dtype, device=CPU) for _ in MOMENTS]
            state |= {"step": torch.zeros((), dtype=torch.float32)}
            state |= dict(zip(MOMENTS, moments, strict=True))
        if "exponents" in state or {t.device for t in state.values()} != {CPU}:
            self.restore_state(param, self.stored_state(param))
            state = self.state[param]
        return state


class _Signals:
    """Device values that the host reads for a step: skip, gradient scale, learning rates."""

    def __init__(self, optimizer: HostAdamW, stream: CopyStream) -> None:
        values: dict[Any, Any] = {
            name: getattr(optimizer, name, None) for name in ("found_inf", "grad_scale")
        }
        values |= {number: group["lr"] for number, group in enumerate(optimizer.param_groups)}
        self._values = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
        on_device = {k: v for k, v in values.items() if isinstance(v, Tensor)}
        self._names = list(on_device)
        self._source = [v.detach().double().view(()) for v in on_device.values()]
        self._host = [
            torch.empty((), dtype=torch.float64, pin_memory=x.is_cuda) for x in self._source
        ]
        stream.follow()
        for target, source in zip(self._host, self._source, strict=True):
            stream.copy(target, source)
        self._mark = stream.mark()

    def wait(self) -> bool:
        """Return whether the step is skipped. This is the one host sync of a step for signals."""
        self._mark.synchronize()
        self._values |= dict(zip(self._names, (x.item() for x in self._host), strict=True))
        return bool(self._values["found_inf"])

    @property
    def grad_scale(self) -> Tensor | None:
        """The divisor of the gradients, fp32 on the host; None = 1."""
        value = self._values["grad_scale"]
        return None if value is None else torch.tensor(value, dtype=torch.float32)

    def lr(self, group: int) -> float:
        """Return the learning rate of a group."""
        return float(self._values[group])


def _chunk_pieces(
    pieces: list[_MomentPiece], number: int, group: dict[str, Any]
) -> Iterator[_HostChunk]:
    """Yield chunks of pieces, which are cut at multiples of `VECTOR`."""
    chunk: list[_MomentPiece] = []
    room = CHUNK
    for piece in pieces:
        start, end = 0, piece.weight.numel()
        while start < end:
            stop = min(end, start + room // VECTOR * VECTOR)
            if stop > start:
                chunk.append(piece.part(start, stop))
            room, start = room - (stop - start), stop
            if start < end:
                yield _HostChunk(chunk, number, group)
                chunk, room = [], CHUNK
    if chunk:
        yield _HostChunk(chunk, number, group)


def _bring(stream: CopyStream, chunk: _HostChunk, slot: _HostSlot) -> None:
    """Start to copy a chunk to the host."""
    # Weights are copied in every step. A copy that stays on the host would save 4 of 12 bytes, but
    # the next step would undo any write to `param.data`.
    weights, grads = slot.views(chunk)
    for piece, weight, grad in zip(chunk.pieces, weights, grads, strict=True):
        stream.copy(weight, piece.weight)
        stream.copy(grad, piece.grad)
    slot.mark = stream.mark()


def _update(
    chunk: _HostChunk, weights: list[Tensor], grads: list[Tensor], signals: _Signals
) -> None:
    """Step a chunk by torch's fused AdamW; weights and moments change in place."""
    # fp32 parameters have the bits of `torch.optim.AdamW(fused=True)` on a CPU. A GPU rounds
    # divisions and roots differently, by at most 2 fp32 ulps a step. bf16 and fp16 parameters are
    # stepped in fp32, with fp32 moments, and rounded to nearest, as `AdamW` does.
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    widened = [weight.to(wide) for weight in weights]
    beta1, beta2 = chunk.group["betas"]
    adamw(
        widened,
        [grad.to(wide) for grad in grads],
        [piece.exp_avg for piece in chunk.pieces],
        [piece.exp_avg_sq for piece in chunk.pieces],
        [],
        [piece.step.clone() for piece in chunk.pieces],  # adamw adds 1; pieces share a step
        fused=True,
        grad_scale=signals.grad_scale,
        amsgrad=False,
        beta1=float(beta1),
        beta2=float(beta2),
        lr=signals.lr(chunk.number),
        weight_decay=chunk.group["weight_decay"],
        eps=chunk.group["eps"],
        maximize=False,
    )
    for weight, result in zip(weights, widened, strict=True):
        if result is not weight:
            weight.copy_(result)


def _cut(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return flat views of memory, side by side, for tensors of one dtype."""
    sizes = [tensor.numel() for tensor in like]
    num_bytes = sum(sizes) * like[0].element_size()
    return list(memory[:num_bytes].view(like[0].dtype).split(sizes))


def _bytes_of(param: Tensor) -> int:
    """Return the bytes of the largest shard of a parameter, which is equal on all ranks."""
    num_parts = 1
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            num_parts *= 1 if placement.is_replicate() else param.device_mesh.size(dim)
    return -(-param.numel() // num_parts) * param.element_size()
