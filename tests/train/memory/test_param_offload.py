"""Trained weights and gradients in host memory: a step has the bits of a step on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moecore import (
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from moecore.parallel.model.parallel_state import list_engines
from moecore.train import AdamW, materialize
from tests.helpers.ranks import ranks_fixture

STEPS, MICRO_BATCHES = 3, 2
CASES: dict[str, dict[str, Any]] = {
    "ep 2, edp 2": dict(parallel=ParallelConfig(ep=2)),
    "ep 4": dict(parallel=ParallelConfig(ep=4)),
    "replicated": dict(parallel=ParallelConfig(ep=1, dp_replicate=2)),
    "on meta": dict(parallel=ParallelConfig(ep=2), is_on_meta=True),
    "resident, bf16": dict(
        parallel=ParallelConfig(ep=2),
        fsdp=FSDPOptions(dense_strategy="optim", param_dtype=torch.bfloat16),
    ),
}


def train(
    parallel: ParallelConfig,
    offload: bool,
    fsdp: FSDPOptions | None = None,
    is_on_meta: bool = False,
) -> Any:
    """Return losses, gradients and weights of a few steps with accumulation and clipping."""
    torch.manual_seed(0)
    meshes, memory = build_meshes(parallel, "cpu"), MemoryOptions(offload_params=offload)
    model = Decoder(replace(preset("tiny"), num_layers=2), device="meta" if is_on_meta else "cpu")
    parallelize_moe(model, meshes, memory=memory, fsdp=fsdp)
    if is_on_meta:
        materialize(model, device="cpu")
        model.init_weights()
    step = TrainStep(
        model, AdamW(model.parameters()), max_norm=0.1, num_micro_batches=MICRO_BATCHES
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    results = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, 256, (2, 17), generator=generator)
            with step.micro_batch():
                loss = model(tokens[:, :-1], tokens[:, 1:]) / MICRO_BATCHES
                loss.backward()
            results.append(loss.detach())
        results += [param.grad.to_local().clone() for param in model.parameters()]
        results.append(torch.tensor(float(step.finish().norm)))
    copies = list_engines(model)[0]._streams.shard_copies
    assert (copies is not None) == offload
    assert copies is None or min(copies.shards.count_bytes(), copies.grads.count_bytes()) > 0
    # All shards are still in the slab of the offload.
    storages = {x.to_local().untyped_storage().data_ptr() for x in model.parameters()}
    assert (len(storages) == 1) == offload
    state = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    return results, state


def worker(_rank: int, _device: torch.device, cases: list[str]) -> dict[str, bool]:
    equal = {}
    for name in cases:
        expected, weights = train(**CASES[name], offload=False)
        results, host_weights = train(**CASES[name], offload=True)
        same = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        same &= list(weights) == list(host_weights)
        equal[name] = same and all(torch.equal(host_weights[n], w) for n, w in weights.items())
        total = torch.tensor(float(equal[name]))
        torch.distributed.all_reduce(total)
        equal[name] = total.item() == torch.distributed.get_world_size()
    return equal


ranks = ranks_fixture(4, worker, "case")


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_shards_on_the_device(ranks: dict[str, bool], case: str) -> None:
    assert ranks[case]


def test_options_that_do_not_fit_are_refused(no_group_left: None) -> None:
    with pytest.raises(ValueError, match=r"offload_params .* must be False with FSDPOptions.fp8"):
        parallelize_moe(
            Decoder(replace(preset("tiny"), num_layers=2)),
            build_meshes(ParallelConfig(), "cpu"),
            memory=MemoryOptions(offload_params=True),
            fsdp=FSDPOptions(fp8_param_gather=True),
            precision="blockwise",
        )
