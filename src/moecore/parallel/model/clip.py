"""Gradient norm and clipping over parameters on different meshes.

Each gradient element counts once, whether it is sharded or replicated, so the norm equals the norm
of one process. The cost is one all-reduce of one number per parameter of all pipeline stages. The
host synchronises once, or never if the optimizers can skip a step (`found_inf`).
"""

import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import MaxNorm, check_arguments
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import annotate_range, foreach_mul_, foreach_norm, get_local_tensor
from moecore.parallel.model.parallel_state import end_argument_comparison, find_staged_module
from moecore.parallel.model.parameter_guards import check_no_added_parameter
from moecore.parallel.pipeline.stage_replicas import AllStages, redistribute_grad


class GradientNorm:
    """The gradient norm before clipping, which prints, formats and compares like a float.

    The first access to `total` or `non_finite` synchronises the host.

    Args:
        param_names: names of the parameters of all pipeline stages.
        squared_norms: fp64 [parameters] on the device: squared norm of each gradient over all
            ranks, without the loss scale.
        skip_threshold: scalar on the device: a step with a larger norm is skipped; None = no limit.

    Attributes:
        total_on_device: the L2 norm, an fp64 scalar.
        overflowed: bool scalar on the device: the gradient is not finite.
        skipped: bool scalar on the device: `overflowed`, or the norm exceeds `skip_threshold`. A
            skipped step changes no parameter.
    """

    def __init__(
        self,
        param_names: tuple[str, ...],
        squared_norms: Tensor,
        skip_threshold: Tensor | None = None,
    ) -> None:
        self._names, self._squares, self._limit = param_names, squared_norms, skip_threshold
        self.total_on_device = squared_norms.sum().sqrt()
        self.overflowed = ~self.total_on_device.isfinite()
        self.skipped = self.overflowed
        if skip_threshold is not None:
            self.skipped = self.overflowed | (self.total_on_device > skip_threshold)

    @cached_property
    def _host_squares(self) -> list[float]:
        """The squared norms on the host. The first access synchronises."""
        squares: list[float] = self._squares.tolist()
        return squares

    @property
    def is_read(self) -> bool:
        """Whether the values are on the host, so that `total` does not synchronise."""
        return "_host_squares" in vars(self)

    @property
    def total(self) -> float:
        """L2 norm over all parameters; nan or inf if a gradient is not finite."""
        return math.sqrt(sum(self._host_squares))

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Names of the parameters with a nan or inf gradient on any rank."""
        named = zip(self._names, self._host_squares, strict=True)
        return tuple(name for name, value in named if not math.isfinite(value))

    @property
    def is_skipped(self) -> bool:
        """Whether the step is skipped. The first access synchronises the host."""
        return bool(self.non_finite if self._limit is None else self.skipped)

    def compute_divisor(self, max_norm: float, idxs: Sequence[int] | None = None) -> Tensor:
        """Return the divisor that clips gradients, max(1, (norm + 1e-6) / max_norm), on device.

        The norm is of the parameters at the indices `idxs`; None = of all parameters.
        """
        norm = self.total_on_device
        if idxs is not None:
            idxs_n = torch.tensor(idxs, dtype=torch.int64, device="cpu")
            norm = self._squares[copy_to_device(idxs_n, self._squares.device)].sum().sqrt()
        return ((norm + 1e-6) / max_norm).clamp(min=1.0).float()

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite. Host sync at the first access."""
        return not self.non_finite

    def __float__(self) -> float:
        return self.total

    def __format__(self, spec: str) -> str:
        return format(self.total, spec)

    def __str__(self) -> str:
        return str(self.total)

    def __repr__(self) -> str:
        named = f", non_finite={self.non_finite}" if self.non_finite else ""
        return f"GradientNorm({self.total}{named})"

    # No `__eq__`, because it would remove the hash.
    def __lt__(self, other: SupportsFloat) -> bool:
        return self.total < float(other)

    def __le__(self, other: SupportsFloat) -> bool:
        return self.total <= float(other)

    def __gt__(self, other: SupportsFloat) -> bool:
        return self.total > float(other)

    def __ge__(self, other: SupportsFloat) -> bool:
        return self.total >= float(other)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: MaxNorm | None) -> GradientNorm:
    """Clip gradients in place to an L2 norm of at most `max_norm`; return the norm before clipping.

    If any gradient is nan or inf, all gradients become None on every rank, so that the optimizer
    changes nothing. A warning names the parameters. If ranks that share sequences received
    different tensors, gradients become None, too; the next forward raises an error. Host sync.

    Args:
        model: a parallelized or plain model, the same on every rank.
        max_norm: a positive number; None or `math.inf` = only measure.

    Raises:
        ValueError: if a trainable parameter was added after `parallelize_moe`: its gradient is not
            reduced.
    """
    check_arguments(clip_grad_norm_, locals())
    max_norm, is_wrong = math.inf if max_norm is None else max_norm, end_argument_comparison(model)
    return clip_and_step(model, max_norm, has_invalid_grads=is_wrong)


