"""Clones of hot experts over ranks: who sends what, what backward keeps, and in which order sums.

Gradients over whole compositions are in `tests/test_parity.py`, in FP8 in
`test_experts_fp8_ranks.py`. Six ranks are spawned once: three blocks of experts, two ranks each.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from moecore import (
    CloneOptions,
    ExpertLayout,
    LayerLayout,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    build_meshes,
)
from moecore.base.options.precision import Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import tree_leaves
from moecore.kernels.experts.contract import ExpertWeights
from moecore.kernels.experts.products import quantise_matrices
from moecore.moe.balance import BalanceGroups
from moecore.moe.clone_weights import concatenate_clones
from moecore.moe.clones import Cloner, Clones, PeriodicPlan, view_as_sendable_dtype
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.low_rank import LowRank
from moecore.moe.placement import ExpertPlacement
from moecore.moe.state import MoEState
from tests.helpers.ranks import ranks_fixture
from tests.moe.dispatchers import by_stores

EP, ETP, E, D = 3, 2, 6, 16
CONFIG = MoEConfig(dim=D, hidden_dim=D, num_experts=E, top_k=2, expert_bias=True)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model keeps its experts."""

    config: MoEConfig = CONFIG
    layout: ExpertLayout = field(default_factory=ExpertLayout)
    adapted: bool = False


PLAIN = Form()
FORMS = {
    "plain": PLAIN,
    "transposed, with biases": Form(
        config=replace(CONFIG, fc1_bias=True, fc2_bias=True),
        layout=ExpertLayout(transposed=True, gate_up="interleaved"),
    ),
    "transposed": Form(layout=ExpertLayout(transposed=True, gate_up="interleaved")),
    "gate and up apart": Form(layout=ExpertLayout(gate_up="separate")),
    "adapted": Form(adapted=True),
}
EXPERTS = [4, 3, -1, -1, 2, 0]  # of the example of `Clones.from_plan`
DISPATCHERS = {"alltoall": AllToAllDispatcher, "nvlink": partial(by_stores, max_tokens=64)}


def placed(num_clones: int) -> tuple[Any, ExpertPlacement]:
    meshes = build_meshes(ParallelConfig(ep=EP, etp=ETP), "cpu")
    assert meshes.dispatch_group is not None
    sizes = dict(num_experts=E, ep=EP, etp=ETP, num_clones=num_clones)
    return meshes, ExpertPlacement(group=meshes.dispatch_group, **sizes)


def of_blocks(found: Any) -> list[Any]:
    """Return what every block of experts has found."""
    meshes, _ = placed(0)
    return gather_objects(found, meshes.expert.get_group("ep"))


def travel() -> list[Any]:
    """Experts' numbers go out to their clones; clones' gradients are powers of ten by place."""
    meshes, place = placed(2)
    group = meshes.expert.get_group("ep")
    clones = Clones.from_plan(EXPERTS, place, group)
    block = dist.get_rank(group)
    own = torch.tensor([2.0 * block, 2.0 * block + 1])
    (there,) = clones.fetch_clone_weights([own])
    places = torch.tensor([10.0 ** (block * 2 + j) for j in range(clones.num_local_clones)])
    (home,) = clones.add_clone_grads_([torch.cat([own, places])])
    how = (clones.send_ids, clones.send_splits, clones.receive_splits, clones.order)
    return of_blocks((*how, there.tolist(), home.tolist()))


