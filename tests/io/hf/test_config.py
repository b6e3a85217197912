import json
from dataclasses import replace
from typing import Any

import pytest

from moecore import BalanceConfig
from moecore.io.hf.config import decoder_config_from_hf
from moecore.models import preset
from tests.models.hf_pairs import PAIRS

# The fields of the published files that say what the model computes.
COMMON: dict[str, Any] = dict(attention_dropout=0.0, hidden_act="silu", tie_word_embeddings=False)
QWEN3_30B: dict[str, Any] = COMMON | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], attention_bias=False,
    decoder_sparse_step=1, head_dim=128, hidden_size=2048, intermediate_size=6144,
    max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
    moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, rms_norm_eps=1e-6,
    rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = COMMON | dict(
    model_type="mixtral", hidden_size=4096, intermediate_size=14336,
    max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2,
    num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, rms_norm_eps=1e-5,
    rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, vocab_size=32000,
)  # fmt: skip
OLMOE_1B_7B: dict[str, Any] = COMMON | dict(
    model_type="olmoe", attention_bias=False, clip_qkv=None, hidden_size=2048,
    intermediate_size=1024, max_position_embeddings=4096, norm_topk_prob=False,
    num_attention_heads=16, num_experts=64, num_experts_per_tok=8, num_hidden_layers=16,
    num_key_value_heads=16, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
    router_aux_loss_coef=0.01, vocab_size=50304,
)  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = COMMON | dict(
    model_type="deepseek_v3", attention_bias=False, ep_size=1, first_k_dense_replace=3,
    hidden_size=7168, intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
    n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling=dict(
        beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096, type="yarn",
    ),
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4,
    topk_method="noaux_tc", v_head_dim=128, vocab_size=129280,
)  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | dict(
    model_type="deepseek_v32", index_head_dim=128, index_n_heads=64, index_topk=2048
)
MOONLIGHT: dict[str, Any] = DEEPSEEK_V3 | dict(
    aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_size=2048, intermediate_size=11264,
    max_position_embeddings=8192, moe_intermediate_size=1408, n_group=1, n_routed_experts=64,
    n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
    num_key_value_heads=16, num_nextn_predict_layers=0, q_lora_rank=None, rms_norm_eps=1e-5,
    rope_scaling=None, rope_theta=50000.0, routed_scaling_factor=2.446, seq_aux=True,
    topk_group=1, vocab_size=163840,
)  # fmt: skip
KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | dict(
    model_type="kimi_k2", first_k_dense_replace=1, max_position_embeddings=131072, n_group=1,
    n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64,
    num_nextn_predict_layers=0,
    rope_scaling=DEEPSEEK_V3["rope_scaling"] | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
    rope_theta=50000.0, routed_scaling_factor=2.827, topk_group=1, vocab_size=163840,
)  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = DEEPSEEK_V3 | dict(
    model_type="deepseek_v2", aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_size=5120,
    intermediate_size=12288, moe_intermediate_size=1536, n_routed_experts=160,
    n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, num_hidden_layers=60,
    num_nextn_predict_layers=None,
    rope_scaling=DEEPSEEK_V3["rope_scaling"] | dict(mscale=0.707, mscale_all_dim=0.707),
    routed_scaling_factor=16.0, scoring_func="softmax", seq_aux=True, topk_group=3,
    topk_method="group_limited_greedy", vocab_size=102400,
)  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = DEEPSEEK_V2 | dict(
    hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, n_group=1,
    n_routed_experts=64, num_attention_heads=16, num_hidden_layers=27, num_key_value_heads=16,
    q_lora_rank=None, routed_scaling_factor=1.0, topk_group=1, topk_method="greedy",
)  # fmt: skip
GLM_45: dict[str, Any] = COMMON | dict(
    model_type="glm4_moe", attention_bias=True, first_k_dense_replace=3, head_dim=128,
    hidden_size=5120, intermediate_size=12288, max_position_embeddings=131072,
    moe_intermediate_size=1536, n_group=1, n_routed_experts=160, n_shared_experts=1,
    norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8, num_hidden_layers=92,
    num_key_value_heads=8, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
    rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=2.5,
    topk_group=1, use_qk_norm=True, vocab_size=151552,
)  # fmt: skip
GLM_45_AIR: dict[str, Any] = GLM_45 | dict(
    first_k_dense_replace=1,
    hidden_size=4096,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    num_hidden_layers=46,
    routed_scaling_factor=1.0,
    use_qk_norm=False,
)
QWEN2_57B: dict[str, Any] = COMMON | dict(
    model_type="qwen2_moe", decoder_sparse_step=1, hidden_size=3584, intermediate_size=18944,
    max_position_embeddings=131072, max_window_layers=28, moe_intermediate_size=2560,
    norm_topk_prob=False, num_attention_heads=28, num_experts=64, num_experts_per_tok=8,
    num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0,
    router_aux_loss_coef=0.001, shared_expert_intermediate_size=20480, sliding_window=131072,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN3_NEXT: dict[str, Any] = COMMON | dict(
    model_type="qwen3_next", attention_bias=False, decoder_sparse_step=1,
    full_attention_interval=4, head_dim=256, hidden_size=2048, intermediate_size=5120,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
    mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_attention_heads=16,
    num_experts=512, num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2,
    partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
    router_aux_loss_coef=0.001, shared_expert_intermediate_size=512, use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
GPT_OSS_20B: dict[str, Any] = COMMON | dict(
    model_type="gpt_oss", attention_bias=True, experts_per_token=4, head_dim=64,
    hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
    num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
    num_local_experts=32, quantization_config=dict(quant_method="mxfp4"), rms_norm_eps=1e-5,
    rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
        rope_type="yarn", truncate=False,
    ),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
    vocab_size=201088,
)  # fmt: skip
GPT_OSS_120B: dict[str, Any] = GPT_OSS_20B | dict(
    layer_types=["sliding_attention", "full_attention"] * 18,
    num_hidden_layers=36,
    num_local_experts=128,
)
# The config.json of the preset "tiny-deepseek-v3".
TINY_JSON: dict[str, Any] = DEEPSEEK_V3 | dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12,
    rope_scaling=DEEPSEEK_V3["rope_scaling"]
    | dict(factor=4.0, original_max_position_embeddings=32),
    max_position_embeddings=128, first_k_dense_replace=1, intermediate_size=128,
    moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
)  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = dict(
    model_type="nemotron_h", attention_bias=False, attention_dropout=0.0, chunk_size=128,
    conv_kernel=4, expand=2, head_dim=128, hidden_dropout=0.0, hidden_size=2688,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    initializer_range=0.02, intermediate_size=1856, layer_norm_epsilon=1e-5, mamba_head_dim=64,
    mamba_hidden_act="silu", mamba_num_heads=64, mamba_proj_bias=False,
    max_position_embeddings=262144, mlp_bias=False, mlp_hidden_act="relu2",
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8,
    n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=32,
    num_experts_per_tok=6, num_hidden_layers=52, num_key_value_heads=2,
    partial_rotary_factor=1.0, residual_in_fp32=False, rope_theta=10000,
    routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=128,
    tie_word_embeddings=False, time_step_floor=1e-4, time_step_max=0.1, time_step_min=0.001,
    topk_group=1, use_bias=False, use_conv_bias=True, vocab_size=131072,
)  # fmt: skip
PUBLISHED = {
    "nemotron-3-nano-30b-a3b": NEMOTRON_3_NANO,
    "qwen3-30b-a3b": QWEN3_30B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32,
    "moonlight-16b-a3b": MOONLIGHT,
    "kimi-k2": KIMI_K2,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "glm-4.5": GLM_45,
    "glm-4.5-air": GLM_45_AIR,
    "qwen2-57b-a14b": QWEN2_57B,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_the_preset(name, tmp_path):
    assert decoder_config_from_hf(PUBLISHED[name]) == preset(name)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert decoder_config_from_hf(tmp_path) == preset(name)
    assert decoder_config_from_hf(tmp_path / "config.json") == preset(name)


@pytest.mark.parametrize("name", PAIRS)
def test_what_transformers_writes_gives_the_native_config(name):
    """The pairs' logits and gradients equal the decoder's in tests/models."""
    pytest.importorskip("transformers")
    hf, want = PAIRS[name]()
    found = decoder_config_from_hf(hf.config.to_dict())
    if found.moe is not None:
        balance = BalanceConfig()
        assert (found.moe.balance != balance) == (name != "gpt-oss")
        found = replace(found, moe=replace(found.moe, balance=balance))
    assert found == want


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_both_names_of_sparse_layers_are_read(kind):
    """transformers 5.18 renamed the second to the first."""
    values = DEEPSEEK_V32 | dict(layer_types=[kind] * DEEPSEEK_V32["num_hidden_layers"])
    assert decoder_config_from_hf(values) == decoder_config_from_hf(DEEPSEEK_V32)


def test_balance_coefficient_is_kept():
    found = decoder_config_from_hf(QWEN3_30B | dict(router_aux_loss_coef=0.25))
    assert found.moe.balance == BalanceConfig(micro_batch_coef=0.25)


QWEN2 = {k: v for k, v in QWEN3_30B.items() if k != "head_dim"} | dict(
    model_type="qwen2_moe", qkv_bias=False, shared_expert_intermediate_size=5632
)


def test_qwen2_without_biases_has_a_gated_shared_expert():
    found = decoder_config_from_hf(QWEN2)
    assert found.attention_bias is None
    for bias in (None, True):  # None: the default of its class
        assert decoder_config_from_hf(QWEN2 | dict(qkv_bias=bias)).attention_bias == "qkv"
    assert (found.moe.shared_hidden_dim, found.moe.shared_gate) == (5632, True)
    assert found.qk_norm is None and found.head_dim == 64


MISTRAL_7B: dict[str, Any] = {k: v for k, v in MIXTRAL_8X7B.items() if "expert" not in k} | dict(
    model_type="mistral", vocab_size=32768
)


def test_defaults_of_dense_classes():
    found = decoder_config_from_hf({k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"})
    assert found.windows == (4096,)
    for window in (None, 32768):
        assert decoder_config_from_hf(MISTRAL_7B | dict(sliding_window=window)).windows == ()
    found = decoder_config_from_hf(MISTRAL_7B | dict(model_type="qwen3", num_attention_heads=64))
    assert (found.head_dim, found.qk_norm, found.moe) == (128, "head", None)
    assert found.mlp_hidden_dim == 14336 and not found.tie_embeddings


def test_defaults_of_qwen3_next():
    """A class without most fields, and its pattern of layers as transformers writes it."""
    own = ("head_dim", "partial_rotary_factor", "norm_topk_prob", "full_attention_interval")
    few = {k: v for k, v in QWEN3_NEXT.items() if k not in own and not k.startswith("linear_")}
    assert decoder_config_from_hf(few) == preset("qwen3-next-80b-a3b")
    kinds = ["full_attention", "linear_attention"] * 24
    found = decoder_config_from_hf(QWEN3_NEXT | dict(layer_types=kinds))
    assert found.linear_layers == tuple(range(1, 48, 2))
    found = decoder_config_from_hf(QWEN3_NEXT | dict(layer_types=["full_attention"] * 48))
    assert found.linear_layers == () and found.linear_attention is None


def test_sparse_steps_and_dense_layers():
    found = decoder_config_from_hf(
        QWEN3_30B | dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    )
    assert found.dense_layers == (0, 2, 3, 4) and found.mlp_hidden_dim == 6144
    for dense in (dict(num_experts=0), dict(mlp_only_layers=list(range(48)))):
        found = decoder_config_from_hf(QWEN3_30B | dense)
        assert found.moe is None and found.mlp_hidden_dim == 6144
    found = decoder_config_from_hf(
        DEEPSEEK_V3 | dict(first_k_dense_replace=61, num_nextn_predict_layers=0)
    )
    assert found.moe is None and found.num_mtp_layers == 0


ROPE = DEEPSEEK_V3["rope_scaling"]


def test_yarn_defaults_are_those_of_transformers():
    short = {"type": "yarn", "factor": None, "original_max_position_embeddings": 4096}
    yarn = decoder_config_from_hf(DEEPSEEK_V3 | dict(rope_scaling=short)).mla.yarn
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow) == (40.0, 32.0, 1.0)
    assert (yarn.mscale, yarn.mscale_all_dim) == (1.0, 0.0)
    alone = decoder_config_from_hf(DEEPSEEK_V3 | dict(rope_scaling=short | dict(mscale=0.7)))
    assert alone.mla.yarn == yarn  # one scale alone does not count


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (MIXTRAL_8X7B, dict(attention_bias=True), r"attention_bias \(True\) of model_type \('mix"),
        (DEEPSEEK_V3, dict(attention_bias=True), r"attention_bias \(True\)"),
        (QWEN3_30B, dict(attention_dropout=0.1), r"attention_dropout \(0.1\)"),
        (QWEN3_30B, dict(hidden_act="gelu"), r"hidden_act \('gelu'\)"),
        (QWEN3_30B, dict(use_sliding_window=True), r"use_sliding_window \(True\)"),
        (
            QWEN3_30B,
            dict(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
            r"rope_type \('dynamic'\)",
        ),
        (QWEN3_30B, dict(partial_rotary_factor=0.5), r"partial_rotary_factor \(0.5\)"),
        (QWEN2, dict(layer_types=["sliding_attention"]), r"layer_types \(\['sliding_attention"),
        (QWEN2, dict(model_type="qwen3", layer_types=["sliding_attention"]), r"layer_types \(\["),
        (MISTRAL_7B, dict(model_type="llama", mlp_bias=True), r"mlp_bias \(True\)"),
        (MIXTRAL_8X7B, dict(router_jitter_noise=0.1), r"router_jitter_noise \(0.1\)"),
        (OLMOE_1B_7B, dict(clip_qkv=8.0), r"clip_qkv \(8.0\)"),
        (OLMOE_1B_7B, dict(rope_parameters={"rope_type": "llama3"}), r"rope_type \('llama3'\)"),
        (DEEPSEEK_V3, dict(moe_layer_freq=2), r"moe_layer_freq \(2\)"),
        (DEEPSEEK_V3, dict(scoring_func="softmax"), r"scoring_func \('softmax'\)"),
        (DEEPSEEK_V3, dict(rope_interleave=False), r"rope_interleave \(False\)"),
        (
            DEEPSEEK_V3,
            dict(rope_scaling=ROPE | {"attention_factor": 1.5}),
            r"attention_factor \(1.5\)",
        ),
        (DEEPSEEK_V2, dict(norm_topk_prob=True), r"norm_topk_prob \(True\)"),
        (DEEPSEEK_V2, dict(topk_method="noaux_tc"), r"topk_method \('noaux_tc'\)"),
        (DEEPSEEK_V3, dict(rope_scaling=ROPE | {"mscale": 0}), r"mscale_all_dim \(1.0\)"),
        (QWEN3_30B, dict(model_type="gpt2"), r"model_type \('gpt2'\) must be one of qwen3_"),
        (GPT_OSS_20B, dict(layer_types=["chunked_attention"] * 24), r"layer_types \(\['chunked_at"),
        (DEEPSEEK_V32, dict(layer_types=["full_attention"] * 61), r"layer_types \(\['full_att"),
        (DEEPSEEK_V32, dict(mlp_layer_types=["sparse"] * 61), r"mlp_layer_types \(\['sparse'"),
        (QWEN3_NEXT, dict(layer_types=["mamba"] * 48), r"layer_types \(\['mamba'"),
        (QWEN3_NEXT, dict(layer_types=["linear_attention"] * 48), r"layer_types \(\['linear"),
        (QWEN3_NEXT, dict(linear_key_head_dim=20), r"linear_key_head_dim \(20\)"),
        (NEMOTRON_3_NANO, dict(num_nextn_predict_layers=1), r"num_nextn_predict_layers \(1\)"),
        (NEMOTRON_3_NANO, dict(layers_block_type=["conv"] * 9), r"layers_block_type \(\['conv'"),
        (NEMOTRON_3_NANO, dict(hybrid_override_pattern="ME"), r"hybrid_override_pattern \('ME'"),
        (NEMOTRON_3_NANO, dict(hybrid_override_pattern="M*O"), r"hybrid_override_pattern \('M\*O"),
        (NEMOTRON_3_NANO, dict(mlp_hidden_act="silu"), r"mlp_hidden_act \('silu'\)"),
        (NEMOTRON_3_NANO, dict(use_conv_bias=False), r"use_conv_bias \(False\)"),
        (NEMOTRON_3_NANO, dict(use_bias=True), r"use_bias \(True\)"),
        (NEMOTRON_3_NANO, dict(sliding_window=64), r"sliding_window \(64\)"),
        (QWEN3_30B, dict(model_type=None), r"model_type \('None'\) must be one of"),
    ],
)
def test_what_the_decoder_lacks_is_refused(base, change, message):
    with pytest.raises(NotImplementedError, match=message) as info:
        decoder_config_from_hf(base | change)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (QWEN3_30B, "hidden_size"),
        (QWEN3_30B, "num_experts"),
        (QWEN3_30B, "rope_theta"),
        (DEEPSEEK_V3, "kv_lora_rank"),
    ],
)
def test_missing_fields_are_named(base, name):
    with pytest.raises(ValueError, match=rf"config.json {name} \(None\) must be given for model_"):
        decoder_config_from_hf(base | {name: None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_attention_heads=0), r"num_attention_heads \(0\) must be a whole number >= 1"),
        (dict(num_attention_heads="x"), r"num_attention_heads \('x'\) must be a whole number"),
        (dict(num_hidden_layers=True), r"num_hidden_layers \(True\) must be a whole number from 1"),
        (dict(decoder_sparse_step=0), r"decoder_sparse_step \(0\) must be a whole number from 1"),
        (dict(rope_scaling=[1]), r"rope_scaling \(\[1\]\) must be an object"),
        (dict(mlp_only_layers=3), r"mlp_only_layers \(3\) must be a list of whole numbers"),
        (dict(rms_norm_eps="1e-6"), r"rms_norm_eps \('1e-6'\) must be a number"),
        (dict(tie_word_embeddings="yes"), r"tie_word_embeddings \('yes'\) must be true or false"),
    ],
)
def test_values_of_another_kind_are_named(change, message):
    with pytest.raises(ValueError, match=f"config.json {message}.*: correct it"):
        decoder_config_from_hf(QWEN3_30B | change)


def test_broken_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"config.json\) must exist"):
        decoder_config_from_hf(tmp_path)
    for text, message in (("{", "must be JSON"), ("[1]", "must be a JSON object, not a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            decoder_config_from_hf(tmp_path)
