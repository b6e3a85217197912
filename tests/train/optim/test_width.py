from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import load, save
from moecore.models import Decoder, DecoderConfig, at_width, preset
from moecore.train import AdamW, Muon, assign_matrices, width_rates
from moecore.train.optim.width import WidthRates

MOE = replace(
    preset("tiny").moe, dim=64, hidden_dim=32, num_experts=8, top_k=2, shared_hidden_dim=32
)
SIZES = dict(vocab_size=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
BASE = DecoderConfig(**SIZES, moe=MOE, dense_layers=(0,), mlp_hidden_dim=128)
TOKENS = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(1))


def rates_of(config: DecoderConfig, base: DecoderConfig = BASE) -> WidthRates:
    return width_rates(Decoder(config, device="meta"), Decoder(base, device="meta"))


def test_the_papers_table_by_hand() -> None:
    """Four times as wide, m = 4: Tensor Programs V, table 3; Muon's by sqrt(outputs / inputs)."""
    found = rates_of(at_width(BASE, 256)).rates
    layer = "model.layers.1"
    for name, std, adamw in (
        ("model.embed_tokens.weight", 1, 1),
        ("model.norm.weight", 1, 1),
        (f"{layer}.self_attn.q_proj.weight", 1 / 2, 1 / 4),
        (f"{layer}.self_attn.o_proj.weight", 1 / 2, 1 / 4),
        ("model.layers.0.mlp.down_proj.weight", 1 / 2, 1 / 4),
        (f"{layer}.mlp.experts.w1", 1 / 2, 1 / 4),
        (f"{layer}.mlp.experts.w2", 1 / 2, 1 / 4),
        (f"{layer}.mlp.shared.w1", 1 / 2, 1 / 4),
        (f"{layer}.mlp.router.weight", 1 / 4, 1 / 4),
        ("lm_head.weight", 1 / 4, 1 / 4),
    ):
        assert found[name].std == pytest.approx(std), name
        assert found[name].lr["adamw"] == pytest.approx(adamw), name
    # 0.2 sqrt(256) in place of 0.2 sqrt(64), where both sides grow; outputs of a router stay.
    for name, rms, original in (
        (f"{layer}.self_attn.q_proj.weight", 1 / 2, 1),
        (f"{layer}.mlp.experts.w2", 1 / 2, 1 / 1),
        (f"{layer}.mlp.router.weight", 1 / 4, 1 / 2),
    ):
        assert found[name].lr["match_rms_adamw"] == pytest.approx(rms), name
        assert found[name].lr["original"] == pytest.approx(original), name
    assert "original" not in found["lm_head.weight"].lr
    wide = at_width(BASE, 256)  # experts that stay as small: their FC2 has as many inputs as before
    small = replace(wide, moe=replace(wide.moe, hidden_dim=32))
    w1, w2 = (rates_of(small).rates[f"{layer}.mlp.experts.{name}"] for name in ("w1", "w2"))
    assert (w2.std, w2.lr["adamw"], w1.lr["adamw"]) == (1, 1, pytest.approx(1 / 4))
    own = rates_of(BASE).rates.values()
    assert all(rate.std == 1 and set(rate.lr.values()) == {1} for rate in own)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muons_update_has_one_spectral_norm_over_the_root_of_outputs_by_inputs(adjust: Any) -> None:
    """The definition: a step's spectral norm over sqrt(outputs / inputs) is that of the base."""

    def model_of(dim: int, hidden: int) -> nn.ModuleDict:
        layers = {"up": nn.Linear(dim, hidden), "down": nn.Linear(hidden, dim)}
        ends = {"embed": nn.Embedding(5, dim), "lm_head": nn.Linear(dim, 5)}
        return nn.ModuleDict(ends | layers)

    base, wide = model_of(16, 24), model_of(128, 48)  # 8 and 2 times as wide
    rates, norms = width_rates(wide, base), []
    for model in (base, wide):
        optimizer = Muon(assign_matrices(model), lr=0.1, weight_decay=0.0, adjust_lr_fn=adjust)
        if model is wide:
            rates.regroup(optimizer, model)
        for name in ("up", "down"):
            weight = model[name].weight
            before = weight.detach().clone()
            weight.grad = torch.outer(*(torch.linspace(1, 2, n) for n in weight.shape))
            optimizer.step()
            weight.grad = None
            outputs, inputs = weight.shape
            step = torch.linalg.matrix_norm(weight.detach() - before, 2)
            norms.append(float(step / (outputs / inputs) ** 0.5))
    # Newton-Schulz in bf16 leaves half a percent.
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-2)


