"""Experts in blockwise FP8 once more, row by row, with a quantiser of its own: the truth of tests.

Nothing here is shared with the package. Values are rounded by arithmetic on exponents, scales come
from logarithms, every product is in fp64, and every expert row is computed alone. What the recipe
rounds to the dtype of the rows (H, dA, outputs of expert rows) is rounded here too.

Legend: S source rows, D model dim, F hidden dim, C columns of FC1, e experts, K choices per row.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 128


# Bits of mantissa, least exponent of a normal number, largest value.
FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}


def rounded(x: Tensor, fmt: str = "e4m3") -> Tensor:
    """Return fp64 values rounded to a format: ties to even, saturated."""
    bits, least, largest = FORMATS[fmt]
    _, exponent = torch.frexp(x.abs())
    step = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=least) - bits)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def scale_of(amax: float, power_of_two: bool, fmt: str = "e4m3") -> float:
    """Return the scale of a block, representable in fp32."""
    scale = max(float(torch.tensor(amax).float() / FORMATS[fmt][2]), 2.0**-126)
    return 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale


def fp8(
    x: Tensor,
    rows: int,
    columns: int,
    power_of_two: bool = True,
    fmt: str = "e4m3",
    amax: float | None = None,
) -> Tensor:
    """Return a matrix with every block of rows x columns quantised, in fp64; amax None = its."""
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].float()
            largest = float(block.abs().max()) if amax is None else amax
            scale = scale_of(largest, power_of_two, fmt)
            inverse = 1 / torch.tensor(scale, dtype=torch.float32)  # fp32 decides about ties
            values = rounded((block * inverse).double(), fmt) * scale
            out[i : i + rows, j : j + columns] = values
    return out


def row_scales(row: Tensor, power_of_two: bool) -> Tensor:
    """Return the scales of a row's blocks of 128 columns."""
    blocks = row.float().split(BLOCK)
    return torch.tensor([scale_of(float(b.abs().max()), power_of_two) for b in blocks])


