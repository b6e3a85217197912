"""Buffers registered with NCCL: what lies in them, when they are registered, and equal training.

On CPUs the groups of `tests/helpers/shared_memory.py` stand for NCCL: they record the memory that
the context of their pool has allocated, and units call them as they call NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moecore.parallelize
from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel.fsdp import unit
from moecore.parallel.fsdp.size import compute_rank_bytes
from moecore.parallel.fsdp.transport import CoalescedTransport
from moecore.parallel.model import phases
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.parallelize import PHASES
from moecore.train import AdamW, TrainingOffload
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_memory import SharedMemoryGroup
from tests.parallel.small_decoder import small_decoder

CONFIG = small_decoder(32, 48, vocab_size=64, head_dim=16, max_seq_len=32, experts=4)
PARALLEL = ParallelConfig(ep=2, edp_shard=2)
LAYOUTS = {
    "gathered again": FSDPOptions(),
    "gathered once": FSDPOptions(dense_strategy="optim", param_dtype=torch.bfloat16),
    "reduced each time": FSDPOptions(dense_strategy="optim_grads", reduce_dtype=torch.bfloat16),
}


class FakeNCCL:
    """Memory of pools by group, and the events that groups, pools and units cause, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.blocks: dict[Any, tuple[int, int]] = {}  # group -> address and bytes
        self.outside: list[str] = []  # collectives with memory outside of their group's block

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which groups of shared memory have the methods of NCCL's backend."""

        def allocate(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if self._pool is not None:
                assert self._pool.block is None, "one block is one window"
                self._pool.block = storage.data_ptr(), num_bytes
                self.events.append("allocate")
            elif num_bytes == 0 and storage.data_ptr() == 0:
                self.events.append("free")

        resize, cls, torch_cuda = torch.UntypedStorage.resize_, SharedMemoryGroup, torch.cuda
        self._pool: SimpleNamespace | None = None
        patches: list[Any] = [
            patch.object(torch.UntypedStorage, "resize_", allocate),
            patch.object(torch_cuda, "MemPool", lambda group: SimpleNamespace(block=None)),
            patch.object(torch_cuda, "use_mem_pool", self._use),
            patch.object(cls, "mem_allocator", property(lambda group: group), create=True),
            patch.object(cls, "register_mem_pool", self._register(), create=True),
            patch.object(cls, "deregister_mem_pool", self._deregister(), create=True),
            patch.object(CoalescedTransport, "all_gather", self._checked("all_gather")),
            patch.object(CoalescedTransport, "reduce_scatter", self._checked("reduce_scatter")),
        ]
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    @contextmanager
    def _use(self, pool: SimpleNamespace) -> Iterator[None]:
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None

    def _register(self) -> Any:
        def register_mem_pool(group: Any, pool: SimpleNamespace, symm: bool = False) -> None:
            assert symm and pool.block is not None
            self.blocks[group] = pool.block
            self.events.append("register")

        return register_mem_pool

    def _deregister(self) -> Any:
        def deregister_mem_pool(group: Any, pool: SimpleNamespace) -> None:
            assert self.blocks.pop(group) == pool.block
            self.events.append("deregister")

        return deregister_mem_pool

    def _checked(self, name: str) -> Any:
        plain = getattr(CoalescedTransport, name)

        def call(transport: CoalescedTransport, first: Any, second: Any, last: Any) -> Any:
            assert name == "all_gather" or last is True  # in place
            full = [*first, *second] if name == "all_gather" else second
            start, size = self.blocks.get(transport._group, (0, 0))
            for x in full:
                if not start <= x.data_ptr() <= x.data_ptr() + x.nbytes <= start + size:
                    self.outside.append(name)
            self.events.append(name)
            return plain(transport, first, second, last)

        return call


def make(fsdp: FSDPOptions, device_type: str = "cpu") -> tuple[Any, TrainStep]:
    torch.manual_seed(0)
    parallel = PARALLEL if device_type == "cpu" else ParallelConfig(ep=1)
    model = Decoder(CONFIG).to(device_type)
    parallelize_moe(model, build_meshes(parallel, device_type), fsdp=fsdp)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    return model, TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=2)


def train(step: TrainStep, rank: int, device: torch.device, *, numbers: range) -> None:
    for number in numbers:
        inputs = []
        for n in range(2):
            generator = torch.Generator().manual_seed(100 * number + 10 * n + rank)
            ids = torch.randint(64, (2, 17), generator=generator).to(device)
            inputs.append(dict(tokens_BT=ids[:, :-1], labels_BT=ids[:, 1:]))
        step.forward_backward(inputs)
        step.finish()


def weights(model: Any) -> list[Tensor]:
    return [param.to_local().detach().cpu().clone() for param in model.parameters()]


