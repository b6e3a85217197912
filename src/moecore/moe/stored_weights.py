"""Parameters that are stored only in quantised blocks, and reads and writes of 4-bit blocks.

Such a parameter has its shape and dtype, but its memory is a single NaN. Its `Blocks` are an
attribute. 4-bit blocks have the dims of the parameter's local tensor: K, the dim that forward sums,
has K / 2 bytes and K / group scales, which are innermost in memory. Example: gpt-oss's weight
[E, I, O] has values [E, I / 2, O], a transposed view of [E, O, I / 2].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.copies import make_dtensor
from moecore.base.options.precision import FrozenFormat
from moecore.base.params import GATHERED_BLOCKS, WRITE_VALUES
from moecore.base.torch_private import get_local_tensor, make_parameter_like
from moecore.kernels.rows.four_bit import FORMATS, dequantise, make_empty_blocks, quantise
from moecore.kernels.rows.scaling import Blocks

# Attribute of a 4-bit parameter: a function (values, slices) that adds merged adapters to exported
# fp32 values, in place. The values are `slices` of the local tensor.
EXPORT_UPDATE = "_moecore_export_update"
STORED_NUMEL = 1 << 22  # values, at least one row, that `store_in_four_bits` quantises at once


class HostMatrix(Protocol):
    """Host memory for a 4-bit parameter's blocks (values and scales), and copies on the device."""

    def allocate(self, device: torch.device) -> HostBlocks:
        """Return the blocks in host memory; on the meta device until a call for a real `device`."""

    def fetch(self) -> Blocks:
        """Return the blocks on the device, ready for kernels on its current stream."""

    def drop_device_copies(self) -> None:
        """Free the copies on the device. Call it before writes to host blocks. Host sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlocks(Blocks):
    """Blocks (4-bit values with scales) in host memory; `matrix` copies them to the device."""

    matrix: HostMatrix


def get_four_bit_blocks(param: Tensor) -> Blocks | None:
    """Return the 4-bit values and scales of a parameter; None = it is not stored in 4 bits."""
    blocks: Blocks | None = getattr(param, GATHERED_BLOCKS, None)
    return blocks if blocks is not None and blocks.kind in FORMATS else None


def get_host_matrix(param: Tensor) -> HostMatrix | None:
    """Return the host memory of a 4-bit parameter; None = its blocks are not in host memory."""
    blocks = get_four_bit_blocks(param)
    return blocks.matrix if isinstance(blocks, HostBlocks) else None


def make_stored_parameter(
    param: nn.Parameter, blocks: Blocks, value: Tensor | None = None
) -> nn.Parameter:
    """Return a parameter like `param` that stores only `blocks`, quantised values with scales.

    The parameter's tensor has the shape of `param` and one nan as storage. It has the dtype and
    device of `value`, whose contents are not read; None = as `param`.
    """
    local = get_local_tensor(param).detach()
    nan = (local if value is None else value).new_full((), torch.nan)
    nothing: Tensor = nan.expand(local.shape)
    if isinstance(param, DTensor):
        nothing = make_dtensor(nothing, param.device_mesh, param.placements, like=param)
    new_param = make_parameter_like(nothing, param)
    _set_blocks(new_param, blocks)
    return new_param


def _set_blocks(param: nn.Parameter, blocks: Blocks) -> None:
    """Set the attributes of a parameter that is stored in `blocks`."""
    setattr(param, GATHERED_BLOCKS, blocks)
    if blocks.kind in FORMATS:
        setattr(param, WRITE_VALUES, partial(_write_values, blocks, param.device))


@torch.no_grad()
def store_on_host(param: nn.Parameter, matrix: HostMatrix) -> None:
    """Move the blocks of a 4-bit parameter to host memory, in place."""
    blocks = get_four_bit_blocks(param)
    assert blocks is not None, "the caller has looked"
    host_blocks = matrix.allocate(param.device)
    for target, source in zip(host_blocks.tensors(), blocks.tensors(), strict=True):
        target.copy_(source)
    _set_blocks(param, host_blocks)


@torch.no_grad()
def store_in_four_bits(param: nn.Parameter, kind: FrozenFormat, k: int) -> nn.Parameter:
    """Return a 4-bit copy of a parameter, in blocks along dim `k`, over which matmuls sum."""
    local = get_local_tensor(param).detach()
    shape = tuple(local.movedim(k, -1).shape)
    blocks = make_empty_blocks(shape, kind, local.device)
    blocks = _map_tensors(blocks, lambda t: t.movedim(-1, k))
    rows = max(1, STORED_NUMEL // max(1, local[:1].numel()))  # little temporary memory
    for i in range(0, 0 if local.is_meta else local.shape[0], rows):
        _write_values(blocks, local.device, (slice(i, i + rows),), local[i : i + rows])
    return make_stored_parameter(param, blocks)


def apply_to_blocks(
    module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]
) -> None:
    """Run `apply()`, which is `module._apply(fn)`; of stored parameters, `fn` maps the blocks."""
    named = [(n, p) for n, p in module._parameters.items() if p is not None]
    stored_params = {n: p for n, p in named if hasattr(p, GATHERED_BLOCKS)}
    module._parameters.update(dict.fromkeys(stored_params))
    apply()
    for name, param in stored_params.items():
        module._parameters[name] = _move_stored_parameter(param, fn)


def _move_stored_parameter(param: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Return a stored parameter after `fn` of `nn.Module._apply`, such as a copy to a device.

    The blocks keep their dtypes.
    """
    blocks: Blocks = getattr(param, GATHERED_BLOCKS)
    value = fn(get_local_tensor(param).detach().as_strided((), ()))
    if isinstance(blocks, HostBlocks):
        return make_stored_parameter(param, blocks.matrix.allocate(value.device), value)
    old_tensors = blocks.tensors()
    values, scales, *amax = (
        new if new.dtype == old.dtype else old.to(new.device)
        for new, old in zip(map(fn, old_tensors), old_tensors, strict=True)
    )
    return make_stored_parameter(param, Blocks(values, scales, blocks.kind, *amax), value)


