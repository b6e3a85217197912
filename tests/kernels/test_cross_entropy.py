import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels import cross_entropy as ce
from moecore.models import loss as loss_file
from tests.kernels.conftest import check_twice, check_without_host, poison

NAN, INF = float("nan"), float("inf")


def inputs(C, V, *, device="cpu", dtype=torch.float32, ignored=0.3) -> tuple[Tensor, Tensor]:
    """Logits between two rows of NaN, and labels of which some are ignored."""
    generator = torch.Generator(device).manual_seed(C * 31 + V)
    where: dict[str, Any] = dict(generator=generator, device=device)
    guarded = torch.full((C + 2, V), NAN, device=device, dtype=dtype)
    guarded[1:-1] = 4 * torch.randn(C, V, **where)
    labels_C = torch.randint(0, V, (C,), **where)
    labels_C[torch.rand(C, **where) < ignored] = ce.IGNORE_INDEX
    return guarded[1:-1], labels_C


def by_autograd(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """F.cross_entropy's sum and gradient, in the dtype of the logits."""
    x_CV = logits_CV.clone().requires_grad_()
    loss = F.cross_entropy(x_CV, labels_C, reduction="sum")
    (d_logits_CV,) = torch.autograd.grad(loss, x_CV)
    return loss.detach(), d_logits_CV


def test_known_values() -> None:
    x = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0], [NAN, 0.0]], dtype=torch.float64)
    loss, d = ce.cross_entropy_(x, torch.tensor([0, 1, ce.IGNORE_INDEX]), torch.float64)
    assert d is not None and loss.dtype == d.dtype == torch.float64
    torch.testing.assert_close(loss, torch.tensor(math.log(4) + math.log(2), dtype=torch.float64))
    wanted = [[-0.75, 0.75], [0.5, -0.5], [0.0, 0.0]]
    torch.testing.assert_close(d, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("C", "V"), [(0, 5), (1, 1), (9, 7), (4, 100)])
