"""[samples]: texts that the model generates from fixed prompts while it trains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from moecore.base.fields import CheckedRecord, Count, CountOrZero, Rules
from moecore.base.progress import track
from moecore.io.checkpoint.ranks import is_first_rank
from moecore.models import Decoder
from moecore.recipes.corpora import Tokenizer
from moecore.recipes.generate import prompt_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions(CheckedRecord):
    """Samples of the model during the training, written to RUN_DIR/samples.jsonl.

    All ranks generate together, token by token and without a cache, so the model stays sharded. The
    tokens are the most likely ones: those of transformers' greedy `generate` on the export.

    Attributes:
        sample_prompts: the texts that the model continues.
        sample_every: steps between samples; 0 = none. The last step has samples too.
        sample_tokens: tokens of a continuation at most; it ends with the end-of-sequence token.
    """

    sample_prompts: tuple[str, ...] = ()
    sample_every: CountOrZero = 0
    sample_tokens: Count = 32

    def _rules(self) -> Rules:
        if bool(self.sample_prompts) != bool(self.sample_every):
            yield "sample_every", f"be > 0 with sample_prompts {self.sample_prompts} and 0 without"

    def prompts(self, tokenizer: Tokenizer, *, max_seq_len: int) -> dict[str, list[int]]:
        """Return the token ids of each prompt.

        Raises:
            ValueError: for a prompt without tokens, or one that is too long for the model.
        """
        prompts = {text: prompt_ids(tokenizer, text, is_chat=False) for text in self.sample_prompts}
        for text, ids in prompts.items():
            if len(ids) + self.sample_tokens > max_seq_len:
                raise ValueError(
                    f"sample_tokens ({self.sample_tokens}) and the {len(ids)} of prompt {text!r} "
                    f"must be <= max_seq_len ({max_seq_len}) of the model together: lower it"
                )
        return prompts


@torch.no_grad()
def write_samples(
    model: Decoder,
    prompts: dict[str, list[int]],
    tokenizer: Tokenizer,
    file: Path,
    *,
    step: int,
    num_tokens: int,
) -> None:
    """Continue each prompt and append the texts to a file; rank 0 writes. Collective."""
    device = next(model.parameters()).device
    end = None if tokenizer.hf is None else tokenizer.hf.eos_token_id
    lines = read_samples(file, before=step) if is_first_rank() else []
    model.eval()
    for text, ids in track(prompts.items(), "sampling", unit="prompts", lines=True):
        prompt_1T = torch.tensor([ids], device=device)
        tokens = model.generate(prompt_1T, num_tokens, temperature=0.0)[0, len(ids) :].tolist()
        if end in tokens:
            tokens = tokens[: tokens.index(end) + 1]
        sample = {"step": step, "prompt": text, "text": tokenizer.decode(tokens), "tokens": tokens}
        lines.append(json.dumps(sample))
    model.train()
    if is_first_rank():
        draft = file.with_suffix(".tmp")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(file)


def read_samples(file: Path, *, before: int) -> list[str]:
    """Return the lines of a file of samples of earlier steps; a run may have gone back."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if json.loads(line)["step"] < before]
