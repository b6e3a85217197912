"""copy_first_rows: used rows arrive, no other byte of the target changes."""

from __future__ import annotations

import pytest
import torch

from moecore.kernels.rows.move import copy_first_rows, copy_first_rows_ref


def rows(R: int, B: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (R, B), device=device, dtype=torch.uint8)


@pytest.mark.parametrize(("R", "B"), [(1, 4), (37, 12), (300, 1024), (129, 6)])
def test_bits_of_the_reference(R: int, B: int, device: str) -> None:
    source = rows(R, B, device)
    for used in (0, 1, R // 2, R, R + 5):
        target = rows(R, B, device)
        before = target.clone()
        num_rows = torch.tensor(used, dtype=torch.int32, device=device)
        copy_first_rows(target, source, num_rows)
        copy_first_rows_ref(before, source, num_rows)
        assert torch.equal(target, before)


@pytest.mark.gpu
def test_pinned_memory_both_ways() -> None:
    source = rows(5000, 3072, "cuda")
    host = torch.zeros(5000, 3072, dtype=torch.uint8, pin_memory=True)
    back, num_rows = torch.zeros_like(source), torch.tensor(1234, dtype=torch.int32, device="cuda")
    copy_first_rows(host, source, num_rows)
    copy_first_rows(back, host, num_rows)
    torch.cuda.synchronize()
    assert torch.equal(host[:1234], source[:1234].cpu()) and not host[1234:].any()
    assert torch.equal(back[:1234], source[:1234]) and not back[1234:].any()
