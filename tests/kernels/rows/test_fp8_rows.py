import pytest
import torch
from torch import Tensor

from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.packed import (
    count_packed_bytes,
    gather_packed_rows,
    pack_rows,
    pack_rows_ref,
    unpack_rows,
    view_packed_rows,
)
from moecore.kernels.rows.record import Rows
from moecore.kernels.triton_api import INTERPRET
from tests.kernels.rows.test_quantised import DTYPES, values_of

DIMS = [16, 128, 144, 2048, 2896, 7168]
COUNTS = (0, 1, 5) if INTERPRET else (0, 1, 37)  # a program computes a row, or a part of one


def widened(packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return unpack_rows(*view_packed_rows(packed, dim), dtype)


def used(packed_SW: Tensor, dim: int) -> Tensor:
    """Return the bytes that mean something."""
    return packed_SW[:, : dim + 4 * -(-dim // 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", DIMS)
def test_bytes_of_the_reference(D: int, dtype: torch.dtype, device: str) -> None:
    for S in COUNTS:
        x = values_of(S, D, dtype=dtype, device=device)
        got, want = pack_rows(x), pack_rows_ref(x)
        assert got.shape == want.shape == (S, count_packed_bytes(D)) and got.dtype == torch.uint8
        assert torch.equal(used(got, D), used(want, D))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", DIMS)
def test_rows_are_wide_again_and_their_handle_has_the_gradient(D, dtype, device) -> None:
    for S in COUNTS:
        packed = pack_rows(values_of(S, D, dtype=dtype, device=device))
        want = widened(packed, D, dtype)
        assert torch.equal(Rows.from_bytes(packed, D, dtype).widen(), want)
        assert torch.equal(widened(pack_rows(want), D, dtype), want), "the same when packed again"
        assert torch.equal(widened(packed, D, torch.float32), want.float()), "exact in 16 bits"
        handle = want.new_empty(1).expand(S, D).requires_grad_()
        wide = Rows.from_bytes(packed, D, dtype, handle).widen()
        assert torch.equal(wide, want)
        (grad,) = torch.autograd.grad(wide, handle, want)
        assert torch.equal(grad, want)


def test_every_rounding_of_the_format(device: str) -> None:
    """All codes, the middles between them and their neighbours in fp32, with scale 1."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (500.0, -500.0))
    x = torch.cat([finite, middles, up, down])
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(x, (1, 0), value=448.0).to(device)  # makes each scale 1
    want = x.to(torch.float8_e4m3fn).view(torch.uint8)
    got = pack_rows(x.contiguous())
    assert torch.equal(got[:, :128], want)
    assert torch.equal(got[:, 128:132].contiguous().view(torch.float32), torch.ones_like(x[:, :1]))
    assert torch.equal(widened(got, 128, torch.float32), want.view(torch.float8_e4m3fn).float())


def test_worked_example() -> None:
    """3 * 2^7 fits as it is, 500 needs a scale of 2; 4.3 lies between 4 and 4.5 of a scale of 1."""
    x = torch.zeros(1, 144)
    x[0, :3] = torch.tensor([384.0, 4.3, -0.001])
    x[0, 128:130] = torch.tensor([500.0, 4.3])
    packed = pack_rows_ref(x)
    wide = widened(packed, 144, torch.float32)
    assert wide[0, :3].tolist() == [384.0, 4.5, -0.001953125]
    assert wide[0, 128:130].tolist() == [512.0, 4.5]
    assert count_packed_bytes(2048) == 2112 and count_packed_bytes(144) == 160


@pytest.mark.parametrize("D", [64, 2048, 2896])
@pytest.mark.parametrize("K", [1, 3])
def test_gathers_wide_rows_and_reads_no_hole(D: int, K: int, device: str) -> None:
    S, e = 41, 4
    generator = torch.Generator().manual_seed(K)
    ids = torch.stack([torch.randperm(2 * e, generator=generator)[:K] for _ in range(S)])
    ids = ids.to(device, torch.int32)
    index = build_index(ids, torch.ones(S, K, device=device), first_expert=0, num_local_experts=e)
    x = values_of(S, D, dtype=torch.bfloat16, device=device)
    packed, hole = pack_rows(x), (index.slots_SK < 0).all(1)
    assert hole.any()
    packed[hole] = 0x7F  # NaN
    where = (index.row_ids_R, index.slots_SK, index.offsets_e[-1])
    got = gather_packed_rows(*view_packed_rows(packed, D), x.dtype, *where)
    n = int(index.offsets_e[-1])
    want = widened(pack_rows_ref(x), D, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and torch.equal(got[:n], want[index.row_ids_R[:n].long()])


@pytest.mark.gpu
def test_addresses_past_2_to_the_31() -> None:
    S = (1 << 31) // 2112 + 3
    x = torch.zeros(S, 2048, device="cuda", dtype=torch.bfloat16)
    x[-2:] = 3.0
    packed = pack_rows(x)
    assert torch.equal(widened(packed[-3:], 2048, torch.bfloat16), x[-3:])
    slots = torch.full((S, 1), -1, device="cuda", dtype=torch.int32)
    slots[-2:, 0] = torch.arange(2, device="cuda", dtype=torch.int32)
    ids = torch.tensor([S - 2, S - 1], device="cuda", dtype=torch.int32)
    views = view_packed_rows(packed, 2048)
    out = gather_packed_rows(*views, x.dtype, ids, slots, torch.tensor(2, device="cuda"))
    assert torch.equal(out, x[-2:])
