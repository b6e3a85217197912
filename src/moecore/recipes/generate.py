"""`moecore generate` and `moecore evaluate`: a trained model, by transformers in one process."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from moecore.base.command_options import POSITIONAL
from moecore.base.fields import (
    CheckedRecord,
    Count,
    CountOrZero,
    FieldErrors,
    PositiveOrZero,
    Seed,
    quote,
)
from moecore.base.progress import show_progress, track_progress
from moecore.io import latest
from moecore.io.checkpoint.directory import find_checkpoint_root
from moecore.io.checkpoint.manifest import MANIFEST
from moecore.io.checkpoint.object_storage import AnyPath
from moecore.io.checkpoint.ranks import is_first_rank
from moecore.io.hf.convert import native_to_hf
from moecore.models import Decoder, DecoderConfig
from moecore.packing.corpus.files import shorten_text
from moecore.packing.corpus.sources import describe_location, tokenize_document
from moecore.recipes.chat import tokenize_prompt
from moecore.recipes.corpora import BYTES, SourceOptions, Tokenizer, open_source
from moecore.recipes.files import find_config, parse_step_line, read_lines, replace_lines
from moecore.recipes.hf_model import copy_files, has_tokenizer
from moecore.recipes.parser import read_toml
from moecore.recipes.report import CONFIG, EXPORT


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a prompt with a run, a checkpoint or a Hugging Face directory.

    Attributes:
        path: a run (its export or latest checkpoint), a checkpoint, or a Hugging Face
            directory.
        prompt: the text to continue, or if `chat` is set, the user's message.
        chat: format the prompt with the tokenizer's chat template.
        max_new_tokens: maximum number of tokens.
        temperature: the sampling temperature; 0 = always the most likely token.
        seed: the seed of sampling.
    """

    path: Annotated[Path, POSITIONAL]
    prompt: str
    chat: bool = False
    max_new_tokens: Count = 128
    temperature: PositiveOrZero = 0.0
    seed: Seed = 0


def run_generate(args: GenerateConfig) -> int:
    """Print a prompt and its continuation; return 0."""
    model, tokenizer = load_model(args.path)
    ids = encode_prompt(tokenizer, args.prompt, is_chat=args.chat)
    torch.manual_seed(args.seed)
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        options = {"do_sample": True, "temperature": args.temperature}
    ids_1T = torch.tensor([ids], device=model.device, dtype=torch.int64)
    out_1T = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=args.max_new_tokens,
        **options,
    )
    answer = tokenizer.decode(out_1T[0, len(ids) :].tolist())
    print(answer if args.chat else args.prompt + answer)
    return 0


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure the loss of a run, a checkpoint or a Hugging Face directory on documents.

    Attributes:
        path: a run (its export or latest checkpoint), a checkpoint, or a Hugging Face
            directory.
        data: sources, in the syntax of moecore pretrain.
        seq_len: maximum tokens of a document; longer documents are cut.
        max_documents: maximum documents of each source; None = all.
    """

    path: Annotated[Path, POSITIONAL]
    data: tuple[SourceOptions, ...]
    seq_len: Count = 1024
    max_documents: Count | None = None


def run_evaluate(args: EvaluateConfig) -> int:
    """Print the mean loss per token, in nats, of each source's documents; return 0."""
    model, tokenizer = load_model(args.path)
    num_ids = model.get_input_embeddings().weight.shape[0]
    for source in [open_source(options, tokenizer) for options in args.data]:
        total, count = 0.0, 0
        for ids_1T in iterate_documents(source, args.seq_len, args.max_documents, num_ids):
            total += sum_losses(model, ids_1T.to(model.device))
            count += ids_1T.shape[1] - 1
        if not count:
            raise ValueError(f"--data ({source.name}) must have a document of 2 tokens: add it")
        mean = total / count
        print(f"{source.name}: loss {mean:.4f}, perplexity {math.exp(mean):.2f}, {count} tokens")
    return 0


def iterate_documents(
    source: Any, seq_len: int, max_documents: int | None, vocab_size: int
) -> Iterator[Tensor]:
    """Yield int64 ids [1, T <= seq_len] of the first `max_documents` documents (None = all)."""
    for i, document in enumerate(track_progress(source.documents, "evaluating", unit="documents")):
        if i == max_documents:
            return
        try:
            ids = tokenize_document(source, document, vocab_size)[:seq_len]
        except Exception as error:  # of any kind: a tokenizer is code
            place = describe_location(source.documents, i)
            line = f"--data ({source.name}), {place}: {shorten_text(error)}"
            raise ValueError(line) from None
        if len(ids) > 1:
            yield torch.from_numpy(ids.astype(np.int64))[None]


@torch.no_grad()
def sum_losses(model: Any, ids_1T: Tensor) -> float:
    """Return the summed cross-entropy, in nats, of all tokens of `ids_1T` except the first."""
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, 1:], reduction="sum"))


def load_model(path: Path) -> tuple[Any, Tokenizer]:
    """Return the transformers model of a path, on a GPU if there is one, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as folder:
        options = read_run_options(path)
        directory = find_or_convert_directory(path, Path(folder) / EXPORT, options)
        tokenizer = Tokenizer(str(directory) if has_tokenizer(directory) else BYTES)
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        except Exception as error:  # of any kind: transformers reads what the files have
            raise ValueError(
                f"PATH ({directory}) must be a model that transformers loads: {quote(str(error))}"
            ) from None
    num_ids = model.get_input_embeddings().weight.shape[0]
    if tokenizer.hf is None and num_ids > tokenizer.size and options.get("tokenizer") != BYTES:
        raise ValueError(
            f"PATH ({directory}) must have a tokenizer for its {num_ids} ids: copy tokenizer.json "
            "and tokenizer_config.json into it"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def read_run_options(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.toml; `path` is in the run; {} = there is no file."""
    files = [folder / CONFIG for folder in (path, *path.absolute().parents[:2])]
    file = next((file for file in files if file.is_file()), None)
    return {} if file is None else read_toml(file, "PATH")


