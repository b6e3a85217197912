"""Dispatch and combine over NVLink against NCCL, and the whole expert-parallel layer.

    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --out DIR

Rows `dispatch` (tokens in, ExpertInput ready) and `combine`, per number of SMs, with the baseline
`nccl`: one all_to_all_single of the expanded rows (one per token and choice, already sorted), in
the same rounds. Rows `ep_layer_fwd_bwd`: the layer with dispatcher nvlink, against the same layer
with alltoall. Before each timed call a tiny all-reduce lets all ranks start at once; of each round
the slowest rank counts. `gbps` is what one rank sends to others, each token once per rank.

`--sweep` tries how the programs are divided instead, on the first shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness, records
from benchmarks.records import Environment, Row
from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.kernels import exchange, exchange_port
from moecore.mesh import Meshes
from moecore.moe.dispatch import symmetric
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.base import ExpertPlacement
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.symmetric import Exchanges, NVLinkOptions
from moecore.moe.router import Routing

Call = Callable[[], Any]

LEAD_CYCLES = 2_000_000  # about 1 ms, in which the host queues the call
AGREEMENT = 0.02  # of the layer over nvlink with the layer over alltoall, relative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Forward + backward of one rank's tokens."""
        return 18 * self.tokens * self.top_k * self.dim * self.hidden_dim


SHAPES = {
    "dsv3": Shape(name="dsv3", tokens=4096, dim=7168, hidden_dim=2048, num_experts=256, top_k=8),
    "qwen3-30b": Shape(
        name="qwen3-30b", tokens=16384, dim=2048, hidden_dim=768, num_experts=128, top_k=8
    ),
    "tiny": Shape(name="tiny", tokens=256, dim=256, hidden_dim=128, num_experts=16, top_k=4),
}


def place_of(shape: Shape, meshes: Meshes) -> ExpertPlacement:
    assert meshes.dispatch_group is not None
    ep, etp = meshes.parallel.ep, meshes.parallel.etp
    return ExpertPlacement(
        group=meshes.dispatch_group, num_experts=shape.num_experts, ep=ep, etp=etp
    )


def nvlink_of(place: ExpertPlacement, options: NVLinkOptions) -> NVLinkDispatcher:
    return NVLinkDispatcher(place, Exchanges(place.group, ep=place.ep, options=options))


