"""Tokens as FP8 over collectives: what they must equal, what travels, and what is refused.

Six CPU ranks are spawned once. The oracle rounds tokens by the reference before the same dispatcher
sends them as they are, or before one process computes them.

Legend: T tokens of a rank, D model dim, W bytes of a packed row.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore import (
    CapacityConfig,
    DispatchOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.rows.packed import count_packed_bytes
from moecore.moe.dispatch import alltoall
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.records import Dispatcher
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.helpers.te_definition import te_defined
from tests.moe.dispatchers import WORLD, E, by_stores, equal, far_stores, placed, two_levels
from tests.moe.rounded import RoundedDispatcher

pytestmark = pytest.mark.slow

D = 144  # two scales of a row, the second one of 16 columns
# ep, etp, and ranks of a domain where there are two levels
FOLDINGS = {
    "ep2-edp3": (2, 1, None),
    "ep3-etp2": (3, 2, None),
    "3 x 2": (6, 1, 2),
    "2 x 3, stores": (6, 1, 3),
    "3 x 2, etp": (3, 2, 2),
}
CONFIG = MoEConfig(dim=D, hidden_dim=64, num_experts=E, top_k=3)
PADDED = CapacityConfig(factor=1.0, pad=True)
CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "one choice": dict(config=replace(CONFIG, top_k=1, normalize_weights=False)),
    "a rank without tokens": dict(counts=(4, 0, 7, 3, 0, 1)),
    "dropped": dict(config=replace(CONFIG, capacity=CapacityConfig(factor=0.7))),
    "padded capacity": dict(config=replace(CONFIG, capacity=PADDED), counts=(8,) * WORLD),
    "padding": dict(is_masked=True),
    "latent": dict(config=replace(CONFIG, dim=200, latent_dim=D)),
    "weights on input": dict(
        config=replace(CONFIG, top_k=1, weights_on_input=True, normalize_weights=False)
    ),
    "biases": dict(config=replace(CONFIG, fc1_bias=True, fc2_bias=True)),
    "sequential": dict(backend="sequential"),
    "FC1 again": dict(recompute_fc1=True),
    "whole layer again": dict(is_checkpointed=True),
    "bf16": dict(dtype=torch.bfloat16),
    "rowwise": dict(
        config=replace(CONFIG, dim=256, hidden_dim=256), recipe=Recipe(scaling="rowwise")
    ),
    "blockwise": dict(config=replace(CONFIG, dim=256, hidden_dim=256), recipe=Recipe()),
    "blockwise, amax": dict(
        config=replace(CONFIG, dim=256, hidden_dim=256), recipe=Recipe(power_of_two=False)
    ),
}
WIDENED = {  # by products that quantise what came once more
    "mxfp8": dict(recipe=Recipe(scaling="mxfp8"), config=replace(CONFIG, dim=160)),
    # At random each place of a row would have a draw of its own.
    "nvfp4": dict(recipe=Recipe(scaling="nvfp4", stochastic_rounding=False)),
    "te": dict(recipe=Recipe(scaling="mxfp8", backend="te"), config=replace(CONFIG, dim=160)),
}


GRID = [(folding, name) for folding in FOLDINGS for name in CASES]
GRID += [("ep3-etp2", name) for name in WIDENED]
# A case meets one level and two, etp and none, in one of these pairs. One level meets stores, too;
# of two levels, cases do that change which rows travel, or their width.


def dispatcher_of(folding: str, fp8: bool) -> Dispatcher:
    ep, etp, domain = FOLDINGS[folding]
    if domain is None:
        return AllToAllDispatcher(placed(ep, etp)[1], fp8=fp8)
    inside = far_stores if folding.endswith("stores") else AllToAllDispatcher
    return two_levels(ep, etp, ranks_per_domain=domain, inside=inside, fp8=fp8)


@cache
def layer_of(config: MoEConfig, dtype: torch.dtype) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(config, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def gradients(
    folding: str,
    dispatcher: Any,
    *,
    is_sharded: bool = True,
    evaluates: bool = False,
    config: MoEConfig = CONFIG,
    counts: tuple[int, ...] = (9, 5, 12, 3, 7, 10),
    is_masked: bool = False,
    is_checkpointed: bool = False,
    backend: Any = "torch",
    recompute_fc1: bool = False,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return a layer's output, and the gradients of tokens and parameters."""
    layer = copy.deepcopy(layer_of(config, dtype))
    experts = layer.get_part("experts")
    backend = "auto" if recipe is not None else backend
    experts.set_backend(backend, recompute_fc1=recompute_fc1, recipe=recipe)
    if is_sharded:
        experts.shard_parameters(placed(*FOLDINGS[folding][:2])[0].expert["ep", "etp"])
    layer.dispatcher = dispatcher
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(counts[rank], config.dim, generator=generator).to(dtype)
    x[::3] *= 100
    x.requires_grad_()
    mask = torch.arange(counts[rank]) % 4 == 1 if is_masked else None
    args = (x, mask)
    y = checkpoint(layer, *args, use_reentrant=False) if is_checkpointed else layer(*args)
    if evaluates:
        with torch.no_grad():
            assert torch.equal(y, layer(*args))
    y.backward(torch.cos(torch.arange(y.numel())).view_as(y).to(dtype))
    return [y.detach(), x.grad, *(get_local_tensor(p.grad) for p in layer.parameters())]  # type: ignore[list-item]


