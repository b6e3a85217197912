from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.models import Decoder, DecoderConfig, preset
from moecore.models.config import MLAConfig
from moecore.train import QKClip
from moecore.train.optim import qk_clip

TAU = 4.5
PLAIN = DecoderConfig(
    vocab_size=61, dim=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, mlp_hidden_dim=24
)
LATENT = MLAConfig(
    kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
MLA = replace(PLAIN, num_kv_heads=6, head_dim=10, mla=LATENT)
CONFIGS = {
    "gqa": PLAIN,
    "gqa-biases": replace(PLAIN, attention_bias="qkv", rotary_dim=4),
    "mla": MLA,
    "mla-direct": replace(MLA, mla=replace(LATENT, q_lora_rank=0)),
}
TOKENS = torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(0))


def max_scores_ref(q_BTHd: Tensor, k_BThd: Tensor, scale: float) -> Tensor:
    scores_HBTT = every(q_BTHd, k_BThd, scale)
    future_TT = torch.ones(scores_HBTT.shape[-2:]).triu(1).bool()
    return scores_HBTT.masked_fill(future_TT, -torch.inf).amax((1, 2, 3))


def make_model(name: str) -> Decoder:
    """A model of which some heads have large logits."""
    model = Decoder(CONFIGS[name])
    for layer in model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj"):
            if (projection := getattr(attention, name, None)) is not None:
                projection.weight.data.mul_(10)
                if projection.bias is not None:
                    projection.bias.data.fill_(0.2)
        queries = attention.q_proj if hasattr(attention, "q_proj") else attention.q_b_proj
        by_head = queries.weight.data.unflatten(0, (6, -1))
        by_head[[1, 5]] *= torch.tensor([8.0, 3.0])[:, None, None]
    return model


def logits(model: Decoder) -> list[tuple[Tensor, Tensor, float]]:
    """Queries, keys and scale of each layer, for the same input of attention whatever is before."""
    found: list[Any] = []
    for layer in model.layers:
        layer.self_attn.observe_scores = lambda q, k, _, s: found.append((q, k, s))
    model(TOKENS)
    return found


@pytest.mark.parametrize("shape", [(2, 23, 6, 2), (1, 1, 4, 4), (0, 5, 2, 1), (3, 16, 4, 1)])
@pytest.mark.parametrize("block", [1, 500, 1 << 26])
def test_largest_logits(shape: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_clip, "BLOCK_NUMEL", block)
    B, T, H, h = shape
    q, k = torch.randn(B, T, H, 5), torch.randn(B, T, h, 5)
    found_H = torch.full((H,), -torch.inf)
    qk_clip._update_max_op(found_H, q, k, None, None, None, 0.3)
    want_H = max_scores_ref(q, k, 0.3) if B else found_H
    torch.testing.assert_close(found_H, want_H)
    zeros = torch.zeros_like(k)  # a running maximum
    qk_clip._update_max_op(found_H, -100 * q, zeros, None, None, None, 0.3)
    torch.testing.assert_close(found_H, want_H.clamp(min=0.0 if B else -torch.inf))


@pytest.mark.parametrize("block", [1, 500, 1 << 26])
def test_largest_logits_of_packed_documents(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_clip, "BLOCK_NUMEL", block)
    q, k = torch.randn(2, 9, 6, 5), torch.randn(2, 9, 2, 5)
    found_H = torch.full((6,), -torch.inf)
    cu_seqlens = torch.tensor([0, 7, 8, 18, 18], dtype=torch.int32)
    qk_clip._update_max_op(found_H, q, k, None, cu_seqlens, None, 0.3)
    parts = [[x.flatten(0, 1).split([7, 1, 10])[i][None] for x in (q, k)] for i in range(3)]
    want_H = torch.stack([max_scores_ref(*part, 0.3) for part in parts]).amax(0)
    torch.testing.assert_close(found_H, want_H)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_has_no_part(name: str, packed: bool) -> None:
    """The largest logits of rows of 19 and 4 tokens are those of each row alone."""
    model, lengths = make_model(name), (19, 4)
    clip = QKClip(model, tau=1e30)
    ends = torch.tensor([0, 19, 23, 27, 46], dtype=torch.int32) if packed else None
    padding_BT = torch.arange(23) >= torch.tensor(lengths)[:, None]
    longest = 19 if packed else None
    model(TOKENS, padding_mask_BT=padding_BT, cu_seqlens=ends, max_seqlen=longest)
    clip.step()
    found = dict(clip.max_scores)
    for row, length in enumerate(lengths):
        model(TOKENS[row : row + 1, :length])
    clip.step()
    for layer, want_H in clip.max_scores.items():
        torch.testing.assert_close(found[layer], want_H)


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_above_tau_end_at_tau(name: str) -> None:
    model = make_model(name)
    clip = QKClip(model, tau=TAU)
    model(TOKENS[:1], TOKENS[:1]).backward()
    model(TOKENS[1:], TOKENS[1:]).backward()  # another micro-batch
    model.eval()
    model(100 * TOKENS % 61)  # not counted
    clip.close()
    before = logits(model)
    clip.step()
    after = logits(model)
    old, new = before[0], after[0]  # later layers see other hidden states
    max_H = clip.max_scores["model.layers.0.self_attn"]
    torch.testing.assert_close(max_H, max_scores_ref(*old), rtol=1e-4, atol=1e-4)
    gamma_H = (TAU / max_H).clamp(max=1.0)
    assert 0 < (gamma_H < 1).sum() < 6
    want = every(*old) * gamma_H[:, None, None, None]
    torch.testing.assert_close(every(*new), want, rtol=1e-4, atol=1e-4)
    assert max_scores_ref(*new).max() <= TAU * (1 + 1e-5)


