import math
from dataclasses import FrozenInstanceError, replace

import pytest

from moecore import MoEConfig
from moecore.models import (
    PRESETS,
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MLAConfig,
    SparseKeysConfig,
    YarnConfig,
    active_params,
    document_cost,
    flops_per_token,
    num_params,
    preset,
    with_latent_experts,
)
from moecore.packing import DocumentCost

MOE = MoEConfig(dim=64, hidden_dim=32, num_experts=4, top_k=2)
VALID = dict(vocab_size=32, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, moe=MOE)
VALID_YARN = dict(factor=4.0, original_max_seq_len=1024)
VALID_MLA = dict(kv_lora_rank=8, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=10)
MLA = MLAConfig(**VALID_MLA)
SPARSE = SparseKeysConfig(num_heads=2, head_dim=8, top_k=3)
VALID_DELTA = dict(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16)
MAMBA = Mamba2Config(**VALID_DELTA)
LINEAR = dict(linear_attention=GatedDeltaConfig(**VALID_DELTA))


WRONG_DECODERS = [
    (dict(rope_theta=0.0), r"rope_theta \(0.0\) must be a finite number > 0"),
    (dict(num_kv_heads=3), r"num_kv_heads \(3\) must divide num_heads \(4\)"),
    (dict(head_dim=15), r"head_dim \(15\) must be even"),
    (dict(qk_norm="layer"), r"qk_norm \('layer'\) must be one of 'head', 'full' or None"),
    (dict(dim=32), r"moe.dim \(64\) must equal dim \(32\)"),
    (dict(attention_bias=True), r"attention_bias \(True\) must be one of 'qkv', 'all' or None"),
    (dict(windows=(4, 0, 4)), r"windows \(\(4, 0, 4\)\) must be num_layers \(2\) at most"),
    (dict(mla=MLA, num_kv_heads=4, windows=(4,)), r"windows \(\(4,\)\) must be \(\) with mla"),
    (dict(mla=MLA, num_kv_heads=4, attention_sinks=True), r"attention_sinks \(True\) must be F"),
    (dict(mla=MLA, num_kv_heads=4, attention_gate=True), r"attention_gate \(True\) must be F"),
    (dict(mla=MLA, num_kv_heads=4, **LINEAR, linear_layers=(0,)), r"linear_layers \(\(0,\)\) must"),
    (dict(**LINEAR, linear_layers=(1, 0)), r"linear_layers \(\(1, 0\)\) must rise without"),
    (dict(**LINEAR, linear_layers=(2,)), r"linear_layers \(\(2,\)\) must lie in \[0, num_"),
    (dict(**LINEAR, linear_layers=(0, 1)), r"must leave a layer of num_layers \(2\) to atten"),
    (dict(LINEAR), r"linear_layers \(\(\)\) must name layers with linear_attention and none"),
    (dict(pattern="MM", linear_attention=MAMBA, moe=None), r"pattern \('MM'\) must leave a layer"),
    (dict(pattern="*"), r"pattern \('\*'\) must have one of 'M\*E-' for each of num_layers"),
    (dict(pattern="*O"), r"pattern \('\*O'\) must have one of 'M\*E-' for each of num_l"),
    (dict(pattern="*E", dense_layers=(0,)), r"dense_layers \(\(0,\)\) must be \(\) with pa"),
    (dict(pattern="*-", mlp_hidden_dim=8), r"pattern \('\*-'\) must name MoE layers \('E'\)"),
    (dict(pattern="*E", moe=None), r"pattern \('\*E'\) must name MoE layers \('E'\) with moe"),
    (dict(pattern="*M", moe=None), r"pattern \('\*M'\) must name layers \('M'\) with"),
    (dict(pattern="*E", num_mtp_layers=1, mtp_loss_coef=0.1), r"num_mtp_layers \(1\) must be 0"),
    (dict(rope_theta=None, rotary_dim=2), r"rotary_dim \(2\) must be 0 with rope_theta"),
    (dict(rope_theta=None, mla=MLA, num_kv_heads=4), r"rope_theta \(None\) must be given"),
    (dict(linear_layers=(0,)), r"linear_layers \(\(0,\)\) must name layers with linear_attention"),
    (dict(rotary_dim=7), r"rotary_dim \(7\) must be even and <= head_dim \(16\)"),
    (dict(rotary_dim=18), r"rotary_dim \(18\) must be even and <= head_dim \(16\)"),
    (dict(yarn=YarnConfig(**VALID_YARN), max_seq_len=4097), r"max_seq_len \(4097\) must be <="),
    (dict(mla=MLA, num_kv_heads=4, attention_bias="qkv"), r"attention_bias \('qkv'\) must be"),
    (dict(mla=MLA, num_kv_heads=4, rotary_dim=4), r"rotary_dim \(4\) must be 0 with mla"),
    (dict(mla=MLA, num_kv_heads=4, yarn=YarnConfig(**VALID_YARN)), r"yarn \(.*\) must be None"),
    (dict(moe=None, dense_layers=(0,)), r"dense_layers \(\(0,\)\) must be \(\) with moe"),
    (dict(dense_layers=(1, 0)), r"dense_layers \(\(1, 0\)\) must rise without repeats"),
    (dict(dense_layers=(2,)), r"must lie in \[0, num_layers \(2\)\)"),
    (dict(dense_layers=(-1,)), r"dense_layers \(\(-1,\)\) must be a tuple, each a whole number >="),
    (dict(dense_layers=(0, 1)), r"must leave a layer of num_layers \(2\) to moe"),
    (dict(dense_layers=(0,)), r"mlp_hidden_dim \(0\) must be >= 1 with 1 dense layers"),
    (dict(moe=None), r"mlp_hidden_dim \(0\) must be >= 1 with 2 dense layers"),
    (dict(mlp_hidden_dim=8), r"mlp_hidden_dim \(8\) must be 0"),
    (dict(mla=MLA), r"num_kv_heads \(2\) must equal num_heads \(4\) with mla"),
    (dict(mla=MLA, num_kv_heads=4, head_dim=8), r"head_dim \(8\) must equal mla.qk_nope_head_dim"),
    (dict(mla=MLA, num_kv_heads=4, qk_norm="head"), r"qk_norm \('head'\) must be None with mla"),
    (
        dict(mla=replace(MLA, yarn=YarnConfig(**VALID_YARN)), num_kv_heads=4, max_seq_len=4097),
        r"max_seq_len \(4097\) must be <= mla.yarn.factor \* "
        r"mla.yarn.original_max_seq_len \(4.0 \* 1024\)",
    ),
    (
        dict(mla=replace(MLA, yarn=YarnConfig(**VALID_YARN)), num_kv_heads=4, rope_theta=1.0),
        r"rope_theta \(1.0\) must be > 1 with mla.yarn",
    ),
    (dict(num_mtp_layers=1), r"mtp_loss_coef \(0.0\) must be > 0 with num_mtp_layers \(1\) > 0"),
    (dict(mtp_loss_coef=0.1), r"mtp_loss_coef \(0.1\) must be > 0 with num_mtp_layers \(0\)"),
    (dict(num_mtp_layers=1, mtp_loss_coef=float("nan")), r"mtp_loss_coef \(nan\) must be a f"),
    (dict(num_mtp_layers=2, mtp_loss_coef=0.1, max_seq_len=2), r"num_mtp_layers \(2\) must be <"),
]


