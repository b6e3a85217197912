from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moecore import (
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.parallel.model.parallel_state import get_moe_state
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.moe.moe_cases import make_layer
from tests.parallel.small_decoder import parallel_decoder, small_decoder

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
PARALLEL = {"sharded": ParallelConfig(ep=1, edp_shard=2), "ep": ParallelConfig(ep=2, edp_shard=1)}


class LowRank(nn.Module):
    """A linear layer and an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.ones(2, base.in_features))
        self.b = nn.Parameter(torch.ones(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Model(nn.Module):
    """A layer and a head, of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([make_layer(CONFIG)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


class WithValue(nn.Module):
    """What reinforcement learning puts around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.model(x))


def add_low_rank(model: nn.Module) -> nn.Module:
    model.head = LowRank(model.head)
    return model


def replace_head(model: nn.Module) -> nn.Module:
    model.head = nn.Linear(16, 16)
    return model


def freeze(model: nn.Module) -> nn.Module:
    add_low_rank(model).head.a.requires_grad_(False)
    model.head.b.requires_grad_(False)
    return model


def hook(model: nn.Module) -> nn.Module:
    add_low_rank(model)
    for param in (model.head.a, model.head.b):
        param.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def add_data_parallel(model: nn.Module) -> nn.Module:
    model.head = DistributedDataParallel(nn.Linear(16, 16))
    return model


def add_sharded(model: nn.Module) -> nn.Module:
    model.head = nn.Linear(16, 16)
    fully_shard(model.head, mesh=model.mesh)
    return model


REFUSED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "low rank": (add_low_rank, "head.a (and 1 more)"),
    "head": (replace_head, "head.weight (and 1 more)"),
}
WORKS = {
    "nothing": lambda model: model,
    "frozen": freeze,
    "hook": hook,
    "data parallel": add_data_parallel,
    "sharded": add_sharded,
}


def make(layout: str) -> nn.Module:
    meshes = build_meshes(PARALLEL[layout], "cpu")
    model = parallelize_moe(Model(), meshes)
    model.mesh = meshes.dense_fsdp
    return model


def errors(model: nn.Module, x: Tensor) -> list[str]:
    """What clipping and the end of a step say, after a step and after a forward alone."""
    model(x).square().mean().backward()
    found = [error_of(lambda: clip_grad_norm_(model, 1.0))]
    found.append(error_of(get_moe_state(model).finish_step))
    model(x)
    found.append(error_of(get_moe_state(model).finish_step))
    found.append(error_of(lambda: clip_grad_norm_(model, 1.0)))
    step = TrainStep(model, num_micro_batches=2)
    for _ in range(2):
        with step.micro_batch():
            model(x).square().mean().backward()
    found.append(error_of(step.finish))
    return found


def errors_of_a_meta_model() -> list[str]:
    """Whose parameters are others since `to_empty`."""
    model = parallel_decoder(small_decoder(16, 16, tie_embeddings=True), PARALLEL["ep"])
    tokens = torch.arange(12).view(2, 6)
    model(tokens, tokens.contiguous()).backward()
    found = [error_of(lambda: clip_grad_norm_(model, 1.0))]
    return [*found, error_of(get_moe_state(model).finish_step)]


def worker(rank: int, device: torch.device) -> list[Any]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    mine: dict[Any, Any] = {"meta": errors_of_a_meta_model()}
    for layout in PARALLEL:
        for name, (add, _) in REFUSED.items():
            mine[layout, name] = errors(add(make(layout)), x)
        for name, change in WORKS.items():
            mine[layout, name] = errors(change(make(layout)), x)
    model = WithValue(make("ep"))
    model(x).square().mean().backward()
    mine["around"] = error_of(lambda: clip_grad_norm_(model, 1.0))
    mine["plain"] = error_of(lambda: clip_grad_norm_(Model(), 1.0))
    return gather_objects(mine)


ranks = ranks_fixture(2, worker, over_gloo=True)  # DDP


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("layout", PARALLEL)
def test_what_nobody_reduces_is_refused(layout: str, name: str, ranks: list[Any]) -> None:
    for rank in ranks:
        for error in rank[layout, name]:
            assert error.startswith(f"{REFUSED[name][1]} must be in the model before")


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("layout", PARALLEL)
def test_what_somebody_reduces_or_nobody_trains_works(layout, name, ranks) -> None:
    """Gathered copies are no new parameters either."""
    for rank in ranks:
        assert rank[layout, name] == ["no error"] * 5


def test_a_head_around_the_model_is_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["around"].startswith("value.weight (and 1 more) must be in the model before")


def test_models_made_on_meta_and_plain_ones_work(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["meta"] == ["no error"] * 2 and rank["plain"] == "no error"


@pytest.mark.usefixtures("no_group_left")
def test_one_rank_reduces_nothing() -> None:
    model = parallelize_moe(Model(), build_meshes(ParallelConfig(), "cpu"))
    assert errors(add_low_rank(model), torch.randn(8, 16)) == ["no error"] * 5
