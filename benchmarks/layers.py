"""Layers with a given routing, their matrix products, and transformers' block.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from benchmarks.shapes import Shape
from moecore import MoELayer
from moecore.base import transformer_engine as te
from moecore.moe.forced_routing import force_even_load

SKEW_TOLERANCE = 0.1


def list_kernel_tests(names: dict[str, str]) -> list[str]:
    """Return the test files of kernels, given names by subfolder."""
    return [f"tests/kernels/{w}/test_{n}.py" for w, ns in names.items() for n in ns.split()]


# What proves the layer; on a GPU that includes every kernel that it launches.
KERNELS = {
    "experts": "expert_mlp",
    "grouped": "cooperative grouped_gemm grouped_wgrad pingpong",
    "routing": "balance_kernels counts route router_logits",
    "rows": "activation index row_tiles rows",
}
GPU_TESTS = [*list_kernel_tests(KERNELS), "tests/moe/test_layer_gpu.py"]
CPU_TESTS = ["tests/moe/test_layer.py", "tests/moe/test_experts.py"]
FP8_KERNELS = {"grouped": "fp8", "rows": "quantised quantised_activation"}
FP8_GPU_TESTS = list_kernel_tests(FP8_KERNELS)
FP8_CPU_TESTS = ["tests/kernels/experts/test_fp8_products.py", *FP8_GPU_TESTS[1:]]
HAS_TE = torch.cuda.is_available() and te.find_recipe_problem(None, torch.device("cuda")) is None
TE_TESTS = ["tests/moe/test_te_gpu.py"] * HAS_TE
FP8_TESTS = FP8_GPU_TESTS if torch.cuda.is_available() else FP8_CPU_TESTS


def make_layer(shape: Shape, routing: str, *, device: torch.device) -> tuple[MoELayer, Tensor]:
    """Return a bf16 layer with random weights, and random tokens x_TD.

    Args:
        shape: of the layer.
        routing: one of `ROUTINGS`: "learned" is the layer's own router; "skewed" adds a router
            bias (`compute_skewed_bias`); "even" assigns tokens to experts round-robin.
        device: of both.
    """
    torch.manual_seed(0)
    layer = MoELayer(shape.config(routing), device=device, dtype=torch.bfloat16)
    x_TD = torch.randn(shape.tokens, shape.dim, device=device, dtype=torch.bfloat16)
    if routing == "even":
        force_even_load(layer)
    if routing == "skewed":
        router = layer.get_part("router")
        with torch.no_grad():
            logits_TE = F.linear(x_TD.float(), router.weight.float())
            router.bias.copy_(compute_skewed_bias(logits_TE, shape.top_k, shape.skew))
    return layer, x_TD


def compute_skewed_bias(logits_TE: Tensor, top_k: int, skew: float) -> Tensor:
    """Return the bias [E] on the logits that gives the hottest expert `skew` times the mean load.

    Biases decrease as -s * log(1 + rank), with ranks in random order, so that some experts are hot,
    many cool and a few nearly idle, like those of an unbalanced router; bisection finds s.
    """
    E = logits_TE.shape[1]
    generator = torch.Generator().manual_seed(0)
    profile_E = -torch.log1p(torch.randperm(E, generator=generator).float()).to(logits_TE.device)
    low, high = 0.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        ids_TK = (logits_TE + middle * profile_E).topk(top_k, dim=-1).indices
        low, high = (middle, high) if compute_hottest(ids_TK, E) < skew else (low, middle)
    return low * profile_E


def compute_hottest(ids_TK: Tensor, num_experts: int) -> float:
    """Return the load of the hottest expert over the mean; one host sync."""
    counts_E = torch.bincount(ids_TK.flatten(), minlength=num_experts)
    return float(counts_E.max() / counts_E.float().mean())


class SixProducts:
    """The baseline: the six grouped matmuls of a gated layer alone, with the layer's routing.

    FC1 [R, D] x [E, D, 2F] and FC2 [R, F] x [E, F, D]; their input gradients [R, D] x [E, D, F] and
    [R, 2F] x [E, 2F, D]; their weight gradients [D, R] x [R, F] and [2F, R] x [R, D] by expert.
    Rows are gathered and sorted in advance; weights are the layer's, read through the same
    transposed views.

    Args:
        layer: with the weights and the routing.
        x_TD: its tokens.
        ids_TK: its expert ids.
    """

    def __init__(self, layer: MoELayer, x_TD: Tensor, ids_TK: Tensor) -> None:
        experts, K = layer.get_part("experts"), ids_TK.shape[1]
        self.w1_EFD = experts.w1.detach().flatten(1, 2)
        self.w2_EDF = experts.w2.detach()
        counts_E = torch.bincount(ids_TK.flatten(), minlength=layer.config.num_experts)
        self.offsets_E = counts_E.cumsum(0).to(torch.int32)
        order_R = ids_TK.flatten().argsort(stable=True)
        self.x_RD = x_TD.detach().index_select(0, order_R // K)
        h_R2F = self._fc1()
        gate, up = h_R2F.chunk(2, dim=-1)
        self.a_RF = F.silu(gate) * up
        self.dy_RD = torch.randn_like(self.x_RD)
        self.dh_R2F = torch.randn_like(h_R2F)

    def _fc1(self) -> Tensor:
        return grouped_mm(self.x_RD, self.w1_EFD.transpose(1, 2), offs=self.offsets_E)

    def forward(self) -> None:
        """Run the two products of a forward."""
        self._fc1()
        grouped_mm(self.a_RF, self.w2_EDF.transpose(1, 2), offs=self.offsets_E)

    def all(self) -> None:
        """Run all six products."""
        self.forward()
        grouped_mm(self.dy_RD, self.w2_EDF, offs=self.offsets_E)
        grouped_mm(self.dy_RD.T, self.a_RF, offs=self.offsets_E)
        grouped_mm(self.dh_R2F, self.w1_EFD, offs=self.offsets_E)
        grouped_mm(self.dh_R2F.T, self.x_RD, offs=self.offsets_E)


@functools.cache
def has_transformers() -> bool:
    """Return whether transformers has MoE blocks that run on grouped matmuls."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401
    except ImportError:
        return False
    return "grouped_mm" in ALL_EXPERTS_FUNCTIONS


def make_transformers_block(layer: MoELayer) -> nn.Module:
    """Return transformers' Qwen3-MoE block with the layer's weights and separate gradients.

    Its router rounds logits to bf16, so a few tokens near a tie get other experts.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = layer.config
    theirs = Qwen3MoeConfig(
        hidden_size=config.dim,
        moe_intermediate_size=config.hidden_dim,
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(theirs)
    experts = layer.get_part("experts")
    block.gate.weight = nn.Parameter(layer.get_part("router").weight.detach())
    block.experts.gate_up_proj = nn.Parameter(experts.w1.detach().flatten(1, 2))
    block.experts.down_proj = nn.Parameter(experts.w2.detach())
    return block
