"""The matrices of a rank's experts as operands of a recipe. Letters: as in `contract.py`."""

from __future__ import annotations

from collections.abc import Callable

from moecore.kernels.experts.contract import ExpertWeights, Role
from moecore.kernels.rows.scaling import Blocks, OperandPair


class QuantisedMatrices:
    """The operands of both matrices, which are quantised when a product first reads them."""

    def __init__(
        self,
        weights: ExpertWeights,
        quantise: Callable[..., OperandPair],  # (w_eNK, *, rows, columns)
        unpack: Callable[[Blocks, bool], Blocks],  # (all-gathered matrix, is_transposed)
    ) -> None:
        self.dtypes = {"w1": weights.w1_eCD.dtype, "w2": weights.w2_eDF.dtype}
        self._weights: ExpertWeights | None = weights
        self._quantise, self._unpack = quantise, unpack
        self._operands: dict[tuple[Role, bool], Blocks] = {}  # by role and whether transposed

    def operand(self, role: Role, is_transposed: bool) -> Blocks:
        """Return the matrix for sums over its columns, or transposed, for sums over its rows."""
        weights = self._weights
        assert weights is not None, "the weights were dropped"
        if weights.quantised is not None:
            pair = weights.quantised[role == "w2"]
            if pair.columns is None:
                assert pair.rows is not None, "one layout was gathered"
                return self._unpack(pair.rows, is_transposed)
            return pair[is_transposed]  # type: ignore[return-value]
        key = role, is_transposed
        if key not in self._operands:
            w_eNK = weights.w1_eCD if role == "w1" else weights.w2_eDF
            pair = self._quantise(w_eNK, rows=not is_transposed, columns=is_transposed)
            for i, layout in enumerate(pair):
                if layout is not None:
                    self._operands[role, bool(i)] = layout
        return self._operands[key]

    def drop(self) -> None:
        """Drop the matrices."""
        self._weights = None
        self._operands.clear()
