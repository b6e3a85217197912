"""Options over ranks: EP and ETP change no number, nor does a micro-batch that ranks share.

Four ranks are spawned once; each check runs on all of them and reports numbers.

Legend: B sequences, T tokens of one, D model dim, R ranks that share a micro-batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moecore import BalanceConfig, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.options.layer import CapacityConfig
from moecore.base.rank_checks import gather_objects
from moecore.moe.balance import BalanceGroups
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.moe.state import MoEState
from tests.helpers.ranks import run_ranks
from tests.moe import moe_cases as mc
from tests.moe.pair_table import Choice, config_of, covering_choices, name_of

FOLDINGS = {"ep4": (4, 1), "ep2-etp2": (2, 2)}
DISPATCHERS: dict[str, type] = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
SHAPES = ((2, 7), (1, 5), (2, 0), (3, 6))  # [B, T] of each rank
EQUAL_SHAPE = (2, 6)
PAD = CapacityConfig(factor=0.8, pad=True)


@cache
def placement(folding: str) -> tuple[Any, ExpertPlacement]:
    ep, etp = FOLDINGS[folding]
    meshes = build_meshes(ParallelConfig(ep=ep, etp=etp), "cpu")
    assert meshes.dispatch_group is not None
    return meshes, ExpertPlacement(group=meshes.dispatch_group, num_experts=8, ep=ep, etp=etp)


def shard(layer: MoELayer, folding: str, dispatcher: str) -> None:
    meshes, place = placement(folding)
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    layer.dispatcher = DISPATCHERS[dispatcher](place)


def tokens(B: int, T: int, seed: int) -> Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(seed))


def padding(B: int, T: int) -> Tensor:
    """Another number of real tokens in every sequence, and a hole."""
    mask_BT = torch.arange(T) >= T - 1 - torch.arange(B)[:, None]
    mask_BT[:, 1:2] = True
    return mask_BT


def summed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add each over ranks, all in one collective."""
    if not tensors:
        return {}
    flat = torch.cat([t.flatten() for t in tensors.values()])
    dist.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors.values()])
    return {n: part.view_as(t) for (n, t), part in zip(tensors.items(), parts, strict=True)}


def whole_gradients(layer: MoELayer) -> dict[str, Tensor]:
    """Dense gradients add up over ranks; an expert's holds all ranks' tokens already."""
    found, dense = {}, {}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None, "a rank without tokens still needs a gradient to reduce"
        if isinstance(grad, DTensor):
            found[name] = grad.full_tensor()
        else:
            dense[name] = grad
    return found | summed(dense)


def parameter_errors(layer, params, *, copies=1, floor=0.0) -> dict[str, float]:
    """Return the errors of gradients against the sum over ranks of each rank's oracle gradients.

    `copies` = ranks whose oracle computed the same tokens. `floor` = scale of the terms that cancel
    in the router's gradient.
    """
    found = whole_gradients(layer)
    own = {n: params[n] * 0 if params[n].grad is None else params[n].grad for n in found}
    return {
        name: mc.error(found[name], expected / copies, floor if name.startswith("router") else 0.0)
        for name, expected in summed(own).items()
    }


def worst(errors: dict[str, float]) -> float:
    """Over quantities and ranks; nan counts as infinite."""
    value = torch.tensor(max(e if e == e else float("inf") for e in errors.values()))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def run_choice(choice: Choice, training: bool) -> float:
    """Sharded experts against the oracle on each rank's own micro-batch."""
    config = config_of(choice)
    layer = mc.make_layer(config).train(training)
    layer.get_part("experts").set_backend(choice["backend"])
    params = mc.leaves(layer)
    shard(layer, choice["folding"], "alltoall")
    rank = dist.get_rank()
    B, T = EQUAL_SHAPE if choice["capacity"] == "pad" else SHAPES[rank]
    mask = padding(B, T) if choice["padding"] == "yes" else None
    x, x_ref = (tokens(B, T, seed=rank).requires_grad_() for _ in range(2))
    out = mc.oracle_of(config, x_ref, params, training=training, padding_mask_BT=mask, seed=rank)
    losses = sum(out.losses.values()) if training else 0.0
    factor = tokens(B, T, seed=9)
    ((out.y_BTD * factor).sum() + losses).backward()
    torch.manual_seed(rank)
    if choice["recompute"] == "no":
        y = layer(x, mask)
    else:
        reentrant = choice["recompute"] == "reentrant"
        y = checkpoint(layer, x, mask, use_reentrant=reentrant)
    (y * factor).sum().backward()
    errors = {"y": mc.error(y, out.y_BTD), "x": mc.error(x.grad, x_ref.grad)}
    floor = torch.tensor(0.0)
    if mc.has_constant_weights(config):
        # Terms of the size of x's gradient cancel; their rounding is all that may be left.
        floor = x_ref.grad.abs().max() if x_ref.numel() else floor  # type: ignore[union-attr]
        dist.all_reduce(floor, op=dist.ReduceOp.MAX)
    errors |= parameter_errors(layer, params, floor=float(floor))
    if training:
        counts = layer.tracker.counts
        errors["counts"] = float(not torch.equal(counts.choices_E, out.counts_E))
        errors["losses"] = mc.error(counts.losses, torch.stack(list(out.losses.values())))
    return worst(errors)


