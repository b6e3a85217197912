import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from moecore import (
    ExpertLayout,
    FSDPOptions,
    LayerLayout,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.experts import fp8_products
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe import experts as experts_file
from moecore.moe.records import ExpertInput
from moecore.parallel.model import request as request_file
from moecore.precision.plain import ProductLinear
from moecore.train import AdamW
from tests.helpers.saved import list_saved
from tests.moe.fp8_reference import experts_scaled

pytestmark = pytest.mark.usefixtures("no_group_left")
CONFIG = MoEConfig(dim=128, hidden_dim=128, num_experts=4, top_k=2)
KEPT = FSDPOptions(dense_strategy="optim")
FC1_AGAIN = MemoryOptions(recompute=("expert_fc1",))
DELAYED = Recipe(scaling="tensorwise", amax_history=4)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every quantisation of a weight: by the reader, which keeps it, or within the products."""
    with counted_quantisations(monkeypatch) as calls:
        yield calls


@contextmanager
def counted_quantisations(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    weights, matrices = fp8_products.quantise_weights, experts_file.quantise_matrices

    def counted(*args: Any, **how: Any) -> Any:
        calls.append("again")
        return weights(*args, **how)

    def kept(*args: Any) -> Any:
        found = matrices(*args)
        calls[-1] = "kept"
        return found

    with patch.context() as patched:
        patched.setattr(fp8_products, "quantise_weights", counted)
        patched.setattr(experts_file, "quantise_matrices", kept)
        yield calls


def plain_layer(layout: ExpertLayout | None = None, config: MoEConfig = CONFIG) -> MoELayer:
    torch.manual_seed(0)
    names = LayerLayout(expert_layout=layout or ExpertLayout())
    layer = MoELayer(config, layout=names)
    layer.get_part("experts").set_backend("auto", recipe=Recipe())
    return layer


def whole_model(fsdp: FSDPOptions = KEPT, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(MoELayer(CONFIG))
    meshes = build_meshes(ParallelConfig(), "cpu")
    return parallelize_moe(model, meshes, precision="blockwise", fsdp=fsdp, **options)


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))


def fresh(model: nn.Module) -> Tensor:
    """The output of a layer that was made of the same weights just now."""
    layer = plain_layer()
    layer.load_state_dict({n: p.full_tensor() for n, p in model[0].state_dict().items()})
    with torch.no_grad():
        return layer(tokens())


def test_a_plain_layer_quantises_once_for_forward_and_backward(quantised: list[str]) -> None:
    layer = plain_layer()
    for done in (1, 2):
        layer(tokens()).sum().backward()
        assert quantised == ["kept", "kept"] * done


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].experts.w1.mul_(1.5)


def of_the_part(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].experts.w1.to_local().mul_(1.5)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({n: p * 1.5 for n, p in model.state_dict().items()})


def uncounted(model: nn.Module) -> None:
    """As a fused optimizer or a replayed graph changes weights."""
    model[0].experts.w1.to_local().data.mul_(1.5)


@pytest.mark.parametrize("change", [in_place, of_the_part, loaded, uncounted])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_weights_that_change_between_steps_are_quantised_anew(change, frozen) -> None:
    model = whole_model()
    if frozen:
        model[0].experts.requires_grad_(False)
    found = []
    step = TrainStep(model, num_micro_batches=2)
    for _ in range(2):
        for _ in range(2):
            with step.micro_batch():
                found.append(model(tokens()))
                found[-1].sum().backward()
            assert torch.equal(found[-1], fresh(model))
        step.drop()
        change(model)
    assert not torch.equal(found[0], found[2])


def test_experts_that_thaw_are_no_longer_frozen() -> None:
    model = whole_model()
    model[0].experts.requires_grad_(False)
    step = TrainStep(model, AdamW(model.parameters(), lr=0.1), num_micro_batches=2)
    for i in range(4):
        model[0].experts.requires_grad_(i > 0)
        for _ in range(2):
            with step.micro_batch():
                y = model(tokens())
                y.sum().backward()
            assert torch.equal(y, fresh(model))
        step.finish()


@pytest.mark.parametrize("fsdp", [KEPT, FSDPOptions()], ids=["kept", "freed"])
def test_checkpointed_blocks_have_the_same_gradients(fsdp: FSDPOptions) -> None:
    grads = []
    for recomputes in (False, True):
        model = whole_model(fsdp)
        step = TrainStep(model, num_micro_batches=2)
        for seed in range(2):
            with step.micro_batch():
                x = tokens(seed).requires_grad_()
                y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
                y.square().sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()] + [x.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


def test_gate_and_up_apart_have_the_same_numbers() -> None:
    split, apart = plain_layer(), plain_layer(ExpertLayout(gate_up="separate"))
    state = split.state_dict()
    w1, w3 = state.pop("experts.w1").unbind(1)
    apart.load_state_dict({**state, "experts.w1": w1, "experts.w3": w3})
    results = []
    for layer in (split, apart):
        y = layer(tokens())
        y.square().sum().backward()
        results.append([y, layer.experts.w2.grad, layer.router.weight.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    both = torch.stack([apart.experts.w1.grad, apart.experts.w3.grad], 1)
    assert torch.equal(both, split.experts.w1.grad)


def test_under_autocast() -> None:
    layer = plain_layer()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(tokens())
    y.sum().backward()
    assert layer.experts.w1.grad.dtype == torch.float32 and layer.experts.w1.grad.any()
    rounded = plain_layer().bfloat16()
    rounded.router.float()
    difference = (y - rounded(tokens().bfloat16())).norm() / y.norm()
    assert difference < 0.05


def test_copies_of_a_layer_share_nothing() -> None:
    layer = plain_layer()
    layer.requires_grad_(False)
    y, other = layer(tokens()), copy.deepcopy(layer)
    with torch.no_grad():
        other.experts.w1.mul_(2.0)
    assert torch.equal(layer(tokens()), y) and not torch.equal(other(tokens()), y)


def test_roles_and_overrides_decide_by_name() -> None:
    torch.manual_seed(0)
    config = MoEConfig(dim=128, hidden_dim=128, num_experts=4, top_k=2, shared_hidden_dim=128)
    model = nn.Sequential(*(MoELayer(config) for _ in range(3)))
    precision = Precision(
        recipe=Recipe(), roles=("experts",), overrides=(("1.experts", None), ("2.shared", Recipe()))
    )
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)
    shown = repr(model)
    assert shown.count("Experts(backend='auto', blockwise FP8: e4m3, 1x128") == 2
    assert [layer.experts.recipe is not None for layer in model] == [True, False, True]
    y = model(tokens())
    y.sum().backward()
    calls = [type(layer.shared.products[0]).__name__ for layer in model]
    assert calls == ["PlainProducts", "PlainProducts", "Fp8Products"]
    assert all(p.grad.to_local().any() for p in model.parameters())


def test_a_step_advances_delayed_scaling() -> None:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG)
    model = nn.Sequential(OrderedDict(up_proj=nn.Linear(128, 128), moe=layer))
    recipe = Recipe(scaling="tensorwise", amax_history=3)
    precision = Precision(recipe=recipe, roles=("mlp",))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)
    step = TrainStep(model, AdamW(model.parameters(), lr=0.1))
    history = model.up_proj.products.history
    for done in (1, 2):
        with step.micro_batch():
            model(tokens()).sum().backward()
        step.finish()
        assert all(int((steps > 0).sum()) == done for steps in history.recorded_amax.values())


def delayed_model(**options: Any) -> tuple[nn.Module, TrainStep]:
    """A layer whose scales are those of one step before, and which no step changes."""
    torch.manual_seed(0)
    model = nn.Sequential(MoELayer(CONFIG))
    recipe = Recipe(scaling="tensorwise", amax_history=1, grad_format="e5m2", power_of_two=False)
    precision = Precision(recipe=recipe, roles=("experts",))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=2)


def delayed_step(model: nn.Module, step: TrainStep, *factors: float) -> list[Tensor]:
    """Return outputs of the micro-batches, tokens times each factor."""
    found = []
    for factor in factors:
        with step.micro_batch():
            found.append(model(tokens() * factor))
            found[-1].square().sum().backward()
    return found


def test_delayed_experts_have_scales_of_the_step_before() -> None:
    model, step = delayed_model()
    history = model[0].experts.history
    first = delayed_step(model, step, 1.0, 4.0)
    seen = {operand: float(largest) for operand, largest in history.current_amax.items()}
    assert seen["x"] == 4 * float(tokens().abs().max()) and all(seen.values())
    step.finish()
    assert {operand: float(steps) for operand, steps in history.recorded_amax.items()} == seen
    assert not any(history.current_amax.values())
    # The scale of 4 x the tokens: in the next step that of the tokens themselves, which clips.
    fine, coarse = delayed_step(model, step, 1.0, 4.0)
    assert torch.equal(coarse, first[1]) and not torch.equal(fine, first[0])
    step.drop()
    assert not any(history.current_amax.values())
    delayed_step(model, step, 0.5, 0.5)
    past = {operand: float(largest) for operand, largest in history.current_amax.items()}
    step.finish()
    y, _ = delayed_step(model, step, 1.0, 1.0)
    weights = {n: p.full_tensor().detach() for n, p in model[0].named_parameters()}
    routing = MoELayer(CONFIG).get_part("router")
    routing.load_state_dict({"weight": weights["router.weight"]})
    found = routing(tokens())
    w1, w2 = weights["experts.w1"].flatten(1, 2), weights["experts.w2"]
    where = found.expert_ids_TK, found.weights_TK.detach(), 2 * y.detach()
    how: Any = dict(scaling="tensorwise", grad_format="e5m2", power_of_two=False)
    truth = experts_scaled(tokens(), w1, w2, *where, **how, amax=past)
    assert (y - truth.y).norm() < 1e-3 * truth.y.norm()
    for name in ("w1", "w2"):
        expected = 2 * getattr(truth, name)
        grad = model[0].experts.get_parameter(name).grad.full_tensor()
        assert (grad.view_as(expected) - expected).norm() < 1e-3 * expected.norm(), name
    others = experts_scaled(tokens(), w1, w2, *where, **how)  # by scales of their own
    assert (y - others.y).norm() > 0.1 * others.y.norm()


def test_a_skipped_step_and_what_is_not_trained_change_no_scale() -> None:
    model, step = delayed_model()
    history = model[0].experts.history
    delayed_step(model, step, 1.0, 1.0)
    step.finish()
    before = {operand: steps.clone() for operand, steps in history.recorded_amax.items()}
    with torch.no_grad():
        model(100 * tokens())
    model.eval()
    with step.micro_batch():  # for attributions, say
        model(100 * tokens()).sum().backward()
    assert not any(history.current_amax.values())
    step.drop()
    model.train()
    with step.micro_batch():
        (1e9 * model(1e3 * tokens()).sum()).backward()
    with step.micro_batch():
        (model(tokens()).sum() * torch.inf).backward()
    assert step.finish().is_skipped
    assert all(
        torch.equal(steps, before[operand]) for operand, steps in history.recorded_amax.items()
    )
    assert not any(history.current_amax.values())


@pytest.mark.parametrize(
    "memory", [FC1_AGAIN, MemoryOptions(recompute=("moe",))], ids=["expert_fc1", "moe"]
)
def test_recomputation_has_the_scales_of_its_step(memory: MemoryOptions) -> None:
    results = []
    for options in ({}, {"memory": memory}):
        model, step = delayed_model(**options)
        delayed_step(model, step, 1.0, 2.0)
        step.finish()
        found = delayed_step(model, step, 1.0, 3.0)
        history = model[0].experts.history
        grads = [p.grad.full_tensor() for p in model.parameters()]
        results.append([*found, *grads, *history.current_amax.values()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


REFUSED: list[tuple[dict[str, Any], dict[str, int], dict[str, Any], str]] = [
    ({"precision": "fp4"}, {}, {}, r"precision \('fp4'\) must be .* one of 'auto', 'blockwise'"),
    ({"expert_backend": "torch"}, {}, {}, r"expert_backend \('torch'\) must be 'auto' or 'triton'"),
    ({"expert_backend": "sequential"}, {}, {}, r"expert_backend \('sequential'\) must be 'auto'"),
    ({}, {"etp": 2}, {}, r"MoEConfig.hidden_dim / etp \(64\) must be a multiple of 128"),
    ({}, {}, {"fc1_bias": True}, r"MoEConfig.fc1_bias \(True\) must be False for experts in FP8"),
    ({}, {}, {"latent_dim": 64}, r"MoEConfig.dim \(64\) must be a multiple of 128"),
    (
        {"precision": Precision(recipe=Recipe(), overrides=(("none.such", Recipe()),))},
        {},
        {},
        r"Precision.overrides \('none.such'\) must match",
    ),
    (
        {"precision": Precision(recipe=DELAYED, roles=("shared_experts",))},
        {},
        {"shared_hidden_dim": 128},
        r"0: shared experts cannot be in FP8 \(tensorwise\), because the layer keeps no history",
    ),
    (
        {"precision": "mxfp8"},
        {},
        {"shared_hidden_dim": 48},
        r"0: shared experts cannot be in FP8 \(mxfp8\), .* \[128, 48\] is no matrix of .* 32",
    ),
]


@pytest.mark.parametrize(("options", "degrees", "changes", "message"), REFUSED)
def test_refusals(options, degrees, changes, message) -> None:
    """On a fake group: before any collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    sizes: dict[str, Any] = {"dim": 128, "hidden_dim": 128, "num_experts": 4, "top_k": 2}
    model = nn.Sequential(MoELayer(MoEConfig(**sizes | changes), device="meta"))
    with pytest.raises(ValueError, match=message) as error:
        parallelize_moe(model, meshes, **{"precision": "blockwise"} | options)
    assert "\n" not in str(error.value) and model[0].experts.recipe is None


@pytest.mark.parametrize("hidden_dim, is_fp8", [(384, True), (256, False), (576, False)])
def test_auto_is_fp8_where_that_is_faster(hidden_dim, is_fp8, caplog) -> None:
    config = replace(CONFIG, hidden_dim=hidden_dim)
    model = nn.Sequential(MoELayer(config), nn.Linear(128, 128))
    with caplog.at_level("INFO", "moecore.parallelize"):
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision="auto")
    assert (model[0].get_part("experts").recipe is not None) == is_fp8
    assert not isinstance(model[1], ProductLinear)
    why = {256: "less than 384", 576: "multiple of 128"}.get(hidden_dim)
    logged = [r.getMessage() for r in caplog.records if "precision leaves" in r.getMessage()]
    assert len(logged) == (not is_fp8) and (why is None or why in logged[0])
    model(tokens().requires_grad_()).sum().backward()


