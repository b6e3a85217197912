"""`MemoryOptions`: activations that are recomputed in backward or offloaded to host memory."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, NumBytes, Positive

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
Part = Recomputed | Literal["gemm_last"]
Parts = Annotated[tuple[Part, ...] | Literal["gemm_last"], "pass 'gemm_last'"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StashOptions(CheckedRecord):
    """Saves routed experts' rows for backward in pages, not in each layer's padded buffers.

    Attributes:
        page_rows: number of rows of the widest saved matrix in one page; narrower matrices have
            more rows per page.
        factor: number of device pages, relative to balanced routing in all MoE layers of a forward.
            If the pages are insufficient, an `ExchangeError` names a sufficient factor.
        host_bytes: bytes of pages in pinned host memory, used when the device pages are full.
    """

    page_rows: Count = 64
    factor: Positive = 1.1
    host_bytes: HostBytes = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions(CheckedRecord):
    """Activation recomputation and offload. The results have the same bits.

    Attributes:
        recompute: parts of a block that backward recomputes. "gemm_last" = the first three.
            "norm": outputs of norms. No matrix product is repeated.
            "activation": activations of dense MLPs and shared experts. No product is repeated.
            "rope": queries and keys after norms and rotary embedding. No product is repeated.
            "qkv_proj": queries, keys and values, with their projections.
            "mla_up_proj": queries, keys and values of latent attention, from the latents.
            "mlp": hidden activations of dense MLPs, with their first matrix product.
            "shared_experts": hidden activations of shared experts, with their first product.
            "expert_fc1": FC1's output of routed experts. If gated and in bf16, this frees
            4 * top_k * hidden_dim bytes per token and layer.
            "moe": complete MoE layers, with their communication.
        offload: parts whose saved activations are in pinned host memory between forward and
            backward: "norm", "attention", "mlp", "shared_experts", "experts" (routed) and "rest"
            (all other tensors of a block). Without pipeline stages the last block is not offloaded.
        offload_fraction: fraction of the bytes of these parts that is offloaded, in forward order.
            A tuple has one fraction per pipeline stage (`moecore.parallel.offload_fractions`).
        offload_host_bytes: limit of a rank's pinned memory; further activations stay on the GPU.
            None = no limit.
        stash: save only the used rows of routed experts, in pages, if buffers are padded to the
            worst case ("nvlink", `CapacityConfig.pad`). None = save the padded buffers.
        fused_loss: if a transformers model trains with labels, compute head and loss in chunks of
            tokens, so that the full logits are never allocated.
        offload_frozen: store 4-bit frozen experts (`Precision.frozen`) in pinned host memory. A
            layer's experts are copied to the GPU before its forward and its backward.
        offload_params: store trained weights and their gradients in pinned host memory; the
            optimizer steps on the CPU, as with FSDP2's `CPUOffloadPolicy`. Shards are copied to the
            GPU before each all-gather, and gradients to the host after each reduction.
    """

    recompute: Parts = ()
    offload: OffloadedParts = ()
    offload_fraction: Fractions = 1.0
    offload_host_bytes: NumBytes | None = None
    stash: StashOptions | None = None
    fused_loss: bool = True
    offload_frozen: bool = False
    offload_params: bool = False

    def _find_field_errors(self) -> FieldErrors:
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
        """The recomputed parts; "gemm_last" is replaced by its three parts."""
        names = (self.recompute,) if self.recompute == "gemm_last" else self.recompute
        return tuple(part for n in names for part in (GEMM_LAST if n == "gemm_last" else (n,)))
