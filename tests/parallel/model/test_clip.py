"""clip_grad_norm_ over two meshes: a bad gradient on one rank stops every rank, by name.

That the norm equals one process's on every folding is part of tests/test_parity.py.
"""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, TrainStep, build_meshes, clip_grad_norm_
from moecore import parallelize_moe as parallelize
from moecore.base.rank_checks import gather_objects
from moecore.parallel.model.clip import GradientNorm, clip_and_step
from moecore.parallel.model.parallel_state import get_moe_state
from tests.helpers.errors import error_of
from tests.helpers.grids import grid
from tests.helpers.ranks import ranks_fixture

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
BAD = {"1.experts.w2": 3, "1.router.weight": 0, "0.bias": 2}  # parameter -> the rank that breaks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), MoELayer(CONFIG))


def loss_of(model: nn.Module) -> Tensor:
    """Large enough that its gradient, of norm 2.6, is clipped."""
    return 1e6 * model(torch.linspace(-1, 1, 96).view(6, 16)).square().sum()


def step_with_bad_gradient(name, bad_rank, value, *, fused) -> dict[str, Any]:
    model = parallelize(make_model(), build_meshes(ParallelConfig(ep=2), "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    step = TrainStep(model, optimizer, max_norm=1.0)

    def backward() -> None:
        with step.micro_batch():
            model(torch.randn(6, 16)).square().mean().backward()

    backward()
    step.finish()  # so that AdamW has state that a bad step could damage
    before = [p.to_local().clone() for p in model.parameters()]
    moments = [s["exp_avg"].to_local().clone() for s in optimizer.state.values()]
    backward()
    if dist.get_rank() == bad_rank:
        model.get_parameter(name).grad.to_local().view(-1)[0] = value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = step.finish().norm
    after = [p.to_local().clone() for p in model.parameters()]
    kept = [s["exp_avg"].to_local().clone() for s in optimizer.state.values()]
    backward()
    step.finish()
    return {
        "names": norm.non_finite,
        "warned": any(name in str(w.message) for w in caught),
        "unchanged": all(map(torch.equal, before, after)) and all(map(torch.equal, moments, kept)),
        "total": norm.total,
        "skipped": norm.skipped.item(),
        "goes on": not any(map(torch.equal, after, [p.to_local() for p in model.parameters()])),
    }


def refusal(model: nn.Module) -> str:
    return error_of(lambda: parallelize(model, build_meshes(ParallelConfig(ep=2), "cpu")))


def refusals() -> dict[str, str]:
    """Models that are not the same on rank 1."""
    weights, buffers, meta = make_model(), make_model(), make_model()
    if dist.get_rank() == 1:
        with torch.no_grad():
            weights[1].experts.w1[0, 0, 0, 0] += 1e-7
        meta = meta.to("meta")
    buffers.register_buffer("table", torch.full((2,), float(dist.get_rank() == 1)))
    return {"weights": refusal(weights), "buffers": refusal(buffers), "meta": refusal(meta)}


def collectives_of_a_step() -> list[str]:
    """What clipping and the balance record send in one step of two MoE layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(MoELayer(CONFIG), MoELayer(CONFIG))
    model = parallelize(layers, build_meshes(ParallelConfig(ep=2), "cpu"))
    model(torch.randn(6, 16)).square().mean().backward()
    calls, original = [], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls.append("all_reduce")
        return original(*args, **options)

    dist.all_reduce = counted
    try:
        clip_grad_norm_(model, 1.0)
        calls.append("clipped")
        get_moe_state(model).finish_step()
    finally:
        dist.all_reduce = original
    return calls


def norm_when_one_rank_lacks_gradients() -> float:
    model = parallelize(make_model(), build_meshes(ParallelConfig(ep=2), "cpu"))
    model(torch.randn(6, 16)).square().mean().backward()
    if dist.get_rank() == 2:
        model.zero_grad()
        model[0].bias.grad = None
    return clip_grad_norm_(model, 1.0).total


def worker(rank: int, device: torch.device, cases: list[tuple[str, float, bool]]) -> list[Any]:
    mine: dict[str, Any] = refusals() | {"lacking": norm_when_one_rank_lacks_gradients()}
    mine["collectives"] = collectives_of_a_step()
    for name, value, fused in cases:
        found = step_with_bad_gradient(name, BAD[name], value, fused=fused)
        mine[f"{name}/{value}/{fused}"] = found
    return gather_objects(mine)


ranks = ranks_fixture(4, worker, "name", "value", "fused")


@grid(name=BAD, value=[math.nan, math.inf], fused=[False, True])
def test_every_rank_skips_and_names_the_parameter(name, value, fused, ranks) -> None:
    for found in (r[f"{name}/{value}/{fused}"] for r in ranks):
        assert found["names"] == (name,)
        assert found["unchanged"] and found["skipped"] and found["goes on"]
        assert found["warned"] is not fused, "on the device nobody knows in time to warn"
        assert not math.isfinite(found["total"])


def test_weights_that_differ_between_ranks_are_refused_everywhere(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "weights of 1.experts.w1" in rank["weights"]
        assert "weights of table" in rank["buffers"] and "is_meta of" in rank["meta"]


def test_a_rank_without_gradients_takes_part(ranks: list[Any]) -> None:
    assert len({rank["lacking"] for rank in ranks}) == 1 and math.isfinite(ranks[0]["lacking"])


def test_one_reduction_for_all_gradients_and_one_for_all_layers(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["collectives"] == ["all_reduce", "clipped", "all_reduce"]


def test_one_process_agrees_with_torch() -> None:
    plain, ours = make_model(), make_model()
    for model in (plain, ours):
        loss_of(model).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = clip_grad_norm_(ours, 0.1)
    assert norm.finite and float(norm) == pytest.approx(float(expected), rel=1e-6)
    assert float(norm) > 1
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(ours, 0.0)


@pytest.mark.parametrize("split", [0, 3])
@pytest.mark.parametrize("max_norm", [0.01, 1e6, math.inf])
def test_fused_optimizers_clip_in_their_steps(max_norm: float, split: int) -> None:
    host, device = make_model(), make_model()
    params = list(device.parameters())
    parts = [params[:split], params[split:]] if split else [params]
    fused = [torch.optim.SGD(part, lr=0.01, fused=True) for part in parts]
    optimizers = [torch.optim.SGD(host.parameters(), lr=0.01), *fused]
    for step in range(3):
        for model in (host, device):
            loss_of(model).backward()
        limit = max_norm * 2**step
        if step < 2:
            total = clip_grad_norm_(host, limit).total
            norm = clip_and_step(device, limit, fused)
            assert norm.total == pytest.approx(total, rel=1e-5)
        for optimizer in optimizers[: None if step == 2 else 1]:  # without clipping at last
            optimizer.step()
        host.zero_grad()
        device.zero_grad()
    for a, b in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_groups_are_clipped_by_their_own_norms(fused: bool) -> None:
    plain, ours = make_model(), make_model()
    params, trained = list(plain.parameters()), list(ours.parameters())
    optimizers = [torch.optim.SGD(p, 0.1, fused=f) for p, f in ((params, None), (trained, fused))]
    for model in (plain, ours):
        loss_of(model).backward()
    total = float(torch.nn.utils.get_total_norm([p.grad for p in params]))
    norms = [float(torch.nn.utils.clip_grad_norm_(part, 0.1)) for part in (params[:3], params[3:])]
    assert min(norms) > 0.1 and norms[0] != norms[1]
    optimizers[0].step()
    norm = clip_and_step(ours, 0.1, optimizers[1:], groups=[trained[3:], trained[:3]])
    assert norm.total == pytest.approx(total, rel=1e-6)
    for a, b in zip(params, trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_an_optimizer_of_a_part_is_refused() -> None:
    """The others would step unclipped, and with a nan."""
    model = make_model()
    name = next(n for n, _ in model.named_parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    part = torch.optim.AdamW([p for n, p in model.named_parameters() if n != name], fused=True)
    with pytest.raises(ValueError, match=rf"must hold {name} and all other .* \(1 are missing\)"):
        clip_and_step(model, 0.1, [part])
    model.get_parameter(name).grad = None
    clip_and_step(model, 0.1, [part])


def test_a_norm_is_a_number() -> None:
    norm = GradientNorm(("a", "b"), torch.tensor([9.0, 16.0], dtype=torch.float64))
    assert f"{norm:.3f} {norm}" == "5.000 5.0" and str(norm) == "5.0" and float(norm) == 5
    assert repr(norm) == "GradientNorm(5.0)"
    assert 4 < norm < 6 and 5 <= norm <= 5 and not norm > norm and norm >= 5
    assert max(norm, 1.0) is norm
    bad = GradientNorm(("a", "b"), torch.tensor([9.0, math.nan], dtype=torch.float64))
    assert f"{bad:.1f}" == "nan" and not bad < 1 and not bad >= 1
    assert repr(bad) == "GradientNorm(nan, non_finite=('b',))"
