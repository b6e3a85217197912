"""The private names of torch.distributed: each exists, and only `_distributed.py` has them."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

import moecore
from moecore import ParallelConfig, build_meshes
from moecore._distributed import StridedShard, default_timeout, is_gloo

SRC = Path(moecore.__file__).parent
PRIVATE: dict[str, Any] = {
    "_unflatten": DeviceMesh,
    "_get_backend": dist.ProcessGroup,
    "_device_types": dist.ProcessGroup,
    "_set_default_timeout": dist.ProcessGroupGloo,
    "_timeout": dist.ProcessGroupGloo._Options,
    "_StridedShard": placement_types,
    "_concatenate": DeviceMesh,
    "_local_tensor": DTensor,
    "_spec": DTensor,
}


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_the_name(name: str) -> None:
    assert hasattr(PRIVATE[name], name)


@pytest.mark.parametrize("name", PRIVATE)
def test_one_file_uses_it(name: str) -> None:
    used = re.compile(rf"\.{name}\b|import {name}\b")
    found = {f.relative_to(SRC).as_posix() for f in SRC.rglob("*.py") if used.search(f.read_text())}
    assert found == {"_distributed.py"}


@pytest.mark.usefixtures("no_group_left")
def test_what_they_mean_is_as_used() -> None:
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    assert default_timeout() == timeout
    assert dist.group.WORLD is not None
    assert is_gloo(dist.group.WORLD, "cpu")
    assert build_meshes(ParallelConfig(), "cpu").stage_group is dist.group.WORLD
    strided = StridedShard(0, split_factor=2)
    assert (strided.dim, strided.split_factor) == (0, 2)
