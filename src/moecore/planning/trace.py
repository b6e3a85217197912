"""Where the time of a training step goes on one GPU: kernels by category, exposed communication.

A kernel belongs to the first category whose pattern its name contains. One that waits for other
ranks is communication, whatever else it does, and so is a copy from or to host memory. Kernels of
several streams overlap; so besides the sum of each category there are three shares of the wall
time: some kernel other than communication runs ("compute"), only communication runs ("exposed"),
nothing runs ("idle").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

CATEGORIES = {
    "nccl": r"nccl",
    "nvlink dispatch": r"_spread_kernel|_reduce_kernel|limit_rows|_pack_rows",
    "nvlink clones": r"_(store|receive)_(weights|grads)_kernel",
    "copies to peers": r"Memcpy PtoP",
    "host copies": r"Memcpy (HtoD|DtoH)",
    "quantisation": r"quantise_|widen_rows|tile_tokens|gather_row_blocks|^_(amax|cast)_kernel"
    r"|block_amax|transpose_values",
    "experts": r"_gg_|cooperative|pingpong|grouped|wgrad|_mlp|activation|gather_(packed_)?rows"
    r"|sum_rows|gather_used|map_row_tiles|_finish_bwd_kernel|sum_parts",
    "routing": r"route|router|_index|expert_counts|balance|scores|weights_kernel|_counts"
    r"|add_margins|even_bias|add_entropy|^_(split|product|sum_splits)_kernel"
    r"|plan_clones|physical_ids",
    "loss": r"cross_entropy",
    "attention": r"sdpa|flash|fmha|attn|attention|_rotary_kernel",
    "dense products": r"nvjet|gemm|cutlass|cublas|splitK",
    "optimizer": r"[Aa]dam|multi_tensor|foreach|lpnorm|norm_reduce|scaled_cast|_momentum_kernel",
    "pages": r"_pages_kernel|_take_rows_kernel",
    "fsdp copies": r"split_with_sizes|chunk_cat|Memcpy|Memset|CatArray|_copy_used_kernel",
    "compiled": r"triton_",
}
COMMUNICATION = ("nccl", "nvlink dispatch", "nvlink clones", "copies to peers", "host copies")
OTHER = "other"
UNMARKED = "unmarked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One launch on the device.

    Attributes:
        name: of the function.
        start: in microseconds.
        end: likewise.
        launched: when the host asked for it; None = not known.
        phase: of the step, by the marks around its launch.
        collective: what NCCL does in it.
        group: the process group's description, such as "mesh_ep".
    """

    name: str
    start: float
    end: float
    launched: float | None = None
    phase: str = UNMARKED
    collective: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Milliseconds of one step.

    Attributes:
        wall: from the first kernel's start to the last one's end, over the steps.
        categories: name -> sum of its kernels' times, longest first.
        exposed: only communication ran.
        idle: nothing ran.
        kernels: launches.
        longest: name -> (sum of times, launches) of the kernels that took longest in all.
    """

    wall: float
    categories: dict[str, float]
    exposed: float
    idle: float
    kernels: int
    longest: dict[str, tuple[float, int]]


@cache
def category_of(name: str) -> str:
    """Return the category of a kernel."""
    found = (c for c, pattern in CATEGORIES.items() if re.search(pattern, name))
    return next(found, OTHER)


def break_down(
    kernels: Iterable[Kernel], *, num_steps: int = 1, num_longest: int = 40
) -> Breakdown:
    """Sum up kernels; see `Breakdown`.

    Example, us: a product from 0 to 3, nccl from 2 to 6, a product from 7 to 8: wall 8, exposed 3,
    idle 1.
    """
    kernels = list(kernels)
    if not kernels:
        return Breakdown(wall=0, categories={}, exposed=0, idle=0, kernels=0, longest={})
    scale = 1e-3 / num_steps
    sums: dict[str, float] = {}
    names: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        took, category = kernel.end - kernel.start, category_of(kernel.name)
        sums[category] = sums.get(category, 0.0) + took * scale
        total, count = names.get(kernel.name, (0.0, 0))
        names[kernel.name] = (total + took * scale, count + 1)
    wall = max(k.end for k in kernels) - min(k.start for k in kernels)
    busy = covered(kernels)
    computing = covered(k for k in kernels if category_of(k.name) not in COMMUNICATION)
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:num_longest]
    return Breakdown(
        wall=wall * scale,
        categories=dict(sorted(sums.items(), key=lambda item: -item[1])),
        exposed=(busy - computing) * scale,
        idle=(wall - busy) * scale,
        kernels=len(kernels) // num_steps,
        longest=dict(longest),
    )


def covered(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one of the kernels runs."""
    covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        if kernel.end > reached:
            covered += kernel.end - max(kernel.start, reached)
            reached = kernel.end
    return covered


def table(found: Breakdown) -> list[str]:
    """Return the categories as a Markdown table."""
    lines = ["| what | ms | share of the step |", "|---|---|---|"]
    rows = [*found.categories.items(), ("only communication", found.exposed), ("idle", found.idle)]
    return [*lines, *(f"| {n} | {ms:.1f} | {ms / found.wall:.1%} |" for n, ms in rows)]
