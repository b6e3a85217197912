"""Batch invariance: a token's log-probability has the same bits whatever else is computed.

Each model is one whose bits differ without the option.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MemoryOptions, MoEConfig
from moecore.base.options.layer import CapacityConfig
from moecore.base.options.precision import Precision, Recipe
from moecore.families import use_causal_attention
from moecore.models import Decoder, DecoderConfig, SparseKeysConfig, preset
from moecore.rl import PPO, Engine, OwnObjective, Rollouts
from tests.families.transformers.family_models import freeze_indexers, tiny_model
from tests.families.transformers.hf_models import random_model
from tests.rl import engine_cases
from tests.rl.replay_cases import randomize, worst

VOCABULARIES = {"native": engine_cases.VOCABULARY, "transformers": 61}
DTYPES = [torch.float32, torch.bfloat16]


@cache
def made(family: str) -> nn.Module:
    if family == "native":
        return engine_cases.decoder()
    model = random_model("qwen3-moe", num_hidden_layers=3)
    use_causal_attention(model)
    return model


def many(vocabulary: int, longest: int = 33) -> Rollouts:
    """Twelve sequences of 4 tokens or more."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, longest + 1, (12,), generator=g).tolist()
    ids = [torch.randint(0, vocabulary, (n,), generator=g) for n in lengths]
    rollouts = Rollouts.of([x[:2] for x in ids], [x[2:] for x in ids])
    advantages_N = torch.randn(sum(lengths), generator=g)
    return rollouts.replace(advantages_N=advantages_N)


def engines_of(model, dtype, device="cpu", **options) -> Callable[..., Engine]:
    """Return what makes engines of a copy of a model."""
    model = copy.deepcopy(model).to(dtype)
    step = engine_cases.engine_of(model, device=device, **options).step
    return lambda max_tokens, **how: Engine(model, step, max_tokens=max_tokens, **how)


def in_all_ways(make_engine, rollouts, max_tokens=(40, 64, 512)) -> list[Tensor]:
    """Return log-probabilities and entropies of sequences alone, in batches, in another order, and
    of a training forward."""
    few, some, all_tokens = max_tokens
    order = list(range(rollouts.num_sequences))
    alone = [both(make_engine(few), rollouts.take([i])) for i in order]
    turned = both(make_engine(all_tokens), rollouts.take(order[::-1]))
    engine = make_engine(some)
    trained = engine.forward_backward(rollouts, PPO(entropy_coef=0.1)).scores
    engine.step.drop()
    assert trained.entropy_N is not None
    return [
        torch.cat(alone, dim=1),
        both(make_engine(few), rollouts),
        torch.cat(turned.split(rollouts.lengths[::-1], dim=1)[::-1], dim=1),
        torch.stack([trained.log_probs_N, trained.entropy_N]),
    ]


def both(engine: Engine, rollouts: Rollouts) -> Tensor:
    """Return log-probabilities and entropies, [2, N]."""
    scores = engine.log_probs(rollouts, entropy=True)
    assert scores.entropy_N is not None
    return torch.stack([scores.log_probs_N, scores.entropy_N])


def are_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", VOCABULARIES)
def test_bits_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    rollouts, make_engine = many(VOCABULARIES[family]), engines_of(made(family), dtype)
    found = in_all_ways(partial(make_engine, batch_invariant=True), rollouts)
    assert are_equal(found)
    plain = in_all_ways(make_engine, rollouts)
    if dtype == torch.float32:  # in 16 bits some CPUs multiply small matrices in one way
        assert not are_equal(plain)
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=atol)


def larger(family: str) -> nn.Module:
    """Of sizes for which libraries have several kernels."""
    if family == "transformers":
        sizes = dict(vocab_size=4096, hidden_size=512, moe_intermediate_size=256, head_dim=64)
        model = random_model("qwen3-moe", num_experts_per_tok=4, **sizes)
        use_causal_attention(model)
        return model
    moe = MoEConfig(dim=512, hidden_dim=256, num_experts=16, top_k=4, shared_hidden_dim=256)
    sizes = dict(vocab_size=4096, dim=512, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64)
    model = Decoder(DecoderConfig(**sizes, moe=moe, qk_norm="head", windows=(0, 100)))
    randomize(model, 0)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype", "expert_backend"),
    [
        ("native", torch.bfloat16, "auto"),
        ("native", torch.bfloat16, "torch"),
        ("native", torch.float32, "torch"),
        ("transformers", torch.bfloat16, "auto"),
    ],
)
def test_bits_on_cuda(family: str, dtype: torch.dtype, expert_backend: str) -> None:
    rollouts = engine_cases.moved(many(4096, 400), "cuda")
    make_engine = engines_of(larger(family), dtype, "cuda", expert_backend=expert_backend)
    how: Any = dict(max_tokens=(400, 640, 4096))
    found = in_all_ways(partial(make_engine, batch_invariant=True), rollouts, **how)
    assert are_equal(found)
    plain = in_all_ways(make_engine, rollouts, **how)
    if dtype == torch.float32:  # in bf16 an H100 multiplies rows of these numbers in one way
        assert not are_equal(plain)
    wide = both(engines_of(larger(family), torch.float32, "cuda")(4096), rollouts)
    error, allowed = (float((x[0] - wide).abs().mean()) for x in (found, plain))
    assert error <= 2 * allowed + 1e-4


