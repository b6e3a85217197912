"""Host time of one layer's forward and backward, by part, and counts of the host's work.

    python -m benchmarks.bench_layer_host --shape small --shape fine-7b

`warm` is a call in a sequence of calls without a wait; `cold` is the first call after a wait for
the GPU, during which the host's caches lose their content. Parts are of a warm call: the time of a
part without its children, and of each autograd node in backward. Counts are of the same layer on
the meta device, where the host's code runs and the names of kernels are recorded. A machine without
a GPU prints only the counts and the Python calls.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import RESULTS, append_rows, results_path
from benchmarks.shapes import SHAPES, Shape
from moecore import MoELayer
from moecore.base.torch_private import DispatchMode
from moecore.kernels.meta import record_launches_on_meta
from moecore.train.memory.on_meta import OnMeta

SMALL = Shape(name="small", tokens=256, dim=2048, hidden_dim=768, num_experts=128, top_k=8)
KNOWN = {"small": SMALL} | SHAPES
CALLS = 8  # behind each other: what they queue fits, so that the host never waits
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "zeros", "full_like")


class LayerStep:
    """A layer, its tokens, and the gradient of its output."""

    def __init__(self, shape: Shape, device: str) -> None:
        how: dict[str, Any] = dict(device=device, dtype=torch.bfloat16)
        self.layer = MoELayer(shape.config("learned"), **how).train()
        if device != "meta":
            self.layer.init_weights(std=0.02, key="layer", seed=0)
        self.x_TD = torch.randn(shape.tokens, shape.dim, **how).requires_grad_()
        self.dy_TD = torch.randn(shape.tokens, shape.dim, **how)

    def step(self) -> None:
        """Run forward and backward."""
        self.layer(self.x_TD).backward(self.dy_TD)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients."""
        self.x_TD.grad = None
        for param in self.layer.parameters():
            param.grad = None


def main() -> None:
    """Print a row and the parts of each shape."""
    args = _parse_arguments()
    rows = []
    for name in args.shape or ["small", "fine-7b"]:
        shape = KNOWN[name]
        row: dict[str, Any] = {"op": "layer_host", "shape": name, "tokens": shape.tokens}
        row |= count_host_work(shape)
        if torch.cuda.is_available():
            case = LayerStep(shape, "cuda")
            row |= measure_times(case, args.rounds)
            row |= {f"us_{part}": us for part, us in measure_parts(case, args.rounds).items()}
        rows.append(row)
        print(json.dumps(row))
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_layer_host", rows)


def measure_times(case: LayerStep, rounds: int) -> dict[str, float]:
    """Return the median microseconds of a warm call and of a cold call."""
    cold, warm = [], []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        stamps = [time.perf_counter()]
        for _ in range(CALLS):
            case.step()
            stamps.append(time.perf_counter())
        each = [end - start for start, end in itertools.pairwise(stamps)]
        if number >= 3:
            cold.append(each[0])
            warm += each[2:]
    return {"us_warm": statistics.median(warm) * 1e6, "us_cold": statistics.median(cold) * 1e6}


def measure_parts(case: LayerStep, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each part of a warm call."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    layer = case.layer
    owners = {
        "router": (layer.get_part("router"), "forward"),
        "dispatch": (layer.dispatcher, "dispatch"),
        "experts": (layer.get_part("experts"), "forward"),
        "combine": (layer.dispatcher, "combine"),
        "balance": (layer.tracker, "attach"),
    }
    for part, (owner, name) in owners.items():
        setattr(owner, name, partial(_run_timed, found[part], getattr(owner, name)))
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(3):
            start = time.perf_counter()
            y_TD = layer(case.x_TD)
            found["forward"].append(time.perf_counter() - start)
            for node in list_nodes(y_TD):
                _time_node(node, found[f"backward_{node.name()}"])
            start = time.perf_counter()
            y_TD.backward(case.dy_TD)
            found["backward"].append(time.perf_counter() - start)
            case.drop_gradients()
    for owner, name in owners.values():
        delattr(owner, name)
    return {part: statistics.median(seconds) * 1e6 for part, seconds in found.items()}


def count_host_work(shape: Shape) -> dict[str, Any]:
    """Return numbers of kernels, allocations, nodes and Python calls per forward and backward."""
    kernels, allocated, case = Counter[str](), _AllocationCounter(), LayerStep(shape, "meta")
    descriptors = 0

    def launched(name: str, args: Sequence[Any]) -> None:
        nonlocal descriptors
        kernels[name] += 1
        descriptors += sum(hasattr(arg, "block_shape") for arg in args)

    with record_launches_on_meta(launched), OnMeta("cuda"):
        case.step()
        kernels.clear()
        descriptors = 0
        with allocated:
            y_TD = case.layer(case.x_TD)
            num_nodes = len(list_nodes(y_TD))
            y_TD.backward(case.dy_TD)
        case.drop_gradients()
        found = {
            "kernels": sum(kernels.values()),
            "descriptors": descriptors,
            "allocations": allocated.count,
            "nodes": num_nodes,
            "by_kernel": dict(kernels),
        }
        profile = cProfile.Profile()
        profile.runcall(case.step)
    # Of operations on meta torch runs much Python that none on a GPU runs: moecore's own count.
    calls: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = [number for (file, *_), (number, *_) in calls.items() if "/moecore/" in file]
    return found | {"python_calls": sum(own)}


def list_nodes(y: Tensor) -> list[Any]:
    """Return the autograd nodes that lead to a tensor."""
    found: dict[Any, None] = {}
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [behind for behind, _ in node.next_functions]
    return list(found)


class _AllocationCounter(DispatchMode):
    """Dispatch mode that counts operations that allocate."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ALLOCATIONS
        return func(*args, **kwargs or {})


def _run_timed(
    seconds: list[float], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function and append its seconds to a list."""
    start = time.perf_counter()
    try:
        return function(*args, **kwargs)
    finally:
        seconds.append(time.perf_counter() - start)


def _time_node(node: Any, seconds: list[float]) -> None:
    started: list[float] = []
    node.register_prehook(lambda _: started.append(time.perf_counter()))
    node.register_hook(lambda *_: seconds.append(time.perf_counter() - started.pop()))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=sorted(KNOWN))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--results", type=results_path, nargs="?", const=str(RESULTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