def find_or_convert_directory(path: Path, target: Path, options: dict[str, Any]) -> Path:
    """Return a run's export or an HF directory; convert any other checkpoint to HF in `target`.

    `options` of the run name the model's config.json and the tokenizer.
    """
    for directory in (path, path / EXPORT):
        if (directory / "config.json").is_file():
            return directory
    checkpoint: AnyPath | None = path if (path / MANIFEST).is_file() else None
    if checkpoint is None and path.is_dir():
        checkpoint = latest(find_checkpoint_root(path))
    if checkpoint is None:
        state = "it has neither config.json nor checkpoints" if path.exists() else "it is not there"
        raise ValueError(f"PATH ({path}) must be a Hugging Face directory or a run: {state}")
    source = options.get("hf_config") or options.get("model")
    if not isinstance(source, str):  # such as of --preset
        raise ValueError(
            f"PATH ({path}) must be of a model whose config.json a run names: moecore checkpoint "
            f"convert {checkpoint} NEW_DIR --config CONFIG makes a directory to read"
        )
    with show_progress("converting", unit="B") as report:
        native_to_hf(checkpoint, target, config=find_config(Path(source)), progress=report)
    copy_files(Path(options.get("tokenizer", source)), target)
    return target


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, is_chat: bool) -> list[int]:
    """Return the token ids of a prompt; if `is_chat`, of the prompt in the chat template."""
    if is_chat and (tokenizer.hf is None or not tokenizer.hf.chat_template):
        raise ValueError("--chat must go with a tokenizer that has a chat template: drop it")
    try:
        if tokenizer.borders is None:  # tokens are bytes
            ids = list(prompt.encode())
        else:
            chat = [{"role": "user", "content": prompt}]
            ids = tokenize_prompt(tokenizer.hf, chat if is_chat else prompt)
    except Exception as error:  # of any kind: a template is code
        part = "chat template" if is_chat else "tokenizer"
        raise ValueError(
            f"--prompt must fit the {part} of PATH: {shorten_text(error)}: change the prompt"
        ) from None
    if not ids:
        raise ValueError("--prompt must have at least one token: give some text")
    return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions(CheckedRecord):
    """Samples of the model during the training, written to RUN_DIR/samples.jsonl.

    All ranks generate together, token by token, so the model stays sharded. Generation is greedy:
    transformers' greedy `generate` on the export has equal tokens.

    Attributes:
        sample_prompts: the texts that the model continues.
        sample_every: steps between samples; 0 = none. The last step has samples too.
        sample_tokens: maximum tokens of a continuation, which ends with the end-of-sequence
            token.
    """

    sample_prompts: tuple[str, ...] = ()
    sample_every: CountOrZero = 0
    sample_tokens: Count = 32

    def _find_field_errors(self) -> FieldErrors:
        if self.sample_every and not self.sample_prompts:
            yield "sample_every", "be 0 without sample_prompts: give a prompt"

    def encode_prompts(self, tokenizer: Tokenizer, config: DecoderConfig) -> dict[str, list[int]]:
        """Return {prompt: token ids}; {} = no samples. ValueError for unsupported prompts."""
        if not self.sample_every:
            return {}
        prompts = {p: encode_prompt(tokenizer, p, is_chat=False) for p in self.sample_prompts}
        for text, ids in prompts.items():
            if len(ids) + self.sample_tokens > config.max_seq_len:
                raise ValueError(
                    f"sample_tokens ({self.sample_tokens}) and the {len(ids)} of prompt {text!r} "
                    f"must be <= max_seq_len ({config.max_seq_len}) of the model together: lower it"
                )
            if max(ids) >= config.vocab_size:
                raise ValueError(
                    f"sample_prompts ({text!r}) must have ids < vocab_size ({config.vocab_size}) "
                    "of the model: change it"
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
    device: torch.device,
) -> list[str]:
    """Continue each prompt, append the texts to a file on rank 0, and return them. Collective."""
    texts = []
    end = None if tokenizer.hf is None else tokenizer.hf.eos_token_id
    lines = read_samples(file, before=step) if is_first_rank() else []
    model.eval()
    for text, ids in track_progress(prompts.items(), "sampling", unit="prompts", as_lines=True):
        prompt_1T = torch.tensor([ids], device=device, dtype=torch.int64)
        tokens = model.generate(prompt_1T, num_tokens, temperature=0.0)[0, len(ids) :].tolist()
        if end in tokens:
            tokens = tokens[: tokens.index(end) + 1]
        sample = {"step": step, "prompt": text, "text": tokenizer.decode(tokens), "tokens": tokens}
        texts.append(f"{text}{sample['text']}")
        lines.append(json.dumps(sample))
    model.train()
    if is_first_rank():
        replace_lines(file, lines)
    return texts


def read_samples(file: Path, *, before: int) -> list[str]:
    """Return the undamaged lines of a samples file whose step is below `before`; [] = no file."""
    records = ((line, parse_step_line(line)) for line in read_lines(file))
    return [line.decode() for line, record in records if record and record["step"] < before]
