"""Routes: the experts of each token of rollouts, in the order of the rollouts.

Legend: N tokens of a data-parallel rank's rollouts, L MoE layers, K experts per token, T tokens of
a row.

A recording has this rank's tokens in the order of its forwards, for the layers of its pipeline
stages. Routes have all tokens of the data-parallel rank in the order of the rollouts, for all
layers. A mini-batch can therefore replay the routes of a batch in other rows and on another
parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.base.params import clean_name
from moecore.base.rank_checks import gather_objects
from moecore.models.block import MTPLayer
from moecore.moe.layer import MoELayer
from moecore.moe.micro_batch import MicroBatch
from moecore.parallel.mesh import Meshes
from moecore.rl.choices import check_entry_weights, check_expert_ids
from moecore.rl.micro_batches import RolloutRow
from moecore.rl.replay import RouterReplay
from moecore.rl.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedLayers:
    """The MoE layers of a model whose expert ids ("routes") rollouts record and replay."""

    configs: Mapping[str, MoEConfig]  # by name, of all pipeline stages in the model's order
    replay: RouterReplay | None  # of this rank's stages; None = they have no MoE layer
    meshes: Meshes

    @classmethod
    def from_model(cls, model: nn.Module, meshes: Meshes) -> RoutedLayers:
        """Return the layers of a parallelized model. Collective over pp."""
        # Modules of multi-token prediction make no log-probabilities, and sampling engines list
        # none of their layers.
        mtp_layers = [m for m in model.modules() if isinstance(m, MTPLayer)]
        unused = {inner for module in mtp_layers for inner in module.modules()}
        local_layers = {
            clean_name(name): (_make_module_sort_key(model, name), module.config)
            for name, module in model.named_modules()
            if isinstance(module, MoELayer) and module not in unused
        }
        stages = [local_layers]
        if meshes.parallel.pp > 1:
            stages = gather_objects(local_layers, meshes.dense.get_group("pp"))
        every = {name: entry for stage in stages for name, entry in stage.items()}
        return cls(
            configs={name: every[name][1] for name in sorted(every, key=lambda n: every[n][0])},
            replay=RouterReplay(model, layers=list(local_layers)) if local_layers else None,
            meshes=meshes,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of MoE layers L, and experts per token K."""
        return len(self.configs), next(iter(self.configs.values())).choices_per_token

    def check_routes(self, rollouts: Rollouts) -> None:
        """Raise ValueError if routes or route weights have wrong shapes or values. Host syncs."""
        routes_NLK, weights_NLK = rollouts.routes_NLK, rollouts.route_weights_NLK
        choices = {name: config.choices_per_token for name, config in self.configs.items()}
        if len(set(choices.values())) != 1:
            raise ValueError(
                f"routes (of layers with {choices} experts per token) must be of MoELayers with "
                "one number: use RouterReplay"
            )
        if routes_NLK is None:
            return
        if tuple(routes_NLK.shape[1:]) != self.shape:
            L, K = self.shape
            raise ValueError(
                f"Rollouts.routes_NLK {tuple(routes_NLK.shape)} must be [tokens, {L} layers, {K} "
                "experts per token]: give one entry per MoE layer, in their order"
            )
        for place, (name, config) in enumerate(self.configs.items()):
            label = f"[:, {place}] of layer {name!r}, row"
            ids_NK = routes_NLK[:, place].to(self.meshes.device)
            check_expert_ids(f"Rollouts.routes_NLK{label}", ids_NK, config)
            if weights_NLK is not None:
                weights_NK = weights_NLK[:, place].to(self.meshes.device)
                check_entry_weights(f"Rollouts.route_weights_NLK{label}", weights_NK, ids_NK)

    def record_routes(self) -> AbstractContextManager[None]:
        """Return a context that records the expert ids of forwards, for `gather_routes`."""
        return nullcontext() if self.replay is None else self.replay.record()

    def gather_routes(
        self, rows: Sequence[RolloutRow], num_tokens: int, groups: Iterable[dist.ProcessGroup]
    ) -> Tensor:
        """Return the recorded expert ids of all N tokens, int32 [N, L, K]. Collective.

        The ranks of `groups` have recorded other layers or tokens.
        """
        shape = (num_tokens, *self.shape)
        routes_NLK = torch.full(shape, -1, dtype=torch.int32, device=self.meshes.device)
        choices = {} if self.replay is None else self.replay.choices()
        for name, layer, place in self._iterate_local_layers():
            for row, ids_tK in zip(rows, choices[name], strict=True):
                ids_TK = _make_row_micro_batch(row, layer).all_gather_rows(ids_tK)
                is_token_T = row.local_token_idx_T >= 0
                token_idx_t = row.token_idx_N[row.local_token_idx_T[is_token_T]]
                routes_NLK[token_idx_t, place] = ids_TK[is_token_T]
        for group in groups:  # -1 in entries of other ranks
            dist.all_reduce(routes_NLK, dist.ReduceOp.MAX, group=group)
        return routes_NLK

    def replay_rows(self, rows: Sequence[RolloutRow]) -> AbstractContextManager[None]:
        """Return a context in which forward i replays the routes of `rows[i]`, if it has routes."""
        if self.replay is None or rows[0].rollouts.routes_NLK is None:
            return nullcontext()
        routes = [row.rollouts.routes_NLK for row in rows]
        weights = [row.rollouts.route_weights_NLK for row in rows]
        return self.replay.replay(
            self._make_local_choices(rows, routes),
            weights=None if weights[0] is None else self._make_local_choices(rows, weights),
            unrecorded="route",
        )

    def _make_local_choices(
        self, rollout_rows: Sequence[RolloutRow], token_values: Sequence[Tensor | None]
    ) -> dict[str, list[Tensor]]:
        """Return this rank's part of `token_values` ([tokens, L, K] per row): {layer: [T, K]}."""
        local_choices = {name: list[Tensor]() for name, _, _ in self._iterate_local_layers()}
        for row, values_NLK in zip(rollout_rows, token_values, strict=True):
            assert values_NLK is not None, "all rows are of the same rollouts"
            full_TLK = row.gather_at_positions(values_NLK, -1)
            for name, layer, place in self._iterate_local_layers():
                ids_TK = _make_row_micro_batch(row, layer).slice_local_rows(full_TLK[:, place])
                local_choices[name].append(ids_TK.contiguous())
        return local_choices

    def _iterate_local_layers(self) -> Iterator[tuple[str, MoELayer, int]]:
        """Yield (name, layer, index among all layers) of each layer of this rank."""
        places = {name: place for place, name in enumerate(self.configs)}
        for name, layer in ({} if self.replay is None else self.replay.layers).items():
            yield name, layer, places[name]


def _make_module_sort_key(model: nn.Module, module_name: str) -> list[int]:
    """Return a key for the model's order: a module's and its parents' indices among siblings."""
    # Modules that other stages have leave `AbsentModule` in their place, so places are those of the
    # whole model.
    places, module = [], model
    for part in module_name.split("."):
        places.append(list(module._modules).index(part))
        module = module.get_submodule(part)
    return places


def _make_row_micro_batch(row: RolloutRow, layer: MoELayer) -> MicroBatch:
    """Return how tp and cp ranks share the tokens of a packed row in this layer."""
    groups = layer.tracker.groups.select_cp_groups(row.cp)
    micro_batch = MicroBatch(group=groups.micro_batch, cp=groups.cp)
    return replace(micro_batch, cu_seqlens=row.batch["cu_seqlens"].to(row.local_token_idx_T.device))