def test_one_output_has_all_inputs() -> None:
    """The gate of shared experts and a score: outputs stay, inputs grow, so both are as heads."""
    base = replace(BASE, moe=replace(MOE, shared_gate=True))
    gate = rates_of(at_width(base, 256), base).rates["model.layers.1.mlp.shared.gate"]
    assert (gate.std, gate.lr) == (1 / 4, {"adamw": 1 / 4})

    def scores(dim: int) -> nn.Module:
        parts = {"embed": nn.Embedding(5, dim), "norm": nn.RMSNorm(dim)}
        return nn.ModuleDict(parts | {"score": nn.Linear(dim, 1)})

    found = width_rates(scores(64), scores(16)).rates
    assert [found[name].std for name in ("score.weight", "score.bias")] == [1 / 4, 1]
    assert [found[name].lr["adamw"] for name in ("embed.weight", "norm.weight")] == [1, 1]


def optimizers_of(model: Decoder, kind: str, rates: WidthRates | None) -> list[Any]:
    if kind == "adamw":
        made: list[Any] = [AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)]
    else:
        matrices = assign_matrices(model)
        lr = 0.04 if kind == "original" else 0.02
        how: dict[str, Any] = dict(adjust_lr_fn=kind, ns_dtype=torch.float32)  # CPUs have no bf16
        made = [Muon(matrices, lr=lr, **how), AdamW(matrices.adamw_params, lr=5e-3)]
    if rates is not None:
        for one in made:
            rates.regroup(one, model)
    return made


def changes(config: DecoderConfig, kind: str, rates: WidthRates | None) -> tuple[float, float]:
    """Return by how much five steps change a mean hidden value and a mean logit."""
    model = Decoder(config)
    model.init_weights(0)
    if rates is not None:
        rates.scale_weights(model)
    seen: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _, args, y: seen.append(args[0].detach()))
    made = optimizers_of(model, kind, rates)

    def outputs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = model(TOKENS[:, :-1])
        return seen[-1], logits

    before = outputs()
    for _ in range(5):
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        for one in made:
            one.step()
            one.zero_grad()
    hidden, logits = ((b - a).abs().mean().item() for a, b in zip(before, outputs(), strict=True))
    return hidden, logits


@pytest.mark.parametrize("kind", ["adamw", "match_rms_adamw", "original"])
def test_changes_stay_flat_with_the_width(kind: str) -> None:
    """The coordinate check of the paper, at 64, 128 and 256."""
    configs = [at_width(BASE, dim) for dim in (64, 128, 256)]
    flat = [changes(config, kind, rates_of(config)) for config in configs]
    grown = [changes(config, kind, None) for config in configs]
    assert flat[0] == grown[0]
    for values, others in zip(zip(*flat, strict=True), zip(*grown, strict=True), strict=True):
        assert max(values) < 1.6 * min(values)
        assert others[2] > 2.2 * others[0] and others[0] < others[1] < others[2]


def test_groups_on_any_layout() -> None:
    """As of plain models; a rank with some parameters has all groups, and a step all its rates."""
    config = at_width(BASE, 128)
    rates, plain = rates_of(config), Decoder(config)
    plain.init_weights(0)
    first = plain.get_parameter("lm_head.weight").detach().clone()
    rates.scale_weights(plain)
    assert torch.equal(plain.get_parameter("lm_head.weight"), first / 2)
    model = Decoder(config, device="meta")
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    model.to_empty(device="cpu")
    model.init_weights(0)
    rates.scale_weights(model)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.full_tensor() if hasattr(a, "full_tensor") else a, b), name
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    part = AdamW([model.get_parameter("model.norm.weight")], lr=0.1, weight_decay=0.2)
    for one in (optimizer, part):
        rates.regroup(one, model)
        assert [(g["lr"], g["weight_decay"]) for g in one.param_groups] == [(0.1, 0.2), (0.05, 0.4)]
    assert [len(g["params"]) for g in part.param_groups] == [1, 0]
    muon = Muon(assign_matrices(model), lr=1.0)
    rates.regroup(muon, model)
    # A router's longest side grows too, and its outputs do not.
    lrs = [group["lr"] for group in muon.param_groups]
    assert lrs == pytest.approx([1.0, 0.5, 0.5**0.5])
    assert [len(g["params"]) for g in muon.param_groups[:2]] == [0, 1]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    names = {p: n for n, p in model.named_parameters()}
    slow = {names[p] for p in optimizer.param_groups[1]["params"]}
    assert slow == {n for n, rate in rates.rates.items() if rate.lr["adamw"] == 0.5}
    before = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    step = TrainStep(model, optimizer)
    with step.micro_batch():
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    assert step.finish().lr == 0.1
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.025]
    for name, param in model.named_parameters():  # the first step of Adam is its lr
        moved = (param.full_tensor().detach() - before[name] * (1 - 0.1 * 0.2)).abs().max()
        assert moved == pytest.approx(0.05 if name in slow else 0.1, rel=1e-3), name


