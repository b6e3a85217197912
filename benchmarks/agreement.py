"""Bound on the error of a layer in FP8 against the same layer in bf16, derived from the format.

A value of E4M3 has 3 bits of mantissa. Rounding changes it by at most 2^-4 of its power of two, and
by 2^-4 / sqrt(3) in the root mean square. Mantissas spread evenly over [1, 2) have a root mean
square of sqrt(7 / 3). So the norm of one quantised operand is off by u = 2^-4 / sqrt(7) = 2.4%.
Roundings are independent: a sum over many of them has the same relative error, and a result
computed from n quantised operands is off by u * sqrt(n):

    output     X and W1, each twice, through gate and up; A; W2                         n = 6
    dx         dY and W2; X and W1 twice, through the activation's derivative; dH; W1   n = 8
    dW1        the same with X as the last                                              n = 8
    dW2        dY; X and W1 twice; A                                                    n = 6

If the saved H is quantised, it counts as two more (gate and up) for each gradient. A value in E5M2
rounds by a little less than 2 u and counts as 4: dY and dH for dx and dW1, dY for dW2.

In blocks of 128 few values are so small that they have fewer bits. `ROOM` covers this, and the
effect of the activation on an error. An error below u shows that nothing was multiplied in FP8. A
misplaced row is off by more than its norm, so the worst row must be within `ROW_ROOM` times the
bound.
"""

from __future__ import annotations

import math

from torch import Tensor

from moecore.base.options.precision import Recipe

ROUNDING = 2**-4 / math.sqrt(7)
ROUNDINGS = {"y": 6, "x": 8, "w1": 8, "w2": 6}  # of the output and of gradients
GRADIENTS = {"y": 0, "x": 2, "w1": 2, "w2": 1}  # of these, operands that are gradients
ROOM, ROW_ROOM = 1.5, 2.0


def count_roundings(recipe: Recipe) -> dict[str, int]:
    """Return the number of quantised operands behind the output "y" and behind each gradient."""
    kept, in_e5m2 = 2 * (recipe.hidden_format == "fp8"), 3 * (recipe.grad_format == "e5m2")
    return {
        name: n + (kept if name != "y" else 0) + in_e5m2 * GRADIENTS[name]
        for name, n in ROUNDINGS.items()
    }


def describe_error(
    found: Tensor, right: Tensor, roundings: int, *, by_row: bool = True
) -> str | None:
    """Return why an error is not explained by `roundings` roundings to E4M3, or None if it is.

    Args:
        found: [T, ...]: one row per token, or per expert, whose gradients may be zero.
        right: the same in bf16.
        roundings: number of quantised operands behind the result.
        by_row: also check the error of the worst row.
    """
    found, right = found.flatten(1).float(), right.flatten(1).float()
    error_T, norm_T = (found - right).norm(dim=1), right.norm(dim=1)
    worst = float((error_T / norm_T).masked_fill((error_T == 0) & (norm_T == 0), 0).max())
    error = float(error_T.norm() / norm_T.norm())
    bound = ROOM * ROUNDING * math.sqrt(roundings)
    if not error <= bound:
        return f"differs from bf16 by {error:.3g}, more than {bound:.3g}"
    if error < ROUNDING:
        return f"differs from bf16 by {error:.3g}, less than one rounding ({ROUNDING:.3g})"
    if by_row and not worst <= ROW_ROOM * bound:
        return f"a row differs from bf16 by {worst:.3g}, more than {ROW_ROOM * bound:.3g}"
    return None
