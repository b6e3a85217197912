"""Units of experts: gradients that kernels write, whatever reads the weights.

That gradients are right on every folding is part of `tests/test_parity.py`; how often units gather
and reduce is part of `test_accumulate.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moecore import FSDPOptions, MoEConfig, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.memory import MemoryOptions
from moecore.moe.backends import ExpertBackend
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout
from tests.helpers.ranks import ranks_fixture
from tests.moe.moe_cases import make_layer

CONFIG = MoEConfig(dim=32, hidden_dim=24, num_experts=6, top_k=2)
KEPT, FREED = "optim", "optim_grads_params"
WHOLE = ParallelConfig(ep=2, edp_shard=1)


# What reads its weights otherwise: backend, layout of the weights, changes of the config.
OTHERS: dict[str, tuple[ExpertBackend, ExpertLayout, dict[str, Any]]] = {
    "torch": ("torch", ExpertLayout(), {}),
    "sequential": ("sequential", ExpertLayout(), {}),
    "biases": ("torch", ExpertLayout(), {"fc1_bias": True, "fc2_bias": True}),
    "sequential, biases": ("sequential", ExpertLayout(), {"fc1_bias": True, "fc2_bias": True}),
    "separate": ("torch", ExpertLayout(gate_up="separate"), {}),
    "sequential, separate": ("sequential", ExpertLayout(gate_up="separate"), {}),
    "transposed": ("torch", ExpertLayout(transposed=True, gate_up="concatenated"), {}),
    "interleaved": ("torch", ExpertLayout(gate_up="interleaved"), {}),
    "recomputed": ("torch", ExpertLayout(), {"recompute_fc1": True}),
}


class Checkpointed(nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def batch(rank: int) -> Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(rank))


def saved_around(rank: int) -> dict[str, Any]:
    """What hooks around the layer see of the experts' H, and the gradients under checkpointing."""
    found: dict[str, Any] = {}
    for name in ("plain", "checkpointed"):
        layer = make_layer(CONFIG)
        model = nn.Sequential(Checkpointed(layer) if name == "checkpointed" else layer)
        options = FSDPOptions(param_dtype=torch.bfloat16)
        parallelize_moe(model, build_meshes(WHOLE, "cpu"), fsdp=options)
        seen: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: seen.append(t.shape) or t, lambda t: t
        ):
            y = model(batch(rank).requires_grad_())
        y.float().square().sum().backward()
        found[name] = [p.grad.to_local().clone() for p in layer.experts.parameters()]
        found[f"{name} h"] = sum(s[-1:] == (2 * CONFIG.hidden_dim,) for s in seen)
    return found


def gradients_of_another(name: str, rank: int, *, reshard: bool) -> dict[str, Tensor]:
    """Gradients of the local experts and the input, in bf16."""
    backend, layout, changes = OTHERS[name]
    parts = ("expert_fc1",) if changes.get("recompute_fc1") else ()
    memory = MemoryOptions(recompute=parts)
    config = replace(CONFIG, **{k: v for k, v in changes.items() if k != "recompute_fc1"})
    model = nn.Sequential(make_layer(config, layout=LayerLayout(expert_layout=layout)))
    options = FSDPOptions(param_dtype=torch.bfloat16, experts_strategy=FREED if reshard else KEPT)
    meshes = build_meshes(WHOLE, "cpu")
    parallelize_moe(model, meshes, expert_backend=backend, memory=memory, fsdp=options)
    x = batch(rank).requires_grad_()
    model(x).float().square().sum().backward()
    grads = {n: p.grad.to_local().clone() for n, p in model[0].experts.named_parameters()}
    return grads | {"x": x.grad}


def input_gradient_of_changed_weights(rank: int, *, reshard: bool) -> float:
    """Zero the experts between forward and backward: what backward reads, tells what was kept."""
    model = nn.Sequential(make_layer(CONFIG))
    options = FSDPOptions(param_dtype=torch.bfloat16, experts_strategy=FREED if reshard else KEPT)
    parallelize_moe(model, build_meshes(WHOLE, "cpu"), fsdp=options)
    received = []
    model[0].experts.register_forward_pre_hook(
        lambda _, args: received.append(args[0].rows.values) or args[0].rows.values.retain_grad()
    )
    y = model(batch(rank).requires_grad_())
    with torch.no_grad():
        for param in model[0].experts.parameters():
            param.to_local().data.zero_()  # unseen by the count of changes
    y.float().square().sum().backward()
    return received[0].grad.abs().max().item()


