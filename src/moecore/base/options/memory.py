"""MemoryOptions: what a model's forward does not keep on the GPU for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, Count, NumBytes, Positive, Rules

Recomputed = Literal[
    "norm", "activation", "rope", "qkv_proj", "mla_up_proj", "mlp", "shared_experts", "expert_fc1",
    "moe",
]  # fmt: skip
RECOMPUTED: tuple[Recomputed, ...] = get_args(Recomputed)
GEMM_LAST: tuple[Recomputed, ...] = ("norm", "activation", "rope")
OF_MOE: tuple[Recomputed, ...] = ("shared_experts", "expert_fc1")
Offloaded = Literal["norm", "attention", "mlp", "shared_experts", "experts", "rest"]
OFFLOADED: tuple[Offloaded, ...] = get_args(Offloaded)
OffloadedParts = Annotated[tuple[Offloaded, ...], 'pass ("experts",)']
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
Fractions = Annotated[Fraction | tuple[Fraction, ...], "pass a float, or one per pipeline stage"]
HostBytes = Annotated[int, Bound(">=", 0), Bound("<", 2**63)]
Parts = Annotated[tuple[Recomputed, ...] | Literal["gemm_last"], "pass 'gemm_last'"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StashOptions(CheckedRecord):
    """Pages for rows that routed experts keep, where shapes have room for the worst case.

    Attributes:
        page_rows: rows of a page, of the widest matrix that the first layer keeps; of narrower ones
            a page holds more, as many as its bytes do.
        factor: device pages, over those that all MoE layers of a forward fill with even loads, if
            they keep what the first does. More rows than fit are an `ExchangeError`, whose message
            has the least factor.
        host_bytes: of pages in pinned host memory, which are taken when no other is left.
    """

    page_rows: Count = 64
    factor: Positive = 1.1
    host_bytes: HostBytes = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions(CheckedRecord):
    """What backward computes again or host memory holds, by part of a block. Bits stay.

    Products and communication are not repeated but where a part is one: the first three parts cost
    no product ("gemm_last"), the others the products that they name.

    Attributes:
        recompute: parts of
            "norm": outputs of norms, which the products behind them would keep.
            "activation": of dense MLPs and shared experts; routed experts never keep theirs.
            "rope": queries and keys after their norms and rotary embedding.
            "qkv_proj": queries, keys and values, by their projections again.
            "mla_up_proj": queries, keys and values of latent attention, by the products that make
            them from the latents.
            "mlp": a dense MLP's hidden activations, by its first product again.
            "shared_experts": likewise.
            "expert_fc1": H of the routed experts, by FC1 again, 4KF bytes per token (bf16).
            "moe": whole MoE layers, their communication included.
            "gemm_last" stands for the first three.
        offload: parts whose kept activations lie in pinned host memory between forward and
            backward: "norm", "attention", "mlp", "shared_experts", "experts" (routed), and "rest",
            what a block keeps outside of them. Those of the last block stay, outside of pipelines.
        offload_fraction: of the bytes of these parts, in the order of forward: as much as copies
            can hide behind compute. Stages of a pipeline may have one each, in their order
            (`moecore.parallel.offload_fractions`).
        offload_host_bytes: pinned memory of a rank, in all; beyond it activations stay on the GPU.
            None = no limit.
        stash: rows that routed experts keep (X and H) lie in pages between forward and backward,
            where dispatchers make room for the worst case ("nvlink", a padded capacity); the room
            is shared by all layers. None = each layer keeps it.
        fused_loss: a transformers model computes head and loss in chunks of tokens when it trains
            with labels, so their logits never exist; products accumulate in fp32.

    Raises:
        ValueError: for unknown parts, one that is there twice, or that "moe" holds, for a choice
            about an offload without parts, and for a stash of what is offloaded or repeated.
    """

    recompute: Parts = ()
    offload: OffloadedParts = ()
    offload_fraction: Fractions = 1.0
    offload_host_bytes: NumBytes | None = None
    stash: StashOptions | None = None
    fused_loss: bool = True

    def _rules(self) -> Rules:
        for name, parts in (("recompute", self.parts), ("offload", self.offload)):
            if len(set(parts)) < len(parts):
                yield name, "have each part once: drop the repeated one"
        if not self.offload and self.offload_fraction != 1.0:
            yield "offload_fraction", "go with offload (()), which has no part: name one"
        if not self.offload and self.offload_host_bytes is not None:
            yield "offload_host_bytes", "go with offload (()), which has no part: name one"
        if self.stash is not None and "experts" in self.offload:
            yield "offload", "have no 'experts' beside stash, which keeps their rows: drop one"
        if self.stash is not None and "moe" in self.parts:
            yield "recompute", "have no 'moe' beside stash, whose rows it drops: leave one out"
        inside = [part for part in OF_MOE if part in self.parts]
        if "moe" in self.parts and inside:
            yield "recompute", f"have no {inside[0]!r} beside 'moe', which holds it: drop one"

    @property
    def parts(self) -> tuple[Recomputed, ...]:
        """The parts, with "gemm_last" spelled out."""
        return GEMM_LAST if self.recompute == "gemm_last" else self.recompute
