import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecore.recipes import process


@pytest.fixture
def system(tmp_path: Path) -> Path:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0,16-18\n")
    return tmp_path


def test_cpus_of_the_node(system: Path) -> None:
    assert process.find_numa_cpus("0000:1b:00.0", system) == {0, 16, 17, 18}
    assert process.find_numa_cpus("0000:1c:00.0", system) == set()
    (system / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")  # a machine without
    assert process.find_numa_cpus("0000:1b:00.0", system) == set()


def test_a_rank_runs_beside_its_gpu(system: Path, monkeypatch: Any) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    bound: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 16})
    assert process.bind_to_gpu(system) is None  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert process.bind_to_gpu(system) == {0, 16} and bound == [{0, 16}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})  # the scheduler's choice stays
    assert process.bind_to_gpu(system) is None and len(bound) == 1


def test_garbage_by_hand(monkeypatch: Any) -> None:
    collected: list[int] = []
    process.collect_garbage(process.COLLECT_EVERY)  # the collector is on
    with pytest.raises(RuntimeError), process.disable_garbage_collection():
        assert not gc.isenabled()
        monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
        process.collect_garbage(1)
        assert not collected
        process.collect_garbage(2 * process.COLLECT_EVERY)
        raise RuntimeError
    assert gc.isenabled() and collected == [1]
    gc.disable()
    gc.freeze()
    try:
        with process.disable_garbage_collection():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() > 0  # as the caller left them
    finally:
        gc.enable()
        gc.unfreeze()
