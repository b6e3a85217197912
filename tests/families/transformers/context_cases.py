"""Cases of transformers models over context parallel ranks: see test_hf_context.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moecore import BalanceConfig, IndexerConfig
from moecore.base.torch_private import HAS_SEPARATE_PIECES

ROWS, TOKENS = 2, 32
CUTS, PADDING = [0, 8, 32, 48, 64], 8
TINY = (  # of `tiny_model`: linear or sparse attention, and experts behind a router
    *("qwen3_next", "qwen3_5_moe", "kimi_linear", "granitemoehybrid", "nemotron_h"),
    *("minimax_m2", "deepseek_v32", "glm_moe_dsa"),
    *("axk2", "dots3_note", "hy_v4", "lfm2_moe", "llama4"),
    *("qwen3_vl_moe", "glm4v_moe", "qwen3_omni_moe", "ernie4_5_vl_moe"),
    *("deepseek_ocr2", "step3p7", "unlimited_ocr", "minimax"),
)
CALM = 0.005  # a rate at whose second step stock transformers is near fp64, too
BALANCED = BalanceConfig(sequence_coef=0.3)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
# Rows of 32 tokens are long, but of four cp ranks only the first has positions beyond 27.
SHORT_OR_LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[2.0, 3.0, 4.0, 5.0],
    factor=4.0,
    original_max_position_embeddings=28,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of four ranks, a family, and how attention communicates."""

    family: str
    parallel: dict[str, int]
    way: str = "auto"
    packed: bool = False
    padded: bool = False  # the last tokens of the last document
    loss: str = "mean"
    balance: BalanceConfig | None = None
    indexer: IndexerConfig | None = None
    checkpointing: bool = False
    recompute: str = ""
    rate: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    tamper: str = ""
    cps: tuple[int, ...] = ()  # of the groups of a micro-batch, with dynamic context parallelism

    @property
    def steps(self) -> int:
        """Two where something but weights outlives a step: what is computed again, groups."""
        return 2 if self.checkpointing or self.recompute or self.cps else 1

    @property
    def sharing(self) -> list[int]:
        """The group of each data rank, with `cps`."""
        return [group for group, cp in enumerate(self.cps) for _ in range(cp)]


