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
    """Sums loads and auxiliary losses of all MoE layers per step; updates selection biases.

    `get_moe_state(model)` returns the `MoEState` of a parallelized model. `loss` "mean" = gradients
    are averaged over data ranks, "sum" = they are summed. `other_losses` maps names to the
    auxiliary losses of other layers. `check_parameters` raises if gradients were not reduced over
    all ranks. `device` is the device of a step's sums if there are no MoE layers.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        groups: BalanceGroups,
        *,
        loss: str = "mean",
        other_losses: Mapping[str, AuxLoss] | None = None,
        check_parameters: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.layers = {clean_name(name): layer for name, layer in layers.items()}
        self.groups = groups
        self.loss, self._device = loss, device
        self._check_parameters = check_parameters
        self._aux_losses = dict(other_losses or {})
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
        self, have_tokens: Sequence[Sequence[bool | Tensor]], device: torch.device
    ) -> None:
        """Announce for each micro-batch of the next step whether this rank has tokens in it.

        A micro-batch has one value for the decoder and one for each further prediction. Collective
        (one small all-reduce) if there are auxiliary losses. No host sync.
        """
        trackers = [la.tracker for la in self.layers.values() if la.config.balance.needs_loss]
        owners = [*trackers, *self._aux_losses.values()]
        if not owners:
            return
        flags = [
            copy_to_device(has_tokens, device).float()
            if isinstance(has_tokens, Tensor)
            else torch.full((), float(has_tokens), device=device, dtype=torch.float32)
            for of_depths in have_tokens
            for has_tokens in of_depths
        ]
        number = torch.stack(flags).view(len(have_tokens), -1).sum(0)
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
        """Set the loss scale, an fp32 device scalar, of which only a weak reference is stored."""
        self._loss_scale = None if scale is None else weakref.ref(scale)
        for layer in self.layers.values():
            layer.tracker.loss_scale = self._loss_scale
        for other in self._aux_losses.values():
            other.loss_scale = self._loss_scale

    def finish_step(self, *, is_skipped: bool | Tensor = False) -> MoEMetrics:
        """Check the step, all-reduce and clear counts, update selection biases; return metrics."""
        self.check_step()
        return self.reduce_step(is_skipped=is_skipped)

    def start_micro_batch(self, *, is_last: bool, in_flight: bool = False) -> None:
        """Prepare layers: cache weights unless `is_last`; `in_flight` = several forwards first."""
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
    def reduce_step(self, *, is_skipped: bool | Tensor) -> MoEMetrics:
        """All-reduce and clear counts, update biases unless `is_skipped`, and return metrics."""
        if not self.layers and not self._aux_losses:
            return MoEMetrics()
        counts = {}
        for name, layer in self.layers.items():
            device = next(layer.get_part("experts").parameters()).device
            config = layer.tracker.config
            counts[name] = layer.tracker.counts or LoadCounts.make_zeros(config, device)
        metrics = self._sum_over_ranks(counts)
        if is_skipped is not True:
            # Layers whose bias updates have equal options are updated together.
            groups: dict[Any, list[str]] = {}
            for name, layer in self.layers.items():
                config = layer.config
                rate = config.balance.bias_update_rate
                if rate and any(p.requires_grad for p in layer.get_part("router").parameters()):
                    options = (config.balance.bias_update, rate)
                    key = (config.num_candidates, config.top_k, *options)
                    groups.setdefault(key, []).append(name)
            for names in groups.values():
                self._update_biases(names, counts, metrics.tokens_per_expert, is_skipped)
        for name, layer in self.layers.items():
            if layer.cloner is not None and layer.cloner.plan is not None:
                loads_E = metrics.tokens_per_expert[name][: layer.config.num_experts]
                layer.cloner.plan.update_from_loads(loads_E, is_skipped=is_skipped)
        self._reset_layers()
        return metrics

    @property
    def choice_tapes(self) -> list[ChoiceTape]:
        """The `ChoiceTape`s of the routers, which record or replay choices."""
        routers = [layer.get_part("router") for layer in self.layers.values()]
        return [r.tape for r in routers if r is not None and r.tape is not None]

    def _sum_over_ranks(self, counts: Mapping[str, LoadCounts]) -> MoEMetrics:
        """Sum the layers' counts, by name, over all ranks by one all-reduce; return metrics."""
        # Every rank packs every layer, counted or not, so the length is equal on all ranks. The sum
        # is in fp64, which is exact for counts up to 2^53.
        # A pipeline stage of dense layers may have losses of indexers, and no MoE layers.
        devices = [count.choices_E.device for count in counts.values()]
        device = devices[0] if devices else self._device or torch.device("cpu")
        cloners = {name: la.cloner for name, la in self.layers.items() if la.cloner is not None}
        capacity_choices = {name: c.capacity_choices_E for name, c in counts.items()}
        tensors: dict[str, dict[str, Tensor]] = {
            "choices": {name: c.choices_E for name, c in counts.items()},
            "losses": {name: c.losses for name, c in counts.items()},
            "entropies": {name: c.entropy_2 for name, c in counts.items()},
            "capacity": {name: n_E for name, n_E in capacity_choices.items() if n_E is not None},
            "clones": {name: cloner.get_counts(device) for name, cloner in cloners.items()},
            "indexers": {n: loss.get_step_total(device) for n, loss in self._aux_losses.items()},
        }
        parts = {
            field: torch.cat([*of_layers.values()]).double()
            for field, of_layers in tensors.items()
            if of_layers
        }
        group, number = self.groups.global_batch, self.num_micro_batches
        # Not on a GPU, where the host would have to wait.
        compares = group is not None and device.type == "cpu" and is_gloo(group, "cpu")
        if compares:
            numbers = torch.tensor([number, number**2], dtype=torch.float64, device=device)
            parts["numbers"] = numbers
        flat = torch.cat([*parts.values()])
        if group is not None:
            dist.all_reduce(flat, group=group)
        sums = dict(zip(parts, flat.split([len(part) for part in parts.values()]), strict=True))
        if compares:
            self._check_num_micro_batches(*sums["numbers"].tolist())

        def split(field: str, dtype: torch.dtype, divisor: int = 1) -> dict[str, Tensor]:
            """Return layer name -> sums of `field` divided by `divisor`; {} without the field."""
            if field not in sums:
                return {}
            lengths = [len(tensor) for tensor in tensors[field].values()]
            parts = (sums[field] / divisor).to(dtype).split(lengths)
            return dict(zip(tensors[field], parts, strict=True))

        units_L, tokens_L = sums.get("entropies", flat[:0]).view(-1, 2).unbind(1)
        entropy_L = units_L * UNIT / tokens_L.clamp(min=1)
        # The number that was set, because replays of a CUDA graph do not change the tracker's
        # number. Outside of graphs `check_step` has compared the two.
        shares, choices = number * self.groups.data_ranks, split("choices", torch.int64)
        capacity, clones = split("capacity", torch.int64), split("clones", torch.float64)
        return MoEMetrics(
            tokens_per_expert=choices,
            dropped_per_expert={name: choices[name] - n_E for name, n_E in capacity.items()},
            aux_losses=split("losses", torch.float32, shares),
            router_entropy={
                name: entropy
                for name, entropy in zip(counts, entropy_L.unbind(), strict=True)
                if self.layers[name].get_part("router") is not None
            },
            clones_per_rank={name: n / runs.clamp(min=1) for name, (n, runs) in clones.items()},
            indexer_losses=split("indexers", torch.float32, shares),
        )

    def _check_num_micro_batches(self, total: float, total_of_squares: float) -> None:
        ranks = dist.get_world_size(self.groups.global_batch)
        if total_of_squares * ranks != total**2:
            raise ValueError(
                f"num_micro_batches ({self.num_micro_batches} on rank {dist.get_rank()}, "
                f"{total / ranks:g} in the mean of {ranks} ranks) must be the same on all "
                "ranks that share it: set TrainStep.num_micro_batches to one number on every rank"
            )

    def _update_biases(
        self,
        names: list[str],
        counts: Mapping[str, LoadCounts],
        choices: Mapping[str, Tensor],
        is_skipped: bool | Tensor,
    ) -> None:
        """Update the selection biases of the layers `names`, whose options are equal, in place."""
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
        for other in self._aux_losses.values():
            other.reset()
        for layer in self.layers.values():
            layer.drop_step_state()
