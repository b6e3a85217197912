"""AdamW over many tensors in one launch; moments in fp32, or in bf16 rounded at random.

Dimensions: P tensors, all weights of one dtype, likewise gradients and moments.

Budget: bytes moved per element of fp32 weights and gradients: 28 with fp32 moments, 20 with bf16
ones. Gradients are divided by `grad_scale` on the way and stay as they are.

Note "rounded at random": the second moment of a constant gradient closes 1 - beta2 of its gap per
step. In bf16, rounded to nearest, anything below 1/512 of the moment is lost: with beta2 = 0.999
it would never fall again. So a moment is rounded up with a probability of the part that is cut
off, and on average nothing is lost. The bits come from a hash of step, tensor and position, so
equal steps give equal bits.

Source: https://arxiv.org/abs/1711.05101 (decoupled weight decay); the hash is lowbias32 of
https://nullprogram.com/blog/2018/07/31/.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from moecore._fields import Bound, PositiveOrZero, check_fields
from moecore.kernels.common import (
    INTERPRET,
    cdiv,
    on_device,
    tl,
    triton,
    use_kernel,
    warn_plain,
)

BLOCK = 1024  # elements at a time
NUM_BLOCKS = 1 if INTERPRET else 8  # of one program, one after the other
NUM_WARPS = 4
COLUMNS = 8  # of the table
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
GOLDEN = 0x9E3779B9  # spreads steps and tensors over the hash's seeds


Decay = Annotated[float, Bound(">=", 0), Bound("<", 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWOptions:
    """What one update needs to know.

    Attributes:
        lr: learning rate; a tensor of one element is read on its device.
        betas: of the first and the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: times lr, the part of each weight that is taken off.
    """

    lr: PositiveOrZero | Tensor
    betas: tuple[Decay, Decay]
    eps: PositiveOrZero
    weight_decay: PositiveOrZero

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class AdamWTensors:
    """What one update changes, and by which gradients: P of each.

    Attributes:
        weights: changed in place.
        grads: of the same shapes, read.
        exp_avgs: first moments of the same shapes, changed in place.
        exp_avg_sqs: second moments, likewise.
        steps: fp32 scalars: how many updates there have been, this one included.
        numbers: of the tensors, for the rounding at random: the same in every step.
    """

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]
    numbers: Sequence[int]

    def rows(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Return weight, gradient, moments and step of each tensor."""
        return list(
            zip(self.weights, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps, strict=True)
        )


