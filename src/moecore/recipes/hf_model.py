"""Transformers models of a run: config, tokenizer, inputs, weights and export.

Legend: B sequences, T tokens of each.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.progress import Report, show_progress
from moecore.families import use_causal_attention
from moecore.families.transformers.packing import find_packing_problem
from moecore.io import (
    decoder_config_from_hf,
    export_hf,
    init_adapters,
    load_hf,
    merge_adapters,
    save_adapters,
)
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.models import DecoderConfig
from moecore.packing.corpus.files import shorten_text
from moecore.recipes.files import format_option, name_option_in_errors
from moecore.recipes.job import TrainingJob
from moecore.recipes.loop import print_on_rank_0
from moecore.recipes.report import EXPORT, METRICS
from moecore.train import materialize

ADAPTERS = "adapters"  # folder of a run
EXPERT_COUNT = re.compile(r"(moe_)?(n|num)_(local_|routed_)?experts")  # its names in configs
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")  # one of these at least
COPIED_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
)


def make_causal_lm_inputs(
    num_tokens: Tensor,
    tokens_BT: Tensor,
    labels_BT: Tensor,
    padding_BT: Tensor,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Any]:
    """Return the forward arguments of a causal language model for one micro-batch.

    The loss is the sum of the cross-entropy over labels (the next token, or -100), divided by
    `num_tokens`. Positions where `padding_BT` is True are not routed. `cu_seqlens` None = each row
    is one document.
    """
    inputs: dict[str, Any] = {"input_ids": tokens_BT, "labels": labels_BT}
    inputs |= {"shift_labels": labels_BT, "padding_mask": padding_BT, "num_tokens": num_tokens}
    if cu_seqlens is not None:
        inputs |= {"cu_seqlens": cu_seqlens, "max_seqlen": tokens_BT.shape[1]}
    return inputs | {"use_cache": False}


def make_scored_inputs(loss: Any, *tensors: Tensor) -> dict[str, Any]:
    """Return the forward arguments of a micro-batch for a `log_prob_loss` with its own labels."""
    inputs = make_causal_lm_inputs(tensors[1], *tensors)
    for name in ("labels", "shift_labels", "num_tokens"):
        del inputs[name]
    return inputs | {"log_prob_loss": loss}


def read_config(path: Path, option: str = "--model") -> Any:
    """Return the transformers config of a model directory; ValueError if it has no experts."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ValueError(
            f"{option} ({path}) must be a Hugging Face directory with config.json, weights and "
            "tokenizer, or the name of a published model: correct it"
        )
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of any kind: transformers reads what the file has
        raise ValueError(
            f"{option} ({path}) must have a config.json of transformers: {shorten_text(error)}"
        ) from None
    if count_experts(config) == 0:
        raise ValueError(
            f"{option} ({path}) must have routed experts: {config.model_type} has none, see "
            "docs/huggingface.md for the families"
        )
    return config


def load_weights(args: Any, model: nn.Module, device: str, *, cast: bool) -> None:
    """Allocate a sharded meta model, load --model (may round if `cast`), init LoRA. Collective."""
    materialize(model, device=device)
    with name_option_in_errors("--model"), show_progress("loading weights", unit="B") as report:
        load_hf(args.model, model, cast=cast, progress=report)
    if args.lora is not None:
        init_adapters(model, args.seed)


def build_hf_model(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of a transformers config on meta, in `dtype`; ValueErrors name `path`."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            hf: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ValueError(
            f"--model ({path}) must be a causal language model of transformers: "
            f"{shorten_text(error)}"
        ) from None
    if can_pack_documents(hf):
        use_causal_attention(hf)
    return hf


def can_pack_documents(hf: nn.Module) -> bool:
    """Return whether a model can keep several documents in one row separate."""
    return find_packing_problem(hf) is None


def find_decoder_config(path: Path) -> DecoderConfig | None:
    """Return a model directory's decoder config, to count FLOPs; None = unsupported family."""
    try:
        return decoder_config_from_hf(path)
    except (ValueError, NotImplementedError):  # a family, or a field of one, without
        return None


def count_experts(config: Any) -> int:
    """Return the number of routed experts per layer in a config; 0 = a dense model."""
    fields = config.get_text_config().to_dict().items()
    return next((n for name, n in fields if EXPERT_COUNT.fullmatch(name) and n), 0)


def load_tokenizer(name: str | Path, option: str) -> Any:
    """Return the tokenizer of a directory or a name of the hub; ValueErrors name `option`."""
    from transformers import AutoTokenizer

    label, path = format_option(option, name), Path(name)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{label} must be a directory, or a name of the hub: name its directory")
    if path.is_dir() and not has_tokenizer(path):
        raise ValueError(
            f"{label} must have a tokenizer: copy tokenizer.json and tokenizer_config.json of the "
            "published model there"
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of any kind: transformers reads what the files have
        raise ValueError(f"{label} must be a tokenizer that loads: {shorten_text(error)}") from None


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory contains a tokenizer file."""
    return any(file.is_file() for name in TOKENIZER_FILES for file in path.glob(name))


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of --model; ValueError if it cannot return character offsets."""
    tokenizer = load_tokenizer(path, "--model")
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model ({path}) must have a fast tokenizer, not {type(tokenizer).__name__}, because "
            "answers are found by their place in the text: add its tokenizer.json"
        )
    return tokenizer


def needs_export(job: TrainingJob[Any]) -> bool:
    """Return whether RUN_DIR/export is missing or older than the last step. Collective."""
    target, log = (job.args.run_dir / name for name in (EXPORT, METRICS))

    def is_missing_or_old() -> bool:
        times = [path.stat().st_mtime for path in (log, target) if path.exists()]
        return not target.exists() or times != sorted(times)

    return job.start < job.args.steps or run_on_first_rank(is_missing_or_old)


def export_run(job: TrainingJob[Any]) -> None:
    """Export the model to RUN_DIR/export, unless an earlier start did. Collective."""
    args, hf, target = job.args, job.model, job.args.run_dir / EXPORT
    if needs_export(job):
        if args.lora is not None:
            save_adapters(hf, args.run_dir / ADAPTERS)
            merge_adapters(hf)
        options = {"config": args.model, "dtype": read_config(args.model).dtype}

        def write(draft: Path, report: Report) -> None:
            try:
                export_hf(hf, draft, progress=report, **options)
            except (
                NotImplementedError
            ):  # nothing is written then: gpt-oss is only published stacked
                export_hf(hf, draft, progress=report, layout="fused", **options)

        def complete(draft: Path) -> None:
            if not (args.model / "generation_config.json").is_file():
                hf.generation_config.save_pretrained(draft)
            copy_files(args.model, draft)

        write_export(target, write, complete)
    print_on_rank_0(f"{target} is ready for from_pretrained")


def write_export(
    target: Path, write: Callable[[Path, Report], object], complete: Callable[[Path], None]
) -> None:
    """Write a draft directory, which then replaces `target`. Collective.

    All ranks call `write(draft, report)`, then rank 0 calls `complete(draft)`.
    """
    draft = target.with_name(f".{target.name}.draft")
    run_on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))
    with show_progress("exporting", unit="B") as report:
        write(draft, report)

    def replace_target() -> None:
        complete(draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)

    run_on_first_rank(replace_target)


def copy_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat templates and generation config from directory `source` to `target`."""
    for name in COPIED_FILES:
        for path in source.glob(name):
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, target / path.name)