def routing_of(shape: Shape, skewed: bool) -> Routing:
    """Random choices; skewed ones prefer the first experts."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    scores_TE = torch.rand(shape.tokens, shape.num_experts, generator=generator, device="cuda")
    if skewed:
        scores_TE += torch.linspace(1, 0, shape.num_experts, device="cuda") ** 4
    weights_TK, ids_TK = scores_TE.topk(shape.top_k, dim=1)
    ids_TK = ids_TK.to(torch.int32)
    return Routing(
        expert_ids_TK=ids_TK, weights_TK=weights_TK, logits_TE=scores_TE, chosen_ids_TK=ids_TK
    )


def time_in_turn(calls: dict[str, Call], rounds: int) -> dict[str, harness.Timing]:
    """Time the calls in turn on all ranks; of each round the slowest rank counts."""
    flush = torch.ones(harness.FLUSH_BYTES // 4, device="cuda")
    token = torch.zeros(1, device="cuda")
    spans: dict[str, list[Any]] = {name: [] for name in calls}
    for i, (name, call) in itertools.product(range(-3, rounds), calls.items()):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        torch.cuda._sleep(LEAD_CYCLES)
        dist.all_reduce(token)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if i >= 0:
            spans[name].append(start.elapsed_time(stop))
    times = torch.tensor(list(spans.values()), device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return {
        name: harness.Timing(
            ms=harness.percentile(row, 0.5),
            p20=harness.percentile(row, 0.2),
            p80=harness.percentile(row, 0.8),
            repeats=rounds,
        )
        for name, row in zip(calls, times.tolist(), strict=True)
    }


def nccl_call(place: ExpertPlacement, routing: Routing, x_TD: Tensor) -> Call:
    """One all-to-all of a row per choice, with the splits known and the rows sorted before."""
    owner_N = routing.expert_ids_TK.flatten() // place.num_local
    sent_P = torch.bincount(owner_N, minlength=place.ep)
    received_P = torch.empty_like(sent_P)
    dist.all_to_all_single(received_P, sent_P, group=place.group)
    rows_ND = x_TD.repeat_interleave(routing.expert_ids_TK.shape[1], 0)
    out = x_TD.new_empty(int(received_P.sum()), x_TD.shape[1])
    splits = (received_P.tolist(), sent_P.tolist())
    return lambda: dist.all_to_all_single(out, rows_ND, *splits, group=place.group)


def bench_moves(
    shape: Shape, meshes: Meshes, skewed: bool, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield rows of dispatch and combine alone."""
    place, routing = place_of(shape, meshes), routing_of(shape, skewed)
    x_TD = torch.randn(shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Call] = {"nccl": nccl_call(place, routing, x_TD)}
    others = {"alltoall": AllToAllDispatcher(place)}
    nvlinks = {
        f"nvlink-{n}" if n else "nvlink": nvlink_of(place, NVLinkOptions(num_sms=n or None))
        for n in args.num_sms
    }
    gathered: dict[str, Tensor] = {}
    for name, dispatcher in (others | nvlinks).items():
        inp = dispatcher.dispatch(x_TD, routing)
        home_TD = dispatcher.combine(_poisoned(inp.rows_SD, inp.slots_SK), inp.plan)
        gathered[name] = home_TD.clone()
        calls[f"dispatch {name}"] = lambda d=dispatcher: d.dispatch(x_TD, routing)
        calls[f"combine {name}"] = lambda d=dispatcher, i=inp: d.combine(i.rows_SD, i.plan)
    for name, home_TD in gathered.items():
        assert torch.equal(home_TD, gathered["alltoall"]), f"{name} differs: no numbers"
    timings = time_in_turn(calls, args.rounds)
    ranks_T = _ranks_per_token(place, routing)
    sent = int(ranks_T.sum()) * shape.dim * x_TD.element_size()
    for key, timing in timings.items():
        op, _, name = key.partition(" ")
        if name.startswith("nvlink") or name == "alltoall":
            syncs = harness.count_syncs(calls[key], device=x_TD.device)
            fields = records.timing_fields(timing, baseline="nccl", ms=timings["nccl"].ms)
            yield fields | dict(op=op, backend=name, gbps=sent / timing.ms / 1e6, syncs=syncs)
    for dispatcher in nvlinks.values():
        dispatcher.exchanges.close()


def _poisoned(rows_SD: Tensor, slots_SK: Tensor) -> Tensor:
    """NaN in holes: nobody may read them."""
    return rows_SD.masked_fill((slots_SK < 0).all(1, keepdim=True), float("nan"))


