from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    DenseOptions,
    DispatchOptions,
    Meshes,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.base.options.context import ContextOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.base.rank_checks import gather_objects
from moecore.io import load, save
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.parallel.pipeline.schedule import PipelineConfig
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.units import units

WORLD = 4
TIMEOUT = timedelta(seconds=77)
CONFIG = MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=2)
DENSE = DecoderConfig(
    vocab_size=64, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_hidden_dim=48
)


def timeouts() -> dict[str, timedelta]:
    """Every group of three foldings, with the time that its collectives wait."""
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)
    before = backend.options._timeout
    backend._set_default_timeout(TIMEOUT)  # as init_process_group would
    found = {}
    for p in (
        ParallelConfig(tp=2, ep=2, etp=2),
        ParallelConfig(pp=2, tp=2, ep=2),
        ParallelConfig(cp=2, tp=2, edp_replicate=2, ep=2),
    ):
        for name, group in groups_of(build_meshes(p, "cpu")).items():
            found[f"{name} of {p}"] = group._get_backend(cpu).options._timeout
    backend._set_default_timeout(before)
    return found


def groups_of(meshes: Meshes) -> dict[str, dist.ProcessGroup]:
    found = {
        f"{view} {dim}": getattr(meshes, view).get_group(dim)
        for view in ("dense", "expert", "dense_fsdp", "expert_fsdp")
        for dim in getattr(meshes, view).mesh_dim_names
    }
    joined = ("dispatch_group", "micro_batch_group", "stage_group")
    return found | {n: g for n in joined if (g := getattr(meshes, n)) is not None}


