"""Experts in FP8 over ranks: the bits of one process, however they are cut, where scales allow it.

A scale of X, dY, A or dH belongs to 128 columns of one row, and a scale of a weight to 128 x 128
of one expert: no folding cuts these, since hidden_dim / etp is a multiple of 128. So every expert
row has the same bits on every folding. What may differ:

    sums over etp      parts of a row's output are added in another order
    weight gradients   128 rows of an expert, in the order in which a rank gets them, share the
                       largest of their scales: ranks that see other rows of it (edp > 1) make other
                       tiles. With powers of two that moves no value but what underflows.

Six ranks, so that no two dims of the expert mesh that exceed 1 have one size.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    CloneOptions,
    DispatchOptions,
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
)
from moecore import parallelize_moe as parallelize
from moecore.base.options.precision import Precision, Recipe
from moecore.base.rank_checks import gather_objects
from moecore.kernels.experts.contract import OPERANDS
from moecore.models import Decoder, DecoderConfig
from moecore.moe.experts import Experts
from moecore.precision.amax import advance_amax
from moecore.train import AdamW
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.moe.dispatchers import by_stores
from tests.moe.emulated_exchange import EmulatedExchange
from tests.moe.test_experts_fp8 import counted_quantisations
from tests.parallel.fsdp.units import is_unit

WORLD = 6
CONFIG = MoEConfig(dim=128, hidden_dim=256, num_experts=6, top_k=2)
FOLDINGS = {
    "ep6": dict(ep=6),
    "ep3-edp2": dict(ep=3),
    "ep3-etp2": dict(ep=3, etp=2),
    "edp6": dict(),
}
CASES = [("ep6", "alltoall"), ("ep3-edp2", "allgather"), ("ep3-etp2", "nvlink")]
CASES += [("edp6", "local"), ("ep6", "nvlink-fp8"), ("ep6", "alltoall-fp8")]
CASES += [("ep3-edp2", "alltoall-fp8"), ("ep3-etp2", "alltoall-fp8"), ("ep6", "hierarchical-fp8")]
# Which rank computes a row moves no bit of it, but a token's rows are added by rank.
CLONED = [
    ("ep6", "alltoall"),
    ("ep6", "alltoall-fp8"),
    ("ep3-etp2", "allgather"),
    ("ep3-edp2", "nvlink"),
]
CLONES = CloneOptions(per_rank=1, min_share=0.0)
ALL = Precision(recipe=Recipe())
KEPT, FREED = FSDPOptions(dense_strategy="optim"), FSDPOptions()


def batch(rank: int) -> Tensor:
    """More than 128 rows of an expert over all ranks, and another number on each."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(60 + 4 * rank, 128, generator=generator)


def make_layer() -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG)
    layer.get_part("experts").set_backend("auto", recipe=Recipe())
    return layer


def gradient_of(y: Tensor) -> Tensor:
    return torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)


