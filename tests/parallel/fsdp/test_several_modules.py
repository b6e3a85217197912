import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moecore import FSDPOptions, MoEConfig, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from tests.helpers.ranks import ranks_fixture
from tests.moe.moe_cases import make_layer

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
OPTIONS = {
    "routers": {},
    "blocks": dict(blocks_per_unit=3),
    "gathered": dict(blocks_per_unit=2, dense_strategy="optim"),
    "no prefetch": dict(prefetch_blocks=0),
}


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dense, self.moe = nn.Linear(16, 16), make_layer(CONFIG, seed=seed, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x + self.dense(x))


class Model(nn.Module):
    """Gives the loss and what each block gave.

    Attributes:
        path: the blocks that run.
        recomputed: block -> whether its checkpoint is a reentrant one.
        saves: whether checkpoints keep what matrix products return.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block(i) for i in range(3))
        self.path: tuple[int, ...] = (0, 1, 2)
        self.recomputed: dict[int, bool] = {}
        self.saves = False

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, hidden = self.embed(ids), []
        for i in self.path:
            block = self.layers[i]
            if i in self.recomputed:
                options = {"context_fn": saving} if self.saves else {}
                x = checkpoint(block, x, use_reentrant=self.recomputed[i], **options)
            else:
                x = block(x)
            hidden.append(x)
        logits = self.head(x).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.roll(1, -1).flatten()), hidden


def saving() -> Any:
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default])


def make(options: str, path: tuple[int, ...] = (0, 1, 2), **recomputed: bool) -> Any:
    meshes = build_meshes(ParallelConfig(ep=1, edp_shard=2), "cpu")
    fsdp = FSDPOptions(param_dtype=torch.bfloat16, **OPTIONS[options])
    model: Any = parallelize_moe(Model(), meshes, fsdp=fsdp)
    model.path = path
    model.recomputed = {int(name[1:]): reentrant for name, reentrant in recomputed.items()}
    return model


def ids(step: int = 0) -> Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() for n, g in found.items() if g is not None}


# Each gives a model whose gradients are those of another, which had it easier.
Case = Callable[[str], tuple[nn.Module, nn.Module]]


def recomputed(**how: bool) -> Case:
    def case(options: str) -> tuple[nn.Module, nn.Module]:
        models = make(options, **how), make(options)
        for model in models:
            model(ids())[0].backward()
        return models

    return case


def recomputed_in_part(options: str) -> tuple[nn.Module, nn.Module]:
    models = make(options, _0=False, _1=False, _2=False), make(options)
    models[0].saves = True
    for model in models:
        model(ids())[0].backward()
    return models


def two_forwards(path: tuple[int, ...] = (0, 1, 2), **how: bool) -> Case:
    def case(options: str) -> tuple[nn.Module, nn.Module]:
        models = make(options, path, **how), make(options, path)
        (models[0](ids())[0] + models[0](ids(1))[0]).backward()
        models[1](ids())[0].backward()
        models[1](ids(1))[0].backward()
        return models

    return case


def failed_on_one_rank(*, announced: bool) -> Case:
    def case(options: str) -> tuple[nn.Module, nn.Module]:
        def fail(*_: Any) -> None:
            raise FloatingPointError

        models = make(options), make(options)
        plain: Any = nullcontext
        first = TrainStep(models[0], num_micro_batches=2).micro_batch if announced else plain
        second = TrainStep(models[1]).micro_batch if announced else plain
        hook = models[0].head.register_forward_hook(fail) if dist.get_rank() == 0 else None
        with first():
            try:
                models[0](ids())
            except FloatingPointError:  # ranks agree to leave it out
                hook.remove()
        for micro_batch, model in zip((first, second), models, strict=True):
            with micro_batch():
                model(ids(1))[0].backward()
        return models

    return case


CASES: dict[str, Case] = {
    "all reentrant": recomputed(_0=True, _1=True, _2=True),
    "all recomputed": recomputed(_0=False, _1=False, _2=False),
    "recomputed, saving products": recomputed_in_part,
    "two forwards": two_forwards(),
    "two forwards without the last": two_forwards((0, 1)),
    "two forwards without the first": two_forwards((1, 2)),
    "two forwards, last recomputed": two_forwards(_2=False),
    "failed on one rank": failed_on_one_rank(announced=False),
    "failed on one rank, announced": failed_on_one_rank(announced=True),
}


def worker(rank: int, device: torch.device, cases: list[tuple[str, str]]) -> Any:
    found: dict[Any, Any] = {}
    for options, name in cases:
        try:
            found[options, name] = [gradients(model) for model in CASES[name](options)]
        except Exception as error:
            found[options, name] = f"{type(error).__name__}: {error}"
    return copy.deepcopy(found)


found = ranks_fixture(2, worker, "options", "name")


@pytest.mark.parametrize(("options", "name"), list(product(OPTIONS, CASES)))
def test_gradients_are_those_of_the_plain_way(options, name, found) -> None:
    result = found[options, name]
    assert not isinstance(result, str), result
    ours, plain = result
    assert ours.keys() == plain.keys() and len(ours) > 5
    for n, grad in plain.items():
        scale = grad.abs().max()
        # Sums of two gradients are rounded to bf16 at other places.
        bound = 2**-6 * scale if name.startswith("two") else 0
        assert scale > 0 and (ours[n] - grad).abs().max() <= bound, n
