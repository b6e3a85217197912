"""Backwards in two parts: weight gradients that are computed later have the bits of a whole one.

A schedule is a list of turns (verb, micro-batch): F forward, B whole backward, D gradients of
inputs, W of weights. What is freed becomes nan, so W reads no whole weight.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore import (
    FSDPOptions,
    MemoryOptions,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.kernels.experts.fp8_products import BlockwiseProducts
from moecore.kernels.experts.grouped_products import TorchMatmuls
from moecore.kernels.linear import PlainProducts
from moecore.kernels.rows.record import Rows
from moecore.models import Decoder
from moecore.parallel.fsdp.deferred import WeightGradients, WeightProduct
from moecore.parallel.fsdp.engine import UnitEngine
from moecore.parallel.model.parallel_state import list_engines
from moecore.parallel.model.shard_model import shard_model
from moecore.precision.apply import defer_linears
from moecore.precision.linear import Fp8Products
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.test_unit import BLOCKS, DIM, Model, freed_is_nan
from tests.parallel.fsdp.units import recorded, units
from tests.parallel.small_decoder import small_decoder

WORLD, N = 4, 3
Turns = Sequence[tuple[str, int]]
CONFIG = small_decoder(128, 128, vocab_size=60, head_dim=16, dense=96, shared=48)
PRODUCTS = 2 * 4 + 3 + 2 + 2  # of two attentions, a dense MLP, the shared and the routed experts
EP1, EP2, TP2 = ParallelConfig(), ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
REGIONS = MemoryOptions(recompute=("norm", "activation", "qkv_proj", "mlp", "expert_fc1"))
STRATEGIES: tuple[Any, ...] = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CASES: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    f"{strategy}, ep {p.ep}": (p, dict(fsdp=FSDPOptions(dense_strategy=strategy)))
    for strategy in STRATEGIES
    for p in (EP1, EP2)
}
CASES |= {
    "embeddings too": (EP2, dict(fsdp=FSDPOptions(embedding_strategy="optim_grads_params"))),
    "experts whole": (ParallelConfig(ep=4), {}),
    "replicas": (ParallelConfig(dp_replicate=2, dp_shard=2, edp_shard=4), {}),
    "tp": (TP2, {}),
    "tp, optim": (TP2, dict(fsdp=FSDPOptions(dense_strategy="optim"))),
    "bf16": (EP2, dict(fsdp=BF16)),
    "fp8": (EP1, dict(fsdp=replace(BF16, dense_strategy="optim"), precision="blockwise")),
    "fp8 gathers, tp": (
        TP2,
        dict(fsdp=replace(BF16, fp8_param_gather=True), precision="blockwise"),
    ),
    "checkpoints": (EP2, dict(fsdp=BF16)),
    "reentrant checkpoints": (EP2, dict(fsdp=BF16)),
    "regions": (EP2, dict(fsdp=BF16, memory=REGIONS)),
    "offload": (EP2, dict(fsdp=BF16, memory=MemoryOptions(offload=("attention", "experts")))),
}
LIKE_BF16 = ("checkpoints", "reentrant checkpoints", "regions", "offload")  # keep other things
UNSHARDED = tuple(zip("FFFBBB", (0, 1, 2, 0, 1, 2), strict=True))
APART = tuple(zip("FFDFDDWWW", (0, 1, 0, 2, 1, 2, 0, 1, 2), strict=True))
LEFT = APART[:-2]  # two W's never come
SHUFFLED = (*APART[:-3], ("W", 1), ("W", 2), ("W", 0))
MIXED = tuple(zip("FFDBFDWW", (0, 1, 0, 1, 2, 2, 0, 2), strict=True))
FEW = ("optim, ep 2", "optim_grads_params, ep 1", "tp", "fp8 gathers, tp")
WAYS: list[tuple[str, str, Turns]] = [(case, "apart", APART) for case in CASES]
WAYS += [(case, "left", LEFT) for case in FEW]
OTHER_ORDERS: list[tuple[str, str, Turns]] = [
    (case, way, turns)
    for case in FEW[:3]
    for way, turns in (("shuffled", SHUFFLED), ("mixed", MIXED))
]


class Run:
    """A step of a model by a schedule.

    Attributes:
        products: verbs of the turns but forwards, and how many products of weights each ran.
    """

    def __init__(self, model: nn.Module, losses: Sequence[Any]) -> None:
        self.model, self._losses = model, losses
        (self.engine,) = list_engines(model)
        self.step = TrainStep(model, num_micro_batches=len(losses))
        self.later = [WeightGradients() for _ in losses]
        self.products: list[tuple[str, int]] = []
        self._outputs: dict[int, Tensor] = {}

    def play(self, turns: Turns) -> dict[str, Tensor]:
        """Return this rank's gradients."""
        with freed_is_nan(), counted() as calls, self.step.micro_batches():
            for verb, n in turns:
                calls.clear()
                self.turn(verb, n)
                if verb != "F":
                    self.products.append((verb, len(calls)))
        return gradients(self.model)

    def turn(self, verb: str, n: int) -> None:
        if verb == "F":
            self._outputs[n] = self._losses[n]()
        elif verb == "B":
            self._outputs.pop(n).backward()
        elif verb == "D":
            with self.engine.defer_weight_gradients(self.later[n]):
                self._outputs.pop(n).backward()
        else:
            self.later[n].run()
            assert self.later[n].nbytes == 0


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record products of weight gradients, whoever computes them."""
    calls: list[str] = []

    def recording(plain: Any) -> Any:
        def call(*args: Any) -> Tensor:
            calls.append(plain.__qualname__)
            found: Tensor = plain(*args)
            return found

        return call

    with ExitStack() as stack:
        for owner, name in (
            (PlainProducts, "compute_weight_grad"),
            (Fp8Products, "compute_weight_grad"),
            (TorchMatmuls, "compute_weight_grad"),
            (BlockwiseProducts, "_compute_wgrad"),
        ):
            stack.enter_context(patch.object(owner, name, recording(getattr(owner, name))))
        yield calls


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr, operator]


@contextmanager
def deferring_linears() -> Iterator[None]:
    """Within, linears of models that are parallelized can defer."""

    def shard(model: nn.Module, *args: Any) -> UnitEngine:
        defer_linears(model)
        return shard_model(model, *args)

    with patch.object(parallelize, "shard_model", shard):
        yield


def make(case: str, *, defers: bool) -> Run:
    parallel, how = CASES[case]
    model = Decoder(CONFIG, device="meta")
    with deferring_linears() if defers else ExitStack():
        parallelize_moe(model, meshes_of(parallel), **how)
    if "checkpoints" in case:
        for layer in model.model.layers:
            is_reentrant = case.startswith("reentrant")
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=is_reentrant)
    model.to_empty(device="cpu")
    model.init_weights()
    return Run(model, [partial(loss_of, model, parallel.tp, n) for n in range(N)])


@cache
def meshes_of(parallel: ParallelConfig) -> Meshes:
    return build_meshes(parallel, "cpu")


def loss_of(model: Decoder, tp: int, n: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * n + dist.get_rank() // tp)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / N
    return loss


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Return names whose bits differ, and by how much of the largest element."""
    assert got.keys() == want.keys() and len(got) > 10
    assert all(bool(t.isfinite().all()) for t in want.values())
    return {
        name: float((got[name] - t).abs().max() / t.abs().max())
        for name, t in want.items()
        if not torch.equal(got[name], t)
    }


