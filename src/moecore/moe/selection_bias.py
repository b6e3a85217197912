"""The module that has the selection bias of a router: an fp32 buffer that no cast changes.

The selection bias is added to the scores only to select experts. An update moves it by about 0.001,
which bf16 would round away. moecore's router has its bias itself. In some transformers models the
MoE block or a child of the gate has it.
"""

from typing import Any, Self

from torch import Tensor, nn


class BiasOwner(nn.Module):
    """A module that may have a router's fp32 selection bias as buffer `bias_name`; "" = none."""

    bias_name: str = ""

    def register_bias(self, name: str, bias_E: Tensor) -> None:
        """Register an fp32 selection bias as the buffer `name`."""
        self.bias_name = name
        self.register_buffer(name, bias_E)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Apply `fn` to parameters and buffers, but leave the selection bias in fp32."""
        bias = self._buffers.get(self.bias_name)
        super()._apply(fn, recurse)
        new_bias = self._buffers.get(self.bias_name)
        if bias is not None and new_bias is not None and new_bias.dtype != bias.dtype:
            self._buffers[self.bias_name] = bias.to(new_bias.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load parameters and buffers, with the selection bias in fp32, also with assign=True."""
        key = prefix + self.bias_name
        if self.bias_name and key in state_dict:
            state_dict[key] = state_dict[key].float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def add_submodule(layer: nn.Module, path: str, child: nn.Module) -> None:
    """Add `child` to `layer` as `path`; a dotted path creates missing parents as empty modules."""
    *holders, name = path.split(".")
    for holder in holders:
        if holder not in layer._modules:
            layer.add_module(holder, BiasOwner())
        layer = layer.get_submodule(holder)
    layer.add_module(name, child)


def get_or_create_bias_owner(layer: nn.Module, path: str) -> BiasOwner:
    """Return the layer's module `path` ("" = the layer); create the module if it is absent."""
    try:
        owner = layer.get_submodule(path)
    except AttributeError:
        owner = BiasOwner()
        add_submodule(layer, path, owner)
    assert isinstance(owner, BiasOwner)
    return owner