def adamw_ref_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do what `adamw_` does, in plain PyTorch and in at least fp32."""
    beta1, beta2 = options.betas
    for number, row in zip(tensors.numbers, tensors.rows(), strict=True):
        weight, grad, exp_avg, exp_avg_sq, step = row
        wide = torch.promote_types(weight.dtype, torch.float32)
        g, w = grad.to(wide), weight.to(wide)
        if grad_scale is not None:
            g = g / grad_scale
        m, v = exp_avg.to(wide), exp_avg_sq.to(wide)
        m = m + (g - m) * (1 - beta1)
        v = v + (g * g - v) * (1 - beta2)
        part1, part2 = (-torch.expm1(step.double() * _log(beta)) for beta in options.betas)
        denominator = v.sqrt() / part2.sqrt().to(wide) + options.eps
        change = options.lr * options.weight_decay * w
        change = change + (options.lr / part1).to(wide) * (m / denominator)
        results = [(weight, w - change), (exp_avg, m), (exp_avg_sq, v)]
        for place, (old, new) in enumerate(results):
            if place and old.dtype == torch.bfloat16:
                new = _round_at_random_ref(new, step, number, high=place == 2)
            new = new.to(old.dtype)
            old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


def _round_at_random_ref(x: Tensor, step: Tensor, number: int, *, high: bool) -> Tensor:
    """Return fp32 values that bf16 has, see the note "rounded at random"."""
    position = torch.arange(x.numel(), device=x.device) & 0xFFFFFFFF
    seed = (step.long() * GOLDEN + (number * GOLDEN * GOLDEN & 0xFFFFFFFF)) & 0xFFFFFFFF
    noise = _hash_ref(position ^ seed).view(x.shape)
    noise = noise >> 16 if high else noise & 0xFFFF
    bits = ((x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF) + noise) & 0xFFFF0000
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return torch.where(x.isfinite(), bits.int().view(torch.float32), x.float())


def _hash_ref(x: Tensor) -> Tensor:
    """Return uint32 noise of uint32 values, both kept in int64."""
    x = x ^ (x >> 16)
    x = _times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product, by halves of the factor: int64 has no room for all."""
    return ((x * (factor & 0xFFFF)) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF


@triton.jit
def _hash(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_at_random(x, noise):
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    # Of infinity and NaN the sum could be another kind of number.
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _update(
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    i,  # int64 [BLOCK], positions
    numel,
    seed,
    scale,  # of gradients
    rest1,  # 1 - beta1
    rest2,  # 1 - beta2
    eps,
    decay,  # lr * weight_decay
    rate,  # lr / (1 - beta1 ** step)
    growth,  # 1 / sqrt(1 - beta2 ** step)
    MASKED: tl.constexpr,
):
    """Update one block."""
    mask = i < numel if MASKED else None
    w = tl.load(weight_ptr + i, mask=mask).to(tl.float32)
    g = tl.load(grad_ptr + i, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_ptr + i, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + i, mask=mask).to(tl.float32)
    g *= scale
    m += (g - m) * rest1
    v += (g * g - v) * rest2
    w -= decay * w + rate * (m / (tl.sqrt(v) * growth + eps))
    if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
        noise = _hash(i.to(tl.uint32) ^ seed)
        m = _round_at_random(m, noise & 0xFFFF)
        v = _round_at_random(v, noise >> 16)
    tl.store(weight_ptr + i, w.to(weight_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + i, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + i, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr,  # int64 [P, COLUMNS]: addresses as in AdamWTensors, elements, first program, number
    tensor_ptr,  # int32 [programs]: of which tensor its part is
    lr_ptr,  # fp32 [1] or None
    lr,  # read where lr_ptr is None
    rest1,  # 1 - beta1
    rest2,  # 1 - beta2
    log1,  # log(beta1)
    log2,  # log(beta2)
    eps,
    weight_decay,
    scale_ptr,  # fp32 [1] or None
    skip_ptr,  # fp32 [1] or None: > 0 leaves all as it is
    WEIGHT: tl.constexpr,  # dtypes
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    GOLDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    pid = tl.program_id(0)
    if skip_ptr is not None:
        if tl.load(skip_ptr) > 0:
            return
    tensor = tl.load(tensor_ptr + pid)
    row_ptr = table_ptr + tensor.to(tl.int64) * COLUMNS
    addresses = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    step = tl.load(tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)))
    numel = tl.load(row_ptr + 5)
    start = (pid - tl.load(row_ptr + 6)) * (BLOCK * NUM_BLOCKS)
    scale = 1.0
    if scale_ptr is not None:
        scale = (1.0 / tl.load(scale_ptr).to(tl.float64)).to(tl.float32)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    # In fp64: 1 - beta ** step cancels where beta is near 1.
    part1 = 1.0 - tl.exp(step.to(tl.float64) * log1)
    part2 = 1.0 - tl.exp(step.to(tl.float64) * log2)
    rate = (lr / part1).to(tl.float32)
    decay = lr * weight_decay
    growth = (1.0 / tl.sqrt(part2)).to(tl.float32)
    number = tl.load(row_ptr + 7).to(tl.uint32)
    seed = step.to(tl.uint32) * GOLDEN + number * ((GOLDEN * GOLDEN) & 0xFFFFFFFF)
    weight_ptr = addresses[0].to(tl.pointer_type(WEIGHT))
    grad_ptr = addresses[1].to(tl.pointer_type(GRAD))
    exp_avg_ptr = addresses[2].to(tl.pointer_type(MOMENT))
    exp_avg_sq_ptr = addresses[3].to(tl.pointer_type(MOMENT))
    odd = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15
    if (odd == 0) & (start + BLOCK * NUM_BLOCKS <= numel):
        # No masks, and four elements of each tensor per load. Eight, where a type has room for
        # them, would make threads exchange elements between tensors of two types.
        weight_ptr = tl.multiple_of(weight_ptr, 4 * WEIGHT.primitive_bitwidth // 8)
        grad_ptr = tl.multiple_of(grad_ptr, 4 * GRAD.primitive_bitwidth // 8)
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 4 * MOMENT.primitive_bitwidth // 8)
        exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 4 * MOMENT.primitive_bitwidth // 8)
        for block in range(NUM_BLOCKS):
            i = tl.multiple_of(start + block * BLOCK, BLOCK) + tl.arange(0, BLOCK)
            _update(
                weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, i, numel, seed, scale,
                rest1, rest2, eps, decay, rate, growth, MASKED=False,
            )  # fmt: skip
    else:
        for block in range(NUM_BLOCKS):
            i = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(
                weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, i, numel, seed, scale,
                rest1, rest2, eps, decay, rate, growth, MASKED=True,
            )  # fmt: skip


def adamw_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update weights and moments in place, in fp32 (fp64 for fp64 tensors); no host sync.

    One launch, if all tensors are contiguous, and weights, gradients and moments of one dtype each;
    else plain PyTorch, with a warning on a GPU. On a CPU torch's fused AdamW where it can do it.
    bf16 moments are rounded at random, see the note above; weights to nearest.

    Args:
        tensors: on one device.
        options: of all of them.
        grad_scale: fp32 scalar, divides the gradients; None = 1.
        found_inf: fp32 scalar, > 0 leaves everything as it is; None = 0.
    """
    if not tensors.weights:
        return
    if not use_kernel(*tensors.weights) and _fits_torch(tensors):
        _torch_adamw_(tensors, options, grad_scale, found_inf)
        return
    if not _fits_kernel(tensors):
        if tensors.weights[0].dtype != torch.float64:
            warn_plain(tensors.weights[0], "AdamW of strided tensors or of several dtypes")
        adamw_ref_(tensors, options, grad_scale=grad_scale, found_inf=found_inf)
        return
    weight = tensors.weights[0]
    table, num_programs = _table(tensors)
    if not num_programs:
        return
    counts = table[:, 5].add(BLOCK * NUM_BLOCKS - 1) // (BLOCK * NUM_BLOCKS)
    numbers = torch.arange(len(counts), dtype=torch.int32, device=weight.device)
    lr, (beta1, beta2) = options.lr, options.betas
    with on_device(weight):
        _adamw_kernel[(num_programs,)](
            table,
            torch.repeat_interleave(numbers, counts, output_size=num_programs),
            lr if isinstance(lr, Tensor) and lr.device == weight.device else None,
            float(lr) if not isinstance(lr, Tensor) or lr.device != weight.device else 0.0,
            1 - beta1,
            1 - beta2,
            _log(beta1),
            _log(beta2),
            options.eps,
            options.weight_decay,
            grad_scale,
            found_inf,
            WEIGHT=TRITON_DTYPES[weight.dtype],
            GRAD=TRITON_DTYPES[tensors.grads[0].dtype],
            MOMENT=TRITON_DTYPES[tensors.exp_avgs[0].dtype],
            GOLDEN=GOLDEN,
            COLUMNS=COLUMNS,
            BLOCK=BLOCK,
            NUM_BLOCKS=NUM_BLOCKS,
            num_warps=NUM_WARPS,
        )


def _fits_kernel(tensors: AdamWTensors) -> bool:
    kinds = [tensors.weights, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs]
    # Both moments are read as one type.
    dtypes = [{t.dtype for kind in kinds[2:] for t in kind}, *({t.dtype for t in k} for k in kinds)]
    return (
        all(len(found) == 1 and found <= TRITON_DTYPES.keys() for found in dtypes)
        and use_kernel(*tensors.weights)
        and all(t.is_contiguous() for kind in kinds for t in kind)
        # It reads addresses: of another shape they would end elsewhere.
        and all(len({t.shape for t in row[:4]}) == 1 for row in tensors.rows())
        and len({t.device for kind in (*kinds, tensors.steps) for t in kind}) == 1
    )


def _fits_torch(tensors: AdamWTensors) -> bool:
    return all(
        {t.dtype for t in row[:4]} in ({torch.float32}, {torch.float64})
        and all(t.is_contiguous() for t in row[:4])
        for row in tensors.rows()
    )


def _torch_adamw_(
    tensors: AdamWTensors,
    options: AdamWOptions,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Do it by torch's fused AdamW, on CPUs many times as fast as the reference."""
    grads = list(tensors.grads)
    if grad_scale is not None:  # torch would write scaled gradients back
        grads = list(torch._foreach_div(grads, grad_scale))
    adamw: Any = torch._fused_adamw_
    adamw(
        list(tensors.weights),
        grads,
        list(tensors.exp_avgs),
        list(tensors.exp_avg_sqs),
        [],
        list(tensors.steps),
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if found_inf is None else (found_inf > 0).float(),
    )


def _table(tensors: AdamWTensors) -> tuple[Tensor, int]:
    """Return what the kernel reads of each tensor, and how many programs all need."""
    rows, num_programs = [], 0
    for number, row in zip(tensors.numbers, tensors.rows(), strict=True):
        numel = row[0].numel()
        rows.append([*(t.data_ptr() for t in row), numel, num_programs, number])
        num_programs += cdiv(numel, BLOCK * NUM_BLOCKS)
    device = tensors.weights[0].device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), num_programs


def _log(x: float) -> float:
    return math.log(x) if x else -math.inf