def are_bits_equal(dtype: torch.dtype) -> bool:
    """Return whether clones have their experts' bits, and gradients are added by place in fp32."""
    meshes, place = placed(2)
    group = meshes.expert.get_group("ep")
    experts, block = [4, 3, 0, 4, 2, 0], dist.get_rank(group)  # two have clones on two ranks
    clones = Clones.from_plan(experts, place, group)
    torch.manual_seed(dist.get_rank())
    weights, grads = torch.randn(2, 5).to(dtype), torch.randn(4, 7).to(dtype)
    everyone = of_blocks((weights, grads.clone()))
    (there,) = clones.fetch_clone_weights([weights])
    (home,) = clones.add_clone_grads_([grads])
    right = torch.cat([of_block for of_block, _ in everyone])[experts[2 * block : 2 * block + 2]]
    sums = list(everyone[block][1][:2].float())
    for n, expert in enumerate(experts):
        if expert // 2 == block:
            sums[expert % 2] = sums[expert % 2] + everyone[n // 2][1][2 + n % 2]
    return torch.equal(there, right) and torch.equal(home, torch.stack(sums).to(dtype))


def kept() -> bool:
    """Return whether backward keeps no copy of this rank's experts, and gives them the gradient."""
    meshes, place = placed(2)
    clones = Clones.from_plan(EXPERTS, place, meshes.expert.get_group("ep"))
    torch.manual_seed(dist.get_rank())
    w1, w2 = (torch.randn(2, D, D, requires_grad=True) for _ in range(2))
    with concatenate_clones(ExpertWeights(w1_eCD=w1, w2_eDF=w2), clones) as weights:
        y = weights.w1_eCD * weights.w2_eDF
        joined = StorageWeakRef(weights.w1_eCD.untyped_storage())
        of_w1 = weights.w2_eDF.detach().clone()
    del weights
    is_gone = joined.expired() == (clones.num_local_clones > 0)
    y.sum().backward()
    (expected,) = clones.add_clone_grads_([of_w1])
    return is_gone and w1.grad is not None and torch.equal(w1.grad, expected)


def skewed_layer(options, form=PLAIN, *, dispatch=AllToAllDispatcher) -> MoELayer:
    """Return a layer whose tokens nearly all choose expert 0."""
    meshes, place = placed(0 if options is None else options.per_rank)
    torch.manual_seed(0)
    layer = MoELayer(form.config, layout=LayerLayout(expert_layout=form.layout))
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    layer.router.expert_bias[0] = 2.0
    if form.adapted:
        a, b = (nn.Parameter(torch.randn(E, *shape)) for shape in ((4, D), (2 * D, 4)))
        layer.experts.add_low_rank_updates("w1", LowRank({"one": (a, b)}, {"one": 0.5}))
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    layer.dispatcher = dispatch(place)
    if options is not None:
        layer.cloner = Cloner(place, meshes.expert.get_group("ep"), options)
    return layer


def error_of(form: Form, *, dispatch: Any, refresh: Any = "forward") -> float:
    """Return the largest difference of outputs and gradients that clones make, over their size.

    In the first step, or, with a plan that stays, in the second.
    """
    found = []
    for options in (None, CloneOptions(per_rank=2, min_share=0.0, refresh=refresh)):
        layer = skewed_layer(options, form, dispatch=dispatch)
        torch.manual_seed(dist.get_rank())
        if refresh != "forward":
            layer(torch.randn(30, D)).sum().backward()
            state_of(layer).finish_step()
            layer.zero_grad()
        x = torch.randn(20, D, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        grads = [p.grad.to_local() for p in layer.experts.parameters()]
        found.append([y.detach(), x.grad, *grads])
        is_cloned = (
            layer.cloner is not None
            and sum(of_blocks(int(layer.cloner.get_counts(x.device)[0]))) > 0
        )
        assert is_cloned == (options is not None)
    scales = [max(float(plain.abs().max()), 1e-3) for plain in found[0]]
    return max(
        float((ours - plain).abs().max()) / scale
        for plain, ours, scale in zip(*found, scales, strict=True)
    )


def state_of(layer: MoELayer) -> MoEState:
    return MoEState({"layer": layer}, BalanceGroups(global_batch=dist.group.WORLD))


@dataclass(frozen=True, kw_only=True)
class Stays:
    """What became of a plan that stays for two steps, and whether forwards could go on.

    Attributes:
        plans: experts in the places, after what has happened.
        clones: clones of a rank, by step.
        same: whether an evaluation and a forward that backward repeats had the same bits.
    """

    plans: dict[str, list[int]]
    clones: list[float]
    same: bool


def staying(*, dispatch: Any) -> Stays:
    """Run steps whose tokens nearly all choose expert 0, and then expert 5."""
    layer = skewed_layer(CloneOptions(per_rank=1, min_share=0.01, refresh=2), dispatch=dispatch)
    state, plans, clones = state_of(layer), {}, []
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, D, requires_grad=True)

    def note(name: str) -> None:
        plans[name] = layer.cloner.plan.experts

    def step(name: str, skipped: Any = False) -> list[Tensor]:
        y = layer(x)
        grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        clones.append(state.finish_step(is_skipped=skipped).to_dict()["clones_per_rank"])
        note(name)
        return [y, *grads]

    step("skipped", skipped=True)
    step("planned")
    layer.router.expert_bias[0], layer.router.expert_bias[5] = 0.0, 2.0
    with torch.no_grad():
        evaluated = layer.eval()(x)
    layer.train()
    repeated = checkpoint(layer, x, use_reentrant=False)
    grads = torch.autograd.grad(repeated.sum(), [x, *layer.parameters()])
    layer.drop_step_state()
    note("dropped")
    again = step("kept")
    same = all(torch.equal(a, b) for a, b in zip(again, [repeated, *grads], strict=True))
    step("skipped on the device", skipped=torch.tensor(True))
    step("kept for two more")
    step("planned anew")
    layer.cloner.plan.clear()
    step("planned after a load")
    found = Stays(plans=plans, clones=clones, same=same and torch.equal(evaluated, again[0]))
    everyone = of_blocks(found)
    assert all(one.plans == found.plans and one.clones == found.clones for one in everyone)
    return replace(found, same=all(one.same for one in everyone))


def skewed(options: CloneOptions | None) -> list[float]:
    """Return rows that each block computes, most of experts 0 and 1, and clones per rank."""
    layer = skewed_layer(options)
    rows: list[int] = []
    compute = layer._run_experts
    layer._run_experts = lambda inp: (rows.append(int(inp.index.num_rows)), compute(inp))[1]
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, D)
    layer.eval()(x)  # with gradients
    assert layer.cloner is None or not layer.cloner.get_counts(x.device).any()
    rows.clear()
    y = layer.train()(x)
    y.sum().backward()
    metrics = state_of(layer).finish_step()
    numbers = metrics.to_dict(per_expert=False)
    assert (options is None) == ("clones_per_rank" not in numbers)
    return [*of_blocks(rows[0]), numbers.get("clones_per_rank", 0.0)]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"travel": travel()}
    found["kept"] = of_blocks(kept())
    dtypes = (torch.float32, torch.bfloat16)
    found["bits"] = [of_blocks(are_bits_equal(dtype)) for dtype in dtypes]
    found["plain"] = skewed(None)
    found["cloned"] = skewed(CloneOptions(per_rank=1, min_share=0.01))
    found["errors"] = {
        (name, dispatcher): error_of(form, dispatch=dispatch)
        for name, form in FORMS.items()
        for dispatcher, dispatch in DISPATCHERS.items()
    }
    for name, dispatch in DISPATCHERS.items():
        found["error of a plan that stays", name] = error_of(PLAIN, dispatch=dispatch, refresh=3)
        found["stays", name] = staying(dispatch=dispatch)
    return found


