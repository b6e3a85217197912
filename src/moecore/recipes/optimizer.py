"""`OptimizerConfig`: the optimizers of a run and their options by parameter."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

import torch
from torch import nn

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    FieldErrors,
    Positive,
    PositiveOrZero,
    quote,
)
from moecore.base.options.names import MomentDtype
from moecore.recipes.schedule import Share
from moecore.train import AdamW, Muon, StateOffload, assign_matrices
from moecore.train.optim.matrices import BIAS, EMBEDDING, ROUTER, VECTOR
from moecore.train.optim.width import WidthRates

Decay = Annotated[float, Bound(">=", 0), Bound("<", 1)]
NOT_DECAYED = (VECTOR, BIAS, EMBEDDING)  # kinds of parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamGroup(CheckedRecord):
    """Options for the parameters whose names match a pattern."""

    pattern: str  # of parameter names, as `fnmatch` reads it, such as "*.router.*"
    lr_factor: PositiveOrZero = 1.0  # on `OptimizerConfig.lr`
    weight_decay: PositiveOrZero | None = None  # None = `OptimizerConfig.weight_decay`

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse "PATTERN,NAME=NUMBER,...", such as "*.router.*,lr_factor=0.1,weight_decay=0"."""
        pattern, *pairs = text.split(",")
        try:
            values = {name: float(value) for name, value in (pair.split("=") for pair in pairs)}
            return cls(pattern=pattern, **values)
        except (TypeError, ValueError):
            raise ValueError(
                f"param_groups ({quote(text)}) must be PATTERN,lr_factor=NUMBER,weight_decay=NUMBER"
                ": correct it"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(CheckedRecord):
    """The optimizers of a run.

    Attributes:
        optimizer: "adamw", or "muon" for matrices, with AdamW for all other parameters.
        lr: the peak of the learning rate.
        router_lr_factor: learning rate of routers over `lr`, if no `param_groups` pattern matches.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        eps: AdamW's eps, added to the denominator.
        weight_decay: decoupled weight decay.
        decay_all: whether norms, biases and embeddings decay too.
        param_groups: rules by name, the first match counts: "PATTERN,lr_factor=0.1,weight_decay=0".
        max_norm: the gradient's global norm is clipped to this value; inf = no clipping.
        momentum: Muon's decay of the momentum.
        muon_beta2: NorMuon's decay of the second moment per output; None = plain Muon.
        moment_dtype: the dtype of AdamW's moments.
        master_remainder: bf16 parameters; AdamW's state has the other 16 bits of fp32 masters.
        state_offload: the share of AdamW's state that is in host memory between steps.
        base_width: the model dim at which `lr` was tuned, see `width_rates`; None = this model's.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 3e-4
    router_lr_factor: PositiveOrZero = 1.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.1
    decay_all: bool = False
    param_groups: tuple[str, ...] = ()
    max_norm: Positive = 1.0
    momentum: Decay = 0.95
    muon_beta2: Decay | None = None
    moment_dtype: MomentDtype = "float32"
    master_remainder: bool = False
    state_offload: Share = 0.0
    base_width: Count | None = None

    def _find_field_errors(self) -> FieldErrors:
        if self.optimizer == "muon" and self.master_remainder:
            rule = "be False with optimizer 'muon', which needs fp32 weights: drop it"
            yield "master_remainder", rule
        if self.muon_beta2 is not None and self.optimizer != "muon":
            yield "muon_beta2", "be None without optimizer 'muon': drop it"
        for text in self.param_groups:
            ParamGroup.from_text(text)

    def check_adapters(self) -> None:
        """Raise ValueError if the optimizer does not update LoRA matrices."""
        if self.optimizer == "muon":
            raise ValueError(
                "--optimizer (muon) must be adamw with --lora-rank, because Muon does not update "
                "LoRA matrices: drop it"
            )

    def build_optimizers(
        self, model: nn.Module, width_rates: WidthRates | None = None
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers for all trained parameters; param groups are equal on all ranks."""
        assignment = assign_matrices(model)
        is_muon = self.optimizer == "muon"
        trained = [decision.param for decision in assignment.decisions.values()]
        adamw = AdamW(
            assignment.adamw_params if is_muon else trained,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            moment_dtype=getattr(torch, self.moment_dtype),
            master_remainder=self.master_remainder,
        )
        optimizers: list[torch.optim.Optimizer] = [adamw]
        if is_muon:
            muon = Muon(
                assignment,
                lr=self.lr,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                beta2=self.muon_beta2,
            )
            optimizers.insert(0, muon)
        kinds = {d.param: (name, d.reason) for name, d in assignment.decisions.items()}
        for optimizer in optimizers:
            self._split_param_groups(optimizer, kinds)
            if width_rates is not None:
                width_rates.regroup(optimizer, model)
        if self.state_offload:
            StateOffload(adamw, model, fraction=self.state_offload)
        return optimizers

    def _split_param_groups(
        self, optimizer: torch.optim.Optimizer, names_and_kinds: dict[nn.Parameter, tuple[str, str]]
    ) -> None:
        """Split the single param group of an optimizer in place, by the rules of `param_groups`."""
        rules = [ParamGroup.from_text(text) for text in self.param_groups]
        rules += [ParamGroup(pattern="*"), ParamGroup(pattern="*", lr_factor=self.router_lr_factor)]
        (group,) = optimizer.param_groups
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for number, rule in enumerate(rules):
            for decays in (True, False):
                decay = self.weight_decay if decays else 0.0
                groups[number, decays] = group | {
                    "params": [],
                    "lr_factor": rule.lr_factor,
                    "weight_decay": decay if rule.weight_decay is None else rule.weight_decay,
                }
        for param in group["params"]:
            name, kind = names_and_kinds[param]
            number = next(n for n, rule in enumerate(rules) if fnmatchcase(name, rule.pattern))
            if kind == ROUTER and number == len(self.param_groups):
                number += 1
            decays = self.decay_all or kind not in NOT_DECAYED
            groups[number, decays]["params"].append(param)
        optimizer.param_groups = list(groups.values())