def test_a_run_goes_on_with_the_base_that_it_began_with(tmp_path: Path) -> None:
    config = at_width(BASE, 128)

    def regrouped(base: int) -> tuple[Decoder, AdamW]:
        model = Decoder(config)
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
        rates_of(config, at_width(BASE, base)).regroup(optimizer, model)
        return model, optimizer

    path = save(tmp_path, 1, *regrouped(64))
    load(path, *regrouped(64))
    message = r"hyperparameter width_factor \(0.25\) is 0.5 in the"
    with pytest.raises(ValueError, match=message) as e:
        load(path, *regrouped(32))
    assert "\n" not in str(e.value)


def test_refusals() -> None:
    tied = replace(BASE, tie_embeddings=True)
    message = r"model \(Decoder\) must have a trained head that is not t"
    with pytest.raises(ValueError, match=message):
        rates_of(tied, tied)
    with pytest.raises(ValueError, match=r"base \(.*\) must have the parameters of model"):
        rates_of(replace(BASE, num_layers=3))
    with pytest.raises(ValueError, match=r"optimizer must hold parameters of model alone"):
        rates_of(BASE).regroup(AdamW([nn.Parameter(torch.ones(2))]), Decoder(BASE, device="meta"))
    with pytest.raises(ValueError, match=r"dim \(72\) must leave DecoderConfig.num_heads whole"):
        at_width(BASE, 72)
    model, rates = Decoder(BASE, device="meta"), rates_of(BASE)
    for optimizer in (torch.optim.SGD, torch.optim.Muon):
        with pytest.raises(ValueError, match=r"must be AdamW or moecore's Muon"):
            rates.regroup(optimizer([model.lm_head.weight], lr=0.1), model)
    once = AdamW(model.parameters(), lr=0.1)
    rates.regroup(once, model)
    with pytest.raises(ValueError, match=r"optimizer \(AdamW\) must be new, but its groups have"):
        rates.regroup(once, model)
    asked = assign_matrices(model, (("lm_head.weight", "muon"),))
    with pytest.raises(ValueError, match=r"\(Muon\) must not step lm_head.weight"):
        rates.regroup(Muon(asked, lr=0.1), model)
    model.model.norm.bias = nn.Parameter(torch.ones(64))  # an adapter that comes later
    new = AdamW(model.parameters(), lr=0.1)
    for call in (lambda: rates.scale_weights(model), lambda: rates.regroup(new, model)):
        with pytest.raises(ValueError, match=r"model \(model.norm.bias\) must have the trained"):
            call()
    model.model.norm.bias.requires_grad_(False)
    rates.regroup(AdamW(model.parameters(), lr=0.1), model)


def test_presets_at_another_width() -> None:
    for name in ("deepseek-v3", "tiny-deepseek-v3", "qwen3-30b-a3b"):
        config = preset(name)
        half = at_width(config, config.dim // 2)
        assert (half.dim, half.moe.dim, half.head_dim) == (*[config.dim // 2] * 2, config.head_dim)
        assert half.num_heads * 2 == config.num_heads
        assert half.moe.hidden_dim * 2 == config.moe.hidden_dim
        assert at_width(half, config.dim) == config
    deep = replace(preset("tiny-deepseek-v3"), num_mtp_layers=1, mtp_loss_coef=0.1)
    found = rates_of(deep, at_width(deep, deep.dim // 2)).rates
    assert found["model.embed_tokens.weight"].lr["adamw"] == 1
