from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moecore.kernels.rows import quantised as q
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.packed import pack_rows, view_packed_rows
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import INTERPRET

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = {
    "mixed": [85, 0, 1, 300, 0, 131],
    "full tiles": [128, 256],
    "all to one": [0, 197, 0],
    "no rows": [0, 0],
}
SPARE = 70  # expert rows that belong to nobody


def values_of(*shape: int, dtype: torch.dtype, device: str, spread: int = 3) -> Tensor:
    """Values of many sizes, within one row as well."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).to(
        device, dtype
    )


def hard_values(dtype: torch.dtype, device: str, S: int = 9, D: int = 384) -> Tensor:
    """Blocks of zeros, an outlier, the largest and the smallest values, NaN and infinity."""
    x = values_of(S, D, dtype=dtype, device=device)
    limits = torch.finfo(dtype)
    x[0] = 0
    x[1, 7], x[2, 5], x[3, 200] = limits.max, -limits.max, 30000.0
    # The interpreter takes denormals of bf16 for 0.
    x[4] = limits.smallest_normal / (1 if INTERPRET and dtype == torch.bfloat16 else 4)
    x[4, 130] = limits.tiny
    x[5, 3], x[6, 140], x[7, 260] = torch.nan, torch.inf, -torch.inf
    x[8, :128] = torch.linspace(-448, 448, 128)
    return x


def codes(values: Tensor) -> Tensor:
    """Return the bytes without the signs of NaN, which hardware drops, and of 0, as `decode`."""
    bytes, wide = values.view(torch.uint8), values.float()
    return torch.where(wide.isnan() | (wide == 0), bytes & 0x7F, bytes)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype == q.FP8:
        assert torch.equal(codes(ours), codes(theirs))
    else:
        assert torch.equal(ours, theirs)


def poisoned(rows: int, D: int, dtype: torch.dtype, device: str, used: int) -> Tensor:
    x = values_of(rows, D, dtype=dtype, device=device)
    x[used:] = torch.nan
    return x


def tiles_of(counts: list[int], device: str) -> tuple[RowTiles, int]:
    R = sum(counts) + SPARE
    return map_row_tiles(torch.tensor(counts, device=device).cumsum(0).int(), R), R


def index_of(S: int, e: int, K: int, device: str):  # type: ignore[no-untyped-def]
    """Some source rows have no expert here."""
    generator = torch.Generator().manual_seed(S)
    ids = torch.stack([torch.randperm(2 * e, generator=generator)[:K] for _ in range(S)])
    ids = ids.to(device, torch.int32)
    return build_index(ids, torch.ones(S, K, device=device), first_expert=0, num_local_experts=e)


def assert_tiles(ours: Blocks, theirs: Blocks, tiles: RowTiles) -> None:
    used = int(tiles.map[0, 0])
    assert ours.values.shape == theirs.values.shape and ours.values.is_contiguous()
    assert_same(ours.values[:used], theirs.values[:used])
    assert_same(ours.scales[:used], theirs.scales[:used])


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_reference(dtype: torch.dtype, power_of_two: bool, device: str) -> None:
    cases = [
        values_of(S, D, dtype=dtype, device=device) for S, D in ((0, 128), (1, 128), (37, 640))
    ]
    for x in (*cases, hard_values(dtype, device)):
        got = q.quantise_rows(x, power_of_two=power_of_two)
        want = q.quantise_rows_ref(x, power_of_two=power_of_two)
        assert got.values.is_contiguous() and got.dtype == want.dtype == dtype
        assert_same(got.values, want.values)
        assert got.scales is not None and want.scales is not None
        assert_same(got.scales, want.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_those_of_packed_rows(dtype: torch.dtype, device: str) -> None:
    x = hard_values(dtype, device)
    rows = q.quantise_rows(x, power_of_two=True)
    values, scales = view_packed_rows(pack_rows(x), x.shape[1])
    assert rows.scales is not None and torch.equal(codes(rows.values), codes(values))
    assert torch.equal(rows.scales, scales)


def test_scales_next_to_a_power_of_two(device: str) -> None:
    """448 * 2^n and its neighbours in fp32, of all n."""
    amax = 448 * torch.exp2(torch.arange(-140.0, 119.0))
    near = (torch.nextafter(amax, torch.tensor(to)) for to in (0.0, torch.inf))
    x = torch.cat([amax, *near])[:, None].expand(-1, 128).contiguous().to(device)
    for power_of_two in (True, False):
        got = q.quantise_rows(x, power_of_two=power_of_two)
        want = q.quantise_rows_ref(x, power_of_two=power_of_two)
        assert got.scales is not None and torch.equal(got.scales, want.scales)  # type: ignore[arg-type]
        assert_same(got.values, want.values)
        assert (got.scales * 448 >= x[:, :1] * (1 if power_of_two else 1 - 2**-22)).all()


def test_rows_past_the_last_one_are_not_touched(device: str) -> None:
    x = poisoned(37, 256, torch.bfloat16, device, used=11)
    got = q.quantise_rows(x, power_of_two=True, num_rows=torch.tensor(11, device=device).int())
    want = q.quantise_rows_ref(x[:11], power_of_two=True)
    assert_same(got.values[:11], want.values)
    assert_same(got.scales[:11], want.scales)  # type: ignore[index, arg-type]


@pytest.mark.parametrize(("K", "D", "travelled"), [(1, 128, False), (3, 2304, True)])
def test_gathers_bytes_and_scales(K: int, D: int, travelled: bool, device: str) -> None:
    S = 41
    index = index_of(S, 4, K, device)
    x = values_of(S, D, dtype=torch.bfloat16, device=device)
    x[(index.slots_SK < 0).all(1)] = torch.nan
    rows = q.quantise_rows(x, power_of_two=True)
    if travelled:
        rows = Rows.from_bytes(pack_rows(x), D, x.dtype)
        assert not rows.values.is_contiguous()
    got = q.gather_row_blocks(rows, index.row_ids_R, index.slots_SK, index.num_rows)
    want = q.gather_row_blocks_ref(rows, index.row_ids_R)
    n, R = int(index.num_rows), index.row_ids_R.shape[0]
    assert 0 < n < R and got.scales.shape == (D // 128, -(-R // 4) * 4)
    assert got.values.is_contiguous()
    assert_same(got.values[:n], want.values[:n])
    assert_same(got.scales[:, :n], want.scales[:, :n])
    assert not want.values[:n].float().isnan().any()


def test_rows_in_expert_order_stay(device: str) -> None:
    x = poisoned(135, 640, torch.bfloat16, device, used=130)
    num_rows = torch.tensor(130, device=device).int()
    rows = q.quantise_rows(x, power_of_two=True, num_rows=num_rows)
    got = q.gather_row_blocks(rows, None, None, num_rows)
    assert got.values.data_ptr() == rows.values.data_ptr() and got.scales.shape == (5, 136)
    assert torch.equal(got.scales[:, :130], rows.scales[:130].T)  # type: ignore[index]


def row_blocks(x: Tensor, power_of_two: bool) -> Blocks:
    rows = q.quantise_rows(x, power_of_two=power_of_two)
    return q.gather_row_blocks(rows, None, None, None)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_tiles_of_rows_in_expert_order(counts: str, power_of_two: bool, device: str) -> None:
    tiles, R = tiles_of(COUNTS[counts], device)
    x = poisoned(R, 256, torch.bfloat16, device, used=R - SPARE)
    rows = row_blocks(x, power_of_two)
    got = q.tile_tokens(rows, None, tiles)
    assert_tiles(got, q.tile_tokens_ref(rows, None, tiles), tiles)
    assert not got.values[: int(tiles.map[0, 0])].float().isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_hard_values(dtype: torch.dtype, device: str) -> None:
    tiles, R = tiles_of([200], device)
    ids = torch.arange(R, device=device, dtype=torch.int32) % 9
    for power_of_two in (True, False):
        rows = q.quantise_rows(hard_values(dtype, device), power_of_two=power_of_two)
        assert_tiles(q.tile_tokens(rows, ids, tiles), q.tile_tokens_ref(rows, ids, tiles), tiles)


@pytest.mark.parametrize("kind", ["fp32", "travelled"])
def test_tiles_of_gathered_rows(kind: str, device: str) -> None:
    S, D = 53, 384
    index = index_of(S, 4, 3, device)
    tiles = map_row_tiles(index.offsets_e, index.row_ids_R.shape[0])
    tiles.map[1 + int(tiles.map[0, 0]) :] = -(2**31)  # as uninitialised memory may be
    x = values_of(S, D, dtype=torch.bfloat16, device=device, spread=6)
    x *= torch.exp2(torch.arange(S, device=device) % 25 - 12.0)[:, None]  # rows of many sizes
    x[(index.slots_SK < 0).all(1)] = torch.nan
    rows = q.quantise_rows(x, power_of_two=False)
    if kind == "travelled":
        rows = Rows.from_bytes(pack_rows(x), D, x.dtype)
    got = q.tile_tokens(rows, index.row_ids_R, tiles)
    assert_tiles(got, q.tile_tokens_ref(rows, index.row_ids_R, tiles), tiles)
    # Against the rows themselves, one by one: exact down to 2^-6 of the scale, then by 2^-9 of it.
    wide, ids = rows.widen().float(), index.row_ids_R.tolist()
    for t, (_, first, end, _) in enumerate(tiles.map[1 : 1 + int(tiles.map[0, 0])].tolist()):
        tokens = wide[ids[first : min(end, first + 128)]]
        scales = got.scales[t].repeat_interleave(128)[:, None]
        found = got.values[t].float() * scales
        bound = torch.where(tokens.T.abs() < scales * 2**-6, scales * 2**-10, 0.0)
        if kind == "fp32":
            bound = bound + tokens.T.abs() * (1 / 16 + 2**-10)
        assert ((found[:, : len(tokens)] - tokens.T).abs() <= bound).all()
        assert (found[:, len(tokens) :] == 0).all()


def test_worked_example_of_a_tile(device: str) -> None:
    """Scales 1 and 1/4: 3 of the second row is the code 12, which becomes 3 under the first's."""
    x = torch.zeros(2, 128, device=device)
    x[0, :2], x[1, :3] = torch.tensor([448.0, 5.0]), torch.tensor([112.0, 3.0, 0.0234375])
    rows = row_blocks(x, True)
    assert rows.scales[0, :2].tolist() == [1.0, 0.25] and rows.values[1, 1].float() == 12
    tiles, _ = tiles_of([2], device)
    got = q.tile_tokens(rows, None, tiles)
    assert got.scales[0].tolist() == [1.0]
    assert got.values[0, :3, :3].float().tolist() == [[448, 112, 0], [5, 3, 0], [0, 0.0234375, 0]]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_the_reference(dtype: torch.dtype, power_of_two: bool, device: str) -> None:
    w = values_of(2, 256, 256, dtype=dtype, device=device)
    w[0, :128, :128], w[1, 130, 200], w[0, 255, 250] = 0, torch.finfo(dtype).max / 2, torch.nan
    w[1, 3, 5] = torch.inf
    got = q.quantise_weights(w, power_of_two=power_of_two)
    want = q.quantise_weights_ref(w, power_of_two=power_of_two)
    rows, columns = got
    for ours, theirs in zip((rows, columns), want, strict=True):
        assert theirs is not None and ours.values.is_contiguous()
        assert_same(ours.values, theirs.values)
        assert_same(ours.scales, theirs.scales)
    alone = q.quantise_weights(w, power_of_two=power_of_two, columnwise=False)
    other = q.quantise_weights(w, power_of_two=power_of_two, rowwise=False)
    assert alone.columns is None and alone.rows is not None
    assert other.rows is None and other.columns is not None
    assert_same(alone.rows.values, rows.values)
    assert_same(other.columns.values, columns.values)
    assert torch.equal(alone.rows.scales, other.columns.scales.transpose(1, 2))
    assert_same(columns.values, rows.values.transpose(1, 2))
    assert_same(columns.scales, rows.scales.transpose(1, 2))
    scales = rows.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    ok = w.isfinite() & scales.isfinite()
    error = (rows.values.float() * scales - w.float()).abs()
    assert (error <= torch.maximum(w.float().abs() / 16, scales * 2**-10) * (1 + 1e-6))[ok].all()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: q.quantise_rows(x, power_of_two=True),
        lambda x: q.tile_tokens(Rows(x, x), None, tiles_of([2], "cpu")[0]),
        lambda x: q.quantise_weights(x[:1].expand(1, 128, -1), power_of_two=True),
    ],
)
def test_columns_without_whole_blocks(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"[DK] \(200\) must be a multiple of 128"):
        call(torch.zeros(2, 200))


@pytest.mark.gpu
def test_addresses_past_2_to_the_31() -> None:
    S, D = (1 << 31) // 2048 + 300, 2048
    x = torch.zeros(S, D, device="cuda", dtype=torch.bfloat16)
    x[-300:] = values_of(300, D, dtype=x.dtype, device="cuda")
    rows = q.quantise_rows(x, power_of_two=True)
    want = q.quantise_rows_ref(x[-300:], power_of_two=True)
    assert_same(rows.values[-300:], want.values)
    tiles = map_row_tiles(torch.tensor([S], device="cuda").int(), S)
    got, used = q.tile_tokens(rows, None, tiles), int(tiles.map[0, 0])
    last = map_row_tiles(torch.tensor([S % 128], device="cuda").int(), S % 128)
    end = Rows(rows.values[-(S % 128) :], rows.scales[-(S % 128) :], x.dtype)  # type: ignore[index]
    assert_same(got.values[used - 1], q.tile_tokens_ref(end, None, last).values[0])
