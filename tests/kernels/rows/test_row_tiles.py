import pytest
import torch

from moecore.kernels.rows.row_tiles import map_row_tiles, map_row_tiles_ref
from tests.kernels.row_cases import COUNTS, SPARE


@pytest.mark.parametrize("name", COUNTS)
def test_map_covers_every_row_once(name: str, device: str) -> None:
    offsets = torch.tensor(COUNTS[name], device=device).cumsum(0).int()
    stops = offsets.tolist()
    tiles = map_row_tiles(offsets, stops[-1] + SPARE)
    used = int(tiles.map[0, 0])
    covered = [
        (expert, r)
        for expert, row, end, _ in tiles.map[1 : 1 + used].tolist()
        for r in range(row, min(row + 128, end))
    ]
    wanted = [
        (i, r)
        for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))
        for r in range(start, stop)
    ]
    assert covered == wanted
    want = map_row_tiles_ref(offsets, stops[-1] + SPARE)
    assert torch.equal(tiles.ends_e, want.ends_e) and tiles.max_tiles == want.max_tiles >= used
    assert torch.equal(tiles.map[1 : 1 + used, :3], want.map[1 : 1 + used, :3])
