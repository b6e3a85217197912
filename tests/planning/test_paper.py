"""The memory of DeepSeek-V3 that https://arxiv.org/abs/2603.07685 prints, cell by cell, within 5%.

Tables 3 and 4 and section 4.1: bf16, 256 GPUs, PP4 VPP4 EP64, 4,096 tokens a micro-batch. What is
stored comes from our plan of that run; what a layer keeps from one that keeps what theirs does
(`report_layer.py`), times the layers and micro-batches in flight in our schedule.

Which rank, and in which units, the report does not say. All cells agree with the third of the four
pipeline ranks, 15 chunks in flight of 61 layers over 16 chunks, and decimal GB.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from moecore import FSDPOptions, MemoryOptions, ParallelConfig
from moecore.models import preset
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning import OptimizerOptions, RankMemory, TrainingRun, plan_memory
from moecore.planning.run import sizes_of, state_bytes
from moecore.train.memory.saved_bytes import count_saved_bytes
from tests.planning.report_layer import BF16, ReportLayer

CONFIG = preset("deepseek-v3")
SEQ_LEN, CHUNKS, RANK = 4096, 16, 2
RUN = TrainingRun(
    model=CONFIG,
    num_gpus=256,
    parallel=ParallelConfig(pp=4, ep=64),
    seq_len=SEQ_LEN,
    num_micro_batches=16,
    pipeline=PipelineConfig(schedule="interleaved", chunks=CHUNKS // 4),
    # A distributed optimizer: weights and gradients whole, what it keeps itself cut over ranks.
    fsdp=FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim", experts_strategy="optim"),
)


def gb_of(rank: RankMemory, *kinds: str) -> float:
    """Return what a rank holds of kinds that begin so."""
    return sum(n for kind, n in rank.device.items() if kind.startswith(kinds)) / 1e9


@pytest.fixture(scope="module")
def rank() -> RankMemory:
    return plan_memory(RUN).ranks[RANK]


@pytest.fixture(scope="module")
def layers(rank: RankMemory) -> float:
    """Layers, each once for every micro-batch that waits."""
    return sum(rank.in_flight) * CONFIG.num_layers / CHUNKS


def kept_of_a_layer(options: MemoryOptions, *, weighs_late: bool = True) -> float:
    """Return GB that one layer keeps of one micro-batch."""
    layer = ReportLayer(CONFIG, weighs_late=weighs_late)
    x_TD = torch.empty(SEQ_LEN, CONFIG.dim, **BF16).requires_grad_()
    how = dict(options=options, device_type="cuda")
    kept = count_saved_bytes(layer, [layer], lambda copy: copy(x_TD), **how)
    return (kept.blocks[0].num_bytes + kept.outside.num_bytes) / 1e9


ALL = kept_of_a_layer(MemoryOptions())
within = partial(pytest.approx, rel=0.05)


def test_table_3(rank: RankMemory, layers: float) -> None:
    # 6 bytes per parameter of the rank's layers: bf16, and sums of gradients in fp32.
    size = sizes_of(RUN)[RANK]
    whole = (size.weights + size.sums + size.accumulated + size.gradients) / 1e9
    # 12 bytes: fp32 weights and both moments. Experts of one rank; the rest over 64 ranks.
    stored = gb_of(rank, "parameters", "optimizer state")
    # Before memory-efficient permutation, FP8 and recompute.
    kept = layers * ALL
    assert sum(rank.in_flight) == 15
    # Our layers keep no copy of a token's rows and no output of FC2.
    assert rank.activations / 1e9 == pytest.approx(111.1, rel=0.005)
    assert whole == within(36.4)
    assert stored == within(32.1)
    assert kept == within(131.0)
    assert whole + stored + kept == within(199.5)


def test_memory_efficient_permutation(layers: float) -> None:
    # The output of FC2 of each row, [K T, D].
    saved = ALL - kept_of_a_layer(MemoryOptions(), weighs_late=False)
    assert layers * saved == within(26.3)


def test_table_4(layers: float) -> None:
    # Queries, keys and values of 128 heads.
    saved = ALL - kept_of_a_layer(MemoryOptions(recompute=("mla_up_proj",)))
    assert layers * saved == within(30.4)
    # SwiGLU's output of each row, [K T, F], of one byte: of bf16 it would be twice as much.
    rows = CONFIG.moe.top_k * SEQ_LEN
    assert layers * rows * CONFIG.moe.hidden_dim / 1e9 == within(3.8)


def test_fp8(layers: float) -> None:
    # Inputs of FC1 and of the products that read a norm, [K T + 2 T, D], of one byte less.
    rows = (CONFIG.moe.top_k + 2) * SEQ_LEN
    assert layers * rows * CONFIG.dim / 1e9 == within(16)


def test_precision_aware_optimizer_and_state_offload(rank: RankMemory) -> None:
    # Moments of 2 bytes: 4 bytes less of 12.
    state = gb_of(rank, "optimizer state")
    bf16 = OptimizerOptions(moment_dtype="bfloat16")
    kept = state_bytes(bf16) / state_bytes(RUN.optimizer)
    assert 10 <= state * (1 - kept) <= 12
    # All of both moments in host memory, or nearly.
    assert 15 <= 0.9 * state <= 20
