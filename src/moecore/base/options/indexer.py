"""`IndexerConfig`: how the indexers of sparse attention select keys and are trained."""

from dataclasses import dataclass
from typing import Literal

from moecore.base.fields import CheckedRecord, FieldErrors, Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig(CheckedRecord):
    """How the indexers of sparse attention select keys and are trained.

    The loss of a layer is the KL divergence between the attention's probabilities, averaged over
    heads, and the indexer's softmax, as the mean over tokens. It trains only the indexers.

    Attributes:
        stage: "sparse": attention reads the keys that the indexer selects, and the loss covers
            these keys. "warm_up": attention reads all keys, and the loss covers all keys. "frozen":
            attention reads the selected keys, and the indexer has no loss.
        loss_coef: factor on the loss of each layer.
        fp8_scores: select keys by products in FP8, as DeepSeek-V3.2's inference code. Queries and
            keys of the indexer are rotated by a Hadamard matrix, and each row of `head_dim` values
            is quantised to e4m3 with a power-of-two scale. The loss uses scores in the compute
            dtype.

    Source: DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1).
    """

    stage: Literal["sparse", "warm_up", "frozen"] = "sparse"
    loss_coef: Positive = 1.0
    fp8_scores: bool = False

    def _find_field_errors(self) -> FieldErrors:
        if self.fp8_scores and self.stage == "warm_up":
            yield "fp8_scores", "be False with stage ('warm_up'), which selects no keys: drop it"