WRONG_LATENT = [
    (dict(kv_lora_rank=0), r"MLAConfig.kv_lora_rank \(0\) must be a whole number >= 1"),
    (dict(qk_rope_head_dim=3), r"MLAConfig.qk_rope_head_dim \(3\) must be even"),
    (dict(sparse=SPARSE), r"MLAConfig.q_lora_rank \(0\) must be > 0 with sparse"),
    (dict(sparse=replace(SPARSE, head_dim=2), q_lora_rank=8), r"MLAConfig.sparse.head_dim \(2\)"),
]


WRONG_DELTA = [
    (dict(num_k_heads=3), r"GatedDeltaConfig.num_k_heads \(3\) must divide num_v_heads \(4\)"),
    (dict(head_k_dim=12), r"GatedDeltaConfig.head_k_dim \(12\) must be a multiple of 8"),
    (dict(head_v_dim=4), r"GatedDeltaConfig.head_v_dim \(4\) must be a multiple of 8"),
]


WRONG_YARN = [
    (dict(original_max_seq_len=0), r"YarnConfig.original_max_seq_len \(0\) must be a whole"),
    (dict(factor=0.5), r"YarnConfig.factor \(0.5\) must be a finite number >= 1"),
    (dict(beta_fast=0.5), r"YarnConfig.beta_slow \(1.0\) must be <= beta_fast \(0.5\)"),
]
WRONG = [
    (DecoderConfig, VALID, WRONG_DECODERS),
    (MLAConfig, VALID_MLA, WRONG_LATENT),
    (GatedDeltaConfig, VALID_DELTA, WRONG_DELTA),
    (YarnConfig, VALID_YARN, WRONG_YARN),
]