def make_model(config: MoEConfig = CONFIG, layers: int = 1, device: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    moe = [MoELayer(config, device=device) for _ in range(layers)]
    return nn.Sequential(nn.Linear(32, 32, device=device), *moe)


def frozen() -> nn.Module:
    model = make_model()
    model[1].experts.w2.requires_grad_(False)
    return model


Built = tuple[Callable[[], nn.Module], dict[str, Any]]


def built(make: Callable[..., nn.Module] = make_model, /, **options: Any) -> Built:
    return make, options


BALANCE, OTHER_BALANCE = BalanceConfig(sequence_coef=0.1), BalanceConfig(sequence_coef=0.2)
# What the last rank does, what the others do, and the item that the error names.
DIFFERENT: dict[str, tuple[Built, Built, str]] = {
    "loss": (built(loss="sum"), built(), "loss ('sum' on rank 3, 'mean' on rank 0) must be the"),
    "dispatcher": (built(dispatch="allgather"), built(), "DispatchOptions.name ('allgather' on"),
    "domains": (built(dispatch="hierarchical"), built(), "name ('hierarchical' on rank 3"),
    "NCCL EP": (built(dispatch="nccl_ep"), built(dispatch="alltoall"), "name ('nccl_ep' on rank"),
    "balance": (
        built(moe={"balance": OTHER_BALANCE}),
        built(moe={"balance": BALANCE}),
        "MoEConfig.balance (BalanceConfig(",
    ),
    "precision": (
        built(precision=Precision(recipe=Recipe(), roles=("mlp",))),
        built(),
        "precision (Precision(recipe=Recipe(",
    ),
    "nvlink": (
        built(dispatch=DispatchOptions(nvlink=NVLinkOptions(row_factor=3.0))),
        built(),
        "NVLinkOptions.row_factor (3.0 on",
    ),
    "layers": (built(make_model, layers=2), built(), "names of parameters and buffers (...'1."),
    "meta": (built(make_model, device="meta"), built(), "is_meta of 0.weight (True on"),
    "shape": (
        built(make_model, config=replace(CONFIG, num_experts=16)),
        built(),
        "shape of 1.router.weight ((16, 32) on rank 3, (8, 32) on rank 0) and",
    ),
    "dtype": (
        built(lambda: make_model().bfloat16()),
        built(),
        "dtype of 0.weight (torch.bfloat16 on",
    ),
    "frozen": (built(frozen), built(), "requires_grad of 1.experts.w2 (False on"),
    "top_k": (
        built(make_model, config=replace(CONFIG, top_k=3)),
        built(),
        "value of 1.config.top_k (3 on rank 3, 2 on rank 0) and",
    ),
    "own balance": (
        built(make_model, config=replace(CONFIG, balance=BALANCE)),
        built(),
        "value of 1.config.balance.sequence_coef (0.1 on rank 3, 0.0 on rank 0) and",
    ),
}
MAKES = ("layers", "device", "config")


def scaled_models(last: Any, others: Any, text: str) -> tuple[ParallelConfig, Make, Make, str]:
    """Return an entry of `OTHER_MODELS` for models of `Scaled` with these attributes."""
    return FOLDED, partial(scaled, **last), partial(scaled, **others), f"value of 1.{text}"


class Scaled(nn.Linear):
    """A user's module, whose attributes decide numbers."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(32, 32)
        vars(self).update(attributes)


def scaled(**attributes: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Scaled(**attributes), MoELayer(CONFIG))


def decoder(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(replace(DENSE, **changes))


def with_adapter(alpha: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
    return peft.get_peft_model(hf_dense(), options)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def multiplied_by(factor: float) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        return x * factor

    return partial(multiply)


FOLDED, STAGES = ParallelConfig(ep=2), ParallelConfig(pp=2, dp_shard=2)
PIPELINE = dict(pipeline=PipelineConfig(schedule="1f1b"))
Make = Callable[[], nn.Module]
# Mesh, the last rank's model, that of the others, and what the error says on the last rank.
OTHER_MODELS: dict[str, tuple[ParallelConfig, Make, Make, str]] = {
    "a number": scaled_models(
        dict(alpha=0.25), dict(alpha=0.5), "alpha (0.25 on rank 3, 0.5 on rank 0) must be the same"
    ),
    "a missing number": scaled_models(
        dict(alpha=0.25), {}, "alpha (0.25 on rank 3, missing on rank 0) must"
    ),
    "a private number": scaled_models(
        dict(_alpha=0.25), dict(_alpha=0.5), "_alpha (0.25 on rank 3, 0.5 on rank 0) must"
    ),
    "a function": scaled_models(
        dict(act=F.silu), dict(act=torch.tanh), "act (torch.nn.functional.silu on rank 3, torch._V"
    ),
    "a lambda's factor": scaled_models(
        dict(act=times(2.0)),
        dict(act=times(3.0)),
        "act (tests.test_parallelize_ranks.times.<locals>.<lambda> ",
    ),
    "a private set": scaled_models(
        dict(_w={1, 2}), dict(_w={1, 3}), "_w ({1, 2} on rank 3, {1, 3} on rank 0) must"
    ),
    "a private tensor": scaled_models(
        dict(_w=torch.tensor(0.5)),
        dict(_w=torch.tensor(2.0)),
        "_w (0.5 on rank 3, 2.0 on rank 0) must",
    ),
    "a private array": scaled_models(
        dict(_w=torch.tensor([0.5]).numpy()),
        dict(_w=torch.tensor([2.0]).numpy()),
        "_w ([0.5] on rank 3, [2.0] on rank 0) must",
    ),
    "a record in a record": scaled_models(
        dict(config={"inner": SimpleNamespace(beta=0.1)}),
        dict(config={"inner": SimpleNamespace(beta=0.2)}),
        "config.inner.beta (0.1 on rank 3, 0.2 on rank 0) must",
    ),
    "a class": (
        FOLDED,
        lambda: nn.Sequential(make_model(), nn.SiLU()),
        lambda: nn.Sequential(make_model(), nn.Tanh()),
        "value of 1.__class__ (torch.nn.modules.activation.SiLU on rank 3, torch.nn.",
    ),
    "rope_theta": (
        ParallelConfig(tp=2),
        lambda: decoder(rope_theta=5000.0),
        decoder,
        "value of config.rope_theta (5000.0 on rank 3, 10000.0 on rank 0)",
    ),
    "norm_eps of two stages": (
        STAGES,
        lambda: decoder(norm_eps=1e-3),
        decoder,
        "value of config.norm_eps (0.001 on rank 3, 1e-06 on rank 0)",
    ),
    "attention_dropout": (
        ParallelConfig(),
        lambda: hf_dense(attention_dropout=0.5),
        lambda: hf_dense(),
        "value of config.attention_dropout (0.5 on rank 3, 0.0 on rank 0)",
    ),
    "alpha of an adapter": (
        ParallelConfig(),
        lambda: with_adapter(8),
        lambda: with_adapter(4),
        "value of peft_config.default.lora_alpha (8 on rank 3, 4 on rank 0)",
    ),
}


class Named(nn.Module):
    """Attributes that may differ between ranks whose models are equal."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.lin = nn.Linear(32, 32)
        self.rank = self.local_rank = rank
        self.device, self.generator = torch.device("cpu"), torch.Generator().manual_seed(rank)
        self.group = dist.group.WORLD
        self.kv_cache, self._weight_conversions = {rank: torch.ones(rank)}, [rank]
        self.kinds = {f"kind {i}" for i in range(9)}  # ranks hash strings differently
        self.act, self.partial = (lambda x: 2 * x), multiplied_by(2.0)
        self.owner, self.function = object(), nn.functional.gelu
        self.config = SimpleNamespace(_name_or_path=f"/host{rank}", beta=0.1)
        self.method = self.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def named() -> nn.Module:
    torch.manual_seed(0)
    return Named()


EQUAL_MODELS: dict[str, Callable[[], nn.Module]] = {
    "what one rank has": named,
    "memory of the loss": lambda: decoder(ce_chunk_tokens=8 << dist.get_rank()),
}
OVERLAPPED, GRAPHS = DenseOptions(overlap_shared=True), DenseOptions(graph=True)
# What the last rank alone asks for, and its mesh and error; the others' arguments are right.
REFUSED: dict[str, tuple[ParallelConfig, dict[str, Any], type[Exception], str]] = {
    "dispatcher": (FOLDED, dict(dispatch="local"), ValueError, "DispatchOptions.name ('local')"),
    "moe": (FOLDED, dict(moe={"bogus": 1}), ValueError, "moe ('bogus') must name one of"),
    "no pipeline": (STAGES, dict(pipeline=None), ValueError, "ParallelConfig.pp (2) must go with"),
    "context": (
        ParallelConfig(),
        dict(context=ContextOptions(dynamic=True)),
        ValueError,
        "ContextOptions.dynamic (True) must go with loss",
    ),
    "no cut": (
        ParallelConfig(tp=2),
        dict(model=make_model),
        NotImplementedError,
        "ParallelConfig.tp (2) must be 1 for Sequential",
    ),
    "an adapter's error": (
        ParallelConfig(),
        dict(adapters={nn.Linear: lambda block: None}),
        TypeError,
        "<lambda>() takes 1 positional",
    ),
}


def of_ranks(value: Any) -> list[Any]:
    return gather_objects(value)


def other_models() -> dict[str, list[Any]]:
    """Return the error of each rank and the change of its weights, where the last rank differs."""
    is_last, found = dist.get_rank() == WORLD - 1, {}
    for name, (degrees, last, others, _) in OTHER_MODELS.items():
        model = last() if is_last else others()
        before = [(n, p.detach().clone()) for n, p in model.named_parameters()]
        options: dict[str, Any] = PIPELINE if degrees.pp > 1 else {}
        message, _ = error_of(partial(parallelize_moe, model, build_meshes(degrees), **options))
        pairs = zip(before, model.named_parameters(), strict=True)
        found[name] = (message, all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs))
    for make in EQUAL_MODELS.values():
        parallelize_moe(make(), build_meshes(ParallelConfig(), "cpu"))
    return {name: of_ranks(error) for name, error in found.items()}


