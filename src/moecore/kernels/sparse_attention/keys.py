"""The keys that a chunk of queries reads: selected keys per query, or one range for all queries.

Both classes compute the same matrix products with the keys' rows of a tensor.

Legend: C queries of a chunk, N keys, K keys that a query reads, x heads, D dims.
"""

from functools import cached_property

import torch
from torch import Tensor

from moecore.kernels.common import is_gpu


class SelectedKeys:
    """A list of keys per query for a chunk of queries, [queries, keys]; -1 = none."""

    def __init__(self, selected_CK: Tensor) -> None:
        self._selected_CK = selected_CK
        self._places = selected_CK.clamp(min=0).flatten()

    @cached_property
    def seen_CK(self) -> Tensor:
        """Return bool [queries, keys]: whether an entry is a key, not -1."""
        return self._selected_CK >= 0

    def select_rows(self, x_ND: Tensor) -> Tensor:
        """Gather rows [queries, keys, D]; an entry of -1 gathers row 0, see `seen_CK`."""
        return x_ND.index_select(0, self._places).view(*self._selected_CK.shape, -1)

    def compute_dot_products(self, q_CxD: Tensor, rows: Tensor) -> Tensor:
        """Return q @ each query's rows^T, [queries, heads, keys], at least fp32."""
        return multiply_in_fp32(q_CxD, rows.transpose(1, 2))

    def sum_weighted_rows(self, p_CxK: Tensor, rows: Tensor) -> Tensor:
        """Return each query's sum of p * row, [queries, heads, D], at least fp32."""
        return multiply_in_fp32(p_CxK, rows)

    def add_outer_products(self, total_ND: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
        """Add p^T q, summed over heads, of each pair to the selected rows of total, in place.

        p is [queries, heads, keys] and q [queries, heads, dim]; the first `dim` columns of total
        change. Not deterministic on GPUs by default.
        """
        rows = None
        for p_CxK, q_CxD in pairs:
            part = multiply_in_fp32(p_CxK.transpose(1, 2), q_CxD)
            if rows is None:
                rows = part
            else:
                rows[..., : part.shape[-1]] += part
        assert rows is not None, "no pairs"
        total_ND.index_add_(0, self._places, rows.flatten(0, 1).to(total_ND.dtype))


class SpanOfKeys:
    """One range of keys for a chunk of queries; each query sees a part of the range."""

    def __init__(self, first_key: int, key_end: int, first_C: Tensor, last_C: Tensor) -> None:
        self.first, self.first_C, self.last_C = first_key, first_C, last_C
        self._span = slice(first_key, key_end)

    @cached_property
    def seen_CK(self) -> Tensor:
        """Return bool [queries, keys]: whether a key is in the query's part of the range."""
        keys = torch.arange(self._span.start, self._span.stop, device=self.first_C.device)
        return (keys >= self.first_C[:, None]) & (keys <= self.last_C[:, None])

    def select_rows(self, x_ND: Tensor) -> Tensor:
        """Return the rows of the range's keys in x, a view."""
        return x_ND[self._span]

    def compute_dot_products(self, q_CxD: Tensor, rows: Tensor) -> Tensor:
        """Return q @ (the range's rows)^T, [queries, heads, keys], at least fp32."""
        return multiply_in_fp32(q_CxD.flatten(0, 1), rows.T).unflatten(0, q_CxD.shape[:2])  # type: ignore[no-any-return]

    def sum_weighted_rows(self, p_CxK: Tensor, rows: Tensor) -> Tensor:
        """Return sums of p * row over the range, [queries, heads, D], at least fp32."""
        return multiply_in_fp32(p_CxK.flatten(0, 1), rows).unflatten(0, p_CxK.shape[:2])  # type: ignore[no-any-return]

    def add_outer_products(self, total_ND: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
        """Add p^T q, summed over queries and heads, of each pair to the range's rows of total."""
        for p_CxK, q_CxD in pairs:
            rows = multiply_in_fp32(p_CxK.flatten(0, 1).T, q_CxD.flatten(0, 1))
            total_ND[self._span, : rows.shape[-1]] += rows


Keys = SelectedKeys | SpanOfKeys


def multiply_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of two or three dims; 16-bit tensors are summed and returned in fp32."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    if not is_gpu(a):
        return a.float() @ b.float()
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    return multiply(a, b, out_dtype=torch.float32)