@pytest.mark.parametrize(
    ("cls", "valid", "change", "message"),
    [(cls, valid, *case) for cls, valid, cases in WRONG for case in cases],
)
def test_wrong_values_name_field_relation_and_fix(cls, valid, change, message):
    with pytest.raises(ValueError, match=message) as info:
        cls(**{**valid, **change})
    assert "\n" not in str(info.value)


def test_yarn_scales_by_hand():
    # ln(e) = 1: 0.1 * mscale + 1.
    yarn = YarnConfig(factor=math.e, original_max_seq_len=1024, mscale=2.0, mscale_all_dim=1.0)
    assert yarn.table_scale == pytest.approx(1.2 / 1.1)
    assert yarn.score_scale == pytest.approx(1.1**2) and MLA.score_scale == 0.25
    assert replace(MLA, yarn=yarn).score_scale == pytest.approx(0.25 * 1.1**2)


def test_config_is_frozen_and_counts_layers():
    config = DecoderConfig(**VALID, dense_layers=(1,), mlp_hidden_dim=8)
    assert (config.num_dense_layers, config.num_moe_layers) == (1, 1)
    assert [config.is_dense(i) for i in range(2)] == [False, True]
    dense = replace(config, moe=None, dense_layers=())
    assert dense.num_dense_layers == 2 and dense.is_dense(0)
    with pytest.raises(FrozenInstanceError):
        config.dim = 3
    with pytest.raises(TypeError):
        PRESETS["tiny"] = config


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match=r"preset \('qwen'\) must be one of qwen3-30b-a3b, .*tiny"):
        preset("qwen")


@pytest.mark.parametrize(
    ("name", "total", "active", "unit"),
    [
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 1e8),
        ("qwen3-235b-a22b", 235e9, 22e9, 1e9),
        ("qwen3-next-80b-a3b", 79.67e9, 3.87e9, 1e8),  # 80B and 3B, without the embedding 3.6B
        # 31.6B and 3.6B in the report, 3.2B without embedding and head.
        ("nemotron-3-nano-30b-a3b", 31.58e9, 3.58e9, 1e7),
        ("mixtral-8x7b", 46.7e9, 12.9e9, 1e8),
        ("olmoe-1b-7b", 6.9e9, 1.3e9, 1e8),
        # 15.29e9 and 2.24e9 in the report (arXiv:2502.16982), which leaves out embedding and head.
        ("moonlight-16b-a3b", 15.96e9, 2.915e9, 1e7),
        ("qwen2-57b-a14b", 57.4e9, 14.2e9, 1e8),
        ("deepseek-v2", 236e9, 21.4e9, 1e9),
        ("deepseek-v2-lite", 15.7e9, 2.7e9, 1e8),  # 2.4e9 without embedding and head
        ("gpt-oss-20b", 20.91e9, 4.19e9, 1e8),  # the report's 3.61e9 leaves out the embedding
        ("gpt-oss-120b", 116.83e9, 5.71e9, 1e8),
        ("kimi-k2", 1026.4e9, 32.9e9, 1e8),
    ],
)
def test_published_sizes(name, total, active, unit):
    config = preset(name)
    assert abs(num_params(config) - total) < 0.55 * unit
    assert abs(active_params(config) - active) < 0.55 * unit


