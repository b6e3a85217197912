"""AdamW as torch has it, in one launch over all parameters, with moments in fp32 or bf16.

State has torch's names and layout: checkpoints of `torch.optim.AdamW` continue here and the other
way round, each optimizer with moments in the dtype that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from moecore._fields import OneOf, check_value
from moecore.kernels.adamw import AdamWOptions, AdamWTensors, adamw_

MOMENT_DTYPE = Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16))]
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), which reads and writes less.

    It skips and scales a step on the device like torch's fused optimizers (GradScaler,
    `clip_grad_norm_(model, max_norm, optimizer=optimizer)`), but leaves gradients unscaled, which
    saves writing them. No host sync.

    Args:
        params: as in torch.
        lr: a tensor is read on its device.
        betas: as in torch.
        eps: as in torch.
        weight_decay: as in torch.
        moment_dtype: of both moments. torch.bfloat16 halves them, 4 bytes less per parameter; they
            are computed in fp32 and rounded at random, so that nothing is lost on average
            (`kernels/adamw.py`). fp64 parameters have fp64 moments.

    Raises:
        ValueError: for a value of another type or range.

    Source: https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_value("params", params, ParamsT)
        check_value("moment_dtype", moment_dtype, MOMENT_DTYPE)
        pair = tuple(betas) if isinstance(betas, list) else betas
        AdamWOptions(lr=lr, betas=pair, eps=eps, weight_decay=weight_decay)
        self.moment_dtype = moment_dtype
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moment_dtype": self.moment_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as loaded, perhaps from an optimizer that was not fused
            group["fused"], group["foreach"] = True, None
        self._step_supports_amp_scaling = True

    def moment_dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which the moments of a parameter are kept."""
        return torch.float64 if param.dtype == torch.float64 else self.moment_dtype

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what torch's or this `state_dict` gave; moments become `moment_dtype`.

        Args:
            state_dict: as in torch.
        """
        found: dict[str, Any] = {}  # what other hooks have made of it
        hook = self.register_load_state_dict_pre_hook(lambda _, given: found.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch has cast moments to the dtype of their parameter, in which small ones are lost.
        places = [place for group in found["param_groups"] for place in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for place, param in zip(places, params, strict=True):
            given = found["state"].get(place, {})
            for name in MOMENTS:
                if name in given:
                    # A copy: the given one may be another optimizer's.
                    dtype = self.moment_dtype_of(param)
                    self.state[param][name] = given[name].to(param.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes and returns the loss, with gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for `amsgrad` or `maximize` in a group, sparse or complex gradients, and in
                the capture of a CUDA graph.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "AdamW.step must not be captured, because it lists addresses on the host: capture "
                "forward and backward, and step outside"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            for name in ("amsgrad", "maximize"):
                if group[name]:
                    raise ValueError(
                        f"{name} ({group[name]}) must be False: use torch.optim.AdamW(fused=True)"
                    )
            lr, (beta1, beta2) = group["lr"], group["betas"]
            options = AdamWOptions(
                lr=lr.view(()) if isinstance(lr, Tensor) else lr,
                betas=(float(beta1), float(beta2)),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            for tensors in self._tensors(group, first):
                self._update(tensors, options)
            first += len(group["params"])
        return loss

    def _update(self, tensors: AdamWTensors, options: AdamWOptions) -> None:
        device = tensors.weights[0].device
        signals: list[Tensor | None] = []
        for name in ("grad_scale", "found_inf"):
            signal = getattr(self, name, None)
            signals.append(None if signal is None else signal.to(device))
        grad_scale, found_inf = signals
        steps = list(tensors.steps)
        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, (found_inf <= 0).float().view(()))
        adamw_(tensors, options, grad_scale=grad_scale, found_inf=found_inf)

    def _tensors(self, group: dict[str, Any], first: int) -> list[AdamWTensors]:
        """Return this rank's parts of what has a gradient; make state that lacks.

        Args:
            group: of parameters.
            first: number of its first parameter.

        Returns:
            One record for all that one launch can update.
        """
        rows: dict[Any, list[tuple[Any, ...]]] = {}
        for number, param in enumerate(group["params"], first):
            if param.grad is None:
                continue
            if param.grad.is_sparse or not param.is_floating_point():
                raise ValueError(
                    f"the gradient of a parameter {tuple(param.shape)} must be dense and real: use "
                    "an optimizer of torch for it"
                )
            grad, state = param.grad, self._state(param)
            if isinstance(param, DTensor) and grad.placements != param.placements:
                grad = grad.redistribute(placements=param.placements)  # may be partial sums
            moments = [state[name] for name in MOMENTS]
            row = tuple(_local(part) for part in (param, grad, *moments, state["step"]))
            # Others of one kind must not lose their launch to one that no kernel can update.
            kind = param.device, *((t.dtype, t.is_contiguous()) for t in row[:4])
            rows.setdefault(kind, []).append((*row, number))
        return [
            AdamWTensors(*(list(column) for column in zip(*found, strict=True)))
            for found in rows.values()
        ]

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, new or as this optimizer keeps it, whoever set it."""
        state: dict[str, Tensor] = self.state[param]
        dtype = self.moment_dtype_of(param)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(param, dtype=dtype)
        for name, kept in (("step", torch.float32), *((name, dtype) for name in MOMENTS)):
            value = state[name]
            if value.dtype != kept or value.device != param.device:
                state[name] = value.to(param.device, kept)
        return state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