def refused() -> dict[str, list[Any]]:
    """Return type and text of each rank's error where only the last rank refuses a call."""
    is_last, found = dist.get_rank() == WORLD - 1, {}
    for name, (degrees, wrong, *_) in REFUSED.items():
        options: dict[str, Any] = PIPELINE if degrees.pp > 1 else {}
        options = {**options, **(wrong if is_last else {})}
        model = options.pop("model", decoder if degrees.pp * degrees.tp > 1 else make_model)()
        meshes = options.pop("meshes", build_meshes(degrees, "cpu"))
        with pytest.raises(Exception) as info:
            parallelize_moe(model, meshes, **options)
        found[name] = of_ranks((type(info.value), str(info.value)))
    with pytest.raises(ValueError) as info:
        build_meshes(ParallelConfig(ep=3 if is_last else 2), "cpu")
    found["degrees"] = of_ranks((type(info.value), str(info.value)))
    model = parallelize_moe(make_model(), build_meshes(ParallelConfig(), "cpu"))
    with pytest.raises(ValueError) as info:
        TrainStep(model, num_micro_batches=0 if is_last else 1)
    found["step"] = of_ranks((type(info.value), str(info.value)))
    return found | of_wrong_calls(model)


def of_wrong_calls(model: nn.Module) -> dict[str, list[Any]]:
    """Return type and text of each rank's error where only the last rank calls as nobody may."""
    is_last, meshes = dist.get_rank() == WORLD - 1, build_meshes(ParallelConfig(), "cpu")
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
        "parallelize_moe": (
            parallelize_moe,
            dict(model=make_model(), meshes=meshes),
            dict(dispatcher="local"),
        ),
        "TrainStep.__init__": (TrainStep, dict(model=model), dict(max_nrom=1.0)),
        "load": (load, dict(path="runs", model=model), dict(optimiser=None)),
    }
    found = {}
    for name, (call, arguments, wrong) in calls.items():
        with pytest.raises(TypeError) as info:
            call(**arguments | (wrong if is_last else {}))
        found[name] = of_ranks((type(info.value), str(info.value)))
    with pytest.raises(TypeError) as info:
        parallelize_moe(*(make_model(), meshes)[: 0 if is_last else 2])
    found["missing"] = of_ranks((type(info.value), str(info.value)))
    return found


