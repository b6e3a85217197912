"""AdamW of many tensors in one launch: moments in fp32, bf16 or FP8; fp32, bf16 or split weights.

Letter: P tensors. All weights have one dtype, all gradients one, and all moments one.

Bytes moved per element of fp32 weights and gradients: 28 with fp32 moments, 20 with bf16 moments,
16 with FP8 moments. bf16 weights with remainders and bf16 gradients take 2 less. Gradients are
divided by `grad_scale` while they are read. `adamw_formats.py` defines the formats of moments.

Source: https://arxiv.org/abs/1711.05101 (decoupled weight decay).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moecore.base.fields import Bound, CheckedRecord, PositiveOrZero
from moecore.base.streams import copy_to_device
from moecore.base.torch_private import fused_adamw_
from moecore.kernels.adamw_formats import (
    GOLDEN,
    MOMENT_BLOCK,
    decode_moments,
    decode_moments_ref,
    encode_moments,
    encode_moments_ref,
    join_master,
    join_master_ref,
    make_random_bits,
    make_random_bits_ref,
    round_stochastically,
    round_stochastically_ref,
    split_master,
    split_master_ref,
)
from moecore.kernels.common import can_use_kernel, cdiv, launch, warn_on_fallback
from moecore.kernels.triton_api import INTERPRET, tl, triton

BLOCK = 1024  # elements at a time
FP8_BLOCK = 512  # of FP8 moments: as many as registers allow without fewer programs at a time
NUM_BLOCKS = 1 if INTERPRET else 8  # of one program, one after the other
NUM_WARPS = 4
COLUMNS = 10  # of the table
_COLUMNS, _GOLDEN = tl.constexpr(COLUMNS), tl.constexpr(GOLDEN)
_MOMENT_BLOCK = tl.constexpr(MOMENT_BLOCK)
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Decay = Annotated[float, Bound(">=", 0), Bound("<", 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWOptions(CheckedRecord):
    """Hyperparameters of one AdamW update."""

    lr: PositiveOrZero | Tensor  # learning rate; a tensor of one element is read on its device
    betas: tuple[Decay, Decay]  # decay of the first and the second moment
    eps: PositiveOrZero  # added to the root of the second moment
    weight_decay: PositiveOrZero  # times lr, the fraction that is subtracted from each weight


class ParamTensors(NamedTuple):
    """One parameter's tensors in an AdamW update: an entry of each list of `AdamWTensors`."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    exponents: Tensor | None
    remainder: Tensor | None


@dataclass(frozen=True, slots=True)
class AdamWTensors:
    """The tensors of an AdamW update of several parameters; a list has an entry per parameter."""

    weights: Sequence[Tensor]  # changed in place
    grads: Sequence[Tensor]  # of the same shapes, read
    # first moments of the same shapes, changed in place; uint8 if there are exponents
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]  # second moments, as `exp_avgs`
    steps: Sequence[Tensor]  # fp32 scalars: how many updates there have been, this one included
    rounding_seeds: Sequence[int]  # for stochastic rounding, equal in all steps and on all replicas
    # uint8 [blocks, 2] of FP8 moments, changed in place; empty = moments are not FP8
    exponents: Sequence[Tensor] = ()
    # int16 of the same shapes, changed in place: bf16 weights and remainders are the fp32 weights
    # that are updated; empty = the weights have no remainders
    remainders: Sequence[Tensor] = ()

    @classmethod
    def from_params(cls, params_and_seeds: Sequence[tuple[ParamTensors, int]]) -> "AdamWTensors":
        """Make the record from (tensors, seed) pairs; a field is None in all pairs or in none."""
        params, numbers = zip(*params_and_seeds, strict=True)
        weights, grads, exp_avgs, exp_avg_sqs, steps, *optional = zip(*params, strict=True)
        exponents, remainders = ([t for t in column if t is not None] for column in optional)
        return cls(weights, grads, exp_avgs, exp_avg_sqs, steps, numbers, exponents, remainders)

    def to_params(self) -> list[ParamTensors]:
        """Return one `ParamTensors` per parameter."""
        absent = [None] * len(self.weights)
        columns = (self.weights, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps)
        optional = (self.exponents or absent, self.remainders or absent)
        return [ParamTensors(*row) for row in zip(*columns, *optional, strict=True)]


