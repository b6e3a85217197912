import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.fsdp import FSDPOptions
from moecore.parallel.mesh import Meshes

LOW = FSDPOptions(param_dtype=torch.bfloat16)
KEPT = FSDPOptions()


@pytest.fixture
def meshes(no_group_left: None) -> Meshes:
    return build_meshes(ParallelConfig(), "cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.out = nn.Linear(32, 32, bias=False)
        self.moe = MoELayer(MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.out(self.norm(x).to(self.out.weight.dtype)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(32, 32, bias=False)
        self.empty = nn.Parameter(torch.empty(0, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        return self.last(x.to(self.last.weight.dtype)) + self.empty.sum()


def make() -> Model:
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.empty.requires_grad_(False)
    return model


def train(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(5, 32).bfloat16()).float().square().sum().backward()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == param.requires_grad, name


MIXED = [
    ("layers.1.norm", KEPT),
    ("layers.1.norm", LOW),
    ("layers.1.moe.router", KEPT),
    ("layers.1.moe.router", LOW),
    ("layers.1.moe.experts", KEPT),
    ("last", LOW),
]


@pytest.mark.parametrize(("path", "options"), MIXED)
def test_two_dtypes_train_as_they_do_in_one_process(path, options, meshes) -> None:
    model, plain = make(), make()
    for one in (model, plain):
        one.get_submodule(path).float()
    parallelize_moe(model, meshes, fsdp=options)
    for one in (model, plain):
        train(one)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for name, param in model.named_parameters():
        if name in grads:
            own, want = param.grad.full_tensor(), grads[name]
            assert own.dtype == param.dtype == want.dtype, name
            error = (own.float() - want.float()).norm() / want.float().norm()
            assert error <= 2**-6, (name, error)


def test_frozen_parameters_may_differ(meshes: Meshes) -> None:
    model = make()
    model.layers[0].norm.float().requires_grad_(False)
    model.last.float().requires_grad_(False)
    train(parallelize_moe(model, meshes, fsdp=LOW))


def two_dtypes() -> Model:
    model = make()
    experts = model.layers[0].moe.experts
    experts.w2 = nn.Parameter(experts.w2.detach().float())
    return model


def test_whole_experts_may_differ(meshes: Meshes) -> None:
    train(parallelize_moe(two_dtypes(), meshes, fsdp=LOW))


def test_an_empty_parameter(meshes: Meshes) -> None:
    model = make()
    train(parallelize_moe(make(), meshes))  # frozen, it does no harm
    model.empty.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^empty \(0, 32\) must hold values to be trained"):
        parallelize_moe(model, meshes)


def test_a_parameter_without_dims(meshes: Meshes) -> None:
    model = make()
    model.layers[0].scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"^layers.0.scale \(\) must have a dim"):
        parallelize_moe(model, meshes)
