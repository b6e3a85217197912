"""`moecore generate` and `moecore evaluate`: a trained model in one process, by transformers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecore.base.fields import quote
from moecore.base.progress import track
from moecore.recipes.corpora import BYTES, Tokenizer, read_source, source_of
from moecore.recipes.errors import ARGUMENT_ERRORS, print_error
from moecore.recipes.files import check_directory
from moecore.recipes.hf_model import TOKENIZER_FILES
from moecore.recipes.options import positive_int
from moecore.recipes.report import EXPORT


def main(words: Sequence[str] | None = None) -> int:
    """Print a prompt and its continuation."""
    parser = argparse.ArgumentParser(
        prog="moecore generate",
        description="Continue a prompt with a run's export or a Hugging Face directory.",
    )
    _add_model(parser)
    add = parser.add_argument
    add("--prompt", required=True, help="the text to continue, or the user's message with --chat")
    add("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    add("--max-new-tokens", type=positive_int, default=128, help="tokens at most (default 128)")
    add("--temperature", type=float, default=0.0, help="0 = the most likely token (default)")
    add("--seed", type=int, default=0, help="of the samples (default 0)")
    args = parser.parse_args(words)
    try:
        model, tokenizer = load_model(args.path)
        ids = prompt_ids(tokenizer, args.prompt, is_chat=args.chat)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    torch.manual_seed(args.seed)
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        options = {"do_sample": True, "temperature": args.temperature}
    ids_1T = torch.tensor([ids], device=model.device)
    out_1T = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=args.max_new_tokens,
        **options,
    )
    answer = tokenizer.decode(out_1T[0, len(ids) :].tolist())
    print(answer if args.chat else args.prompt + answer)
    return 0


def evaluate(words: Sequence[str] | None = None) -> int:
    """Print the mean loss per token of documents, each of which is read alone."""
    parser = argparse.ArgumentParser(
        prog="moecore evaluate",
        description="The loss of a run's export or a Hugging Face directory on documents.",
    )
    _add_model(parser)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="PATH", help="as of moecore pretrain")
    add(
        "--seq-len", type=positive_int, default=1024, help="longer documents are cut (default 1024)"
    )
    add("--max-documents", type=positive_int, help="of each source (None = all)")
    args = parser.parse_args(words)
    try:
        model, tokenizer = load_model(args.path)
        sources = [read_source(source_of(word), tokenizer) for word in args.data]
        for source in sources:
            total, count = 0.0, 0
            for ids_1T in documents(source, args.seq_len, args.max_documents):
                total += sum_of_losses(model, ids_1T.to(model.device))
                count += ids_1T.shape[1] - 1
            if not count:
                raise ValueError(f"--data ({source.name}) must have a document of 2 tokens: add it")
            mean = total / count
            print(
                f"{source.name}: loss {mean:.4f}, perplexity {math.exp(mean):.2f}, {count} tokens"
            )
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    return 0


def load_model(path: Path) -> tuple[Any, Tokenizer]:
    """Return the model of a run or directory, on the GPU if there is one, and its tokenizer.

    Raises:
        ValueError: when there is none that transformers loads.
    """
    from transformers import AutoModelForCausalLM

    directory = path / EXPORT if (path / EXPORT).is_dir() else path
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"PATH ({path}) must be a Hugging Face directory, or a run that has an export: "
            "moecore checkpoint convert makes one of a checkpoint"
        )
    check_directory(directory, "PATH")
    has_tokenizer = any(True for name in TOKENIZER_FILES for _ in directory.glob(name))
    tokenizer = Tokenizer(str(directory) if has_tokenizer else BYTES)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    except Exception as error:  # of any kind: transformers reads what the files have
        raise ValueError(
            f"PATH ({directory}) must be a model that transformers loads: {quote(str(error))}"
        ) from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, is_chat: bool) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ValueError: for a prompt without tokens, or a chat without a template.
    """
    ids: list[int]
    if is_chat:
        if tokenizer.hf is None or not tokenizer.hf.chat_template:
            raise ValueError("--chat must go with a tokenizer that has a chat template: drop it")
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.hf(text, add_special_tokens=False)["input_ids"]
    else:
        ids = list(prompt.encode()) if tokenizer.hf is None else tokenizer.hf(prompt)["input_ids"]
    if not ids:
        raise ValueError("--prompt must have at least one token: give some text")
    return ids


def documents(source: Any, seq_len: int, limit: int | None) -> Iterator[Tensor]:
    """Yield the token ids of each document of a source, [1, T], with 1 < T <= seq_len."""
    for number, document in enumerate(track(source.documents, "evaluating", unit="documents")):
        if number == limit:
            return
        ids = list(source.tokenize(document))[:seq_len]
        if len(ids) > 1:
            yield torch.tensor([ids])


@torch.no_grad()
def sum_of_losses(model: Any, ids_1T: Tensor) -> float:
    """Return the sum of a document's losses in nats."""
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, 1:], reduction="sum"))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run, or a Hugging Face directory"
    )
