"""AdamW: torch's AdamW in one launch over all parameters, with optional smaller state.

bytes per parameter                     weight, gradient    moments
fp32                                               4 + 4      4 + 4
moment_dtype=torch.bfloat16                        4 + 4      2 + 2
moment_dtype=torch.float8_e4m3fn                   4 + 4      1 + 1 + 1/64
bf16 weights, master_remainder=True            2 + 2 + 2      as above
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from moecore.base.fields import OneOf, check_value
from moecore.base.torch_private import foreach_add_, get_local_tensor, zeros_like
from moecore.kernels.adamw import AdamWOptions, AdamWTensors, ParamTensors, adamw_
from moecore.kernels.adamw_formats import MOMENT_BLOCK, decode_moments_ref, encode_moments_ref
from moecore.kernels.common import cdiv
from moecore.train.optim.gradients import get_grad, get_scale_signals, run_closure

FP8 = torch.float8_e4m3fn
MOMENT_DTYPE = Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16, FP8))]
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = (*MOMENTS, "step", "exponents", "remainder")  # as in `ParamTensors`
CHUNK = MOMENT_BLOCK << 17  # elements that are converted at a time


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) with fewer bytes read and written. No host sync.

    A step is skipped and gradients are scaled on the device as in torch's fused optimizers
    (GradScaler, `clip_grad_norm_(model, max_norm, optimizer=optimizer)`). Unlike in torch, scaled
    gradients are not written back to memory.

    Args:
        params: as in torch; may be empty, such as in a pipeline stage that trains nothing.
        betas, eps, weight_decay: as in torch.
        lr: as in torch; a tensor is read without a host sync.
        moment_dtype: the dtype of both moments. torch.bfloat16 saves 4 bytes per parameter: moments
            are computed in fp32 and rounded stochastically, without a bias. torch.float8_e4m3fn
            saves 6 bytes per parameter: a moment has one byte, and 128 moments share a scale
            (`kernels/adamw_formats.py`). fp64 parameters have fp64 moments.
        master_remainder: whether bf16 parameters have fp32 masters. A parameter and its int16 state
            "remainder" together are the 4 bytes of its master. Masters get the same bits as fp32
            parameters in moecore's kernel or its reference. (On a CPU, fp32 parameters use
            torch's fused step, which rounds differently.) A parameter is its master rounded to
            nearest, ties away from zero. Masters start equal to the parameters. Code that sets a
            parameter later does not change its remainder, which is at most half a bf16 ulp.

    Raises:
        ValueError: when a value has a wrong type or range, or with `master_remainder` no parameter
            is bf16.

    Source: https://arxiv.org/abs/1711.05101.
    """

    host_params: Set[Tensor] = frozenset()  # parameters that another class steps on the host

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moment_dtype: torch.dtype = torch.float32,
        master_remainder: bool = False,
    ) -> None:
        check_value("params", params, ParamsT)
        check_value("moment_dtype", moment_dtype, MOMENT_DTYPE)
        check_value("master_remainder", master_remainder, bool)
        pair = tuple(betas) if isinstance(betas, list) else betas
        AdamWOptions(lr=lr, betas=pair, eps=eps, weight_decay=weight_decay)
        self.moment_dtype, self.master_remainder = moment_dtype, master_remainder
        if not isinstance(params, Tensor):  # torch refuses a tensor, and an empty list
            entries: list[Any] = list(params)
            params = entries or [{"params": []}]
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        all_dtypes = [self._get_state_dtypes(param) for param in self._list_params()]
        has_remainder = any("remainder" in dtypes for dtypes in all_dtypes)
        if master_remainder and all_dtypes and not has_remainder:
            raise ValueError(
                "master_remainder (True) must have parameters in bf16: convert the model with "
                "model.to(torch.bfloat16), or leave it out"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self.get_class_options()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # loaded groups may be of an optimizer that was not fused
            group["fused"], group["foreach"] = True, None
        self._step_supports_amp_scaling = True

    def get_class_options(self) -> dict[str, Any]:
        """Return constructor options that are not in `param_groups`, {name: value}."""
        return {"moment_dtype": self.moment_dtype, "master_remainder": self.master_remainder}

    def get_moment_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's moments in a checkpoint: bf16 instead of FP8."""
        dtypes = self._get_state_dtypes(param)
        return torch.bfloat16 if "exponents" in dtypes else dtypes["exp_avg"]

    def get_state_device(self, param: Tensor) -> torch.device:
        """Return the device of a parameter's state."""
        return param.device

    @torch.no_grad()
    def get_stored_state(self, param: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state for a checkpoint; {} before the first step.

        Names are "exp_avg", "exp_avg_sq", "step", and with `master_remainder` "remainder". FP8
        moments are converted to new bf16 tensors without rounding. Other tensors are not copied.
        """
        # A block of FP8 is 128 neighbours of a rank's shard in memory, which no other layout has.
        # The same layout loads the bf16 moments to the bit; another rounds them to nearest in its
        # own blocks.
        state = dict(self.state[param])
        exponents = state.pop("exponents", None)
        if exponents is not None:
            state |= _decode_moments(param, [state[name] for name in MOMENTS], exponents)
        return state

    @torch.no_grad()
    def restore_state(self, param: Tensor, saved_state: dict[str, Tensor]) -> None:
        """Set a parameter's state from an AdamW state, converted to this optimizer's dtypes.

        Tensors of the right dtype and device are not copied. If "remainder" (the low 16 bits of the
        fp32 master of a bf16 weight) is missing, it becomes 0.
        """
        state, dtypes = dict(saved_state), self._get_state_dtypes(param)
        device = self.get_state_device(param)
        self.state[param] = state
        state["step"] = state["step"].to(device, torch.float32)
        if "exponents" in dtypes:
            state |= _encode_moments(param, [state[name] for name in MOMENTS])
        else:
            for name in MOMENTS:
                state[name] = state[name].to(device, dtypes[name])
        if "remainder" not in dtypes:
            state.pop("remainder", None)
        elif "remainder" not in state:
            state["remainder"] = zeros_like(param, torch.int16)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's AdamW, with FP8 moments converted to bf16."""
        result: dict[str, Any] = super().state_dict()
        params = self._list_params()
        result["state"] = {
            place: self.get_stored_state(params[place]) if "exponents" in state else state
            for place, state in result["state"].items()
        }
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's AdamW or this class; moments become `moment_dtype`."""
        final_dict: dict[str, Any] = {}  # the state dict after other hooks
        hook = self.register_load_state_dict_pre_hook(
            lambda _, loaded_state: final_dict.update(loaded_state)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch has cast moments to the dtype of their parameter, in which small ones are lost.
        places = [place for group in final_dict["param_groups"] for place in group["params"]]
        for place, param in zip(places, self._list_params(), strict=True):
            loaded_state = final_dict["state"].get(place, {})
            if all(name in loaded_state for name in MOMENTS):
                names = {*MOMENTS, "remainder"} & loaded_state.keys()
                values = {name: loaded_state[name] for name in names}
                self.restore_state(param, {**self.state[param], **values})
                for name, value in values.items():
                    if self.state[param].get(name) is value:  # another optimizer may own it
                        self.state[param][name] = value.clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return `closure()`, None without a closure.

        Raises:
            ValueError: when a group has `amsgrad`, `maximize` or an option of a wrong type or range
                (no parameter has changed then), a gradient is sparse or complex, or a CUDA graph is
                captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "AdamW.step must not be captured, because it lists addresses on the host: capture "
                "forward and backward, and step outside"
            )
        loss = run_closure(closure)
        all_options = [_read_options(group) for group in self.param_groups]
        for group, options in zip(self.param_groups, all_options, strict=True):
            for tensors in self._collect_tensors(group):
                grad_scale, found_inf = get_scale_signals(self, tensors.weights[0].device)
                steps = list(tensors.steps)
                if found_inf is None:
                    foreach_add_(steps, 1)
                else:  # a skipped step does not count
                    increment = (found_inf <= 0).float()
                    # The host would read a single tensor.
                    foreach_add_(steps, [increment] * len(steps))
                adamw_(tensors, options, grad_scale=grad_scale, found_inf=found_inf)
        return loss

    def _collect_tensors(self, param_group: dict[str, Any]) -> list[AdamWTensors]:
        """Return the tensors of each launch."""
        rows: dict[Any, list[tuple[Any, ...]]] = {}
        for param in param_group["params"]:
            if param.grad is None or (self.host_params and param in self.host_params):
                continue
            state = self.prepare_state(param)
            parts = (param, get_grad(param), *map(state.get, STATE))
            row = ParamTensors(*[t.to_local() if isinstance(t, DTensor) else t for t in parts])
            # One record per kind: parameters that no kernel can update stay out of the others'.
            kind: list[Any] = [param.device, row.remainder is None]
            for t in row[:4]:
                kind += (t.dtype, t.is_contiguous())
            # Not the parameter's index, which differs for the copies of a table on two stages.
            rounding_seed = param.numel()
            rows.setdefault(tuple(kind), []).append((row, rounding_seed))
        return [AdamWTensors.from_params(kind_rows) for kind_rows in rows.values()]

    def prepare_state(self, param: Tensor) -> dict[str, Tensor]:
        """Return `self.state[param]`: zeros if new, converted if dtypes or device have changed."""
        state: dict[str, Tensor] = self.state[param]
        dtypes, device = self._get_state_dtypes(param), self.get_state_device(param)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            shaped = [name for name in dtypes if name not in ("step", "exponents")]
            state |= {name: zeros_like(param, dtypes[name], device) for name in shaped}
            if "exponents" in dtypes:
                blocks = cdiv(get_local_tensor(param).numel(), MOMENT_BLOCK)
                state["exponents"] = torch.zeros(blocks, 2, dtype=torch.uint8, device=param.device)
        fits = ("exponents" in state) == ("exponents" in dtypes)
        for name, dtype in dtypes.items():
            t = state.get(name)
            fits &= t is not None and t.dtype == dtype and t.device == device
        if not fits:
            self.restore_state(param, self.get_stored_state(param))
        formatted: dict[str, Tensor] = self.state[param]
        return formatted

    def _list_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _get_state_dtypes(self, param: Tensor) -> Mapping[str, torch.dtype]:
        return find_state_dtypes(param.dtype, self.moment_dtype, self.master_remainder)


@cache
def find_state_dtypes(
    dtype: torch.dtype, moment_dtype: torch.dtype, master_remainder: bool
) -> Mapping[str, torch.dtype]:
    """Return state name -> dtype of a parameter's state; FP8 moments are stored as uint8 codes."""
    is_fp8 = moment_dtype == FP8 and dtype != torch.float64
    moments = torch.float64 if dtype == torch.float64 else moment_dtype
    dtypes = dict.fromkeys(MOMENTS, torch.uint8 if is_fp8 else moments)  # torch pickles no FP8
    dtypes["step"] = torch.float32
    if is_fp8:
        dtypes["exponents"] = torch.uint8
    if master_remainder and dtype == torch.bfloat16:
        dtypes["remainder"] = torch.int16
    return dtypes


def _read_options(param_group: dict[str, Any]) -> AdamWOptions:
    for name in ("amsgrad", "maximize"):
        if param_group[name]:
            raise ValueError(
                f"{name} ({param_group[name]}) must be False: use torch.optim.AdamW(fused=True)"
            )
    lr, (beta1, beta2) = param_group["lr"], param_group["betas"]
    return AdamWOptions(
        lr=lr.view(()) if isinstance(lr, Tensor) else lr,
        betas=(float(beta1), float(beta2)),
        eps=param_group["eps"],
        weight_decay=param_group["weight_decay"],
    )


def _encode_moments(param: Tensor, moments: Sequence[Tensor]) -> dict[str, Tensor]:
    """Quantise both moments to FP8, to nearest; return state name -> uint8 codes or exponents."""
    m, v = (get_local_tensor(moment).to(param.device).reshape(-1) for moment in moments)
    codes = [torch.empty(m.numel(), dtype=torch.uint8, device=param.device) for _ in MOMENTS]
    exponents = [codes[0].new_empty(0, 2)]
    for start in range(0, m.numel(), CHUNK):
        idx = slice(start, start + CHUNK)
        codes[0][idx], codes[1][idx], scales = encode_moments_ref(m[idx].float(), v[idx].float())
        exponents.append(scales)
    state = {name: _reshape_like(param, code) for name, code in zip(MOMENTS, codes, strict=True)}
    return {**state, "exponents": torch.cat(exponents)}


def _decode_moments(
    param: Tensor, moments: Sequence[Tensor], exponents: Tensor
) -> dict[str, Tensor]:
    """Dequantise both moments from uint8 codes and exponents; return state name -> bf16 moment."""
    m, v = (get_local_tensor(moment).reshape(-1) for moment in moments)
    flat = [torch.empty(m.numel(), dtype=torch.bfloat16, device=m.device) for _ in MOMENTS]
    for start in range(0, m.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        blocks = exponents[start // MOMENT_BLOCK : (start + CHUNK) // MOMENT_BLOCK]
        flat[0][part], flat[1][part] = decode_moments_ref(m[part], v[part], blocks)
    return {name: _reshape_like(param, x) for name, x in zip(MOMENTS, flat, strict=True)}


def _reshape_like(param: Tensor, flat_shard: Tensor) -> Tensor:
    """Return a tensor (or DTensor) like `param` whose local shard has the flat shard's values."""
    result = torch.empty_like(param, dtype=flat_shard.dtype, device=flat_shard.device)
    get_local_tensor(result).copy_(flat_shard.view_as(get_local_tensor(result)))
    return result
