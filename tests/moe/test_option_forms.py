from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.moe.balance import LOSS_NAMES, BalanceGroups
from moecore.moe.state import MoEState
from tests.moe import moe_cases as mc
from tests.moe.reference_route import capacity_reference


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 1.25, 100.0])
def test_capacity_bounds_every_expert(factor: float, drop: Any) -> None:
    """0.01 leaves one token to each expert, 100 all of them."""
    config = replace(mc.BASE, capacity=CapacityConfig(factor=factor, drop=drop))
    layer, x = mc.make_layer(config), mc.tokens(2, 20, 32)
    out = mc.compare_with_oracle(layer, x)
    C, counts = capacity_reference(factor, 40, config), layer.tracker.counts
    assert {0.01: 1, 0.3: 3, 1.0: 10, 1.25: 13, 100.0: 1000}[factor] == C
    assert torch.equal(counts.capacity_choices_E, counts.choices_E.clamp(max=C))
    metrics = mc.make_state(layer).finish_step()
    dropped = (out.counts_E - C).clamp(min=0)
    assert torch.equal(metrics.dropped_per_expert["moe"], dropped)
    assert torch.equal(metrics.tokens_per_expert["moe"], out.counts_E)
    assert metrics.compute_drop_rates()["moe"] == pytest.approx(float(dropped.sum()) / 80)


def test_the_worked_example_of_dropping() -> None:
    """Three tokens, two experts, one place each: weights .2, .7 and .5."""
    config = replace(
        mc.BASE,
        num_experts=2,
        top_k=1,
        score_function="sigmoid",
        normalize_weights=False,
        capacity=CapacityConfig(factor=0.5),
    )
    for drop, stays in (("probability", [False, True, True]), ("position", [True, False, True])):
        layer = mc.make_layer(replace(config, capacity=CapacityConfig(factor=0.5, drop=drop)))
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[0, 0] = layer.router.weight[1, 1] = 1.0
        x = torch.full((3, 32), -20.0)
        x[:, 0] = torch.tensor([0.2, 0.7, 0.1]).logit()
        x[2, 1] = 0.0
        y = layer(x)
        assert y.any(-1).tolist() == stays, drop
        routing = layer.router(x)
        assert (routing.expert_ids_TK >= 0).flatten().tolist() == stays
        assert routing.chosen_ids_TK.flatten().tolist() == [0, 0, 1]


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_the_same_positions_of_all_sequences_stay(drop: Any) -> None:
    """Four sequences of eight keep four tokens each with a factor of 0.5, not 8, 8, 0 and 0."""
    capacity = CapacityConfig(factor=0.5, drop=drop)
    layer = mc.make_layer(
        replace(mc.BASE, num_experts=1, top_k=1, normalize_weights=True, capacity=capacity)
    )
    x, mask = mc.tokens(4, 8, 32), torch.zeros(4, 8, dtype=torch.bool)
    assert layer(x).any(-1).tolist() == [[True] * 4 + [False] * 4] * 4
    mask[0, :6] = mask[1, 4:] = True  # on the left and on the right
    mask[2, 0] = mask[2, 2:] = True
    wanted = torch.zeros(4, 8, dtype=torch.bool)  # 2 + 4 + 1 + 8 real tokens: eight places
    wanted[0, 6:] = wanted[1, :3] = wanted[2, 1] = wanted[3, :2] = True
    assert torch.equal(layer(x, mask).any(-1), wanted)


def test_expert_choice_gives_every_expert_exactly_its_tokens() -> None:
    config = replace(mc.BASE, assignment="expert_choice")
    layer, x = mc.make_layer(config), mc.tokens(2, 20, 32)
    for factor, C in ((None, 10), (0.5, 5), (3.0, 30), (100.0, 40)):
        capacity = None if factor is None else CapacityConfig(factor=factor)
        layer = mc.make_layer(replace(config, capacity=capacity))
        layer(x).sum().backward()
        assert layer.tracker.counts.choices_E.tolist() == [C] * 8
        ids_TE = layer.router(x.view(40, 32)).expert_ids_TK
        assert ((ids_TE == torch.arange(8)) | (ids_TE == -1)).all()
    assert (layer.router(x.view(40, 32)).expert_ids_TK >= 0).all(), "all experts: no token is out"


def skew_router(layer: MoELayer) -> None:
    """All tokens like the first experts: every x has a 1 in its first place."""
    with torch.no_grad():
        layer.router.weight[:, 0] = torch.linspace(4, 0, 8)


def loads_of(layer: MoELayer, x_TD: Tensor) -> Tensor:
    ids = layer.router(x_TD).chosen_ids_TK.flatten().long()
    loads = torch.bincount(ids[ids >= 0], minlength=layer.config.num_experts).double()
    return loads / loads.mean()


