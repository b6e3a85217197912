import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.params import clean_name
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel.fsdp.formats import BlockFormat
from tests.families.transformers.hf_models import random_model
from tests.families.transformers.lora_cases import adapted_model
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import Held, part_of
from tests.parallel.fsdp.units import units
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

WORLD, LR = 2, 0.125
Chooses = Callable[[str], bool]  # by a parameter's name
# What is trained in each step, one after the other.
STEPS: list[Chooses] = [
    lambda name: "layers.0" not in name,
    lambda name: "layers.0" in name or "norm" in name,
    lambda name: "experts" in name or "lora" in name,
    lambda name: "experts" not in name,
    lambda name: True,
]
EP = ParallelConfig(ep=2)
TIED = dict(tie_word_embeddings=True, num_hidden_layers=3)
CASES: dict[str, tuple[Callable[[], nn.Module], ParallelConfig, dict[str, Any]]] = {
    "all freed": (lambda: random_model("qwen3-moe", **TIED), EP, {}),
    **{
        strategy: (
            lambda: random_model("qwen2-moe"),
            ParallelConfig(),
            dict(fsdp=FSDPOptions(dense_strategy=strategy, embedding_strategy=strategy)),  # type: ignore[arg-type]
        )
        for strategy in ("optim_grads", "optim", "no_shard")
    },
    "LoRA": (lambda: adapted_model("qwen3-moe", {}), EP, {}),
    "recomputed": (
        lambda: random_model("qwen3-moe"),
        EP,
        dict(memory=MemoryOptions(recompute=("norm", "moe"))),
    ),
}


def set_trained(model: nn.Module, trains: Chooses) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(trains(name))


def values(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    """Parameters or gradients by names without what wrappers add."""
    found = {}
    for name, param in model.named_parameters():
        tensor = param.grad if grads else param
        if tensor is not None:
            found[clean_name(name).replace("base_layer.", "")] = tensor.detach()
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return this rank's largest difference, by its tensor's largest value; inf = of names."""
    own = {name for name in found if "experts.lora" not in name}  # of other names and shapes
    if own != {name for name in expected if "experts.lora" not in name}:
        return float("inf")
    errors = [torch.zeros(1)]
    for name in own:
        error = (Held.of(found[name]).local - part_of(expected[name], found[name])).abs()
        errors.append(error.flatten() / expected[name].abs().max().clamp(min=1e-3))
    return float(torch.cat(errors).max())


def loss_of(model: nn.Module, seed: int) -> Tensor:
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def steps(ours: Any, plain: nn.Module) -> list[float]:
    """Train both by `STEPS`, two micro-batches each; return how far norms and weights are apart."""
    found = []
    optimizers = [on_parts(torch.optim.SGD)(m.parameters(), lr=LR) for m in (ours, plain)]
    step = TrainStep(ours, optimizers[0], max_norm=1.0, num_micro_batches=2)
    for i, trains in enumerate(STEPS):
        for model in (ours, plain):
            set_trained(model, trains)
        for n in range(2):
            with step.micro_batch():
                (loss_of(ours, 2 * i + n) / 2).backward()
            (loss_of(plain, 2 * i + n) / 2).backward()
        grads = worst(values(ours, grads=True), values(plain, grads=True))
        for model in (ours, plain):  # an optimizer steps whatever has a gradient
            set_trained(model, STEPS[i - 1])
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
        total = step.finish().norm
        found += [grads, abs(total.total / float(norm) - 1), worst(values(ours), values(plain))]
    return found


def between(ours: nn.Module, plain: nn.Module) -> list[float]:
    """Change what is trained between micro-batches, and between forwards and their backward."""
    found = []
    for trains, others in pairwise(STEPS):
        for model in (ours, plain):
            model.zero_grad()
            set_trained(model, trains)
            loss_of(model, 0).backward()
            set_trained(model, others)
            loss_of(model, 1).backward()
        found.append(worst(values(ours, grads=True), values(plain, grads=True)))
        for model in (ours, plain):
            model.zero_grad()
            set_trained(model, trains)
            first = loss_of(model, 2)
            set_trained(model, others)
            (first + loss_of(model, 3)).backward()
        found.append(worst(values(ours, grads=True), values(plain, grads=True)))
        for model in (ours, plain):  # as where a forward without adapters gives the reference
            model.zero_grad()
            set_trained(model, trains)
            first = loss_of(model, 4)
            set_trained(model, others)
            with torch.no_grad():
                loss_of(model, 5)
            set_trained(model, trains)
            first.backward()
        found.append(worst(values(ours, grads=True), values(plain, grads=True)))
    return found


def gathered_in_fp8() -> list[float]:
    """Return how far gradients are from those asked for, of weights that are gathered in FP8."""
    config = small_decoder(128, 128, head_dim=16, dense=128, experts=2, shared=128)
    model = Decoder(config)
    model.init_weights(0)
    fsdp = FSDPOptions(param_dtype=torch.bfloat16, fp8_param_gather=True)
    meshes = build_meshes(ParallelConfig(), "cpu")
    parallelize_moe(model, meshes, fsdp=fsdp, precision="blockwise")
    names = {param: name for name, param in model.named_parameters()}
    in_fp8 = {
        names[p.sharded]
        for u in units(model)
        if isinstance(u._format, BlockFormat)
        for p in u.params
    }
    assert len({"shared" in name for name in in_fp8}) == 2, "of routed and of shared experts"
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    grads = []
    for trains in STEPS:
        model.zero_grad()
        set_trained(model, trains)
        model(ids[:, :-1], ids[:, 1:]).backward()
        grads.append({n: Held.of(g).local.clone() for n, g in values(model, grads=True).items()})
    every = grads[-1]  # freezing changes no other gradient
    wanted = [{n: grad for n, grad in every.items() if trains(n)} for trains in STEPS]
    return [worst(*pair) for pair in zip(grads, wanted, strict=True)]


def worker(rank: int, device: torch.device, cases: list[str]) -> dict[str, list[float]]:
    found = {}
    for name in (name for name in cases if name in CASES):
        make, parallel, options = CASES[name]
        plain = make()
        if name == "LoRA":
            plain.base_model.model.set_experts_implementation("eager")  # type: ignore[union-attr, operator]
        ours = copy.deepcopy(plain)
        if name in ("optim", "LoRA"):  # frozen before, too
            for model in (ours, plain):
                set_trained(model, STEPS[1])
        parallelize_moe(ours, build_meshes(parallel, "cpu"), **options)
        found[name] = steps(ours, plain)
        if "memory" not in options:  # torch's checkpoints refuse what has changed since forward
            found[name] += between(ours, plain)
    every = gather_objects(found | {"FP8": gathered_in_fp8()})
    return {name: [error for of_rank in every for error in of_rank[name]] for name in every[0]}


found = ranks_fixture(WORLD, worker, "case")


@pytest.mark.parametrize("case", [*CASES, "FP8"])
def test_training_is_that_of_a_plain_model(case: str, found: dict[str, list[float]]) -> None:
    assert all(error < 2e-5 for error in found[case]), found[case]
