"""MoEMetrics: loads and losses of one optimizer step, as tensors by layer and numbers by name."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from moecore.moe.balance import LOSS_NAMES

LayerNumbers = dict[str, list[float]]  # layer name -> numbers


@dataclass(frozen=True, slots=True)
class MoEMetrics:
    """Loads, auxiliary losses and entropy of one optimizer step. Tensors stay on the device.

    Attributes:
        tokens_per_expert: layer name -> int64 [E], tokens over all ranks and micro-batches,
            including tokens that capacity dropped.
        dropped_per_expert: layer name -> int64 [E], tokens that capacity dropped; only layers with
            a capacity.
        aux_losses: layer name -> fp32 [4] in the order of `LOSS_NAMES`, coefficients applied.
        router_entropy: layer name -> fp64 scalar in nats, the mean over tokens of the entropy of
            the router's probabilities: the scores before any bias, divided by their sum. It is 0 to
            log(E). Only layers whose router is moecore's.
        clones_per_rank: layer name -> fp64 scalar, mean over ranks and forwards of the number of
            clones (other ranks' experts) that a rank computed. Only layers with `CloneOptions`.
        indexer_losses: attention layer name -> fp32 [1], coefficient applied. Only layers whose
            indexer is trained: `IndexerConfig`.
    """

    tokens_per_expert: dict[str, Tensor] = field(default_factory=dict)
    dropped_per_expert: dict[str, Tensor] = field(default_factory=dict)
    aux_losses: dict[str, Tensor] = field(default_factory=dict)
    router_entropy: dict[str, Tensor] = field(default_factory=dict)
    clones_per_rank: dict[str, Tensor] = field(default_factory=dict)
    indexer_losses: dict[str, Tensor] = field(default_factory=dict)

    def to_dict(self, *, per_expert: bool = True) -> dict[str, float]:
        """Return {name: number} for loggers; "a, /<layer>" stands for a and a/<layer>. Host sync.

            expert_load_max_over_mean   maximum of `expert_load/<layer>` over layers
            expert_load/<layer>         maximum divided by mean of experts' loads in a layer
            expert_load/<layer>/<e>     tokens of an expert divided by the mean over experts
            drop_rate, /<layer>         dropped share of experts' tokens; mean over layers
            balance_loss, /<layer>      auxiliary losses of all scopes; sum over layers
            z_loss, /<layer>            sum over layers
            router_entropy, /<layer>    see the attribute; mean over layers
            clones_per_rank, /<layer>   see the attribute; mean over layers
            indexer_loss, /<layer>      sum over attention layers

        Args:
            per_expert: include `expert_load/<layer>/<e>`: thousands of numbers in large models.

        Returns:
            Identical on every rank; empty without MoE layers and indexers. Omitted are drop rates
            without a capacity, unused losses, and layers without tokens if other layers have them.
        """
        values = self._copy_to_host()
        indexer_losses = {n: value for n, (value,) in values.pop("indexer_losses").items()}
        active_layers = {layer for layer, of_E in values["tokens_per_expert"].items() if any(of_E)}
        if active_layers:
            values = {
                name: {layer: value for layer, value in of_layers.items() if layer in active_layers}
                for name, of_layers in values.items()
            }
        loads = {layer: _divide_by_mean(x) for layer, x in values["tokens_per_expert"].items()}
        numbers = _prefix_metric_name("expert_load", {layer: max(x) for layer, x in loads.items()})
        if loads:
            numbers = {"expert_load_max_over_mean": max(numbers.values()), **numbers}
        numbers |= _prefix_and_average("drop_rate", _compute_drop_rates(values))
        z = LOSS_NAMES.index("z")
        for name, idxs in (("balance_loss", range(z)), ("z_loss", [z])):
            losses = {layer: sum(x[i] for i in idxs) for layer, x in values["aux_losses"].items()}
            if any(losses.values()):  # a loss that is in use is above 0
                numbers |= {name: sum(losses.values()), **_prefix_metric_name(name, losses)}
        for name in ("router_entropy", "clones_per_rank"):
            numbers |= _prefix_and_average(name, {layer: x for layer, (x,) in values[name].items()})
        if indexer_losses:
            numbers |= {"indexer_loss": sum(indexer_losses.values())}
            numbers |= _prefix_metric_name("indexer_loss", indexer_losses)
        if per_expert:
            for layer, of_E in loads.items():
                numbers |= {f"expert_load/{layer}/{e}": load for e, load in enumerate(of_E)}
        return numbers

    def compute_load_max_over_mean(self) -> dict[str, float]:
        """Return {layer name: maximum / mean of the experts' loads}. One host sync."""
        counts = self._copy_to_host()["tokens_per_expert"]
        return {layer: max(_divide_by_mean(counts)) for layer, counts in counts.items()}

    def compute_drop_rates(self) -> dict[str, float]:
        """Return {layer name: share of experts' tokens that capacity dropped}. One host sync."""
        return _compute_drop_rates(self._copy_to_host())

    def compute_total_aux_loss(self) -> float:
        """Return the sum over layers of all auxiliary losses. One host sync."""
        return sum(map(sum, self._copy_to_host()["aux_losses"].values()), start=0.0)

    def _copy_to_host(self) -> dict[str, LayerNumbers]:
        """Return field -> layer -> numbers, by one copy in fp64, exact for counts up to 2^53."""
        of_fields = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = [
            torch.cat([t.reshape(-1) for t in of_layers.values()]).double()
            for of_layers in of_fields.values()
            if of_layers
        ]
        numbers = iter(torch.cat(parts).tolist() if parts else [])
        return {
            name: {layer: [next(numbers) for _ in range(t.numel())] for layer, t in of.items()}
            for name, of in of_fields.items()
        }


def _divide_by_mean(counts: list[float]) -> list[float]:
    """Return each expert's count divided by the mean count; zeros if all counts are 0."""
    mean = max(sum(counts) / len(counts), 1e-9)
    return [count / mean for count in counts]


def _compute_drop_rates(layer_numbers: dict[str, LayerNumbers]) -> dict[str, float]:
    """Return layer name -> dropped share of its choices, from the result of `_copy_to_host`."""
    return {
        layer: sum(drops) / max(sum(layer_numbers["tokens_per_expert"][layer]), 1)
        for layer, drops in layer_numbers["dropped_per_expert"].items()
    }


def _prefix_metric_name(metric_name: str, values_by_layer: dict[str, float]) -> dict[str, float]:
    return {f"{metric_name}/{layer}": value for layer, value in values_by_layer.items()}


def _prefix_and_average(metric_name: str, values_by_layer: dict[str, float]) -> dict[str, float]:
    """Return {"<name>/<layer>": value} and {name: mean} for {layer: value}; {} for no layers."""
    if not values_by_layer:
        return {}
    return {
        metric_name: sum(values_by_layer.values()) / len(values_by_layer),
        **_prefix_metric_name(metric_name, values_by_layer),
    }