@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_sinkhorn_goes_on_until_large_logits_are_even(scale: float) -> None:
    """Four rounds would leave one expert with 1.45 times the mean, and other choices."""
    layer, x = mc.make_layer(mc.OPTIONS["sinkhorn"]), mc.tokens(1, 256, 32)
    x[..., 0] = 1.0
    skew_router(layer)
    with torch.no_grad():
        layer.router.weight *= scale
    out = mc.compare_with_oracle(layer, x)
    assert int(out.counts_E.max()) < 1.2 * 64


def test_jitter_follows_the_seed_and_is_absent_in_eval() -> None:
    layer, plain = mc.make_layer(mc.OPTIONS["jitter"]), mc.make_layer(mc.BASE)
    x = mc.tokens(40, 32)

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return layer.router(x).logits_TE

    assert torch.equal(logits(0), logits(0)) and not torch.equal(logits(0), logits(1))
    exact = plain.router(x).logits_TE
    assert not torch.equal(logits(0), exact)
    # |logit error| <= 0.3 |x| |w|, and every element has a factor of its own.
    bound = 0.3 * x.abs() @ layer.router.weight.detach().abs().T
    assert ((logits(0) - exact).abs() <= bound + 1e-5).all()
    torch.manual_seed(0)
    rows = layer.router(torch.ones(2, 32)).logits_TE
    assert not torch.equal(rows[0], rows[1])
    state = torch.get_rng_state()
    assert torch.equal(layer.eval().router(x).logits_TE, exact)
    assert torch.equal(torch.get_rng_state(), state), "eval draws nothing"


def exact_bias(scores_TE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The K/E quantile of each expert's margins, by sorting them."""
    T, E = scores_TE.shape
    cutoffs = [sorted(row)[-top_k - 1] for row in (scores_TE + bias_E).tolist()]
    margins_TE = (torch.tensor(cutoffs)[:, None] - scores_TE).tolist()
    ordered = [sorted(row[e] for row in margins_TE) for e in range(E)]
    solved = torch.tensor([margins[round(T * top_k / E) - 1] for margins in ordered])
    return solved - solved.mean()


def test_quantile_bias_evens_out_frozen_scores() -> None:
    layer, x = skewed_layer("quantile")  # which no optimizer moves
    state, bias_E = mc.make_state(layer), layer.router.expert_bias
    before = float(loads_of(layer, x).max())
    scores_TE = layer.router(x).logits_TE.detach().sigmoid()
    for step in range(8):
        width = (2 + float(bias_E.max() - bias_E.min())) / 1000
        expected = exact_bias(scores_TE, bias_E, 2)
        layer(x).sum().backward()
        state.finish_step()
        assert float((bias_E - expected).abs().max()) <= 2 * width, step
        assert abs(float(bias_E.mean())) < 1e-6
    after = loads_of(layer, x)
    assert before > 2 and float(after.max()) < 1.1 and float(after.min()) > 0.9


def test_a_rate_goes_a_share_of_the_way_and_padding_has_no_say() -> None:
    x, mask = mc.tokens(2, 64, 32), mc.padding(2, 64)
    biases = []
    for rate, masked in ((1.0, True), (0.25, True), (1.0, False)):
        balance = BalanceConfig(bias_update_rate=rate, bias_update="quantile")
        layer = mc.make_layer(replace(mc.OPTIONS["quantile"], balance=balance))
        layer.router.expert_bias.zero_()
        if masked:
            layer(x, mask).sum().backward()
        else:
            layer(x[~mask]).sum().backward()
        mc.make_state(layer).finish_step()
        biases.append(layer.router.expert_bias)
    assert float(biases[0].abs().max()) > 0.01
    torch.testing.assert_close(biases[1], biases[0] * 0.25)
    assert torch.equal(biases[0], biases[2])


def skewed_layer(name: str) -> tuple[MoELayer, Tensor]:
    """A layer whose router sends everybody to the same experts, and tokens."""
    layer, x = mc.make_layer(mc.OPTIONS[name]), mc.tokens(2048, 32)
    x[:, 0] = 1.0
    skew_router(layer)
    with torch.no_grad():
        layer.router.weight[:, 1:] *= 0.7
        layer.router.expert_bias.zero_()
    return layer, x.requires_grad_()


def test_a_bias_per_micro_batch_evens_out_the_first_step() -> None:
    """In training only: eval chooses by the bias that steps move, which is as without it."""
    layer, x = skewed_layer("quantile-micro-batch")
    solved, stored = loads_of(layer.train(), x), loads_of(layer.eval(), x)
    assert float(stored.max()) > 2.5 and float(solved.max()) < 1.5
    assert not layer.router.expert_bias.any(), "a forward moves nothing"
    layer.train()(x).sum().backward()
    mc.make_state(layer).finish_step()
    other, _ = skewed_layer("quantile")
    other(x).sum().backward()
    mc.make_state(other).finish_step()
    assert torch.equal(layer.router.expert_bias, other.router.expert_bias)
    solved, stored = loads_of(layer.train(), x), loads_of(layer.eval(), x)
    assert float(stored.max()) < 1.5 and float(solved.max()) < 1.25, "from a bias that is nearer"


@pytest.mark.parametrize("skipped", [False, torch.tensor(False), torch.tensor(True)])
def test_layers_of_all_kinds_move_as_each_would_alone(skipped: Any) -> None:
    """Layers that are alike are solved together; sizes, rates and rules differ here."""
    quantile, sign = mc.OPTIONS["quantile"], BalanceConfig(bias_update_rate=0.125)
    dropping = replace(mc.BASE, expert_bias=True, capacity=CapacityConfig(factor=0.5), balance=sign)
    configs = {
        "first": quantile,
        "sign": replace(mc.BASE, expert_bias=True, balance=sign),
        "wide": replace(quantile, num_experts=12),
        "second": quantile,
        "still": replace(mc.BASE, balance=BalanceConfig(micro_batch_coef=0.1)),
        "dropping": dropping,
        "more choices": replace(quantile, top_k=3),
    }

    def run() -> dict[str, MoELayer]:
        layers = {n: mc.make_layer(c, seed=i) for i, (n, c) in enumerate(configs.items())}
        for i, layer in enumerate(layers.values()):
            layer(mc.tokens(64, 32, seed=i)).sum().backward()
        return layers

    together, alone = run(), run()
    state = MoEState(together, BalanceGroups())
    metrics = state.finish_step(is_skipped=skipped)
    assert list(metrics.tokens_per_expert) == list(configs)
    assert list(metrics.dropped_per_expert) == ["dropping"]
    for name, layer in alone.items():
        before = [b.clone() for b in layer.buffers()]
        expected = mc.make_state(layer).finish_step(is_skipped=skipped)
        assert torch.equal(metrics.tokens_per_expert[name], expected.tokens_per_expert["moe"])
        assert torch.equal(metrics.aux_losses[name], expected.aux_losses["moe"])
        moved = [not torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True)]
        assert any(moved) == (name != "still" and not bool(skipped)), name
        for ours, theirs in zip(together[name].buffers(), layer.buffers(), strict=True):
            assert torch.equal(ours, theirs), name