def every(q_BTHd: Tensor, k_BThd: Tensor, scale: float) -> Tensor:
    """All logits, [H, B, T, T]."""
    k_BTHd = k_BThd.repeat_interleave(q_BTHd.shape[2] // k_BThd.shape[2], dim=2)
    return torch.einsum("bthd,bshd->hbts", q_BTHd, k_BTHd) * scale


def test_a_skipped_step_changes_nothing() -> None:
    model = make_model("gqa")
    clip = QKClip(model, tau=TAU)
    for skipped, poison in ((torch.tensor(True), 1.0), (True, 1.0), (False, torch.nan)):
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(poison)
        model(TOKENS, TOKENS).backward()
        clip.step(is_skipped=skipped)
        pairs = zip(before, model.named_parameters(), strict=True)
        assert all(torch.equal(a, b) for a, (name, b) in pairs if "embed" not in name)
    clip.step()
    assert all(value.isneginf().all() for value in clip.max_scores.values())


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj"])
def test_frozen_projections_stay(frozen: str) -> None:
    """The other projection, too: alone it would need the whole factor."""
    model = make_model("gqa")
    for layer in model.layers[1:]:
        getattr(layer.self_attn, frozen).requires_grad_(False)
    before = {name: param.clone() for name, param in model.named_parameters()}
    clip = QKClip(model, tau=1e-3)
    model(TOKENS)
    clip.step()
    moved = {n for n, param in model.named_parameters() if not torch.equal(param, before[n])}
    assert moved == {f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj")}


def test_bad_models() -> None:
    with pytest.raises(ValueError, match=r"qk_norm \('head'\) must be None for QK-clip"):
        QKClip(Decoder(preset("tiny")))
    with pytest.raises(ValueError, match=r"windows \(\(5, 0\)\) must be \(\) for QK-clip"):
        QKClip(Decoder(replace(PLAIN, windows=(5, 0))))
    with pytest.raises(ValueError, match=r"MLAConfig.sparse \(.*\) must be None for QK-clip"):
        QKClip(Decoder(preset("deepseek-v3.2"), device="meta"))
    with pytest.raises(ValueError, match=r"attention_gate \(True\) must be False for QK-clip"):
        QKClip(Decoder(replace(PLAIN, attention_gate=True)))
    with pytest.raises(ValueError, match="must have attention of"):
        QKClip(torch.nn.Linear(2, 2))
    model = Decoder(PLAIN)
    QKClip(model)
    with pytest.raises(ValueError, match="must be watched by one QKClip"):
        QKClip(model)
    with pytest.raises(ValueError, match=r"tau \(0\) must be"):
        QKClip(Decoder(PLAIN), tau=0)


def test_compiled_blocks_are_watched() -> None:
    model = make_model("gqa")
    clip, attention = QKClip(model, tau=TAU), model.layers[0].self_attn
    attention.forward = torch.compile(attention.forward, backend="eager", fullgraph=True)
    model(TOKENS, TOKENS).backward()
    got = clip._watchers[0].max_H.clone()
    clip.step()
    plain = make_model("gqa")
    other = QKClip(plain, tau=TAU)
    plain(TOKENS, TOKENS).backward()
    torch.testing.assert_close(got, other._watchers[0].max_H)


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    model = make_model("gqa").cuda()
    clip, tokens = QKClip(model, tau=TAU), TOKENS.cuda()
    model(tokens, tokens).backward()
    skipped = torch.zeros((), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip.step(is_skipped=skipped)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cat(list(clip.max_scores.values())).max() > TAU
