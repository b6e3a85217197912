"""HostAdamW: AdamW that steps the largest parameters on the CPU, with moments in host memory.

    gradients and weights of chunk c + 2   -> pinned memory         copy stream
    chunk c                                   torch's fused AdamW   CPU
    weights of chunk c - 1                 -> GPU                   copy stream
    all other parameters                      one launch            GPU, concurrently

Moments of these parameters are never on the GPU, which saves 8 bytes per parameter. Weights and
gradients stay on the GPU. They are copied in chunks of `CHUNK` elements through `NUM_SLOTS` pinned
slots, so pinned memory does not grow with the model.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from moecore.base.fields import check_value
from moecore.base.streams import start_host_reads
from moecore.base.torch_private import foreach_add_, get_local_tensor
from moecore.kernels.rows.scaling import round_up
from moecore.train.memory.host import ALIGN_BYTES, Slabs, explain_memory_errors
from moecore.train.memory.streams import CopyEvent, CopyStream
from moecore.train.optim.adamw import MOMENTS, AdamW, find_state_dtypes
from moecore.train.optim.gradients import get_grad, run_closure
from moecore.train.optim.state_offload import Fraction, compute_shard_bytes, select_largest

CHUNK = 2**24  # elements
VECTOR = 64  # elements: torch's loop rounds elements behind its last whole vector differently
NUM_SLOTS = 3  # one is copied in, one is stepped, one is copied out
Row = tuple[Tensor, ...]  # flat tensors with equal numbers of elements, then a scalar
Columns = Sequence[Sequence[Tensor]]  # flat tensors; each column has one dtype


class HostAdamW(AdamW):
    """`AdamW` that steps the largest parameters on the CPU, with their moments in host memory.

    State has torch's names and layout, so `AdamW`, torch's AdamW and this class load each other's
    checkpoints. A step is skipped and gradients are scaled as in `AdamW`. `step` has one host sync
    to read the two signals, and returns when the CPU has finished.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.
        host_fraction: maximum share of the parameters' bytes that the host steps, 0 to 1. The
            largest parameters that fit are chosen, identically on all ranks.
        moment_dtype: the dtype of moments on the GPU; moments on the host are fp32.

    Raises:
        ValueError: when a value has a wrong type or range.

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
        self._slots: HostSlots | None = None
        super().__init__(params, lr, betas, eps, weight_decay, moment_dtype=moment_dtype)

    def get_class_options(self) -> dict[str, Any]:
        """Return constructor options that are not in `param_groups`, {name: value}."""
        return {**super().get_class_options(), "host_fraction": self.host_fraction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = None
        self._choose_host_params()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch, and choose again which parameters the host steps."""
        super().add_param_group(param_group)
        self._choose_host_params()

    def get_state_device(self, param: Tensor) -> torch.device:
        """Return the device of a parameter's state: the CPU if the host steps the parameter."""
        return torch.device("cpu") if param in self.host_params else param.device

    def restore_state(self, param: Tensor, saved_state: dict[str, Tensor]) -> None:
        """Set a parameter's state as `AdamW` does; MemoryError if host memory is insufficient."""
        if param not in self.host_params:
            super().restore_state(param, saved_state)
            return
        with self._explain_memory_errors():  # the host steps flat moments
            flat = {name: saved_state[name].contiguous() for name in ("step", *MOMENTS)}
            super().restore_state(param, flat)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return `closure()`, None without a closure.

        Raises as `AdamW.step`, and MemoryError before any change if host memory is insufficient.
        """
        loss = run_closure(closure)
        params = [param for param in self.host_params if param.grad is not None]
        if not params:
            inspect.unwrap(AdamW.step)(self)
            return loss
        chunks = [
            (number, list(zip(*chunk, strict=True)))
            for number, group in enumerate(self.param_groups)
            for rows in self._collect_rows(group)
            for chunk in cut_into_chunks(rows, CHUNK, VECTOR)
        ]
        slots = self._slots = self._slots or HostSlots(CopyStream(params[0].device), NUM_SLOTS)
        parts = [columns[:2] for _, columns in chunks]  # weights and gradients
        with self._explain_memory_errors():
            slots.reserve_slots(parts)
        values: dict[Any, Any] = {n: getattr(self, n, None) for n in ("found_inf", "grad_scale")}
        values |= {number: group["lr"] for number, group in enumerate(self.param_groups)}
        read_signals = start_host_reads(values)
        slots.stream.wait_for_current_stream()
        host_copies = slots.start_copies(parts)
        try:
            inspect.unwrap(AdamW.step)(self)  # torch's hooks run around `step`, once
            signals = read_signals()  # the one host sync of a step for signals
            if not signals["found_inf"]:
                for (number, columns), copies in zip(chunks, host_copies, strict=True):
                    self._step_on_host(number, columns, copies, signals)
                    for weight, copy in zip(columns[0], copies[0], strict=True):
                        slots.stream.copy(weight, copy)
                foreach_add_([self.state[param]["step"] for param in params], 1)
        finally:  # later work reads updated weights and may free gradients
            slots.stream.wait_for_event(slots.stream.record_event())
        return loss

    def _choose_host_params(self) -> None:
        """Choose the parameters that the host steps, identically on every rank."""
        sizes = {p: compute_shard_bytes(p) for p in self._list_params()}
        sizes |= {p: 0 for p in sizes if not get_local_tensor(p).is_contiguous()}
        self.host_params = {p for p in select_largest(self.host_fraction, sizes) if sizes[p]}

    def _get_state_dtypes(self, param: Tensor) -> Mapping[str, torch.dtype]:
        if param in self.host_params:
            return find_state_dtypes(param.dtype, torch.float32, False)
        return super()._get_state_dtypes(param)

    def _explain_memory_errors(self) -> AbstractContextManager[None]:
        return explain_memory_errors(
            f"host_fraction ({self.host_fraction}) of the optimizer's state"
        )

    def _collect_rows(self, param_group: dict[str, Any]) -> list[list[Row]]:
        """Return lists of rows of equal dtypes, one row per parameter that the host steps.

        A row is (weight, gradient, exp_avg, exp_avg_sq, step), with flat local shards.
        """
        rows: dict[Any, list[Row]] = {}
        for param in param_group["params"]:
            if param not in self.host_params or param.grad is None:
                continue
            grad = get_grad(param)
            with self._explain_memory_errors():
                state = self.prepare_state(param)
            tensors: Any = param, *map(state.get, MOMENTS)
            weight, *moments = (get_local_tensor(x).view(-1) for x in tensors)
            row = weight, get_local_tensor(grad).contiguous().view(-1), *moments, state["step"]
            rows.setdefault((param.dtype, grad.dtype), []).append(row)
        return list(rows.values())

    def _step_on_host(
        self, group_idx: int, columns: Columns, host_copies: Columns, signals: dict[Any, Any]
    ) -> None:
        """Step a chunk of a param group on the CPU; change moments and host weights in place.

        `columns` are the fields of the chunk's rows, and `host_copies` its weights and gradients.
        `signals` has "grad_scale", and the lr by group number.
        """
        # fp32 parameters have the bits of `torch.optim.AdamW(fused=True)` on a CPU. A GPU rounds
        # divisions and roots differently, by at most 2 fp32 ulps a step. bf16 and fp16 parameters
        # are stepped in fp32, with fp32 moments, and rounded to nearest, as `AdamW` does.
        group, scale = self.param_groups[group_idx], signals["grad_scale"]
        weights, grads = host_copies
        (beta1, beta2), wide = group["betas"], torch.promote_types(weights[0].dtype, torch.float32)
        widened = [weight.to(wide) for weight in weights]
        if scale is not None:
            scale = torch.tensor(float(scale), dtype=torch.float32, device="cpu")
        adamw(
            widened,
            [grad.to(wide) for grad in grads],
            list(columns[2]),
            list(columns[3]),
            [],
            [step.clone() for step in columns[4]],  # adamw adds 1; rows share a step
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=float(beta1),
            beta2=float(beta2),
            lr=float(signals[group_idx]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for weight, result in zip(weights, widened, strict=True):
            if result is not weight:
                weight.copy_(result)


def cut_into_chunks(rows: Iterable[Row], max_elements: int, multiple: int) -> Iterator[list[Row]]:
    """Yield lists (chunks) of rows with at most `max_elements` elements.

    A row is a tuple of 1-D tensors of equal size n, then a scalar, and counts n elements. If a row
    does not fit in a chunk, its tensors are cut at a multiple of `multiple` elements, and each
    piece has the scalar.
    """
    chunk, room = list[Row](), max_elements
    for *tensors, scalar in rows:
        start, end = 0, tensors[0].numel()
        while start < end:
            stop = min(end, start + room // multiple * multiple)
            if stop > start:
                chunk.append((*(tensor[start:stop] for tensor in tensors), scalar))
            room, start = room - (stop - start), stop
            if start < end:
                yield chunk
                chunk, room = [], max_elements
    if chunk:
        yield chunk


class HostSlots:
    """Host buffers (slots), pinned for a GPU; a slot has the copies of one chunk of tensors."""

    def __init__(self, stream: CopyStream, num_slots: int) -> None:
        self.stream, self._num_slots = stream, num_slots
        self._slabs = Slabs(stream.device.type)

    def reserve_slots(self, chunks: Iterable[Columns]) -> None:
        """Allocate slots that fit the largest of `chunks`, unless the slots are large enough."""
        num_bytes = 0
        for columns in chunks:  # a slot has an equally large part for each column
            part_bytes = max(sum(tensor.nbytes for tensor in column) for column in columns)
            num_bytes = max(num_bytes, len(columns) * round_up(part_bytes, ALIGN_BYTES))
        if self._slabs.num_bytes < num_bytes * self._num_slots:
            self._slabs.clear()
            for _ in range(self._num_slots):
                self._slabs.allocate_slab(num_bytes)

    def start_copies(self, chunks: Iterable[Columns]) -> Iterator[list[list[Tensor]]]:
        """Start the first copies to the host; return an iterator over each chunk's host copies.

        An item has one list per column of the chunk (such as gradients), with one tensor per
        parameter. The host waits for each chunk's copy. Copies are valid until the next iteration.
        """
        # Copies that the caller starts before it takes the next chunk precede the slot's next use.
        remaining, filled = iter(chunks), deque[tuple[Tensor, list[list[Tensor]], CopyEvent]]()

        def fill(memory: Tensor) -> None:
            """Start to copy the next chunk, if any, to a slot's memory."""
            columns = next(remaining, None)
            if columns is not None:
                copies: list[list[Tensor]] = []
                for part, sources in zip(memory.chunk(len(columns)), columns, strict=True):
                    flat = part[: sum(x.nbytes for x in sources)].view(sources[0].dtype)
                    copies.append(list(flat.split([x.numel() for x in sources])))
                    for target, source in zip(copies[-1], sources, strict=True):
                        self.stream.copy(target, source)
                filled.append((memory, copies, self.stream.record_event()))

        def pass_through() -> Iterator[list[list[Tensor]]]:
            """Yield the host copies of each chunk; then reuse their memory for a later chunk."""
            while filled:
                memory, copies, event = filled.popleft()
                event.synchronize()
                yield copies
                fill(memory)

        for slab in self._slabs.slabs:
            fill(slab.memory)
        return pass_through()
