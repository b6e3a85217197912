"""The end of torchtitan's optimizer step: token counts, selection biases, metrics, amax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

from moecore.integrations.torchtitan.layer import TitanLayer
from moecore.moe.amax_history import GRADIENTS
from moecore.moe.metrics import MoEMetrics
from moecore.parallel.model.parallel_state import get_capacity, get_moe_state, get_request
from moecore.precision.amax import advance_amax, has_amax_history, list_amax_histories
from moecore.train.step import TrainStep

METRICS = "moe_metrics"  # attribute of the optimizers: metrics of the last step
AMAX = "amax."  # prefix of amax histories in a checkpoint
STEP = "moecore_step"  # attribute of a model with pipeline stages: its TrainStep


def register_step_hooks(optimizers: Any, model_parts: list[nn.Module], *_: Any) -> None:
    """Register optimizer hooks that update selection biases, metrics and FP8 amax histories."""
    delayed = [part for part in model_parts if has_amax_history(part)]

    def before_step(*_: Any) -> None:
        plain = [part for part in model_parts if not hasattr(part, STEP)]
        setattr(optimizers, METRICS, [finish_step(part) for part in plain])

    def after_step(*_: Any) -> None:
        for part in model_parts:
            step: TrainStep | None = getattr(part, STEP, None)
            if step is not None:
                getattr(optimizers, METRICS).append(step.finish().metrics)
            elif part in delayed:
                request = get_request(part)
                advance_amax(part, None if request is None else request.meshes.stage_group)

    optimizers.register_step_pre_hook(before_step)
    optimizers.register_step_post_hook(after_step)
    if delayed:
        add_amax_to_state_dict(optimizers, delayed)


def add_amax_to_state_dict(optimizers: Any, model_parts: list[nn.Module]) -> None:
    """Add FP8 amax histories of model parts to the state dict of torchtitan's optimizers."""
    save, load = optimizers.state_dict, optimizers.load_state_dict
    histories = {n: h for part in model_parts for n, h in list_amax_histories(part).items()}
    device = next(model_parts[0].parameters()).device

    def state_dict() -> dict[str, Any]:
        # Names do not depend on the layout: DCP raises errors for names that a checkpoint lacks.
        entries = {f"{AMAX}degrees": _get_degrees(model_parts[0])}
        for name, history in histories.items():
            history.allocate_recorded_amax(device)
            entries |= {f"{AMAX}{name}.{o}": steps for o, steps in history.recorded_amax.items()}
        result: dict[str, Any] = save() | entries
        return result

    def load_state_dict(state: dict[str, Any]) -> None:
        """Load the state; amax histories of gradients are ignored if parallel degrees differ."""
        load({name: value for name, value in state.items() if not name.startswith(AMAX)})
        has_same_degrees = torch.equal(state[f"{AMAX}degrees"].cpu(), _get_degrees(model_parts[0]))
        for name, history in histories.items():
            operands = {o: state[f"{AMAX}{name}.{o}"] for o in history.operands}
            history.load_recorded_amax(
                {o: s for o, s in operands.items() if has_same_degrees or o not in GRADIENTS},
                device,
            )

    optimizers.state_dict, optimizers.load_state_dict = state_dict, load_state_dict


def _get_degrees(model: nn.Module) -> Tensor:
    """Return int64 [3]: data ranks, cp and tp, on which the magnitudes of gradients depend."""
    request = get_request(model)
    assert request is not None, "parallelize_moe has enabled delayed scaling"
    parallel = request.meshes.parallel
    degrees = [request.meshes.data_ranks, parallel.cp, parallel.tp]
    return torch.tensor(degrees, dtype=torch.int64, device="cpu")


@torch.no_grad()
def finish_step(model: nn.Module) -> MoEMetrics:
    """Update the selection biases and return the step's metrics. Collective, no host sync."""
    state = get_moe_state(model)
    before = {
        layer: layer.get_part("router").selection_bias.clone()
        for layer in state.layers.values()
        if isinstance(layer, TitanLayer) and layer.config.balance.bias_update_rate
    }
    get_capacity(model).raise_reported_errors()
    metrics = state.finish_step()
    for layer, old_E in before.items():
        bias_E = layer.get_part("router").selection_bias
        bias_E -= (bias_E - old_E).mean()
    return metrics


class MoEMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics processor, which also logs the load of the experts.

        moe/load_max_over_mean      max / mean of the tokens per expert, maximum over layers
        moe/load_max_over_mean_avg  max / mean of the tokens per expert, mean over layers; 1 is even
        moe/aux_loss                sum of the auxiliary losses
        moe/drop_rate               dropped / all (token, expert) choices, mean over layers

    Only layers with a capacity have a drop rate.
    """

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log as torchtitan does, then expert loads on a second line; up to 4 more host syncs."""
        extra = dict(extra_metrics or {})
        for part in self.model_parts or ():
            get_capacity(part).wait_and_raise_errors()
        for metrics in getattr(self.optimizers, METRICS, ()):
            extra |= compute_load_metrics(metrics)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        moe_metrics = {name: value for name, value in extra.items() if name.startswith("moe/")}
        if moe_metrics:
            logger.info("  ".join(f"{name}: {value:.3f}" for name, value in moe_metrics.items()))


def compute_load_metrics(metrics: MoEMetrics) -> dict[str, float]:
    """Return {log name: value} of expert loads, auxiliary loss and drop rate. Host syncs."""
    loads = list(metrics.compute_load_max_over_mean().values())
    if not loads:  # a dense model
        return {}
    numbers = {
        "moe/load_max_over_mean": max(loads),
        "moe/load_max_over_mean_avg": sum(loads) / len(loads),
        "moe/aux_loss": metrics.compute_total_aux_loss(),
    }
    drops = list(metrics.compute_drop_rates().values())
    return numbers | ({"moe/drop_rate": sum(drops) / len(drops)} if drops else {})
