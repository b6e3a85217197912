"""Routes: which experts tokens of rollouts went to, by token, whatever the micro-batches.

Legend: N tokens of a data rank's rollouts, L MoE layers, K experts per token, T tokens of a row.

A recording has the tokens of this rank in the order of its forwards; routes have all tokens of the
data rank in the order of the rollouts. So a mini-batch replays what a batch recorded, in other rows
and on other layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moecore.moe.layer import MoELayer
from moecore.moe.micro_batch import MicroBatch
from moecore.rl.choices import Choices
from moecore.rl.micro_batches import RolloutRow
from moecore.rl.replay import RouterReplay
from moecore.rl.rollouts import Rollouts


def check_routes(replay: RouterReplay, routes_NLK: Tensor | None) -> None:
    """Raise for routes that these layers cannot follow or have. No communication, no host sync."""
    choices = {name: layer.config.choices_per_token for name, layer in replay.layers.items()}
    if len(set(choices.values())) > 1:
        raise ValueError(
            f"routes (of layers with {choices} experts per token) must be of layers with one "
            "number: use RouterReplay"
        )
    shape = (len(choices), next(iter(choices.values())))
    if routes_NLK is not None and tuple(routes_NLK.shape[1:]) != shape:
        raise ValueError(
            f"Rollouts.routes_NLK {tuple(routes_NLK.shape)} must be [tokens, {shape[0]} layers, "
            f"{shape[1]} experts per token]: give one entry per MoE layer, in their order"
        )


def routes_of(replay: RouterReplay, rows: Sequence[RolloutRow], rollouts: Rollouts) -> Tensor:
    """Return int32 [N, L, K], what was recorded in forwards of rows; collective over cp and tp."""
    choices = replay.choices()
    found: Tensor | None = None
    for place, (name, layer) in enumerate(replay.layers.items()):
        for row, ids_tK in zip(rows, choices[name], strict=True):
            if found is None:
                shape = (len(rollouts.tokens_N), len(replay.layers), ids_tK.shape[1])
                found = ids_tK.new_full(shape, -1)
            ids_TK = _of_row(row, layer).gather(ids_tK)
            is_token_T = row.read_T >= 0
            found[row.places_N[row.read_T[is_token_T]], place] = ids_TK[is_token_T]
    assert found is not None, "a batch has rows, and a replay layers"
    return found


def choices_of(replay: RouterReplay, rows: Sequence[RolloutRow]) -> Choices:
    """Return the routes of rows as choices of this rank, one forward per row. No communication."""
    choices: Choices = {name: [] for name in replay.layers}
    for row in rows:
        routes_NLK = row.rollouts.routes_NLK
        assert routes_NLK is not None, "the engine has looked"
        is_token_T = row.read_T >= 0
        whole_TLK = routes_NLK.new_full((len(row.read_T), *routes_NLK.shape[1:]), -1)
        whole_TLK[is_token_T] = routes_NLK[row.read_T[is_token_T]]
        for place, (name, layer) in enumerate(replay.layers.items()):
            own_tK = _of_row(row, layer).own(whole_TLK[:, place])
            choices[name].append(own_tK.to(torch.int32).contiguous())
    return choices


def _of_row(row: RolloutRow, layer: MoELayer) -> MicroBatch:
    groups = layer.tracker.groups
    micro_batch = MicroBatch(group=groups.micro_batch, cp=groups.cp)
    return replace(micro_batch, cu_seqlens=row.batch["cu_seqlens"].to(row.read_T.device))
