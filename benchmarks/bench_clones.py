"""A layer with hot experts over many ranks, with and without clones, computed in parts on one GPU.

    python -m benchmarks.bench_clones --shapes qwen3-30b --ranks 8 --results

The routers of all ranks prefer the same experts; the hottest has five times the mean load. A layer
takes as long as its busiest rank: this GPU computes the rows of that rank, forward and backward,
with its number of experts and clones. To variants with clones are added the measured kernels of
their plan, and the transfer of their weights and fp32 gradients at `--link-gbps`, without overlap.
The exchange of tokens is the same in all variants and left out. `even` routes the same number of
rows evenly.

Letters: P ranks, E experts, e experts per rank, c clones per rank at most, T tokens per rank.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import FULL, SMOKE, time_variants
from benchmarks.layers import compute_skewed_bias
from benchmarks.records import RESULTS, append_rows, results_path
from benchmarks.shapes import SHAPES, Shape
from moecore.kernels.routing.clones import ClonePlan, assign_physical_ids, plan_clones
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.experts import Experts
from moecore.moe.forced_routing import make_even_ids
from moecore.moe.records import ExpertInput


@dataclass(frozen=True, kw_only=True, slots=True)
class BusiestRank:
    """Load of the rank with the most rows.

    Attributes:
        ids_SK: int32: its local expert ids of its source rows; -1 = an expert of another rank.
        num_experts: number of its experts and clones.
        over_mean: its rows over the mean of all ranks.
    """

    ids_SK: Tensor
    num_experts: int
    over_mean: float


def main() -> None:
    """Print and record a row per shape and number of clones."""
    args = _parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.shapes:
        rows = measure(SHAPES[name], args, device)
        print("\n".join(json.dumps(row) for row in rows), flush=True)
        if args.results is not None:
            append_rows(args.results, "benchmarks.bench_clones", rows)


def measure(shape: Shape, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of one shape: without clones, and with each number of clones."""
    P, e = args.ranks, shape.num_experts // args.ranks
    chosen = draw_ids(shape, P, args.tokens, args.skew, device)
    counts_PE = torch.stack([torch.bincount(ids.flatten(), minlength=P * e) for ids in chosen])
    found = {
        "even": find_busiest([make_even_ids(len(i), P * e, i.shape[1], device) for i in chosen], e)
    }
    found["no clones"] = find_busiest(chosen, e)
    plans: dict[str, ClonePlan] = {}
    for c in args.clones:
        make = partial(plan_clones, num_ranks=P, clones_per_rank=c, min_share=args.least)
        name, plan = f"{c} clones", make(counts_PE.sum(0, dtype=torch.int32))
        moved = [
            assign_physical_ids(ids, before, plan, num_local_experts=e, clones_per_rank=c)
            for ids, before in zip(chosen, _before(counts_PE), strict=True)
        ]
        found[name], plans[name] = find_busiest(moved, e + c), plan
    effort = SMOKE if device.type == "cpu" else FULL
    calls = {name: _make_call(shape, one, device) for name, one in found.items()}
    ms = {name: t.ms for name, t in time_variants(calls, device=device, effort=effort).items()}
    loads_E = counts_PE.sum(0, dtype=torch.int32)
    planned = {
        name: partial(_plan_clones, loads_E, chosen[0], P, len(plan.experts_N) // P, args.least)
        for name, plan in plans.items()
    }
    plan_ms = time_variants(planned, device=device, effort=effort, lead_ms=2.0)  # not its launches
    return [
        _make_row(shape, args, name, one, ms, plans.get(name), plan_ms.get(name))
        for name, one in found.items()
    ]


def draw_ids(shape: Shape, P: int, T: int, skew: float, device: torch.device) -> list[Tensor]:
    """Return the expert ids of each rank, int32 [T, K], chosen by one skewed router."""
    torch.manual_seed(0)
    E = shape.num_experts
    logits_NE = torch.randn(P * T, E, device=device)
    biased = logits_NE + compute_skewed_bias(logits_NE, shape.top_k, min(skew, shape.skew))
    return list(biased.topk(shape.top_k).indices.int().split(T))


def find_busiest(ids: list[Tensor], num_local: int) -> BusiestRank:
    """Return the load of the busiest rank, given the physical ids of all ranks."""
    blocks = torch.cat([torch.div(i, num_local, rounding_mode="floor").flatten() for i in ids])
    rows_P = torch.bincount(blocks)
    rank = int(rows_P.argmax())
    ids_NK = torch.cat(ids) - rank * num_local
    is_here_NK = (ids_NK >= 0) & (ids_NK < num_local)
    ids_SK = ids_NK.where(is_here_NK, -1)[is_here_NK.any(1)]
    return BusiestRank(
        ids_SK=ids_SK,
        num_experts=num_local,
        over_mean=float(rows_P.max() / (rows_P.sum() / len(ids))),
    )


def _before(counts_PE: Tensor) -> Tensor:
    return (counts_PE.cumsum(0) - counts_PE).int()


def _make_call(shape: Shape, one: BusiestRank, device: torch.device) -> Any:
    """Return a call that runs forward and backward of a rank's experts."""
    torch.manual_seed(0)
    config = shape.config("learned")
    sizes = {"num_experts": one.num_experts, "top_k": min(shape.top_k, one.num_experts)}
    values = {name: getattr(config, name) for name in ("dim", "hidden_dim")}
    experts = Experts(type(config)(**values, **sizes), device=device, dtype=torch.bfloat16)
    experts.init_weights(std=0.02, key="", seed=0)
    S = one.ids_SK.shape[0]
    x_SD = torch.randn(S, shape.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights_SK = torch.rand(one.ids_SK.shape, device=device)
    dy_SD = torch.randn_like(x_SD)
    length = int((one.ids_SK >= 0).sum())

    def call() -> None:
        index = build_index(
            one.ids_SK,
            weights_SK,
            first_expert=0,
            num_local_experts=one.num_experts,
            max_pairs=length,
        )
        y_SD = experts(ExpertInput(Rows(x_SD), index, None))
        y_SD.backward(dy_SD)
        x_SD.grad = None
        experts.zero_grad()

    return call


def _plan_clones(loads_E: Tensor, ids_TK: Tensor, P: int, c: int, least: float) -> None:
    plan = plan_clones(loads_E, num_ranks=P, clones_per_rank=c, min_share=least)
    sizes = dict(num_local_experts=len(loads_E) // P, clones_per_rank=c)
    assign_physical_ids(ids_TK, torch.zeros_like(loads_E), plan, **sizes)


def _make_row(
    shape: Shape,
    args: argparse.Namespace,
    name: str,
    one: BusiestRank,
    ms: dict[str, float],
    plan: ClonePlan | None,
    plan_time: Any,
) -> dict[str, Any]:
    """Return a record: times in ms, and the layer's time over that with even loads."""
    number = most = 0
    if plan is not None:
        taken_PC = (plan.experts_N >= 0).view(args.ranks, -1)
        number, most = int(taken_PC.sum()), int(taken_PC.sum(1).max())
    bytes_of_clone = 3 * shape.dim * shape.hidden_dim * (2 + 4)  # bf16 weights, fp32 gradients
    link_ms = most * bytes_of_clone / (args.link_gbps * 1e6)
    plan_ms = 0.0 if plan_time is None else plan_time.ms
    total = ms[name] + plan_ms + link_ms
    return {
        "shape": shape.name,
        "ranks": args.ranks,
        "tokens": args.tokens,
        "variant": name,
        "find_busiest over mean": round(one.over_mean, 4),
        "clones": number,
        "experts ms": round(ms[name], 4),
        "plan ms": round(plan_ms, 4),
        "link ms": round(link_ms, 4),
        "over even": round(total / ms["even"], 4),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-30b"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--clones", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--least", type=float, default=0.05)
    parser.add_argument("--skew", type=float, default=5.0, help="hottest expert over the mean")
    parser.add_argument("--link-gbps", type=float, default=200.0, help="1e9 bytes per second")
    parser.add_argument("--results", type=results_path, nargs="?", const=str(RESULTS / "skew"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