def adamw_ref_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Compute `adamw_` in plain PyTorch, in fp32 or fp64."""
    beta1, beta2 = options.betas
    for number, row in zip(tensors.rounding_seeds, tensors.to_params(), strict=True):
        wide = torch.promote_types(row.weight.dtype, torch.float32)
        g, step = row.grad.to(wide), row.step
        if grad_scale is not None:
            g = g / grad_scale
        w, m, v = row.weight, row.exp_avg, row.exp_avg_sq
        if row.remainder is not None:
            w = join_master_ref(w, row.remainder)
        if row.exponents is not None:
            m, v = decode_moments_ref(m.reshape(-1), v.reshape(-1), row.exponents)
        w, m, v = w.to(wide), m.to(wide).view(w.shape), v.to(wide).view(w.shape)
        m = m + (g - m) * (1 - beta1)
        v = v + (g * g - v) * (1 - beta2)
        logs = map(_compute_log, options.betas)
        part1, part2 = (-torch.expm1(step.double() * log) for log in logs)
        denominator = v.sqrt() / part2.sqrt().to(wide) + options.eps
        change = options.lr * options.weight_decay * w
        change = change + (options.lr / part1).to(wide) * (m / denominator)
        for old, new in _encode_state_ref(row, number, w - change, m, v):
            new = new.view(old.shape)
            if found_inf is not None:
                new = torch.where(found_inf > 0, old, new)
            old.copy_(new)


def _encode_state_ref(
    param: ParamTensors, rounding_seed: int, w: Tensor, m: Tensor, v: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return (tensor of `param`, new value) pairs from the new weight w, and moments m and v."""
    if param.remainder is None:
        pairs = [(param.weight, w.to(param.weight.dtype))]
    else:
        weight, remainder = split_master_ref(w)
        pairs = [(param.weight, weight), (param.remainder, remainder)]
    moments = (param.exp_avg, param.exp_avg_sq)
    if param.exponents is not None:
        noise = make_random_bits_ref(m.numel(), param.step, rounding_seed)
        encoded = encode_moments_ref(m.reshape(-1), v.reshape(-1), noise)
        return [*pairs, *zip((*moments, param.exponents), encoded, strict=True)]
    if param.exp_avg.dtype == torch.bfloat16:
        noise = make_random_bits_ref(m.numel(), param.step, rounding_seed)
        m = round_stochastically_ref(m, noise & 0xFFFF)
        v = round_stochastically_ref(v, noise >> 16)
    return [*pairs, *((old, new.to(old.dtype)) for old, new in zip(moments, (m, v), strict=True))]


