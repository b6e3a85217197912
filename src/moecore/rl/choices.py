"""Recordings of expert choices: checks, and an inference engine's format.

Legend: B sequences, S tokens of a sequence, T tokens of this rank, L layers, K experts per token, E
experts.

A recording is a plain dict: layer name -> list of int32 [T, K], one entry per call of the layer.
Ids are global expert ids, and -1 is a dropped choice. The T tokens have the order of the layer's
input: sequence after sequence, and under tp only this rank's slice of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moecore.base.fields import quote
from moecore.base.options.layer import MoEConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.layer import MoELayer
from moecore.moe.micro_batch import MicroBatch

Choices = dict[str, list[Tensor]]


def check_choices(choices: Mapping[str, Sequence[Tensor]], layers: Mapping[str, MoELayer]) -> None:
    """Raise ValueError if `layers` (by name) cannot replay the recorded expert ids. Host syncs."""
    for name in choices:
        if name not in layers:
            raise ValueError(
                f"choices[{name!r}] must name one of the layers {_quote_names(layers)}: "
                "record and replay the same model"
            )
    for name, layer in layers.items():
        if name not in choices:
            raise ValueError(
                f"choices (of {len(choices)} layers) must have layer {name!r}: record it, or leave "
                "it out with RouterReplay(model, layers=...)"
            )
        for forward, ids_TK in enumerate(choices[name]):
            check_expert_ids(f"choices[{name!r}][{forward}]", ids_TK, layer.config)


def check_expert_ids(tensor_name: str, ids_TK: Tensor, config: MoEConfig) -> None:
    """Raise ValueError unless all ids are expert ids, distinct in a row, or -1. Host sync."""
    K, E = config.choices_per_token, config.num_candidates
    if ids_TK.ndim != 2 or ids_TK.shape[1] != K:
        raise ValueError(
            f"{tensor_name} {tuple(ids_TK.shape)} must have the shape [tokens, {K}]: K is top_k, "
            "or num_experts where the experts choose"
        )
    if ids_TK.is_floating_point() or ids_TK.is_complex() or ids_TK.dtype == torch.bool:
        raise ValueError(f"{tensor_name} ({ids_TK.dtype}) must be integers: use torch.int32")
    ids_TK = ids_TK.long()
    wrong_TK = (ids_TK < -1) | (ids_TK >= E)
    suffix = " + zero_experts" if config.zero_experts else ""
    rule = f"lie in [0, num_experts{suffix} ({E})), or be -1"
    if config.assignment == "expert_choice":
        wrong_TK |= (ids_TK >= 0) & (ids_TK != torch.arange(E, device=ids_TK.device))
        rule = "be e or -1 in column e, where experts choose"
    if wrong_TK.any():
        token, k = wrong_TK.nonzero()[0].tolist()
        raise ValueError(
            f"{tensor_name}[{token}, {k}] ({int(ids_TK[token, k])}) must {rule}: record it anew"
        )
    sorted_TK = ids_TK.sort(dim=1).values
    twice_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    if twice_TK.any():
        token = int(twice_TK.any(1).nonzero()[0])
        raise ValueError(
            f"{tensor_name}[{token}] ({ids_TK[token].tolist()}) must not repeat an expert: record "
            "it anew"
        )


def check_weights(
    weights: Mapping[str, Sequence[Tensor]], choices: Mapping[str, Sequence[Tensor]]
) -> None:
    """Raise ValueError unless each recorded expert id has a finite weight >= 0. Host sync."""
    counts = [{name: len(entries) for name, entries in of.items()} for of in (weights, choices)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"weights (of {_quote_names(weights)}) must have the layers and forwards of the "
            f"choices ({_quote_names(choices)}): give one entry for each of theirs"
        )
    for name, entries in weights.items():
        for forward, (weights_TK, ids_TK) in enumerate(zip(entries, choices[name], strict=True)):
            check_entry_weights(f"weights[{name!r}][{forward}]", weights_TK, ids_TK)


def check_entry_weights(tensor_name: str, weights_TK: Tensor, ids_TK: Tensor) -> None:
    """Raise ValueError unless weights are finite and >= 0 for each id that is not -1. Host sync."""
    if weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
        raise ValueError(
            f"{tensor_name} ({weights_TK.dtype} {tuple(weights_TK.shape)}) must be floating "
            f"{tuple(ids_TK.shape)}: give one weight per expert id"
        )
    wrong_TK = (ids_TK >= 0) & ~(weights_TK.isfinite() & (weights_TK >= 0))
    if wrong_TK.any():
        token, k = wrong_TK.nonzero()[0].tolist()
        raise ValueError(
            f"{tensor_name}[{token}, {k}] ({float(weights_TK[token, k])}) must be finite and >= 0 "
            "where an expert is chosen: record it anew"
        )


def convert_from_engine_indices(
    indices_BSLK: Any, layers: Mapping[str, MoELayer], engine_layers: Sequence[str | None]
) -> dict[str, Tensor]:
    """Convert an inference engine's expert ids to this rank's {layer name: int32 [T, K]}.

    `indices_BSLK` has sequences, tokens, layers and experts per token; -1 = no expert.
    `engine_layers` names each of the L layers; None skips a layer.
    """
    ids_BSLK = indices_BSLK
    try:
        if not isinstance(ids_BSLK, Tensor):
            ids_BSLK = torch.as_tensor(ids_BSLK, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"indices ({quote(indices_BSLK)}) must be integers, a tensor or array: {error}"
        ) from None
    if ids_BSLK.ndim != 4 or ids_BSLK.shape[2] != len(engine_layers):
        raise ValueError(
            f"indices {tuple(ids_BSLK.shape)} must be [batch, sequence, {len(engine_layers)} layers"
            ", top_k]: name the engine's layers with layer_names, None for those without experts"
        )
    named = [name for name in engine_layers if name is not None]
    if sorted(named) != sorted(layers):
        raise ValueError(
            f"layer_names ({named}) must name each of {_quote_names(layers)} once: leave layers "
            "out with RouterReplay(model, layers=...)"
        )
    B, S = ids_BSLK.shape[:2]
    local_choices: dict[str, Tensor] = {}
    for i, name in enumerate(engine_layers):
        if name is None:
            continue
        micro_batch = _make_micro_batch(layers[name].tracker.groups, B)
        if S % micro_batch.num_ranks:
            raise ValueError(
                f"indices sequence ({S}) must be a multiple of the ranks that share one "
                f"({micro_batch.num_ranks}): pad it with -1"
            )
        ids_NK = ids_BSLK[:, :, i].flatten(0, 1)
        check_expert_ids(
            f"indices[..., {i}, :] of layer {name!r}, row", ids_NK, layers[name].config
        )
        ids_TK = micro_batch.slice_local_rows(ids_NK)
        local_choices[name] = ids_TK.to(torch.int32, copy=True).contiguous()
    return {name: local_choices[name] for name in layers}


def _make_micro_batch(groups: BalanceGroups, num_sequences: int) -> MicroBatch:
    """Return how the tp and cp ranks of `groups` share sequences; ValueError for a dynamic cp."""
    if groups.by_cp:
        raise ValueError(
            "ContextOptions.dynamic (True) must be False for the choices of an engine, which do "
            "not say the cp of a forward: leave it out"
        )
    return MicroBatch(num_sequences=num_sequences, group=groups.micro_batch, cp=groups.cp)


def _quote_names(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)