def test_published_size_of_deepseek_v3():
    """671B of which 37B are active, and 11.6B for multi-token prediction (published as 11.5B)."""
    config = preset("deepseek-v3")
    main = replace(config, num_mtp_layers=0, mtp_loss_coef=0.0)
    assert abs(num_params(main) - 671e9) < 0.1e9
    # The published figure leaves out the embedding lookup, unlike those of the models above.
    assert abs(active_params(main) - main.vocab_size * main.dim - 37e9) < 0.5e9
    assert abs(num_params(config) - num_params(main) - 11.6e9) < 0.05e9
    # An indexer of V3.2: 64 heads of 128 out of 1536, a key and 64 weights out of 7168, a norm.
    indexer = 64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128
    assert num_params(preset("deepseek-v3.2")) - num_params(config) == 62 * indexer


@pytest.mark.parametrize(
    ("name", "total", "active"), [("glm-4.5", 353e9, 33e9), ("glm-4.5-air", 107e9, 13e9)]
)
def test_published_sizes_of_glm(name, total, active):
    """Table 1 of the report (arXiv:2508.06471): 355B and 106B with 32B and 12B active."""
    main = replace(preset(name), num_mtp_layers=0, mtp_loss_coef=0.0)
    assert abs(num_params(main) - total) < 0.6e9 and abs(active_params(main) - active) < 0.9e9


def test_latent_experts_by_hand() -> None:
    """Four layers, D=64, F=32: an expert has 3 F l numbers, a router E D, projections 2 D l."""
    config = replace(DecoderConfig(**VALID), num_layers=4)
    accuracy, efficiency = (
        with_latent_experts(config.moe, 16, scaling=scaling)  # type: ignore[arg-type]
        for scaling in ("accuracy", "efficiency")
    )
    assert (accuracy.latent_dim, accuracy.num_experts, accuracy.top_k) == (16, 16, 8)
    assert efficiency == replace(accuracy, top_k=2)
    added = 4 * ((16 - 4) * 64 + 2 * 64 * 16)  # rows of routers, and projections
    assert num_params(replace(config, moe=accuracy)) == num_params(config) + added
    assert active_params(replace(config, moe=accuracy)) == active_params(config) + added
    less = 4 * 2 * 3 * 32 * (64 - 16)  # two experts of 16 dims, not of 64
    assert active_params(replace(config, moe=efficiency)) == active_params(config) + added - less
    with pytest.raises(ValueError, match=r"latent_dim \(24\) must divide moe.dim \(64\)"):
        with_latent_experts(config.moe, 24)
    with pytest.raises(ValueError, match=r"go with moe.latent_dim \(16\) = 0"):
        with_latent_experts(accuracy, 16)


SMALL = DecoderConfig(
    vocab_size=8, dim=4, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2, mlp_hidden_dim=16
)


