"""Two small jobs for torchtitan 0.3 on the folder that text.py writes, for a host without a GPU.

`small_qwen3` is torchtitan's `qwen3_moe_debug` with moecore's MoE layers and an attention that the
CPU can train with; `small_decoder` is moecore's tiny DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from moecore.integrations.torchtitan.v03.jobs import accelerated, decoder_job
from moecore.models import preset

TEXT = "runs/titan_text"


def small_qwen3() -> Any:
    job = qwen3_moe_debug()
    for layer in job.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return small(accelerated(job))


def small_decoder() -> Any:
    return small(decoder_job(replace(preset("tiny-deepseek-v3"), vocab_size=512)))


def small(job: Any) -> Any:
    return replace(
        job,
        hf_assets_path=TEXT,
        dump_folder="runs/titan",
        # "c4_test" is the name of a format: one json object with a "text" per line.
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{TEXT}/data"),
        optimizer=replace(job.optimizer, implementation="foreach"),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=128,
            steps=5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=replace(job.metrics, log_freq=1, disable_color_printing=True),
    )
