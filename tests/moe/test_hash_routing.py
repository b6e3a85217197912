"""Experts by token id: the table chooses, scores weigh; against the oracle with the table's ids."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.models import Decoder, DecoderConfig
from moecore.rl import RouterReplay
from tests.moe.moe_cases import compare_with_oracle, make_layer

BASE = MoEConfig(
    dim=16,
    hidden_dim=8,
    num_experts=6,
    top_k=3,
    score_function="sqrtsoftplus",
    routed_scaling_factor=1.5,
    assignment="hash",
    hash_vocab_size=11,
)
CONFIGS = {
    "plain": BASE,
    "post": replace(BASE, score_function="softmax", score_order="post"),
    "one": replace(BASE, top_k=1, weights_on_input=True),
    "capacity": replace(BASE, capacity=CapacityConfig(factor=0.8, drop="position")),
    "z-loss": replace(BASE, balance=BalanceConfig(z_loss_coef=0.1)),
}
TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))


def hash_layer(config: MoEConfig = BASE) -> MoELayer:
    layer, generator = make_layer(config), torch.Generator().manual_seed(3)
    order = torch.rand(config.hash_vocab_size, config.num_experts, generator=generator).argsort(1)
    table_of(layer).copy_(order[:, : config.top_k])
    return layer


def table_of(layer: MoELayer) -> Tensor:
    table: Tensor = layer.get_part("router").token_experts
    return table


@pytest.mark.parametrize("masked", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_oracle(name: str, masked: bool) -> None:
    layer = hash_layer(CONFIGS[name]).train()
    mask = torch.arange(7) >= torch.tensor([[5], [7]]) if masked else None
    given = table_of(layer)[TOKENS.flatten()]
    if mask is not None:
        given = given.masked_fill(mask.flatten()[:, None], -1)

    def forward(x: Tensor, padding_mask: Tensor | None) -> Tensor:
        y: Tensor = layer(x, padding_mask, token_ids=TOKENS)
        return y

    compare_with_oracle(layer, X, padding_mask=mask, forward=forward, given_ids_NK=given)


def test_the_table_is_distinct_and_known_by_its_seed() -> None:
    layer = MoELayer(replace(BASE, hash_vocab_size=20_000))
    layer.init_weights(key="a")
    table = table_of(layer).clone()
    assert (table.sort(1).values.diff(dim=1) > 0).all() and 0 <= table.min() <= table.max() < 6
    torch.testing.assert_close(
        table.flatten().bincount() / 60_000, torch.full((6,), 1 / 6.0), atol=0.01, rtol=0
    )
    layer.init_weights(key="a")
    assert torch.equal(table_of(layer), table)
    layer.init_weights(key="b")
    assert not torch.equal(table_of(layer), table)


def test_a_recording_replays_its_own_bits_and_another_choice_wins() -> None:
    layer = hash_layer()
    model = torch.nn.ModuleDict({"mlp": layer})
    replay = RouterReplay(model)
    with replay.record():
        y = layer(X, token_ids=TOKENS)
    choices = replay.choices("cpu")
    assert torch.equal(choices["mlp"][0], table_of(layer)[TOKENS.flatten()].int())
    with replay.replay(choices):
        assert torch.equal(layer(X, token_ids=TOKENS), y)
    other = {"mlp": [(choices["mlp"][0] + 1) % 6]}
    with replay.replay(other):
        assert not torch.equal(layer(X), y)  # needs no ids


def test_a_decoder_is_one_whose_first_layers_replay_their_tables() -> None:
    moe = replace(BASE, assignment="learned", hash_vocab_size=0, expert_bias=True)
    sizes: Any = dict(vocab_size=11, dim=16, num_heads=2, num_kv_heads=2, head_dim=8)
    config = DecoderConfig(
        **sizes, num_layers=4, dense_layers=(0,), mlp_hidden_dim=8, hash_layers=2, moe=moe
    )
    ours, other = Decoder(config), Decoder(replace(config, hash_layers=0))
    mlps = {f"model.layers.{i}.mlp": ours.layers[i].mlp for i in (1, 2, 3)}
    kinds = [layer.config.assignment for layer in mlps.values()]
    assert kinds == ["hash", "hash", "learned"]
    other.load_state_dict(ours.state_dict(), strict=False)
    names = [*mlps][:2]
    tables = {name: [table_of(mlps[name])[TOKENS.flatten()].int()] for name in names}
    with RouterReplay(other, layers=names).replay(tables):
        wanted = other(TOKENS, TOKENS)
        wanted.backward()
    loss = ours(TOKENS, TOKENS)
    loss.backward()
    assert torch.equal(loss, wanted)
    for (name, a), b in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_no_tokens_need_no_ids_and_tokens_need_theirs() -> None:
    layer = hash_layer()
    assert layer(X[0, :0]).shape == (0, 16)
    for ids, given in ((None, "None"), (TOKENS[:1], "7 of them")):
        with pytest.raises(ValueError, match=rf"token_ids \({given}\) must be those of the 14 tok"):
            layer(X, token_ids=ids)
    with pytest.raises(IndexError):
        layer(X, token_ids=TOKENS - 1)
    assert torch.equal(layer(X, token_ids=TOKENS.int()), layer(X, token_ids=TOKENS))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (dict(hash_vocab_size=0), r"hash_vocab_size \(0\) must be > 0 with assignment \('hash'\)"),
        (dict(assignment="learned"), r"hash_vocab_size \(11\) must .* 0 with 'learned'"),
        (dict(expert_bias=True), r"expert_bias \(True\) must be False with assignment \('hash'\)"),
        (dict(num_groups=2, top_groups=1, top_k=2), r"top_groups \(1\) must equal num_groups"),
        (dict(balance=BalanceConfig(sequence_coef=0.1)), "must have no loss on counts"),
        (dict(zero_experts=1), r"zero_experts \(1\) must be 0 with assignment \('hash'\)"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(BASE, **fields)


@pytest.mark.parametrize(
    ("moe", "layers", "rule"),
    [
        (BASE, 0, r"moe.assignment \('hash'\) must not be 'hash' in a decoder"),
        (
            replace(BASE, assignment="learned", hash_vocab_size=0),
            1,
            r"hash_layers \(1\) must be < the",
        ),
    ],
)
def test_a_decoder_says_how_many_layers(moe: MoEConfig, layers: int, rule: str) -> None:
    sizes: Any = dict(vocab_size=11, dim=16, num_heads=2, num_kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=rule):
        DecoderConfig(**sizes, num_layers=1, hash_layers=layers, moe=moe)
