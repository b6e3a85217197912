"""Reading parameters has no side effect, on one rank alone and at any time.

A logger under `if rank == 0` must neither free what its rank holds nor start a collective.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig
from tests.families.transformers.hf_models import random_model
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.parallel.fsdp.units import resident_bytes

DECODER = DecoderConfig(
    vocab_size=61,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=32,
    moe=MoEConfig(dim=32, hidden_dim=24, num_experts=4, top_k=2),
)
PARALLEL = {"sharded": ParallelConfig(ep=1, edp_shard=2), "ep": ParallelConfig(ep=2, edp_shard=1)}
NAMES = ("native", "qwen3-moe")
RESHARD, ACCUMULATE = (True, False), (True, False)


class Reader:
    """Reads on rank 0 alone, and keeps what was wrong."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.problems: list[str] = []
        self.most_resident = 0

    def read(self, when: str, *, zero_grad: bool = False) -> None:
        if dist.get_rank() != 0:
            return
        before = resident_bytes(self.model)
        self.most_resident = max(self.most_resident, before)
        if zero_grad:
            self.model.zero_grad()
            torch.optim.AdamW(self.model.parameters()).zero_grad()
        if not all(isinstance(p, DTensor) for p in everything(self.model)):
            self.problems.append(f"unsharded parameters were handed out {when}")
        if resident_bytes(self.model) != before:
            self.problems.append(f"unsharded parameters were freed {when}")


def everything(model: Any) -> list[Tensor]:
    """Parameters as loggers, summaries, trackers and optimizers get them."""
    model.requires_grad_(True)
    assert str(model) and sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    return [
        *(
            p
            for group in torch.optim.AdamW(model.parameters()).param_groups
            for p in group["params"]
        ),
        *dict(model.named_parameters()).values(),
        *(p for module in model.modules() for p in module.parameters()),
        *(t for owner in (model, layer) for n, t in owner.state_dict().items() if "bias" not in n),
    ]


def make(name: str, layout: str, *, reshard: bool) -> Any:
    torch.manual_seed(0)
    model = Decoder(DECODER) if name == "native" else random_model(name)
    if isinstance(model, Decoder):
        model.init_weights()
    # In bf16 routers are units of their own.
    fsdp = FSDPOptions(
        param_dtype=torch.bfloat16, dense_strategy="optim_grads_params" if reshard else "optim"
    )
    return parallelize_moe(model.train(), build_meshes(PARALLEL[layout], "cpu"), fsdp=fsdp)


def loss_of(model: Any, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(0, 61, (2, 8), generator=g)
    if isinstance(model, Decoder):
        return model(tokens[:, :-1], tokens[:, 1:].contiguous())
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients(model: Any, reader: Reader | None, *, accumulate: bool) -> list[Tensor]:
    """Of one micro-batch or two, after an evaluation."""
    read = reader.read if reader is not None else lambda when, **_: None
    with torch.no_grad():
        loss_of(model, 0)
    read("after an evaluation", zero_grad=True)
    step = TrainStep(model, num_micro_batches=1 + accumulate)
    for n in range(1 + accumulate):
        with step.micro_batch():
            loss = loss_of(model, n)
            read("between forward and backward", zero_grad=n == 0)
            loss.backward()
        read("after backward")
    return [p.grad.to_local().clone() for p in model.parameters()]


def worker(rank: int, device: torch.device, cases: list[Any]) -> dict[Any, Any]:
    found = {}
    for case in cases:
        name, layout, reshard, accumulate = case
        model, alone = (make(name, layout, reshard=reshard) for _ in range(2))
        reader = Reader(model)
        grads = gradients(model, reader, accumulate=accumulate)
        expected = gradients(alone, None, accumulate=accumulate)
        is_equal = all(map(torch.equal, grads, expected))
        found[case] = (sorted(set(reader.problems)), reader.most_resident, len(grads), is_equal)
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Any, Any]:
    cases = asked_for(request, "name", "layout", "reshard", "accumulate")
    return run_ranks(2, worker, cases)


@pytest.mark.parametrize("accumulate", ACCUMULATE, ids=["accumulated", "alone"])
@pytest.mark.parametrize("reshard", RESHARD, ids=["resharded", "resident"])
@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_reads_and_all_train_as_before(
    name: str, layout: str, reshard: bool, accumulate: bool, found: dict[Any, Any]
) -> None:
    problems, most_resident, num_params, is_equal = found[name, layout, reshard, accumulate]
    assert problems == []
    assert most_resident > 0, "something was held that could have been freed"
    assert num_params > 10 and is_equal