def aligned(rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return at most 128 quantised rows under the largest scale of each 128 columns, fp64."""
    largest = torch.stack([scales for _, scales in rows]).amax(0)
    out = []
    for values, scales in rows:
        factors = (scales / largest).half().repeat_interleave(BLOCK)
        codes = (values / scales.repeat_interleave(BLOCK)).half() * factors
        out.append(rounded(codes.double()) * largest.repeat_interleave(BLOCK))
    return torch.stack(out)


@dataclass
class Result:
    """The output and its gradients, fp64."""

    y: Tensor
    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor


@dataclass
class _Rows:
    """Quantised rows of one expert and their scales, in order: for its weights' gradients."""

    x: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dy: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    a: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dh: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def experts_fp8(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dy: Tensor,
    *,
    kind: str = "swiglu",
    power_of_two: bool = True,
    keep_hidden: str = "fp8",
) -> Result:
    """Return the output and every gradient, for the output's gradient dy.

    x and dy are [S, D], w1 [e, C, D], w2 [e, D, F], ids (-1 = none) and weights [S, K]. Products
    are rounded to the dtype of x. `power_of_two` and `keep_hidden` are fields of `Recipe`.
    """
    dtype, two = x.dtype, power_of_two
    w1_q = [fp8(w, BLOCK, BLOCK, two) for w in w1]
    w2_q = [fp8(w, BLOCK, BLOCK, two) for w in w2]
    x_q, dy_q = fp8(x, 1, BLOCK, two), fp8(dy, 1, BLOCK, two)
    seen = [_Rows() for _ in w1]
    out = Result(*(torch.zeros(t.shape, dtype=torch.float64) for t in (x, x, w1, w2, weights)))
    for s in range(x.shape[0]):
        for k in range(ids.shape[1]):
            i = int(ids[s, k])
            if i < 0:
                continue
            weight = weights[s, k].double()
            h = (x_q[s : s + 1] @ w1_q[i].T).to(dtype)
            a = _activation(h.double(), kind) * weight
            out.y[s] += (fp8(a, 1, BLOCK, two) @ w2_q[i].T).to(dtype)[0].double()
            if keep_hidden == "fp8":
                h = fp8(h, 1, BLOCK, two).to(dtype)
            da = (dy_q[s : s + 1] @ w2_q[i]).to(dtype).double()
            leaf = h.double().requires_grad_()
            act = _activation(leaf, kind)
            (dh,) = torch.autograd.grad(act, leaf, da * weight)
            act = act.detach()
            out.weights[s, k] = (da * act).sum()
            out.x[s] += (fp8(dh, 1, BLOCK, two) @ w1_q[i]).to(dtype)[0].double()
            for rows, row in zip(
                (seen[i].x, seen[i].dy, seen[i].a, seen[i].dh),
                (x[s], dy[s], (act * weight)[0], dh[0]),
                strict=True,
            ):
                values = fp8(row[None].double(), 1, BLOCK, two)[0]
                rows.append((values, row_scales(row, two)))
    for i, rows in enumerate(seen):
        for start in range(0, len(rows.x), BLOCK):
            x_t, dy_t, a_t, dh_t = (
                aligned(found[start : start + BLOCK])
                for found in (rows.x, rows.dy, rows.a, rows.dh)
            )
            out.w1[i] += dh_t.T @ x_t
            out.w2[i] += dy_t.T @ a_t
    return out


def _activation(h: Tensor, kind: str) -> Tensor:
    if kind == "relu2":
        return h.clamp(min=0) ** 2
    if kind == "gelu":
        return 0.5 * h * (1 + torch.erf(h / 2**0.5))
    gate, up = h.chunk(2, dim=-1)
    if kind == "swiglu":
        return gate * torch.sigmoid(gate) * up
    assert kind == "geglu", kind
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def experts_scaled(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    dy: Tensor,
    *,
    scaling: str,
    kind: str = "swiglu",
    power_of_two: bool = True,
    grad_format: str = "e4m3",
    amax: dict[str, float] | None = None,
) -> Result:
    """Return the same for a scale per row of either operand ("rowwise") or per tensor.

    A tensor is all expert rows, or one expert's matrix. A, dA and dH are rounded to the dtype of
    the rows before they are quantised. `amax` has the largest magnitudes that scale the rows "x",
    "a", "dy" and "dh"; None = their own.
    """
    dtype, two = x.dtype, power_of_two

    def over_columns(rows: Tensor, name: str = "w") -> Tensor:
        of_others = None if amax is None else amax.get(name)
        how = (two, grad_format if name in ("dy", "dh") else "e4m3", of_others)
        return fp8(rows, 1 if scaling == "rowwise" else len(rows), rows.shape[1], *how)

    def over_rows(rows: Tensor, name: str = "w") -> Tensor:
        return over_columns(rows.T, name).T

    pairs = [(i, s, k) for i in range(len(w1)) for s, k in (ids == i).nonzero().tolist()]
    expert, source, choice = (torch.tensor(found) for found in zip(*pairs, strict=True))
    weight = weights[source, choice].double()[:, None]
    x_R, dy_R = over_columns(x[source], "x"), over_columns(dy[source], "dy")
    h = torch.cat([x_R[expert == i] @ over_columns(w).T for i, w in enumerate(w1)]).to(dtype)
    leaf = h.double().requires_grad_()
    act = _activation(leaf, kind)
    a = (act.detach() * weight).to(dtype)
    da = torch.cat([dy_R[expert == i] @ over_rows(w) for i, w in enumerate(w2)]).to(dtype)
    (dh,) = torch.autograd.grad(act, leaf, da.double() * weight)
    dh = dh.to(dtype)
    a_R, dh_R = over_columns(a, "a"), over_columns(dh, "dh")
    y_R = torch.cat([a_R[expert == i] @ over_columns(w).T for i, w in enumerate(w2)]).to(dtype)
    dx_R = torch.cat([dh_R[expert == i] @ over_rows(w) for i, w in enumerate(w1)]).to(dtype)
    out = Result(*(torch.zeros(t.shape, dtype=torch.float64) for t in (x, x, w1, w2, weights)))
    out.y.index_add_(0, source, y_R.double())
    out.x.index_add_(0, source, dx_R.double())
    out.weights[source, choice] = (da.double() * act.detach()).sum(1)
    for i in range(len(w1)):
        mine = expert == i
        columns = [t[mine] if scaling == "rowwise" else t for t in (dh, x[source], dy[source], a)]
        dh_T, x_T, dy_T, a_T = (
            over_rows(t, name) if len(t) else t.double()
            for t, name in zip(columns, ("dh", "x", "dy", "a"), strict=True)
        )  # of one expert, or of all rows
        if scaling == "tensorwise":
            dh_T, x_T, dy_T, a_T = (t[mine] for t in (dh_T, x_T, dy_T, a_T))
        out.w1[i], out.w2[i] = dh_T.T @ x_T, dy_T.T @ a_T
    return out
