"""Gradient norm and clipping over parameters that live on different meshes.

Every element of every gradient is counted once, on whichever mesh it is sharded or replicated, so
the norm equals that of one process. One all-reduce of one number per parameter; one host sync, or
none with an optimizer that can skip a step by itself.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.fsdp.late_parameters import refuse_added
from moecore.fsdp.resident import call_before_backward, free_units

FORGETS = "_moecore_forgets_clipping"
TOLD = "_moecore_told"


class GradientNorm:
    """The gradient before clipping. The first look at `total` or `non_finite` is a host sync.

    Args:
        names: of the parameters.
        squares: fp64 [parameters] on the device, the squared norm of each over all ranks.

    Attributes:
        skipped: bool scalar on the device: the gradient is not finite, so the step is dropped.
    """

    def __init__(self, names: tuple[str, ...], squares: Tensor) -> None:
        self._names = names
        self._squares = squares
        self.skipped = ~squares.sum().isfinite()

    @cached_property
    def _values(self) -> list[float]:
        found: list[float] = self._squares.tolist()
        return found

    @property
    def total(self) -> float:
        """L2 norm over all parameters; nan or inf when the gradient is not finite."""
        return math.sqrt(sum(self._values))

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Names of the parameters with a nan or inf gradient on any rank."""
        named = zip(self._names, self._values, strict=True)
        return tuple(name for name, value in named if not math.isfinite(value))

    @property
    def finite(self) -> bool:
        """Whether the step's gradient can be used."""
        return not self.non_finite

    def __float__(self) -> float:
        return self.total


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> GradientNorm:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    A nan or inf anywhere drops the step on every rank: `optimizer.step()` then changes nothing
    anywhere, weights and state alike. Without `optimizer` all gradients are set to None, and a
    warning has the parameters' names; that needs a host sync. With a fused optimizer its next step
    scales the gradients while it reads them, or skips itself, and nothing waits: the names are in
    the returned norm.

    Args:
        model: parallelized or plain; the same on every rank.
        max_norm: > 0; `math.inf` only measures.
        optimizer: of the model, with fused=True, or several: `grad_scale` and `found_inf` are set
            for the next step, as GradScaler would. Until then gradients are as backward left them.
            A step that is left out is forgotten with its gradients: by `optimizer.zero_grad()`,
            and by the next backward of a parallelized model if `model.zero_grad()`, `drop_step` or
            a load has dropped them all.

    Returns:
        The norm before clipping, the same on every rank. Give its `skipped` to `finish_step`.

    Raises:
        ValueError: when `max_norm` is not positive, the optimizer can not skip a step or lacks a
            parameter that has a gradient, or one was added after `parallelize_moe`, so that nobody
            reduces its gradient.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm ({max_norm}) must be > 0: use math.inf to only measure")
    optimizers = [] if optimizer is None else _listed(optimizer)
    unfit = [type(o).__name__ for o in optimizers if not _can_skip(o)]
    if unfit:
        raise ValueError(
            f"optimizer ({unfit[0]}) must be one of torch's with fused=True to "
            "skip a step on the device: make it so, or leave it out"
        )
    refuse_added(model)
    free_units(model)  # of micro-batches without a backward
    # A parameter without a gradient counts 0: a rank that left it out would reduce another length.
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if optimizers:
        _check_holds(optimizers, params)
    _lay_out_as_parameters(params)
    squares = _squares([p for _, p in params])
    norm = GradientNorm(tuple(n for n, _ in params), squares)
    if optimizers:
        # A nan divides nothing: found_inf skips all of the step.
        divisor = ((squares.sum().sqrt() + 1e-6) / max_norm).clamp(min=1.0).float()
        told = {"found_inf": norm.skipped.float()}
        if max_norm < math.inf:
            told["grad_scale"] = divisor
        for one in optimizers:
            _tell(one, **told)
            _forget_in_time(one)
        refs = [weakref.ref(one) for one in optimizers]
        call_before_backward(model, partial(_forget_what_is_gone, refs))
    elif norm.non_finite:
        _drop_gradients(params, norm.non_finite)
    elif norm.total > max_norm:
        grads = [_local(p.grad) for _, p in params if p.grad is not None]
        torch._foreach_mul_([g for g in grads if g.numel()], max_norm / (norm.total + 1e-6))
    return norm


def _listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    found = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not found:
        raise ValueError("optimizer ([]) must be None or some of torch's: leave it out")
    return found