def ways_of_a_gradient(rank: int) -> dict[str, Any]:
    """Gradients of the experts by every way to ask for them; three equal micro-batches at last."""
    options = FSDPOptions(param_dtype=torch.bfloat16, experts_strategy=KEPT)
    meshes = build_meshes(WHOLE, "cpu")
    found: dict[str, Any] = {}

    def fresh() -> tuple[list[nn.Parameter], Tensor]:
        model = nn.Sequential(make_layer(CONFIG))
        parallelize_moe(model, meshes, fsdp=options)
        weights = list(model[0].experts.parameters())
        return weights, model(batch(rank).requires_grad_()).float().square().sum()

    def local(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.to_local().clone() for t in tensors]

    weights, loss = fresh()
    loss.backward()
    found["sink"] = local([w.grad for w in weights])
    found["added by autograd"] = [w.grad._version for w in weights]
    weights, loss = fresh()
    seen: list[Tensor] = []
    for w in weights:
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    loss.backward()
    found["seen"] = sorted(seen, key=lambda g: g.ndim, reverse=True)
    weights, loss = fresh()
    loss.backward(retain_graph=True)
    first = [w.grad for w in weights]
    loss.backward()
    found["twice"] = local([w.grad for w in weights])
    found["in place"] = [w.grad is g for w, g in zip(weights, first, strict=True)]
    weights, loss = fresh()
    for w in weights:  # strides that the kernel can not add to
        w.grad = DTensor.from_local(
            torch.ones_like(w.to_local()).transpose(1, 2).contiguous().transpose(1, 2),
            w.device_mesh,
            w.placements,
            run_check=False,
        )
    loss.backward()
    found["onto ones"] = [g - 1 for g in local([w.grad for w in weights])]
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[Any, Any] = {"ways": ways_of_a_gradient(rank)}
    for name in OTHERS:
        kept, cast = (gradients_of_another(name, rank, reshard=r) for r in (False, True))
        found[name] = {n: torch.equal(kept[n], cast[n]) for n in kept}
        found[name] |= {f"{n} is not 0": bool(kept[n].any()) for n in kept}
    around = saved_around(rank)
    same = all(map(torch.equal, around["plain"], around["checkpointed"]))
    found["around"] = (around["plain h"], around["checkpointed h"], same)
    found["changed"] = [
        input_gradient_of_changed_weights(rank, reshard=reshard) for reshard in (True, False)
    ]
    return found


found = ranks_fixture(2, worker)


def test_one_rank_has_all_experts_whole() -> None:
    plain, model = (nn.Sequential(make_layer(CONFIG)) for _ in range(2))
    plain(batch(0)).square().sum().backward()
    if dist.is_initialized():
        dist.destroy_process_group()
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    model(batch(0)).square().sum().backward()
    dist.destroy_process_group()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), want.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", OTHERS)
def test_kept_or_cast_again_the_gradient_has_the_same_bits(name, found) -> None:
    assert all(found[name].values()), found[name]


def test_backward_casts_again_unless_told_to_keep(found: dict[str, Any]) -> None:
    cast_again, kept = found["changed"]
    assert cast_again == 0.0 and kept > 0.0


def test_hooks_around_the_layer_decide_what_is_saved(found: dict[str, Any]) -> None:
    plain, checkpointed, same = found["around"]
    assert plain > 0, "an offload sees the experts' H"
    assert checkpointed == 0, "activation checkpointing keeps nothing of the experts"
    assert same


@pytest.mark.parametrize("way", ["seen", "onto ones"])
def test_a_sink_takes_what_autograd_would_add(way: str, found: dict[str, Any]) -> None:
    ways = found["ways"]
    for got, want in zip(ways[way], ways["sink"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 if way == "onto ones" else 0.0)
        assert want.dtype == torch.float32 and want.any()


def test_nobody_adds_where_a_sink_has_written(found: dict[str, Any]) -> None:
    assert not any(found["ways"]["added by autograd"]), "not even zeros, a pass over the gradient"


def test_a_second_backward_adds_in_place(found: dict[str, Any]) -> None:
    ways = found["ways"]
    assert all(ways["in place"])
    assert all(map(torch.equal, ways["twice"], [2 * g for g in ways["sink"]]))
