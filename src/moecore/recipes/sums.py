r"""A task for `moecore grpo`: sums of two digits, learned by reward from random weights.

    moecore tiny-model runs/sums --task sums
    moecore grpo tiny-grpo.toml

A prompt is "3+4=", the best completion "7". A digit that is right is worth half a point, and so is
to end after the first digit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = "prompts.jsonl"
END = "<end>"
WORDS = [*"0123456789+=", END]
COPIES = 8  # of each prompt, so that the steps of an epoch have equally many


def make(out: Path) -> None:
    """Write model, tokenizer and prompts into a directory."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    sums = [{"prompt": f"{a}+{b}=", "sum": a + b} for a in range(5) for b in range(5)]
    (out / PROMPTS).write_text("".join(f"{json.dumps(row)}\n" for row in sums * COPIES))


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are digits, signs and the end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, END))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    special = {"eos_token": END, "pad_token": END, "unk_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def reward(
    prompts: Sequence[str], completions: Sequence[str], sum: Sequence[int], **_: Any
) -> list[float]:
    """Return the points of each completion."""
    pairs = zip(completions, sum, strict=True)
    return [
        ((text[:1] == str(right)) + (len(text) == 1 and text.isdigit())) / 2
        for text, right in pairs
    ]
