"""MXFP8 and NVFP4 once more, block by block, with nothing shared: the truth of tests.

A number of E2M1 is the nearest of a list, draws are unsigned 32-bit numbers of numpy, the Hadamard
matrix is written as a matrix. What the formats fix in fp32 (scales, divisions) is in fp32 here too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from tests.moe.fp8_reference import Result, _activation, fp8, rounded

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
SIGNS = [1, -1, -1, -1, 1, 1, 1, -1, -1, 1, -1, -1, 1, 1, -1, 1]  # of 16 tokens


def e2m1(x: Tensor, draws: Tensor | None = None) -> Tensor:
    """Return fp64 values; of two as near as each other the one with an even code."""
    size = x.double().abs().clamp(max=6)
    if draws is None:
        distance = (size[..., None] - GRID).abs() + 1e-12 * (torch.arange(8) % 2)
        found = GRID[distance.argmin(-1)]
    else:
        below = (size[..., None] >= GRID).sum(-1) - 1
        low, high = GRID[below], GRID[(below + 1).clamp(max=7)]
        up = (size - low) > draws.double() * (high - low)
        found = torch.where(up, high, low)
    return found * torch.where(x.signbit(), -1.0, 1.0)


def _mix(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def draws(x: Tensor, first_row: int = 0) -> Tensor:
    """Return what stochastic rounding draws for a matrix that begins at a row of its operand."""
    M, K = x.shape
    rows = np.arange(first_row, first_row + M, dtype=np.uint32) + np.uint32(0x5EED)
    columns = np.arange(K, dtype=np.uint32)
    bits = x.float().contiguous().numpy().view(np.uint32)
    hashed = _mix(_mix(_mix(rows)[:, None] + columns) ^ (bits >> np.uint32(16)))
    return torch.from_numpy((hashed >> np.uint32(8)).astype(np.float64) / 2**24)


def tensor_scale(x: Tensor, power_of_two: bool) -> Tensor:
    """Return a tensor's scale in fp32."""
    scale = x.float().abs().max().reshape(()) / torch.tensor(2688.0)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return scale.clamp(min=2.0**-126)


def fp4(x: Tensor, rows: int, columns: int, scale: Tensor, random: Tensor | None = None) -> Tensor:
    """Return a matrix with every block of rows x columns quantised, in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            at = (slice(i, i + rows), slice(j, j + columns))
            block = x[at].float()
            wanted = block.abs().max() / torch.tensor(6.0) / scale
            step = rounded(wanted.double().clamp(max=448)).float() * scale
            if step > 0:
                values = e2m1(block / step, None if random is None else random[at])
                out[at] = values * step.double()
    return out


def hadamard_matrix() -> Tensor:
    """Return what 16 tokens are multiplied by from the left, fp64."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    found = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        found = torch.kron(found, two)
    return found / 4 * torch.tensor(SIGNS, dtype=torch.float64)


def transformed(x: Tensor) -> Tensor:
    """Return fp32: what rounds like additions of fp32 may differ in the last bit."""
    blocks = x.double().reshape(-1, 16, x.shape[1])
    return (hadamard_matrix() @ blocks).reshape(x.shape).float()


@dataclass
class Rounding:
    """A recipe's roundings of one expert's, or one linear's, matrices; wide again in fp64."""

    recipe: Recipe

    def over_columns(self, x: Tensor, *, gradient: bool = False, first_row: int = 0) -> Tensor:
        if not len(x):
            return x.double()
        if self.recipe.scaling == "mxfp8":
            return fp8(x, 1, 32)
        random = draws(x, first_row) if gradient and self.recipe.stochastic_rounding else None
        return fp4(x, 1, 16, tensor_scale(x, self.recipe.power_of_two), random)

    def over_rows(self, x: Tensor, *, gradient: bool = False, first_row: int = 0) -> Tensor:
        """Return x as it is multiplied along its rows, padded to whole blocks, transformed."""
        size = 32 if self.recipe.scaling == "mxfp8" else 16
        padded = torch.zeros(-(-max(len(x), 1) // size) * size, x.shape[1])
        padded[: len(x)] = x.float()
        if self.recipe.scaling == "mxfp8":
            return fp8(padded, 32, 1)
        if self.recipe.hadamard:
            padded = transformed(padded)
        random = draws(padded, first_row) if gradient and self.recipe.stochastic_rounding else None
        return fp4(padded, 16, 1, tensor_scale(padded, self.recipe.power_of_two), random)

    def saved(self, x: Tensor) -> Tensor:
        """Return what backward reads of X or H: of E2M1 each row has a power of two."""
        if self.recipe.hidden_format == "wide" or not len(x):
            return x.double()
        if self.recipe.scaling == "mxfp8":
            return fp8(x, 1, 32)
        return torch.cat([fp4(row[None], 1, 16, tensor_scale(row, True)) for row in x])

    def weight(self, w: Tensor, *, transposed: bool = False) -> Tensor:
        if self.recipe.scaling == "mxfp8":
            return fp8(w, 32, 1) if transposed else fp8(w, 1, 32)
        return fp4(w, 16, 16, tensor_scale(w, self.recipe.power_of_two))


def experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dy: Tensor,
    *,
    recipe: Recipe,
    kind: str = "swiglu",
) -> Result:
    """Return experts by a recipe, each expert's rows apart; A, dA and dH rounded to x's dtype."""
    dtype, q = x.dtype, Rounding(recipe)
    size = 32 if recipe.scaling == "mxfp8" else 16
    out = Result(*(torch.zeros(t.shape, dtype=torch.float64) for t in (x, x, w1, w2, weights)))
    row = padded_row = 0  # where the expert's rows begin, unpadded and padded
    for i in range(len(w1)):
        found = (ids == i).nonzero().tolist()
        source = torch.tensor([s for s, _ in found], dtype=torch.int64)
        choice = torch.tensor([k for _, k in found], dtype=torch.int64)
        weight = weights[source, choice].double()[:, None]
        rows, here = x[source], dict(gradient=True, first_row=row)
        h = (q.over_columns(rows) @ q.weight(w1[i]).T).to(dtype)
        a = (_activation(h.double(), kind) * weight).to(dtype)
        y_rows = (q.over_columns(a) @ q.weight(w2[i]).T).to(dtype)
        leaf = q.saved(h).requires_grad_()  # from here on backward
        act = _activation(leaf, kind)
        a, rows = (act.detach() * weight).to(dtype), q.saved(rows).to(dtype)
        da = q.over_columns(dy[source], **here) @ q.weight(w2[i], transposed=True)
        da = da.to(dtype)
        (dh,) = torch.autograd.grad(act, leaf, da.double() * weight)
        dh = dh.to(dtype)
        dx_rows = (q.over_columns(dh, **here) @ q.weight(w1[i], transposed=True)).to(dtype)
        out.y.index_add_(0, source, y_rows.double())
        out.x.index_add_(0, source, dx_rows.double())
        out.weights[source, choice] = (da.double() * act.detach()).sum(1)
        here = dict(gradient=True, first_row=padded_row)
        out.w1[i] = q.over_rows(dh, **here).T @ q.over_rows(rows)
        out.w2[i] = q.over_rows(dy[source], **here).T @ q.over_rows(a)
        row += len(found)
        padded_row += -(-max(len(found), 1) // size) * size
    return out


def linear(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp64 y, dx and dweight of a linear by a recipe."""
    q = Rounding(recipe)
    y = q.over_columns(x) @ q.weight(weight).T
    dx = q.over_columns(dy, gradient=True) @ q.weight(weight, transposed=True)
    return y, dx, q.over_rows(dy, gradient=True).T @ q.over_rows(x)
