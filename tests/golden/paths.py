"""The golden paths: which model trains, over how many ranks, by which dispatcher and experts.

No path has a capacity, a random number while training, or a balance loss beside an expert bias.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from moecore import BalanceConfig, FSDPOptions, MoEConfig, ParallelConfig
from moecore.base.options.precision import Recipe

Kind = Literal["decoder", "transformers", "torchtitan"]

MOE = MoEConfig(dim=32, hidden_dim=32, num_experts=8, top_k=2)
SHARED = replace(MOE, shared_hidden_dim=16, shared_gate=True)
BALANCED = replace(
    SHARED,
    balance=BalanceConfig(
        micro_batch_coef=0.03, sequence_coef=0.05, global_batch_coef=0.07, z_loss_coef=0.01
    ),
)
BIASED = replace(
    MOE,
    score_function="sigmoid",
    num_groups=4,
    top_groups=2,
    routed_scaling_factor=2.5,
    expert_bias=True,
    shared_hidden_dim=16,
    balance=BalanceConfig(bias_update_rate=0.01),
)
WITH_BIASES = replace(
    MOE,
    score_order="post",
    router_bias=True,
    activation="clamped_swiglu",
    activation_limit=1.0,
    fc1_bias=True,
    fc2_bias=True,
)
ALONE = ParallelConfig()
GATHERED_ONCE = FSDPOptions(dense_strategy="optim")


@dataclass(frozen=True, kw_only=True)
class Path:
    """One golden run.

    Attributes:
        world: ranks.
        kind: who builds the model, and trains it.
        parallel: degrees.
        moe: of a decoder.
        options: of `parallelize_moe`.
        accumulate: micro-batches per step.
        fused: moecore's AdamW in place of torch's.
        lr: of a decoder's or transformers' optimizer.
        steps: of the optimizer.
        dtype: of the parameters.
        layers: of a decoder; the first of several is dense.
        sequences, length: of a micro-batch; a data rank's are two tokens longer than those before.
        bound: relative error of a loss on another platform (see `records.py`).
        packages: beside torch, what the numbers depend on.
        interpreted: runs in a process with TRITON_INTERPRET=1.
        varies: two machines of one platform were seen to differ, so the bound applies to all.
    """

    world: int = 1
    kind: Kind = "decoder"
    parallel: ParallelConfig = ALONE
    moe: MoEConfig = MOE
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    fused: bool = False
    lr: float = 0.01
    steps: int = 20
    dtype: torch.dtype = torch.float32
    layers: int = 3
    sequences: int = 2
    length: int = 8
    bound: float = 1e-5
    packages: tuple[str, ...] = ()
    interpreted: bool = False
    varies: bool = False

    @property
    def sums(self) -> bool:
        """Whether a rank's loss is a sum over its tokens."""
        return self.options.get("loss") == "sum"


ON_TWO = dict(world=2, parallel=ParallelConfig(ep=2))
IN_BF16 = dict(fsdp=replace(GATHERED_ONCE, param_dtype=torch.bfloat16))
PATHS: dict[str, Path] = {
    "local": Path(moe=SHARED),
    "torch": Path(moe=WITH_BIASES, options=dict(expert_backend="torch")),
    "sequential": Path(moe=SHARED, options=dict(expert_backend="sequential")),
    "triton": Path(
        dtype=torch.float16,  # the interpreter multiplies the bits of bf16 as whole numbers
        options=dict(expert_backend="triton"),
        steps=8,
        layers=1,
        length=5,
        bound=1e-2,
        packages=("triton", "numpy"),
        interpreted=True,
        varies=True,
    ),
    "alltoall": Path(
        **ON_TWO, moe=BALANCED, accumulate=2, options=dict(dispatch="alltoall", fsdp=GATHERED_ONCE)
    ),
    "allgather": Path(**ON_TWO, moe=BIASED, options=dict(dispatch="allgather", loss="sum")),
    "etp": Path(world=2, parallel=ParallelConfig(etp=2), moe=WITH_BIASES),
    "bf16": Path(
        **ON_TWO, moe=SHARED, options=IN_BF16, accumulate=2, fused=True, lr=0.001, bound=1e-2
    ),
    "fp8": Path(
        **ON_TWO,
        moe=replace(SHARED, dim=128, hidden_dim=128, shared_hidden_dim=128),
        options=dict(precision=Recipe(keep_hidden="wide"), **IN_BF16),
        accumulate=2,
        lr=0.001,
        steps=8,
        bound=4e-2,
    ),
    "transformers": Path(**ON_TWO, kind="transformers", packages=("transformers",), varies=True),
    "torchtitan": Path(**ON_TWO, kind="torchtitan", packages=("torchtitan",)),
    "tp-ep": Path(world=4, parallel=ParallelConfig(tp=2, ep=2), moe=BALANCED),
}
