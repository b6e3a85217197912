"""Which tensors of a model stay fp32 where the model computes in fp16 or bf16.

A selection bias does in any model: its steps are smaller than those of bf16. Of a model of
transformers so does what `from_pretrained(dtype=...)` keeps: names that match a pattern of its
class, and parameters that the class makes in fp32 whatever the dtype.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from moecore.families.transformers.lora import trained_copies, without_adapters
from moecore.families.transformers.stock import is_hf

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")


def kept_fp32(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """Return the names of a model's parameters that stay fp32 where it computes in a dtype."""
    if dtype not in (torch.float16, torch.bfloat16):
        return frozenset()
    names = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(p) for n, p in names.items() if n.endswith(SELECTION_BIASES)}
    for hf in _of_transformers(model):
        keeps = _rule(hf, dtype)
        tensors = dict(hf.named_parameters(remove_duplicate=False))
        for originals in (without_adapters(hf, tensors), trained_copies(hf, tensors)):
            kept |= {id(p) for n, p in originals.items() if keeps(n)}
    return frozenset(n for n, p in names.items() if id(p) in kept)


def _of_transformers(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost models of transformers."""
    if hasattr(module, "_get_dtype_plan"):
        yield module
        return
    for child in module.children():
        yield from _of_transformers(child)


def _rule(hf: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return what tells by its name whether `from_pretrained` keeps a parameter in fp32."""
    # As transformers.core_model_loading.build_glob_alternation reads them.
    patterns = "|".join(f"(?:{p.replace('*', '.*')})" for p in hf._get_dtype_plan(dtype))
    made = set[str]()
    if is_hf(hf):
        with torch.device("meta"):
            twin = type(hf)._from_config(copy.deepcopy(hf.config), dtype=dtype)
        made = {n for n, p in twin.named_parameters() if p.dtype == torch.float32}
    return lambda name: name in made or bool(patterns and re.search(patterns, name))