def test_reference_equals_pytorch(C: int, V: int, dtype: torch.dtype) -> None:
    x, labels = inputs(C, V, dtype=dtype)
    exact_loss, exact_d = by_autograd(x.double(), labels)
    no_gradient = ce.cross_entropy_ref_(x.clone(), labels, None)
    loss, d = ce.cross_entropy_ref_(x.clone(), labels, dtype)
    assert d is not None and d.dtype == dtype
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(no_gradient[0], loss) and no_gradient[1] is None
    tolerance = dict(rtol=4 * torch.finfo(loss.dtype).eps, atol=1e-5)
    torch.testing.assert_close(loss.double(), exact_loss, **tolerance)
    torch.testing.assert_close(d.double(), exact_d, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_reference_refuses_labels_out_of_range() -> None:
    for label in (-1, 4, 1 << 40):
        with pytest.raises((RuntimeError, IndexError), match="index"):
            ce.cross_entropy_(torch.zeros(2, 4), torch.tensor([0, label]), None)


TINY = [(0, 7), (1, 1), (5, 1), (1, 7), (9, 7), (3, 64), (7, 100), (13, 1000), (4, 4099)]
LONG = [(2, 50257), (1, 16384), (1, 16388)]  # several steps of a row
REAL = {"qwen3-30b": (2048, 151936), "gpt-2": (1023, 50257), "deepseek-v3": (511, 129280)}
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(("C", "V"), TINY + LONG)
def test_kernel_is_as_good_as_pytorch(device: str, C: int, V: int) -> None:
    # The interpreter cuts fp32 to bf16 instead of rounding, so bf16 is for GPUs.
    pairs = [(FP32, FP32), (FP32, FP16), (FP16, FP16), (FP16, FP32)]
    if device == "cuda":
        pairs += [(FP32, BF16), (BF16, BF16)]
    for dtype, gradient_dtype in pairs:
        check_against_fp64(device, C, V, dtype, gradient_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_kernel_is_as_good_as_pytorch_at_real_sizes(name: str) -> None:
    poison()
    check_against_fp64("cuda", *REAL[name], FP32, BF16)


def check_against_fp64(device, C, V, dtype, gradient_dtype) -> None:
    x, labels = inputs(C, V, device=device, dtype=dtype)
    kept = x.clone()
    loss, d = ce.cross_entropy_(x.clone(), labels, gradient_dtype)
    assert d is not None and (loss.dtype, d.dtype, d.shape) == (FP32, gradient_dtype, x.shape)
    # Another kernel, in which the compiler may fuse other products and sums.
    torch.testing.assert_close(ce.cross_entropy_(x, labels, None)[0], loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept)  # without a gradient nothing is written
    assert not d[labels == ce.IGNORE_INDEX].any()
    exact_loss, exact_d = by_autograd(x.double(), labels)
    plain_loss, plain_d = by_autograd(x.float(), labels)
    error, plain_error = ((t.double() - exact_loss).abs() for t in (loss, plain_loss))
    assert float(error) <= 2 * float(plain_error) + 1e-6 * float(exact_loss)
    floor = torch.finfo(gradient_dtype).eps / 4
    check_twice(d, plain_d.to(gradient_dtype), exact_d, floor=floor)


def over_parts(x_CV, labels_C, dtype, num_ranks) -> tuple[Tensor, Tensor]:
    """Loss and gradient of ranks that hold parts of each row, which meet in one exchange."""
    sent: list[Tensor] = []
    found: list[Any] = []
    for meets in (False, True):  # first what each rank sends, then what it makes of all

        def exchange(statistics: Tensor, group: Any, meets: bool = meets) -> Tensor:
            sent.append(statistics)
            return torch.cat(sent[:num_ranks] if meets else [statistics] * num_ranks)

        with patch.object(loss_file, "all_gather_rows", exchange):
            for rank, part in enumerate(x_CV.clone().chunk(num_ranks, 1)):
                group: Any = SimpleNamespace(size=lambda: num_ranks, rank=lambda rank=rank: rank)
                rows = loss_file.combine_row_statistics(part.contiguous(), labels_C, group)
                gradient = ce.softmax_gradient_(part, *rows[:3], dtype)
                made = -rows.compute_label_log_probs().sum(), gradient
                found += [made] if meets else []
    losses, gradients = zip(*found, strict=True)
    assert all(torch.equal(loss.nan_to_num(), losses[0].nan_to_num()) for loss in losses)
    return losses[0], torch.cat(gradients, 1)


@pytest.mark.parametrize(
    ("C", "V", "num_ranks"), [(9, 8, 4), (7, 303, 3), (2, 50256, 2), (0, 6, 2)]
)
def test_parts_of_rows_are_as_good_as_pytorch(device: str, C: int, V: int, num_ranks: int) -> None:
    for dtype, gradient_dtype in ((FP32, FP32), (FP32, FP16), (FP16, FP16)):
        x, labels = inputs(C, V, device=device, dtype=dtype)
        if C > 2:
            labels[1] = V // num_ranks - 100  # seen from the second rank it is -100
            labels[1].clamp_(min=0)
        exact_loss, exact_d = by_autograd(x.double(), labels)
        plain_loss, plain_d = by_autograd(x.float(), labels)
        loss, d = over_parts(x, labels, gradient_dtype, num_ranks)
        assert d.dtype == gradient_dtype and loss.dtype == FP32
        error, plain_error = ((t.double() - exact_loss).abs() for t in (loss, plain_loss))
        assert float(error) <= 2 * float(plain_error) + 1e-6 * float(exact_loss)
        floor = torch.finfo(gradient_dtype).eps / 4
        check_twice(d, plain_d.to(gradient_dtype), exact_d, floor=floor)


def test_parts_of_rows_show_labels_out_of_range(device: str) -> None:
    x, _ = inputs(6, 8, device=device)
    labels = torch.tensor([0, 8, -1, 6, 1 << 40, ce.IGNORE_INDEX], device=device)
    loss, d = over_parts(x, labels, FP32, 2)
    assert loss.isnan() and d.isnan().all(1).tolist() == [False, True, True, False, True, False]
    assert not d[5].any()


def test_statistics_of_special_rows(device: str) -> None:
    x = torch.tensor([[0.0, math.log(3.0)], [NAN, 0.0], [5.0, 5.0], [1.0, INF]], device=device)
    labels = torch.tensor([1, ce.IGNORE_INDEX, 2, 0], device=device)
    found = ce.softmax_statistics(x, labels)
    third = 4.0 / 3.0
    assert found[:3].flatten().tolist() == pytest.approx(
        [math.log(3.0), third, math.log(3.0), 0, 1, 0, 5, 2, 0]
    )
    assert found[3].isnan().any() or found[3].isinf().any()


def test_kernel_reads_no_ignored_row(device: str) -> None:
    for C in (1, 6):
        x, labels = inputs(C, 37, device=device, ignored=1.0)
        x.fill_(NAN)
        loss, d = ce.cross_entropy_(x, labels, FP16)
        assert loss == 0 and d is not None and not d.any()


ROWS = {
    "signed zeros": [0.0, -0.0, -0.0, 0.0],
    "one -inf": [1.0, -INF, 2.0, 0.5],
    "-inf at the label": [-INF, 1.0, 2.0, 0.5],
    "all but one -inf": [3.0, -INF, -INF, -INF],
    "all -inf": [-INF] * 4,
    "+inf": [1.0, INF, 2.0, 0.5],
    "+inf at the label": [INF, 1.0, 2.0, 0.5],
    "NaN": [1.0, NAN, 2.0, 0.5],
    "NaN at the label": [NAN, 1.0, 2.0, 0.5],
    "NaN and inf": [NAN, INF, -INF, 0.5],
    "largest numbers": [3.4e38, -3.4e38, 0.0, 3.4e38],
    "lowest number": [-3.4028234663852886e38] * 4,
    "far apart": [-1e4, 1e4, 0.0, 1e3],
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_kernel_treats_special_values_as_the_reference(device: str) -> None:
    x = torch.tensor(list(ROWS.values()), device=device)
    zeros = torch.zeros(len(ROWS), dtype=torch.int64, device=device)
    found = [ce.cross_entropy_(row[None].clone(), zeros[:1], FP32) for row in x]
    wanted = [ce.cross_entropy_ref_(row[None].clone(), zeros[:1], FP32) for row in x]
    for name, ours, theirs in zip(ROWS, found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)
    _, together = ce.cross_entropy_(x.clone(), zeros, FP32)  # one row spoils no other
    torch.testing.assert_close(
        together, torch.cat([d for _, d in found if d is not None]), rtol=0, atol=0, equal_nan=True
    )


def test_kernel_shows_labels_out_of_range(device: str) -> None:
    x, _ = inputs(6, 7, device=device)
    labels = torch.tensor([0, 7, -1, 6, 1 << 40, ce.IGNORE_INDEX], device=device)
    loss, d = ce.cross_entropy_(x.clone(), labels, FP16)
    assert loss.isnan() and d is not None
    wrong = torch.tensor([False, True, True, False, True, False], device=device)
    assert d[wrong].isnan().all()
    labels[wrong] = ce.IGNORE_INDEX
    loss, expected = ce.cross_entropy_(x, labels, FP16)
    assert loss.isfinite() and expected is not None and torch.equal(d[~wrong], expected[~wrong])


def test_kernel_reuses_memory_of_its_own_dtype_alone(device: str) -> None:
    for dtype, same in ((FP32, True), (FP16, False)):
        x, labels = inputs(5, 12, device=device)
        kept = x.clone()
        _, d = ce.cross_entropy_(x, labels, dtype)
        assert d is not None and (d.data_ptr() == x.data_ptr()) is same
        assert torch.equal(x, kept) is not same


def test_kernel_gives_a_row_the_same_bits_anywhere_and_always(device: str) -> None:
    x, labels = inputs(9, 1000, device=device, ignored=0.0)
    loss, d = ce.cross_entropy_(x.clone(), labels, FP32)
    again, d_again = ce.cross_entropy_(x.clone(), labels, FP32)
    assert d is not None and d_again is not None
    assert torch.equal(loss, again) and torch.equal(d, d_again)
    for i in range(9):
        _, d_row = ce.cross_entropy_(x[i : i + 1].clone(), labels[i : i + 1], FP32)
        assert d_row is not None and torch.equal(d_row, d[i : i + 1])


def test_kernel_reads_strided_input(device: str) -> None:
    x, labels = inputs(5, 12, device=device)
    strided = x.T.contiguous().T, labels.repeat(2, 1).T[:, 0]
    expected, found = ce.cross_entropy_(x.clone(), labels, FP16), ce.cross_entropy_(*strided, FP16)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_plain_blocks_do_not_change_fp32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecore.kernels.cross_entropy.can_use_kernel", lambda _: False)
    x, labels = inputs(6, 128, device="cpu")
    before = x.clone()
    ce.cross_entropy_blocks(x, labels, power_of_two=True)
    high, total, _ = ce.softmax_statistics(x, labels).unbind(1)
    ce.softmax_gradient_blocks(x, labels, high, total, power_of_two=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("V", [128, 1152, 16512])  # one step of a row, several
def test_blocks_are_the_gradient_rounded_once(device: str, V: int, power_of_two: bool) -> None:
    dtype = BF16 if device == "cuda" else FP16
    x, labels = inputs(6, V, device=device, dtype=dtype)
    kept, how = x.clone(), dict(power_of_two=power_of_two)
    loss, blocks = ce.cross_entropy_blocks(x, labels, **how)
    torch.testing.assert_close(
        loss, ce.cross_entropy_(x.clone(), labels, None)[0], rtol=1e-6, atol=0
    )
    high, total, _ = ce.softmax_statistics(x, labels).unbind(1)
    of_parts = ce.softmax_gradient_blocks(x, labels, high, total, **how)
    assert torch.equal(x, kept)
    _, exact_CV = by_autograd(x.double(), labels)
    exact = exact_CV.nan_to_num(0).unflatten(1, (-1, 128))
    for found in (blocks, of_parts):
        scales_CB, largest_CB = found.scales.T[:6].double(), exact.abs().amax(2) / 448
        least_CB = largest_CB.clamp(min=2.0**-126)
        assert (scales_CB >= least_CB * (1 - 1e-5)).all()
        assert (scales_CB <= least_CB * (2 if power_of_two else 1) * (1 + 1e-5)).all()
        assert not power_of_two or (scales_CB.frexp().mantissa == 0.5).all()
        ours = found.values.double().unflatten(1, (-1, 128)) * scales_CB[..., None]
        step = torch.maximum(exact.abs() * 2**-4, scales_CB[..., None] * 2**-10)
        assert ((ours - exact).abs() <= step * (1 + 1e-4)).all()
    assert not blocks.values.float()[labels == ce.IGNORE_INDEX].any()  # CUDA indexes no FP8


def test_op_tells_the_truth_to_the_compiler(device: str) -> None:
    op = torch.ops.moecore.cross_entropy_.default
    x, labels = inputs(5, 12, device=device)
    torch.library.opcheck(op, (x.clone(), labels, None, None, True, True))
    torch.library.opcheck(op, (x.clone(), labels, None, None, False, True))
    out = torch.zeros_like(x, dtype=FP16), None
    torch.library.opcheck(op, (x.clone(), labels, *out, False, True))
    statistics, gradient = torch.ops.moecore.softmax_statistics, torch.ops.moecore.softmax_gradient_
    torch.library.opcheck(statistics.default, (x.clone(), labels))
    whole = labels, x.amax(1), x.logsumexp(1)
    torch.library.opcheck(gradient.default, (x.clone(), *whole, None, None, True))
    torch.library.opcheck(gradient.default, (x.clone(), *whole, torch.zeros_like(x), None, True))
    compiled = torch.compile(ce.cross_entropy_, fullgraph=True, backend="aot_eager")
    for dtype in (FP32, FP16, None):
        found, expected = (f(x.clone(), labels, dtype) for f in (compiled, ce.cross_entropy_))
        assert torch.equal(found[0], expected[0])
        assert dtype is None or torch.equal(found[1], expected[1])


@pytest.mark.gpu
def test_no_sync_same_bits_capture_and_compile() -> None:
    x, labels = inputs(300, 4096, device="cuda")

    def run(x: Tensor) -> list[Tensor]:
        loss, d = ce.cross_entropy_(x, labels, BF16)
        assert d is not None
        return [loss, d]

    expected = check_without_host(run, (x,))
    compiled = torch.compile(run, fullgraph=True)
    assert torch.equal(compiled(x)[1], expected[1])


@pytest.mark.gpu
def test_kernel_addresses_past_2_to_the_31() -> None:
    C, V = 14200, 151936
    x = torch.zeros(C, V, device="cuda")
    x[-1] = torch.randn(V, device="cuda")
    labels = torch.full((C,), 5, device="cuda")
    last = x[-1:].clone()
    loss, d = ce.cross_entropy_(x, labels, BF16)
    row_loss, row_d = ce.cross_entropy_(last, labels[:1], BF16)
    assert d is not None and row_d is not None and torch.equal(d[-1:], row_d)
    expected = (C - 1) * math.log(V) + float(row_loss)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
