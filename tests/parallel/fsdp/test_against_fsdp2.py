"""Units compute what FSDP2 computes by the same plan, to the bit, and hold the same DTensors.

gloo adds ranks in an order that depends on where a number lies in a message, and messages differ.
Here both add the ranks in their order.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import reduce_scatter_single
from moecore.io import load, save
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.fsdp import transport
from moecore.parallel.model.parallel_state import list_engines
from tests.helpers.grids import beside
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.fsdp2 import parallelize_with_fsdp2
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

WORLD = 4
MICRO_BATCHES = (2, 1)  # of each step: one that accumulates, and one after an optimizer
BOTH = {"units": parallelize_moe, "FSDP2": parallelize_with_fsdp2}
CONFIG = small_decoder(32, 24, vocab_size=60, num_layers=3, dense_layers=(1,), mlp_hidden_dim=48)
# Where units of a kind that take turns in buffers are not what a case is about.
SHORT = replace(CONFIG, num_layers=2)
BIASES = replace(CONFIG.moe, num_experts=6, fc1_bias=True, fc2_bias=True)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one layout."""

    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009  # frozen
    fsdp: FSDPOptions = FSDPOptions()  # noqa: RUF009
    config: DecoderConfig = CONFIG


EP = ParallelConfig(ep=2, edp_shard=2)
# Layouts with other ranks have one process as their oracle in `tests/test_parity.py`.
CASES = {
    "tensor parallel, bf16": Case(
        parallel=ParallelConfig(dp_shard=2, tp=2, ep=2), fsdp=BF16, config=SHORT
    ),
    "replicas": Case(
        parallel=ParallelConfig(dp_replicate=2, dp_shard=2, edp_replicate=2), config=SHORT
    ),
    "ep 2": Case(parallel=EP),
    "uneven experts, bf16": Case(config=replace(SHORT, moe=BIASES), fsdp=BF16),
    "reduced in bf16": Case(
        parallel=EP, fsdp=replace(BF16, reduce_dtype=torch.bfloat16), config=SHORT
    ),
    "gathered once": Case(parallel=EP, fsdp=replace(BF16, dense_strategy="optim")),
    "multi-token prediction, tied": Case(
        config=replace(SHORT, num_mtp_layers=2, mtp_loss_coef=0.3, tie_embeddings=True), fsdp=BF16
    ),
}
BY_DAY = ("uneven experts, bf16", "reduced in bf16")
NIGHTLY = [name for name in CASES if name not in BY_DAY]


def make(case, engine, seed=0, kind=torch.optim.AdamW) -> tuple[Decoder, torch.optim.Optimizer]:
    model = Decoder(case.config, device="meta")
    BOTH[engine](model, build_meshes(case.parallel, "cpu"), fsdp=case.fsdp)
    assert bool(list_engines(model)) == (engine == "units")
    model.to_empty(device="cpu")
    model.init_weights(seed=seed)
    return model, kind(model.parameters(), lr=0.05, eps=1e-3)  # type: ignore[call-arg]


def tokens_of(case: Case, step: int, n: int) -> Tensor:
    tp = case.parallel.tp
    g = torch.Generator().manual_seed(100 * step + 10 * n + dist.get_rank() // tp)
    return torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)


def train(case: Case, engine: str) -> dict[str, Tensor]:
    """Return losses, and this rank's parts of gradients and parameters."""
    model, optimizer = make(case, engine, kind=on_parts(torch.optim.AdamW))
    found: dict[str, Tensor] = {}
    for step, num_micro_batches in enumerate(MICRO_BATCHES):
        for n in range(num_micro_batches):
            tokens = tokens_of(case, step, n)
            with added_in_order():
                loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
                loss.backward()
            found[f"loss/{step}/{n}"] = loss.detach()
        named = dict(model.named_parameters())
        found |= {f"grad/{step}/{n}": local(p.grad).clone() for n, p in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"after/{step}/{n}": local(p).clone() for n, p in named.items()}
    return found


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def different(case: Case) -> list[str]:
    """Return what differs on this rank."""
    ours, theirs = (train(case, engine) for engine in BOTH)
    assert ours.keys() == theirs.keys() and len(ours) > 50
    assert all(t.isfinite().all() for t in ours.values())
    return [name for name, t in ours.items() if not torch.equal(t, theirs[name])]


@contextmanager
def added_in_order() -> Iterator[None]:
    """Let reductions of both add the ranks in their order, see the top."""

    def reduce_scatter(output: Tensor, input: Tensor, *, group: Any, **_: Any) -> None:
        parts = all_of(input, group).view(group.size(), group.size(), -1)
        add(output, parts[:, group.rank()])

    def all_reduce(x: Tensor, *, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            add(x, all_of(x, group))
        else:  # the model compares arguments
            reduce(x, op=op, group=group)

    reduce = dist.all_reduce

    def all_of(x: Tensor, group: Any) -> Tensor:
        every = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(every, x.contiguous(), group=group)
        return torch.stack(every).view(group.size(), -1)

    def add(out: Tensor, parts: Tensor) -> None:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        out.copy_(total.view(out.shape))

    name = reduce_scatter_single.__name__
    with (
        patch.object(transport, "reduce_scatter_single", reduce_scatter),
        patch.object(dist, name, reduce_scatter),
        patch.object(dist, "all_reduce", all_reduce),
    ):
        yield


def checkpoints(case: Case) -> list[str]:
    """Return what differs when one of both loads what the other has saved."""
    found = []
    for source, target in (("units", "FSDP2"), ("FSDP2", "units")):
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        model, optimizer = make(case, source)
        tokens = tokens_of(case, 0, 0)
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        path = save(Path(folder[0]), 1, model, optimizer)
        other, its_optimizer = make(case, target, seed=1)
        load(path, other, its_optimizer)
        pairs = zip(model.named_parameters(), other.parameters(), strict=True)
        for (name, p), q in pairs:
            assert isinstance(p, DTensor) and isinstance(q, DTensor)
            assert p.placements == q.placements, name
            assert p.device_mesh.mesh_dim_names == q.device_mesh.mesh_dim_names, name
            states = (optimizer.state[p], its_optimizer.state[q])
            same = torch.equal(local(p), local(q))
            for key in ("exp_avg", "exp_avg_sq"):
                same &= torch.equal(*(local(state[key]) for state in states))
            found += [] if same else [f"{source} to {target}: {name}"]
    return found


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: different(CASES[name]) for name in names}
    found["checkpoints"] = checkpoints(CASES["uneven experts, bf16"])
    every = gather_objects(found)
    return {name: sorted({n for one in every for n in one[name]}) for name in found}


found = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", beside(CASES, NIGHTLY))
def test_losses_gradients_and_parameters_have_the_same_bits(name, found) -> None:
    assert found[name] == []


def test_each_loads_what_the_other_has_saved(found: dict[str, list[str]]) -> None:
    assert found["checkpoints"] == []
