"""How the indexers of sparse attention learn, a room's options that families and plans read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moecore.base.fields import CheckedRecord, Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig(CheckedRecord):
    """How the indexers of sparse attention learn.

    The loss of a layer is the mean over tokens of the divergence of the indexer's softmax from the
    attention's probabilities, averaged over heads. Indexers alone learn from it.

    Attributes:
        stage: "sparse": a query reads the keys that its indexer selects, and the loss is of these.
            "warm_up": attention reads all keys, and the loss is of all.
        loss_coef: factor on the loss of each layer.

    Source: DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1).
    """

    stage: Literal["sparse", "warm_up"] = "sparse"
    loss_coef: Positive = 1.0
