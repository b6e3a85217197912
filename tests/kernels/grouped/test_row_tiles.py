"""The map of row tiles covers each row once."""

from __future__ import annotations

import pytest

from moecore.kernels.grouped.row_tiles import MAP_FIELDS
from tests.kernels.row_cases import COUNTS, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", COUNTS)
def test_map_covers_every_row_once(name: str) -> None:
    offsets, _, tiles, _ = make(COUNTS[name])
    assert tiles.shape[1] == MAP_FIELDS
    covered = [
        (expert, r)
        for expert, row, end, _ in tiles[1 : 1 + int(tiles[0, 0])].tolist()
        for r in range(row, min(row + 128, end))
    ]
    stops = offsets.tolist()
    wanted = [
        (i, r)
        for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))
        for r in range(start, stop)
    ]
    assert covered == wanted
