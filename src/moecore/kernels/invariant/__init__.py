"""Batch-invariant matrix products, and a context in which torch's operations use them."""

from moecore.kernels.invariant.context import batch_invariant as batch_invariant
from moecore.kernels.invariant.context import is_batch_invariant as is_batch_invariant
