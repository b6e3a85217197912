"""`moecore tiny-model`: makes a tiny random Qwen3-MoE, a tokenizer and data to train the model on.

The chat template marks answers with {% generation %}. chats.jsonl has questions about functions of
Python's standard library, answered by their docstrings. pairs.jsonl has each question with its
answer (chosen) and the reversed words of the answer (rejected). `--task sums` is for `moecore
grpo`: sums of two digits, learned by reward.
"""

import ast
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from moecore.base.command_options import POSITIONAL
from moecore.recipes.data import scan_stdlib

CHATS, PAIRS, PROMPTS = "chats.jsonl", "pairs.jsonl", "prompts.jsonl"
WORDS = [*"0123456789+=", "<end>"]
COPIES = 8  # of each prompt, so that the steps of an epoch have equally many
END, PAD = "<|im_end|>", "<|endoftext|>"
VOCAB_SIZE = 2048
NUM_QUESTIONS = 200  # few enough to be learned by heart in minutes
TURNS = 2  # most questions of a chat
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text().rstrip()


def write_tiny_model(out: Path, **sizes: int) -> None:
    """Write a model, tokenizer, chats and preference pairs to a new directory.

    `sizes` are fields of the model's config.
    """
    pairs = list(islice(iterate_questions(), NUM_QUESTIONS))
    tokenizer = make_tokenizer(pairs)
    make_model(tokenizer, **sizes).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _write_lines(out / CHATS, ({"messages": chat} for chat in _make_chats(pairs)))
    preferences = [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": answer}],
            "rejected": [{"role": "assistant", "content": " ".join(answer.split()[::-1])}],
        }
        for question, answer in pairs
    ]
    _write_lines(out / PAIRS, preferences)


def _write_lines(file: Path, rows: Iterable[object]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def iterate_questions() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) for each documented function of single-file stdlib modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in scan_stdlib():
        if path.parent == root and not path.stem.startswith("_"):
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    answer = (ast.get_docstring(node) or "").partition("\n\n")[0]
                    if 20 <= len(answer) <= 200:
                        question = f"What does {path.stem}.{node.name} do?"
                        yield question, " ".join(answer.split())


def _make_chats(pairs: list[tuple[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Yield chats of one and two (question, answer) `pairs` alternately, until all are used."""
    first = count = 0
    while first < len(pairs):
        count = count % TURNS + 1
        yield [
            {"role": role, "content": content}
            for pair in pairs[first : first + count]
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        first += count


def make_tokenizer(pairs: list[tuple[str, str]]) -> Any:
    """Return a byte-level BPE tokenizer that is trained on `pairs` of question and answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, model_max_length=1024
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, **sizes: int) -> Any:
    """Return a Qwen3-MoE with the same random weights in each call; `sizes` are config fields."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tiny = dict(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
    )
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=len(tokenizer), bos_token_id=None, **ids, **tiny | sizes)
    )


def write_sums_model(out: Path) -> None:
    """Write a model, a tokenizer and prompts of sums of two digits, such as "3+4="."""
    tokenizer = make_digit_tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16}
    make_model(tokenizer, **sizes, max_position_embeddings=256).save_pretrained(out)
    tokenizer.save_pretrained(out)
    rows = [{"prompt": f"{a}+{b}=", "sum": a + b} for a in range(5) for b in range(5)]
    _write_lines(out / PROMPTS, rows * COPIES)


def make_digit_tokenizer() -> Any:
    """Return a tokenizer with one token each for digits, "+", "=" and the end of a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[-1]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), WORDS[-1])
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def reward_sum(
    prompts: Sequence[str], completions: Sequence[str], sum: Sequence[int], **_: Any
) -> list[float]:
    """Return the reward of each completion: 0, 0.5 or 1. "7" after "3+4=" has the reward 1.

    A correct first digit adds 0.5. A completion of exactly one digit adds 0.5. `sum` has the
    correct sum of each prompt.
    """
    return [
        ((text[:1] == str(right)) + (len(text) == 1 and text.isdigit())) / 2
        for text, right in zip(completions, sum, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Make a tiny Hugging Face MoE model and data to train it on.

    Attributes:
        out: the directory to make.
        task: "sums" makes a model, a tokenizer and prompts for moecore grpo.
    """

    out: Annotated[Path, POSITIONAL]
    task: Literal["chats", "sums"] = "chats"


def run_tiny_model(args: TinyModelConfig) -> int:
    """Write a tiny model and data for it to `args.out`; return 0."""
    out = args.out
    if os.path.lexists(out):
        raise ValueError(f"OUT ({out}) must not exist yet: choose another, or remove it")
    if args.task == "sums":
        write_sums_model(out)
        print(f"{out} has a tiny Qwen3-MoE, {out / PROMPTS} sums to train it on")
    else:
        write_tiny_model(out)
        print(f"{out} has a tiny Qwen3-MoE with its tokenizer, {out / CHATS} chats to train it on")
    return 0
