"""AdamW as torch has it, in one launch over all parameters, with moments in fp32 or bf16.

State has torch's names and layout, so checkpoints of `torch.optim.AdamW` continue here and the
other way round, whichever dtype the moments have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from moecore.kernels.adamw import AdamWOptions, AdamWTensors, adamw_

MOMENT_DTYPES = (torch.float32, torch.bfloat16)
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
        ValueError: for another `moment_dtype`.

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
        if moment_dtype not in MOMENT_DTYPES:
            raise ValueError(
                f"moment_dtype ({moment_dtype}) must be torch.float32 or torch.bfloat16"
            )
        self.moment_dtype = moment_dtype
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moment_dtype": self.moment_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as loaded, perhaps from an optimizer that was not fused
            group["fused"], group["foreach"] = True, None
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes and returns the loss, with gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for `amsgrad` or `maximize` in a group, and for sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for name in ("amsgrad", "maximize"):
                if group[name]:
                    raise ValueError(
                        f"{name} ({group[name]}) must be False: use torch.optim.AdamW(fused=True)"
                    )
            options = AdamWOptions(
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            for device, tensors in self._tensors(group).items():
                self._update(device, tensors, options)
        return loss

    def _update(self, device: torch.device, tensors: AdamWTensors, options: AdamWOptions) -> None:
        signals: list[Tensor | None] = []
        for name in ("grad_scale", "found_inf"):
            signal = getattr(self, name, None)
            signals.append(None if signal is None else signal.to(device, non_blocking=True))
        grad_scale, found_inf = signals
        steps = list(tensors.steps)
        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, 1 - found_inf.view(()))
        adamw_(tensors, options, grad_scale=grad_scale, found_inf=found_inf)

    def _tensors(self, group: dict[str, Any]) -> dict[torch.device, AdamWTensors]:
        """Return this rank's parts of what has a gradient, by device; make state that lacks."""
        rows: dict[torch.device, list[tuple[Tensor, ...]]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise ValueError(
                    f"the gradient of a parameter {tuple(param.shape)} must not be sparse: use "
                    "torch.optim.SparseAdam for it"
                )
            state = self._state(param)
            parts = (param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            rows.setdefault(param.device, []).append(tuple(_local(part) for part in parts))
        return {
            device: AdamWTensors(*(list(column) for column in zip(*found, strict=True)))
            for device, found in rows.items()
        }

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, new or, if just loaded, as this optimizer keeps it."""
        state: dict[str, Tensor] = self.state[param]
        dtype = torch.float64 if param.dtype == torch.float64 else self.moment_dtype
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(param, dtype=dtype)
        elif state["exp_avg"].dtype != dtype or state["step"].device != param.device:
            state["step"] = state["step"].to(param.device, torch.float32)
            for name in MOMENTS:
                state[name] = state[name].to(dtype)
        return state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
