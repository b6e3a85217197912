"""Names that options take. Commands list them in their help, so nothing here imports torch."""

from typing import Literal

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
PrecisionName = Literal[
    "auto", "blockwise", "rowwise", "tensorwise", "mxfp8", "nvfp4", "nf4", "mxfp4",
]  # fmt: skip
MomentDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "overlapped", "zero-bubble", "zbv", "dualpipe-v"
]
GpuName = Literal[
    "a100-80", "h100-80", "h200-141", "h20-96", "b200-180", "b300-262", "gb200-186", "gb300-279",
    "l40s-48", "rtx4090-24", "rtx5090-32",
]  # fmt: skip
PlannedDispatcher = Literal["auto", "hierarchical"]
PresetName = Literal[
    "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b",
    "mixtral-8x7b", "olmoe-1b-7b", "deepseek-v3", "deepseek-v3.2",
    "moonlight-16b-a3b", "kimi-k2", "deepseek-v2", "deepseek-v2-lite", "glm-4.5", "glm-4.5-air",
    "qwen2-57b-a14b", "gpt-oss-20b", "gpt-oss-120b", "tiny", "tiny-qwen3",
    "tiny-qwen3-next", "tiny-nemotron-h", "tiny-shared", "tiny-deepseek-v3",
]  # fmt: skip
