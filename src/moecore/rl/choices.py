"""Recordings of expert choices: checks, flat tensors for files, and an inference engine's format.

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

from moecore.base.fields import check_arguments, quote
from moecore.base.options.layer import MoEConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.layer import MoELayer
from moecore.moe.micro_batch import MicroBatch

Choices = dict[str, list[Tensor]]
EMPTY = "none"  # ends the name of a layer that never ran


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


def choices_to_tensors(choices: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return recorded expert ids as a flat dict for `safetensors.torch.save_file`.

    Keys are "<layer>/<forward>", for example "model.layers.3.mlp/0". A layer that never ran has the
    key "<layer>/none" and an empty tensor. Tensors are contiguous copies.
    """
    check_arguments(choices_to_tensors, locals())
    tensors: dict[str, Tensor] = {}
    for name, records in choices.items():
        for forward, ids_TK in enumerate(records):
            tensors[f"{name}/{forward}"] = ids_TK.clone(memory_format=torch.contiguous_format)
        if not records:
            tensors[f"{name}/{EMPTY}"] = torch.empty(0, dtype=torch.int32, device="cpu")
    return tensors


def choices_from_tensors(tensors: Mapping[str, Tensor]) -> Choices:
    """Return {layer name: expert ids per forward} from the dict of `choices_to_tensors`.

    ValueError for a key of another form, or a layer whose forwards are not 0, 1, 2, ...
    """
    check_arguments(choices_from_tensors, locals())
    layer_records: dict[str, dict[int, Tensor]] = {}
    for key, ids_TK in tensors.items():
        name, slash, forward = key.rpartition("/")
        if not slash or not (forward == EMPTY or (forward.isascii() and forward.isdecimal())):
            raise ValueError(f"tensors[{key!r}] must be named <layer>/<forward>: save it anew")
        records = layer_records.setdefault(name, {})
        if forward != EMPTY:
            records[int(forward)] = ids_TK
    for name, records in layer_records.items():
        missing = set(range(len(records))) - records.keys()
        if missing:
            raise ValueError(
                f"tensors of layer {name!r} ({len(records)} forwards) must have forward "
                f"{min(missing)}: load the whole recording"
            )
    return {name: [r[i] for i in range(len(r))] for name, r in layer_records.items()}


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


def convert_to_engine_indices(
    choices: Mapping[str, Sequence[Tensor]], layers: Mapping[str, MoELayer], batch_size: int
) -> list[Tensor]:
    """Convert each recorded forward's expert ids to an inference engine's layout [B, S, L, K].

    int32: B sequences, S tokens, L layers, K experts per token. Collective over tp and cp.
    """
    check_choices(choices, layers)
    forwards = {name: len(choices[name]) for name in layers}
    if len(set(forwards.values())) > 1:
        raise ValueError(
            f"choices (forwards per layer: {forwards}) must have one number of forwards: "
            "choose layers that always run with RouterReplay(model, layers=...)"
        )
    result = []
    for i in range(min(forwards.values())):
        shapes = {name: tuple(choices[name][i].shape) for name in layers}
        if len(set(shapes.values())) > 1 or next(iter(shapes.values()))[0] % batch_size:
            raise ValueError(
                f"choices of forward {i} ({shapes}) must have one shape with a multiple of "
                f"batch_size ({batch_size}) tokens: say how many sequences a forward had"
            )
        layer_ids = []
        for name, layer in layers.items():
            micro_batch = _make_micro_batch(layer.tracker.groups, batch_size)
            ids_NK = micro_batch.all_gather_rows(choices[name][i].to(torch.int32))
            layer_ids.append(ids_NK.unflatten(0, (batch_size, ids_NK.shape[0] // batch_size)))
        result.append(torch.stack(layer_ids, dim=2))
    return result


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
