"""Muon: the momentum of each matrix is orthogonalised, on one rank per matrix.

Legend: b matrices of a parameter on this rank, R rows, C columns.

    gradient / scale -> momentum -> Nesterov -> [pieces to owners] -> Newton-Schulz
                                             -> [pieces back] -> weight

Memory traffic per step: weight and momentum are read and written, the gradient is read. A sharded
matrix sends and returns its pieces, each way with 2 bytes per element in bf16.

With `beta2` owners also divide each output by its root mean square (`output_means.py`).

Source: https://kellerjordan.github.io/posts/muon; scale and weight decay, arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    OneOf,
    Positive,
    PositiveOrZero,
    check_arguments,
)
from moecore.base.params import chunk_by_size
from moecore.base.torch_private import get_local_tensor, zeros_like
from moecore.kernels.momentum import momentum_
from moecore.train.optim.exchange import ExchangeRound, MatrixBlock, MatrixPlan, make_matrix_plan
from moecore.train.optim.gradients import get_grad, get_scale_signals, run_closure
from moecore.train.optim.matrices import MatrixAssignment, MatrixLayout, compute_lr_factor
from moecore.train.optim.output_means import divide_by_means_, make_output_means

Momentum = Annotated[float, Bound(">=", 0), Bound("<", 1)]
NSDtype = Annotated[torch.dtype, OneOf((torch.bfloat16, torch.float32))]
AdjustLR = Literal["match_rms_adamw", "original"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz
MEANS = "second_momentum_buffer"
BATCH_NUMEL = 1 << 26  # elements of the matrices that are multiplied at once
CHUNK_NUMEL = 1 << 26  # elements that are stepped at once, of matrices that are whole on a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonOptions(CheckedRecord):
    """Muon's hyperparameters of one param group, with the fields of `Muon`'s arguments."""

    lr: PositiveOrZero | Tensor
    weight_decay: PositiveOrZero
    momentum: Momentum
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: Positive
    ns_steps: Count
    adjust_lr_fn: AdjustLR
    beta2: Momentum | None = None

    @classmethod
    def from_group(cls, param_group: dict[str, Any]) -> Self:
        """Return the current options of a param group; ValueError if one is out of range."""
        options = {f.name: param_group[f.name] for f in fields(cls) if f.name in param_group}
        options["ns_coefficients"] = tuple(options["ns_coefficients"])
        options["adjust_lr_fn"] = options["adjust_lr_fn"] or "original"  # torch's None
        return cls(**options)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of an assignment; AdamW steps `assignment.adamw_params`. No host sync.

    Momentum, Nesterov, options and state names equal `torch.optim.Muon`. The state is
    `momentum_buffer`, sharded like its parameter, in fp32 or fp64. A step is skipped and gradients
    are scaled on the device as in `moecore.train.AdamW`. Every rank steps the same parameters.

    Args:
        assignment: the result of `assign_matrices`, after `parallelize_moe`.
        lr: the learning rate; a tensor is read without a host sync.
        weight_decay: decoupled weight decay: a step subtracts lr * weight_decay of each weight.
        momentum: the decay of the gradient's running mean, in [0, 1).
        nesterov: whether the mean of gradient and momentum is orthogonalised instead of momentum.
        ns_coefficients, ns_steps: a, b and c of `orthogonalize`, and the number of iterations.
        eps: minimum norm by which a matrix is divided before the iterations.
        adjust_lr_fn: the factor on lr per matrix. "match_rms_adamw" is 0.2 * sqrt(longer side), for
            lr and weight decay of AdamW; "original" is sqrt(outputs / inputs), at least 1.
        ns_dtype: the dtype in which matrices are sent and multiplied. fp32 is for tests.
        beta2: NorMuon's decay of the running mean square of each output, in [0, 1). Each output of
            an orthogonalised update is divided by the root of its mean square, and the update is
            rescaled to its previous norm. The means are `second_momentum_buffer`, one number per
            output. None = off.

    Raises:
        ValueError: when a value has a wrong type or range, when the assignment has no matrices, or
            when it has a `MatrixCut` of inputs with `beta2`.
    """

    def __init__(
        self,
        assignment: MatrixAssignment,
        lr: PositiveOrZero | Tensor = 1e-3,
        *,
        weight_decay: PositiveOrZero = 0.1,
        momentum: Momentum = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: Positive = 1e-7,
        ns_steps: Count = 5,
        adjust_lr_fn: AdjustLR = "match_rms_adamw",
        ns_dtype: NSDtype = torch.bfloat16,
        beta2: Momentum | None = None,
    ) -> None:
        check_arguments(Muon.__init__, locals())
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr {tuple(lr.shape)} must be one number: pass a tensor of one")
        if not 0 <= float(lr) < math.inf:
            raise ValueError(f"lr ({float(lr)}) must be a finite number >= 0: pass another tensor")
        self.layouts = assignment.matrices
        if not self.layouts and not assignment.is_stage:
            raise ValueError(
                f"assignment ({len(assignment.decisions)} parameters) must have a matrix for Muon, "
                "such as a trained linear weight: use AdamW for all parameters"
            )
        self.ns_dtype = ns_dtype
        self._drop_plans()
        options: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        options |= dict(nesterov=nesterov, ns_coefficients=ns_coefficients, eps=eps)
        options |= dict(ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, fused=True)
        if beta2 is not None:  # else options are torch's, and so are those of checkpoints
            options["beta2"] = beta2
        super().__init__([{"params": list(self.layouts)}], options)
        self._step_supports_amp_scaling = True

    def _drop_plans(self) -> None:
        """Drop cached plans and process groups; the next step recreates them."""
        self._plans: dict[tuple[int, ...], MatrixPlan] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layouts": self.layouts, "ns_dtype": self.ns_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"] = True
            if "beta2" in self.defaults:  # a state dict of torch's Muon has none
                group.setdefault("beta2", self.defaults["beta2"])
        self._drop_plans()
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as in torch; raise ValueError for parameters without matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                if param not in self.layouts:
                    raise ValueError(
                        f"param_group ({tuple(param.shape)}) must hold matrices of the assignment: "
                        "give what it leaves out to AdamW"
                    )
                if "beta2" in group:
                    self.layouts[param].make_output_layout()
        except ValueError:
            self.param_groups.pop()
            raise

    def get_class_options(self) -> dict[str, Any]:
        """Return constructor options that are not in `param_groups`, {name: value}."""
        return {"ns_dtype": self.ns_dtype, "layouts": list(self.layouts.values())}

    def get_moment_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's momentum: fp32, or fp64 for fp64 parameters."""
        return torch.promote_types(param.dtype, torch.float32)

    def get_state_template(self, param: nn.Parameter, state_name: str) -> Tensor:
        """Return a tensor with the shape and placements of a state; its values are arbitrary."""
        if state_name == MEANS:
            return make_output_means(param, self.layouts[param], self.get_moment_dtype(param))
        return param

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.Muon`."""
        super().load_state_dict(state_dict)
        # torch has cast momentum to the dtype of its parameter, in which small changes are lost.
        params = [param for group in self.param_groups for param in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        for param, place in zip(params, places, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                dtype = self.get_moment_dtype(param)
                self.state[param][name] = value.to(param.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update parameters that have gradients; return `closure()`. Collective if sharded.

        Raises ValueError before any update if a group's option has a wrong type or range.
        """
        loss = run_closure(closure)
        group_options = [MuonOptions.from_group(group) for group in self.param_groups]
        for group, options in zip(self.param_groups, group_options, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            step = _MuonStep(self, options, params)
            has_means = options.beta2 is not None
            key = (has_means, *map(id, params))
            if key not in self._plans:
                means = [self.state[param][MEANS] for param in params] if has_means else None
                self._plans[key] = make_matrix_plan(
                    params, step.layouts, self._get_process_group, means
                )
            step.run(self._plans[key])
        return loss

    def _get_process_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of global ranks, created once. Collective over these ranks."""
        if len(ranks) == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None, "a DTensor of several ranks has a process group"
            return world
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]


class _MatrixViews(NamedTuple):
    """This rank's shard of a parameter, its gradient and its state, as stacked matrices."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    means: Tensor | None = None  # [b, R, 1], or [b, 1, C] of transposed matrices


class _MuonStep:
    """One `Muon.step` of the parameters of one param group, with their state and options."""

    def __init__(self, optimizer: Muon, options: MuonOptions, params: list[nn.Parameter]) -> None:
        self.options, self.dtype = options, optimizer.ns_dtype
        self.layouts = [optimizer.layouts[param] for param in params]
        slots = ["momentum_buffer"] + [MEANS] * (options.beta2 is not None)
        self.views = []
        for param, layout in zip(params, self.layouts, strict=True):
            tensors = [
                get_local_tensor(param.detach()),
                get_local_tensor(get_grad(param)).contiguous(),
                *(get_local_tensor(_prepare_state(optimizer, param, slot)) for slot in slots),
            ]
            self.views.append(_MatrixViews(*map(layout.view_as_matrices, tensors)))
        device = self.views[0].weight.device
        self.grad_scale, self.found_inf = get_scale_signals(optimizer, device)
        lr, full = options.lr, partial(torch.full, (), dtype=torch.float32, device=device)
        self.lr = (lr.to(device).view(()) if isinstance(lr, Tensor) else full(lr)).float()
        if self.found_inf is not None:
            self.lr = self.lr.masked_fill(self.found_inf > 0, 0.0)
        self.decay = 1 - self.lr * options.weight_decay
        self.ns_options: dict[str, Any] = {"steps": options.ns_steps, "eps": options.eps}
        self.ns_options["coefficients"] = options.ns_coefficients

    def run(self, plan: MatrixPlan) -> None:
        """Update weights and state of the plan's parameters. Collective if matrices are sharded."""
        for chunk in self._split_local_matrices(plan):
            self._step_local_matrices(chunk, plan.outputs)
        means_rounds = plan.outputs.rounds if plan.outputs else [(None, None)] * len(plan.rounds)
        rounds = zip(plan.rounds, means_rounds, strict=True)
        for (process_group, matrix_round), (_, means_round) in rounds:
            self._step_round(matrix_round, means_round, process_group)

    def _split_local_matrices(
        self, plan: MatrixPlan
    ) -> Iterator[list[tuple[int, slice, list[MatrixBlock]]]]:
        """Yield chunks of unsharded matrices: lists of (parameter index, batch slice, blocks)."""
        pieces: list[tuple[int, slice, list[MatrixBlock]]] = []
        for place, blocks in plan.local_blocks.items():
            batch, rows, columns = self.views[place].weight.shape
            size = max(1, CHUNK_NUMEL // max(1, rows * columns))
            pieces += [(place, slice(i, i + size), blocks) for i in range(0, batch, size)]
        return chunk_by_size(
            pieces, lambda piece: self.views[piece[0]].weight[piece[1]].numel(), CHUNK_NUMEL
        )

    def _step_local_matrices(
        self, chunk: list[tuple[int, slice, list[MatrixBlock]]], means_plan: MatrixPlan | None
    ) -> None:
        """Update a chunk of unsharded matrices; `means_plan` plans NorMuon's means (None = off)."""
        targets, matrices = [], []
        for place, batch, blocks in chunk:
            weight, grad, momentum, means = self.views[place]
            update = self._update_momentum(grad[batch], momentum[batch])
            means_blocks = means_plan.local_blocks[place] if means_plan else blocks
            for block_pair in zip(blocks, means_blocks, strict=True):
                weight_block, means_block = (
                    block._replace(place=0, batch=slice(None)) for block in block_pair
                )
                matrices.append(weight_block.read_from([update]))
                means_of_batch = None if means is None else means[batch]
                targets.append((place, weight_block, weight[batch], means_block, means_of_batch))
        orthogonal = orthogonalize_all(matrices, **self.ns_options)
        pairs = zip(targets, orthogonal, strict=True)
        for (place, weight_block, weight, means_block, all_means), values in pairs:
            if all_means is not None:
                means = means_block.read_from([all_means])
                self._divide_by_means(values, means)
                means_block.write_to([all_means], means)
            self._apply_update(weight, weight_block, values, self.layouts[place])

    def _step_round(
        self,
        matrix_round: ExchangeRound,
        means_round: ExchangeRound | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Update sharded matrices: owner ranks receive, orthogonalise and return the updates.

        Owners also receive, change and return NorMuon's mean squares (`means_round`; None = off).
        """
        views = self.views
        updates: list[Any] = [None] * len(views)
        for place in matrix_round.params:
            updates[place] = self._update_momentum(views[place].grad, views[place].momentum)
        like = updates[matrix_round.params[0]]
        owned = matrix_round.send_to_owners(updates, group)
        del updates
        orthogonal = orthogonalize_all(owned, **self.ns_options)
        if means_round is not None:
            means: list[Any] = [view.means for view in views]
            owned_means = means_round.send_to_owners(means, group)
            for values, matrix_means in zip(orthogonal, owned_means, strict=True):
                self._divide_by_means(values, matrix_means)
            like_means = means[means_round.params[0]]
            for block, values in means_round.return_from_owners(owned_means, like_means, group):
                block.write_to(means, values)
        for block, values in matrix_round.return_from_owners(orthogonal, like, group):
            self._apply_update(views[block.place].weight, block, values, self.layouts[block.place])

    def _divide_by_means(self, updates: Tensor, means: Tensor) -> None:
        """Update `means` with the squared `updates`; divide `updates` by the roots of `means`."""
        beta2 = self.options.beta2
        assert beta2 is not None, "there are means"
        divide_by_means_(updates, means, beta2=beta2, found_inf=self.found_inf)

    def _update_momentum(self, grad: Tensor, momentum: Tensor) -> Tensor:
        """Update `momentum` in place with `grad`; return the update to orthogonalise, a copy."""
        return momentum_(
            grad,
            momentum,
            self.dtype,
            decay=self.options.momentum,
            nesterov=self.options.nesterov,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )

    def _apply_update(
        self, weight: Tensor, block: MatrixBlock, update: Tensor, layout: MatrixLayout
    ) -> None:
        """Apply weight decay to a block of `weight` in place, and subtract its lr * `update`."""
        factor = compute_lr_factor(layout, layout.shapes[block.part], self.options.adjust_lr_fn)
        local_block = block._replace(place=0)
        old = local_block.read_from([weight])
        wide = torch.promote_types(weight.dtype, torch.float32)
        step = (self.lr * factor).to(wide)
        if old.dtype == wide and local_block.is_view:
            old.mul_(self.decay).addcmul_(update, step, value=-1)
        else:
            new = (old.to(wide) * self.decay).addcmul_(update, step, value=-1)
            local_block.write_to([weight], new)


def _prepare_state(optimizer: Muon, param: nn.Parameter, state_name: str) -> Tensor:
    """Return state `state_name` of `param` in `get_moment_dtype`; zeros before the first step."""
    state: dict[str, Tensor] = optimizer.state[param]
    dtype = optimizer.get_moment_dtype(param)
    value = state.get(state_name)
    if value is None:
        value = zeros_like(optimizer.get_state_template(param, state_name), dtype)
    state[state_name] = value.to(param.device, dtype)
    return state[state_name]


def orthogonalize(
    x_nRC: Tensor,
    *,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> Tensor:
    """Return x with all singular values replaced by about 1 (Newton-Schulz iteration).

    `coefficients` are a, b and c. A matrix is first divided by its norm, at least `eps`.
    """
    # A step X <- a X + (b A + c A A) X with A = X X^T, sides m <= l, takes 2 m^2 (2 l + m) flops.
    # The usual coefficients give the steepest start: singular values end between 0.7 and 1.2.
    a, b, c = coefficients
    is_tall = x_nRC.shape[1] > x_nRC.shape[2]
    x = x_nRC.mT if is_tall else x_nRC
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    x = x / norm.clamp(min=eps).to(x.dtype)  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalize_all(matrices: Sequence[Tensor], **options: object) -> list[Tensor]:
    """Return each tensor [n, rows, columns] with its matrices orthogonalised (`orthogonalize`)."""
    of_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(matrices):
        of_shape.setdefault(x.shape[1:], []).append(i)
    results: list[Tensor] = list(matrices)
    for shape, places in of_shape.items():
        batch = matrices[places[0]]
        if len(places) > 1:
            batch = torch.cat([matrices[i] for i in places])
        max_matrices = max(1, BATCH_NUMEL // shape.numel())
        parts = [orthogonalize(part, **options) for part in batch.split(max_matrices)]  # type: ignore[arg-type]
        orthogonal = parts[0] if len(parts) == 1 else torch.cat(parts)
        sizes = [matrices[i].shape[0] for i in places]
        for i, part in zip(places, orthogonal.split(sizes), strict=True):
            results[i] = part
    return results
