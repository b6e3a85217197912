"""Products, and a context in which torch computes with them, whose rows know of no other row."""

from moecore.kernels.invariant.context import batch_invariant as batch_invariant
from moecore.kernels.invariant.context import is_batch_invariant as is_batch_invariant