def run_whole(layer: MoELayer, xs: list[Tensor]) -> dict[str, Tensor]:
    """Return the output, input gradient and gradients of one process on tokens of ranks."""
    x = torch.cat(xs).requires_grad_()
    y = layer(x)
    y.backward(torch.cat([gradient_of(part) for part in y.detach().split([len(x) for x in xs])]))
    grads = {n: p.grad for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


@cache
def one_process(ranks: tuple[int, ...]) -> dict[str, Tensor]:
    return run_whole(make_layer(), [batch(rank) for rank in ranks])


def largest(errors: dict[str, float]) -> dict[str, float]:
    """Return the largest error of all ranks, by quantity."""
    everyone = gather_objects(errors)
    return {name: max(one[name] for one in everyone) for name in errors}


def sharded(folding: str, dispatcher: str, clones: CloneOptions | None = None) -> Any:
    model = nn.Sequential(make_layer())
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu", ranks_per_domain=2)
    name, is_fp8 = dispatcher.removesuffix("-fp8"), dispatcher.endswith("-fp8")
    name = "alltoall" if name == "nvlink" else name
    dispatch = DispatchOptions(name=name, fp8=is_fp8, clones=clones)  # type: ignore[arg-type]
    parallelize(model, meshes, precision="blockwise", loss="sum", dispatch=dispatch)
    if dispatcher.startswith("nvlink"):
        place = model[0].dispatcher.placement
        # Rows are added while they travel; they travel as FP8, and once more in backward.
        model[0].dispatcher = by_stores(place, fp8=is_fp8, max_tokens=80, keep_rows=not is_fp8)
    return model


def on_ranks(folding, dispatcher, rank, clones=None) -> dict[str, Tensor]:
    model = sharded(folding, dispatcher, clones)
    x = batch(rank).requires_grad_()
    y = model(x)
    y.backward(gradient_of(y))
    grads = {n.removeprefix("0."): p.grad.full_tensor() for n, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def compared(folding, dispatcher, rank, clones=None) -> dict[str, tuple[bool, float]]:
    """Quantity -> whether its bits are those of one process on every rank, and the worst error."""
    found = on_ranks(folding, dispatcher, rank, clones)
    alone, together = one_process((rank,)), one_process(tuple(range(WORLD)))
    errors = {}
    for name, ours in found.items():
        theirs = (alone if name in ("y", "x") else together)[name]
        errors[f"bits {name}"] = float(not torch.equal(ours, theirs))
        errors[name] = float((ours - theirs).norm() / theirs.norm())
    errors = largest(errors)
    return {name: (not errors[f"bits {name}"], errors[name]) for name in found}


DELAYED = Recipe(scaling="tensorwise", grad_format="e5m2", amax_history=1, power_of_two=False)
DELAYED_STEPS = 3  # scales of the second step are those of the first, which are each rank's own


def delayed_batch(rank: int) -> Tensor:
    """Tokens whose largest magnitude is another one on every rank."""
    return batch(rank) * (1 + rank)


def delayed_results(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the output and gradients of one forward, and magnitudes of the step before."""
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    (experts,) = (m for m in model.modules() if isinstance(m, Experts))
    grads = {n.removeprefix("0."): p.grad for n, p in model.named_parameters()}
    past = {f"past {name}": steps for name, steps in experts.history.recorded_amax.items()}
    return {"y": y.detach(), "x": x.grad, **grads, **past}  # type: ignore[dict-item]


@cache
def delayed_in_one_process() -> list[dict[str, Tensor]]:
    """Return the results of the last step, by rank: gradients of weights are of all tokens."""
    xs = [delayed_batch(rank) for rank in range(WORLD)]
    layer = make_layer()
    layer.get_part("experts").set_backend("auto", recipe=DELAYED)
    lengths = [len(x) for x in xs]
    for _ in range(DELAYED_STEPS):
        layer.zero_grad()
        dy = torch.cat([gradient_of(x) for x in xs])
        found = delayed_results(layer, torch.cat(xs), dy)
        advance_amax(layer)
    parts = {name: found.pop(name).split(lengths) for name in ("y", "x")}
    return [found | {name: part[i] for name, part in parts.items()} for i in range(WORLD)]


def delayed(rank: int) -> dict[str, float]:
    """Return the worst relative error of any rank, by quantity, of experts with a history."""
    model = nn.Sequential(make_layer())
    meshes = build_meshes(ParallelConfig(**FOLDINGS["ep3-edp2"]), "cpu")
    precision = Precision(recipe=DELAYED, roles=("experts",))
    parallelize(model, meshes, precision=precision, loss="sum")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for i in range(DELAYED_STEPS):
        with step.micro_batch():
            x = delayed_batch(rank)
            found = delayed_results(model, x, gradient_of(x))
        if i < DELAYED_STEPS - 1:
            step.finish()
    expected, errors = delayed_in_one_process()[rank], {}
    for name, ours in found.items():
        ours, theirs = ours.full_tensor() if isinstance(ours, DTensor) else ours, expected[name]
        errors[name] = float((ours - theirs).norm() / theirs.norm())
    return largest(errors)


def travelled(recipe: Recipe | None, rank: int) -> tuple[list[str], str]:
    """Dtypes of what a backward spreads, and the error where a hook changes gradients."""
    model = sharded("ep6", "nvlink-fp8")
    experts = model[0].get_part("experts")
    experts.set_backend("auto", recipe=recipe)
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        spread = EmulatedExchange.dispatch_rows

        def recorded(exchange: EmulatedExchange, x_TD: Tensor, *args: Any) -> Tensor:
            sent.append(str(x_TD.dtype))
            return spread(exchange, x_TD, *args)

        patched.setattr(EmulatedExchange, "dispatch_rows", recorded)
        model(batch(rank)).sum().backward()

    def doubles(_: nn.Module, args: Any, y: Any) -> None:
        y.y_RD.register_hook(lambda grad: grad * 2)

    experts.register_forward_hook(doubles)
    return sent, error_of(lambda: model(batch(rank)).sum().backward())


def quantisations(fsdp: FSDPOptions, rank: int) -> dict[str, Any]:
    """Who quantised how often in each of two steps of gathered experts, and stale outputs."""
    with counted_quantisations(pytest.MonkeyPatch()) as calls:
        model = nn.Sequential(make_layer())
        meshes = build_meshes(ParallelConfig(ep=2), "cpu")
        parallelize(model, meshes, precision="blockwise", fsdp=fsdp)
        step = TrainStep(model, AdamW(model.parameters(), lr=0.1), num_micro_batches=2)
        counts, stale = [], 0
        for _ in range(2):
            calls.clear()
            for _ in range(2):
                with step.micro_batch():
                    x = batch(rank).requires_grad_()
                    y = model(x)
                    y.sum().backward()
            counts.append(sorted(calls))
            state = {n: p.full_tensor() for n, p in model[0].state_dict().items()}
            plain = make_layer()
            plain.load_state_dict(state)
            stale += not torch.equal(plain(x), y)
            step.finish()
    assert is_unit(model, model[0].experts) and isinstance(model[0].experts.w1, DTensor)
    return {"counts": counts, "stale": stale}


def make_decoder(moe: MoEConfig, vocab_size: int = 61) -> Decoder:
    """Return a decoder of a dense block and one of MoE."""
    torch.manual_seed(0)
    sizes: Any = dict(vocab_size=vocab_size, dim=128, num_layers=2, num_heads=4, num_kv_heads=2)
    sizes |= dict(head_dim=32, mlp_hidden_dim=96, dense_layers=(0,), max_seq_len=32)
    return Decoder(DecoderConfig(**sizes, moe=moe))


def training(folding: str, rank: int) -> list[float]:
    """Return the losses, over all ranks, of a decoder whose roles are all in FP8."""
    model = make_decoder(replace(CONFIG, shared_hidden_dim=64))
    parallelize(model, build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu"), precision=ALL)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=2)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 61, (2, 2, 17), generator=generator)
    losses = []
    for _ in range(3):
        total = torch.zeros(())
        for batch_BT in tokens:
            with step.micro_batch():
                loss = model(batch_BT[:, :-1], batch_BT[:, 1:]) / 2
                loss.backward()
            total += loss.detach()
        step.finish()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    return losses


def worker(rank: int, device: torch.device, cases: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"-".join(case): compared(*case, rank) for case in cases}
    found["cloned"] = {"-".join(case): compared(*case, rank, CLONES) for case in CLONED}
    found["delayed"] = delayed(rank)
    found["travelled"] = [travelled(r, rank) for r in (Recipe(), Recipe(power_of_two=False), None)]
    found["kept"], found["freed"] = (quantisations(fsdp, rank) for fsdp in (KEPT, FREED))
    found["training"] = {name: training(name, rank) for name in ("ep6", "edp6", "ep3-etp2")}
    return found


results = ranks_fixture(WORLD, worker, "case")


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_equals_one_process(case: tuple[str, str], results: dict[str, Any]) -> None:
    found, folding = results["-".join(case)], case[0]
    bits = {name for name, (is_equal, _) in found.items() if is_equal}
    if folding == "ep3-etp2":
        assert max(found[name][1] for name in ("y", "x")) < 1e-6
    else:
        assert {"y", "x"} <= bits
    weights = ("experts.w1", "experts.w2")
    # A rank sees every row of its experts, in the order of ranks unless they came over two levels.
    if folding == "ep6" and case[1] != "hierarchical-fp8":
        assert set(weights) <= bits
    assert max(found[name][1] for name in weights) < 1e-5 and found["router.weight"][1] < 1e-5


def test_delayed_scales_are_those_of_one_process(results: dict[str, Any]) -> None:
    """Over dims of 3 and 2. Scales of 2 of the 6 ranks alone would be off by 0.7% and more."""
    errors = results["delayed"]
    assert {f"past {name}" for name in OPERANDS} < errors.keys()
    assert max(errors.values()) < 1e-6, errors
    assert max(error for name, error in errors.items() if name.startswith("past")) == 0.0


def test_gradients_of_outputs_travel_as_fp8_where_experts_quantise_them_alike(results) -> None:
    alike, *others = results["travelled"]
    again = "torch.uint8"  # the tokens, whose rows are not kept
    assert alike[0] == ["torch.uint8", again] and "must not change between combine" in alike[1]
    for sent, error in others:
        assert sent == ["torch.float32", again] and error == "no error"


@pytest.mark.parametrize("cloned", CLONED, ids="-".join)
def test_clones_of_hot_experts_change_no_row(cloned, results) -> None:
    errors = {name: error for name, (_, error) in results["cloned"]["-".join(cloned)].items()}
    assert max(errors.pop(name) for name in ("y", "x")) < 1e-6 and max(errors.values()) < 1e-5


def test_gathered_experts_are_quantised_once_per_step_unless_they_are_freed(results) -> None:
    assert results["kept"] == {"counts": [["kept"] * 2] * 2, "stale": 0}
    assert results["freed"] == {"counts": [["again"] * 8] * 2, "stale": 0}


def test_a_model_trains_alike_on_every_folding(results: dict[str, Any]) -> None:
    losses = results["training"]
    first = losses.pop("ep6")
    assert first[-1] < first[0] - 0.5
    for others in losses.values():
        # A sum in another order moves a value over a tie of FP8 here and there.
        assert others == pytest.approx(first, rel=1e-3)
