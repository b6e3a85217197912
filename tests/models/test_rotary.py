import math
from dataclasses import replace

import pytest
import torch

from moecore.attention.sequence import RotaryTable, Sequence
from moecore.models import MLAConfig, YarnConfig, preset
from moecore.models.layers import build_rotary_table

FREQUENCIES = torch.tensor([1.0, 0.1])  # d = 4, theta = 100


def test_rotary_table_by_hand():
    # Pairs are (0, 2) and (1, 3).
    table = RotaryTable(torch.arange(3), FREQUENCIES)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 3, 1, 4)
    want = [[math.cos(t), math.cos(0.1 * t), math.sin(t), math.sin(0.1 * t)] for t in range(3)]
    torch.testing.assert_close(table.rotate(x)[0, :, 0], torch.tensor(want))


def test_rotary_table_survives_mixed_precision_casts():
    """FSDP2 casts floating tensors inside containers and dataclasses, not inside this class."""
    from torch.distributed.utils import _apply_to_tensors

    table, positions = RotaryTable(torch.arange(3), FREQUENCIES), torch.arange(3)[None]
    sequence = Sequence(rotary=table, positions_BT=positions)
    (kept,) = _apply_to_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, (sequence,))
    assert kept.rotary is table and table.cos_Td.dtype == torch.float32
    assert kept.positions_BT is positions


def test_neighbouring_pairs_by_hand():
    # The same angles for the pairs (0, 1) and (2, 3); firsts come back before seconds.
    table = RotaryTable(torch.arange(3), FREQUENCIES)
    x = torch.tensor([1.0, 0.0, 2.0, 0.0]).expand(1, 3, 1, 4)
    want = [
        [math.cos(t), 2 * math.cos(0.1 * t), math.sin(t), 2 * math.sin(0.1 * t)] for t in range(3)
    ]
    torch.testing.assert_close(table.rotate_pairs(x)[0, :, 0], torch.tensor(want))
    both, order = torch.randn(2, 3, 2, 4), [0, 2, 1, 3]
    torch.testing.assert_close(table.rotate_pairs(both), table.rotate(both[..., order]))


def test_yarn_by_hand():
    # 8 dims, theta 10: frequency i turns 20 pi * 10^(-i / 4) / (2 pi) = 10^(1 - i / 4) times, so
    # frequency 0 turns beta_fast = 10 times and stays, frequency 4 would turn beta_slow = 1 time:
    # the share of the slowed frequency rises by a quarter. ln(e) * 0.1 * 2 + 1 = 1.2 over 1.1.
    yarn = YarnConfig(
        factor=math.e,
        original_max_seq_len=63,  # 20 pi
        beta_fast=10.0,
        beta_slow=1.0,
        mscale=2.0,
        mscale_all_dim=1.0,
    )
    mla = MLAConfig(kv_lora_rank=4, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, yarn=yarn)
    config = replace(preset("deepseek-v3"), mla=mla, head_dim=16, rope_theta=10.0, max_seq_len=64)
    table = build_rotary_table(config, torch.arange(2))
    factors = [1 - i / 5 + i / 5 / math.e for i in range(4)]  # rounded up: to 5
    angles = [10 ** (-i / 4) * f for i, f in enumerate(factors)]
    want = torch.tensor([math.cos(a) for a in angles]) * 1.2 / 1.1
    torch.testing.assert_close(table.cos_Td[1], want)
    want = torch.tensor([math.sin(a) for a in angles]) * 1.2 / 1.1
    torch.testing.assert_close(table.sin_Td[1], want)


def test_deepseek_v3_turns_like_transformers():
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    hf = DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163_840)
    config = preset("deepseek-v3")
    table = build_rotary_table(config, torch.arange(6000))
    cos, sin = theirs.DeepseekV3RotaryEmbedding(hf)(torch.zeros(1), torch.arange(6000)[None])
    # Angles of up to 6000 radians, in fp32.
    assert (table.cos_Td - cos[0, :, :32]).abs().max() < 6000 * 2**-23
    assert (table.sin_Td - sin[0, :, :32]).abs().max() < 6000 * 2**-23
    assert config.mla.score_scale == pytest.approx(theirs.yarn_apply_mscale(rope, 192**-0.5))
    x = torch.randn(1, 64, 2, 64)
    want, _ = theirs.apply_rotary_pos_emb_interleave(
        x, x, cos[:, :64], sin[:, :64], unsqueeze_dim=2
    )
    torch.testing.assert_close(build_rotary_table(config, torch.arange(64)).rotate_pairs(x), want)
