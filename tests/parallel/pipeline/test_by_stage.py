import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    BalanceConfig,
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    PipelineConfig,
    Precision,
    Recipe,
    TrainStep,
    build_meshes,
    explain,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder, preset
from moecore.recipes.optimizer import OptimizerConfig
from moecore.rl import RouterReplay
from moecore.train import AdamW, HostAdamW, Muon, assign_matrices
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "overlapped")


def of_options(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.AdamW(m.parameters(), **{k: v() for k, v in options.items()})


def in_groups(
    lr: Callable[[], float], reverse: Callable[[], bool] = lambda: False
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a maker of two groups with the names of their parameters; stages have other names."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = list(model.named_parameters())[:: -1 if reverse() else 1]
        return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": lr()}], lr=0.1)

    return build


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "class": lambda m: (torch.optim.SGD, torch.optim.AdamW)[dist.get_rank()](m.parameters()),
    "lr": lambda m: torch.optim.SGD(m.parameters(), lr=0.1 + dist.get_rank()),
    "betas": of_options(betas=lambda: (0.9, 0.95 + 0.01 * dist.get_rank())),
    "lr of a group": in_groups(lambda: 0.5 + dist.get_rank()),
    "moments": lambda m: AdamW(
        m.parameters(), moment_dtype=(torch.float32, torch.bfloat16)[dist.get_rank()]
    ),
    "equal groups": in_groups(lambda: 0.5),
    "Muon": lambda m: Muon(assign_matrices(m)),
    "table": in_groups(lambda: 0.5, reverse=lambda: dist.get_rank() == 0),
    # The table is a larger part of the later stage's parameters.
    "host": lambda m: HostAdamW([p for n, p in m.named_parameters() if "layers.3" not in n]),
}
REFUSED = {
    "class": "classes of optimizers",
    "lr": "value of optimizer.param_groups[0].lr (",
    "betas": "value of optimizer.param_groups[0].betas ((0.9, 0.9",
    "lr of a group": "value of optimizer.param_groups[1].lr (",
    "moments": "value of optimizer.moment_dtype (torch.",
    "host": "HostAdamW's selection of model.embed_tokens.weight (True) must be False as on",
    "table": "lr of model.embed_tokens.weight (0.1) must be 0.5 as on another pipeline stage",
}


def is_trained(name: str) -> bool:
    return "layers.3.mlp" in name  # in the last stage


def tokens(number: int) -> Tensor:
    return torch.randint(1, 61, (2, 8), generator=torch.Generator().manual_seed(number))


def make() -> Decoder:
    torch.manual_seed(0)
    config = preset("tiny")
    assert config.moe is not None
    moe = replace(config.moe, balance=BalanceConfig())
    return Decoder(replace(config, num_layers=4, vocab_size=61, tie_embeddings=True, moe=moe))


def staged(
    model: nn.Module,
    schedule: Any = "1f1b",
    layout: str | None = None,
    **options: Any,
) -> nn.Module:
    pipeline = PipelineConfig(schedule=schedule, layout=layout)
    meshes = build_meshes(ParallelConfig(pp=2), "cpu")
    return parallelize_moe(model, meshes, pipeline=pipeline, **options)


def frozen(schedule: str) -> float:
    """Return how far gradients are from a plain model's, with nothing to train in early stages."""
    model, plain = staged(make(), schedule), make()
    step = TrainStep(model, None, num_micro_batches=4)
    for each in (model, plain):
        for name, param in each.named_parameters():
            param.requires_grad_(is_trained(name))
    batches = [tokens(number) for number in range(4)]
    step.forward_backward([{"tokens_BT": t, "labels_BT": t} for t in batches])
    for t in batches:
        (plain(t, t) / 4).backward()
    wanted, worst = dict(plain.named_parameters()), 0.0
    for name, param in model.named_parameters():
        want = wanted[name].grad
        if (param.grad is None) != (want is None):
            return float("inf")
        if param.grad is not None and want is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            worst = max(worst, float((grad - want).abs().max() / want.abs().max()))
    return worst


def make_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers of stages of which the first has no matrices."""
    override = ("*.3.self_attn.q_proj.weight", "adamw")  # names a parameter of the other stage
    assignment = assign_matrices(model, (override,))
    return [Muon(assignment, ns_dtype=torch.float32), AdamW(assignment.adamw_params)]


def make_for_frozen(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Freeze the first stage, and return a recipe's optimizers of what is trained."""
    for name, param in model.named_parameters():
        param.requires_grad_(is_trained(name))
    return OptimizerConfig(lr=0.01, eps=1e-3, state_offload=0.5).build_optimizers(model)


def step_of_one_stage(make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> float:
    """Return how far parameters are from a plain model's after a step."""
    model, plain = staged(make(), layout="E|ttttL"), make()
    batches = [tokens(number) for number in range(4)]
    for each in (model, plain):
        optimizers = make_optimizers(each)
        if each is model:
            step = TrainStep(model, optimizers, num_micro_batches=4)
            step.forward_backward([{"tokens_BT": t, "labels_BT": t} for t in batches])
            step.finish()
            continue
        for t in batches:
            (plain(t, t) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
    wanted = dict(plain.named_parameters())
    pairs = [(of(param), of(wanted[name])) for name, param in model.named_parameters()]
    return max(float((param - want).abs().max()) for param, want in pairs)


def of(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def overrides(name: str) -> str:
    """Return the error of a precision with an override for modules of this name."""
    precision = Precision(overrides=((name, Recipe()),))
    return error_of(lambda: staged(make(), precision=precision))


def replayed() -> list[int]:
    """Return the numbers of recorded forwards by layer; the first stage has no MoE layer."""
    model = staged(make(), layout="E|ttttL")
    step, replay = TrainStep(model), RouterReplay(model)
    batch = {"tokens_BT": tokens(0), "labels_BT": tokens(0)}
    with replay.record():
        losses = step.compute_losses([batch])
    with replay.replay(choices := replay.choices()):
        assert torch.equal(step.compute_losses([batch]), losses)
    return [len(forwards) for forwards in choices.values()]


def options_of_one_stage() -> list[str]:
    """Return the warnings about parts that no block of a stage has, or that no block has."""
    memory = MemoryOptions(recompute=("moe", "mla_up_proj"), offload=("attention",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        staged(make(), layout="E|ttttL", memory=memory)
    return [str(warning.message) for warning in caught if "is not used" in str(warning.message)]


def explained() -> list[str]:
    """Return the layers in a table of saved bytes."""
    lines = explain(staged(make(), layout="Et|tttL"), batch=(2, 8)).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("layers ")) + 1 : -1]
    return [line.partition("  ")[0] for line in table]


def sums_in_bf16() -> float:
    """Return how far a step's gradient is from the fp32 sum of those of its micro-batches."""
    fsdp, grads = FSDPOptions(param_dtype=torch.bfloat16), list[Tensor]()
    batches = [{"input_ids": tokens(number), "labels": tokens(number)} for number in range(4)]
    for given in (batches, *([batch] for batch in batches)):
        causal = random_model("qwen3-moe", num_hidden_layers=2)
        model = staged(causal, layout="E|ttL", fsdp=fsdp)
        TrainStep(model, num_micro_batches=len(given)).forward_backward(given)
        grad = next(model.parameters()).grad  # of the embedding in the first stage
        assert grad is not None
        grads.append(of(grad))
    total = torch.stack(grads[1:]).mean(0)
    return float((grads[0] - total).abs().max() / total.abs().max())


def worker(rank: int, device: torch.device) -> list[dict[str, Any]]:
    found: dict[str, Any] = {schedule: frozen(schedule) for schedule in SCHEDULES}
    found["sums in bf16"] = sums_in_bf16()
    found["matrices"] = step_of_one_stage(make_muon)
    found["nothing trained"] = step_of_one_stage(make_for_frozen)
    found |= dict(replayed=replayed(), explained=explained(), unused=options_of_one_stage())
    found["overrides"] = [overrides(f"*layers.{i}.self_attn.q_proj") for i in (0, 3, 4)]
    model = staged(make())
    for name, optimizer in OPTIMIZERS.items():
        made = optimizer(model)
        found[name] = error_of(lambda made=made: TrainStep(model, made))  # type: ignore[misc]
    causal: Any = staged(random_model("qwen3-moe"))
    for name in ("generate", "forward"):
        ids = {"input_ids": tokens(0)}
        call = causal if name == "forward" else causal.generate
        found[name] = error_of(lambda call=call, ids=ids: call(**ids))  # type: ignore[misc]
    return gather_objects(found)


found = ranks_fixture(2, worker)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_with_nothing_to_train_hands_on(schedule: str, found: list[dict[str, Any]]) -> None:
    assert max(of_rank[schedule] for of_rank in found) < 1e-5


def test_a_stage_of_the_embedding_sums_micro_batches_in_fp32(found: list[dict[str, Any]]) -> None:
    assert max(of_rank["sums in bf16"] for of_rank in found) < 1e-6


@pytest.mark.parametrize("name", ["matrices", "nothing trained"])
def test_an_optimizer_may_step_one_stage(name: str, found: list[dict[str, Any]]) -> None:
    assert max(of_rank[name] for of_rank in found) < 1e-5


def test_a_stage_may_have_no_moe_layer_to_replay(found: list[dict[str, Any]]) -> None:
    assert [of_rank["replayed"] for of_rank in found] == [[], [1, 1, 1]]


def test_saved_bytes_are_those_of_the_layers_of_a_stage(found: list[dict[str, Any]]) -> None:
    assert [of_rank["explained"] for of_rank in found] == [["0"], ["1 to 3"]]


def test_an_option_is_unused_if_no_stage_uses_it(found: list[dict[str, Any]]) -> None:
    unused = "MemoryOptions.recompute ('mla_up_proj') is not used: no block has it"
    assert [of_rank["unused"] for of_rank in found] == [[unused], [unused]]


def test_a_recipe_may_be_of_one_stage(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, last, none = of_rank["overrides"]
        assert first == last == "no error"
        assert "'*layers.4.self_attn.q_proj') must match what can be quantised" in none


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_with_other_optimizers_are_refused(name: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank[name].startswith(REFUSED.get(name, "no error"))
        assert "\n" not in of_rank[name]


@pytest.mark.parametrize("name", ["generate", "forward"])
def test_a_forward_of_this_ranks_part_alone_is_refused(name, found) -> None:
    for of_rank in found:
        assert "must be run by TrainStep's forward_backward or losses" in of_rank[name]
