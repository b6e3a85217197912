"""`IndexerConfig`: how the indexers of sparse attention are trained."""

from dataclasses import dataclass
from typing import Literal

from moecore.base.fields import CheckedRecord, Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig(CheckedRecord):
    """How the indexers of sparse attention are trained.

    The loss of a layer is the KL divergence between the attention's probabilities, averaged over
    heads, and the indexer's softmax, as the mean over tokens. It trains only the indexers.

    Attributes:
        stage: "sparse": attention reads the keys that the indexer selects, and the loss covers
            these keys. "warm_up": attention reads all keys, and the loss covers all keys.
        loss_coef: factor on the loss of each layer.

    Source: DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1).
    """

    stage: Literal["sparse", "warm_up"] = "sparse"
    loss_coef: Positive = 1.0
