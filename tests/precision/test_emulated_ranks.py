"""A decoder in MXFP8 and NVFP4 on six ranks, against one process that rounds likewise.

Forwards agree: scales of blocks and tensors differ by powers of two at most, which round alike. Of
gradients so do those of "mxfp8". Weight gradients of "nvfp4" have blocks of other tokens on another
folding, and another draw: they may be at most twice as wrong as one process, against fp32.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    CloneOptions,
    ContextOptions,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    build_meshes,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, DecoderConfig
from moecore.moe.layer import MoELayer
from moecore.precision.apply import apply_precision, make_linear_products
from tests.helpers.parity import Batch, Case, error_ratio, make_batches, parallelize, train
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole

pytestmark = pytest.mark.slow

CONFIG = DecoderConfig(
    vocab_size=60,
    dim=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=6,
    head_dim=16,
    mlp_hidden_dim=96,
    moe=MoEConfig(dim=64, hidden_dim=64, num_experts=12, top_k=3, shared_hidden_dim=32),
    dense_layers=(0,),
    max_seq_len=512,
)
FOLDINGS: dict[str, dict[str, Any]] = {
    "tp and etp": dict(dp_shard=2, tp=3, ep=3, etp=2, edp_shard=1),
    "cp and ep": dict(dp_shard=2, cp=3, ep=2, etp=1, edp_shard=3),
    "pp and ep": dict(pp=2, dp_shard=3, ep=3, etp=1, edp_shard=1),
}
RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "nearest": Recipe(scaling="nvfp4", hadamard=False, stochastic_rounding=False),
}


def filled() -> Decoder:
    model, generator = Decoder(CONFIG), torch.Generator().manual_seed(1)
    for name, t in model.state_dict().items():
        is_norm = "norm" in name
        t.copy_(torch.ones(t.shape) if is_norm else torch.randn(t.shape, generator=generator) * 0.1)
    return model


def quantise(model: nn.Module, recipe: Recipe) -> None:
    """Give one process's model a recipe."""
    apply_precision(model, Precision(recipe=recipe))
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.get_part("experts").set_backend("auto", recipe=recipe)
            products = make_linear_products(recipe), make_linear_products(recipe)
            module.get_part("shared").products = products


def one_process(micros: list[list[Batch]], recipe: Recipe | None) -> dict[str, Tensor]:
    """Return losses of data ranks and gradients of their mean, one rank after the other."""
    model = filled()
    if recipe is not None:
        quantise(model, recipe)
    losses = torch.zeros(len(micros[0]))
    for micro in micros:
        for rank, batch in enumerate(micro):
            loss = model(**batch) / len(micros)
            loss.backward()  # divided below: to divide by 3 before a rounding changes it
            losses[rank] += loss.detach()
    params = dict(model.named_parameters())
    grads = {f"grad/{name}": p.grad / len(losses) for name, p in params.items()}  # type: ignore[operator]
    return {"loss/0": losses, **grads}  # type: ignore[dict-item]


def on_ranks(name: str, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return of every quantity our error over that of one process, and the distance to it."""
    options: dict[str, Any] = {}
    if "cp" in name:
        clones = CloneOptions(per_rank=1, min_share=0.0)
        options = dict(context=ContextOptions(way="a2a"), clones=clones, recompute=True)
    if "pp" in name:
        options = dict(pipeline=PipelineConfig(schedule="1f1b"), accumulate=2)
    case = Case(
        world=6,
        parallel=FOLDINGS[name],
        precision=Precision(recipe=recipe),
        expert_backend="auto",
        **options,
    )
    meshes = build_meshes(ParallelConfig(**case.parallel), "cpu")
    model = filled()
    parallelize(model, meshes, case)
    batches = make_batches(case, meshes, device)[:1]
    found = gather_whole(train(model, meshes, batches, case))
    if torch.distributed.get_rank():
        return {}
    exact, oracle = (one_process(batches[0], r) for r in (None, recipe))
    return {
        quantity: (
            error_ratio(found[quantity], oracle[quantity], exact[quantity]),
            distance(found[quantity], oracle[quantity]),
            distance(oracle[quantity], exact[quantity]),
        )
        for quantity in exact
    }


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def worker(rank: int, device: torch.device, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        f"{name}, {scaling}": on_ranks(name, RECIPES[scaling], device) for name, scaling in cases
    }


results = ranks_fixture(6, worker, "name", "scaling")


CASES = [*product(FOLDINGS, RECIPES)]


@pytest.mark.parametrize(("name", "scaling"), CASES)
def test_ranks_round_like_one_process(name: str, scaling: str, results: dict[str, Any]) -> None:
    found = results[f"{name}, {scaling}"]
    assert len(found) > 20 and found["loss/0"][1] < 1e-5
    for quantity, (ratio, distance_, of_recipe) in found.items():
        assert ratio < 2, quantity
        is_weight = "_proj" in quantity or "experts" in quantity or "shared" in quantity
        if quantity.startswith("grad/"):
            assert distance_ < bound(scaling, quantity, is_weight), quantity
            assert of_recipe > 0.02 and of_recipe > 3 * distance_ * (scaling == "mxfp8"), quantity


def bound(scaling: str, quantity: str, is_weight: bool) -> float:
    """Return how far the gradient of a folding may be from that of one process."""
    # A sum in another order moves some value over a tie, by one step.
    if scaling == "mxfp8" or quantity in ("grad/lm_head.weight", "grad/model.norm.weight"):
        return 1e-2
    # Rounding to E2M1 is 9.5% of normal numbers, at random 14%. A weight's gradient has two such
    # operands, of two foldings; those that came through all products about a dozen roundings.
    if scaling == "nearest":
        return 0.2 if is_weight else 1e-2
    return 0.5
