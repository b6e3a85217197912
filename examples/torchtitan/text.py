"""Writes a folder that torchtitan can train on offline: text, a tokenizer for it, and its ids.

    python examples/torchtitan/text.py runs/titan_text
    python examples/torchtitan/text.py runs/code --source /usr/lib/python3.12 --suffix .py \
        --vocab-size 32000

The text is docs/ unless --source is given. `tokens.npy` is for local_tokens.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="what is written")
    add("--source", type=Path, default=DOCS, help="folder of texts")
    add("--suffix", default=".md", help="which files of it")
    add("--max-mb", type=float, default=16.0, help="how much of them")
    add("--vocab-size", type=int, default=512, help="of the tokenizer")
    args = parser.parse_args()
    texts = read(args.source, args.suffix, int(args.max_mb * 1e6))
    tokenizer = train(texts, args.vocab_size)
    write(args.folder, texts, tokenizer)
    print(f"{len(texts)} texts and {tokenizer.get_vocab_size()} tokens in {args.folder}")


def read(source: Path, suffix: str, most: int) -> list[str]:
    """Return the texts in the order of their paths, up to about `most` characters."""
    texts: list[str] = []
    for path in sorted(source.rglob(f"*{suffix}")):
        if sum(map(len, texts)) >= most:
            break
        texts.append(path.read_text(errors="ignore"))
    if not texts:
        raise SystemExit(f"--source ({source}) must hold files that end in {suffix}")
    return texts


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(folder: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer_config.json").write_text(names)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "data" / "docs.json").write_text(lines)
    end = tokenizer.token_to_id("</s>")
    ids = [number for e in tokenizer.encode_batch(texts) for number in [*e.ids, end]]
    np.save(folder / "tokens.npy", np.array(ids, dtype=np.int32))


if __name__ == "__main__":
    main()