results = ranks_fixture(EP * ETP, worker)


def test_weights_go_to_their_places_and_gradients_home(results: dict[str, Any]) -> None:
    assert results["travel"] == [
        ((0,), (0, 0, 1), (0, 1, 1), (1, 0), [4.0, 3.0], [0 + 1e5, 1.0]),
        ((1, 0), (1, 0, 1), (0, 0, 0), (), [], [2 + 1e4, 3 + 1e1]),
        ((0,), (1, 0, 0), (1, 1, 0), (1, 0), [2.0, 0.0], [4 + 1e0, 5.0]),
    ]


def test_bits_are_those_of_sums_in_the_order_of_places(results: dict[str, Any]) -> None:
    assert results["bits"] == [[True] * EP] * 2


def test_backward_keeps_the_clones_alone(results: dict[str, Any]) -> None:
    assert results["kept"] == [True] * EP


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_any_form_have_clones(form, dispatcher, results) -> None:
    assert results["errors"][form, dispatcher] < 1e-5


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_plan_stays_for_steps_and_is_made_of_the_last_ones_loads(dispatcher, results) -> None:
    stays = results["stays", dispatcher]
    assert stays.same
    plans = stays.plans
    assert plans["skipped"] == [-1] * EP and 0 in plans["planned"] and 5 not in plans["planned"]
    for name in ("dropped", "kept", "skipped on the device", "kept for two more"):
        assert plans[name] == plans["planned"], name
    assert 5 in plans["planned anew"] and 0 not in plans["planned anew"]
    assert plans["planned after a load"] == plans["planned anew"]
    has_clones = [number > 0 for number in stays.clones]
    assert has_clones == [False, False, True, True, True, True, False]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_shares_of_a_plan_that_stays_change_no_gradient(dispatcher, results) -> None:
    assert results["error of a plan that stays", dispatcher] < 1e-5


