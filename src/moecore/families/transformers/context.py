"""CausalContext: context parallelism for a causal language model of transformers.

Every cp rank passes identical full rows. Labels are shifted in the full rows and then sliced, and
the model computes the loss of this rank's tokens. `rows.py` slices the tokens before the base
model, and attention communicates (`attention.py`). The losses are all-reduced over the cp ranks.
With `ContextOptions.dynamic` the argument `cp` of a forward selects the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.attention.sequence import Sequence
from moecore.base.fields import quote
from moecore.base.options.context import ContextOptions
from moecore.families.transformers import stock
from moecore.families.transformers.attention import use_causal_attention
from moecore.families.transformers.chunked_attention import find_chunked_layers
from moecore.families.transformers.compressed_attention import find_compressed_attention
from moecore.families.transformers.head import IS_SCORED
from moecore.families.transformers.linear_attention import SEQUENCE
from moecore.families.transformers.packing import find_packing_problem
from moecore.families.transformers.rows import READER, RowReader, get_shifted_labels, get_tokens
from moecore.families.transformers.sparse_attention import find_sparse_attention
from moecore.models.loss import count_labels
from moecore.models.tensor_parallel import all_reduce_replicated

# Tensors of whole rows that are cut with the tokens.
SHARDED_INPUTS = ("input_ids", "labels", "shift_labels", "position_ids", "padding_mask")
KEYS_TRAVEL = ("p2p", "a2a+p2p")  # ways without windows


class CausalContext:
    """Context parallelism of a transformers causal language model, as a `ContextParallelModel`."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return `options` with a chosen `way`: how attention communicates over `cp` ranks.

        Raises ValueError or NotImplementedError if the model does not support `options` or cp.
        """
        name, part = type(self.model).__name__, find_packing_problem(self.model)
        problem = None if part is None else f"{part} needs whole rows on a rank"
        if (problem := problem or _find_loss_problem(self.model)) is not None:
            raise NotImplementedError(
                f"cp ({cp}) must be 1 for {name}, because {problem}: leave out "
                "ParallelConfig.cp and ContextOptions.dynamic"
            )
        config = self.model.config.get_text_config()
        _refuse_router_logits(getattr(config, "output_router_logits", False))
        num_heads, kv_heads = _count_heads(config)
        local_heads = num_heads // tp, max(kv_heads // tp, 1)
        is_sparse = bool(find_sparse_attention(self.model) or find_compressed_attention(self.model))
        if find_chunked_layers(self.model):
            if options.way not in ("auto", "a2a") or local_heads[1] % cp:
                raise ValueError(
                    f"ContextOptions.way ({options.way!r}) must be 'a2a' or 'auto' for {name}, "
                    f"whose attention has chunks, and cp ({cp}) must divide the key/value heads of "
                    f"a tp rank ({local_heads[1]}): lower cp"
                )
            options = replace(options, way="a2a")
        resolved = options.resolve(cp, *local_heads, has_latents=is_sparse)
        if is_sparse and resolved.way != "allgather":
            raise ValueError(
                f"ContextOptions.way ({options.way!r}) must be 'allgather' or 'auto' for {name}, "
                "whose queries read keys of any rank"
            )
        owners = (self.model.config, *self.model.modules())
        has_windows = any(getattr(owner, "sliding_window", None) is not None for owner in owners)
        if resolved.way in KEYS_TRAVEL and has_windows:
            if options.way != "auto":
                raise ValueError(
                    f"ContextOptions.way ({options.way!r}) must be 'a2a' or 'allgather' for "
                    f"{name}, whose layers have sliding windows"
                )
            return replace(options, way="allgather")
        return resolved

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Make later forwards accept full rows and compute only this rank's tokens."""
        self._add_context_parallel_hooks().cp = cp

    def apply_context_groups(self, groups: Mapping[int, ContextParallel]) -> None:
        """Register {cp size: cp ranks}; the argument `cp` of a forward selects the size."""
        self._add_context_parallel_hooks().groups = groups

    def _add_context_parallel_hooks(self) -> RowReader:
        """Use causal attention and add the cp hooks, in place; return the model's `RowReader`."""
        use_causal_attention(self.model)
        self.model.register_forward_pre_hook(self._shift_labels, with_kwargs=True)
        self.model.register_forward_hook(self._all_reduce_loss, with_kwargs=True)
        reader: RowReader = getattr(self.model, READER)
        return reader

    def _shift_labels(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> stock.Arguments:
        """Forward pre-hook: build the `Sequence`; shift labels in full rows, then slice them."""
        _refuse_router_logits(kwargs.get("output_router_logits"))
        for field in ("logits_to_keep", "inputs_embeds"):
            if kwargs.get(field) is not None:
                raise ValueError(
                    f"{field} must be left out under context parallelism: pass input_ids of whole "
                    "rows, and read the logits of this rank's tokens"
                )
        reader: RowReader = getattr(self.model, READER)
        tokens = get_tokens(args, kwargs)
        for name, value in kwargs.items():
            is_of_rows = isinstance(value, Tensor) and value.shape[:2] == tokens.shape[:2]
            if is_of_rows and name not in SHARDED_INPUTS:
                raise ValueError(
                    f"{name} {tuple(value.shape)} must be left out under context parallelism, "
                    "where a rank has a part of each row: of tensors of tokens only "
                    f"{', '.join(SHARDED_INPUTS)} are cut"
                )
        sequence = reader.build_sequence(tokens, kwargs)
        kwargs = {n: value for n, value in kwargs.items() if n != "cp"} | {SEQUENCE: sequence}
        if kwargs.get("labels") is None:
            return args, kwargs
        if not hasattr(model, IS_SCORED) and not stock.has_causal_loss(model):
            raise ValueError(
                f"loss_function ({quote(model.loss_function)}) must be transformers' "
                f"{stock.CAUSAL_LOSS} under context parallelism, where a rank has a part of each "
                "row: set it back, or use cp=1"
            )
        shifted_BT = get_shifted_labels(kwargs)
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = count_labels(shifted_BT).clamp(min=1)
        local_labels_BT = sequence.slice_local(shifted_BT)
        return args, kwargs | {"labels": local_labels_BT, "shift_labels": local_labels_BT}

    def _all_reduce_loss(
        self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Forward hook: replace the output's loss by its sum over the cp ranks. Collective."""
        sequence: Sequence = kwargs[SEQUENCE]
        if sequence.local_tokens is None or kwargs.get("labels") is None:
            return output
        group = sequence.local_tokens.cp.group
        if isinstance(output, tuple):
            return (all_reduce_replicated(output[0], group), *output[1:])
        output.loss = all_reduce_replicated(output.loss, group)
        return output


def _count_heads(config: Any) -> tuple[int, int]:
    """Return the greatest common divisors of query heads and of key/value heads of all layers."""
    layers = list(getattr(config, "per_layer_config", None) or [config])
    num_heads = [layer.num_attention_heads for layer in layers]
    # The keys of latent attention are made for all heads before attention.
    kv_heads = [
        H if getattr(layer, "kv_lora_rank", None) else getattr(layer, "num_key_value_heads", H) or H
        for layer, H in zip(layers, num_heads, strict=True)
    ]
    num_heads += getattr(config, "num_attention_heads_per_layer", None) or []  # of Laguna
    return math.gcd(*num_heads), math.gcd(*kv_heads)


def _find_loss_problem(model: Any) -> str | None:
    """Return why a model's loss cannot be summed over cp ranks, or None if it can be summed."""
    function = model.loss_function
    if stock.get_loss_name(model) is None:
        return "its forward has no loss of transformers' loss_function"
    if not stock.has_causal_loss(model):
        name = getattr(function, "__name__", type(function).__name__)
        return f"its loss ({name}) is not {stock.CAUSAL_LOSS}, that of a causal language model"
    if "forward" in vars(model) or not stock.is_stock(type(model).forward):
        return "its forward is not transformers' own, and may compute more than that loss"
    return None


def _refuse_router_logits(output_router_logits: Any) -> None:
    """Raise ValueError if router logits are requested, because cp ranks see only their tokens."""
    if output_router_logits:
        raise ValueError(
            "output_router_logits (True) must be False under context parallelism, where that "
            "balance loss would see a rank's tokens alone: use "
            "parallelize_moe(moe={'balance': ...})"
        )
