"""Writes a folder that torchtitan can train on offline: text from docs/ and a tokenizer for it.

python examples/torchtitan/text.py runs/titan_text
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCS = Path(__file__).parents[2] / "docs"


def main(folder: Path) -> None:
    texts = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer_config.json").write_text(names)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "data" / "docs.json").write_text(lines)
    print(f"{len(texts)} texts and {tokenizer.get_vocab_size()} tokens in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
