"""Plans of two levels: what crosses between domains, and the report's times of exchanges on paper.

Source: arXiv:2603.07685, table 7: hidden 7168, 4,096 tokens, 256 experts; 8 random choices of each
token are taken here, which it does not print.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from moecore import NVLinkOptions, ParallelConfig
from moecore.cli import main
from moecore.models import preset
from moecore.moe.dispatch.exchange import COPY, REDUCE, SPREAD
from moecore.planning import CostTable, TrainingRun, dry_run, plan_memory, plan_time
from moecore.planning.gpus import GPUS, count_domain_ranks
from moecore.planning.recipe import format_python_calls, format_run_flags
from moecore.planning.record import Work

T, D, E, K = 4096, 7168, 256, 8
EPS = (8, 16, 32, 64)
# EP: us of HybridEP and of all-to-all, on GB200 and on H100.
TABLE_7 = {
    "dispatch": {
        8: (391, 735, 661, 1265),
        16: (578, 743, 1485, 5774),
        32: (612, 769, 3064, 8059),
        64: (675, 930, 4626, 9164),
    },
    "combine": {
        8: (353, 741, 624, 1277),
        16: (527, 765, 1688, 5628),
        32: (646, 758, 3088, 7815),
        64: (744, 827, 4398, 8727),
    },
}
# On H100 HybridEP is further from the plan, as planned over measured:
OFF = {
    # Stores of "nvlink" were measured at 0.67 and 0.72 of these links, HybridEP reaches 0.91, 0.97.
    ("dispatch", 8): 1.36,
    ("combine", 8): 1.34,
    # It takes 1.44 of what its bytes take at 50 GB/s, and its dispatch, of as many bytes, 1.26.
    ("combine", 16): 0.78,
    # 4.63 rows of a token cross between 8 domains: at 50 GB/s, which no card of the makers exceeds,
    # they take 5.44 ms. Fewer must have crossed there, such as of choices from 4 groups of 8.
    ("dispatch", 64): 1.31,
    ("combine", 64): 1.38,
}


def reach(num_experts: int) -> float:
    """Return the chance that a token chooses one of so many experts at least."""
    return 1 - math.comb(E - num_experts, K) / math.comb(E, K)


def reach_groups(num_experts: int) -> float:
    """Return the chance that a token of 4 groups of 8 chooses one of the experts of n groups."""
    n, missed = num_experts // 32, 0.0
    for j in range(max(0, n - 4), min(4, n) + 1):  # of the n groups are chosen
        chance = math.comb(n, j) * math.comb(8 - n, 4 - j) / math.comb(8, 4)
        missed += chance * math.comb(128 - 32 * j, K) / math.comb(128, K)
    return 1 - missed


def seconds(gpu: str, name: str, ranks: int, rows: float, node_ranks: int = 0) -> float:
    """Return the seconds in which a rank sends and receives so many rows for each token."""
    work = Work(name, "collective", 0, round(2 * rows * T * D * 2), (ranks,), "bfloat16")
    return CostTable.of(gpu).seconds(work, node_ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("ep", EPS)
@pytest.mark.parametrize("way", TABLE_7)
def test_exchanges_take_what_the_report_measured(way: str, ep: int) -> None:
    """Within 20%, all-to-all on H100 within 10%, but for `OFF`, whose numbers are here too."""
    store = {"dispatch": SPREAD, "combine": REDUCE}[way]
    planned = []
    for gpu in ("gb200-186", "h100-80"):
        domain = min(ep, count_domain_ranks(gpu, ep))  # type: ignore[arg-type]
        domains = ep // domain
        inside = seconds(gpu, store, domain, (domain - 1) * domains * reach(E // ep))
        crossing = (domains - 1) * reach(E // domains)
        across = seconds(gpu, "alltoall", domains, crossing, 1) if domains > 1 else 0.0
        # HybridEP forwards inside of a domain while more crosses; all-to-all sends every choice.
        planned += [max(inside, across), seconds(gpu, "all_to_all", ep, K * (ep - 1) / ep, domain)]
    for i, (found, measured) in enumerate(zip(planned, TABLE_7[way][ep], strict=True)):
        if i == 2 and (way, ep) in OFF:
            assert found * 1e6 / measured == pytest.approx(OFF[way, ep], abs=0.01)
        else:
            assert found * 1e6 == pytest.approx(measured, rel=0.1 if i == 3 else 0.2)


FEW = dict(num_layers=2, dense_layers=(0,), num_mtp_layers=0, mtp_loss_coef=0.0)
MODEL = replace(preset("deepseek-v3"), **FEW)
RUN = TrainingRun(
    model=MODEL,
    num_gpus=16,
    parallel=ParallelConfig(ep=8),
    seq_len=512,
    nvlink=NVLinkOptions(),
    dispatcher="hierarchical",
    ranks_per_domain=4,
)


@pytest.mark.parametrize(("groups", "reach"), [(1, reach), (8, reach_groups)])
def test_a_token_crosses_once_to_a_domain(groups: int, reach: Callable[[int], float]) -> None:
    """Two domains of 4: bytes of each level are those of random choices, in 4 of 8 groups."""
    assert MODEL.moe is not None and (MODEL.moe.num_groups, MODEL.moe.top_groups) == (8, 4)
    moe = replace(MODEL.moe, num_groups=groups, top_groups=min(4, groups))
    run = replace(RUN, model=replace(MODEL, moe=moe))
    row, sent = 2 * D * 512, {name: [] for name in ("alltoall_base_", SPREAD, REDUCE, COPY)}  # type: ignore[var-annotated]
    for queued in dry_run(run).queued:
        if queued.work.name in sent and queued.work.dtype == "bfloat16":
            sent[queued.work.name].append((queued.work.num_bytes, queued.node_ranks))
    # Rows across and their sums, in backward both again; sent to one domain, and received.
    once = 2 * row * reach(E // 2)
    assert [n for n, _ in sent["alltoall_base_"]] == [pytest.approx(once, rel=0.01)] * 4
    assert {node_ranks for _, node_ranks in sent["alltoall_base_"]} == {1}
    # Inside each of 2 x 512 tokens goes to 3 other ranks, if it chose one of their 32 experts.
    inside = 2 * row * 2 * 3 * reach(E // 8)
    assert [n for n, _ in sent[SPREAD]] == [pytest.approx(inside, rel=0.01)] * 2
    assert [n for n, _ in sent[REDUCE]] == [pytest.approx(inside, rel=0.01)] * 2 and not sent[COPY]


def test_two_levels_pay_where_exchanges_are_not_hidden() -> None:
    """Of two domains 0.31 of the rows cross, which is more than what they take inside."""
    wide = replace(RUN, seq_len=4096, parallel=ParallelConfig(ep=16), ranks_per_domain=8)
    one = replace(wide, dispatcher="auto", nvlink=None)
    table = CostTable.of("h100-80")
    both, alone = plan_time(wide, table), plan_time(one, table)
    assert both.seconds < alone.seconds and both.parts["network"] < 0.5 * alone.parts["network"]


def test_flags_and_calls_are_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --preset deepseek-v3 --gpus 1024 --ep 64 --dispatcher hierarchical --call"
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert "ParallelConfig(ep=64), ranks_per_domain=8)" in printed
    assert "dispatch=DispatchOptions(name='hierarchical', nvlink=NVLinkOptions())," in printed
    assert "--dispatcher hierarchical" in " ".join(format_run_flags(RUN))
    assert "ranks_per_domain=4" in format_python_calls(RUN)


def test_buffers_are_those_of_all_domains_tokens() -> None:
    kinds = plan_memory(RUN).ranks[0].device
    num_tokens = 2 * 512  # of both domains
    # Two slots of rows, choices and weights, of 4 ranks.
    expected = 2 * 4 * num_tokens * (2 * D + 8 * K)
    assert kinds["exchange buffers"] == pytest.approx(expected, rel=0.05)


def test_domains_of_gpus() -> None:
    assert count_domain_ranks("h100-80", 1024) == count_domain_ranks("h100-80", 4) == 8
    assert count_domain_ranks("gb200-186", 256) == 64 and count_domain_ranks("gb300-279", 144) == 72
    assert GPUS["gb200-186"].server == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(nvlink=None), r"nvlink \(None\) must be there with dispatcher \('hierarchical'\)"),
        (dict(ranks_per_domain=8), r"ranks_per_domain \(8\) of build_meshes must, with dispatcher"),
    ],
)
def test_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry_run(replace(RUN, **changes))
