"""`trace_results`: checksums of the results of forward and backward on this rank, in their order.

Results are the inputs and outputs of modules with parameters, their gradients, and parameter
gradients before the reduction. Rounding of a sum may remove a small error of one summand, so a
checksum of the sum may not show the error. Modules inside compiled code have no checksums,
unless they have FSDP hooks. If the traces of two equal runs differ, the first different checksum
names the module. All ranks compute the same modules in the same order. If a rank sends a wrong
value to other ranks, the checksums of these ranks differ at a later module.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.rank_checks import compute_checksum
from moecore.base.torch_private import (
    disable_dispatch_modes,
    get_local_tensor,
    is_inside_backward,
    patch_attributes,
    tree_leaves,
)
from moecore.moe.layer import RoutedLayer
from moecore.parallel.fsdp.gradients import Gradients
from moecore.parallel.fsdp.params import UnitParam
from moecore.parallel.model.parallel_state import list_engines, list_parallel_states


class ResultTrace:
    """Checksums of results, each with a name such as "forward, output of layers.1"."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._checksums: list[Tensor] = []  # 0-dim int64

    def read(self) -> Tensor:
        """Return all checksums, int64 [results] on the host. Host sync."""
        return torch.stack(self._checksums).cpu()

    def restart(self) -> None:
        """Drop all checksums, because the step repeats with larger buffers (`train/rerun.py`)."""
        self.places, self._checksums = [], []

    @torch.no_grad()
    def record(self, tensor: Tensor, place: str) -> None:
        """Append the checksum of a local tensor. No host sync."""
        with disable_dispatch_modes():
            self._checksums.append(compute_checksum(get_local_tensor(tensor)))
        self.places.append(place)

    def record_activations(self, place: str, values: Any) -> None:
        """Append checksums of nested floating point tensors, and of their gradients in backward."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                phase = "backward" if is_inside_backward() else "forward"  # backward recomputes
                self.record(leaf, f"{phase}, {place}")
                if leaf.requires_grad:
                    leaf.register_hook(partial(self.record, place=f"backward, {place}"))


@contextmanager
def trace_results(model: nn.Module) -> Iterator[ResultTrace]:
    """Return a context that yields the trace of the last forward and backward inside it."""
    trace, units = ResultTrace(), [unit for engine in list_engines(model) for unit in engine.units]
    names = {unit.gradients: [param.slot.param for param in unit.params] for unit in units}
    states = list_parallel_states(model)
    modules = {module for module in model.modules() if any(True for _ in module.parameters())}
    modules -= {module for state in states for module in state.compiled}
    modules |= {module for unit in units for module in unit.modules}
    has_handles = any(state.request.dispatch.fp8 for state in states)
    for layer in (module for module in model.modules() if isinstance(module, RoutedLayer)):
        pads = layer.config.capacity is not None and layer.config.capacity.pad
        if has_handles or layer.dispatcher.has_spare_rows(pads=pads):  # memory without values
            modules -= set(layer.get_part("experts").modules()) - {layer}
    accumulate, pop_grad = Gradients.compute_and_accumulate, UnitParam.pop_grad

    def record_kernel_grad(gradients: Any, index: int, shape: Any, compute: Any, *x: Any) -> Any:
        def compute_and_record(*operands: Any) -> Tensor:
            grad: Tensor = compute(*operands)
            trace.record(grad, f"backward, gradient of {names[gradients][index]}")
            return grad

        return accumulate(gradients, index, shape, compute_and_record, *x)

    def record_autograd_grad(param: UnitParam, unsharded: Any) -> Tensor:
        trace.record(unsharded.grad, f"backward, gradient of {param.slot.param}")
        return pop_grad(param, unsharded)

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(lambda *_: trace.restart()).remove)
        for name, module in model.named_modules():
            if module in modules:
                title = name or "the model"
                before = module.register_forward_pre_hook(
                    lambda _, *x, place=f"input of {title}": trace.record_activations(place, x),
                    with_kwargs=True,
                )
                after = module.register_forward_hook(
                    lambda _, _x, y, place=f"output of {title}": trace.record_activations(place, y)
                )
                for handle in (before, after):
                    stack.callback(handle.remove)
        stack.enter_context(patch_attributes(UnitParam, pop_grad=record_autograd_grad))
        with patch_attributes(Gradients, compute_and_accumulate=record_kernel_grad):
            yield trace