def test_busy_ranks_give_tokens_away(results: dict[str, Any]) -> None:
    *plain, none = results["plain"]
    *cloned, per_rank = results["cloned"]
    assert none == 0 and per_rank * EP in (1, 2) and sum(plain) == sum(cloned)
    assert max(plain) > 1.4 * sum(plain) / EP and max(cloned) <= 1.01 * sum(plain) / EP + 1


def test_a_kept_plan_with_an_empty_place_divides_by_no_load_of_expert_0() -> None:
    """Two ranks of two experts have five tokens each, so both places stay empty."""
    loads_E, ids_TK = torch.tensor([0, 5, 5, 0]), torch.tensor([[1], [2], [0]])
    placement = ExpertPlacement(group=None, num_experts=4, ep=2, etp=1, num_clones=1)  # type: ignore[arg-type]
    plan = PeriodicPlan(placement, 1, min_share=0.0)
    plan.update_from_loads(loads_E, is_skipped=False)
    part = plan.divide_choices(ids_TK)
    assert part.experts_N.tolist() == plan.experts == [-1, -1]
    assert part.starts_N.tolist() == part.stops_N.tolist() == [0, 0]


class OneClone:
    """Clones of a rank that has one, with these tensors, in place of what ranks send."""

    num_local_clones = 1

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.fetched = tensors, list[Tensor]()

    def fetch_clone_weights(self, tensors: list[Tensor]) -> list[Tensor]:
        self.fetched = tensors
        return self.tensors


@pytest.mark.parametrize(
    ("scaling", "number", "K"),
    [
        ("blockwise", 6, 384),
        ("blockwise", 6, 128),  # one column of scales
        ("rowwise", 8, 384),
        ("mxfp8", 6, 384),
        ("nvfp4", 4, 384),
    ],
)
def test_what_rows_and_columns_share_is_fetched_once(scaling: Any, number: int, K: int) -> None:
    torch.manual_seed(0)
    own, others = (tuple(torch.randn(n, 256, K) for _ in range(2)) for n in (2, 1))
    quantise = partial(quantise_matrices, recipe=Recipe(scaling=scaling))
    sent: dict[int, Tensor] = {}
    for leaf in tree_leaves(tuple(map(quantise, others))):
        sent.setdefault(leaf.data_ptr(), leaf.contiguous())
    clones: Any = OneClone(list(sent.values()))
    w1, w2 = own
    weights = ExpertWeights(w1_eCD=w1, w2_eDF=w2, quantised=(quantise(w1), quantise(w2)))
    with concatenate_clones(weights, clones) as joined:
        found = tree_leaves(joined.quantised)
    whole = (quantise(torch.cat(pair)) for pair in zip(own, others, strict=True))
    for leaf, expected in zip(found, tree_leaves(tuple(whole)), strict=True):
        assert torch.equal(view_as_sendable_dtype(leaf), view_as_sendable_dtype(expected))
    assert len(clones.fetched) == number
