"""Runs that the report measured, as data: tables 17, 18 and 20, and what moecore has of each.

Tables 17 and 20 disagree about DeepSeek-V3 on H100: pp 8 in one, 4 in the other. Both are here.

Source: arXiv:2603.07685, section 9.2 and appendix B.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moecore.base.fields import check_arguments
from moecore.base.options.memory import MemoryOptions, Recomputed
from moecore.base.options.names import ScheduleName
from moecore.base.options.precision import Precision
from moecore.models.presets import PRESETS
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.gpus import count_domain_ranks, count_peers, get_gpu
from moecore.planning.option_sets import PLAIN_FSDP
from moecore.planning.run import OptimizerOptions, TrainingRun

GB200, GB300 = "gb200-186", "gb300-279"
UP_MLP: tuple[Recomputed, ...] = ("mla_up_proj", "mlp")
CHEAP: tuple[Recomputed, ...] = ("activation", "norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One measured run."""

    preset: str
    gpu: str
    num_gpus: int
    tflops: int  # reported, per GPU
    source: str
    degrees: tuple[int, int, int, int]  # tp, pp, cp, ep
    chunks: int
    rows: int
    overlaps: bool = False  # of forwards and backwards ("1F1B overlap", appendix B.2)
    tokens_per_second: int | None = None  # per GPU (table 11), if the network limits the run
    slower: float = 0.0  # reported loss of products beside an exchange
    precision: str = "bf16"
    layout: str | None = None
    batch_size: int = 1
    seq_len: int = 4096
    recompute: tuple[Recomputed, ...] = ()
    offload_fraction: float = 0.0
    bf16_moments: bool = False
    without: tuple[str, ...] = ()  # what moecore does not have


def make_run(recipe: Recipe) -> TrainingRun:
    """Return the run of a recipe here; `Recipe.without` has what differs.

    Stages without a printed layout are as even as layers divide, fewer chunks where there are not
    as many layers as stages. Weights stay whole in a step, as with a distributed optimizer.
    """
    check_arguments(make_run, locals())
    tp, pp, cp, ep = recipe.degrees
    model = PRESETS[recipe.preset]
    chunks = None if recipe.layout else recipe.chunks
    gpu, domain = get_gpu(recipe.gpu), count_domain_ranks(recipe.gpu, recipe.num_gpus)
    return TrainingRun(
        model=replace(model, max_seq_len=max(model.max_seq_len, recipe.seq_len)),
        num_gpus=recipe.num_gpus, parallel=ParallelConfig(tp=tp, pp=pp, cp=cp, ep=ep),
        seq_len=recipe.seq_len, batch_size=recipe.batch_size,
        num_micro_batches=recipe.rows * tp * pp * cp // recipe.num_gpus // recipe.batch_size,
        pipeline=PipelineConfig(layout=recipe.layout, chunks=chunks, schedule=_schedule(recipe)),
        fsdp=PLAIN_FSDP, memory=MemoryOptions(recompute=recipe.recompute),
        precision=None if recipe.precision == "bf16" else Precision.of(recipe.precision),
        ranks_per_domain=domain, num_peers=count_peers(gpu, domain),
        has_block_scales=gpu.has_block_scales,
        optimizer=OptimizerOptions(
            moment_dtype="bfloat16" if recipe.bf16_moments else "float32",
            offload_fraction=recipe.offload_fraction,
        ),
    )  # fmt: skip


def _schedule(recipe: Recipe) -> ScheduleName:
    return "overlapped" if recipe.overlaps else "interleaved"


def _deepseek(gpu: str, num_gpus: int, tflops: int, source: str, **more: object) -> Recipe:
    same = dict(preset="deepseek-v3", gpu=gpu, num_gpus=num_gpus, tflops=tflops, source=source)
    return Recipe(**same, chunks=4, bf16_moments=True, **more)  # type: ignore[arg-type]


def _qwen(gpu: str, num_gpus: int, tflops: int, **more: object) -> Recipe:
    same = dict(preset="qwen3-235b-a22b", gpu=gpu, num_gpus=num_gpus, tflops=tflops)
    return Recipe(**same, source="table 20", **more)  # type: ignore[arg-type]


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "deepseek-v3-gb300-256": _deepseek(
            GB300, 256, 1233, "table 20", degrees=(1, 4, 1, 64), rows=8192, precision="mxfp8",
            overlaps=True,

        ),
        "deepseek-v3-gb200-256": _deepseek(
            GB200, 256, 1048, "tables 17, 18, 20", degrees=(1, 4, 1, 64), rows=8192,
            layout="Et*4|(tttt|)*14tmL", precision="mxfp8", recompute=("mlp",),
            offload_fraction=1.0,
        ),
        "deepseek-v3-gb200-256-bf16": _deepseek(
            GB200, 256, 857, "table 20", degrees=(1, 8, 1, 32), rows=4096, recompute=("mlp",),
            offload_fraction=1.0,
        ),
        "deepseek-v3-h100-1024": _deepseek(
            "h100-80", 1024, 368, "tables 17, 18", degrees=(2, 8, 1, 64), rows=8192,
            layout="Et*3|(tt|)*29m|L", precision="blockwise", overlaps=True, tokens_per_second=1412,
            slower=0.2,  # "DeepEP uses 20 SMs [..] roughly 20% GEMM-efficiency overhead", 4.2.3
            recompute=("mlp", "mla_up_proj", "activation", "norm"),
        ),
        "deepseek-v3-h100-1024-pp4": _deepseek(
            "h100-80", 1024, 368, "table 20", degrees=(2, 4, 1, 64), rows=8192,
            precision="blockwise", recompute=UP_MLP, overlaps=True,
        ),
        "qwen3-235b-gb300-256": _qwen(
            GB300, 256, 974, degrees=(1, 4, 1, 64), chunks=6, batch_size=2, rows=3072,
            precision="mxfp8",
        ),
        "qwen3-235b-gb200-256": _qwen(
            GB200, 256, 919, degrees=(1, 4, 1, 64), chunks=6, batch_size=3, rows=3072,
            precision="mxfp8", recompute=CHEAP, overlaps=True,
        ),
        "qwen3-235b-gb200-256-bf16": _qwen(
            GB200, 256, 750, degrees=(1, 4, 1, 32), chunks=12, rows=8192, recompute=CHEAP,
            overlaps=True,
        ),
        "qwen3-235b-h100-256": _qwen(
            "h100-80", 256, 320, degrees=(2, 8, 1, 32), chunks=4, rows=2048, recompute=CHEAP,
            overlaps=True, tokens_per_second=2132,
        ),
        "qwen3-235b-gb300-128-128k": _qwen(
            GB300, 128, 1150, degrees=(4, 4, 4, 32), chunks=12, rows=1024, seq_len=131_072,
            precision="mxfp8",
        ),
    }
)  # fmt: skip
