"""GraphedPart: a part of a model whose forward is one CUDA graph, and its backward another.

calls 1 .. WARM_UP      run eagerly
call WARM_UP + 1        captures both graphs, which computes nothing; then runs as later calls do
later calls             inputs copied in, forward replayed; gradients copied in, backward
                        replayed, gradients of inputs and parameters copied out

A part may communicate with the ranks of a process group. NCCL requires that these ranks capture a
collective together and replay it together. In call 4 the ranks therefore compare whether all of
them can capture, otherwise again in calls 8, 16, 32 and so on. After the capture, ranks that run
the same micro-batches decide equally without communication.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moecore.base.params import get_local_param
from moecore.base.rank_checks import gather_first_problem
from moecore.base.saved_tensors import Handle, TensorHandle, is_packing, use_packer
from moecore.base.torch_private import (
    foreach_copy_,
    get_autocast_dtype,
    get_local_tensor,
    get_saved_tensor_hooks,
    is_inside_backward,
    is_plain_eager,
    list_module_hooks,
)
from moecore.kernels.experts.contract import SINK
from moecore.train.graphs.nested import flatten_tensors, unflatten_tensors

WARM_UP = 3  # calls, after which kernels are compiled and caches are filled
T = TypeVar("T")


class _PendingBackward:
    """One forward of a part, and whether its backward has run."""

    __slots__ = ("__weakref__", "has_ended")

    def __init__(self) -> None:
        self.has_ended = False


class _GraphSlot:
    """A CUDA memory pool that the graphs of one micro-batch use from forward to backward."""

    # A graph may use memory that another graph of its pool has freed during capture. So graphs of a
    # pool run one forward through all parts, and its backward, before the next forward. Each slot
    # has a pool; a forward uses the slot of its first part for all parts.

    def __init__(self) -> None:
        self._pool: Any = None
        self._turns: list[weakref.ref[_PendingBackward]] = []

    @property
    def pool(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    @property
    def is_free(self) -> bool:
        self._turns = [turn for turn in self._turns if _has_pending_backward(turn)]
        return not self._turns

    def reserve(self) -> _PendingBackward:
        """Mark the slot as in use by a forward, and return the record of this forward."""
        turn = _PendingBackward()
        self._turns.append(weakref.ref(turn))
        return turn


def _has_pending_backward(pending_ref: weakref.ref[_PendingBackward]) -> bool:
    turn = pending_ref()
    return turn is not None and not turn.has_ended


class GraphMemory:
    """Memory that CUDA graphs of parts share: gradient buffers and memory pools, and a stream."""

    def __init__(self) -> None:
        self.slots = [_GraphSlot()]
        self._current = self.slots[0]
        self._stream: torch.cuda.Stream | None = None
        self._grads: dict[Any, Tensor] = {}

    def __reduce__(self) -> Any:  # a copy has graphs of its own
        return GraphMemory, ()

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which graphs are captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def clear(self) -> None:
        """Drop memory pools and gradient buffers, after the graphs of all parts were freed."""
        self.slots = [_GraphSlot()]
        self._current = self.slots[0]
        self._grads.clear()

    def choose_slot(self, graph_pairs: Mapping[_GraphSlot, _GraphPair]) -> _GraphSlot:
        """Return a memory pool whose graph pair has no pending backward, or a new memory pool."""
        pair = graph_pairs.get(self._current)
        if pair is not None and not pair.is_free:
            free = next((slot for slot in self.slots if slot.is_free), None)
            if free is None:
                free = _GraphSlot()
                self.slots.append(free)
            self._current = free
        return self._current

    def get_grads(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return an uninitialised gradient buffer per output; parts share buffers by shape."""
        # A backward copies gradients in and reads them before the backward of another part.
        keys = [(i, x.shape, x.dtype, x.device) for i, x in enumerate(outputs)]
        for key, x in zip(keys, outputs, strict=True):
            if key not in self._grads:
                self._grads[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return [self._grads[key] for key in keys]


class _CallSignature(NamedTuple):
    """Arguments and module state of a call, which must be equal at capture and at replay."""

    spec: Any  # the arguments without their tensors (`flatten_tensors`)
    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]  # and whether each needs a gradient
    autocast: torch.dtype | None  # its dtype; None = off
    facts: list[Any]  # modes, configs and addresses of tensors of the modules