def runs_of(choices: list[Choice]) -> dict[str, tuple[Choice, bool]]:
    """Name -> choice and mode; eval where it sizes buffers in another way."""
    runs = {f"{i}:{name_of(choice)}": (choice, True) for i, choice in enumerate(choices)}
    padded = {n: choice for n, (choice, _) in runs.items() if choice["capacity"] == "pad"}
    return runs | {f"{n}|eval": (choice, False) for n, choice in padded.items()}


COUNTED = ("capacity-probability", "capacity-position", "capacity-pad", "capacity-ties")
SHARED = {
    **{name: mc.OPTIONS[name] for name in (*COUNTED, "sinkhorn", "sinkhorn-post", "latent-input")},
    **{name: mc.OPTIONS[name] for name in ("expert-choice", "expert-choice-small")},
    "expert-choice-pad": replace(mc.BASE, assignment="expert_choice", capacity=PAD),
    "sinkhorn-capacity": replace(mc.BASE, assignment="sinkhorn", capacity=PAD),
    **{name: mc.OPTIONS[name] for name in ("quantile", "quantile-micro-batch")},
    "sign": replace(mc.BASE, expert_bias=True, balance=BalanceConfig(bias_update_rate=0.1)),
}


def run_shared(config: MoEConfig, dispatcher: str, masked: bool, training: bool) -> float:
    """Ranks 0 and 1 share one micro-batch, ranks 2 and 3 another: slices of each sequence."""
    config = mc.with_losses(config)
    layer = mc.make_layer(config).train(training)
    params = mc.leaves(layer)
    shard(layer, "ep2-etp2", dispatcher)
    pair = pair_group()
    groups = BalanceGroups(micro_batch=pair, global_batch=pair)
    state = MoEState({"moe": layer}, groups)
    B, T = 3, 10
    data_rank, part = divmod(dist.get_rank(), 2)
    own = slice(part * T // 2, (part + 1) * T // 2)
    mask = padding(B, T) if masked else None
    x_ref = tokens(B, T, seed=data_rank).requires_grad_()
    x = x_ref.detach()[:, own].clone().requires_grad_()
    out = mc.oracle_of(config, x_ref, params, training=training, padding_mask_BT=mask)
    factor = tokens(B, T, seed=9)
    losses = sum(out.losses.values()) if training else 0.0
    ((out.y_BTD * factor).sum() + losses).backward()
    y = layer(x, None if mask is None else mask[:, own])
    (y * factor[:, own]).sum().backward()
    errors = {"y": mc.error(y, out.y_BTD[:, own]), "x": mc.error(x.grad, x_ref.grad[:, own])}
    floor = float(x_ref.grad.abs().max()) if mc.has_constant_weights(config) else 0.0
    errors |= parameter_errors(layer, params, copies=2, floor=floor)
    if training:
        metrics, kept_E = state.finish_step(), out.routing.kept_NE.sum(0)
        same = torch.equal(metrics.tokens_per_expert["moe"], out.counts_E)
        if "moe" in metrics.dropped_per_expert:
            same &= torch.equal(metrics.dropped_per_expert["moe"], out.counts_E - kept_E)
        errors["counts"] = float(not same)
        expected = torch.stack(list(out.losses.values()))
        errors["losses"] = mc.error(metrics.aux_losses["moe"], expected)
        if config.expert_bias:
            alone = mc.make_layer(config)
            alone(x_ref.detach(), mask).sum().backward()
            MoEState({"moe": alone}, BalanceGroups()).finish_step()
            errors["bias"] = mc.error(layer.router.expert_bias, alone.router.expert_bias)
    return worst(errors)


@cache
def pair_group() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def shared_errors() -> dict[str, float]:
    modes = {"whole": (False, True), "padded": (True, True), "eval": (True, False)}
    return {
        f"{name}/{mode}": run_shared(config, "alltoall", masked, training)
        for name, config in SHARED.items()
        for mode, (masked, training) in modes.items()
    }


class NoHostReads(TorchDispatchMode):
    """Refuses what would wait for a GPU: reading a value, or a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")):
            raise AssertionError(f"{name} reads on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """On a CPU `tolist`, `cpu` and `numpy` are no operations that a mode sees: patch them."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host reads a tensor")

    with ExitStack() as stack:
        for method in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            stack.enter_context(patch.object(Tensor, method, refuse))
        stack.enter_context(NoHostReads())
        yield