@cache
def alone(name: str) -> list[Tensor]:
    """Return `gradients` of one process: a rank's own tokens, all experts."""
    dispatcher = RoundedDispatcher(LocalDispatcher(E))
    return gradients("", dispatcher, is_sharded=False, **(CASES | WIDENED)[name])


def compared(folding: str, name: str) -> dict[str, Any]:
    """What a layer's bits are equal to, and how far y and the gradient of x are from one rank's."""
    case = (CASES | WIDENED)[name]
    ours = gradients(folding, dispatcher_of(folding, True), evaluates=True, **case)
    plain = dispatcher_of(folding, False)
    others: dict[str, Any] = {"rounded": RoundedDispatcher(plain)}
    if name in ("uneven", "blockwise"):
        others["as it is"] = plain
    if FOLDINGS[folding][2] is None:
        others["nvlink"] = by_stores(placed(*FOLDINGS[folding][:2])[1], fp8=True)
    errors = [
        float((a - b).norm() / b.norm()) if a.numel() else 0.0
        for a, b in zip(ours[:2], alone(name)[:2], strict=True)
    ]
    return {
        "error": max(errors),
        **{name: equal(ours, gradients(folding, other, **case)) for name, other in others.items()},
    }


@contextmanager
def sent_bytes() -> Iterator[list[tuple[dist.ProcessGroup, str, int, int]]]:
    """List group, dtype, rows and bytes of what this rank sends in uneven splits."""
    found: list[tuple[dist.ProcessGroup, str, int, int]] = []
    original = dist.all_to_all_single

    def counting(out: Tensor, x: Tensor, *args: Any, **how: Any) -> Any:
        if how.get("input_split_sizes"):
            found.append((how["group"], str(x.dtype), x.shape[0], x.nbytes))
        return original(out, x, *args, **how)

    with patch.object(alltoall.dist, "all_to_all_single", counting):
        yield found


def blockwise(folding: str, fp8: bool) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(replace(CONFIG, dim=256, hidden_dim=256), dtype=torch.bfloat16)
    layer.dispatcher = dispatcher_of(folding, fp8)
    layer.get_part("experts").set_backend("auto", recipe=Recipe())
    mesh = placed(*FOLDINGS[folding][:2])[0].expert["ep", "etp"]
    layer.get_part("experts").shard_parameters(mesh)
    return layer