class GraphedPart:
    """Replaces a method by CUDA graphs of its forward and backward, after a warm-up.

    The method reads parameters of `modules`, of which only the first may have hooks. `memory` is
    shared with other parts. If `may_use_graph()` is False, a call runs eagerly; None = always True.
    `group` has the ranks with which the method communicates; None = it does not communicate.
    """

    def __init__(
        self,
        name: str,
        method: Callable[..., Any],
        modules: Sequence[nn.Module],
        memory: GraphMemory,
        may_use_graph: Callable[[], bool] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._init_args = (name, method, modules, memory, may_use_graph, group)
        self._name, self._function, self._modules, self._memory = self._init_args[:4]
        self._may_run, self._group = may_use_graph, group
        self._call: _CallSignature | None = None  # the last call of the warm-up, then of the graphs
        self._num_calls = 0  # of the warm-up, equal on all ranks
        self._num_equal_calls = 0  # calls directly before the last call that equal it
        self._pairs: dict[_GraphSlot, _GraphPair] = {}

    def __reduce__(self) -> Any:
        return GraphedPart, self._init_args

    def drop_graphs(self) -> None:
        """Free the graphs and the shared memory; the part then warms up and is captured again."""
        self._num_calls, self._call, self._pairs = 0, None, {}
        self._memory.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method, eagerly or by replay, and return its result."""
        if not (is_plain_eager() and torch.is_grad_enabled()):
            return self._function(*args, **kwargs)
        tensors: list[Tensor] = []
        spec = flatten_tensors((args, kwargs), tensors)
        if not self._may_use_graph(tensors):
            return self._function(*args, **kwargs)
        facts = self._collect_facts()
        if facts is None:
            return self._function(*args, **kwargs)
        kinds = tuple((x.shape, x.dtype, x.requires_grad) for x in tensors)
        call = _CallSignature(spec, kinds, get_autocast_dtype(tensors[0]), facts)
        # A graph reads parameters at their addresses, which units keep. If an address changes, the
        # part warms up and is captured anew.
        if self._pairs and self._call is not None and call.facts != self._call.facts:
            self._num_calls, self._pairs = 0, {}
        is_ready = call == self._call if self._pairs else self._is_warm(call, tensors[0].device)
        if not is_ready:
            return self._function(*args, **kwargs)
        slot = self._memory.choose_slot(self._pairs)
        pair = self._pairs.get(slot)
        if pair is None:
            pair = self._pairs[slot] = self._capture_call(spec, tensors, slot)
        params = [param for _, _, param in _list_trained_params(self._modules)]
        return pair.replay(tensors, [get_local_param(p, needs_values=False) for p in params])

    def _is_warm(self, call: _CallSignature, device: torch.device) -> bool:
        """Whether `WARM_UP` equal calls precede this call on all ranks. Collective, host sync."""
        self._num_equal_calls = self._num_equal_calls + 1 if call == self._call else 0
        self._num_calls, self._call = self._num_calls + 1, call
        is_warm = self._num_equal_calls >= WARM_UP
        if self._group is None:
            return is_warm
        # Few calls compare, because a part whose shapes differ in every call is never captured.
        if self._num_calls <= WARM_UP or self._num_calls & (self._num_calls - 1):
            return False
        flag = torch.tensor(is_warm, dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def _may_use_graph(self, tensors: list[Tensor]) -> bool:
        if not tensors or not _can_use_graph(tensors[0]) or is_inside_backward():
            return False
        if get_saved_tensor_hooks() is not None and not is_packing():
            return False
        return self._may_run is None or self._may_run()

    def _collect_facts(self) -> list[Any] | None:
        """Return the modules' modes, configs and addresses, or None if capture is impossible."""
        facts: list[Any] = []
        for i, module in enumerate(self._modules):
            if i and list_module_hooks(module):
                return None
            facts += (module.training, vars(module).get("config"))
            for tensor in _list_tensors(module):
                facts += (get_local_tensor(tensor).data_ptr(), tensor.requires_grad)
        return facts

    def _capture_call(self, spec: Any, examples: list[Tensor], slot: _GraphSlot) -> _GraphPair:
        """Capture forward and backward of the method in a memory pool; return both graphs."""
        empty = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in examples)
        inputs = [x.requires_grad_(y.requires_grad) for x, y in zip(empty, examples, strict=True)]
        args, kwargs = unflatten_tensors(spec, inputs)
        function = partial(self._function, *args, **kwargs)
        pair, error = None, None
        try:
            with _alias_params(self._modules) as parameters:
                sources = [x for x in inputs if x.requires_grad] + parameters
                pair = _capture_pair(function, inputs, sources, self._memory, slot)
        except Exception as caught:
            error = caught
        reason = "" if error is None else str(error) or type(error).__name__
        if self._group is not None:
            reason = gather_first_problem(reason, self._group)
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if pair is None or reason:
            raise RuntimeError(
                f"{self._name} could not be captured in a CUDA graph ({reason}): it must launch "
                "the same work in every call and wait for none of it; set DenseOptions.graph=False"
            ) from error
        # Another tensor cannot get an address of `facts`. A changed tensor therefore has another
        # address on every rank, and all ranks of the group warm up again at the same call.
        tensors = [get_local_tensor(x).detach() for m in self._modules for x in _list_tensors(m)]
        pair.memory_owners = (pair.memory_owners, tensors)
        return pair


