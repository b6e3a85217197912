"""How far a layer in FP8 may be from the same layer in bf16, by its format alone.

A value of E4M3 has 3 bits of mantissa: it rounds by at most 2^-4 of its power of two, and by
2^-4 / sqrt(3) in the root mean square. Mantissas spread evenly over [1, 2) have a root mean square
of sqrt(7 / 3). So one quantised operand is off by u = 2^-4 / sqrt(7) = 2.4%, in the norm.
Roundings are independent, so a sum over many of them keeps that share, and n operands on the way
to a result make it u * sqrt(n):

    output     X and W1, each twice, through gate and up; A; W2                         n = 6
    dx         dY and W2; X and W1 twice, through the activation's derivative; dH; W1   n = 8
    dW1        the same with X as the last                                              n = 8
    dW2        dY; X and W1 twice; A                                                    n = 6

A kept H that is quantised is two more, through gate and up, for all but the output. In E5M2 a value
has a bit less, so it rounds by 2 u and counts as 4: dx and dW1 have dY and dH, dW2 has dY.

Blocks of 128 leave few values so small that they have fewer bits. `ROOM` is for that, and for what
an activation makes of an error. What is off by less than u did not multiply in FP8. A row in a
wrong place is off by more than its own norm, so the worst row is held to `ROW_ROOM` times the
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


def roundings_of(recipe: Recipe) -> dict[str, int]:
    """Return the operands on the way to the output "y" and to each gradient."""
    kept, in_e5m2 = 2 * (recipe.hidden == "fp8"), 3 * (recipe.grad_format == "e5m2")
    return {
        name: n + (kept if name != "y" else 0) + in_e5m2 * GRADIENTS[name]
        for name, n in ROUNDINGS.items()
    }


def disagreement(
    found: Tensor, right: Tensor, roundings: int, *, by_row: bool = True
) -> str | None:
    """Return why a result is not that of so many E4M3 roundings; None = it may be.

    Args:
        found: [T, ...]: rows are tokens, or experts, whose gradients may be zero.
        right: the same in bf16.
        roundings: operands on the way to it.
        by_row: hold the worst row to a bound too.
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