def worker(rank: int, device: torch.device, asked: list[tuple[str, str]]) -> dict[Any, Any]:
    cases = [c for c in CASES if c == "bf16" or c in dict(asked)]
    wanted = {c: make(c, defers=False).play(UNSHARDED) for c in cases if c not in LIKE_BF16}
    wanted |= dict.fromkeys(LIKE_BF16, wanted["bf16"])
    for grads in wanted.values():  # a rank may own an idle expert
        assert sum(bool(t.any()) for t in grads.values()) > len(grads) - 3
    found: dict[Any, Any] = {}
    for case in (c for c in FEW if (c, "whole") in asked):
        found[case, "whole"] = errors(make(case, defers=True).play(UNSHARDED), wanted[case])
    for case, way, turns in (one for one in WAYS + OTHER_ORDERS if one[:2] in asked):
        run = make(case, defers=True)
        with recorded(run.model) as events:
            found[case, way] = errors(run.play(turns), wanted[case])
        found[case, way, "products"] = run.products
        found[case, way, "reductions"] = reductions(run.model, events)
    every = gather_objects(found)
    return {key: [one[key] for one in every] for key in found}


def reductions(model: nn.Module, events: list[str]) -> dict[str, set[int]]:
    """Return how often units communicate gradients: those that accumulate, and others."""
    found: dict[str, set[int]] = {"once": set(), "each": set()}
    for unit in units(model):
        if unit.is_sharded:
            times = events.count(f"reduce {unit.options.name}")
            found["once" if unit.options.accumulates else "each"].add(times)
    return found


