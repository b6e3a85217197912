"""DecoderConfig's rules, the presets' published sizes, and the counting formulas."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from moecore import MoEConfig
from moecore.models import (
    PRESETS,
    Decoder,
    DecoderConfig,
    active_params,
    flops_per_token,
    num_params,
    preset,
)

MOE = MoEConfig(dim=64, hidden_dim=32, num_experts=4, top_k=2)
VALID = dict(vocab_size=32, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, moe=MOE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_size=0), r"vocab_size \(0\) must be a whole number >= 1"),
        (dict(num_layers=True), r"num_layers \(True\) must be a whole number"),
        (dict(max_seq_len=1.5), r"max_seq_len \(1.5\) must be a whole number"),
        (dict(ce_chunk_tokens=0), r"ce_chunk_tokens \(0\) must be"),
        (dict(rope_theta=0.0), r"rope_theta \(0.0\) must be > 0"),
        (dict(norm_eps=-1e-6), r"norm_eps \(-1e-06\) must be > 0"),
        (dict(num_kv_heads=3), r"num_kv_heads \(3\) must divide num_heads \(4\)"),
        (dict(head_dim=15), r"head_dim \(15\) must be even"),
        (dict(qk_norm="layer"), r"qk_norm \('layer'\) must be one of 'head', 'full' or None"),
        (dict(dim=32), r"moe.dim \(64\) must equal dim \(32\)"),
        (dict(moe=None, dense_layers=(0,)), r"dense_layers \(\(0,\)\) must be \(\) with moe"),
        (dict(dense_layers=(1, 0)), r"dense_layers \(\(1, 0\)\) must rise without repeats"),
        (dict(dense_layers=(0, 0)), r"must rise without repeats"),
        (dict(dense_layers=(2,)), r"must lie in \[0, num_layers \(2\)\)"),
        (dict(dense_layers=(-1,)), r"must lie in"),
        (dict(dense_layers=(0, 1)), r"must leave a layer of num_layers \(2\) to moe"),
        (dict(dense_layers=(0,)), r"mlp_hidden_dim \(0\) must be >= 1 with 1 dense layers"),
        (dict(moe=None), r"mlp_hidden_dim \(0\) must be >= 1 with 2 dense layers"),
        (dict(mlp_hidden_dim=8), r"mlp_hidden_dim \(8\) must be 0"),
    ],
)
def test_wrong_values_name_field_relation_and_fix(change, message):
    with pytest.raises(ValueError, match=message) as info:
        DecoderConfig(**{**VALID, **change})
    assert "\n" not in str(info.value)


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


@pytest.mark.parametrize("name", PRESETS)
def test_num_params_counts_the_real_module(name):
    model = Decoder(preset(name), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert num_params(preset(name)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_active_params_leave_out_the_unused_experts(name):
    config = preset(name)
    model = Decoder(config, device="meta")
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    unused = experts * (config.moe.num_experts - config.moe.top_k) // config.moe.num_experts
    assert active_params(config) == num_params(config) - unused


def test_biases_are_counted():
    moe = replace(MOE, fc1_bias=True, fc2_bias=True, router_bias=True)
    for qk_norm in ("head", "full"):
        config = DecoderConfig(**{**VALID, "moe": moe, "qk_norm": qk_norm})
        real = sum(p.numel() for p in Decoder(config, device="meta").parameters())
        assert num_params(config) == real


@pytest.mark.parametrize(
    ("name", "total", "active", "unit"),
    [
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 1e8),
        ("qwen3-235b-a22b", 235e9, 22e9, 1e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9, 1e8),
        ("olmoe-1b-7b", 6.9e9, 1.3e9, 1e8),
    ],
)
def test_published_sizes(name, total, active, unit):
    config = preset(name)
    assert abs(num_params(config) - total) < 0.55 * unit
    assert abs(active_params(config) - active) < 0.55 * unit


def test_flops_of_a_small_decoder_by_hand():
    # One dense layer, D = 4, 2 heads of 2, V = 8, F = 16: q, k, v, o are 4 x 16 = 64, the MLP is
    # 3 * 64 = 192, three norms of 4 = 12, the head is 32. Attention: 1 layer * 4 * T.
    config = DecoderConfig(
        vocab_size=8,
        dim=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        mlp_hidden_dim=16,
    )
    assert flops_per_token(config, 10) == 6 * (64 + 192 + 12 + 32) + 6 * 4 * 10
    tied = replace(config, tie_embeddings=True)
    assert flops_per_token(tied, 10) == flops_per_token(config, 10)
    assert num_params(config) - num_params(tied) == 32
