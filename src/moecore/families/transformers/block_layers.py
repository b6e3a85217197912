"""MoE layers with the forward's arguments, results or last operation of transformers' blocks.

Legend: T tokens, D model dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moecore.moe.layer import MoELayer


class PairOutputLayer(MoELayer):
    """An MoELayer that returns (output, None), as decoder layers of gpt-oss and Llama 4 expect."""

    def forward(  # type: ignore[override]
        self, x: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the output of `MoELayer.forward`, and None."""
        return super().forward(x, *args, **kwargs), None


class TokenIdLayer(MoELayer):
    """An MoELayer that accepts token ids with the argument name of DeepSeek-V4's layers."""

    def forward(  # type: ignore[override]
        self, x: Tensor, input_ids: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the output of `MoELayer.forward` for tokens with ids `input_ids`."""
        return super().forward(x, token_ids=input_ids, **kwargs)


class NormedOutputLayer(MoELayer):
    """An MoELayer whose output is normalised by the child `post_mlp_layernorm` (A.X K1)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the norm of the output of `MoELayer.forward`."""
        y: Tensor = self.get_submodule("post_mlp_layernorm")(super().forward(x, *args, **kwargs))
        return y


class MeanOutputLayer(MoELayer):
    """An MoELayer that returns the mean of the routed output and the shared output (Cohere)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return half the output of `MoELayer.forward`, which is the sum of both."""
        return super().forward(x, *args, **kwargs) / 2