def test_a_first_step_has_ratios_of_one() -> None:
    """Exactly, in other rows than those in which old log-probabilities were computed."""
    rollouts, make_engine = many(engine_cases.VOCABULARY), engines_of(made("native"), torch.float32)
    old_N = make_engine(40, batch_invariant=True).log_probs(rollouts).log_probs_N
    seen: list[Tensor] = []

    def ratios(log_probs_N: Tensor, _: Tensor | None, rollouts: Rollouts) -> Tensor:
        assert rollouts.old_log_probs_N is not None
        seen.append((log_probs_N - rollouts.old_log_probs_N).exp())
        return -log_probs_N

    engine = make_engine(512, batch_invariant=True)
    engine.forward_backward(rollouts.replace(old_log_probs_N=old_N), OwnObjective(ratios))
    assert torch.equal(torch.cat(seen), torch.ones(len(old_N)))


@pytest.mark.parametrize("recompute", [(), ("moe",)])
def test_gradients(recompute: tuple[Any, ...]) -> None:
    """In fp32 those of the formula; in bf16 as near to them as others are."""
    rollouts = engine_cases.near(
        engine_cases.rollouts_of(1), torch.full((len(engine_cases.rollouts_of(1).tokens_N),), -5.0)
    )
    _, want = engine_cases.by_hand(made("native"), [rollouts], "grpo")
    memory = MemoryOptions(recompute=recompute)

    def error(dtype: torch.dtype, is_invariant: bool) -> float:
        make_engine = engines_of(made("native"), dtype, memory=memory)
        engine = make_engine(24, batch_invariant=is_invariant)
        engine.forward_backward(rollouts, engine_cases.OBJECTIVES["grpo"][0])
        return worst(engine_cases.gradients(engine.model), want)

    assert error(torch.float32, True) < 1e-5
    assert error(torch.bfloat16, True) < 2 * error(torch.bfloat16, False)


@pytest.mark.parametrize(
    ("moe", "options", "message"),
    [
        (dict(capacity=CapacityConfig(factor=1.0)), {}, "capacity of layer 'model.layers.1.mlp'"),
        (dict(router_jitter=0.1), {}, r"router_jitter of layer 'model.*' \(0.1\) must be 0"),
        ({}, dict(expert_backend="sequential"), r"expert_backend \('sequential'\) must be 'auto'"),
        ({}, dict(precision=Precision(recipe=Recipe(), roles=("mlp",))), "precision"),
    ],
)
def test_what_compares_tokens_is_refused(moe: Any, options: Any, message: str) -> None:
    tiny = engine_cases.config()
    assert tiny.moe is not None
    model = Decoder(replace(tiny, moe=replace(tiny.moe, **moe)))
    make_engine = engines_of(model, torch.float32, **options)
    with pytest.raises(ValueError, match=message):
        make_engine(64, batch_invariant=True)
    make_engine(64)


def test_linear_and_sparse_attention_are_refused() -> None:
    latent = preset("tiny-deepseek-v3")
    assert latent.mla is not None
    keys = SparseKeysConfig(num_heads=2, head_dim=8, top_k=4)
    sparse = replace(latent, mla=replace(latent.mla, sparse=keys))
    for refused, message in (
        (preset("tiny-qwen3-next"), r"linear_attention \(Gated.*\) must be None for an Engine"),
        (preset("tiny-nemotron-h"), r"linear_attention \(Mamba2.*\) must be None for an Engine"),
        (sparse, r"mla.sparse \(.*\) must be None, because keys are scored"),
    ):
        make_engine = engines_of(Decoder(refused), torch.float32)
        with pytest.raises(ValueError, match=message):
            make_engine(64, batch_invariant=True)


SHORT_AND_LONG = dict(
    rope_type="longrope",
    short_factor=[1.0] * 4,
    long_factor=[2.0, 3.0, 4.0, 5.0],
    factor=4.0,
    original_max_position_embeddings=8,
)
DYNAMIC = dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=8)


@pytest.mark.parametrize("rope", [DYNAMIC, SHORT_AND_LONG], ids=lambda rope: rope["rope_type"])
def test_angles_of_the_longest_sequence_are_refused(rope: dict[str, Any]) -> None:
    """A sequence beside a longer one would be rotated by the angles of the longer one."""
    sizes = dict(max_position_embeddings=8, rope_parameters=rope | {"rope_theta": 1e4})
    model = random_model("qwen3-moe", **sizes)
    use_causal_attention(model)
    make_engine = engines_of(model, torch.float32)
    message = f"rope_type of 'model.rotary_emb' .'{rope['rope_type']}'. must have angles"
    with pytest.raises(ValueError, match=message):
        make_engine(64, batch_invariant=True)
    with pytest.raises(ValueError, match="cu_seqlens must be None for a model with rope_type"):
        make_engine(64).log_probs(many(61))


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_sparse_attention_of_transformers_is_refused(family: str) -> None:
    model = tiny_model(
        family, **{"deepseek_v4": dict(mlp_layer_types=["moe", "moe"])}.get(family, {})
    )
    use_causal_attention(model)
    freeze_indexers(model)
    with pytest.raises(ValueError, match=r"a layer of sparse attention .* must not be in"):
        engines_of(model, torch.float32)(64, batch_invariant=True)
