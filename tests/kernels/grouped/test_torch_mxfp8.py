"""MXFP8 products by torch on sm_100: a fake of torch's product reads scales by their definition."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels import common
from moecore.kernels.experts import contract, quantised_products
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.grouped import block_scaled, torch_mxfp8
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.grouped.torch_mxfp8 import swizzle_scales
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.scaling import Blocks
from moecore.precision import emulated
from moecore.precision.apply import make_linear_products
from moecore.precision.linear import LinearCall
from tests.kernels.experts.test_emulated_products import options_of
from tests.kernels.experts.test_expert_mlp import make
from tests.kernels.experts.test_fp8_products import OUTPUTS, run

RECIPE = Recipe(scaling="mxfp8")
COUNTS = {"uneven": [5, 0, 131, 1, 0, 64], "one": [0, 0, 257], "none": [0, 0], "full": [128, 256]}
SPARE = 9  # rows of no expert
SIZES = [(96, 160), (32, 32), (160, 512)]  # N and K


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def widen(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * (scales.double() - 127).exp2().float().repeat_interleave(32, -1)


class TorchProduct:
    """Stands for `torch._scaled_grouped_mm` on sm_100; results that it does not write are NaN."""

    def __init__(self) -> None:
        self.real, self.shapes = torch_mxfp8.scaled_grouped_mm, []

    def __call__(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *, offs: Tensor, **how: Any):
        on_meta = (t.to("meta") for t in (a, b, sa, sb))
        out = torch.full_like(self.real(*on_meta, offs=offs, **how), torch.nan, device=a.device)
        self.shapes.append(tuple(out.shape))
        assert a.is_contiguous() and b.mT.is_contiguous() and sa.is_contiguous()
        assert not any(n % 16 for n in (a.shape[1], *b.shape[-2:]))  # of GroupedBlas.cpp
        assert sa.shape[0] >= a.shape[0] and (b.dim() == 3 or sb.shape[0] >= b.shape[1])
        b, rows, columns = b.mT, 0, 0
        for i, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
            if end == start:  # not written
                continue
            if b.dim() == 3:
                num_columns = round_up(a.shape[1] // 32, 4)
                at = rows * num_columns, i * round_up(b.shape[1], 128) * num_columns
                ours, theirs, to = a[start:end], b[i], out[start:end]
                rows += round_up(end - start, 128)
            else:
                assert end - start > 0 and not (end - start) % 32 and end <= a.shape[1]
                at = tuple(round_up(t.shape[0], 128) * columns for t in (a, b))
                ours, theirs, to = a[:, start:end], b[:, start:end], out[i]
                columns += round_up((end - start) // 32, 4)
            wide = (self.read(*p) for p in ((ours, sa, at[0]), (theirs, sb, at[1])))
            to.copy_(next(wide) @ next(wide).T)
        return out

    @staticmethod
    def read(values: Tensor, scales: Tensor, start: int) -> Tensor:
        """Widen values with scales from an address on, in tiles of 128 x 4."""
        (M, K), flat = values.shape, scales.contiguous().view(torch.uint8).flatten()
        r, c = torch.arange(M)[:, None], torch.arange(K // 32)[None, :]
        tile = r // 128 * (round_up(K // 32, 4) // 4) + c // 4
        return widen(values, flat[start + tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4])


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> TorchProduct:
    fake = TorchProduct()
    monkeypatch.setattr(torch_mxfp8, "scaled_grouped_mm", fake)
    monkeypatch.setattr(block_scaled, "has_torch_mxfp8", lambda _: True)
    return fake


def make_blocks(*shape: int) -> Blocks:
    """Values of about 1, and scales of different sizes."""
    values = torch.randn(shape).clamp(-4, 4).to(FP8)
    scales = torch.randint(120, 134, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    return Blocks(values, scales, "packed")


def test_scales_are_in_tiles_of_128_rows_and_4_columns() -> None:
    scales = torch.randint(1, 256, (2, 200, 7), dtype=torch.uint8)
    tiles = swizzle_scales(scales)
    assert tiles.shape == (2, 2, 2, 512) and tiles.count_nonzero() == scales.numel()
    for matrix in range(2):
        for r in range(200):
            for c in range(7):
                byte = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
                assert tiles[matrix, r // 128, c // 4, byte] == scales[matrix, r, c]
    one_column = swizzle_scales(torch.arange(128, dtype=torch.uint8)[:, None]).flatten()
    assert one_column[:20:4].tolist() == [0, 32, 64, 96, 1]


@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_rows_and_matrices(counts: list[int], N: int, K: int, product: TorchProduct) -> None:
    torch.manual_seed(0)
    a, b = make_blocks(sum(counts) + SPARE, K), make_blocks(len(counts), N, K)
    offsets_e = torch.tensor(counts).cumsum(0).int()
    out = block_scaled_gemm(a, b, offsets_e, RECIPE, torch.float32)
    assert out.dtype == torch.float32 and out.shape == (sum(counts) + SPARE, N)
    wide_a, wide_b = widen(a.values, a.scales), widen(b.values, b.scales)
    for i, (start, end) in enumerate(pairwise([0, *offsets_e.tolist()])):
        expected = wide_a[start:end] @ wide_b[i].T
        assert torch.equal(out[start:end], expected.bfloat16().float())
    assert product.shapes == [tuple(out.shape)]


@pytest.mark.parametrize(("N", "M"), SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_weight_gradients(counts: list[int], N: int, M: int, product: TorchProduct) -> None:
    torch.manual_seed(0)
    offsets_e = torch.tensor(counts).cumsum(0).int()
    padded = pad_rows(offsets_e, sum(counts) + SPARE, 32)
    x, y = make_blocks(M, padded.num_rows), make_blocks(N, padded.num_rows)
    before = torch.randn(len(counts), M, N)
    out = before.clone()
    target: Any = dict(out=out, accumulate=True, scale=0.5)
    assert block_scaled_wgrad(x, y, padded.offsets_e, RECIPE, **target) is out
    wide_x, wide_y = widen(x.values, x.scales), widen(y.values, y.scales)
    for i, (start, end) in enumerate(pairwise([0, *padded.offsets_e.tolist()])):
        grad = (wide_x[:, start:end] @ wide_y[:, start:end].T).bfloat16().float()
        assert torch.equal(out[i], before[i].add(grad, alpha=0.5))
    new = block_scaled_wgrad(x, y, padded.offsets_e, RECIPE)
    assert new.dtype == torch.float32 and not new.isnan().any()


@pytest.fixture
def on_sm100(monkeypatch: pytest.MonkeyPatch, product: TorchProduct) -> None:
    for module in (quantised_products, contract, emulated):
        monkeypatch.setattr(module, "has_block_scaled_kernels", lambda *_: True)


def test_experts_have_the_results_of_the_emulation(request: pytest.FixtureRequest) -> None:
    """Both round sums in fp32 to bf16; one of them sums the values in another order."""
    leaves, ids = make("swiglu", S=70, D=64, F=96, dtype=torch.bfloat16)
    ids[ids == 2] = -1  # an expert without rows
    expected = run(leaves, ids, options_of(RECIPE))
    request.getfixturevalue("on_sm100")
    found = run(leaves, ids, options_of(RECIPE))
    for name in OUTPUTS:
        wrong = (found[name].double() - expected[name].double()).norm()
        assert wrong <= 2e-3 * expected[name].double().norm(), (name, wrong)
    assert len(request.getfixturevalue("product").shapes) == 4 + 2


def test_linears_have_the_results_of_the_emulation(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(n, dtype=torch.bfloat16) for n in ((70, 96), (160, 96), (70, 160)))

    def compute() -> list[Tensor]:
        leaves = [t.requires_grad_() for t in (x, weight)]
        y = make_linear_products(RECIPE)(*leaves, None)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    expected = compute()
    request.getfixturevalue("on_sm100")
    for ours, theirs in zip(compute(), expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= 2e-3 * theirs.double().norm()
    target, call = GradTarget(dtype=torch.float32), LinearCall(recipe=RECIPE, dtype=torch.float32)
    grad = emulated.EmulatedLinearProducts.compute_weight_grad(dy, x.detach(), call, target)
    torch.testing.assert_close(grad.bfloat16(), expected[2], rtol=2**-7, atol=0.05)
    assert len(request.getfixturevalue("product").shapes) == 4


@pytest.mark.parametrize(
    ("capability", "library", "has_mxfp8"),
    [
        ((10, 0), "USE_FBGEMM_GENAI=1", True),  # torch 2.11
        ((10, 0), "USE_MSLK=1", True),  # torch 2.13
        ((10, 0), "USE_CUDA=ON", False),
        ((10, 3), "USE_MSLK=1", False),
        ((12, 0), "USE_MSLK=1", False),
        ((9, 0), "USE_MSLK=1", False),
    ],
)
def test_which_devices_multiply_by_torch(capability, library, has_mxfp8, monkeypatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(common, "HAS_TRITON", True)
    monkeypatch.setattr(common, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.__config__, "show", lambda: library)
    monkeypatch.setattr(common, "_get_capability", common._get_capability.__wrapped__)
    monkeypatch.setattr(common, "has_torch_mxfp8", common.has_torch_mxfp8.__wrapped__)
    assert common.has_torch_mxfp8(device) == has_mxfp8
    assert not common.has_torch_mxfp8(torch.device("cpu"))
    assert not common.has_torch_mxfp8(torch.device("meta"))
