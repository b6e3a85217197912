"""What parallelize_moe refuses, which units it makes, and models larger than a rank's memory.

Runs on fake process groups: nothing communicates, so an error here comes before any collective.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore import (
    CloneOptions,
    DenseOptions,
    DispatchOptions,
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
    plan_sharding,
)
from moecore.base.options.memory import MemoryOptions
from moecore.models import Decoder, preset
from moecore.moe.experts import Experts
from moecore.parallel.fsdp.units import find_blocks
from moecore.parallel.model.parallel_state import get_moe_state, get_parallel_state
from tests.parallel.fsdp.units import is_unit

pytestmark = pytest.mark.usefixtures("no_group_left")
CONFIG = MoEConfig(dim=32, hidden_dim=64, num_experts=8, top_k=2)
FC1_AGAIN = MemoryOptions(recompute=("expert_fc1",))


def world(size: int, rank: int = 0, **degrees: int) -> Any:
    _clear_sharding_prop_cache()  # it would give the mesh of another rank, which is equal
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return build_meshes(ParallelConfig(**degrees), "cpu")


def meta_model(config: MoEConfig = CONFIG) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32, device="meta"), MoELayer(config, device="meta"))


def parallelize(model: nn.Module, meshes: Any, **options: Any) -> nn.Module:
    """`parallelize_moe`, of which `plan_sharding` has told before what it does or refuses."""
    before = [*model.named_modules(), *((n, id(p)) for n, p in model.named_parameters())]
    planned: Any
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planned = plan_sharding(model, meshes, **options)
        except (ValueError, NotImplementedError) as error:
            planned = error
    after = [*model.named_modules(), *((n, id(p)) for n, p in model.named_parameters())]
    assert before == after
    try:
        parallelize_moe(model, meshes, **options)
    except (ValueError, NotImplementedError) as error:
        assert (type(planned), str(planned)) == (type(error), str(error))
        raise
    assert get_parallel_state(model).plan == planned
    return model


REFUSED: list[tuple[dict[str, int], dict[str, Any], str]] = [
    (dict(ep=8), dict(dispatch="local"), r"name \('local'\).*ep \* etp \(8\)"),
    (dict(ep=8), dict(dense=DenseOptions(overlap_shared=True)), r"shared \(True\).*\('cpu'\) ="),
    (dict(ep=16), {}, r"num_experts \(8\) must be divisible by ParallelConfig.ep \(16\)"),
    (dict(etp=16, ep=1), {}, r"hidden_dim / etp \(4\) must be a multiple of 8 in torch.bfloat16"),
]


def test_keeping_only_the_input_of_experts_is_a_choice() -> None:
    meshes = world(8, ep=8)
    model = parallelize(meta_model(), meshes, memory=FC1_AGAIN)
    assert all(m.recompute_fc1 for m in model.modules() if isinstance(m, Experts))
    message = r"recompute \('expert_fc1'\) must not go with expert_backend \('seq"
    with pytest.raises(ValueError, match=message):
        parallelize(meta_model(), meshes, expert_backend="sequential", memory=FC1_AGAIN)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_refuses_hooks_that_sharded_parameters_would_not_have(hook: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), MoELayer(CONFIG))
    getattr(model[1].experts.w1, hook)(lambda grad: None)
    with pytest.raises(ValueError, match=r"1.experts.w1 must have no hooks"):
        parallelize(model, world(8, ep=8))


def test_refuses_a_part_that_is_parallelized_already() -> None:
    meshes = world(8, ep=8)
    part = parallelize(meta_model(), meshes)
    with pytest.raises(ValueError, match=r"model \(Sequential\) must not be parallelized already"):
        parallelize(part, meshes)
    with pytest.raises(ValueError, match="call parallelize_moe"):
        get_moe_state(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"0 \(Sequential\) must not be parallelized already"):
        parallelize(nn.Sequential(part, MoELayer(CONFIG, device="meta")), meshes)
    other = nn.Sequential(part[1], nn.Linear(32, 32, device="meta"))
    with pytest.raises(ValueError, match=r"0.router.weight \(a DTensor over .* must be whole"):
        parallelize(other, meshes)


def test_refuses_experts_of_two_layers_and_wrapped_ones() -> None:
    meshes = world(8, ep=8)
    layers = [MoELayer(CONFIG, device="meta") for _ in range(2)]
    layers[1].experts = layers[0].experts
    with pytest.raises(ValueError, match=r"1 and 0 must not share one experts module"):
        parallelize(nn.Sequential(*layers), meshes)
    layer = MoELayer(CONFIG)
    nn.utils.parametrize.register_parametrization(layer.experts, "w1", nn.Identity())
    with pytest.raises(ValueError, match=r"must be Experts with \['w1', 'w2'\]"):
        parallelize(nn.Sequential(layer), meshes)


def test_refuses_shared_router_weights_that_would_be_rounded() -> None:
    meshes = world(8, ep=8)
    layers = [MoELayer(CONFIG, device="meta") for _ in range(2)]
    layers[1].router.weight = layers[0].router.weight
    with pytest.raises(ValueError, match=r"router of 0 must not be shared with param_dtype"):
        parallelize(nn.Sequential(*layers), meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16))


class Shared(nn.Module):
    """A model one of whose modules stands at two places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"dense": nn.Linear(32, 32), "moe": MoELayer(CONFIG)}) for _ in range(3)
        )
        for layer in self.layers:
            for param in layer["moe"].parameters():
                nn.init.normal_(param, std=0.2)
        self.norm = nn.Linear(32, 32)
        if kind == "norm":
            self.norm = self.layers[0]["dense"]
        elif kind == "router":
            self.layers[2]["moe"].router = self.layers[0]["moe"].router
        else:
            self.layers[2][kind] = self.layers[0][kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["moe"](layer["dense"](x))
        return self.norm(x)


def test_what_ran_before_is_not_counted() -> None:
    model = nn.Sequential(MoELayer(CONFIG))
    model(torch.randn(4, 32)).sum().backward()
    parallelize(model, build_meshes(ParallelConfig(), "cpu"))
    model(torch.randn(3, 32)).sum().backward()
    assert get_moe_state(model).finish_step().tokens_per_expert["0"].sum() == 3 * CONFIG.top_k


def test_layers_keep_their_names_in_checkpoint_wrappers() -> None:
    model = nn.Sequential(MoELayer(CONFIG), nn.Sequential(MoELayer(CONFIG)))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, MoELayer))
    parallelize(model, world(1))
    model(torch.randn(3, 32))
    assert list(get_moe_state(model).finish_step().tokens_per_expert) == ["0", "1.0"]