def refusals() -> dict[str, Any]:
    """The error of each rank where the last one differs, and how many collectives came before."""
    is_last = dist.get_rank() == WORLD - 1
    meshes = build_meshes(ParallelConfig(ep=2), "cpu")
    found = {}
    for name, (last, others, _) in DIFFERENT.items():
        make, options = last if is_last else others
        made = {key: value for key, value in options.items() if key in MAKES}
        asked = {key: value for key, value in options.items() if key not in MAKES}
        found[name] = error_of(partial(parallelize_moe, make(**made), meshes, **asked))
    with patch("moecore.parallel.model.request.__version__", "0.2" if is_last else "0.1"):
        found["version"] = error_of(lambda: parallelize_moe(make_model(), meshes))
    degrees = ParallelConfig(ep=4 if is_last else 2)
    found["degrees"] = error_of(lambda: build_meshes(degrees, "cpu"))
    everyone = gather_objects(found)
    parallelize_moe(make_model(), meshes)(torch.randn(4, 32)).sum().backward()  # groups still work
    return {name: [rank[name] for rank in everyone] for name in found}


def error_of(action: Callable[[], Any]) -> tuple[str, list[str]]:
    with collectives() as called, pytest.raises(ValueError) as info:
        action()
    return str(info.value), called


@contextmanager
def collectives() -> Iterator[list[str]]:
    called: list[str] = []
    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "new_group"))]

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return run

    functions = {n: recorded(n, getattr(dist, n)) for n in names if callable(getattr(dist, n))}
    with patch.multiple(dist, **functions):
        yield called


def hf_dense(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        **changes,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def native_dense() -> nn.Module:
    return Decoder(DENSE)


def loss_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    return model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], ParallelConfig, int]] = {
    "native": (native_dense, ParallelConfig(tp=2), 5),  # root, three blocks, head
    "transformers": (hf_dense, ParallelConfig(dp_replicate=2, dp_shard=2), 4),
}


