"""Forward and backward of an optimizer step as one CUDA graph.

The host launches one graph where it would launch thousands of kernels, each of which costs it more
time than a small batch costs the GPU. Nothing of the journey changes: the same kernels, collectives
and copies run, as many tokens to as many experts as the routing of each batch says.

    calls 1 .. warm_up      run as they are; the last one is watched for what a graph can not hold
    call warm_up + 1        captured, which computes nothing, then replayed
    calls after it          inputs copied in, replayed, outputs copied out

Each call is a step's real gradients. The optimizer stays outside, so whatever changes from step to
step in Python (learning rate, clipping, schedules) goes on as before.

Note "what a graph does not see": Python runs at capture only. So a replay does here what matters
between steps: what has gone wrong in exchanges is raised, units that something else has left
gathered are let go, `.grad` is the captured gradient again, and facts that the graph holds (where
parameters lie, who needs gradients, how many micro-batches) are compared with the present ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.fsdp.gathered import let_go
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.symmetric import Exchange
from moecore.moe.state import MoEState, moe_state

SYNC_WARNING = "called a synchronizing CUDA operation"
Facts = dict[tuple[str, str], Any]


class GraphedForwardBackward:
    """Runs forward and backward of a step, as one CUDA graph once it is warm.

    Every rank calls it for the same steps. Evaluation, checkpoints and steps of other shapes run
    eagerly in between. Its memory, that of all activations, stays reserved between steps.

    Args:
        forward_backward: takes tensors on the model's GPU, all of a step's micro-batches, and runs
            forward and backward. Returns tensors, or tuples, lists or dicts of them, or None; no
            tensor that still needs backward. Waits for nothing on the GPU, and leaves the optimizer
            alone.
        model: from `parallelize_moe`.
        warm_up: calls that run eagerly first, >= 2: the first makes buffers, the last is watched.

    Raises:
        ValueError: when the model is not on a GPU or not parallelized, or its dispatcher waits for
            sizes on the host.

    Example:
        def forward_backward(tokens_BT, labels_BT):
            loss = model(tokens_BT, labels_BT)
            loss.backward()
            return loss.detach()

        forward_backward = GraphedForwardBackward(forward_backward, model)
        for tokens_BT, labels_BT in batches:
            loss = forward_backward(tokens_BT, labels_BT)
            norm = clip_grad_norm_(model, 1.0, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
            moe_state(model).finish_step(skipped=norm.skipped)
    """

    def __init__(
        self, forward_backward: Callable[..., Any], model: nn.Module, *, warm_up: int = 2
    ) -> None:
        if warm_up < 2:
            raise ValueError(
                f"warm_up ({warm_up}) must be >= 2: the first call makes buffers, the last is "
                "watched"
            )
        self._state = moe_state(model)
        _check_dispatchers(self._state)
        self._device = _gpu_of(model)
        self._forward_backward = forward_backward
        self._model = model
        self._warm_up = warm_up
        self._num_calls = 0
        self._captured: _Captured | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Return what `forward_backward` returns; parameters hold the step's gradients.

        Args:
            inputs: on any device, of the same shapes and dtypes in every call; those in pinned
                memory or on the GPU are read without a wait.

        Returns:
            New tensors.

        Raises:
            ValueError: when gradients of another step are there, inputs have other shapes, what the
                graph holds has changed, or `forward_backward` waits for the GPU, which is said
                after the last warm-up call, whose gradients are good.
            RuntimeError: when capture fails: end the process, since FSDP2 is left inside a step.
            ExchangeError: see `MoEState.finish_step`.
        """
        let_go(self._model)  # a replay does not: see the note
        _check_no_gradients(self._model)
        if self._state.exchanges is not None:
            self._state.exchanges.poll()
        if self._captured is not None:
            return self._captured.replay(inputs)
        self._num_calls += 1
        own = tuple(x.to(self._device, non_blocking=True, copy=True) for x in inputs)
        if self._num_calls < self._warm_up:
            return self._forward_backward(*own)
        if self._num_calls == self._warm_up:
            return _watched(self._forward_backward, own)
        self._captured = _capture(self._forward_backward, self._model, self._state, own)
        return self._captured.replay(inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Captured:
    """A graph, the tensors that it reads and writes, and what it takes for granted.

    Attributes:
        inputs: copied in before a replay.
        outputs: copied out after it.
        grads: parameter, the gradient that the graph writes.
        held: what the facts have addresses of; as long as it lives nothing else has them.
        exchanges: whose buffers the graph writes; they live as long as it.
    """

    graph: torch.cuda.CUDAGraph
    model: nn.Module
    state: MoEState
    inputs: tuple[Tensor, ...]
    outputs: Any
    grads: list[tuple[nn.Parameter, Tensor]]
    facts: Facts
    held: list[Any]
    exchanges: tuple[Exchange, ...]

    def replay(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return copies of the outputs for these inputs; nothing of the model is gathered."""
        _check_inputs(inputs, self.inputs)
        _check_facts(facts_of(self.model, self.state)[0], self.facts)
        _check_exchanges(_exchanges_of(self.state), self.exchanges)
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        for param, grad in self.grads:
            param.grad = grad
        return _map_tensors(torch.clone, self.outputs)


def _capture(
    function: Callable[..., Any], model: nn.Module, state: MoEState, inputs: tuple[Tensor, ...]
) -> _Captured:
    """Return the graph of a call, which has not run yet."""
    _forget_casts(state)
    facts, held = facts_of(model, state)
    graph, first = torch.cuda.CUDAGraph(), None
    try:
        # Other threads (NCCL's, a checkpoint's) may go on with calls that a capture of the whole
        # process would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                outputs = function(*inputs)
            except Exception as error:  # the end of a broken capture raises, too
                first = error
                raise
    except Exception as error:
        reason = str(first or error).partition("\n")[0]
        raise RuntimeError(
            f"forward_backward could not be captured ({reason}): it must launch the same work in "
            "every call and wait for none of it; start again without a graph"
        ) from (first or error)
    let_go(model)  # what is gathered and cast lies in the graph's memory
    _forget_casts(state)
    return _Captured(
        graph=graph,
        model=model,
        state=state,
        inputs=inputs,
        outputs=outputs,
        grads=[(p, p.grad) for p in model.parameters() if p.grad is not None],
        facts=facts,
        held=held,
        exchanges=_exchanges_of(state),
    )


def _watched(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Return what a call returns, unless it waited for the GPU.

    Raises:
        ValueError: afterwards, names the first line that did.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = function(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [w for w in caught if SYNC_WARNING in str(w.message)]
    for other in (w for w in caught if w not in waits):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if waits:
        raise ValueError(
            f"forward_backward must not wait for the GPU in a CUDA graph, but does in "
            f"{len(waits)} places, first at {waits[0].filename}:{waits[0].lineno}: change them, or "
            "run it without a graph"
        )
    _map_tensors(_check_output, outputs)
    return outputs


def facts_of(model: nn.Module, state: MoEState) -> tuple[Facts, list[Any]]:
    """Return what a graph of the model takes for granted, and what must live to compare it later.

    Args:
        model: nothing of it gathered.
        state: of the model.
    """
    facts: Facts = {("the number of micro-batches of", "a step"): state.num_micro_batches}
    held: list[Any] = []
    for name, module in model.named_modules():
        facts["training of", name or "the model"] = module.training
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = _local(tensor)
        facts["requires_grad of", name] = tensor.requires_grad
        facts["the memory of", name] = local.data_ptr()
        held.append(local)
    for name, layer in state.layers.items():
        facts["the balance config of", name] = id(layer.tracker.counts)
        held.append(layer.tracker.counts)
    return facts, held


def _check_facts(now: Facts, captured: Facts) -> None:
    if now == captured:
        return
    what = next(key for key in (*now, *captured) if now.get(key) != captured.get(key))
    raise ValueError(
        f"{' '.join(what)} must be what it was when the graph was captured: make a new "
        "GraphedForwardBackward after a change"
    )


def _exchanges_of(state: MoEState) -> tuple[Exchange, ...]:
    return () if state.exchanges is None else state.exchanges.made


def _check_exchanges(now: tuple[Exchange, ...], captured: tuple[Exchange, ...]) -> None:
    """Others may have been made since; those that other ranks write to must be there."""
    if any(exchange not in now for exchange in captured):
        raise ValueError(
            "the buffers of dispatcher ('nvlink') must be those of when the graph was captured: "
            "make a new GraphedForwardBackward after close()"
        )


def _check_inputs(inputs: tuple[Tensor, ...], captured: tuple[Tensor, ...]) -> None:
    now = [(tuple(x.shape), x.dtype) for x in inputs]
    then = [(tuple(x.shape), x.dtype) for x in captured]
    if now != then:
        raise ValueError(
            f"inputs ({now}) must be as captured ({then}): pad them, or call forward_backward "
            "itself for this step"
        )


def _check_no_gradients(model: nn.Module) -> None:
    """A graph writes gradients, it adds to none."""
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ValueError(
                f"gradient of {name} must be None before a step's forward and backward: call "
                "optimizer.zero_grad() after step(), and give all micro-batches to one call"
            )


def _check_dispatchers(state: MoEState) -> None:
    for name, layer in state.layers.items():
        capacity = layer.config.capacity
        pads = capacity is not None and capacity.pad
        waits = isinstance(layer.dispatcher, AllToAllDispatcher | AllGatherDispatcher) and not pads
        if waits:
            raise ValueError(
                f"dispatcher of {name} ({type(layer.dispatcher).__name__}) must be 'nvlink' or pad "
                "to a capacity for a CUDA graph, because it waits for sizes on the host"
            )


def _gpu_of(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError(
            f"device of the model ({device}) must be a GPU for a CUDA graph: call forward_backward "
            "itself"
        )
    return device


def _forget_casts(state: MoEState) -> None:
    for layer in state.layers.values():
        layer.part("experts").reader.finish_step()


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with other tensors in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        mapped = [_map_tensors(function, v) for v in value]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if value is None:
        return None
    raise ValueError(
        f"outputs of forward_backward ({type(value).__name__}) must be tensors, or tuples, lists "
        "or dicts of them: a number would stay what it was at capture"
    )


def _check_output(output: Tensor) -> Tensor:
    if output.requires_grad:
        raise ValueError(
            "outputs of forward_backward must not need gradients, which it has computed: detach "
            "them"
        )
    return output