CASES = {
    "qwen3, ring, packed": Case(
        family="qwen3-moe", parallel=dict(cp=2, ep=4), way="p2p", packed=True, loss="sum"
    ),
    "qwen3, gathered, rows": Case(
        family="qwen3-moe", parallel=dict(cp=4, ep=2, etp=1 + HAS_SEPARATE_PIECES), way="allgather"
    ),
    "qwen3, dynamic frequencies, rows": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, ep=2),
        options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC),
    ),
    "qwen3, long or short frequencies, rows": Case(
        family="qwen3-moe",
        parallel=dict(cp=4, ep=2),
        way="allgather",
        options=dict(rope_parameters=SHORT_OR_LONG),
    ),
    "qwen3, dynamic frequencies, a cp for each group": Case(
        family="qwen3-moe",
        parallel=dict(ep=4),
        loss="sum",
        cps=(2, 2),
        options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC),
    ),
    "qwen3, documents balanced": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, ep=2),
        packed=True,
        balance=BALANCED,
        checkpointing=True,
    ),
    "mixtral, both, packed": Case(
        family="mixtral", parallel=dict(cp=4, ep=4), way="a2a+p2p", packed=True
    ),
    "mixtral, window, rows": Case(
        family="mixtral", parallel=dict(cp=2, ep=4), options=dict(sliding_window=6)
    ),
    "deepseek, heads, rows": Case(family="deepseek-v3", parallel=dict(cp=4, ep=2)),
    "deepseek, ring, packed": Case(
        family="deepseek-v3", parallel=dict(cp=2, ep=4), way="p2p", packed=True
    ),
    "gpt-oss, heads, packed": Case(family="gpt-oss", parallel=dict(cp=2, ep=4), packed=True),
    "qwen3, tp, packed": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        balance=BALANCED,
        checkpointing=True,
    ),
    "deepseek, tp, padded": Case(
        family="deepseek-v3", parallel=dict(cp=2, tp=2, ep=2), packed=True, padded=True, loss="sum"
    ),
    "gpt-oss, tp, rows": Case(family="gpt-oss", parallel=dict(cp=2, tp=2, ep=4)),
    "gpt-oss, gathered, rows": Case(family="gpt-oss", parallel=dict(cp=4, ep=4)),
    "gated delta, packed": Case(
        family="qwen3_5_moe",
        parallel=dict(cp=2, ep=2),
        packed=True,
        recompute="gemm_last",
        rate=CALM,
    ),
    "gated delta, rows": Case(
        family="qwen3_5_moe", parallel=dict(cp=4, ep=2), checkpointing=True, rate=CALM
    ),
    "gated delta, short documents": Case(
        family="qwen3_next", parallel=dict(cp=4, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "kimi delta, tp, packed": Case(
        family="kimi_linear", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "state space, tp, packed": Case(
        family="nemotron_h",
        parallel=dict(cp=2, tp=2, ep=2),
        packed=True,
        checkpointing=True,
        rate=CALM,
    ),
    "state space, packed": Case(
        family="granitemoehybrid", parallel=dict(cp=4, ep=2), packed=True, rate=CALM
    ),
    "sparse, packed": Case(
        family="deepseek_v32",
        parallel=dict(cp=2, ep=4),
        packed=True,
        indexer=IndexerConfig(loss_coef=0.5),
        recompute="gemm_last",
        rate=CALM,
    ),
    "sparse, shared indexer, rows": Case(
        family="glm_moe_dsa",
        parallel=dict(cp=4, ep=2),
        loss="sum",
        indexer=IndexerConfig(stage="warm_up"),
        checkpointing=True,
        rate=0.004,  # at CALM a product before relu is 1e-7, so rounding decides its derivative
    ),
    "sparse, shared indexer, tp, packed": Case(
        family="glm_moe_dsa", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "sparse, gates, packed": Case(
        family="axk2",
        parallel=dict(cp=2, ep=4),
        packed=True,
        indexer=IndexerConfig(loss_coef=0.5),
        rate=CALM,
    ),
    "sparse and windows, tp, packed": Case(
        family="dots3_note", parallel=dict(cp=2, tp=2, ep=4), packed=True, rate=CALM
    ),
    # At a second step, and of rows of one data rank, gradients of stock's hyper-connections in fp32
    # are 1e-5 and 4e-4 away from fp64.
    "sparse, sinks, tp, packed": Case(
        family="hy_v4", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "sparse, sinks, rows": Case(family="hy_v4", parallel=dict(cp=2, ep=2), rate=CALM),
    "gated delta, tp, rows": Case(family="qwen3_next", parallel=dict(cp=2, tp=2, ep=4), rate=CALM),
    "qwen3, a cp for each group": Case(
        family="qwen3-moe",
        parallel=dict(ep=4),
        packed=True,
        balance=BALANCED,
        loss="sum",
        checkpointing=True,
        cps=(2, 1, 1),
    ),
    "gpt-oss, a cp for each group": Case(
        family="gpt-oss", parallel=dict(ep=2), packed=True, loss="sum", cps=(1, 1, 2)
    ),
    "gated delta, a cp for each group": Case(
        family="qwen3_next", parallel=dict(ep=4), packed=True, loss="sum", rate=CALM, cps=(2, 1, 1)
    ),
    "sparse, a cp for each group": Case(
        family="deepseek_v32",
        parallel=dict(ep=4),
        packed=True,
        loss="sum",
        rate=CALM,
        cps=(2, 1, 1),
    ),
    "short convolution, packed": Case(
        family="lfm2_moe", parallel=dict(cp=4, ep=4), packed=True, checkpointing=True, rate=CALM
    ),
    "short convolution, tp, rows": Case(
        family="lfm2_moe", parallel=dict(cp=2, tp=2, ep=4), loss="sum", rate=CALM
    ),
    "chunks and temperatures, packed": Case(
        family="llama4", parallel=dict(cp=2, ep=4), packed=True, checkpointing=True, rate=CALM
    ),
    "chunks and temperatures, rows": Case(
        family="llama4", parallel=dict(cp=2, ep=2), loss="sum", rate=CALM
    ),
    "lightning, tp, packed": Case(
        family="minimax",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        checkpointing=True,
        rate=CALM,
    ),
    "lightning, rows": Case(
        family="minimax", parallel=dict(cp=4, ep=4), loss="sum", recompute="gemm_last", rate=CALM
    ),
    "text of unlimited_ocr, packed": Case(
        family="unlimited_ocr", parallel=dict(cp=2, ep=4), packed=True, rate=CALM
    ),
    "text of qwen3_vl_moe, packed": Case(
        family="qwen3_vl_moe", parallel=dict(cp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "text of glm4v_moe, packed": Case(
        family="glm4v_moe", parallel=dict(cp=2, tp=2, ep=4), packed=True, rate=CALM
    ),
    "text of qwen3_omni_moe, rows": Case(
        family="qwen3_omni_moe", parallel=dict(cp=4, ep=4), rate=CALM
    ),
    "text of ernie4_5_vl_moe, packed": Case(
        family="ernie4_5_vl_moe", parallel=dict(cp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "text of deepseek_ocr2, packed": Case(
        family="deepseek_ocr2", parallel=dict(cp=2, ep=4), packed=True, rate=CALM
    ),
    "text of step3p7, packed": Case(
        family="step3p7", parallel=dict(cp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "own routers, tp, padded": Case(
        family="minimax_m2",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        padded=True,
        loss="sum",
        rate=CALM,
    ),
    "own routers, a cp for each group, tp, padded": Case(
        family="minimax_m2",
        parallel=dict(tp=2, ep=4),
        packed=True,
        padded=True,
        loss="sum",
        rate=CALM,
        cps=(1, 1),
    ),
}
# A way of attention, tp, or a cp for each group, which other models here have.
NIGHTLY = (
    "qwen3, documents balanced",
    "mixtral, both, packed",
    "deepseek, heads, rows",
    "deepseek, ring, packed",
    "gpt-oss, tp, rows",
    "gpt-oss, gathered, rows",
    "gated delta, rows",
    "state space, packed",
    "sparse, shared indexer, tp, packed",
    "gated delta, tp, rows",
    "gpt-oss, a cp for each group",
    "gated delta, a cp for each group",
    "sparse, a cp for each group",
    "sparse, gates, packed",
    "sparse, sinks, rows",
    "short convolution, tp, rows",
    "chunks and temperatures, rows",
    "lightning, rows",
    "text of unlimited_ocr, packed",
    "text of qwen3_omni_moe, rows",
    "text of ernie4_5_vl_moe, packed",
    "text of deepseek_ocr2, packed",
    "text of step3p7, packed",
)
TAMPERED = {
    f"tampered {name}": Case(
        family="qwen3-moe", parallel=dict(cp=2, ep=4), packed=True, tamper=name
    )
    for name in ("positions", "labels", "documents")
}