def read_on_device(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """Dequantise 4-bit blocks to `dtype`; blocks in host memory are copied to the device."""
    if isinstance(blocks, HostBlocks):
        blocks = blocks.matrix.fetch()
    return read_four_bit_values(blocks, dtype)


@torch.no_grad()
def read_four_bit_values(
    blocks: Blocks,
    dtype: torch.dtype,
    box: tuple[slice, ...] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Dequantise 4-bit blocks to `dtype` on `device` (None = the blocks' device).

    `box` has the slice of each dim to read; () = all.
    """
    k = _find_summed_dim(blocks)
    outer, inner = list(box), [slice(None)] * len(box)
    if k < len(box):
        outer[k], inner[k] = slice(None), box[k]
    part = _map_tensors(blocks, lambda t: t[tuple(outer)].to(device).movedim(k, -1))
    return dequantise(part, dtype).movedim(-1, k)[tuple(inner)]


@torch.no_grad()
def _write_values(
    blocks: Blocks, device: torch.device, box: tuple[slice, ...], values: Tensor
) -> None:
    """Quantise `values` on `device` into the blocks at the slices `box`.

    The slices have the summed dim in full.
    """
    if isinstance(blocks, HostBlocks):
        blocks.matrix.drop_device_copies()
    k = _find_summed_dim(blocks)
    targets = [tensor[box].movedim(k, -1) for tensor in blocks.tensors()]
    values = values.to(device).movedim(k, -1)
    assert values.shape[-1] == 2 * blocks.values.shape[k], "K is never divided"
    quantised = quantise(values, blocks.kind)  # type: ignore[arg-type]
    for target, source in zip(targets, quantised.tensors(), strict=True):
        target.copy_(source)


def _map_tensors(blocks: Blocks, fn: Callable[[Tensor], Tensor]) -> Blocks:
    """Return blocks with `fn` applied to the values and to the scales."""
    return Blocks(fn(blocks.values), fn(blocks.scales), blocks.kind)


def _find_summed_dim(blocks: Blocks) -> int:
    """Return the index of the dim that matmuls sum; only there values and scales differ in size."""
    sizes = zip(blocks.values.shape, blocks.scales.shape, strict=True)
    return next(i for i, (n, groups) in enumerate(sizes) if n != groups)
