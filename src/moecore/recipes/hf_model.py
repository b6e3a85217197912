"""A Hugging Face directory in and out: its tokenizer, the model, its loss, what is exported.

Legend: B sequences, T tokens of each.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.progress import show_progress
from moecore.families import use_causal_attention
from moecore.families.transformers.packing import find_packing_problem
from moecore.io import decoder_config_from_hf, export_hf
from moecore.io.checkpoint.ranks import on_first_rank
from moecore.models import DecoderConfig
from moecore.recipes.files import check_directory

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


def inputs_of(
    num_tokens: Tensor,
    tokens_BT: Tensor,
    labels_BT: Tensor,
    padding_BT: Tensor,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Any]:
    """Return the inputs of a micro-batch for a causal language model after `parallelize_moe`.

    Its loss is the sum of the cross-entropy over labels, divided by a number of tokens.

    Args:
        num_tokens: int64 scalar.
        tokens_BT: int64.
        labels_BT: int64, the token that should follow, -100 where none does.
        padding_BT: bool, True = padding, which is not routed; causal attention needs no mask.
        cu_seqlens: borders of documents; None = every row is one.
    """
    inputs: dict[str, Any] = {"input_ids": tokens_BT, "labels": labels_BT}
    inputs |= {"shift_labels": labels_BT, "padding_mask": padding_BT, "num_tokens": num_tokens}
    if cu_seqlens is not None:
        inputs |= {"cu_seqlens": cu_seqlens, "max_seqlen": tokens_BT.shape[1]}
    return inputs | {"use_cache": False}


def read_config(path: Path) -> Any:
    """Return the config of a directory.

    Raises:
        ValueError: when it has none that transformers reads, or one of a model without experts.
    """
    from transformers import AutoConfig

    if path.is_dir():
        check_directory(path, "--model")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"--model ({path}) must be a Hugging Face directory with config.json, weights and "
            "tokenizer, or the name of a published model: correct it"
        )
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of any kind: transformers reads what the file has
        raise ValueError(
            f"--model ({path}) must have a config.json of transformers: {_line(error)}"
        ) from None
    if num_experts(config) == 0:
        raise ValueError(
            f"--model ({path}) must have routed experts: {config.model_type} has none, see "
            "docs/huggingface.md for the families"
        )
    return config


def build_hf(config: Any, path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of a config on meta, with parameters to train in a dtype.

    Raises:
        ValueError: when transformers has no causal language model of it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            hf: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ValueError(
            f"--model ({path}) must be a causal language model of transformers: {_line(error)}"
        ) from None
    if packs(hf):
        use_causal_attention(hf)
    return hf


def packs(hf: nn.Module) -> bool:
    """Return whether a model keeps several documents of a row apart."""
    return find_packing_problem(hf) is None


def decoder_of(path: Path) -> DecoderConfig | None:
    """Return the native config of a directory, which FLOPs are known of; None = there is none."""
    try:
        return decoder_config_from_hf(path)
    except (ValueError, NotImplementedError):  # a family, or a field of one, without
        return None


def recompute(hf: Any) -> None:
    """Compute activations again in backward: under its new name, or that of older transformers."""
    new = getattr(hf, "activation_checkpointing_enable", None)
    (new or hf.gradient_checkpointing_enable)()


def num_experts(config: Any) -> int:
    """Return the routed experts of a layer; 0 = a dense model."""
    fields = config.get_text_config().to_dict().items()
    return next((n for name, n in fields if EXPERT_COUNT.fullmatch(name) and n), 0)


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a directory.

    Raises:
        ValueError: when it has none, or one that does not tell where tokens lie in a text.
    """
    from transformers import AutoTokenizer

    if not any(file.is_file() for name in TOKENIZER_FILES for file in path.glob(name)):
        raise ValueError(
            f"--model ({path}) must have a tokenizer: copy tokenizer.json and "
            "tokenizer_config.json of the published model there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of any kind: transformers reads what the files have
        raise ValueError(
            f"--model ({path}) must have a tokenizer that loads: {_line(error)}"
        ) from None
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model ({path}) must have a fast tokenizer, not {type(tokenizer).__name__}, because "
            "answers are found by their place in the text: add its tokenizer.json"
        )
    return tokenizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def export(hf: Any, source: Path, target: Path) -> None:
    """Write a directory that transformers loads: weights, config, tokenizer. Collective.

    Experts lie one by one under published names, in the dtype of the source, whose config.json
    stays: transformers would write fields under names that older loaders do not know. The
    directory is a draft until all of it is there; then it takes the place of an earlier one.
    """
    draft = target.with_name(f".{target.name}.draft")
    options = {"config": source, "dtype": read_config(source).dtype}
    on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))
    with show_progress("exporting", unit="B") as report:
        options["progress"] = report
        try:
            export_hf(hf, draft, **options)
        except NotImplementedError:  # nothing is written then: gpt-oss is only published stacked
            export_hf(hf, draft, layout="fused", **options)
    on_first_rank(lambda: _complete(hf, source, draft, target))


def _complete(hf: Any, source: Path, draft: Path, target: Path) -> None:
    """Add what is not the model's, and give the directory its name."""
    if not (source / "generation_config.json").is_file():
        hf.generation_config.save_pretrained(draft)
    copy_files(source, draft)
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)


def copy_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat templates and generation config of a Hugging Face directory."""
    for name in COPIED_FILES:
        for path in source.glob(name):
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, target / path.name)