found = ranks_fixture(WORLD, worker, "case", "way")


@pytest.mark.parametrize(
    ("case", "way"), [(c, w) for c, w, _ in WAYS] + [(c, "whole") for c in FEW]
)
def test_gradients_have_the_bits_of_whole_backwards(case, way, found) -> None:
    assert found[case, way] == [{}] * WORLD


@pytest.mark.parametrize(("case", "way"), [(c, w) for c, w, _ in OTHER_ORDERS])
def test_another_order_changes_the_order_of_sums_alone(case, way, found) -> None:
    assert max((e for ours in found[case, way] for e in ours.values()), default=0.0) <= 1e-6


@pytest.mark.parametrize(("case", "way"), [(c, "apart") for c in CASES])
def test_products_of_weights_run_in_w_alone(case: str, way: str, found: dict[Any, Any]) -> None:
    turns = [(verb, 0 if verb == "D" else PRODUCTS) for verb, _ in APART if verb != "F"]
    assert found[case, way, "products"] == [turns] * WORLD


@pytest.mark.parametrize(("case", "way"), [(c, w) for c, w, _ in WAYS + OTHER_ORDERS])
def test_what_accumulates_is_reduced_once(case: str, way: str, found: dict[Any, Any]) -> None:
    """Other units by each part that has a gradient of theirs."""
    for by in found[case, way, "reductions"]:
        assert by["once"] <= {1} and by["each"] <= set(range(N, 2 * N + 1))


# One process without other ranks: an engine of nn.Linear's, with biases and gains.


def alone(*, defers: bool, strategy: Any = "optim_grads_params") -> Run:
    model: Any = Model()
    options = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy=strategy)
    with deferring_linears() if defers else ExitStack():
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
    return Run(model, [partial(loss_alone, model, n) for n in range(N)])


def loss_alone(model: Any, n: int) -> Tensor:
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(n))
    loss: Tensor = model(x)[-1].float().square().mean()
    return loss


@pytest.mark.parametrize("turns", [APART, LEFT, SHUFFLED, MIXED])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_one_process_alone(strategy: str, turns: Turns) -> None:
    want = alone(defers=False, strategy=strategy).play(UNSHARDED)
    found = errors(alone(defers=True, strategy=strategy).play(turns), want)
    assert max(found.values(), default=0.0) <= (1e-6 if turns in (SHUFFLED, MIXED) else 0.0)


def test_bytes_are_those_of_inputs_and_gradients_of_outputs() -> None:
    run = alone(defers=True)
    with run.step.micro_batches():
        run.turn("F", 0)
        run.turn("D", 0)
        one = run.later[0].nbytes
        assert one == (BLOCKS + 2) * 2 * 3 * DIM * 2  # linears, x and dy, rows, columns, bf16
        run.turn("W", 0)


def test_a_storage_counts_once() -> None:
    later, x = WeightGradients(), torch.zeros(6, 4)
    for dy in (torch.zeros(6, 2), torch.zeros(6, 3)):
        later.store_product(
            later, WeightProduct.from_operands(0, dy.shape, torch.mm, (Rows(x), (dy, None, "e4m3")))
        )
        x = x[:3]
    assert later.nbytes == 4 * 6 * (4 + 2 + 3)


def test_a_dropped_step_drops_what_is_left() -> None:
    run = alone(defers=True)
    with pytest.raises(FloatingPointError), run.step.micro_batches():
        run.turn("F", 0)
        run.turn("D", 0)
        raise FloatingPointError
    with pytest.raises(ValueError, match=r"WeightGradients.run\(\) must run within"):
        run.later[0].run()
    assert run.later[0].nbytes
    run.step.drop()
    run.turn("W", 0)  # has nothing to do
    assert errors(run.play(APART), alone(defers=False).play(UNSHARDED)) == {}


def test_who_wants_to_see_a_gradient_sees_it_in_d() -> None:
    run = alone(defers=True)
    seen: list[Tensor] = []
    with run.step.micro_batches():
        run.turn("F", 0)
        layer = next(unit for unit in units(run.model) if unit.options.name == "layers.0")
        whole = next(p.unsharded for p in layer.params if p.slot.param.endswith("linear.weight"))
        whole.register_hook(seen.append)
        run.turn("D", 0)
        assert len(seen) == 1
        run.turn("W", 0)
