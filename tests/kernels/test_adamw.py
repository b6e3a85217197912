import copy

import pytest
import torch
from torch import Tensor

from moecore.kernels import adamw_formats as af
from moecore.kernels.adamw import (
    BLOCK,
    NUM_BLOCKS,
    AdamWOptions,
    AdamWTensors,
    ParamTensors,
    adamw_,
    adamw_ref_,
)
from moecore.kernels.common import cdiv
from moecore.kernels.triton_api import INTERPRET

SHAPES = [(7,), (0,), (3, 41), (BLOCK * NUM_BLOCKS,), (BLOCK * NUM_BLOCKS + 20, 2), ()]
OPTIONS = AdamWOptions(lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def make(device, moment_dtype=torch.float32, *, split=False) -> AdamWTensors:
    torch.manual_seed(0)
    weights = [torch.randn(s, device=device) for s in SHAPES]
    remainders: list[Tensor] = []
    if split:
        weights, remainders = map(list, zip(*map(af.split_master_ref, weights), strict=True))
    # Steps differ between tensors, as where an expert had no gradient for a while.
    steps = [torch.full((), float(3 * i), device=device) for i in range(len(SHAPES))]
    grads = [torch.zeros_like(w) for w in weights]
    return AdamWTensors(
        weights, grads, *moments_of(weights, moment_dtype), steps, range(3, 39, 6),
        exponents_of(weights) if moment_dtype == torch.uint8 else (), remainders,
    )  # fmt: skip


def moments_of(weights: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    return [[torch.zeros_like(w, dtype=dtype) for w in weights] for _ in range(2)]


def exponents_of(weights: list[Tensor]) -> list[Tensor]:
    blocks = [cdiv(w.numel(), af.MOMENT_BLOCK) for w in weights]
    return [torch.zeros(n, 2, dtype=torch.uint8, device=weights[0].device) for n in blocks]


def values(tensors: AdamWTensors) -> list[tuple[Tensor, Tensor]]:
    """Both moments of each tensor, in fp32."""
    found = []
    for row in tensors.to_params():
        m, v = row.exp_avg, row.exp_avg_sq
        if row.exponents is not None:
            found_mv = af.decode_moments_ref(m.flatten(), v.flatten(), row.exponents)
            m, v = (x.view(row.weight.shape) for x in found_mv)
        found.append((m.float(), v.float()))
    return found


def next_step(tensors: AdamWTensors, seed: int) -> None:
    for i, (grad, step) in enumerate(zip(tensors.grads, tensors.steps, strict=True)):
        noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(97 * seed + i))
        grad.copy_(noise * 10.0 ** (2 * i - 6))
        step += 1


def torch_fused_(tensors: AdamWTensors, options: AdamWOptions) -> None:
    torch._fused_adamw_(
        *(tensors.weights, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs, []),
        list(tensors.steps), lr=options.lr, beta1=options.betas[0], beta2=options.betas[1],
        weight_decay=options.weight_decay, eps=options.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def in_fp64(tensors: AdamWTensors) -> AdamWTensors:
    columns = (tensors.weights, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs)
    wide = ([t.double() for t in column] for column in columns)
    return AdamWTensors(*wide, [s.clone() for s in tensors.steps], tensors.rounding_seeds)


def errors(got: AdamWTensors, want: AdamWTensors) -> dict[str, float]:
    """Worst error of each kind of tensor, over the largest value of that tensor."""
    worst = {}
    for name in ("weights", "exp_avgs", "exp_avg_sqs"):
        pairs = zip(getattr(got, name), getattr(want, name), strict=True)
        worst[name] = max(
            ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs if b.numel()
        )
    return worst


def test_as_right_as_torch_over_steps(device: str) -> None:
    ours, torchs = make(device), make(device)
    exact = in_fp64(ours)
    for seed in range(12):
        for tensors in (ours, torchs, exact):
            next_step(tensors, seed)
        for fp64, fp32 in zip(exact.grads, ours.grads, strict=True):
            fp64.copy_(fp32)
        adamw_(ours, OPTIONS)
        torch_fused_(torchs, OPTIONS)
        adamw_ref_(exact, OPTIONS)
    found, bound = errors(ours, exact), errors(torchs, exact)
    for name, error in found.items():
        assert error <= 2 * bound[name] + 1e-8, (name, found, bound)


def bits(row: ParamTensors) -> list[Tensor]:
    return [t for t in row if t is not None]


def master(row: ParamTensors) -> Tensor:
    """Return the weight with its remainder; a small update may change that alone."""
    return row.weight if row.remainder is None else af.join_master_ref(row.weight, row.remainder)


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("split", [False, True])
def test_scale_skip_and_learning_rate_on_the_device(device, moment_dtype, split) -> None:
    tensors = make(device, moment_dtype, split=split)
    next_step(tensors, 1)
    before, plain = copy.deepcopy(tensors), copy.deepcopy(tensors)
    signal = {"grad_scale": torch.full((), 4.0, device=device)}
    adamw_(tensors, OPTIONS, **signal, found_inf=torch.ones((), device=device))
    for old, new in zip(before.to_params(), tensors.to_params(), strict=True):
        assert all(map(torch.equal, bits(old), bits(new)))
    options = AdamWOptions(
        lr=torch.tensor(OPTIONS.lr, device=device), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
    )
    adamw_(tensors, options, **signal, found_inf=torch.zeros((), device=device))
    for grad in plain.grads:
        grad /= 4
    adamw_(plain, OPTIONS)
    for old, want, new in zip(
        before.to_params(), plain.to_params(), tensors.to_params(), strict=True
    ):
        assert torch.equal(new.grad, old.grad)  # gradients stay unscaled
        assert all(map(torch.equal, bits(new)[2:6], bits(want)[2:6]))
        a, b, c = map(master, (new, want, old))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        assert not a.numel() or not torch.equal(a, c)


@pytest.mark.parametrize("moment_dtype", [torch.bfloat16, torch.uint8])
def test_bits_of_the_rounding(device: str, moment_dtype: torch.dtype) -> None:
    """With both betas 0 the moments are the gradient and its square, and the rest is rounding."""
    options = AdamWOptions(lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    for seed in range(3):
        got, want = make(device, moment_dtype), make(device, moment_dtype)
        for tensors in (got, want):
            next_step(tensors, seed)
            tensors.grads[0][:4] = torch.tensor([float("nan"), float("inf"), -1e38, 0.0])
            if seed:  # blocks of many sizes, and one of zeros
                sizes = torch.logspace(-20, 15, len(tensors.grads[4]), device=device)
                tensors.grads[4].mul_(sizes.view(-1, 1))
                tensors.grads[4][:200] = 0
        adamw_(got, options)
        adamw_ref_(want, options)
        for a, b in zip(got.to_params(), want.to_params(), strict=True):
            for x, y in zip(bits(a)[2:], bits(b)[2:], strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(values(got), values(want), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    big = values(got)[3][0] - got.grads[3]
    most = 2.0**-7 if moment_dtype == torch.bfloat16 else 2.0**-3
    assert big.abs().max() > 0
    atol = 0.0 if moment_dtype == torch.bfloat16 else got.grads[3].abs().max().item() * 2.0**-16
    assert (big.abs() <= got.grads[3].abs() * most + atol).all()


def test_fp8_moments_follow_fp32_ones(device: str) -> None:
    """Gradients that fall to a third: unbiased moments, and updates of the right size."""
    n, num_steps = BLOCK * NUM_BLOCKS, 40 if device == "cpu" else 500
    options = AdamWOptions(lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    size = (torch.randn(n, generator=generator).exp() * 1e-4).to(device)
    ours, exact = (
        AdamWTensors(
            [torch.zeros(n, device=device)], [size.clone()], *moments_of([size], dtype),
            [torch.zeros((), device=device)], [0],
            exponents_of([size]) if dtype == torch.uint8 else (),
        )
        for dtype in (torch.uint8, torch.float32)
    )  # fmt: skip
    for step in range(num_steps):
        grad = (0.3 + torch.randn(n, generator=generator)).to(device) * size
        for tensors in (ours, exact):
            tensors.weights[0].zero_()
            tensors.steps[0].add_(1)
            tensors.grads[0].copy_(grad * (1.0 if step < num_steps // 2 else 0.3))
            adamw_(tensors, options)
    apart = ours.weights[0] - exact.weights[0]
    assert apart.norm() / exact.weights[0].norm() < 0.15
    assert ours.weights[0].abs().max() < 1.5 * exact.weights[0].abs().max()
    for a, b, one in zip(values(ours)[0], values(exact)[0], (size, size**2), strict=True):
        assert abs((a / one).sum() / (b / one).sum() - 1) < 0.03


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.uint8])
def test_split_masters_are_those_of_fp32_weights(device: str, moment_dtype: torch.dtype) -> None:
    ours, wide = make(device, moment_dtype, split=True), make(device, moment_dtype)
    for grad in (wide.grads[i] for i in range(len(SHAPES))):
        grad.data = grad.bfloat16()
    for seed in range(2):
        for tensors in (ours, wide):
            next_step(tensors, seed)
            adamw_(tensors, OPTIONS)
        for row, weight in zip(ours.to_params(), wide.weights, strict=True):
            assert row.remainder is not None
            assert torch.equal(af.join_master_ref(row.weight, row.remainder), weight)
            assert ((row.weight.float() - weight).abs() <= weight.abs() * 2.0**-8).all()


def test_every_pair_of_weight_and_remainder_stays(device: str) -> None:
    """Upper halves of all kinds with every remainder; an update of nothing."""
    tops = torch.tensor([0x0000, 0x7F7F] if INTERPRET else [0x0000, 0x3F81, 0x7F7F, -0x7F80])
    tops = tops.to(torch.int16)
    remainder = (torch.arange(1 << 16) - 0x8000).to(torch.int16).repeat(len(tops)).to(device)
    weight = tops.repeat_interleave(1 << 16).view(torch.bfloat16).to(device)
    real = ~af.join_master_ref(weight, remainder).isnan()  # below a zero there is none of its sign
    weight, remainder = weight[real], remainder[real]
    tensors = AdamWTensors(
        [weight.clone()], [torch.zeros_like(weight)], *moments_of([weight], torch.float32),
        [torch.ones((), device=device)], [0], (), [remainder.clone()],
    )  # fmt: skip
    adamw_(tensors, AdamWOptions(lr=0.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0))
    same = tensors.weights[0].view(torch.int16) == weight.view(torch.int16)
    # The largest numbers have infinity for a weight: an update of nothing keeps them too.
    assert same.all() and torch.equal(tensors.remainders[0], remainder)


def test_rounding_loses_nothing_on_average(device: str) -> None:
    """A second moment that falls from 1 to 0.5, where rounding to nearest would leave it at 1."""
    options = AdamWOptions(lr=0.0, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0)
    num_steps = 60 if device == "cpu" else 693
    weight = torch.zeros(BLOCK * NUM_BLOCKS, device=device)
    ones = torch.ones_like(weight, dtype=torch.bfloat16)
    step = torch.zeros((), device=device)
    tensors = AdamWTensors([weight], [weight.clone()], [ones.clone()], [ones], [step], [0])
    for _ in range(num_steps):
        tensors.steps[0].add_(1)
        adamw_(tensors, options)
    found, want = tensors.exp_avg_sqs[0].float(), 0.999**num_steps
    # Each step cuts at most 2**-8 of 1, so the mean of all varies by less than this.
    assert abs(found.mean().item() - want) < 5 * 2.0**-8 * (num_steps / found.numel()) ** 0.5
    assert found.std() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_views_at_odd_addresses(device: str, dtype: torch.dtype) -> None:
    n = BLOCK * NUM_BLOCKS
    flat = [torch.randn(n + 3, device=device).abs() for _ in range(4)]
    exponents: list[Tensor] = []
    if dtype == torch.uint8:
        flat[2:] = [(f * 20).clamp(max=100).to(torch.uint8) for f in flat[2:]]  # no NaN
        exponents = [
            torch.full((cdiv(n, af.MOMENT_BLOCK), 2), 110, dtype=torch.uint8, device=device)
        ]
    else:
        flat = [f.to(dtype) for f in flat]
    views = [[f[1 : n + 1]] for f in flat]
    steps = [torch.ones((), device=device)]
    whole = [[v[0].clone()] for v in views]
    adamw_(AdamWTensors(*views, steps, [5], [e.clone() for e in exponents]), OPTIONS)
    adamw_(AdamWTensors(*whole, steps, [5], exponents), OPTIONS)
    for place, ((view,), (clone,)) in enumerate(zip(views, whole, strict=True)):
        assert torch.equal(view, clone), place


@pytest.mark.gpu
def test_addresses_past_2_to_the_31() -> None:
    n = (1 << 31) + 5
    weight, grad, exp_avg, exp_avg_sq = (
        torch.zeros(n, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    grad[-3:] = 1.0
    one = torch.ones((), device="cuda")
    tensors = AdamWTensors([weight], [grad], [exp_avg], [exp_avg_sq], [one], [0])
    weight[0] = grad[0] = 1.0
    adamw_(tensors, AdamWOptions(lr=0.5, betas=(0.5, 0.5), eps=1e-3, weight_decay=0.0))
    assert weight[-3:].tolist() == [-0.5] * 3
    assert weight[-5:-3].abs().max() == 0 and weight[0] == 0.5


def test_strided_and_fp64_tensors(device: str) -> None:
    x: list[Tensor] = [torch.rand(6, 10, device=device) for _ in range(4)]
    step = [torch.ones((), device=device)]
    plain = AdamWTensors(*([t.clone()] for t in x), step, [0])
    strided = AdamWTensors(*([t.t().contiguous().t()] for t in x), step, [0])
    wide = AdamWTensors(*([t.double()] for t in x), step, [0])
    for tensors in (plain, strided, wide):
        adamw_(tensors, OPTIONS)
    for name in ("weights", "exp_avgs", "exp_avg_sqs"):
        (want,), (a,), (b,) = (getattr(t, name) for t in (plain, strided, wide))
        torch.testing.assert_close(a, want)
        assert b.dtype == torch.float64
        torch.testing.assert_close(b.float(), want)


@pytest.mark.gpu
def test_bf16_weights_are_rounded_to_nearest() -> None:
    """On a GPU alone: the interpreter cuts to bf16."""
    x = [torch.rand(3, BLOCK * NUM_BLOCKS, device="cuda").bfloat16() for _ in range(4)]
    step = [torch.full((), 9.0, device="cuda")]
    got, want = (AdamWTensors(*([t.clone()] for t in x), step, [0]) for _ in range(2))
    adamw_(got, OPTIONS)
    adamw_ref_(want, OPTIONS)
    apart = got.weights[0] != want.weights[0]
    assert apart.float().mean() < 1e-3  # ties of fp32 values that differ in the last bit
    torch.testing.assert_close(got.weights[0], want.weights[0], rtol=2.0**-7, atol=0)


def test_reference_on_a_cpu() -> None:
    """One weight by hand: moments 0.1 and 0.001 times g and g * g, corrected to g and g * g."""
    weight, grad, exp_avg, exp_avg_sq = (torch.tensor([x]) for x in (2.0, 4.0, 0.0, 0.0))
    tensors = AdamWTensors([weight], [grad], [exp_avg], [exp_avg_sq], [torch.ones(())], [0])
    adamw_ref_(tensors, AdamWOptions(lr=0.5, betas=(0.9, 0.999), eps=1.0, weight_decay=0.2))
    assert exp_avg.item() == pytest.approx(0.4) and exp_avg_sq.item() == pytest.approx(0.016)
    assert weight.item() == pytest.approx(2.0 - 0.5 * 0.2 * 2.0 - 0.5 * 4.0 / (4.0 + 1.0))