def test_flops_of_a_small_decoder_by_hand():
    # One dense layer, D = 4, 2 heads of 2, V = 8, F = 16: q, k, v, o are 4 x 16 = 64, the MLP is
    # 3 * 64 = 192, three norms of 4 = 12, the head is 32. Attention: 1 layer * 4 * T.
    assert flops_per_token(SMALL, 10) == 6 * (64 + 192 + 12 + 32) + 6 * 4 * 10
    # Five tokens see 1, 2, 3, 3, 3 keys in one of two layers: w - w^2 / (2 T), up to half a key.
    windowed = replace(SMALL, num_layers=2, windows=(3, 0))
    all_keys = replace(SMALL, num_layers=2)
    fewer = flops_per_token(all_keys, 5) - flops_per_token(windowed, 5)
    assert fewer == pytest.approx(3 * (5 - (6 - 9 / 5)) * SMALL.num_heads * 2 * SMALL.head_dim)
    # A layer of linear attention: 2 * 8 + 2 * 16 + 2 weights per input, 4 taps of 32 channels, 16
    # weights per output, 1 + 1 + 16 of vectors, and a state of 8 * 16 numbers, whatever T.
    delta = GatedDeltaConfig(num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=16)
    linear = replace(all_keys, linear_attention=delta, linear_layers=(0,))
    params = 4 * (2 * 8 + 2 * 16 + 2) + 4 * 32 + 16 * 4 + 1 + 1 + 16
    fewer = flops_per_token(all_keys, 10) - flops_per_token(linear, 10)
    assert fewer == 6 * (64 - params) + 6 * 4 * 10 - 18 * 8 * 16
    # A Mamba-2 layer: 2 * 32 + 2 * 8 + 2 weights per input, 4 taps and a bias of 48 channels, 32
    # weights per output, 2 + 2 + 2 + 32 of vectors, one norm, and a state of 2 * 8 * 16 numbers;
    # behind it a layer of attention without MLP, and an MLP without a gate: 64 + 4 and 128 + 4.
    mamba = Mamba2Config(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=16)
    halves = dict(num_layers=3, pattern="M*-", mlp_activation="relu2", linear_attention=mamba)
    params = 4 * (2 * 32 + 2 * 8 + 2) + 5 * 48 + 32 * 4 + 2 + 2 + 2 + 32 + 4
    found = flops_per_token(replace(SMALL, **halves), 10)
    assert found == 6 * (params + 64 + 4 + 128 + 4 + 4 + 32) + 6 * 4 * 10 + 12 * 2 * 8 * 16
    tied = replace(SMALL, tie_embeddings=True)
    assert flops_per_token(tied, 10) == flops_per_token(SMALL, 10)
    assert num_params(SMALL) - num_params(tied) == 32


def test_cost_of_a_document_by_hand():
    config = replace(SMALL, num_kv_heads=1)
    # q, k, v, o are 16 + 8 + 8 + 16, the rest is 192 + 12 + 32; a pair is 3 * 2 * 4 FLOPs. Keys and
    # values of a token are 8 bytes, 0.04 ns; a pair of a forward is 8 FLOPs, 1 / 75,000 ns.
    cost = document_cost(config)
    assert cost.linear == pytest.approx(6 * (48 + 192 + 12 + 32) / 24 * 1.5)
    assert cost.exchange == pytest.approx(3000) and cost.fixed == 1000 * cost.linear
    assert document_cost(config, link_gb_per_s=50).exchange == pytest.approx(12000)
    # DocumentCost's defaults are those of this model, whose head they leave out.
    qwen, default = document_cost(preset("qwen3-30b-a3b")), DocumentCost()
    assert qwen.exchange == pytest.approx(default.exchange)
    assert qwen.linear == pytest.approx(default.linear, rel=0.2)
    latent = document_cost(preset("deepseek-v3"))
    assert latent.exchange == pytest.approx(2 * 576 * 3000 / (128 * (192 + 128)))


def test_flops_of_latent_attention_and_multi_token_prediction():
    config = preset("tiny-deepseek-v3")
    plain = replace(config, num_mtp_layers=0, mtp_loss_coef=0.0)
    # Queries and keys of 24, values of 12, 4 heads: 3 * 4 * 36 FLOPs per layer and token of T.
    assert flops_per_token(plain, 11) - flops_per_token(plain, 10) == 3 * 3 * 4 * 36
    assert flops_per_token(config, 11) - flops_per_token(config, 10) == 4 * 3 * 4 * 36
    # Five tokens read 1, 2, 3, 3, 3 keys, and two heads of 8 dims score 1 to 5, 2 * 16 FLOPs each.
    sparse = replace(plain, mla=replace(plain.mla, sparse=SPARSE))
    fewer = flops_per_token(plain, 5) - flops_per_token(sparse, 5)
    more = 6 * (num_params(sparse) - num_params(plain))
    pairs = 3 * 3 * 4 * 36 * (5 - (6 - 9 / 5))
    assert fewer == pytest.approx(pairs - more - 3 * 16 * 5)
    # A module more: its own parameters, and the head once more.
    matmul = active_params(config) - active_params(plain) + 128 * 64
    assert flops_per_token(config, 0) - flops_per_token(plain, 0) == 6 * matmul
