"""Every private name of torch.distributed that moecore uses, and those that differ by version.

`tests/test_distributed.py` names them, and fails by name when torch renames one. Symmetric
memory's have a file of their own.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard

# 2.13 renamed all_gather_into_tensor and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A DTensor whose StridedShard marks separate pieces, not an order of dims: 2.11 raises in the
# backward and in full_tensor(); 2.13 handles both. 2.12 has not been tried.
HAS_SEPARATE_PIECES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)


def default_timeout() -> timedelta:
    """Return how long a collective of the default group waits; a new group does not inherit it."""
    group = dist.group.WORLD
    assert group is not None, "asked for only with a process group"
    return group._get_backend(group._device_types[0]).options._timeout


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the timeout of the default group, backend by backend."""
    world = dist.group.WORLD
    assert world is not None, "a group exists only with a process group"
    for device in world._device_types:
        options = world._get_backend(device).options
        if options is not None:  # a fake backend has none and never waits
            group._get_backend(device)._set_default_timeout(options._timeout)


def unflatten(world: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a view of a one-dim mesh, outermost dim first, with the default group's timeout."""
    view = world._unflatten(0, sizes, names)
    for name in names:
        inherit_timeout(view.get_group(name))
    return view


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of all dims of several views of one world, in order. No communication."""
    return DeviceMesh._concatenate(meshes)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, the same object each time; else the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrapped_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of a local part that lies as another does; 4 us, `from_local` takes 25."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[attr-defined, call-arg]


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether gloo runs a group's collectives for tensors of a device type."""
    return group._get_backend(torch.device(device_type)).name() == "gloo"
