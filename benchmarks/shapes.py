"""The measured layers, named after models, and the formulas that their rows must satisfy.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K.

    forward               2 R D 2F + 2 R F D      = 6 T K D F FLOP
    forward + backward    three times that        = 18 T K D F FLOP
    least kept bytes      X and FC1's output      = (2D + 4KF) T bytes in bf16
"""

from __future__ import annotations

from dataclasses import dataclass

from moecore import MoEConfig

ROUTINGS = ("learned", "skewed", "even")

# Hottest expert over the mean under "skewed". No expert can have more than E / K times the mean
# (every token), so small layers get SKEW_ROOM of that instead.
SKEW = 5.0
SKEW_ROOM = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One MoE layer and its tokens."""

    name: str
    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """R: one row per token and chosen expert."""
        return self.tokens * self.top_k

    @property
    def forward_flops(self) -> int:
        """FLOP of FC1 and FC2 of a gated layer."""
        return 6 * self.rows * self.dim * self.hidden_dim

    @property
    def total_flops(self) -> int:
        """FLOP of forward and backward: two gradients per matrix product."""
        return 3 * self.forward_flops

    @property
    def least_saved_bytes(self) -> int:
        """Bytes of X and FC1's output in bf16."""
        return (2 * self.dim + 4 * self.top_k * self.hidden_dim) * self.tokens

    @property
    def skew(self) -> float:
        """Load of the hottest expert over the mean in "skewed" routing."""
        return min(SKEW, SKEW_ROOM * self.num_experts / self.top_k)

    def config(self, routing: str) -> MoEConfig:
        """Return the layer's config for one of `ROUTINGS`; the bias of "skewed" is set later."""
        return MoEConfig(
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            router_bias=routing == "skewed",
        )


def _shape(name: str, tokens: int, dim: int, hidden_dim: int, experts: int, top_k: int) -> Shape:
    return Shape(
        name=name, tokens=tokens, dim=dim, hidden_dim=hidden_dim, num_experts=experts, top_k=top_k
    )


GPU_SHAPES = (
    _shape("qwen3-30b", 32768, 2048, 768, 128, 8),
    _shape("qwen3-235b", 16384, 4096, 1536, 128, 8),
    _shape("dsv3-32e", 16384, 7168, 2048, 32, 8),
    _shape("mixtral", 16384, 4096, 14336, 8, 2),
    _shape("fine-7b", 24576, 1536, 256, 128, 8),
)
CPU_SHAPES = (_shape("tiny", 256, 128, 128, 16, 2),)
SHAPES = {shape.name: shape for shape in (*GPU_SHAPES, *CPU_SHAPES)}