def test_a_precision_that_reaches_nothing_warns() -> None:
    for precision, model in (
        ("auto", nn.Linear(128, 128)),
        (Precision(recipe=Recipe(), roles=("mlp",)), nn.Sequential(MoELayer(CONFIG))),
    ):
        with pytest.warns(UserWarning, match="precision is not used") as seen:
            parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)
        assert seen[0].filename == __file__


def test_ranks_that_decide_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" decides is compared, not only that it was asked for."""
    compared: dict[str, Any] = {}
    monkeypatch.setattr(request_file, "check_equal", lambda items, *_, **__: compared.update(items))
    model = nn.Sequential(MoELayer(replace(CONFIG, hidden_dim=384, shared_hidden_dim=128)))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision="auto")
    assert compared["recipes"] == {"experts of 0": Recipe(), "shared_experts of 0": None}


def test_tokens_that_the_router_keeps_are_kept_once() -> None:
    """Without a dispatcher that copies rows, X in FP8 would come on top of the router's X."""

    def keeps_fp8(module: nn.Module, inp: Any) -> bool:
        dtypes = {t.dtype for t in list_saved(lambda: module(inp)) if t.shape == (24, 128)}
        assert dtypes & {torch.float8_e4m3fn, torch.float32}
        return torch.float8_e4m3fn in dtypes

    layer = plain_layer()
    assert not keeps_fp8(layer, tokens().requires_grad_())
    layer.get_part("router").weight.requires_grad_(False)
    assert keeps_fp8(layer, tokens().requires_grad_())
    latent = plain_layer(config=replace(CONFIG, dim=256, latent_dim=128))
    assert keeps_fp8(latent, torch.randn(24, 256))  # no router reads what the experts do
    ids = torch.arange(24, dtype=torch.int32)[:, None] % 4
    index = build_index(ids, torch.ones(24, 1), first_expert=0, num_local_experts=4)
    inp = ExpertInput(Rows(tokens().requires_grad_()), index, None)
    assert keeps_fp8(layer.get_part("experts"), inp)