def static_shapes() -> dict[str, Any]:
    """Return case -> "" or what went wrong, and what unequal token counts raise."""
    found: dict[str, Any] = {}
    for name, dispatcher in DISPATCHERS.items():
        for folding in FOLDINGS:
            for training in (True, False):
                found[f"{name}/{folding}/{training}"] = _host_reads(name, folding, training)
        plain = mc.make_layer(replace(mc.BASE, capacity=replace(PAD, pad=False)))
        plain.dispatcher = dispatcher(placement("ep4")[1])
        found[f"{name}/guard"] = _failure(plain, tokens(1, 6, seed=dist.get_rank())[0])
        layer = mc.make_layer(replace(mc.BASE, capacity=PAD))
        shard(layer, "ep4", name)
        rank = dist.get_rank()
        steps = {
            "unequal at first": [4 + rank % 2],
            "equal": [4, 5, 0],
            "unequal and seen": [4 + rank % 2],
            "new to one rank": [6 if rank == 1 else 4],
        }
        for step, numbers in steps.items():
            found[f"{name}/{step}"] = _messages(layer, numbers)
    return found


def _messages(layer: MoELayer, numbers: list[int]) -> list[str]:
    """What each rank raises for these numbers of tokens, one forward after the other."""
    message = ""
    try:
        for number in numbers:
            layer(torch.zeros(number, 32))
    except (ValueError, RuntimeError) as caught:
        message = f"{type(caught).__name__}: {caught}"
    return gather_objects(message)


def _host_reads(dispatcher: str, folding: str, training: bool) -> str:
    """The second forward and its backward, of shapes that do not depend on the choice."""
    layer = mc.make_layer(replace(mc.BASE, capacity=PAD, balance=mc.ALL_LOSSES)).train(training)
    shard(layer, folding, dispatcher)
    rows = set()
    for seed in range(3):
        x = tokens(2, 6, seed=seed + 10 * dist.get_rank()).view(12, 32).requires_grad_()
        with no_host_reads() if seed else ExitStack():
            routing = layer.router(x)
            inp = layer.dispatcher.dispatch(x, routing)
            y = layer.dispatcher.combine(inp.rows.values * 2.0, inp.plan)
            (y.sum() + routing.weights_TK.sum()).backward()
        rows.add((inp.rows.values.shape[0], inp.index.row_ids_R.shape[0]))
    return "" if len(rows) == 1 else f"shapes depend on the choice: {rows}"


def _failure(layer: MoELayer, x: Tensor) -> str:
    """What the guard says about a dispatcher that does read on the host."""
    routing = layer.router(x)
    try:
        with no_host_reads():
            layer.dispatcher.dispatch(x, routing)
    except AssertionError as caught:
        return str(caught)
    return ""


def worker(rank: int, device: torch.device, choices: list[Choice]) -> dict[str, Any]:
    errors = {name: run_choice(*run) for name, run in runs_of(choices).items()}
    return {"choices": errors, "shared": shared_errors(), "static": static_shapes()}


@pytest.fixture(scope="module")
def choices(request: pytest.FixtureRequest) -> list[Choice]:
    """Every pair of options at night; by day every option, whose pairs one process has."""
    found, seen = [], set[tuple[str, str]]()
    for choice in covering_choices():
        if request.config.option.nightly or not seen.issuperset(choice.items()):
            found.append(choice)
            seen.update(choice.items())
    return found


@pytest.fixture(scope="module")
def results(choices: list[Choice]) -> dict[str, Any]:
    return run_ranks(4, worker, choices)


def test_every_pair_of_options_over_ranks(choices: list[Choice], results: dict[str, Any]) -> None:
    errors = results["choices"]
    assert errors.keys() == runs_of(choices).keys()
    assert not {k: e for k, e in errors.items() if not e <= 1e-5}


def test_a_shared_micro_batch_is_routed_as_one(results: dict[str, Any]) -> None:
    errors = results["shared"]
    assert len(errors) == 3 * len(SHARED) and not {k: e for k, e in errors.items() if not e <= 1e-5}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_padded_dispatch_reads_nothing_on_the_host(name, folding, training, results) -> None:
    assert results["static"][f"{name}/{folding}/{training}"] == ""
    assert "host" in results["static"][f"{name}/guard"], "the guard must see a read"


@pytest.mark.parametrize("name", DISPATCHERS)
def test_unequal_token_counts_are_refused_on_every_rank(name: str, results: dict[str, Any]) -> None:
    """Also those that a rank has met before, when all ranks brought them."""
    static = results["static"]
    for message in static[f"{name}/unequal at first"]:
        assert message.startswith("ValueError: number of tokens ([4, 5, 4, 5] by rank of the ")
        assert "CapacityConfig.pad (True)" in message
    assert static[f"{name}/equal"] == [""] * 4
    for step in ("unequal and seen", "new to one rank"):
        for message in static[f"{name}/{step}"]:
            assert message.startswith("RuntimeError: number of tokens must be equal on all ranks")
            assert "CapacityConfig.pad (True)" in message
