"""Bin packing, and simulated steps of dynamic context parallelism against a fixed cp.

    python -m benchmarks.bench_packing

Prints the tables of docs/sequences.md. Everything runs on one CPU core. Times of steps are
simulated, in the unit of `DocumentCost`, with the same costs for all schedulers.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from benchmarks.packing_baselines import (
    FAR,
    NEAR,
    compute_balanced_time,
    compute_static_time,
    count_ranks,
    draw_lengths,
)
from moecore.packing import pack_documents, pack_lengths, schedule_documents

SEEDS = range(10)
K = 1024
BATCHES = (  # lengths, documents, ranks, tokens of a rank, bandwidth, costs
    ("lognormal (7, 1.5)", 2048, 64, 16 * K, "200 GB/s", NEAR),
    ("lognormal (7, 1.5)", 1024, 32, 8 * K, "50 GB/s", FAR),
    ("lognormal (7.5, 1)", 1024, 32, 8 * K, "50 GB/s", FAR),
    ("5% of 16K to 128K", 2048, 64, 16 * K, "200 GB/s", NEAR),
    ("uniform to 16K", 2048, 64, 16 * K, "200 GB/s", NEAR),
)


def print_bins() -> None:
    """Print how full bins and streams are, and the time of packing."""
    print("| documents | bin | fill of bins | fill of a stream, window 4096 | padded rows | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for mean, bin_tokens in ((6.0, 4 * K), (7.0, 8 * K), (7.5, 32 * K)):
        drawn = np.random.default_rng(0).lognormal(mean, 1.0, 1_000_000)
        lengths = np.clip(drawn, 1, bin_tokens).astype(np.int64)
        begin = time.process_time()
        bins = pack_lengths(lengths, bin_tokens)
        seconds = time.process_time() - begin
        some = lengths[:50_000]
        streamed = sum(1 for _ in pack_documents((range(n) for n in some), bin_tokens))
        rows = lengths[: len(lengths) // 8 * 8].reshape(-1, 8)  # eight side by side, unpacked
        print(
            f"| lognormal ({mean:g}, 1) | {bin_tokens // K}K "
            f"| {lengths.sum() / (len(bins) * bin_tokens):.4f} "
            f"| {some.sum() / (streamed * bin_tokens):.4f} "
            f"| {rows.sum() / (rows.max(1) * 8).sum():.2f} | {seconds:.1f} |"
        )


def print_steps() -> None:
    """Print simulated times of other schedulers relative to dynamic context parallelism."""
    print(
        "| lengths | documents | ranks | cp of all | random bins | sorted bins | balanced | bound |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, number, ranks, max_tokens, where, cost in BATCHES:
        found, cps = [], set()
        for seed in SEEDS:
            lengths = draw_lengths(kind, number, seed)
            batch = dict(ranks=ranks, max_tokens=max_tokens)
            ours = schedule_documents(lengths, cost=cost, **batch)
            free = replace(cost, fixed=0.0)  # the balanced one has a forward per document
            found.append(
                (
                    compute_static_time(lengths, cost=cost, seed=seed, **batch) / ours.time,
                    compute_static_time(lengths, cost=cost, seed=None, **batch) / ours.time,
                    compute_balanced_time(lengths, cost=free, **batch)[0]
                    / schedule_documents(lengths, cost=free, **batch).time,
                    ours.time / ours.lower_bound,
                )
            )
            cps.add(count_ranks(int(lengths.max()), ranks, max_tokens))
        cells = [f"{np.mean(c):.2f} ({np.min(c):.2f})" for c in zip(*found, strict=True)][:3]
        bound = max(ratio for *_, ratio in found)
        one_cp = " or ".join(map(str, sorted(cps)))
        print(
            f"| {kind} | {number} | {ranks} of {max_tokens // K}K, {where} | {one_cp} "
            f"| {' | '.join(cells)} | {bound:.3f} |"
        )


def print_time() -> None:
    """Print the time of scheduling 10,000 documents."""
    lengths = draw_lengths("lognormal (7, 1.5)", 10_000, 0)
    for ranks in (8, 64, 256):
        begin = time.process_time()
        made = schedule_documents(lengths, ranks=ranks, max_tokens=16 * K)
        seconds = time.process_time() - begin
        print(f"10,000 documents, {ranks} ranks: {seconds:.2f} s, {len(made.rounds)} rounds")


if __name__ == "__main__":
    print_bins()
    print()
    print_steps()
    print()
    print_time()