def _can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every step of it reads `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def _check_holds(
    optimizers: list[torch.optim.Optimizer], params: list[tuple[str, nn.Parameter]]
) -> None:
    """Raise for a gradient that another optimizer would use neither clipped nor skipped."""
    held = {p for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [n for n, p in params if p.grad is not None and p not in held]
    if missing:
        raise ValueError(
            f"optimizer ({type(optimizers[0]).__name__}) must hold {missing[0]} and all other "
            f"parameters with gradients ({len(missing)} are missing) to clip and skip them: leave "
            "it out, or make it of model.parameters() after parallelize_moe"
        )


def _lay_out_as_parameters(params: list[tuple[str, nn.Parameter]]) -> None:
    """Give gradients the placements of their parameters: autograd may leave partial sums."""
    for _, param in params:
        grad = param.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            continue
        if grad.placements != param.placements:
            param.grad = grad.redistribute(placements=param.placements)


def _tell(optimizer: Any, **told: Tensor) -> None:
    """Set what the next step of an optimizer reads."""
    _forget(optimizer)
    for name, value in told.items():
        setattr(optimizer, name, value)
    setattr(optimizer, TOLD, told)


def _forget(optimizer: Any) -> None:
    """Take back what it was told, unless a GradScaler has put its own there."""
    for name, value in getattr(optimizer, TOLD, {}).items():
        if getattr(optimizer, name, None) is value:
            delattr(optimizer, name)
    setattr(optimizer, TOLD, {})


def _forget_in_time(optimizer: Any) -> None:
    """From now on a step leaves nothing to the one after it, and neither does `zero_grad`."""
    if hasattr(optimizer, FORGETS):
        return
    hook = optimizer.register_step_post_hook(lambda done, *_: _forget(done))
    setattr(optimizer, FORGETS, hook)
    theirs = vars(optimizer).get("zero_grad")  # somebody else may stand there already
    optimizer.zero_grad = partial(_zero_grad, weakref.ref(optimizer), theirs)


def _zero_grad(
    optimizer: weakref.ref[Any], theirs: Callable[..., None] | None, *args: Any, **options: Any
) -> None:
    """Forget, then call what stood there; an optimizer in a cycle would keep its memory."""
    told: Any = optimizer()
    _forget(told)
    zero_grad: Callable[..., None] = theirs or partial(type(told).zero_grad, told)
    zero_grad(*args, **options)


def _forget_what_is_gone(optimizers: list[weakref.ref[Any]]) -> None:
    """Forget a step that was not taken, once no gradient that it was made for is left."""
    for told in (optimizer() for optimizer in optimizers):
        if told is None or not getattr(told, TOLD, None):
            continue
        if all(p.grad is None for group in told.param_groups for p in group["params"]):
            _forget(told)


def _squares(params: list[nn.Parameter]) -> Tensor:
    """Return fp64 [parameters]: the squared norm of each gradient over all ranks."""
    if not params:
        return torch.zeros(0, dtype=torch.float64)
    squares = torch.stack(_norms(params)).double().square_()
    if any(isinstance(p, DTensor) for p in params):
        # A nan must survive the division and the sum, and does.
        copies = torch.tensor([_num_copies(p) for p in params], dtype=torch.float64)
        squares /= copies.to(squares.device, non_blocking=True)
        dist.all_reduce(squares)
    return squares


def _norms(params: list[nn.Parameter]) -> list[Tensor]:
    """Return the L2 norm of this rank's part of each gradient, in at least fp32; 0 = none."""
    zero = torch.zeros((), dtype=torch.float32, device=_local(params[0]).device)
    norms = [zero] * len(params)
    of_dtype: dict[torch.dtype, list[int]] = {}
    for i, param in enumerate(params):
        if param.grad is not None and _local(param.grad).numel():
            of_dtype.setdefault(param.grad.dtype, []).append(i)
    for dtype, places in of_dtype.items():
        grads = [_local(params[i].grad) for i in places]  # type: ignore[arg-type]
        found = torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32))
        for i, value in zip(places, found, strict=True):
            norms[i] = value
    # fp64 gradients keep their precision; all others are fp32 here.
    return [n.double() for n in norms] if torch.float64 in of_dtype else norms


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_copies(param: Tensor) -> int:
    """Return how many ranks hold each element: the world over the ranks that share the tensor."""
    if not isinstance(param, DTensor):
        return dist.get_world_size()
    shards = 1
    for mesh_dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            shards *= param.device_mesh.size(mesh_dim)
    return dist.get_world_size() // shards


def _drop_gradients(params: list[tuple[str, nn.Parameter]], non_finite: tuple[str, ...]) -> None:
    shown = ", ".join(non_finite[:5]) + (" and more" if len(non_finite) > 5 else "")
    warnings.warn(f"step skipped: non-finite gradient in {shown}", stacklevel=3)
    for _, param in params:
        param.grad = None