def test_sign_bias_counts_what_was_chosen_before_dropping() -> None:
    """Nine tokens want experts 0, 1 and 2 five, two and once, and one is padding; the mean is 2."""
    config = replace(
        mc.BASE,
        num_experts=4,
        top_k=1,
        expert_bias=True,
        capacity=CapacityConfig(factor=0.5),
        balance=BalanceConfig(bias_update_rate=0.125),
    )
    layer = mc.make_layer(config)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, 32) * 4)
        layer.router.expert_bias.zero_()
    x = torch.eye(4, 32)[torch.tensor([0, 0, 0, 1, 0, 2, 1, 0, 3])]
    mask = torch.arange(9) == 8
    layer(x, mask).sum().backward()
    metrics = mc.make_state(layer).finish_step()
    assert metrics.tokens_per_expert["moe"].tolist() == [5, 2, 1, 0]
    assert metrics.dropped_per_expert["moe"].tolist() == [4, 1, 0, 0]
    assert layer.router.expert_bias.tolist() == [-0.125, 0.0, 0.125, 0.125]


def test_a_nan_does_not_become_an_address() -> None:
    """The step that met it is skipped; the next one balances as before."""
    layer, x = mc.make_layer(mc.OPTIONS["quantile"]), mc.tokens(64, 32)
    state, bias_E = mc.make_state(layer), layer.router.expert_bias
    before = bias_E.clone()
    layer(torch.where(torch.arange(64)[:, None] == 3, float("nan"), x)).sum().backward()
    state.finish_step(is_skipped=True)
    assert torch.equal(bias_E, before)
    layer(x).sum().backward()
    state.finish_step()
    other = mc.make_layer(mc.OPTIONS["quantile"])
    other(x).sum().backward()
    mc.make_state(other).finish_step()
    assert bias_E.isfinite().all() and torch.equal(bias_E, other.router.expert_bias)


def test_a_sequence_of_padding_has_no_part_in_the_sequence_loss() -> None:
    balance = BalanceConfig(sequence_coef=0.3)
    x, found = mc.tokens(3, 10, 32), []
    mask_BT = torch.zeros(3, 10, dtype=torch.bool)
    mask_BT[1] = True
    for rows, mask in ((x, mask_BT), (x[[0, 2]], None)):
        layer = mc.make_layer(replace(mc.BASE, balance=balance))
        layer(rows, mask)[0].sum().backward()
        found.append((layer.tracker.counts.losses, layer.router.weight.grad))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0][LOSS_NAMES.index("sequence")] > 0
