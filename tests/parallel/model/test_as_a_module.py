import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.io import load, save
from moecore.parallel import init_modules, register_forward_method
from tests.helpers.ranks import run_ranks
from tests.moe.moe_cases import BASE, make_layer

WORLD = 2
LAYOUTS = {
    "ep": (ParallelConfig(ep=2), "optim_grads_params"),
    "etp": (ParallelConfig(ep=1, etp=2), "optim_grads_params"),
    "cut": (ParallelConfig(ep=1), "optim_grads_params"),
    "optim": (ParallelConfig(ep=1), "optim"),
    "copies": (ParallelConfig(dp_replicate=2, edp_replicate=2), "no_shard"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, BASE.dim)
        self.layers = nn.ModuleList([make_layer(BASE), nn.Linear(BASE.dim, BASE.dim)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(ids).square().mean()

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(layout: str | None) -> Any:
    """Return a plain model (None), or the same parallelized."""
    if layout is None:
        return Model()
    parallel, strategy = LAYOUTS[layout]
    fsdp = FSDPOptions(dense_strategy=strategy, embedding_strategy=strategy)
    return parallelize_moe(Model(), build_meshes(parallel, "cpu"), fsdp=fsdp)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def hooked(layout: str | None) -> dict[str, Any]:
    """Gradients of two backwards where hooks mask an expert, double and look on."""
    model, seen = make(layout), []
    w1, norm = model.layers[0].experts.w1, model.layers[1].bias
    mask = torch.ones(BASE.num_experts, 1, 1, 1)
    mask[1] = 0
    if isinstance(w1, DTensor):
        mask = distribute_tensor(mask.expand(w1.shape), w1.device_mesh, w1.placements)
    w1.register_hook(lambda grad: grad * mask)
    w1.register_hook(lambda grad: grad * 2)
    norm.register_hook(lambda grad: seen.append(whole(grad)))
    removed = model.embed.weight.register_hook(torch.zeros_like)
    removed.remove()
    for seed in range(2):
        model(batch(seed)).backward()
    return gradients(model) | {f"seen {i}": grad for i, grad in enumerate(seen)}


def averaged(layout: str | None, path: str) -> dict[str, Any]:
    """An exponential mean over two steps: its weights, saved, and the loss of its weights."""
    model = make(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    mean.update_parameters(model)
    for seed in range(2):
        model(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
    weights = {name: whole(p) for name, p in mean.module.named_parameters()}
    if layout is None:
        return weights | {"loss": mean(batch()).detach()}
    with pytest.raises(ValueError, match=r"^forward of Model \(a copy of a parallelized model\)"):
        mean(batch())
    saved = save(path, 2, mean.module, None)
    trained = copy.deepcopy(model)
    assert all(map(torch.equal, parts(copy.copy(model)), parts(model)))
    for held in (model, mean.module, {"model": model}):
        message = r"^a parallelized model must not be pickled, because"
        with pytest.raises(ValueError, match=message) as e:
            torch.save(held, f"{path}.pt")
        assert "\n" not in str(e.value)
    load(saved, model)
    loss = model(batch()).detach()
    model.load_state_dict(trained.state_dict())
    assert all(map(torch.equal, parts(model), parts(trained)))
    model(batch()).backward()
    optimizer.step()  # the copy is one of its own
    assert not any(map(torch.equal, parts(model), parts(trained)))
    return weights | {"loss": loss}


def parts(model: nn.Module) -> list[Tensor]:
    return [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]


def loaded(layout: str) -> dict[str, Tensor]:
    """What a model holds after a plain state dict of other weights, and a part's after its own."""
    model, others = make(layout), Model()
    for param in others.parameters():
        param.data.mul_(-3)
    state = others.state_dict()
    kept = dict(state)
    assert not any(model.load_state_dict(state))
    assert all(value is kept[name] for name, value in state.items())
    found = {name: whole(p) for name, p in model.named_parameters()}
    model.layers[0].load_state_dict(Model().layers[0].state_dict())
    found["router"] = whole(model.layers[0].router.weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for embed\.weight"):
        model.load_state_dict(state | {"embed.weight": torch.ones(3, BASE.dim)})
    return found


def encoded(layout: str | None) -> dict[str, Tensor]:
    """What a method other than forward returns and trains, alone and beside forward."""
    model = make(layout)
    if layout is not None:
        register_forward_method(model, "encode")
        with pytest.raises(ValueError, match=r"^name \('decode'\) must be a method of model"):
            register_forward_method(model, "decode")
    y = model.encode(ids=batch())
    (y.sum() + model(batch(1))).backward()
    found = gradients(model) | {"y": y.detach()}
    with torch.no_grad():
        return found | {"again": model.encode(batch(2))}


class Halved(nn.Linear):
    """Fills itself as its parent does, and its norm with twos."""

    def __init__(self) -> None:
        super().__init__(BASE.dim, BASE.dim)
        self.norm = nn.LayerNorm(BASE.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(0.5)
            if hasattr(self, "norm"):
                self.norm.weight.mul_(2)


class WithNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.halved = Halved()
        self.attention = nn.MultiheadAttention(BASE.dim, 2)


def filled(layout: str | None, seed: int = 0) -> dict[str, Tensor]:
    """A model on meta, filled by its modules, and where torch's generator is then."""
    with torch.device("meta"):
        model: nn.Module = WithNorm()
    if layout is not None:
        parallel, strategy = LAYOUTS[layout]
        fsdp: Any = FSDPOptions(dense_strategy=strategy, embedding_strategy=strategy)
        parallelize_moe(model, build_meshes(parallel, "cpu"), fsdp=fsdp)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    init_modules(model, seed=seed)
    after = torch.rand(1)
    return {n: whole(p) for n, p in model.named_parameters()} | {"after": after}


def worker(rank: int, device: torch.device, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        found[f"hooked {layout}"] = hooked(layout)
        found[f"averaged {layout}"] = averaged(layout, f"{path}/{layout}")
        found[f"filled {layout}"] = filled(layout)
        found[f"loaded {layout}"] = loaded(layout)
        found[f"encoded {layout}"] = encoded(layout)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = str(tmp_path_factory.mktemp("averaged"))
    result: dict[str, Any] = run_ranks(WORLD, worker, path)
    return result


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, atol=1e-5 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_of_a_parameter_get_its_gradient_and_change_it(layout, found) -> None:
    expected = hooked(None)
    assert expected["layers.0.experts.w1"][1].abs().max() == 0
    assert {"seen 0", "seen 1"} < expected.keys()
    assert_close(found[f"hooked {layout}"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_averaged_model_averages_and_is_saved(layout: str, found: dict[str, Any]) -> None:
    assert_close(found[f"averaged {layout}"], averaged(None, ""))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_method_runs_as_forward_does(layout: str, found: dict[str, Any]) -> None:
    assert_close(found[f"encoded {layout}"], encoded(None))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_dict_of_whole_tensors_is_loaded(layout: str, found: dict[str, Any]) -> None:
    expected = {name: -3 * p.detach() for name, p in Model().named_parameters()}
    expected["router"] = Model().layers[0].router.weight.detach()
    assert_close(found[f"loaded {layout}"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_fill_themselves_the_same_on_every_layout(layout, found) -> None:
    expected = filled(None)
    assert expected.keys() == found[f"filled {layout}"].keys()
    for name, tensor in expected.items():
        assert torch.equal(found[f"filled {layout}"][name], tensor), name


def test_modules_fill_themselves_as_torch_does() -> None:
    found, others = filled(None), filled(None, seed=1)
    assert (found["halved.norm.weight"] == 2).all() and (found["halved.norm.bias"] == 0).all()
    assert float(found["halved.weight"].abs().max()) == pytest.approx(BASE.dim**-0.5 / 2, rel=0.02)
    assert (found["attention.out_proj.bias"] == 0).all()  # MultiheadAttention's own, after Linear's
    bound = BASE.dim**-0.5  # of nn.Linear
    linear = found["layers.1.weight"]
    assert float(linear.abs().max()) == pytest.approx(bound, rel=0.02)
    assert float(linear.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert float(found["embed.weight"].std()) == pytest.approx(1, rel=0.2)
    assert float(found["layers.0.experts.w1"].std()) == pytest.approx(0.02, rel=0.05)
    torch.manual_seed(3)
    assert torch.equal(found["after"], torch.rand(1))
    assert not torch.equal(linear, others["layers.1.weight"])
    rows = linear.unbind()
    assert not any(torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_a_module_that_cannot_fill_itself_is_named_before_any_is_filled() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(2))
    before = model.embed.weight.detach().clone()
    with pytest.raises(ValueError, match=r"^model \(Model\) must have reset_parameters\(\) to be"):
        init_modules(model)
    assert torch.equal(model.embed.weight, before)
