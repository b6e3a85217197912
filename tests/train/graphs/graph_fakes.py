"""CUDA graphs without a GPU, of steps and of parts: what was captured runs again at each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.parallel.model.parallel_state import get_moe_state, get_progress
from moecore.train.graphs import forward_backward
from moecore.train.graphs import graphed_part as module
from moecore.train.graphs.graphed_part import flatten_tensors


class FakeRecorder:
    """Replays write where the results of the capture lie, as those of a graph do.

    A backward runs the forward again: that a graph's forward leaves what its backward reads is
    proved on GPUs.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self._forward: Callable[[], Any] = lambda: None
        self._swap: Callable[[], Any] = lambda: None

    @contextmanager
    def aliases(self, modules: Any) -> Iterator[list[Tensor]]:
        with ALIASES(modules) as found:
            places = list(module._list_trained_params(modules))
            self._swap = lambda: swapped(places)
            yield found

    def record(self, function: Any, memory: Any, slot: Any) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        found: Any = function()
        if function.func is module._run_forward:
            self._forward = function
            replay = self._replay_of_forward(function, found)
        else:
            replay = self._replay_of_backward(self._forward, function, found)
        for tensor in tensors_of(found):  # a capture computes nothing
            tensor.data.zero_()

        def counted() -> None:
            self.replays += 1
            replay()

        return counted, found

    def _replay_of_forward(self, function: Any, found: Any) -> Callable[[], None]:
        swap = self._swap

        def replay() -> None:
            with swap(), torch.enable_grad():
                again = function()
            for mine, new in zip(tensors_of(found), tensors_of(again), strict=True):
                mine.data.copy_(new)

        return replay

    def _replay_of_backward(self, forward: Any, function: Any, found: Any) -> Callable[[], None]:
        swap, (_, sources, output_grads) = self._swap, function.args

        def replay() -> None:
            with swap(), torch.enable_grad():
                again = [x for x in tensors_of(forward()) if x.requires_grad]
            grads = torch.autograd.grad(again, sources, output_grads, allow_unused=True)
            for mine, new in zip(found, grads, strict=True):
                if mine is not None:
                    mine.data.copy_(_local(new))

        return replay


ALIASES = module._alias_params


@contextmanager
def swapped(places: Any) -> Iterator[None]:
    before = [owner._parameters[name] for owner, name, _ in places]
    for owner, name, alias in places:
        owner._parameters[name] = alias
    try:
        yield
    finally:
        for (owner, name, _), param in zip(places, before, strict=True):
            owner._parameters[name] = param


@contextmanager
def fake_graphs() -> Iterator[FakeRecorder]:
    """Within, parts are graphs on CPUs too."""
    fake = FakeRecorder()
    fakes = dict(
        _capture_graph=fake.record, _alias_params=fake.aliases, _can_use_graph=lambda x: True
    )
    with patch.multiple(module, **fakes):
        yield fake


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    flatten_tensors(value, found)
    return found


class FakeGraph:
    """Runs what was captured again, and writes where the first run's results lie, as a graph does.

    Python of the model runs again, too, which a graph's replay does not.

    Args:
        function: of a step, with its `model`.
        inputs: of the function.
    """

    def __init__(self, function: Any, inputs: tuple[Tensor, ...]) -> None:
        self.function, self.model, self.inputs = function, function.model, inputs
        capturing = patch("moecore.moe.balance._is_capturing", lambda x: True)
        with capturing, torch.random.fork_rng(devices=[]):
            self.outputs = function(*inputs)
        self.grads = [p.grad for p in self.model.parameters()]
        for layer in get_moe_state(self.model).layers.values():
            for counted in layer.tracker.counts.list_tensors():  # what is captured has not run
                counted.zero_()

    def replay(self) -> None:
        self.model.zero_grad()
        progress: Any = get_progress(self.model)
        before, progress.num_done = progress.num_done, 0  # a graph's replay runs no Python
        with patch("moecore.moe.balance._is_capturing", lambda x: True):
            self.outputs.copy_(self.function(*self.inputs))
        progress.num_done = before
        for param, grad in zip(self.model.parameters(), self.grads, strict=True):
            _local(grad).copy_(_local(param.grad))
            param.grad = None  # a replay sets none


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fake_capture_graph(function, inputs) -> tuple[Any, Any, Exception | None]:
    try:
        graph = FakeGraph(function, inputs)
    except FloatingPointError as error:
        return None, None, error
    return graph, graph.outputs, None


@contextmanager
def fake_steps() -> Iterator[None]:
    """Within, a step is a graph on CPUs too."""
    cpu = torch.device("cpu")
    fakes = dict(_get_gpu_device=lambda model: cpu, _capture_graph=fake_capture_graph)
    fakes |= dict(_call_without_syncs=lambda function, inputs: function(*inputs))
    with (
        patch.multiple(forward_backward, **fakes),
        patch("torch.cuda.synchronize", lambda device: None),
    ):
        yield
