from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import functional_call

from moecore.base.options.precision import Precision, Recipe
from moecore.base.params import shard_parameter
from moecore.base.rank_checks import gather_objects
from moecore.moe.amax_history import advance_amax_histories
from moecore.precision.amax import advance_amax
from moecore.precision.apply import apply_precision, make_linear_products
from moecore.precision.linear import Fp8Products, find_weight_problem
from tests.helpers.ranks import run_ranks

TENSORWISE = Recipe(scaling="tensorwise", power_of_two=False)
DELAYED = replace(TENSORWISE, amax_history=2)
MXFP8 = Recipe(scaling="mxfp8")
NVFP4 = Recipe(scaling="nvfp4", power_of_two=False, stochastic_rounding=False)
OF_CUTS = (Recipe(), TENSORWISE, DELAYED, MXFP8, NVFP4)
OF_SUMS = (Recipe(), TENSORWISE, DELAYED)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.down_proj = nn.Linear(64, 256, bias=False), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(x)))


def cut_weight(rank: int, recipe: Recipe) -> dict[str, bool]:
    """Columns of one weight on two ranks, whose outputs side by side are those of one rank."""
    torch.manual_seed(0)
    x, weight = torch.randn(24, 64), torch.randn(256, 64)
    weight[200] *= 5  # the largest value is on rank 1
    whole = nn.Linear(64, 256, bias=False)
    whole.weight = nn.Parameter(weight)
    mesh, cut = init_device_mesh("cpu", (2,)), nn.Linear(64, 256, bias=False)
    cut.weight = nn.Parameter(weight)
    shard_parameter(cut, "weight", mesh, (Shard(0),))
    rows, same = slice(128 * rank, 128 * rank + 128), []
    products = {"whole": make_linear_products(recipe), "cut": make_linear_products(recipe)}
    for _ in range(3):
        y, part = products["whole"](x, whole.weight), products["cut"](x, cut.weight)
        same.append(torch.equal(part, y[:, rows]))
        y.sum().backward()
        part.sum().backward()
        gradient = cut.weight.grad.to_local()  # type: ignore[union-attr]
        same.append(torch.equal(gradient, whole.weight.grad[rows]))  # type: ignore[index]
        groups = {"whole": None, "cut": dist.group.WORLD}
        for name, linear in (("whole", whole), ("cut", cut)):
            linear.weight.grad = None
            history = products[name].history
            if history is not None:
                advance_amax_histories([history], torch.device("cpu"), groups[name])
    return {"same": all(same)}


def replicated(rank: int) -> bool:
    """A whole weight on tp ranks has partial sums as its gradient."""
    mesh, linear = init_device_mesh("cpu", (2,)), nn.Linear(64, 32, bias=False)
    nn.init.constant_(linear.weight, 0.5)
    shard_parameter(linear, "weight", mesh, (Replicate(),))
    Fp8Products(Recipe())(torch.full((4, 64), 1.0 + rank), linear.weight).sum().backward()
    return bool((linear.weight.grad.full_tensor() == 4 * (1.0 + 2.0)).all())  # type: ignore[union-attr]


def uneven() -> str | None:
    """Return why a cut that gives rank 1 alone a multiple of 16 is refused."""
    mesh = init_device_mesh("cpu", (2,))
    return find_weight_problem(distribute_tensor(torch.zeros(33, 64), mesh, [Shard(0)]))


def under_fsdp(rank: int, recipe: Recipe, policy: MixedPrecisionPolicy) -> list[float]:
    """Return errors of each step's gradients, against one process that has both batches."""
    plain, sharded = Model(), Model()
    for model in (plain, sharded):
        apply_precision(model, Precision(recipe=recipe, roles=("mlp",)))
    fully_shard(sharded, mp_policy=policy)
    batches = [torch.randn(16, 64) * (1 + 3 * i) for i in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, sharded)]
    groups = (None, dist.group.WORLD)
    errors = []
    for _ in range(3):
        y = sharded(batches[rank])
        y.float().square().mean().backward()
        for x in batches:
            dtype = policy.param_dtype or torch.float32
            weights = {name: weight.to(dtype) for name, weight in plain.named_parameters()}
            y = functional_call(plain, weights, x.to(dtype))
            y.float().square().mean().div(2).backward()
        for ours, truth in zip(sharded.parameters(), plain.parameters(), strict=True):
            difference = ours.grad.full_tensor() - truth.grad  # type: ignore[union-attr]
            errors.append((difference.norm() / truth.grad.norm()).item())  # type: ignore[union-attr]
        for optimizer, model, group in zip(optimizers, (plain, sharded), groups, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            advance_amax(model, group)
    return errors


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    fp32 = MixedPrecisionPolicy()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results: dict[str, Any] = {
        "cut": {r.describe(): cut_weight(rank, r)["same"] for r in OF_CUTS},
        "replicated": replicated(rank),
        "uneven": uneven(),
        "fp32": {r.describe(): under_fsdp(rank, r, fp32) for r in OF_SUMS},
        "bf16": under_fsdp(rank, Recipe(), bf16),
    }
    return results | {name: gather_objects(results[name]) for name in ("cut", "uneven")}


def test_cut_and_sharded_weights_on_two_ranks() -> None:
    """Scales are each rank's own, or of histories that ranks share: gradients are summed alike."""
    results: dict[str, Any] = run_ranks(2, worker)
    for of_rank in results["cut"]:
        assert all(of_rank.values()), of_rank
    assert results["uneven"] == ["its weight [33, 64] is cut into 2 parts that are not alike"] * 2
    assert results["replicated"]
    assert max(error for errors in results["fp32"].values() for error in errors) < 1e-5
    assert max(results["bf16"]) < 5e-3