@pytest.mark.parametrize("kind", ["dense", "moe", "router", "norm"])
def test_a_module_at_two_places_stays_one(kind: str) -> None:
    plain, model = Shared(kind), Shared(kind)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    plain(x).square().sum().backward()
    parallelize(model, build_meshes(ParallelConfig(), "cpu"))
    model(x).square().sum().backward()
    names = [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_parameters()] == names
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert want.grad.any()
        torch.testing.assert_close(got.grad.to_local(), want.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(("degrees", "options", "message"), REFUSED)
def test_refuses_in_one_line(degrees, options, message) -> None:
    meshes, model = world(16, **degrees), meta_model()
    if degrees.get("etp") == 16:
        options = options | {"fsdp": FSDPOptions(param_dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=message) as error:
        parallelize(model, meshes, **options)
    assert "\n" not in str(error.value)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("degree", ["cp", "tp"])
def test_says_what_is_not_built(degree: str) -> None:
    meshes = world(4, **{degree: 2})
    with pytest.raises(NotImplementedError, match=rf"ParallelConfig.{degree} \(2\) must be 1"):
        parallelize(meta_model(), meshes)


def test_experts_ranks_are_refused_where_nothing_is_moe() -> None:
    """A model whose MoE blocks were missed would else be sharded as a dense one."""
    with pytest.raises(ValueError, match=r"ParallelConfig.ep \(2\) and etp \(1\) must be 1 for"):
        parallelize(nn.Sequential(nn.Linear(4, 4)), world(4, ep=2))


def test_options_of_experts_warn_where_nothing_is_moe() -> None:
    with pytest.warns(UserWarning, match="moe is not used: the model has no MoE layers") as seen:
        parallelize(nn.Linear(4, 4), world(2), moe={"router_jitter": 0.1})
    assert [w.filename for w in seen] == [__file__]


def test_units_of_a_dense_model() -> None:
    """Entries of its lists; a list of its own inside an entry makes no more units."""
    meshes = world(2)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    model = nn.Module()
    model.layers, model.norm = blocks, nn.LayerNorm(4)
    assert find_blocks(model) == list(blocks)
    parallelize(model, meshes)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_a_unit_per_block_with_its_experts_on_the_expert_mesh() -> None:
    meshes = world(8, dp_shard=4, tp=2, ep=4)
    model = Decoder(preset("tiny"), device="meta")
    parallelize(model, meshes)
    layers = list(model.model.layers)
    assert find_blocks(model) == layers
    units = [m for m in model.modules() if is_unit(model, m)]
    experts = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, MoELayer)]
    nested = [[b, *(e for e in experts if e in b.modules())] for b in layers]
    assert units == [model, *(unit for group in nested for unit in group), model.lm_head]
    dims = {e.w1.device_mesh.mesh_dim_names for e in experts}
    assert dims == {("edp_shard", "ep")}
    assert model.model.norm.weight.device_mesh.mesh_dim_names == ("dp_shard", "tp")


@pytest.mark.parametrize("edp_shard", [2, 8])
def test_no_rank_is_left_without_experts(edp_shard: int) -> None:
    """With fewer local experts than shards, matrices are cut along the model dim."""
    for rank in range(2 * edp_shard):
        meshes = world(2 * edp_shard, rank, ep=2, edp_shard=edp_shard)
        experts = parallelize(meta_model(), meshes)[1].experts
        sizes = {p.to_local().numel() for p in experts.parameters()}
        assert sizes == {p.numel() // (2 * edp_shard) for p in experts.parameters()}
        dist.destroy_process_group()


def test_tied_parameters_stay_one() -> None:
    meshes = build_meshes(ParallelConfig(), "cpu")
    tied = nn.Sequential(nn.Embedding(8, 32), MoELayer(CONFIG), nn.Linear(32, 8, bias=False))
    tied[2].weight = tied[0].weight
    count = len(list(tied.parameters()))
    parallelize(tied, meshes)
    assert tied[0].weight is tied[2].weight and len(list(tied.parameters())) == count
    tied(torch.arange(4)).sum().backward()
    shared = nn.Sequential(MoELayer(CONFIG), MoELayer(CONFIG))
    shared[1].experts.w1 = shared[0].experts.w1
    with pytest.raises(ValueError, match="must not be shared with another module"):
        parallelize(shared, meshes)
    assert not isinstance(shared[0].experts.w1, DTensor), "before anything is cut"


@pytest.mark.parametrize(
    "dispatch", ["alltoall", DispatchOptions(fp8=True), DispatchOptions(clones=CloneOptions())]
)
def test_a_dispatcher_without_use_warns(dispatch: Any) -> None:
    meshes = build_meshes(ParallelConfig(), "cpu")
    with pytest.warns(UserWarning, match="not used") as seen:
        parallelize(nn.Sequential(MoELayer(CONFIG)), meshes, dispatch=dispatch)
    assert seen[0].filename == __file__