@dataclass(eq=False, slots=True)
class _GraphPair:
    """The captured forward and backward graphs of a part in one memory pool, and their tensors."""

    slot: _GraphSlot
    forward: Callable[[], None]
    inputs: list[Tensor]
    spec: Any  # of the part's result
    outputs: list[Tensor]  # of the part's result
    memory_owners: Any  # keeps memory of the graphs alive
    backward: Callable[[], None] | None = None  # None if no output needs a gradient
    output_grads: list[Tensor] = field(default_factory=list)  # of outputs that need them
    grads: list[Tensor | None] = field(default_factory=list)  # of inputs and parameters
    holder: weakref.ref[_PendingBackward] | None = None  # of the last forward

    @property
    def is_free(self) -> bool:
        """Whether the last forward of these graphs no longer needs its backward."""
        # A pair has the memory of one forward in flight. A further forward before its backward, as
        # between pipeline stages, captures another pair, which has memory of its own from then on.
        return self.holder is None or not _has_pending_backward(self.holder)

    def replay(self, inputs: list[Tensor], parameters: list[Tensor]) -> Any:
        """Replay the forward graph; return its result, differentiable in inputs and parameters."""
        if self.backward is None:
            self.replay_forward(inputs)
            outputs = _copy_tensors(self.outputs)
        else:
            outputs = list(_GraphReplay.apply(self, len(inputs), *inputs, *parameters))
        return unflatten_tensors(self.spec, outputs)

    def replay_forward(self, inputs: list[Tensor]) -> None:
        with torch.no_grad():
            foreach_copy_(self.inputs, inputs)
        self.forward()


