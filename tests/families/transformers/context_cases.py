"""Cases of transformers models over context parallel ranks: see test_hf_context.py."""

import re
from dataclasses import dataclass, field
from typing import Any

from moecore import BalanceConfig, IndexerConfig
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from tests.families.transformers.family_models import IS_BEFORE_5_23, family_names

ROWS, TOKENS = 2, 32
CUTS, PADDING = [0, 8, 32, 48, 64], 8
TINY = (  # of `tiny_model`: linear or sparse attention, and experts behind a router
    *("qwen3_next", "qwen3_5_moe", "kimi_linear", "granitemoehybrid", "nemotron_h"),
    *("minimax_m2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
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


def make_case(family: str, degrees: str, flags: str = "", **fields: Any) -> Case:
    """Return a case of degrees such as "cp2-ep4"; flags are "sum", "calm", and fields to set."""
    named = {"sum": dict(loss="sum"), "calm": dict(rate=CALM)}
    for flag in flags.split():
        fields |= named.get(flag, {flag: True})
    parallel = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", degrees)}
    return Case(family=family, parallel=parallel, **fields)


CASES = {
    "qwen3, ring, packed": make_case("qwen3-moe", "cp2-ep4", "packed sum", way="p2p"),
    "qwen3, gathered, rows": make_case(
        "qwen3-moe", f"cp4-ep2-etp{1 + HAS_SEPARATE_PIECES}", way="allgather"
    ),
    "qwen3, dynamic frequencies, rows": make_case(
        "qwen3-moe", "cp2-ep2", options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC)
    ),
    "qwen3, long or short frequencies, rows": make_case(
        "qwen3-moe", "cp4-ep2", way="allgather", options=dict(rope_parameters=SHORT_OR_LONG)
    ),
    "qwen3, dynamic frequencies, a cp for each group": make_case(
        "qwen3-moe",
        "ep4",
        "sum",
        cps=(2, 2),
        options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC),
    ),
    "qwen3, documents balanced": make_case(
        "qwen3-moe", "cp2-ep2", "packed checkpointing", balance=BALANCED
    ),
    "mixtral, both, packed": make_case("mixtral", "cp4-ep4", "packed", way="a2a+p2p"),
    "mixtral, window, rows": make_case("mixtral", "cp2-ep4", options=dict(sliding_window=6)),
    "deepseek, heads, rows": make_case("deepseek-v3", "cp4-ep2"),
    "deepseek, ring, packed": make_case("deepseek-v3", "cp2-ep4", "packed", way="p2p"),
    "gpt-oss, heads, packed": make_case("gpt-oss", "cp2-ep4", "packed"),
    "qwen3, tp, packed": make_case(
        "qwen3-moe", "cp2-tp2-ep4", "packed checkpointing", balance=BALANCED
    ),
    "deepseek, tp, padded": make_case("deepseek-v3", "cp2-tp2-ep2", "packed padded sum"),
    "gpt-oss, tp, rows": make_case("gpt-oss", "cp2-tp2-ep4"),
    "gpt-oss, gathered, rows": make_case("gpt-oss", "cp4-ep4"),
    "gated delta, packed": make_case(
        "qwen3_5_moe", "cp2-ep2", "packed calm", recompute="gemm_last"
    ),
    "gated delta, rows": make_case("qwen3_5_moe", "cp4-ep2", "checkpointing calm"),
    "gated delta, short documents": make_case("qwen3_next", "cp4-ep4", "packed sum calm"),
    "kimi delta, tp, packed": make_case("kimi_linear", "cp2-tp2-ep4", "packed sum calm"),
    "state space, tp, packed": make_case("nemotron_h", "cp2-tp2-ep2", "packed checkpointing calm"),
    "state space, packed": make_case("granitemoehybrid", "cp4-ep2", "packed calm"),
    "sparse, packed": make_case(
        "deepseek_v32",
        "cp2-ep4",
        "packed calm",
        indexer=IndexerConfig(loss_coef=0.5),
        recompute="gemm_last",
    ),
    # at CALM a product before relu is 1e-7, so rounding decides its derivative
    "sparse, shared indexer, rows": make_case(
        "glm_moe_dsa",
        "cp4-ep2",
        "checkpointing sum",
        indexer=IndexerConfig(stage="warm_up"),
        rate=0.004,
    ),
    "sparse, shared indexer, tp, packed": make_case(
        "glm_moe_dsa", "cp2-tp2-ep4", "packed sum calm"
    ),
    "sparse, gates, packed": make_case(
        "axk2", "cp2-ep4", "packed calm", indexer=IndexerConfig(loss_coef=0.5)
    ),
    "sparse and windows, tp, packed": make_case("dots3_note", "cp2-tp2-ep4", "packed calm"),
    # At a second step, and of rows of one data rank, gradients of stock's hyper-connections in fp32
    # are 1e-5 and 4e-4 away from fp64.
    "sparse, sinks, tp, packed": make_case("hy_v4", "cp2-tp2-ep4", "packed sum calm"),
    "sparse, sinks, rows": make_case("hy_v4", "cp2-ep2", "calm"),
    "compressed, packed": make_case("deepseek_v4", "cp2-ep4", "packed calm", recompute="gemm_last"),
    "compressed behind a window, tp, packed": make_case(
        "deepseek_v4",
        "cp2-tp2-ep4",
        "packed sum checkpointing calm",
        options=dict(layer_types=["sliding_attention", "compressed_sparse_attention"]),
    ),
    "compressed, rows": make_case("deepseek_v4", "cp4-ep2", "calm"),
    "gated delta, tp, rows": make_case("qwen3_next", "cp2-tp2-ep4", "calm"),
    "qwen3, a cp for each group": make_case(
        "qwen3-moe", "ep4", "packed checkpointing sum", balance=BALANCED, cps=(2, 1, 1)
    ),
    "gpt-oss, a cp for each group": make_case("gpt-oss", "ep2", "packed sum", cps=(1, 1, 2)),
    "gated delta, a cp for each group": make_case(
        "qwen3_next", "ep4", "packed sum calm", cps=(2, 1, 1)
    ),
    "sparse, a cp for each group": make_case(
        "deepseek_v32", "ep4", "packed sum calm", cps=(2, 1, 1)
    ),
    "short convolution, packed": make_case("lfm2_moe", "cp4-ep4", "packed checkpointing calm"),
    "short convolution, tp, rows": make_case("lfm2_moe", "cp2-tp2-ep4", "sum calm"),
    "chunks and temperatures, packed": make_case("llama4", "cp2-ep4", "packed checkpointing calm"),
    "chunks and temperatures, rows": make_case("llama4", "cp2-ep2", "sum calm"),
    "lightning, tp, packed": make_case("minimax", "cp2-tp2-ep4", "packed checkpointing calm"),
    "lightning, rows": make_case("minimax", "cp4-ep4", "sum calm", recompute="gemm_last"),
    "text of unlimited_ocr, packed": make_case("unlimited_ocr", "cp2-ep4", "packed calm"),
    "text of qwen3_vl_moe, packed": make_case("qwen3_vl_moe", "cp2-ep4", "packed sum calm"),
    "text of glm4v_moe, packed": make_case("glm4v_moe", "cp2-tp2-ep4", "packed calm"),
    "text of qwen3_omni_moe, rows": make_case("qwen3_omni_moe", "cp4-ep4", "calm"),
    "text of ernie4_5_vl_moe, packed": make_case("ernie4_5_vl_moe", "cp2-ep4", "packed sum calm"),
    "text of deepseek_ocr2, packed": make_case("deepseek_ocr2", "cp2-ep4", "packed calm"),
    "text of step3p7, packed": make_case("step3p7", "cp2-ep4", "packed sum calm"),
    "own routers, tp, padded": make_case("minimax_m2", "cp2-tp2-ep4", "packed padded sum calm"),
    "own routers, a cp for each group, tp, padded": make_case(
        "minimax_m2", "tp2-ep4", "packed padded sum calm", cps=(1, 1)
    ),
}
# Families that this transformers does not have, or refuses: towers are beside Omni's base model.
ABSENT = {*TINY} - {*family_names()} | ({"qwen3_omni_moe"} if IS_BEFORE_5_23 else set())
CASES = {name: case for name, case in CASES.items() if case.family not in ABSENT}
# A way of attention, tp, or a cp for each group, which other models here have.
TAMPERED = {
    f"tampered {name}": Case(
        family="qwen3-moe", parallel=dict(cp=2, ep=4), packed=True, tamper=name
    )
    for name in ("positions", "labels", "documents")
}
