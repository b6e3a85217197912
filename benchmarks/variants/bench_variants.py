"""Times candidate kernels beside what src uses and torch's product. Nothing is recorded.

    python -m benchmarks.variants.bench_variants qwen3-30b fine-7b

A candidate that is wrong says so and gives no time. Interleaved medians in ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from benchmarks.shapes import SHAPES
from benchmarks.variants.grouped_gemm_gluon import pingpong, tile_map
from moecore.kernels.activation import ActivationOptions, weighted_activation_bwd
from moecore.kernels.grouped_gemm import grouped_gemm, grouped_gemm_activation
from moecore.kernels.index import build_index

# BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, stages, registers of a consumer's and a producer's thread
CONFIGS = [
    (128, 128, 64, 8, 4, 216, 56),
    (128, 128, 64, 8, 5, 216, 56),
    (128, 256, 64, 8, 3, 216, 56),
    (128, 256, 64, 8, 4, 216, 56),
]
SWIGLU = ActivationOptions(kind="swiglu")


def interleaved(runs: dict[str, Callable[[], object]], repeats: int = 8) -> dict[str, float]:
    times: dict[str, list] = {name: [] for name in runs}
    for _ in range(2):
        for run in runs.values():
            run()
    for _ in range(repeats):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    return {n: sorted(a.elapsed_time(b) for a, b in t)[len(t) // 2] for n, t in times.items()}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error of the last 4,096 rows."""
    found, expected = found[-4096:].float(), expected[-4096:].float()
    return float((found - expected).norm() / expected.norm())


def bench(name: str) -> None:
    s = SHAPES[name]
    T, D, F, E, K = s.tokens, s.dim, s.hidden_dim, s.num_experts, s.top_k
    R = s.rows
    torch.manual_seed(0)
    device = torch.device("cuda")
    x, dy = (torch.randn(T, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    ids = (x @ torch.randn(D, E, device=device, dtype=torch.bfloat16)).float().topk(K).indices
    index = build_index(ids.int(), torch.rand(T, K, device=device), first=0, num_local=E)
    w1 = torch.randn(E, 2 * F, D, device=device, dtype=torch.bfloat16) * 0.02
    w2 = torch.randn(E, D, F, device=device, dtype=torch.bfloat16) * 0.02
    ids_R, weights, offsets = index.row_ids_R, index.weights_R, index.offsets_e
    h, a = grouped_gemm_activation(x, w1, ids_R, weights, offsets, SWIGLU)
    x_R, dy_R, dh = x[ids_R.long()], dy[ids_R.long()], torch.randn_like(h)
    tiles = tile_map(offsets, R, 128)

    def ours_dg2() -> tuple[Tensor, ...]:
        da = grouped_gemm(dy, w2, offsets, row_ids_R=ids_R)
        return weighted_activation_bwd(h, da, weights, offsets[-1], SWIGLU)

    def candidate(a_: Tensor, b: Tensor, **kw: object) -> Callable[[tuple], Callable[[], object]]:
        return lambda cfg: lambda: pingpong(a_, b, ids_R, R, tiles, cfg=cfg, **kw)

    def outputs(result: object) -> tuple[Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]

    cases = {
        "FC1 + activation": (
            lambda: torch._grouped_mm(x_R, w1.transpose(1, 2), offs=offsets),
            lambda: grouped_gemm_activation(x, w1, ids_R, weights, offsets, SWIGLU),
            candidate(x, w1, gather=True, b_nk=True, epi=1, w=weights),
        ),
        "FC2": (
            lambda: torch._grouped_mm(a, w2.transpose(1, 2), offs=offsets),
            lambda: grouped_gemm(a, w2.transpose(1, 2), offsets),
            candidate(a, w2, gather=False, b_nk=True, epi=0),
        ),
        "FC2 input gradient + activation": (
            lambda: torch._grouped_mm(dy_R, w2, offs=offsets),
            ours_dg2,
            candidate(dy, w2, gather=True, b_nk=False, epi=2, w=weights, h=h),
        ),
        "FC1 input gradient": (
            lambda: torch._grouped_mm(dh, w1, offs=offsets),
            lambda: grouped_gemm(dh, w1, offsets),
            candidate(dh, w1, gather=False, b_nk=False, epi=0),
        ),
    }
    for title, (product, ours, make) in cases.items():
        runs: dict[str, Callable[[], object]] = {"torch product alone": product, "src": ours}
        expected = outputs(ours())
        for cfg in CONFIGS:
            try:
                found = outputs(make(cfg)())
            except triton.runtime.errors.OutOfResources as problem:
                print(f"{name} {title} {cfg}: {problem}")
                continue
            # dh, dweights, a of src against dh, a, parts of dweights of the candidate.
            pairs = [(found[0], expected[0])]
            if len(found) == 3:
                pairs += [(found[1], expected[2]), (found[2].sum(0)[:, None], expected[1][:, None])]
            elif len(found) == 2:
                pairs += [(found[1], expected[1])]
            worst = max(error(*pair) for pair in pairs)
            if worst < 2e-2:
                runs[str(cfg)] = make(cfg)
            else:
                print(f"{name} {title} {cfg}: WRONG, error {worst:.2g}")
        found_times = interleaved(runs)
        base = found_times["torch product alone"]
        for run, ms in found_times.items():
            print(f"{name:12} {title:32} {run:34} {ms:8.3f} ms  {ms / base:.3f}", flush=True)


if __name__ == "__main__":
    for shape in sys.argv[1:] or ["qwen3-30b", "fine-7b"]:
        bench(shape)
        torch.cuda.empty_cache()
