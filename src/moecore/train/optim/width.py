"""Transfer of learning rates and initial weights from a narrow model to a wider model (muP).

With m = inputs of a parameter / inputs in the base model, the factors of the parameter are:

    kind             sides that grow    AdamW's lr    std of the initial weights
    embedding        outputs            1             1
    vector           outputs            1             1
    hidden matrix    both               1 / m         1 / sqrt(m)
    head, router     inputs             1 / m         1 / m

Muon's factor makes the spectral norm of an update grow as sqrt(outputs / inputs).

Source: Tensor Programs V (arXiv:2203.03466), table 3. By its lemma J.1, table 3 equals tables 8
and 9 without multipliers in forward, so model classes do not change. Muon: arXiv:2310.17813.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from moecore.base.fields import check_arguments
from moecore.base.params import clean_name
from moecore.base.torch_private import get_local_tensor
from moecore.train.optim import matrices
from moecore.train.optim.matrices import Decision, MatrixLayout, assign_matrices, compute_lr_factor
from moecore.train.optim.muon import AdjustLR, Muon


class WidthRate(NamedTuple):
    """Factors of one parameter, relative to the base model: on initial weights and on lr."""

    std: float  # on the standard deviation of the initial weights
    lr: Mapping[str, float]  # by "adamw", or by Muon's `adjust_lr_fn`


@dataclass(frozen=True, slots=True)
class WidthRates:
    """The factors that `width_rates` computed, by parameter name."""

    rates: Mapping[str, WidthRate]

    @torch.no_grad()
    def scale_weights(self, model: nn.Module) -> None:
        """Multiply initial weights by their factors; ValueError for a weight without a factor."""
        rates = [(p, self._get_rate(clean_name(name), p)) for name, p in model.named_parameters()]
        for param, rate in rates:
            if rate is not None:
                get_local_tensor(param).mul_(rate.std)

    def regroup(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Split each param group of a new optimizer by the factor of its parameters, in place.

        A new group stores its factor as option `width_factor`. The group's lr is multiplied and its
        weight_decay divided by the factor, so a step decays weights equally at every width.
        torch's schedulers preserve the factor. A loop that sets lr must multiply lr by the factor.
        All ranks have the same groups, and the first group has factor 1. A group is empty if the
        pipeline stage has none of its parameters.

        Raises:
            ValueError: when the optimizer is neither AdamW nor Muon, has parameters that are not
                the model's, trains a parameter without a factor, or has been regrouped.
        """
        is_muon = isinstance(optimizer, Muon)
        if not (is_muon or isinstance(optimizer, torch.optim.AdamW)):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) must be AdamW or moecore's Muon, whose "
                "rates by width are known: use one of them"
            )
        if any("width_factor" in group for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) must be new, but its groups have a "
                "width_factor: call regroup once"
            )
        names = {param: clean_name(name) for name, param in model.named_parameters()}
        if not all(p in names for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("optimizer must hold parameters of model alone: pass that model")
        groups = []
        for group in optimizer.param_groups:
            adjust = (group["adjust_lr_fn"] or "original") if is_muon else "adamw"
            factors = {n: rate.lr[adjust] for n, rate in self.rates.items() if adjust in rate.lr}
            for param in group["params"]:
                if self._get_rate(names[param], param) and names[param] not in factors:
                    raise ValueError(
                        f"optimizer (Muon) must not step {names[param]} with rates by width, "
                        "because width_rates knows no matrix of it: leave it to AdamW"
                    )
            for factor in [1.0, *sorted({*factors.values()} - {1.0})]:
                params = [p for p in group["params"] if factors.get(names[p], 1.0) == factor]
                changes: dict[str, Any] = {"params": params, "width_factor": factor}
                changes["lr"] = group["lr"] * factor
                changes["weight_decay"] = group["weight_decay"] / factor
                groups.append({**group, **changes})
        optimizer.param_groups[:] = groups

    def _get_rate(self, param_name: str, param: Tensor) -> WidthRate | None:
        """Return the factors of a parameter; None if frozen, ValueError if trained but unknown."""
        if param_name not in self.rates and param.requires_grad:
            raise ValueError(
                f"model ({param_name}) must have the trained parameters that width_rates has seen: "
                "call it with the model as it is trained"
            )
        return self.rates.get(param_name)


def width_rates(model: nn.Module, base: nn.Module) -> WidthRates:
    """Return factors on learning rates and initial weights that were tuned on a narrower model.

    Args:
        model: the model to train, unsharded, before `parallelize_moe`; it may be on meta.
        base: the tuned model, of which only shapes are read: the same layers and head dim, at
            another width.

    Raises:
        ValueError: when trained parameters of the two models differ in name, the head is tied to
            an embedding, or the inputs of a parameter are unknown.
    """
    check_arguments(width_rates, locals())
    decisions, bases = (assign_matrices(module).decisions for module in (model, base))
    if decisions.keys() != bases.keys():
        odd = min(decisions.keys() ^ bases.keys())
        raise ValueError(f"base ({odd}) must have the parameters of model: change widths alone")
    if not any(decision.reason == matrices.HEAD for decision in decisions.values()):
        raise ValueError(
            f"model ({type(model).__name__}) must have a trained head that is not tied to an "
            "embedding, because the rates of both differ: untie it"
        )
    return WidthRates({n: _compute_rate(n, decisions[n], bases[n]) for n in decisions})


def _compute_rate(param_name: str, decision: Decision, base_decision: Decision) -> WidthRate:
    """Return a parameter's factors on lr and initial weights; `param_name` is for errors."""
    inputs, outputs = (
        a / b
        for a, b in zip(
            _count_inputs_and_outputs(param_name, decision),
            _count_inputs_and_outputs(param_name, base_decision),
            strict=True,
        )
    )
    lr = {"adamw": 1 / inputs}
    if decision.layout is not None and base_decision.layout is not None:
        for adjust in get_args(AdjustLR):
            ratio, base_ratio = (
                _compute_spectral_ratio(layout, adjust)
                for layout in (decision.layout, base_decision.layout)
            )
            lr[adjust] = round(ratio / base_ratio, 9)  # parameters with equal rates are one group
    return WidthRate(1 / inputs if outputs == 1 else inputs**-0.5, lr)


def _count_inputs_and_outputs(param_name: str, decision: Decision) -> tuple[int, int]:
    """Return (inputs, outputs) of a parameter, (1, size) of a vector; ValueError if unknown."""
    param, layout, reason = decision
    if layout is not None:
        sides = layout.columns, layout.rows
        return sides[::-1] if layout.transposed else sides
    if reason in (matrices.VECTOR, matrices.BIAS):
        return 1, param.numel()
    if param.ndim != 2:
        raise ValueError(f"model ({param_name}: {reason}) must have matrices with known inputs")
    outputs, inputs = param.shape
    return (outputs, inputs) if reason == matrices.EMBEDDING else (inputs, outputs)


def _compute_spectral_ratio(layout: MatrixLayout, adjust_lr_fn: str) -> float:
    shape = layout.shapes[0]
    outputs, inputs = reversed(shape) if layout.transposed else shape
    return float((outputs / inputs) ** 0.5 / compute_lr_factor(layout, shape, adjust_lr_fn))