def _ranks_per_token(place: ExpertPlacement, routing: Routing) -> Tensor:
    """Return how many other ranks need each token."""
    owner_TK = routing.expert_ids_TK // place.num_local
    ranks = torch.arange(place.ep, device="cuda")
    needs_TP = (owner_TK[:, :, None] == ranks).any(1)
    needs_TP[:, dist.get_rank(place.group) // place.etp] = False
    return needs_TP.sum(1) * place.etp


def make_layer(shape: Shape, meshes: Meshes) -> MoELayer:
    """Return this rank's shard of a bf16 layer with random weights; the router is the same."""
    config = MoEConfig(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
    )
    layer = MoELayer(config, device="meta", dtype=torch.bfloat16)
    layer.part("experts").shard(meshes.expert["ep", "etp"])
    layer.to_empty(device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(0, 0.02)
    layer.part("experts").set_backend("triton")
    return layer


def bench_layer(shape: Shape, meshes: Meshes, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows of the whole layer, forward and backward."""
    place, layer = place_of(shape, meshes), make_layer(shape, meshes)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    tokens = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    x_TD = torch.randn(shape.tokens, shape.dim, **tokens).requires_grad_()
    dy_TD = torch.randn(shape.tokens, shape.dim, **tokens)
    options = NVLinkOptions(capacity_factor=args.capacity_factor)
    dispatchers = {"nvlink": nvlink_of(place, options), "alltoall": AllToAllDispatcher(place)}

    def step(name: str) -> Tensor:
        layer.dispatcher = dispatchers[name]
        for tensor in (x_TD, *layer.parameters()):
            tensor.grad = None
        y_TD = layer(x_TD)
        y_TD.backward(dy_TD)
        return y_TD.detach()

    found = {name: (step(name), x_TD.grad) for name in dispatchers}
    dispatchers["nvlink"].exchanges.check()
    for ours, right in zip(found["nvlink"], found["alltoall"], strict=True):
        error = float((ours.float() - right.float()).norm() / right.float().norm())
        assert error < AGREEMENT, f"nvlink differs from alltoall by {error:.3g}: no numbers"
    del found
    calls: dict[str, Call] = {name: lambda n=name: step(n) for name in dispatchers}
    timings = time_in_turn(calls, args.rounds)
    for name, timing in timings.items():
        yield records.timing_fields(timing, baseline="alltoall", ms=timings["alltoall"].ms) | dict(
            op="ep_layer_fwd_bwd",
            backend=name,
            tflops=shape.flops / timing.ms / 1e9,
            syncs=harness.count_syncs(calls[name], device=x_TD.device),
            peak_bytes=harness.measure_peak(calls[name], device=x_TD.device),
        )
    dispatchers["nvlink"].exchanges.close()


def sweep(shape: Shape, meshes: Meshes, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows of dispatch and combine with other divisions of the programs."""
    usual = (symmetric.num_push, exchange_port.ROUNDS, exchange.NUM_WARPS, exchange.TILE_BYTES)
    tried = [(1 / 2, 8, 16), (1 / 3, 8, 16), (2 / 3, 8, 16), (1 / 2, 4, 16), (1 / 2, 16, 16)]
    for share, rounds, warps in [*tried, (1 / 2, 8, 8)]:
        symmetric.num_push = lambda programs, s=share: round(programs * s)
        exchange_port.ROUNDS = rounds
        exchange.NUM_WARPS, exchange.TILE_BYTES = warps, warps * 32 * 8 * 16
        for fields in bench_moves(shape, meshes, False, args):
            if fields["backend"] != "alltoall":
                tag = f"{fields['backend']} push {share:.2f} rounds {rounds} warps {warps}"
                yield fields | dict(backend=tag)
    symmetric.num_push, exchange_port.ROUNDS, exchange.NUM_WARPS, exchange.TILE_BYTES = usual


def report(args: argparse.Namespace, rows: Iterator[dict[str, Any]], **fields: Any) -> None:
    """Print and write what rank 0 sees; every rank has run it."""
    for row in rows:
        made = Row(**(fields | row))
        if dist.get_rank() == 0:
            print(records.describe(made), flush=True)
            records.append(args.out, args.environment, made)


def main() -> None:
    """Run all benchmarks asked for on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--shapes", nargs="+", default=["dsv3", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--num-sms", nargs="+", type=int, default=[0, 24], help="0 = all")
    parser.add_argument("--ep", nargs="+", type=int, default=[0], help="0 = all ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--capacity-factor", type=float, default=2.0, help="of the layer")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-layer", action="store_true")
    args = parser.parse_args()
    command = shlex.join(["torchrun", "-m", "benchmarks.bench_dispatch", *sys.argv[1:]])
    args.environment = dataclasses.replace(Environment.here(), command=command)
    build_meshes(ParallelConfig(), "cuda")  # starts the process group
    for ep, name in itertools.product(args.ep, args.shapes):
        shape, meshes = (
            SHAPES[name],
            build_meshes(ParallelConfig(ep=ep or dist.get_world_size()), "cuda"),
        )
        label = f"{name}-ep{meshes.parallel.ep}"
        if args.sweep:
            report(args, sweep(shape, meshes, args), shape=label, routing="even")
            break
        with torch.no_grad():
            for routing in ("even", "skewed"):
                rows = bench_moves(shape, meshes, routing == "skewed", args)
                report(args, rows, shape=label, routing=routing)
        if not args.no_layer:
            report(args, bench_layer(shape, meshes, args), shape=label, routing="learned")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
