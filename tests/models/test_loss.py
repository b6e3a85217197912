import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moecore.models import linear_cross_entropy
from moecore.models.loss import count_labels


def make(n, d, v, dtype=torch.float32, ignored=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=g) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=g)
    labels[torch.rand(n, generator=g) < ignored] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, dtype):
    """Loss and both gradients by F.cross_entropy in the given dtype, times 3 on the way back."""
    h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    loss = F.cross_entropy((h @ w.t()).float() if dtype == torch.bfloat16 else h @ w.t(), labels)
    (3 * loss).backward()
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize(("n", "d", "v"), [(37, 13, 101), (64, 16, 33), (1, 3, 2)])
def test_fp32_equals_cross_entropy(n, d, v, chunk):
    hidden, weight, labels = make(n, d, v, ignored=0.3 if n > 1 else 0.0)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    (3 * loss).backward()
    for got, want in zip(
        (loss, hidden.grad, weight.grad),
        reference(hidden, weight, labels, torch.float64),
        strict=True,
    ):
        assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("chunk", [16, 4096])
def test_bf16_errs_at_most_twice_what_pytorch_errs(chunk):
    hidden, weight, labels = make(256, 64, 307, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    (3 * loss).backward()
    assert loss.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = reference(hidden, weight, labels, torch.float64)
    torch_bf16 = reference(hidden, weight, labels, torch.bfloat16)
    ours = (loss.detach(), hidden.grad, weight.grad)
    for got, plain, want in zip(ours, torch_bf16, exact, strict=True):
        floor = 1e-6 * want.abs().max()
        assert (got - want).norm() <= 2 * (plain - want).norm() + floor
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max() + floor


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_it_errs_at_most_twice_what_pytorch_errs(hidden_dtype):
    hidden, weight, labels = make(256, 64, 307)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    found = {}
    for name in ("ours", "torch"):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            if name == "ours":
                loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=100)
            else:
                loss = F.cross_entropy(F.linear(hidden, weight), labels)
        (3 * loss).backward()
        found[name] = loss.detach(), hidden.grad, weight.grad
    assert found["ours"][0].dtype == weight.grad.dtype == torch.float32
    assert found["ours"][1].dtype == hidden_dtype
    exact = reference(hidden, weight, labels, torch.float64)
    for got, plain, want in zip(found["ours"], found["torch"], exact, strict=True):
        assert (got - want).norm() <= 2 * (plain - want).norm()
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max()
    assert not torch.equal(found["ours"][2], found["ours"][2].bfloat16().float()), "rounded"


def test_gradcheck_in_fp64():
    hidden, weight, labels = make(9, 4, 11, torch.float64)
    fn = lambda h, w: linear_cross_entropy(h, w, labels, chunk_tokens=4)  # noqa: E731
    assert torch.autograd.gradcheck(fn, (hidden, weight))