@triton.jit
def _update_block(
    pointers,  # weight, grad, exp_avg, exp_avg_sq, int16 exponents of both moments, remainder
    block_ids,  # int64 [ROWS], blocks of moments
    numel,
    seed,
    # factor of gradients, 1 - beta1, 1 - beta2, eps, lr * weight_decay, lr / (1 - beta1 ** step),
    # 1 / sqrt(1 - beta2 ** step)
    factors,
    MASKED: tl.constexpr,  # whether the blocks may exceed numel
    SPLIT: tl.constexpr,  # whether weights are bf16 bits (int16) and int16 remainders
):
    """Apply AdamW in place to blocks of a parameter's weights and moments (uint8 = FP8)."""
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exponents_ptr, remainder_ptr = pointers
    scale, rest1, rest2, eps, decay, rate, growth = factors
    MOMENT_BLOCK: tl.constexpr = _MOMENT_BLOCK
    i = block_ids[:, None] * MOMENT_BLOCK + tl.arange(0, MOMENT_BLOCK)[None, :]
    mask = i < numel if MASKED else None
    FP8: tl.constexpr = exp_avg_ptr.dtype.element_ty == tl.uint8
    w = tl.load(weight_ptr + i, mask=mask)
    w = join_master(w, tl.load(remainder_ptr + i, mask=mask)) if SPLIT else w.to(tl.float32)
    g = tl.load(grad_ptr + i, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_ptr + i, mask=mask)
    v = tl.load(exp_avg_sq_ptr + i, mask=mask)
    if FP8:
        row_mask = block_ids * MOMENT_BLOCK < numel if MASKED else None
        m, v = decode_moments(m, v, tl.load(exponents_ptr + block_ids, mask=row_mask))
    else:
        m, v = m.to(tl.float32), v.to(tl.float32)
    g *= scale
    m += (g - m) * rest1
    v += (g * g - v) * rest2
    w -= decay * w + rate * (m / (tl.sqrt(v) * growth + eps))
    if SPLIT:
        weight, remainder = split_master(w)
        tl.store(weight_ptr + i, weight, mask=mask)
        tl.store(remainder_ptr + i, remainder, mask=mask)
    else:
        tl.store(weight_ptr + i, w.to(weight_ptr.dtype.element_ty), mask=mask)
    if FP8:
        if MASKED:  # elements beyond the end are not part of a block
            m, v = tl.where(mask, m, 0.0), tl.where(mask, v, 0.0)
        m, v, exponents = encode_moments(m, v, make_random_bits(i, seed))
        tl.store(exponents_ptr + block_ids, exponents, mask=row_mask)
    elif exp_avg_ptr.dtype.element_ty == tl.bfloat16:
        noise = make_random_bits(i, seed)
        m = round_stochastically(m, noise & 0xFFFF)
        v = round_stochastically(v, noise >> 16)
    tl.store(exp_avg_ptr + i, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + i, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr,  # int64 [P, COLUMNS]: addresses as in ParamTensors, elements, first program, number
    tensor_ids_ptr,  # int32 [programs]: of which tensor its part is
    lr_ptr,  # fp32 [1] or None
    lr,  # read where lr_ptr is None
    one_minus_beta1,  # 1 - beta1
    one_minus_beta2,  # 1 - beta2
    log_beta1,  # log(beta1)
    log_beta2,  # log(beta2)
    eps,
    weight_decay,
    grad_scale_ptr,  # fp32 [1] or None
    found_inf_ptr,  # fp32 [1] or None: > 0 leaves all as it is
    WEIGHT_DTYPE: tl.constexpr,  # dtypes
    GRAD_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there are remainders
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Update NUM_BLOCKS blocks of one parameter in place by AdamW."""
    pid = tl.program_id(0)
    if found_inf_ptr is not None:
        if tl.load(found_inf_ptr) > 0:
            return
    tensor = tl.load(tensor_ids_ptr + pid)
    row_ptr = table_ptr + tensor.to(tl.int64) * _COLUMNS
    addresses = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    step = tl.load(tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)))
    exponents_ptr = tl.load(row_ptr + 5).to(tl.pointer_type(tl.int16))
    remainder = tl.load(row_ptr + 6)
    numel = tl.load(row_ptr + 7)
    GOLDEN: tl.constexpr = _GOLDEN
    MOMENT_BLOCK: tl.constexpr = _MOMENT_BLOCK
    ROWS: tl.constexpr = BLOCK // MOMENT_BLOCK
    first_row = (pid - tl.load(row_ptr + 8)) * (ROWS * NUM_BLOCKS)
    scale = 1.0
    if grad_scale_ptr is not None:
        scale = (1.0 / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    # In fp64: 1 - beta ** step cancels where beta is near 1.
    part1 = 1.0 - tl.exp(step.to(tl.float64) * log_beta1)
    part2 = 1.0 - tl.exp(step.to(tl.float64) * log_beta2)
    rate = (lr / part1).to(tl.float32)
    decay = lr * weight_decay
    growth = (1.0 / tl.sqrt(part2)).to(tl.float32)
    number = tl.load(row_ptr + 9).to(tl.uint32)
    seed = step.to(tl.uint32) * GOLDEN + number * ((GOLDEN * GOLDEN) & 0xFFFFFFFF)
    weight_ptr = addresses[0].to(tl.pointer_type(WEIGHT_DTYPE))
    grad_ptr = addresses[1].to(tl.pointer_type(GRAD_DTYPE))
    exp_avg_ptr = addresses[2].to(tl.pointer_type(MOMENT_DTYPE))
    exp_avg_sq_ptr = addresses[3].to(tl.pointer_type(MOMENT_DTYPE))
    remainder_ptr = remainder.to(tl.pointer_type(tl.int16))
    factors = (scale, one_minus_beta1, one_minus_beta2, eps, decay, rate, growth)
    odd = (addresses[0] | addresses[1] | addresses[2] | addresses[3] | remainder) & 15
    if (odd == 0) & ((first_row + ROWS * NUM_BLOCKS) * MOMENT_BLOCK <= numel):
        # No masks, and four elements of each tensor per load. With eight, threads would exchange
        # elements between tensors of two types.
        weight_ptr = tl.multiple_of(weight_ptr, 4 * WEIGHT_DTYPE.primitive_bitwidth // 8)
        grad_ptr = tl.multiple_of(grad_ptr, 4 * GRAD_DTYPE.primitive_bitwidth // 8)
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 4 * MOMENT_DTYPE.primitive_bitwidth // 8)
        exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 4 * MOMENT_DTYPE.primitive_bitwidth // 8)
        remainder_ptr = tl.multiple_of(remainder_ptr, 8)
        pointers = (weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exponents_ptr, remainder_ptr)
        for block in range(NUM_BLOCKS):
            row = first_row + block * ROWS + tl.arange(0, ROWS)
            _update_block(pointers, row, numel, seed, factors, False, SPLIT)
    else:
        pointers = (weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exponents_ptr, remainder_ptr)
        for block in range(NUM_BLOCKS):
            row = first_row + block * ROWS + tl.arange(0, ROWS)
            _update_block(pointers, row, numel, seed, factors, True, SPLIT)


def adamw_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update weights and moments in place, in fp32 (fp64 for fp64 tensors); no host sync.

    One launch updates GPU tensors if all are contiguous and weights, gradients and moments have one
    dtype each. Torch's fused AdamW updates contiguous fp32 or fp64 CPU tensors. Plain PyTorch
    updates other tensors, on a GPU with a warning. bf16 and FP8 moments are stochastically rounded.

    Args:
        grad_scale: fp32 scalar, divides the gradients; None = 1.
        found_inf: fp32 scalar; if > 0, no tensor changes; None = 0.
    """
    if not tensors.weights:
        return
    if not can_use_kernel(*tensors.weights) and _can_use_fused_torch_adamw(tensors):
        _update_with_torch_(tensors, options, grad_scale, found_inf)
        return
    if not _can_use_kernel(tensors):
        if tensors.weights[0].dtype != torch.float64:
            warn_on_fallback(tensors.weights[0], "AdamW of strided tensors or of several dtypes")
        adamw_ref_(tensors, options, grad_scale=grad_scale, found_inf=found_inf)
        return
    weight = tensors.weights[0]
    table, num_programs = _make_address_table(tensors)
    if not num_programs:
        return
    counts = table[:, 7].add(BLOCK * NUM_BLOCKS - 1) // (BLOCK * NUM_BLOCKS)
    numbers = torch.arange(len(counts), dtype=torch.int32, device=weight.device)
    of_programs = torch.repeat_interleave(numbers, counts, output_size=num_programs)
    lr, (beta1, beta2) = options.lr, options.betas
    is_on_device = isinstance(lr, Tensor) and lr.device == weight.device
    rates = (lr, 0.0) if is_on_device else (None, float(lr))
    betas = (1 - beta1, 1 - beta2, _compute_log(beta1), _compute_log(beta2))
    rest = (options.eps, options.weight_decay, grad_scale, found_inf)
    block = FP8_BLOCK if tensors.exponents else BLOCK
    weights, moments = TRITON_DTYPES[weight.dtype], TRITON_DTYPES.get(tensors.exp_avgs[0].dtype)
    launch(
        _adamw_kernel,
        num_programs,
        *(table, of_programs, *rates, *betas, *rest),
        WEIGHT_DTYPE=tl.int16 if tensors.remainders else weights,
        GRAD_DTYPE=TRITON_DTYPES[tensors.grads[0].dtype],
        MOMENT_DTYPE=tl.uint8 if tensors.exponents else moments,
        SPLIT=bool(tensors.remainders),
        BLOCK=block,
        NUM_BLOCKS=BLOCK * NUM_BLOCKS // block,
        num_warps=NUM_WARPS,
    )


def _can_use_kernel(tensors: AdamWTensors) -> bool:
    """Return whether the kernel supports the dtypes, layouts, shapes and devices of all tensors."""
    rows = tensors.to_params()
    dtypes = [{t.dtype for t in column} for column in list(zip(*rows, strict=True))[:4]]
    dtypes[2:] = [] if tensors.exponents else [dtypes[2] | dtypes[3]]  # both are read as one type
    laid_out = [t for row in rows for t in (*row[:4], *row[5:]) if t is not None]
    return (
        all(len(kinds) == 1 and kinds <= TRITON_DTYPES.keys() for kinds in dtypes)
        and can_use_kernel(*tensors.weights)
        and all(t.is_contiguous() for t in laid_out)
        # It reads addresses: of another shape they would end elsewhere.
        and all(
            len({t.shape for t in (*row[:4], row.remainder) if t is not None}) == 1 for row in rows
        )
        and len({t.device for t in (*laid_out, *tensors.steps)}) == 1
    )


def _can_use_fused_torch_adamw(tensors: AdamWTensors) -> bool:
    """Return whether all tensors but the steps are fp32, or all fp64, and contiguous."""
    tensors_in_use = (*tensors.weights, *tensors.grads, *tensors.exp_avgs, *tensors.exp_avg_sqs)
    has_dtype = {t.dtype for t in tensors_in_use} in ({torch.float32}, {torch.float64})
    return has_dtype and all(map(Tensor.is_contiguous, tensors_in_use))


def _update_with_torch_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update weights and moments in place by torch's fused AdamW, as `adamw_` does."""
    grads = list(tensors.grads)
    if grad_scale is not None:  # torch would write scaled gradients back
        grads = [grad / grad_scale for grad in grads]
    moments = (list(tensors.exp_avgs), list(tensors.exp_avg_sqs))
    fused_adamw_(
        *(list(tensors.weights), grads, *moments, [], list(tensors.steps)),
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if found_inf is None else (found_inf > 0).float(),
    )


def _make_address_table(tensors: AdamWTensors) -> tuple[Tensor, int]:
    """Return int64 [tensors, COLUMNS], the tensors' addresses, and the number of programs."""
    rows, num_programs = [], 0
    for number, row in zip(tensors.rounding_seeds, tensors.to_params(), strict=True):
        numel = row.weight.numel()
        rows.append([*(0 if t is None else t.data_ptr() for t in row), numel, num_programs, number])
        num_programs += cdiv(numel, BLOCK * NUM_BLOCKS)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return copy_to_device(table, tensors.weights[0].device), num_programs


def _compute_log(x: float) -> float:
    """Return log(x), -inf for 0."""
    return math.log(x) if x else -math.inf
