"""How far a layer in FP8 may be from the same layer in bf16, by its format alone.

A value of E4M3 has 3 bits of mantissa: it rounds by at most 2^-4 of its power of two, and by
2^-4 / sqrt(3) in the root mean square. Mantissas spread evenly over [1, 2) have a root mean square
of sqrt(7 / 3). So one quantised operand is off by u = 2^-4 / sqrt(7) = 2.4%, in the norm.
Roundings are independent, so a sum over many of them keeps that share, and n operands on the way
to a result make it u * sqrt(n):

    output     X and W1, each twice, through gate and up; A; W2                         n = 6
    dx         dY and W2; X and W1 twice, through the activation's derivative; dH; W1   n = 8
               a kept H that is quantised, twice                                        2 more

Blocks of 128 leave few values so small that they have fewer bits. `ROOM` is for that, and for what
an activation makes of an error. What is off by less than u did not multiply in FP8. A row in a
wrong place is off by more than its own norm, so the worst row is held to `ROW_ROOM` times the
bound.
"""

from __future__ import annotations

import math

from torch import Tensor

ROUNDING = 2**-4 / math.sqrt(7)
OUTPUT_ROUNDINGS, GRAD_ROUNDINGS, KEPT_ROUNDINGS = 6, 8, 2
ROOM, ROW_ROOM = 1.5, 2.0


def roundings_of(*, kept_in_fp8: bool) -> tuple[int, int]:
    """Return the operands on the way to the output, and on that to the input's gradient."""
    return OUTPUT_ROUNDINGS, GRAD_ROUNDINGS + KEPT_ROUNDINGS * kept_in_fp8


def disagreement(found: Tensor, right: Tensor, roundings: int) -> str | None:
    """Return why a result is not that of so many E4M3 roundings; None = it may be.

    Args:
        found: [T, D].
        right: the same in bf16.
        roundings: operands on the way to it.
    """
    found, right = found.float(), right.float()
    error_T, norm_T = (found - right).norm(dim=-1), right.norm(dim=-1)
    error, worst = float(error_T.norm() / norm_T.norm()), float((error_T / norm_T).max())
    bound = ROOM * ROUNDING * math.sqrt(roundings)
    if not error <= bound:
        return f"differs from bf16 by {error:.3g}, more than {bound:.3g}"
    if error < ROUNDING:
        return f"differs from bf16 by {error:.3g}, less than one rounding ({ROUNDING:.3g})"
    if not worst <= ROW_ROOM * bound:
        return f"a row differs from bf16 by {worst:.3g}, more than {ROW_ROOM * bound:.3g}"
    return None
