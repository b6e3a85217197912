"""One expert per rank: received rows are expert rows, so experts move no row, to the same bits.

Four ranks run each case twice, the second time without `ExpertPlacement.find_unsummed`. The kernels
of a GPU are recorded on meta tensors.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import CapacityConfig, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.options.precision import Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.experts import backward, expert_mlp, fp8_products, grouped_products
from moecore.kernels.experts.contract import UnsummedInput
from moecore.kernels.meta import record_launches_on_meta
from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.packed import pack_rows
from moecore.kernels.rows.record import Rows
from moecore.moe import backends
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.hierarchical import HierarchicalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.placement import ExpertPlacement, make_domain_placement
from moecore.moe.records import ExpertInput, Routing
from moecore.parallel.mesh import make_domain_groups
from moecore.planning import fake_world
from tests.helpers.ranks import ranks_fixture
from tests.moe.dispatchers import equal
from tests.moe.emulated_exchange import EmulatedExchangePool

pytestmark = pytest.mark.slow

WORLD = 4
CONFIG = MoEConfig(dim=128, hidden_dim=128, num_experts=WORLD, top_k=2)
PADDED = replace(CONFIG, capacity=CapacityConfig(factor=1.0, pad=True))
COUNTS, EVEN = (9, 0, 30, 4), (8,) * WORLD

# The fields of `run`, and how often experts move rows in a forward and its backward.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "all-to-all": ({}, 0),
    "one choice": (dict(config=replace(CONFIG, top_k=1, normalize_weights=False)), 0),
    "dropped": (dict(config=replace(CONFIG, capacity=CapacityConfig(factor=0.7))), 0),
    "nothing": (dict(counts=(0,) * WORLD), 0),
    "etp": (dict(etp=2, config=replace(CONFIG, num_experts=2, top_k=1)), 0),
    "domains": (dict(domain=2), 0),
    "domains, tokens as FP8": (dict(domain=2, fp8=True), 0),
    "tokens as FP8": (dict(fp8=True), 0),
    "FP8": (dict(recipe=Recipe(), fp8=True), 0),
    "sequential": (dict(backend="sequential"), 2),  # the reference gathers and sums by index
    "FC1 again": (dict(recompute_fc1=True), 0),
    "biases": (dict(config=replace(CONFIG, fc1_bias=True, fc2_bias=True)), 4),  # under autograd
    "stores outside of a step": (dict(has_stores=True), 0),  # all-to-all sends the tokens
    "padded": (dict(config=PADDED, counts=EVEN), 5),
    "two experts": (dict(config=replace(CONFIG, num_experts=2 * WORLD)), 5),
    "two experts, FP8": (dict(config=replace(CONFIG, num_experts=2 * WORLD), recipe=Recipe()), 6),
}


def run(
    *,
    config: MoEConfig = CONFIG,
    counts: tuple[int, ...] = COUNTS,
    etp: int = 1,
    domain: int = WORLD,
    fp8: bool = False,
    has_stores: bool = False,
    recipe: Recipe | None = None,
    backend: str = "torch",
    recompute_fc1: bool = False,
) -> list[Tensor]:
    """Return a layer's output and gradients; signs of zeros show as infinities."""
    meshes = build_meshes(ParallelConfig(ep=WORLD // etp, etp=etp), "cpu", ranks_per_domain=domain)
    assert meshes.dispatch_group is not None
    place = ExpertPlacement(
        group=meshes.dispatch_group, num_experts=config.num_experts, ep=WORLD // etp, etp=etp
    )
    torch.manual_seed(0)
    layer = MoELayer(config)
    experts = layer.get_part("experts")
    name: Any = "auto" if recipe is not None else backend
    experts.set_backend(name, recompute_fc1=recompute_fc1, recipe=recipe)
    experts.shard_parameters(meshes.expert["ep", "etp"])
    layer.dispatcher = AllToAllDispatcher(place, fp8=fp8)
    if has_stores:
        pool = EmulatedExchangePool(place.group, ep=WORLD, is_required=False)
        layer.dispatcher = NVLinkDispatcher(place, pool)
    if domain < WORLD:
        groups = make_domain_groups(meshes)
        inner = make_domain_placement(place, groups.inside, groups.across.size())
        inside = AllToAllDispatcher(inner, fp8=fp8)
        layer.dispatcher = HierarchicalDispatcher(place, inner, inside, groups.across, fp8=fp8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(counts[dist.get_rank()], config.dim, generator=generator).requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, config.dim).expand_as(y).contiguous())
    grads = [get_local_tensor(p.grad) for p in layer.parameters()]
    return [1 / value for value in (y.detach(), x.grad, *grads)]


MOVES: list[tuple[Any, str]] = [
    (expert_mlp, "sum_rows_without_autograd"),
    (backward, "sum_rows_without_autograd"),
    (grouped_products, "gather_rows_without_autograd"),
    (fp8_products, "gather_packed_rows"),
    (fp8_products, "gather_row_blocks"),
    (fp8_products, "tile_tokens"),
    *((backends, f"{verb}_rows{by}") for verb in ("gather", "sum") for by in ("", "_by_index")),
]
BY_IDS = ("gather_row_blocks", "tile_tokens")  # with row ids they move rows, else only scales


@contextmanager
def counted_moves() -> Iterator[Counter[str]]:
    """Within, count the calls of experts that move rows, by name."""
    moves: Counter[str] = Counter()

    def counted(name: str, move: Any) -> Any:
        def count(rows: Any, *where: Any) -> Any:
            moves[name] += name not in BY_IDS or where[0] is not None
            return move(rows, *where)

        return count

    with ExitStack() as patches:
        for module, name in MOVES:
            patches.enter_context(patch.object(module, name, counted(name, getattr(module, name))))
        yield moves


def worker(rank: int, device: torch.device) -> list[dict[str, tuple[bool, int]]]:
    found = {}
    for name, (fields, _) in CASES.items():
        with counted_moves() as moves:
            values = run(**fields)
        with patch.object(ExpertPlacement, "find_unsummed", lambda *_: None):
            found[name] = equal(values, run(**fields)), moves.total()
    return gather_objects(found)


results = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("name", CASES)
def test_experts_move_no_rows_and_no_bit_changes(name: str, results: Any) -> None:
    assert [found[name] for found in results] == [(True, CASES[name][1])] * WORLD


# Kernels that move rows; the second two have row ids as third argument, or None.
ROW_KERNELS = {
    "_gather_rows_fwd_kernel",
    "_sum_rows_fwd_kernel",
    "_gather_packed_rows_kernel",
    "_grouped_gemm_activation_fwd_kernel",  # gathers while it loads
}
ID_KERNELS = {"gather_row_blocks_kernel", "tile_tokens_kernel"}


def list_row_moves(num_experts: int, hidden_dim: int, recipe: Recipe | None, fp8: bool) -> set[str]:
    """Return the kernels that move rows in experts on meta, in a forward and its backward."""
    moves: set[str] = set()

    def record(name: str, args: Any) -> None:
        if name in ROW_KERNELS or (name in ID_KERNELS and args[2] is not None):
            moves.add(name)

    config = replace(CONFIG, hidden_dim=hidden_dim, num_experts=num_experts, dim=1024)
    with fake_world(WORLD):
        meshes = build_meshes(ParallelConfig(ep=WORLD), "cpu")
        assert meshes.dispatch_group is not None
        place = ExpertPlacement(
            group=meshes.dispatch_group, num_experts=num_experts, ep=WORLD, etp=1
        )
        experts = MoELayer(config, device="meta", dtype=torch.bfloat16).get_part("experts")
        experts.set_backend("triton", recipe=recipe)
        experts.shard_parameters(meshes.expert["ep", "etp"])
        with torch.device("meta"):
            x = torch.empty(4096, config.dim, dtype=torch.bfloat16).requires_grad_()
            weights, ids = torch.empty(4096, 2), torch.empty(4096, 2, dtype=torch.int32)
        routing = Routing(expert_ids_TK=ids, weights_TK=weights, chosen_ids_TK=ids)
        with record_launches_on_meta(lambda *_: None):
            inp = AllToAllDispatcher(place, fp8=fp8).dispatch(x, routing)
        assert (inp.index.row_ids_R is None) == (num_experts == WORLD)
        with record_launches_on_meta(record):
            y: Any = experts(inp)
            y = getattr(y, "y_RD", y)
            leaf = inp.rows.values if inp.rows.scales is None else inp.rows.grad_handle_SD
            torch.autograd.grad(y.sum(), [leaf, *experts.parameters()])
    return moves


@pytest.mark.parametrize("hidden_dim", [256, 768, 2048])
@pytest.mark.parametrize("recipe", [None, Recipe()], ids=["bf16", "FP8"])
@pytest.mark.parametrize("fp8", [False, True], ids=["rows", "FP8 rows"])
def test_kernels_read_received_rows_in_place(
    hidden_dim: int, recipe: Recipe | None, fp8: bool
) -> None:
    widens = {"_gather_packed_rows_kernel"} if fp8 and recipe is None else set()
    assert list_row_moves(WORLD, hidden_dim, recipe, fp8) == widens
    assert len(list_row_moves(2 * WORLD, hidden_dim, recipe, fp8)) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, Recipe()], ids=["bf16", "FP8"])
@pytest.mark.parametrize("fp8", [False, True], ids=["rows", "FP8 rows"])
def test_kernels_have_the_bits_of_gathered_rows(recipe: Recipe | None, fp8: bool) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, hidden_dim=768, num_experts=1, top_k=1, dim=1024)
    experts = MoELayer(config, device="cuda", dtype=torch.bfloat16).get_part("experts")
    experts.set_backend("triton", recipe=recipe)
    x, dy = torch.randn(2, 300, config.dim, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    ids, weights = torch.zeros(300, 1, dtype=torch.int32), torch.rand(300, 1)
    index = build_index(ids.cuda(), weights.cuda(), first_expert=0, num_local_experts=1)

    def run_experts(index: ExpertIndex) -> list[Tensor]:
        rows = Rows.from_bytes(pack_rows(x), config.dim, x.dtype, x) if fp8 else Rows(x)
        y = experts(ExpertInput(rows, index, None, UnsummedInput(x))).y_RD
        return [y.detach(), *torch.autograd.grad(y, [x, *experts.parameters()], dy)]

    assert equal(run_experts(index), run_experts(index._replace(row_ids_R=None)))