@torch.no_grad()
def clip_and_step(
    model: nn.Module,
    max_norm: float,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    groups: Sequence[Sequence[nn.Parameter]] | None = None,
    loss_scale: Tensor | None = None,
    has_invalid_grads: Tensor | None = None,
    skip_threshold: Tensor | None = None,
) -> GradientNorm:
    """Unscale and clip gradients, step the optimizers, and return the norm before clipping.

    The norm is of unscaled gradients, and nan if `has_invalid_grads` (a device bool) is True on any
    rank. Gradients with a norm above `skip_threshold` (a device scalar) become None. `loss_scale`
    is an fp32 device scalar; with a scale no warning is printed. With `groups` of parameters, each
    group is clipped by its own norm; the returned norm is of all parameters. No host sync if all
    optimizers are fused; without optimizers, gradients are changed in place.
    """
    signals: dict[str, Tensor] = {}
    with annotate_range("moecore::clip"):
        owner, stages = find_staged_module(model)
        params = _list_trained_params(owner)
        if optimizers:
            _check_optimizers(optimizers, params)
        else:
            check_no_added_parameter(model)
        norm = _compute_grad_norm(params, stages, loss_scale, has_invalid_grads, skip_threshold)
        max_norm = _clip_groups_(params, norm, max_norm, groups)
        if optimizers and all(map(_can_skip_on_device, optimizers)):
            signals["found_inf"] = norm.skipped.float()  # 1 = the optimizers skip the step
            divisors = [] if loss_scale is None else [loss_scale]
            if max_norm < math.inf:
                divisors.append(norm.compute_divisor(max_norm))
            if divisors:
                signals["grad_scale"] = torch.stack(divisors).prod()
        else:
            _scale_gradients(params, norm, max_norm, loss_scale)
    if not optimizers:
        return norm
    with annotate_range("moecore::optimizer"):
        for optimizer in optimizers:
            vars(optimizer).update(signals)  # as GradScaler does
            try:
                optimizer.step()
            finally:
                for name in signals:
                    delattr(optimizer, name)
    return norm