def test_a_second_derivative_is_refused():
    hidden, weight, labels = make(9, 4, 11, torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(NotImplementedError, match=r"create_graph \(True\) must be False"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("num", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("n", [0, 5])
def test_no_label_counts_gives_zero(n, num):
    hidden, weight, _ = make(n, 4, 8)
    labels = torch.full((n,), -100)
    loss = linear_cross_entropy(hidden, weight, labels, num_tokens=num)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.shape == (n, 4) and not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_tokens_divides_the_sum(as_tensor):
    hidden, weight, labels = make(20, 4, 8)
    total = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    num = torch.tensor(1000) if as_tensor else 1000
    loss = linear_cross_entropy(hidden, weight, labels, num_tokens=num, chunk_tokens=6)
    torch.testing.assert_close(loss, total / 1000, rtol=1e-6, atol=0)
    assert count_labels(labels) == (labels >= 0).sum()


def test_wrong_arguments_are_refused():
    hidden, weight, labels = make(4, 4, 8)
    with pytest.raises(ValueError, match=r"num_tokens \(torch.float32\) must be an integer"):
        linear_cross_entropy(hidden, weight, labels, num_tokens=torch.tensor(4.0))
    with pytest.raises(ValueError, match=r"chunk_tokens \(0\) must be a whole number >= 1"):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"labels_N \(3,\) must have one label for each row"):
        linear_cross_entropy(hidden, weight, labels[:3])
    with pytest.raises(ValueError, match=r"labels_N \(torch.int32\) must be int64"):
        linear_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(ValueError, match=r"weight_VD \(torch.float32\) must have the dtype of"):
        linear_cross_entropy(hidden.bfloat16(), weight, labels)


@pytest.mark.parametrize("label", [-1, 8])
def test_a_label_that_does_not_exist_raises(label):
    hidden, weight, labels = make(4, 4, 8)
    labels[2] = label
    with pytest.raises((RuntimeError, IndexError), match="index"):
        linear_cross_entropy(hidden, weight, labels)


def test_memory_that_nobody_wrote_is_not_read():
    """The first chunk's product fills d_weight instead of adding to it."""
    hidden, weight, labels = make(20, 4, 8)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=6).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == 2000.0 and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


class Recorder(TorchDispatchMode):
    """Counts matrix products and remembers the largest output."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_whole(dtype):
    n, d, v, chunk = 512, 8, 64, 32
    hidden, weight, labels = make(n, d, v, dtype)
    with Recorder() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk).backward()
    assert seen.largest == max(chunk * v, n * d)
    assert seen.products == 3 * n // chunk  # nothing is computed twice


@pytest.mark.parametrize(("need_hidden", "need_weight"), [(1, 0), (0, 1), (0, 0)])
def test_only_needed_gradients_are_computed(need_hidden, need_weight):
    hidden, weight, labels = make(64, 8, 16)
    hidden.requires_grad_(bool(need_hidden))
    weight.requires_grad_(bool(need_weight))
    with Recorder() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    assert seen.products == 4 * (1 + need_hidden + need_weight)
    assert loss.requires_grad == bool(need_hidden or need_weight)
    if not loss.requires_grad:
        with torch.no_grad(), Recorder() as seen:
            linear_cross_entropy(*make(64, 8, 16), chunk_tokens=16)
        assert seen.products == 4
    else:
        loss.backward()
        _, h_grad, w_grad = reference(hidden, weight, labels, torch.float64)
        for param, want in ((hidden, h_grad), (weight, w_grad)):
            if param.requires_grad:
                assert (param.grad * 3 - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.gpu
def test_bf16_on_cuda_equals_fp64():
    hidden, weight, labels = make(300, 64, 1000, torch.bfloat16)
    h, w = (t.detach().cuda().requires_grad_() for t in (hidden, weight))
    loss = linear_cross_entropy(h, w, labels.cuda(), chunk_tokens=128)
    (3 * loss).backward()
    exact = reference(hidden, weight, labels, torch.float64)
    plain = reference(hidden, weight, labels, torch.bfloat16)
    for got, same, want in zip((loss.detach(), h.grad, w.grad), plain, exact, strict=True):
        error = (got.cpu() - want).norm()
        assert error <= 2 * (same - want).norm() + 1e-6 * want.abs().max()


@pytest.mark.gpu
def test_peak_memory_on_cuda_is_one_chunk_and_the_gradients():
    n, d, v, chunk = 1024, 64, 65536, 256
    hidden, weight, labels = make(n, d, v, torch.bfloat16)
    h, w, labels = (t.detach().cuda() for t in (hidden, weight, labels))
    h.requires_grad_(), w.requires_grad_()
    linear_cross_entropy(h, w, labels, chunk_tokens=chunk)  # the workspace of products
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(h, w, labels, chunk_tokens=chunk)
    peak = torch.cuda.max_memory_allocated() - before
    assert loss.isfinite() and peak <= 1.02 * (chunk * v * 6 + d * v * 4 + n * d * 2)


@pytest.mark.gpu
def test_a_label_that_does_not_exist_is_nan_on_cuda():
    hidden, weight, labels = make(4, 4, 8)
    labels[2] = 8
    assert linear_cross_entropy(hidden.cuda(), weight.cuda(), labels.cuda()).isnan()
