"""Embedding and head of a transformers model whose tp ranks each have some rows of the vocabulary.

    ids_BT -> own rows, else 0 -> added over ranks -> x_BTD
    x_BTD -> logits of own rows -> gathered -> logits_BTV

A loss that reads no logits (`head.py`) is computed of the parts: three numbers per token travel.

Legend: B rows, T tokens of a row, D model dim, V vocabulary.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from moecore.families.transformers.head import TP, Logits
from moecore.families.transformers.stock import outermost
from moecore.models.tensor_parallel import TensorParallel


def cut_vocabulary(model: nn.Module, tp: TensorParallel) -> list[nn.Module]:
    """Let embeddings and heads exchange what rows of the vocabulary give; return these modules."""
    # What another class computes, and a vocabulary that tp does not divide, stay whole.
    embeddings = list[nn.Module]()
    for outer in outermost(model):
        get = (getattr(outer, f"get_{side}_embeddings", None) for side in ("input", "output"))
        ends: list[Any] = [None if of is None else of() for of in get]
        parts = [m for m in ends if getattr(m, "weight", None) is not None]
        if any(m.weight.shape[0] % tp.size or not _is_plain(m) for m in parts):
            continue
        for module in parts:
            if isinstance(module, nn.Embedding):
                OwnRows(tp, module)
            else:
                setattr(module, TP, tp)
                module.register_forward_hook(_gather)
            embeddings.append(module)
    return embeddings


def _is_plain(module: Any) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return type(module) is nn.Linear and module.bias is None


class OwnRows:
    """Lets an embedding look up the ids of this rank's rows, and return those of all ranks."""

    def __init__(self, tp: TensorParallel, embedding: nn.Embedding) -> None:
        self._tp, self._state = tp, threading.local()
        self._rows = embedding.num_embeddings // tp.size
        embedding.register_forward_pre_hook(self._enter)
        embedding.register_forward_hook(self._leave)

    def _enter(self, embedding: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = args
        local_ids, self._state.is_other = self._tp.local_rows(ids, self._rows)
        padding = self._state.padding_idx = embedding.padding_idx
        if padding is not None:  # the row without a gradient
            padding -= self._tp.rank * self._rows
            embedding.padding_idx = padding if 0 <= padding < self._rows else None
        return local_ids, *rest

    def _leave(self, embedding: Any, _args: Any, x: Tensor) -> Tensor:
        embedding.padding_idx = self._state.padding_idx
        return self._tp.sum_shared(x.masked_fill(self._state.is_other[..., None], 0))


def _gather(head: Any, _args: Any, logits: Tensor) -> Tensor:
    """Return logits of the whole vocabulary, but for `Logits`, which gather if they are asked."""
    if isinstance(logits, Logits):
        return logits
    tp: TensorParallel = getattr(head, TP)
    return tp.gather_last(logits)