def _can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def _check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], params: list[tuple[str, nn.Parameter]]
) -> None:
    """Raise a ValueError if one of the (name, parameter) pairs has a gradient and no optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    optimizer_params = {p for group in groups for p in group["params"]}
    missing = [n for n, p in params if p.grad is not None and p not in optimizer_params]
    if missing:
        raise ValueError(
            f"optimizer ({type(optimizers[0]).__name__}) must hold {missing[0]} and all other "
            f"parameters with gradients ({len(missing)} are missing): make it of "
            "model.parameters() after parallelize_moe, or give all optimizers"
        )


def _list_trained_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    # A parameter that was frozen after backward still has a gradient, and optimizers update it.
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad or p.grad is not None]


def _compute_grad_norm(
    params: list[tuple[str, nn.Parameter]],
    all_stages: AllStages | None,
    loss_scale: Tensor | None,
    has_invalid_grads: Tensor | None,
    skip_threshold: Tensor | None,
) -> GradientNorm:
    """Return the norm of all gradients over all ranks, divided by the loss scale. Collective."""
    for _, param in params:
        redistribute_grad(param)
    names = [n for n, _ in params]
    squares = _sum_squares(names, [p for _, p in params], all_stages, has_invalid_grads)
    if loss_scale is not None:
        squares = squares / loss_scale.double().square()
    return GradientNorm(
        tuple(names if all_stages is None else all_stages.num_holders), squares, skip_threshold
    )


def _sum_squares(
    param_names: list[str],
    params: list[nn.Parameter],
    all_stages: AllStages | None,
    has_invalid_grads: Tensor | None,
) -> Tensor:
    """Sum squared norms over all ranks; fp64 [parameters of all stages], nan for invalid ones."""
    if all_stages is None and not params:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if params:
        squares = torch.stack(_compute_local_norms(params)).double().square_()
    else:  # a stage without trained parameters
        assert all_stages is not None
        squares = torch.zeros(0, dtype=torch.float64, device=all_stages.device)
    if all_stages is None and not any(isinstance(p, DTensor) for p in params):
        return squares
    world = dist.get_world_size()
    ranks = [world if all_stages is None else all_stages.count_copies(name) for name in param_names]
    # The division and the all-reduce keep a nan.
    copies = [n // _count_shards(p) for n, p in zip(ranks, params, strict=True)]
    divisors = torch.tensor(copies, dtype=torch.float64, device="cpu")
    squares /= copy_to_device(divisors, squares.device)
    if all_stages is not None:
        squares = all_stages.scatter_values(param_names, squares)
    if has_invalid_grads is not None:
        squares[:1] += torch.where(has_invalid_grads, torch.nan, 0.0).to(squares.device)
    dist.all_reduce(squares)
    return squares


def _compute_local_norms(params: list[nn.Parameter]) -> list[Tensor]:
    """Return the L2 norm of each local gradient shard, fp32 or fp64 scalars; 0 without `.grad`."""
    zero = torch.zeros((), dtype=torch.float32, device=get_local_tensor(params[0]).device)
    norms = [zero] * len(params)
    of_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for i, param in enumerate(params):
        grad = None if param.grad is None else get_local_tensor(param.grad)
        if grad is not None and grad.numel():
            of_dtype.setdefault(grad.dtype, {})[i] = grad
    for dtype, grads in of_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        local_norms = foreach_norm(list(grads.values()), 2, dtype=wide)
        for i, value in zip(grads, local_norms, strict=True):
            norms[i] = value
    # `torch.stack` needs one dtype: fp64 if any gradient is fp64.
    return [n.double() for n in norms] if torch.float64 in of_dtype else norms


def _count_shards(param: Tensor) -> int:
    shards = 1
    if isinstance(param, DTensor):
        for mesh_dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                shards *= param.device_mesh.size(mesh_dim)
    return shards


def _clip_groups_(
    params: list[tuple[str, nn.Parameter]],
    norm: GradientNorm,
    max_norm: float,
    groups: Sequence[Sequence[nn.Parameter]] | None,
) -> float:
    """Clip each group in place by its own norm, without a host sync; return the remaining limit."""
    if groups is None or max_norm == math.inf:
        return max_norm
    idx_of = {param: i for i, (_, param) in enumerate(params)}
    for group in groups:
        factor = 1 / norm.compute_divisor(max_norm, [idx_of[param] for param in group])
        grads = [get_local_tensor(param.grad) for param in group if param.grad is not None]
        for grad in grads:
            grad.mul_(factor.to(grad.device))
    return math.inf


def _scale_gradients(
    params: list[tuple[str, nn.Parameter]],
    norm: GradientNorm,
    max_norm: float,
    loss_scale: Tensor | None,
) -> None:
    """Clip and unscale all gradients in place, or set all to None if the step is skipped."""
    if norm.is_skipped:
        if norm.non_finite and loss_scale is None:
            names = ", ".join(norm.non_finite[:5]) + (" and more" * (len(norm.non_finite) > 5))
            warnings.warn(f"step skipped: non-finite gradient in {names}", stacklevel=3)
        for _, param in params:
            param.grad = None
        return
    factor = max_norm / (norm.total + 1e-6) if norm.total > max_norm else 1.0
    if loss_scale is not None:
        factor /= loss_scale.item()
    if factor != 1.0:
        grads = [get_local_tensor(p.grad) for _, p in params if p.grad is not None]
        foreach_mul_([g for g in grads if g.numel()], factor)
