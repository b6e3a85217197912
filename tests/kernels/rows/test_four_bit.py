import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.rows.four_bit import FORMATS, NF4, dequantise, dequantise_ref, quantise
from moecore.kernels.rows.scaling import Blocks

KINDS: list[Any] = list(FORMATS)
kinds = pytest.mark.parametrize("kind", KINDS)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_definition(blocks: Blocks) -> Tensor:
    """A value at a time, in Python's floats, which are wider than what is rounded to."""
    found = []
    values, scales = blocks.values.flatten().tolist(), blocks.scales.flatten().tolist()
    for i, byte in enumerate(values):
        if blocks.kind == "nf4":
            pair = [NF4[byte >> 4], NF4[byte & 15]]
            scale = scales[2 * i // 64]
        else:
            codes = [byte & 15, byte >> 4]
            pair = [E2M1[code % 8] * (-1.0) ** (code // 8) for code in codes]
            if blocks.kind == "mxfp4":
                scale = 2.0 ** (scales[2 * i // 32] - 127)
            else:
                row, column = divmod(2 * i, 2 * blocks.values.shape[-1])
                of_row = blocks.scales.view(-1, blocks.scales.shape[-1])[row].tolist()
                scale = e4m3(of_row[column // 16]) * 2.0 ** (of_row[-1] - 127)
        found += [value * scale for value in pair]
    return torch.tensor(found, dtype=torch.float64).view(*blocks.values.shape[:-1], -1)


def e4m3(byte: int) -> float:
    """The value of 8 bits: a sign, 4 bits of exponent, 3 bits of fraction."""
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    wide = (8 + fraction) / 8 * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
    return sign * wide


def random_blocks(kind: Any, rows: int, groups: int, device: str = "cpu") -> Blocks:
    """All 256 bytes, as far as they have room, and scales of many sizes, zero among them."""
    generator = torch.Generator().manual_seed(rows)
    fmt = FORMATS[kind]
    values = torch.randperm(rows * groups * fmt.group // 2, generator=generator) % 256
    scales = torch.randint(100, 150, (rows, groups), generator=generator)
    scales[0, 0] = 0
    if kind == "nf4":
        wide = torch.rand(rows, groups, generator=generator) * torch.exp2(scales - 127.0)
        scales = wide.where(scales > 0, 0)
    if fmt.has_row_scale:  # all scales of groups that quantising can have, 0 to 448
        of_groups = torch.randint(0, 127, (rows, groups), generator=generator)
        scales = torch.cat([of_groups, scales[:, :1]], 1)
    blocks = Blocks(values.view(rows, -1).byte(), scales.to(fmt.scale_dtype), kind)
    return Blocks(blocks.values.to(device), blocks.scales.to(device), kind)


@kinds
def test_values_by_definition(kind: Any) -> None:
    blocks = random_blocks(kind, 13, 5 if kind != "nvfp4" else 20)
    assert blocks.values.flatten().bincount(minlength=256).min() > 0
    wanted = by_definition(blocks)
    found = dequantise(blocks, torch.float32)
    assert torch.equal(found, wanted.float())  # a product of two of 24 bits, rounded once
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantise(blocks, dtype), found.to(dtype))


def test_codes_are_quantiles_of_the_normal_distribution() -> None:
    """As arXiv:2305.14314 makes them: of 8 and 9 quantiles, without the zero that both have."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083  # (1 - 1/30 + 1 - 1/32) / 2
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    wanted = torch.cat((positive, negative, torch.zeros(1))).sort().values
    assert torch.allclose(torch.tensor(NF4), wanted / wanted.max(), atol=2e-6)


@kinds
def test_nearest_codes(kind: Any) -> None:
    fmt, generator = FORMATS[kind], torch.Generator().manual_seed(0)
    x = torch.randn(3, 4 * fmt.group, generator=generator)
    x *= torch.tensor([1.0, 1e-4, 300.0])[:, None]
    x[1, : fmt.group] = 0
    blocks, groups = quantise(x, kind), x.view(-1, fmt.group)
    amax = groups.abs().amax(1)
    if kind == "nf4":
        scales = amax
        assert torch.equal(blocks.scales.flatten(), amax)
    elif kind == "nvfp4":
        largest = x.abs().amax(1).tolist()
        of_rows = [2.0 ** math.ceil(math.log2(a / 6 / 448)) if a else 0 for a in largest]
        row_G = torch.tensor(of_rows).repeat_interleave(4)
        assert torch.equal(blocks.scales[:, -1].float().sub(127).exp2(), torch.tensor(of_rows))
        of_groups = (amax / 6 / row_G).to(torch.float8_e4m3fn).float()
        stored = blocks.scales[:, :-1].view(torch.float8_e4m3fn).float()
        assert torch.equal(stored.flatten(), of_groups)
        assert ((stored.amax(1) >= 224) & (stored.amax(1) <= 448)).all()
        scales = of_groups * row_G
    else:
        scales = torch.tensor([2.0 ** (math.floor(math.log2(a)) - 2) if a else 0 for a in amax])
    wanted = scales[:, None, None] * torch.tensor(fmt.values)
    errors = (groups[..., None] - wanted).abs().amin(-1)
    found = (dequantise(blocks, torch.float32).view_as(groups) - groups).abs()
    assert torch.allclose(found, errors, rtol=1e-5, atol=1e-12)
    # bitsandbytes' kernels take the lower code at a border, and a group of zeros stays one.
    assert not dequantise(blocks, torch.float32)[1, : fmt.group].any()
    borders, values = torch.zeros(64), sorted(set(fmt.values))
    if kind == "nvfp4":  # all groups of the row then have one scale
        borders[::16] = max(fmt.values)
    halves = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    places = [i for i in range(64) if not borders[i]][: len(halves)]
    borders[places] = torch.tensor(halves)
    borders[-1] = max(values)
    decoded = dequantise(quantise(borders[: max(fmt.group, 32)], kind), torch.float32)[places]
    assert torch.equal(decoded, torch.tensor(values)[:-1])


@pytest.mark.gpu
@kinds
def test_gpus_quantise_to_the_same_bits(kind: Any) -> None:
    """Values of all sizes, rows and groups of zeros, and the ends of bf16 and fp32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 384, generator=generator)
    x *= torch.exp2(torch.randint(-120, 120, (512, 1), generator=generator).float())
    x[0], x[1, :64], x[2], x[3] = 0, 0, torch.finfo(torch.float32).tiny, 3e38
    for values in (x, x.bfloat16(), torch.randn(384, 512, generator=generator).t()):
        wanted, found = quantise(values, kind), quantise(values.cuda(), kind)
        for one, other in zip(found.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(one.cpu(), other)
        again = dequantise(found, torch.bfloat16).cpu()
        assert torch.equal(
            again.nan_to_num(7), dequantise_ref(wanted, torch.bfloat16).nan_to_num(7)
        )


def test_borders_are_bitsandbytes() -> None:
    """Of `dQuantizeNF4` in its kernels.cu, which takes the higher code above a border."""
    wanted = [
        *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
        *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767),
        *(0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683),
        *(0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
    ]
    x = torch.ones(15, 64)
    x[:, 0] = torch.tensor(wanted) - 1e-5
    x[:, 1] = torch.tensor(wanted) + 1e-5
    codes = quantise(x, "nf4").values[:, 0].tolist()  # the first value is in the high bits
    assert [(byte >> 4, byte & 15) for byte in codes] == list(itertools.pairwise(range(16)))


@kinds
def test_values_of_the_format_are_kept(kind: Any) -> None:
    """A second rounding changes nothing, as when a file's MXFP4 comes through bf16."""
    blocks = random_blocks(kind, 7, 3)
    if kind == "nvfp4":  # a group's largest value is 6, and a row's largest scale above 224
        blocks.values[:, ::8], blocks.scales[:, 0] = 0x17, 125
    wide = dequantise(blocks, torch.float32)
    dtype = torch.float32 if kind == "nf4" else torch.bfloat16
    again = dequantise(quantise(wide.to(dtype), kind), torch.float32)
    assert torch.allclose(again, wide, rtol=1e-6 if kind == "nf4" else 0, atol=0)


def test_bits_of_a_value() -> None:
    assert [FORMATS[kind].bits for kind in ("nf4", "mxfp4", "nvfp4")] == [4.5, 4.25, 4.5]
    for kind in KINDS:
        blocks = random_blocks(kind, 2, 3)
        numel = 2 * blocks.values.numel()
        num_bytes = sum(t.nbytes for t in blocks.tensors()) - 2 * FORMATS[kind].has_row_scale
        assert num_bytes * 8 == FORMATS[kind].bits * numel


@kinds
@pytest.mark.parametrize("shape", [(1, 1), (13, 5), (3, 43), (1, 64), (5, 13)], ids=str)
def test_kernel_has_the_references_bits(kind: Any, shape: tuple[int, int], device: str) -> None:
    pytest.importorskip("triton", reason="the kernel is compared with its reference")
    blocks = random_blocks(kind, *shape, device=device)
    if kind == "mxfp4":
        ends = torch.tensor([0, 1, 254, 255], dtype=torch.uint8, device=device)
        blocks.scales.view(-1)[-4:] = ends[: blocks.scales.numel()]
    # The interpreter cuts fp32 to bf16 instead of rounding, so bf16 is for GPUs.
    for dtype in [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda"):
        wanted, found = dequantise_ref(blocks, dtype), dequantise(blocks, dtype)
        assert found.is_contiguous() and found.dtype == dtype
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    columns = [0, -1] if FORMATS[kind].has_row_scale else [0]
    views = Blocks(blocks.values[:, : FORMATS[kind].group // 2], blocks.scales[:, columns], kind)
    assert torch.equal(
        dequantise(views, torch.float32).nan_to_num(7),
        dequantise_ref(blocks, torch.float32)[:, : FORMATS[kind].group].nan_to_num(7),
    )
    assert not dequantise(Blocks(blocks.values[:0], blocks.scales[:0], kind), dtype).numel()