def dense(name: str) -> dict[str, Any]:
    """Two steps of a dense model against one process, a checkpoint, and what finish_step gives."""
    make, degrees, _ = MODELS[name]
    meshes = build_meshes(degrees, "cpu")
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 64, (meshes.data_ranks, 2, 17), generator=generator)
    plain = make()
    model = parallelize_moe(copy.deepcopy(plain), meshes)
    ours, theirs = (make_optimizer(m) for m in (model, plain))
    worst = 0.0
    for _ in range(2):
        loss = loss_of(model, data[meshes.data_rank])
        loss.backward()
        expected = torch.stack([loss_of(plain, tokens) for tokens in data]).mean()
        expected.backward()
        norm = clip_grad_norm_(model, 0.5)
        worst = max(worst, relative(norm.total, nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        for (n, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert got.grad is not None, n
            worst = max(worst, relative(got.grad.full_tensor(), want.grad))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        metrics = get_moe_state(model).finish_step()
    shown = (
        metrics.compute_load_max_over_mean(),
        metrics.compute_drop_rates(),
        metrics.compute_total_aux_loss(),
    )
    return {
        "worst": worst,
        "shown": shown,
        "units": len(units(model)),
        "restored": restored(model, ours, make),
    }


def restored(model: nn.Module, optimizer: Any, make: Callable[[], nn.Module]) -> bool:
    """Whether a checkpoint comes back on another layout."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = save(Path(folder[0]), 2, model, optimizer)
    other = parallelize_moe(make(), build_meshes(ParallelConfig(dp_shard=4), "cpu"))
    load(path, other, make_optimizer(other))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def relative(got: Any, want: Any) -> float:
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    return float((got - want).abs().max() / want.abs().max())


CASES: dict[str, Callable[[], Any]] = {
    "timeouts": timeouts,
    "refusals": refusals,
    "other models": other_models,
    "refused": refused,
    "native": lambda: dense("native"),
    "transformers": lambda: dense("transformers"),
}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {name: case() for name, case in CASES.items()}


results = ranks_fixture(WORLD, worker)


def test_every_group_takes_the_timeout_of_the_default_group(results: dict[str, Any]) -> None:
    names = {name.split(" of ")[0] for name in results["timeouts"]}
    assert {"dispatch_group", "micro_batch_group", "stage_group", "expert_fsdp edp_shard"} <= names
    assert set(results["timeouts"].values()) == {TIMEOUT}


NAMED = {name: item for name, (*_, item) in DIFFERENT.items()}
NAMED["version"] = "moecore.__version__ ('0.2' on rank 3, '0.1' on rank 0)"
NAMED["degrees"] = "ParallelConfig.edp_shard (1 on rank 3, 2 on rank 0) and 1 more must be the same"


@pytest.mark.parametrize("name", NAMED)
def test_a_rank_that_differs_is_refused_everywhere_and_the_item_named(name, results) -> None:
    errors = results["refusals"][name]
    assert NAMED[name] in errors[-1][0]
    items = {message.partition(" (")[0] for message, _ in errors}
    assert len(items) == 1 and not any("\n" in message for message, _ in errors)
    used = set(chain.from_iterable(called for _, called in errors))
    assert used <= {"all_reduce", "all_gather_object", "broadcast_object_list"}  # no groups


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_of_the_same_shapes_is_refused_before_its_weights_change(name, results):
    *others, (last, _) = results["other models"][name]
    assert OTHER_MODELS[name][-1] in last and "\n" not in last
    assert all(is_unchanged for _, is_unchanged in results["other models"][name])
    item, values = last.split(" (", 1)
    own, of_other = re.match(r"(.*) on rank 3, (.*?) on rank 0\)", values).groups()  # type: ignore
    assert all(
        e.startswith(f"{item} ({of_other} on rank {r}, {own} on rank 3)")
        for r, (e, _) in enumerate(others)
    )


REFUSALS = {name: case[2:] for name, case in REFUSED.items()}
REFUSALS["degrees"] = (ValueError, "ParallelConfig expert view (ep=3 = 3) must divide")
for name, wrong in (
    ("parallelize_moe", "dispatcher"),
    ("TrainStep.__init__", "max_nrom"),
    ("load", "optimiser"),
):
    REFUSALS[name] = (TypeError, f"{name}() got an unexpected keyword argument '{wrong}'")
REFUSALS["missing"] = (TypeError, "parallelize_moe() missing 1 required positional argument")
REFUSALS["step"] = (ValueError, "num_micro_batches (0) must be a whole number >= 1")


@pytest.mark.parametrize("name", REFUSALS)
def test_what_one_rank_refuses_every_rank_refuses(name: str, results: dict[str, Any]) -> None:
    (error,) = set(results["refused"][name])
    assert error[0] is REFUSALS[name][0] and error[1].startswith(REFUSALS[name][1])
    assert error[1].endswith(" (on rank 3)") and "\n" not in error[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_dense_model_equals_one_process(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    assert found["worst"] < 1e-5 and found["shown"] == ({}, {}, 0.0)
    assert found["units"] == MODELS[name][2] and found["restored"]
