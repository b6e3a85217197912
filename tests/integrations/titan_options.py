"""Jobs with options of moecore, and moecore's own loop with the same arguments.

The jobs cover section `moecore` in few runs.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moecore import (
    CapacityConfig,
    CloneOptions,
    ContextOptions,
    DispatchOptions,
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    PipelineConfig,
    StashOptions,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder
from moecore.train import AdamW, Muon, assign_matrices
from tests.integrations.titan_runs import (
    CP,
    DECODER,
    EOS,
    EP,
    EPS,
    LR,
    PP,
    SEQ_LEN,
    STEPS,
    TWO_BATCHES,
    V03,
    WEIGHT_DECAY,
    WIDE,
    Run,
    refill,
    samples,
    train,
    whole,
)

EXACT = dict(param_dtype=torch.float32)
# name -> options of the job, and what moecore's own loop is given.
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "memory": (
        {
            EP: 2,
            "moecore__memory__recompute": "norm,qkv_proj,expert_fc1",
            "moecore__memory__offload": "attention,shared_experts",
            "moecore__memory__offload_fraction": 0.5,
            "moecore__fsdp__dense_strategy": "optim_grads",
            "moecore__fsdp__embedding_strategy": "optim_grads_params",
            "moecore__fsdp__experts_strategy": "optim",
            "moecore__dispatch__clones__enable": True,
            "moecore__dispatch__clones__per_rank": 1,
            "moecore__documents": True,
        },
        dict(
            degrees=dict(ep=2),
            documents=True,
            memory=MemoryOptions(
                recompute=("norm", "qkv_proj", "expert_fc1"),
                offload=("attention", "shared_experts"),
                offload_fraction=0.5,
            ),
            fsdp=FSDPOptions(
                dense_strategy="optim_grads",
                embedding_strategy="optim_grads_params",
                experts_strategy="optim",
                **EXACT,
            ),
            dispatch=DispatchOptions(name="alltoall", clones=CloneOptions(per_rank=1)),
        ),
    ),
    "fp8": (
        {
            "name": "moecore_wide_decoder",
            EP: 4,
            "moecore__precision__enable": True,
            "moecore__precision__recipe__scaling": "tensorwise",
            "moecore__precision__recipe__amax_history": 2,
            "moecore__precision__overrides": "*.experts=tensorwise,*.o_proj=none",
            "moecore__precision__roles": "attention",
            "moecore__dispatch__fp8": True,
            # Clipping rounds gradients in its own way, and FP8 moments amplify that.
            "training__max_norm": 100.0,
            "moecore__fsdp__fp8_param_gather": True,
            "moecore__adamw__moment_dtype": "float8_e4m3fn",
        },
        dict(
            config=WIDE,
            degrees=dict(ep=4),
            precision=Precision(
                recipe=Recipe(scaling="tensorwise", amax_history=2),
                roles=("attention",),
                overrides=(("*.experts", Recipe(scaling="tensorwise")), ("*.o_proj", None)),
            ),
            dispatch=DispatchOptions(name="alltoall", fp8=True),
            fsdp=FSDPOptions(fp8_param_gather=True, experts_strategy="optim_grads_params", **EXACT),
            adamw=dict(moment_dtype=torch.float8_e4m3fn),
            max_norm=100.0,
        ),
    ),
    "stash": (
        {
            EP: 2,
            "moecore__moe__capacity__enable": True,
            "moecore__moe__capacity__factor": 1.25,
            "moecore__moe__capacity__pad": True,
            "moecore__moe__router_dtype": "float64",
            "moecore__memory__stash__enable": True,
            "moecore__memory__stash__page_rows": 4,
            "moecore__memory__stash__factor": 2.0,
            "moecore__moe__balance__z_loss_coef": 0.01,
            "moecore__muon__enable": True,
            "moecore__muon__momentum": 0.8,
            "moecore__muon__ns_dtype": "float32",
        },
        dict(
            degrees=dict(ep=2),
            moe=dict(
                balance=replace(DECODER.moe.balance, z_loss_coef=0.01),
                capacity=CapacityConfig(factor=1.25, pad=True),
                router_dtype="float64",
            ),
            memory=MemoryOptions(stash=StashOptions(page_rows=4, factor=2.0)),
            muon=dict(momentum=0.8, ns_dtype=torch.float32),
        ),
    ),
    "cp": (
        {EP: 4, CP: 2, "moecore__context__way": "p2p", **TWO_BATCHES},
        dict(degrees=dict(cp=2, ep=4), context=ContextOptions(way="p2p")),
    ),
    "pp": (
        {
            "name": "moecore_wide_decoder",
            EP: 2,
            PP: 2,
            "training__local_batch_size": 2,
            "moecore__pipeline__schedule": "zero-bubble",
            "moecore__memory__recompute": "gemm_last",
            "moecore__documents": True,
        },
        dict(
            config=WIDE,
            degrees=dict(pp=2, ep=2),
            documents=True,
            pipeline=PipelineConfig(schedule="zero-bubble"),
            memory=MemoryOptions(recompute="gemm_last"),
        ),
    ),
}


if V03:  # whose optimizers are its own
    for job, _own_loop in JOBS.values():
        for key in [k for k in job if k.startswith(("moecore__adamw", "moecore__muon"))]:
            del job[key]
        for key in ("adamw", "muon"):
            _own_loop.pop(key, None)
NOT_ASKED = ("config", "degrees", "documents", "max_norm", "adamw", "muon")


# name -> the job that it resumes after a step, and what differs.
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "stash": ("stash", {EP: 4}),
    "pp": ("pp", {PP: 1, "training__local_batch_size": 1, "moecore__pipeline__schedule": "1f1b"}),
}


def trained(folder: str, *, name: str = "moecore_tiny_decoder", **options: Any) -> Run:
    """What a job trains. Collective."""
    return train(name, folder, **options)


def resumed(folder: str, name: str) -> Run:
    """What the second step of a job trains on other ranks. Collective."""
    source, options = RESUMED[name]
    options = JOBS[source][0] | options
    options |= {
        "checkpoint__enable": True,
        "checkpoint__initial_load_path": f"{folder}/{source}/checkpoint/step-1",
        "checkpoint__initial_load_model_only": False,
    }
    return trained(f"{folder}/{name} resumed", **options)


def native(
    *,
    config: Any = DECODER,
    degrees: dict[str, int],
    documents: bool = False,
    max_norm: float = 1.0,
    adamw: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
    **asked: Any,
) -> Run:
    """moecore's own loop over the same samples: four a step."""
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    model = Decoder(config, device="meta")
    parallelize_moe(model, meshes, loss="sum", **asked)
    model.to_empty(device="cpu")
    model.init_weights(7)
    refill(model, ".mlp.")
    options: Any = dict(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY)
    if muon is None:
        optimizers: list[Any] = [AdamW(model.parameters(), **options, **(adamw or {}))]
    else:
        assignment = assign_matrices(model)
        optimizers = [Muon(assignment, LR, weight_decay=WEIGHT_DECAY, **muon)]
        optimizers.append(AdamW(assignment.adamw_params, **options))
    data_ranks = meshes.data_ranks
    step = TrainStep(model, optimizers, max_norm=max_norm, num_micro_batches=4 // data_ranks)
    run = Run()
    for number in range(STEPS):
        rows = [samples(4 * number + i, 1, SEQ_LEN) for i in range(4)]
        total = sum(int((labels != -100).sum()) for _, labels in rows)
        batches = []
        for tokens, labels in rows[_own(meshes.data_rank, data_ranks, degrees)]:
            batches.append(dict(tokens_BT=tokens, labels_BT=labels, num_tokens=total))
            if documents:
                batches[-1]["cu_seqlens"] = borders(tokens)
        loss = step.forward_backward(batches).sum()
        dist.all_reduce(loss)
        run.losses.append(float(loss) * data_ranks / dist.get_world_size())
        run.norms.append(float(step.finish().norm.total))
    run.state = {n: whole(t) for n, t in model.state_dict().items()}
    return run


def _own(rank: int, ranks: int, degrees: dict[str, int]) -> slice:
    """Rows of a data rank: a loader of 0.2 gives a pipeline all micro-batches at once."""
    each, are_neighbours = 4 // ranks, "pp" in degrees and not V03
    return slice(rank * each, (rank + 1) * each) if are_neighbours else slice(rank, None, ranks)


def borders(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Where documents begin: behind each EOS, and the end."""
    (ends,) = (tokens_BT.flatten() == EOS).nonzero(as_tuple=True)
    found = {0, tokens_BT.numel(), *(ends + 1).tolist()}
    return torch.tensor(sorted(found), dtype=torch.int32)
