import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moecore.base.params as params
from moecore.base.params import compute_global_indices, get_local_param, init_normal_


def filled(shape: tuple[int, ...], **kwargs: Any) -> Tensor:
    tensor = torch.empty(shape, dtype=kwargs.pop("dtype", torch.float32))
    tensor.fill_(float("nan"))
    init_normal_(tensor, **{"std": 1.0, "key": "w", **kwargs})
    return tensor


def fill_rows(monkeypatch, whole, rows, columns=None) -> Tensor:
    """What a rank that holds these global rows (and columns) of `whole` draws."""
    indices = [rows, *(torch.arange(n) for n in whole.shape[1:])]
    if columns is not None:
        indices[1] = columns
    local = torch.full([i.numel() for i in indices], float("nan"))

    class Sharded:
        """A stand-in for a DTensor."""

        shape = whole.shape

    with monkeypatch.context() as patch:
        patch.setattr(params, "DTensor", Sharded)
        patch.setattr(params, "get_local_tensor", lambda param: local)
        patch.setattr(params, "compute_global_indices", lambda param: indices)
        init_normal_(Sharded(), std=1.0, key="w")  # type: ignore[arg-type]
    return local


@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_any_rows_and_columns_property(data: st.DataObject) -> None:
    n, m = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 8))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    columns = torch.tensor(sorted(data.draw(st.sets(st.integers(0, m - 1), min_size=1))))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(params, "BLOCK_NUMEL", data.draw(st.sampled_from([1, 9, 64])))
        whole = filled((n, m))
        found = fill_rows(monkeypatch, whole, rows, columns)
    assert torch.equal(found, whole[rows][:, columns])


def test_blocks_keys_and_seeds_differ() -> None:
    base = filled((64, 64))
    assert not torch.equal(base, filled((64, 64), key="v"))
    assert not torch.equal(base, filled((64, 64), seed=1))
    torch.testing.assert_close(filled((64, 64), std=0.1), base * 0.1)
    big = filled((2, 1 << 20))  # one block per row
    assert not torch.equal(big[0], big[1])
    both = torch.corrcoef(torch.stack([base.flatten(), filled((64, 64), key="v").flatten()]))
    assert abs(float(both[0, 1])) < 4 / math.sqrt(64 * 64)


def test_statistics() -> None:
    values = filled((1200, 1000), std=0.02).double()
    n = values.numel()
    assert abs(float(values.mean())) < 5 * 0.02 / math.sqrt(n)
    assert abs(float(values.std()) / 0.02 - 1) < 5 / math.sqrt(2 * n)
    z = values / 0.02
    assert abs(float((z**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    assert abs(float((z.abs() < 1).double().mean()) - 0.6827) < 5 * math.sqrt(0.2166 / n)
    # Rows are independent of their neighbours, within and across blocks.
    correlation = (z[1:] * z[:-1]).mean()
    assert abs(float(correlation)) < 5 / math.sqrt(n)


def test_dtype_only_rounds_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    whole = filled((30, 30))
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(filled((30, 30), dtype=torch.bfloat16), whole.bfloat16())


def test_empty_and_plain_tensors() -> None:
    init_normal_(torch.empty(0, 4), std=1.0, key="w")
    init_normal_(torch.empty(4, 0), std=1.0, key="w")
    parameter = torch.nn.Parameter(torch.empty(3, 4))
    init_normal_(parameter, std=1.0, key="w")
    assert parameter.requires_grad and parameter.grad is None
    assert get_local_param(parameter) is parameter
    assert [i.tolist() for i in compute_global_indices(torch.empty(2, 3))] == [[0, 1], [0, 1, 2]]