def training(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, fsdp in LAYOUTS.items():
        fake, results = FakeNCCL(), []
        with (
            patch.object(unit, "make_transport", lambda group, _: CoalescedTransport(group)),
            patch.object(moecore.parallelize, "PHASES", PHASES[1:]),
        ):
            assert PHASES[0] is phases.check_registered_buffers
            model, step = make(fsdp)
            train(step, rank, device, numbers=range(3))
            results.append(weights(model))
            with fake.installed():
                model, step = make(replace(fsdp, nccl_ub=True))
                plan = get_parallel_state(model).plan
                train(step, rank, device, numbers=range(2))
                bytes_in_blocks = sum(size for _, size in fake.blocks.values())
                before = fake.events.copy()
                step.close()
                closed = fake.events[len(before) :]
                step.close()  # frees nothing
                train(step, rank, device, numbers=range(2, 3))
                offload = TrainingOffload(model, step.optimizers)
                offload.offload("buffers")
                offload.onload()
                step.close()
            results.append(weights(model))
        size = compute_rank_bytes(plan)
        found[name] = dict(
            is_equal=all(map(torch.equal, *results)),
            outside=fake.outside,
            before=before,
            closed=closed,
            after=fake.events[len(before) + len(closed) :],
            padding=bytes_in_blocks - size.weights - size.sums,
            accumulated=size.accumulated,
        )
    found["refused"] = refused(device)
    return found


def refused(device: torch.device) -> list[str]:
    """Return errors on a CPU, on GPUs over gloo, and where each rank has all parameters."""
    with pytest.raises(ValueError) as on_cpu:
        make(FSDPOptions(nccl_ub=True))
    model, _ = make(FSDPOptions())
    errors = [*gather_objects(str(on_cpu.value))]
    plan = replace(get_parallel_state(model).plan, device_type="cuda", nccl_ub=True)
    units = [replace(u, layouts=[replace(x, ranks=1) for x in u.layouts]) for u in plan.units]
    for case, has_gloo in ((plan, True), (replace(plan, units=tuple(units)), False)):
        with (
            patch.object(phases, "is_gloo", lambda *_, has_gloo=has_gloo: has_gloo),
            pytest.raises(ValueError) as error,
        ):
            phases.check_registered_buffers(model, SimpleNamespace(plan=case))  # type: ignore[arg-type]
        errors.append(str(error.value))
    return errors


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(4, training)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_collectives_of_units_use_only_registered_memory(
    results: dict[str, Any], layout: str
) -> None:
    found = results[layout]
    assert found["is_equal"] and found["outside"] == []
    before = [event for event in found["before"] if "_" not in event]
    assert before == ["allocate", "register"] * 2  # of the dense group, of that of experts
    assert {"all_gather", "reduce_scatter"} < set(found["before"])
    assert found["closed"] == ["deregister", "free"] * 2
    after = [event for event in found["after"] if "_" not in event]
    assert after == (["allocate", "register"] * 2 + ["deregister", "free"] * 2) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_blocks_have_the_planned_buffers_and_nothing_else(
    results: dict[str, Any], layout: str
) -> None:
    assert 0 <= results[layout]["padding"] < 128 * 20 and results[layout]["accumulated"] == 0


def test_where_nccl_cannot_register_it_is_refused(results: dict[str, Any]) -> None:
    *on_cpu, over_gloo, on_one_rank = results["refused"]
    start = "FSDPOptions.nccl_ub (True) must go with"
    assert len(on_cpu) == 4 and all(e.startswith(start) and "\n" not in e for e in on_cpu)
    assert "on cpu are gloo's" in on_cpu[0] and "on cuda are gloo's" in over_gloo
    assert on_one_rank.startswith(start) and "several ranks shard" in on_one_rank


def on_gpus(rank: int, device: torch.device) -> tuple[float, list[str]]:
    """Return the largest mean difference of a weight, and the names of NCCL's kernels."""
    results = []
    for nccl_ub in (False, True):
        model, step = make(FSDPOptions(param_dtype=torch.bfloat16, nccl_ub=nccl_ub), "cuda")
        train(step, rank, device, numbers=range(2))
        step.close()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train(step, rank, device, numbers=range(2, 3))
            torch.cuda.synchronize()
        results.append(weights(model))
        step.close()
    dist.barrier()
    names = {event.name for event in profile.events() if event.name.startswith("nccl")}
    differences = [float((a - b).abs().mean()) for a, b in zip(*results, strict=True)]
    return max(differences), sorted(names)


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_nccl_runs_its_symmetric_kernels_on_gpus() -> None:
    difference, names = run_ranks(2, on_gpus, device_type="cuda")
    assert difference < 1e-5  # a step of the optimizer is 1e-3
    # The output of a reduce-scatter is not registered, so NCCL runs it by its ring.
    assert any(n.startswith("ncclSym") and "AllGather" in n for n in names), names
