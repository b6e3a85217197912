"""MoEState, the balance record of a model: sums a step's loads and updates the expert biases.

    loads of each layer's tracker -> one all-reduce -> MoEMetrics
                                                    -> expert biases are updated

Legend: L layers, E experts, X columns of one layer's margins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import Count, check_value, quote
from moecore.base.params import clean_name
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import foreach_add_, is_gloo
from moecore.kernels.routing.entropy import UNIT
from moecore.kernels.routing.margins import compute_even_bias
from moecore.moe.aux_loss import AuxLoss
from moecore.moe.balance import BalanceGroups, LoadCounts
from moecore.moe.metrics import MoEMetrics
from moecore.moe.records import ChoiceTape

NumMicroBatches = Annotated[Count, "use the number of backwards per optimizer step"]


class MoEState:
    """Sums the loads and auxiliary losses of a model's MoE layers per step, and updates biases.

    A parallelized model owns one, `get_moe_state(model)`. `loss` "mean" = gradients are averaged
    over data ranks, "sum" = gradients are summed. `others` are auxiliary losses, by name, of layers
    that are not MoE layers, with the factors and resets of `layers`. `check_parameters` raises if
    gradients were not reduced over all ranks.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        groups: BalanceGroups,
        *,
        loss: str = "mean",
        others: Mapping[str, AuxLoss] | None = None,
        check_parameters: Callable[[], None] | None = None,
    ) -> None:
        self.layers = {clean_name(name): layer for name, layer in layers.items()}
        self.groups = groups
        self.loss = loss
        self._check_parameters = check_parameters
        self._aux_losses = dict(others or {})
        self._loss_scale: weakref.ref[Tensor] | None = None
        self.set_num_micro_batches(1)
        for layer in layers.values():
            layer.tracker.groups = groups
            layer.tracker.has_steps = False

    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches of a step, by which auxiliary losses are divided."""
        # No other factor of the main loss applies to auxiliary losses, except `set_loss_scale`.
        check_value("num_micro_batches", num_micro_batches, NumMicroBatches)
        self.num_micro_batches = num_micro_batches
        scale = 1.0 / num_micro_batches
        if self.loss == "sum":
            scale /= self.groups.data_ranks
        for layer in self.layers.values():
            layer.tracker.gradient_scale = scale
            layer.tracker.has_steps = True
        for other in self._aux_losses.values():
            other.gradient_scale = scale

    @torch.no_grad()
    def announce_micro_batches(
        self, have_tokens: Sequence[bool | Tensor], device: torch.device
    ) -> None:
        """Set which micro-batches of the coming step have tokens on this rank, one flag each.

        With auxiliary losses it is collective: one small all-reduce, no host sync.
        """
        trackers = [la.tracker for la in self.layers.values() if la.config.balance.needs_loss]
        owners = [*trackers, *self._aux_losses.values()]
        if not owners:
            return
        flags = [
            copy_to_device(has_tokens, device).float()
            if isinstance(has_tokens, Tensor)
            else torch.full((), float(has_tokens), device=device, dtype=torch.float32)
            for has_tokens in have_tokens
        ]
        number = torch.stack(flags).sum()
        group, of_all = self.groups.global_batch, len(have_tokens)
        # Ranks that share a micro-batch have equal flags, which cancel in the quotient.
        if group is not None and self.groups.data_ranks > 1:
            dist.all_reduce(number, group=group)
            of_all *= group.size()
        weight = of_all / number.clamp(min=1)
        for owner in owners:
            owner.token_weight = weight

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale of auxiliary losses; None = 1."""
        return None if self._loss_scale is None else self._loss_scale()

    def set_loss_scale(self, scale: Tensor | None) -> None:
        """Set the loss scale, an fp32 scalar on the device. Only a weak reference is stored."""
        self._loss_scale = None if scale is None else weakref.ref(scale)
        for layer in self.layers.values():
            layer.tracker.loss_scale = self._loss_scale
        for other in self._aux_losses.values():
            other.loss_scale = self._loss_scale

    def finish_step(self, *, skipped: bool | Tensor = False) -> MoEMetrics:
        """Check the step, all-reduce its counts, update the expert biases, and clear the counts.

        If the step was `skipped` (bool or a scalar on the device), biases do not move.
        """
        self.check_step()
        return self.reduce_step(skipped=skipped)

    def start_micro_batch(self, *, is_last: bool, in_flight: bool = False) -> None:
        """Prepare all layers for a micro-batch, or with `in_flight` for several before a backward.

        Micro-batches of a step share quantised weights until `is_last`.
        """
        for layer in self.layers.values():
            layer.get_part("experts").reader.start_micro_batch(is_last=is_last)
            if in_flight:
                layer.tracker.allow_forwards_in_flight()

    def check_step(self) -> None:
        """Raise ValueError for a wrong number of backwards, or unannounced empty micro-batches."""
        if self._check_parameters is not None:
            self._check_parameters()
        trackers = {name: layer.tracker for name, layer in self.layers.items()}
        seen = {n: t for n, t in trackers.items() if t.config.balance.needs_loss}
        for name, tracker in seen.items():
            count = tracker.num_micro_batches
            if count not in (0, tracker.runs * self.num_micro_batches):
                self._reset_layers()
                raise ValueError(
                    f"num_micro_batches ({self.num_micro_batches}) must equal the backwards of a "
                    f"step, but {name} saw {count}: set TrainStep.num_micro_batches, and run one "
                    "forward and backward in each; a layer that runs twice in one forward is an "
                    "MoELayer(runs=2)"
                )
        # Numbers of all ranks, so all ranks raise. A layer that serves one modality may be empty.
        # With dynamic context parallelism, micro-batches have tokens on other numbers of ranks.
        counts = [[int(ranks) for ranks in t.ranks_with_tokens] for t in seen.values()]
        differ = (
            0 in of_layer and any(of_layer) if self.groups.by_cp else len({*of_layer}) > 1
            for of_layer in counts
        )
        if counts and all(differ):
            raise ValueError(
                f"micro-batches (with tokens on {quote(counts[0])} ranks) must be announced where "
                "they differ, because an auxiliary loss is the mean over those with tokens: drop() "
                "this step, and call TrainStep.announce(micro_batches) before it begins"
            )

    @torch.no_grad()
    def reduce_step(self, *, skipped: bool | Tensor) -> MoEMetrics:
        """All-reduce and clear the counts, and update biases unless `skipped`. Return metrics."""
        if not self.layers:
            return MoEMetrics()
        counts = {name: self._get_layer_counts(layer) for name, layer in self.layers.items()}
        metrics = self._sum_over_ranks(counts)
        if skipped is not True:
            for names in _group_by_options(self.layers):
                self._update_biases(names, counts, metrics.tokens_per_expert, skipped)
        for name, layer in self.layers.items():
            if layer.cloner is not None:
                loads_E = metrics.tokens_per_expert[name][: layer.config.num_experts]
                layer.cloner.end_step(loads_E, is_skipped=skipped)
        self._reset_layers()
        return metrics

    @property
    def tapes(self) -> list[ChoiceTape]:
        """Tapes that record or replay choices, one per router that has a tape."""
        routers = [layer.get_part("router") for layer in self.layers.values()]
        return [r.tape for r in routers if r is not None and r.tape is not None]

    def _sum_over_ranks(self, counts: Mapping[str, LoadCounts]) -> MoEMetrics:
        """Sum the counts of layers by name over all ranks, with one all-reduce. Return metrics."""
        # Every rank packs every layer, counted or not, so the length is the same on all ranks. One
        # fp64 tensor has the losses, and counts exactly up to 2^53.
        choices = {name: c.choices_E for name, c in counts.items()}
        losses = {name: c.losses for name, c in counts.items()}
        entropies = {name: c.entropy_2 for name, c in counts.items()}
        capacity_choices = {
            name: c.capacity_choices_E
            for name, c in counts.items()
            if c.capacity_choices_E is not None
        }
        device = next(iter(choices.values())).device
        cloners = {name: la.cloner for name, la in self.layers.items() if la.cloner is not None}
        clones = {name: c.counts(device) for name, c in cloners.items()}
        indexers = {name: other.get_step_total(device) for name, other in self._aux_losses.items()}
        parts = [
            torch.cat(list(tensors.values())).double()
            for tensors in (choices, losses, entropies, capacity_choices, clones, indexers)
            if tensors
        ]
        group, number = self.groups.global_batch, self.num_micro_batches
        # On a GPU the host would have to wait, before and after.
        compares = group is not None and device.type == "cpu" and is_gloo(group, "cpu")
        if compares:
            parts.append(parts[0].new_tensor([number, number**2]))
        flat = torch.cat(parts)
        if group is not None:
            dist.all_reduce(flat, group=group)
            if compares:
                self._check_num_micro_batches(flat[-2:].tolist(), group)
        all_choices, all_losses, all_entropies, *optional = flat.split([len(p) for p in parts])
        units_L, tokens_L = all_entropies.view(-1, 2).unbind(1)
        entropy_L = units_L * UNIT / tokens_L.clamp(min=1)
        # The number that was set, not the tracker's count: replays of a CUDA graph run no Python.
        # Outside of graphs `check_step` has compared the two.
        shares = self.num_micro_batches * self.groups.data_ranks
        metrics = MoEMetrics(
            tokens_per_expert=_split_by_names(all_choices.long(), choices),
            aux_losses=_split_by_names((all_losses / shares).float(), losses),
            router_entropy={
                name: entropy
                for name, entropy in zip(counts, entropy_L.unbind(), strict=True)
                if self.layers[name].get_part("router") is not None
            },
        )
        if capacity_choices:
            for name, n_E in _split_by_names(optional[0].long(), capacity_choices).items():
                metrics.dropped_per_expert[name] = metrics.tokens_per_expert[name] - n_E
        if clones:
            for name, (copies, forwards) in _split_by_names(
                optional[bool(capacity_choices)], clones
            ).items():
                metrics.clones_per_rank[name] = copies / forwards.clamp(min=1)
        if indexers:
            indexer_sums = (optional[-1 - compares] / shares).float()
            metrics.indexer_losses.update(_split_by_names(indexer_sums, indexers))
        return metrics

    def _check_num_micro_batches(self, sums: Sequence[float], group: dist.ProcessGroup) -> None:
        """Raise ValueError if `num_micro_batches` differs between ranks of `group`.

        `sums` = the sum of the ranks' numbers, and the sum of the squares of these numbers.
        """
        ranks = group.size()
        total, squares = sums
        if squares * ranks != total**2:
            raise ValueError(
                f"num_micro_batches ({self.num_micro_batches} on rank {dist.get_rank()}, "
                f"{total / ranks:g} in the mean of {ranks} ranks) must be the same on all ranks "
                "that share it: set TrainStep.num_micro_batches to one number on every rank"
            )

    def _update_biases(
        self,
        names: list[str],
        counts: Mapping[str, LoadCounts],
        choices: Mapping[str, Tensor],
        is_skipped: bool | Tensor,
    ) -> None:
        """Update the selection biases of layers `names`, whose options are equal, in place.

        `choices` has each expert's choices over all ranks by layer. A skipped step moves no bias.
        """
        config = self.layers[names[0]].config
        rate = config.balance.bias_update_rate
        biases = [self.layers[name].get_part("router").selection_bias for name in names]
        bias_LE = torch.stack(biases)
        if config.balance.bias_update == "quantile":
            margins_LEX = torch.stack([counts[name].margins_EX for name in names])  # type: ignore[misc]
            if self.groups.global_batch is not None:
                dist.all_reduce(margins_LEX, group=self.groups.global_batch)
            move_LE = compute_even_bias(margins_LEX, bias_LE, config.top_k) - bias_LE
            move_LE = rate * (move_LE - move_LE.mean(-1, keepdim=True))
        else:
            choices_LE = torch.stack([choices[name] for name in names]).double()
            below_LE = torch.sign(choices_LE.mean(1, keepdim=True) - choices_LE)
            move_LE = rate * below_LE.to(bias_LE.dtype)
        if isinstance(is_skipped, Tensor):
            move_LE = move_LE.masked_fill(is_skipped, 0.0)
        foreach_add_(biases, list(move_LE))

    def _reset_layers(self) -> None:
        """Drop the counts, losses and copies of weights of all layers since the last step."""
        for other in self._aux_losses.values():
            other.reset()
        for layer in self.layers.values():
            layer.drop_step()

    def _get_layer_counts(self, layer: Any) -> LoadCounts:
        """Return the layer's counts of this step; zeros if no micro-batch was counted."""
        device = next(layer.get_part("experts").parameters()).device
        return layer.tracker.counts or LoadCounts.zeros(layer.tracker.config, device)


def _split_by_names(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `flat` along dim 0 into views by name, each as long as the name's tensor in `like`."""
    return dict(zip(like, flat.split([len(t) for t in like.values()]), strict=True))


def _group_by_options(layers: Mapping[str, Any]) -> list[list[str]]:
    """Return lists of layers whose bias updates have equal options, without frozen routers."""
    groups: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        config = layer.config
        rate = config.balance.bias_update_rate
        if rate and any(p.requires_grad for p in layer.get_part("router").parameters()):
            bias_options = (config.balance.bias_update, rate)
            groups.setdefault((config.num_candidates, config.top_k, *bias_options), []).append(name)
    return list(groups.values())
