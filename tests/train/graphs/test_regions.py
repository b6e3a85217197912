"""Compiled blocks train like eager ones, on ranks under FSDP2 and ep, and share their code."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from moecore import (
    ContextOptions,
    DenseOptions,
    MemoryOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
)
from moecore.base.saved_tensors import use_packer
from moecore.models import Decoder, DecoderConfig, preset
from moecore.train.graphs.graphed_part import GraphedPart
from moecore.train.graphs.regions import _can_replay, compile_blocks, graph_blocks
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture

WORLD, STEPS = 2, 2
# A dense block and two with MoE. Inductor compiles a file of C++ between two products, of which
# latent attention has most: it is compiled over cp, without C++.
GROUPED = replace(preset("tiny"), num_layers=3, dense_layers=(0,), mlp_hidden_dim=48)
LATENT = replace(preset("tiny-deepseek-v3"), num_layers=3)
BETWEEN = ("_attend_over_ranks", "LocalTokens.gather")  # functions of cp that run uncompiled


class OtherBlock(nn.Module):
    """A block that says nothing of its regions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.moe = MoELayer(MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.moe(self.norm(x)))


def test_graphs_replace_a_compiled_region() -> None:
    """torch 2.11 compiles a bound method into a `functools.partial`, which has no `__self__`."""
    block = Decoder(preset("tiny"), device="meta").layers[0]
    (region,) = block.compile_regions
    setattr(block, region, partial(getattr(block, region)))
    graph_blocks({"layers.0": block})
    assert isinstance(getattr(block, region), GraphedPart)


def test_linear_attention_is_in_no_cuda_graph() -> None:
    """A package reads the borders of documents on the host."""
    layers = Decoder(preset("tiny-qwen3-next"), device="meta").layers
    assert [_can_replay(layer.modules()) for layer in layers] == [False, False, False, True]
    layers = Decoder(preset("tiny-nemotron-h"), device="meta").layers
    assert [_can_replay(layer.modules()) for layer in layers] == [False, *[True] * 3, False, True]
    regions = [layer.compile_regions for layer in layers]
    assert regions == [("forward",), (), *[("forward",)] * 3, ()]


class Trained(NamedTuple):
    losses: list[float]
    params: list[Tensor]
    kept: int  # bytes, after the first forward


def train(config: DecoderConfig, compile: bool, **over_cp: Any) -> Trained:
    model, meshes = Decoder(config, device="meta"), build_meshes(ParallelConfig(ep=2), "cpu")
    options = dict(dense=DenseOptions(compile=compile), memory=MemoryOptions(recompute="gemm_last"))
    parallelize_moe(model, meshes, **options, **over_cp)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = on_parts(torch.optim.SGD)(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    losses = []
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    for step in range(STEPS):
        tokens_BT = torch.randint(0, config.vocab_size, (2, 24), generator=generator)
        with use_packer(count) if step == 0 else nullcontext():
            loss = model(tokens_BT, tokens_BT, cp=1 + step if over_cp else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [p.full_tensor() for p in model.parameters()], sum(kept.values()))


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"eager": train(GROUPED, False)}
    torch._dynamo.utils.counters.clear()
    found["compiled"] = train(GROUPED, True)
    counters = torch._dynamo.utils.counters
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())
    over_cp = dict(context=ContextOptions(dynamic=True), loss="sum")
    torch._dynamo.utils.counters.clear()
    # Where graphs begin and end is the question, not what Inductor makes of them: that is above.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        found["over cp"] = train(LATENT, False, **over_cp), train(LATENT, True, **over_cp)
    found["graphs over cp"] = counters["stats"]["unique_graphs"]
    found["breaks over cp"] = list(counters["graph_break"])
    return found


# At night: one process compiles the same in tests/train/memory/test_compiled.py, and ranks do in
# tests/integrations.
found = ranks_fixture(WORLD, worker)


@pytest.mark.slow
@pytest.mark.nightly
def test_losses_and_parameters_equal_those_of_eager(found: dict[str, Any]) -> None:
    """Memory options reach Inductor, and blocks of one kind share their code."""
    check_equal(found["eager"], found["compiled"])
    assert 0 < found["compiled"].kept <= found["eager"].kept
    assert found["graphs"] == 2, "dense blocks, and those with MoE"
    assert found["breaks"] == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_attention_over_ranks_runs_between_what_is_compiled(found: dict[str, Any]) -> None:
    check_equal(*found["over cp"])
    assert found["graphs over cp"] > found["graphs"], "attention cuts a block in two"
    assert found["breaks over cp"]
    for reason in found["breaks over cp"]:
        assert any(name in reason for name in BETWEEN), reason


def check_equal(eager: Trained, compiled: Trained) -> None:
    losses, params, _ = eager
    compiled_losses, compiled_params, _ = compiled
    assert losses[0] != losses[1] and compiled_losses == pytest.approx(losses, rel=1e-5)
    for want, got in zip(params, compiled_params, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_any_block_is_compiled_around_its_moe_layer() -> None:
    torch.manual_seed(0)
    block, x = OtherBlock(), torch.randn(2, 6, 16)
    want = block(x)
    names = [name for name, _ in block.named_parameters()]
    torch._dynamo.utils.counters.clear()
    compile_blocks([block, block.moe], dynamic=False)
    got = block(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert [name for name, _ in block.named_parameters()] == names