class _GraphReplay(torch.autograd.Function):
    """Autograd function that replays the two graphs of a part in forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, pair: _GraphPair, num_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pair, ctx.turn = pair, pair.slot.reserve()
        pair.holder = weakref.ref(ctx.turn)
        ctx.needs_gradient = [x.requires_grad for x in tensors]
        pair.replay_forward(list(tensors[:num_inputs]))
        outputs = tuple(x.detach() for x in pair.outputs)
        fixed = [o for o, x in zip(outputs, pair.outputs, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pair = ctx.pair
        if ctx.turn.has_ended or pair.holder() is not ctx.turn:
            raise RuntimeError(
                "backward of a part that runs as a CUDA graph must come once, before the next "
                "forward of its kind: run the forward again, or set DenseOptions.graph=False"
            )
        output_grads = [g for g, x in zip(grads, pair.outputs, strict=True) if x.requires_grad]
        foreach_copy_(pair.output_grads, output_grads)
        pair.backward()
        grad_copies = iter(_copy_tensors([grad for grad in pair.grads if grad is not None]))
        own_grads = iter([None if grad is None else next(grad_copies) for grad in pair.grads])
        ctx.turn.has_ended = True
        return None, None, *(next(own_grads) if needs else None for needs in ctx.needs_gradient)


def _capture_pair(
    function: Callable[[], Any],
    inputs: list[Tensor],
    leaves: list[Tensor],
    memory: GraphMemory,
    slot: _GraphSlot,
) -> _GraphPair:
    """Capture `function()` of `inputs`, and the backward that computes gradients of `leaves`."""
    saved_tensors: list[Tensor] = []
    forward, result = _capture_graph(partial(_run_forward, function, saved_tensors), memory, slot)
    outputs: list[Tensor] = []
    spec = flatten_tensors(result, outputs)
    trained = [x for x in outputs if x.requires_grad]
    pair = partial(_GraphPair, slot=slot, forward=forward, inputs=inputs, spec=spec)
    if not trained:
        return pair(outputs=outputs, memory_owners=saved_tensors)
    output_grads = memory.get_grads(trained)
    backward, grads = _capture_graph(
        partial(_compute_gradients, trained, leaves, output_grads), memory, slot
    )
    # Operations may also save tensors without autograd, for as long as their nodes live.
    return pair(
        backward=backward,
        outputs=outputs,
        output_grads=output_grads,
        grads=list(grads),
        memory_owners=(saved_tensors, leaves),
    )


def _run_forward(function: Callable[[], Any], saved_tensors: list[Tensor]) -> Any:
    """Run a function; append tensors saved for backward to `saved_tensors`, to keep them alive."""

    def keep(tensor: Tensor) -> Handle:
        saved_tensors.append(tensor.detach())
        return TensorHandle(tensor)

    autocast: AbstractContextManager[Any] = nullcontext()
    if torch.is_autocast_enabled("cuda"):  # casts of weights are not cached for later work
        dtype = torch.get_autocast_dtype("cuda")
        autocast = torch.autocast("cuda", dtype=dtype, cache_enabled=False)
    with use_packer(keep), autocast:
        return function()


def _compute_gradients(
    outputs: list[Tensor], leaves: list[Tensor], output_grads: list[Tensor]
) -> tuple[Tensor | None, ...]:
    # Autograd's thread of the device may run a pair's backward, so this one runs in its own thread.
    with torch.autograd.set_multithreading_enabled(False):
        grads = torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True)
    return tuple(None if grad is None else get_local_tensor(grad) for grad in grads)


def _capture_graph(
    function: Callable[[], T], memory: GraphMemory, slot: _GraphSlot
) -> tuple[Callable[[], None], T]:
    """Capture `function()` in a CUDA graph; return the graph's replay and the function's result."""
    graph, current, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
    gc.disable()  # the free of a dead model may wait for the GPU, which breaks a capture
    memory.stream.wait_stream(current)
    try:
        with torch.cuda.stream(memory.stream):
            graph.capture_begin(pool=slot.pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # the end of a broken capture raises
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    current.wait_stream(memory.stream)
    return graph.replay, result


@contextmanager
def _alias_params(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    trained, aliases = list(_list_trained_params(modules)), list[Tensor]()
    for module, name, param in trained:
        alias = nn.Parameter(param.detach())
        vars(alias).update({key: value for key, value in vars(param).items() if key != SINK})
        module._parameters[name] = alias
        aliases.append(alias)
    try:
        yield aliases
    finally:
        for module, name, param in trained:
            module._parameters[name] = param


def _list_tensors(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _list_trained_params(
    modules: Sequence[nn.Module],
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param.requires_grad:
                yield module, name, param


def _can_use_graph(tensor: Tensor) -> bool:
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def _copy_tensors(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(x) for x in tensors]
    if copies:
        foreach_copy_(copies, tensors)
    return copies
