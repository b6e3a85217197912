import ctypes
import operator
from typing import Any

import pytest
from torch.distributed import _symmetric_memory

from moecore.base.fabric import read_nvlink_domain_id
from moecore.kernels.meta import record_launches_on_meta
from moecore.moe.dispatch.peer_memory import find_local_peer_problem

NAMES = ["_SymmetricMemory.empty_strided_p2p", "_SymmetricMemory.get_remote_tensor", "rendezvous"]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    operator.attrgetter(name)(_symmetric_memory)


def test_more_ranks_than_a_mask_names_are_refused() -> None:
    with record_launches_on_meta(lambda *_: None):  # GPUs are taken to be there
        assert find_local_peer_problem(64, "cpu") is None
        assert find_local_peer_problem(65, "cpu") == "must have ep * etp (65) <= 64: use 'alltoall'"


CLUSTER = bytes(range(1, 17))
COMPLETE = dict(cluster=CLUSTER, status=0, clique=7, state=3)


class FakeNVML:
    """One GPU; `info` is written where nvml.h has the fields of nvmlGpuFabricInfo_t."""

    def __init__(self, **info: Any) -> None:
        self.info, self.open = COMPLETE | info, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, gpu: Any) -> int:
        gpu._obj.value = 5
        return 0 if uuid == b"GPU-1b4e" else 6

    def nvmlDeviceGetGpuFabricInfo(self, gpu: ctypes.c_void_p, info: Any) -> int:
        assert gpu.value == 5
        words = (self.info[k].to_bytes(4, "little") for k in ("status", "clique", "state"))
        data = self.info["cluster"] + b"".join(words)
        assert ctypes.sizeof(info._obj) == len(data) == 28
        ctypes.memmove(info, data, len(data))
        return 0


@pytest.mark.parametrize(
    ("uuid", "info", "name"),
    [
        ("1b4e", {}, CLUSTER.hex() + ".7"),
        ("1b4e", dict(cluster=bytes(16)), None),  # of one host: an HGX board
        ("1b4e", dict(state=2), None),  # in progress
        ("1b4e", dict(status=15), None),
        ("ffff", {}, None),
    ],
)
def test_a_fabric_between_hosts_is_named(monkeypatch, uuid, info, name) -> None:
    nvml = FakeNVML(**info)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: nvml)
    assert read_nvlink_domain_id(uuid) == name and nvml.open == 0


def test_drivers_that_know_no_fabric_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_nvlink_domain_id("1b4e") is None  # no driver here, or no such GPU
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    assert read_nvlink_domain_id("1b4e") is None
