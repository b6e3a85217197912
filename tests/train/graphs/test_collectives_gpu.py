"""Graphs of attention contain its collectives, and replays compute what eager calls do.

The group has one rank, over which NCCL runs each collective of tp and cp. Groups of two ranks are
in test_graphed_blocks_gpu.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.base.params import shard_parameter
from moecore.models import Decoder, preset
from moecore.models.tensor_parallel import TensorParallel
from moecore.train.graphs.graphed_part import WARM_UP, GraphedPart
from moecore.train.graphs.regions import graph_blocks
from tests.helpers.ranks import run_ranks
from tests.train.graphs.graph_fakes import fake_graphs

ROWS, LENGTH, CALLS = 2, 128, WARM_UP + 4
WAYS = ("tp", "cp by all-gathers", "cp by all-to-alls")
PACKED = "cp, packed"  # a fake capture would compute with borders that are not there yet


def make_model(name: str, way: str, device: torch.device) -> Decoder:
    """Return a decoder whose first block's attention communicates over the default group."""
    group, dtype = dist.group.WORLD, torch.bfloat16 if device.type == "cuda" else torch.float32
    assert group is not None
    model = Decoder(replace(preset(name), num_layers=2, max_seq_len=LENGTH), dtype=dtype)
    model.to(device).init_weights(0)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("tp",))
    for module in model.layers[0].modules():
        if way == "tp" and hasattr(module, "tp"):
            module.tp = TensorParallel(group, 0, 1)
        for param, _ in list(module.named_parameters(recurse=False)):
            shard_parameter(module, param, mesh, (Replicate(),))
    if way != "tp":
        model.model.cp = ContextParallel(group, a2a=group if way == "cp by all-to-alls" else None)
    return model


def run_call(model: Decoder, call: int, way: str, device: torch.device) -> list[Tensor]:
    """Return the output of the first block's attention, and all gradients."""
    g = torch.Generator().manual_seed(call)
    documents: dict[str, Any] = {}
    if way == PACKED:  # the borders differ from call to call
        first, second = (2 * torch.randint(1, LENGTH // 2, (2,), generator=g)).tolist()
        borders = torch.tensor([0, first, LENGTH, LENGTH + second, 2 * LENGTH])
        documents = dict(cu_seqlens=borders.to(device), max_seqlen=LENGTH)
    layer, tokens_BT = model.layers[0], torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device)
    sequence = model.model.build_sequence(tokens_BT, **documents)
    x = torch.randn(ROWS, LENGTH, model.config.dim, generator=g).to(device, layer_dtype(model))
    x.requires_grad_()
    model.zero_grad()
    y = (layer.attend if layer.feedforward == "moe" else layer)(x, sequence)
    (y.float() * torch.randn(y.shape, generator=g).to(device)).sum().backward()
    params = [p for p in layer.parameters() if p.grad is not None]
    assert params and all(isinstance(p.grad, DTensor) for p in params)
    return [y.detach().clone(), x.grad, *(p.grad.to_local().clone() for p in params)]  # type: ignore


def layer_dtype(model: Decoder) -> torch.dtype:
    return next(model.parameters()).dtype


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    """Return {case: (graphs, largest relative differences of each call)}."""
    found = {}
    for name in ("tiny", "tiny-deepseek-v3"):
        for way in (*WAYS, *[PACKED] * (device.type == "cuda")):
            eager = make_model(name, way, device)
            graphed = make_model(name, way, device)
            graph_blocks({"layers.0": graphed.layers[0]}, ("attention",), dist.group.WORLD)
            differences = []
            with fake_graphs() if device.type == "cpu" else nullcontext():
                for call in range(CALLS):
                    pair = (run_call(m, call, way, device) for m in (eager, graphed))
                    both = zip(*pair, strict=True)
                    differences.append(max(float((a - b).norm() / a.norm()) for a, b in both))
            layer = graphed.layers[0]
            parts = [p for p in vars(layer).values() if isinstance(p, GraphedPart)]
            found[f"{name}, {way}"] = sum(len(p._pairs) for p in parts), differences
            for part in parts:
                part.drop_graphs()
    return found


def check(found: dict[str, Any], bound: float) -> None:
    for case, (graphs, differences) in found.items():
        assert graphs == 1 and max(differences) <= bound, (case, graphs, differences)


def test_parts_over_one_rank_are_captured() -> None:
    check(run_ranks(1, worker), 0)


@pytest.mark.gpu
def test_graphs_with_collectives_of_nccl() -> None:
    check(run_ranks(1, worker, device_type="cuda"), 1e-2)