def traffic(folding: str, fp8: bool) -> dict[str, Any]:
    """What crosses the network in a layer's forward and backward, of tokens in bf16."""
    layer = blockwise(folding, fp8)
    x = torch.randn(10, 256, dtype=torch.bfloat16).requires_grad_()
    with sent_bytes() as sent:
        y, forward = layer(x), len(sent)
        y.sum().backward()
    outer = sent[0][0]
    ep, domain = FOLDINGS[folding][0], FOLDINGS[folding][2]
    needed = layer.router(x).expert_ids_TK // (E // (outer.size() if domain else ep))
    rows = sum(len(set(row)) for row in needed.tolist())  # each token once per rank or domain
    return {
        "rows": next(n for group, *_, n, _ in sent if group is outer) == rows,
        "forward": [(dtype, size // n) for _, dtype, n, size in sent[:forward] if n],
        "backward": [(dtype, size // n) for _, dtype, n, size in sent[forward:] if n],
    }


def hooked(folding: str) -> str:
    """The error where a hook changes the gradient of experts whose gradients came as FP8."""
    layer = blockwise(folding, True)
    layer.get_part("experts").register_forward_hook(lambda _, __, y: y * 2)
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    return error_of(lambda: layer(x).sum().backward())


def refusals() -> dict[str, str]:
    """What is raised, by what is asked for, on this rank; nothing is sent before."""

    def call(dim: int = D, fp8: bool = True, name: Any = "auto") -> Callable[[], Any]:
        meshes = build_meshes(ParallelConfig(ep=3), "cpu")
        layer = MoELayer(MoEConfig(dim=dim, hidden_dim=64, num_experts=E, top_k=2))
        model = nn.Sequential(layer)
        return lambda: parallelize_moe(model, meshes, dispatch=DispatchOptions(name=name, fp8=fp8))

    def dispatch(folding: str) -> Callable[[], Any]:
        layer = MoELayer(MoEConfig(dim=24, hidden_dim=64, num_experts=E, top_k=2))
        layer.dispatcher = dispatcher_of(folding, True)
        return lambda: layer(torch.randn(4, 24))

    calls = {
        "columns": call(dim=24),
        "allgather": call(name="allgather"),
        "differs": call(fp8=dist.get_rank() != 4, name="alltoall"),
        "columns over alltoall": dispatch("ep2-edp3"),
        "columns over two levels": dispatch("3 x 2"),
    }
    return {name: error_of(one) for name, one in calls.items()}


def worker(rank: int, device: torch.device, cases: list[tuple[str, str]]) -> dict[str, Any]:
    with te_defined():
        found: dict[str, Any] = {f"{one}/{name}": compared(one, name) for one, name in cases}
    for folding in ("ep2-edp3", "3 x 2"):
        found[f"traffic/{folding}"] = traffic(folding, True), traffic(folding, False)
        found[f"hooked/{folding}"] = hooked(folding)
    found["refused"] = refusals()
    return {"everyone": gather_objects(found)}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = asked_for(request, "folding", "name")
    return run_ranks(WORLD, worker, cases)["everyone"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("folding", "name"), GRID)
def test_has_the_bits_of_tokens_that_were_rounded(folding, name, results) -> None:
    found = [one[f"{folding}/{name}"] for one in results]
    bits = {key for key in found[0] if key != "error" and all(one[key] for one in found)}
    expected = {"rounded", *(["nvlink"] if folding in ("ep2-edp3", "ep3-etp2") else [])}
    if name == "blockwise":  # it rounds with the same scales
        expected.add("as it is")
    if name == "blockwise, amax":  # rows are multiplied as they came, not rounded again
        expected.remove("rounded")
    assert bits == expected
    worst = max(one["error"] for one in found)
    assert worst < {"bf16": 2**-8, "blockwise, amax": 1.0}.get(name, 1e-5)


@pytest.mark.parametrize("folding", ["ep2-edp3", "3 x 2"])
def test_half_the_bytes_travel(folding: str, results: list[dict[str, Any]]) -> None:
    """Rows of tokens and their ids, and sums; then gradients of sums, of rows and of weights."""
    W, wide, ids, legs = count_packed_bytes(256), ("torch.bfloat16", 512), ("torch.int32", 24), 1
    legs = 1 if folding == "ep2-edp3" else 2
    assert W == 256 + 2 * 4 + 8  # values, scales, up to a multiple of 16
    fp8, weights = ("torch.uint8", W), ("torch.float32", 12)
    for one in results:
        for is_fp8, found in zip((True, False), one[f"traffic/{folding}"], strict=True):
            row = fp8 if is_fp8 else wide
            assert found["rows"], "once per rank, or per domain"
            assert found["forward"] == [row, ids] * legs + [wide] * legs
            assert found["backward"] == [row] * legs + [wide, weights] * legs


@pytest.mark.parametrize("folding", ["ep2-edp3", "3 x 2"])
def test_a_gradient_that_a_hook_changes_is_an_error(folding, results) -> None:
    for one in results:
        assert (
            "must not change between combine and the experts with DispatchOptions.fp8"
            in one[f"hooked/{folding}"]
        )


def test_what_cannot_travel_is_one_line_on_every_rank(results: list[dict[str, Any]]) -> None:
    columns = (
        "dim of the experts' rows (24) must be a multiple of 16 with DispatchOptions.fp8 (True): "
        "pad it, or let rows travel as they are"
    )
    for one in results:
        found = dict(one["refused"])
        for name in ("columns", "columns over alltoall", "columns over two levels"):
            assert found.pop(name) == columns
        assert found.pop("allgather") == (
            "DispatchOptions.fp8 (True) must go with name ('allgather') = 'alltoall', 'nvlink', "
            "'hierarchical' or 'auto': drop it"
        )
        assert found.pop("differs").startswith("DispatchOptions.fp8 (") and not found
