"""Jobs of torchtitan 0.3 with moecore's layers.

    torchtitan.train --module moecore.integrations.torchtitan.v03.jobs --config CONFIG

| CONFIG                                           | job                                       |
|--------------------------------------------------|-------------------------------------------|
| qwen3_moe_debug, qwen3_30b_a3b                   | torchtitan's job of this name, with       |
| deepseek_v3_debugmodel, _16b, _671b              | moecore's MoE layers                      |
| decoder_NAME for NAME in `PRESETS` (- becomes _) | moecore's decoder on text                 |
| hf                                               | the Hugging Face model `hf_assets_path`   |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from moecore.integrations.torchtitan.options import make_import_error

try:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    raise make_import_error(error, "v03.jobs") from error
from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import TrainingConfig
from torchtitan.config.override import derive
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3_jobs
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.qwen3 import config_registry as qwen3_jobs
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model import BaseModel

from moecore.base.options.layer import BalanceConfig
from moecore.integrations.torchtitan import models
from moecore.integrations.torchtitan.parallelize import (
    check_model,
    parallelize_own_loss_model,
    parallelize_titan_model,
    refuse_custom_function,
)
from moecore.integrations.torchtitan.step import register_step_hooks
from moecore.integrations.torchtitan.v03.parts import (
    V03,
    MoETrainer,
    OwnLossTrainer,
    SumLoss,
    TitanDecoder,
    TitanHF,
    TitanMetrics,
    build_pipeline_schedule,
)
from moecore.models import PRESETS, DecoderConfig


def accelerated(job: Trainer.Config) -> MoETrainer.Config:
    """Return a copy of a torchtitan job whose MoE blocks become moecore layers.

    Names, shapes and the checkpoint layout of torchtitan do not change. Selection biases are
    updated if the given job updates them. The model is torchtitan's Qwen3Model or DeepSeekV3Model
    or a subclass.

    Raises:
        ValueError: for a job of another trainer class.
        NotImplementedError: for another model, a quantized one, or multi-token prediction.
    """
    if type(job) is not Trainer.Config:
        raise ValueError(
            f"job ({type(job).__qualname__}) must be torchtitan's Trainer.Config: another trainer "
            "would lose what it does; subclass MoETrainer and write its Config"
        )
    spec = job.model_spec
    check_model("ModelSpec.model", type(spec.model), (Qwen3Model.Config, DeepSeekV3Model.Config))
    if mtp_layers := getattr(spec.model, "mtp_layers", None):
        raise NotImplementedError(
            f"ModelSpec.model.mtp_layers ({len(mtp_layers)}) must be none for a moecore "
            "model of torchtitan's: use decoder_job with num_mtp_layers"
        )
    if has_quantization(spec.model):
        raise NotImplementedError(
            f"ModelSpec.model ({spec.name} {spec.flavor}, quantized) must be plain for a moecore "
            "model: drop the converters"
        )
    hook, bias_hook = spec.post_optimizer_build_fn, register_moe_load_balancing_hook
    refuse_custom_function("ModelSpec.post_optimizer_build_fn", hook, (None, bias_hook))
    shard = partial(parallelize_titan_model, version=V03, update_bias=hook is bias_hook)
    functions = dict(
        pipelining_fn=build_pipeline_schedule, post_optimizer_build_fn=register_step_hooks
    )
    spec = replace(spec, parallelize_fn=shard, **functions)
    result: MoETrainer.Config = derive(
        job,
        MoETrainer.Config,
        model_spec=spec,
        metrics=derive(job.metrics, TitanMetrics.Config),
        training=replace(job.training, disable_cuda_graphs=True),
    )
    return result


def decoder_job(decoder: DecoderConfig, name: str = "decoder") -> OwnLossTrainer.Config:
    """Return a job that trains moecore's decoder on text; `name` is the flavor in logs."""
    model = TitanDecoder.Config(decoder=decoder)
    return _make_own_loss_job(name, model, parallelize_own_loss_model, seq_len=decoder.max_seq_len)


def hf_job(
    source: models.Source | None = None, *, balance: BalanceConfig | None = None
) -> OwnLossTrainer.Config:
    """Return a job that trains a Hugging Face MoE model on text (adapters: docs/extending.md).

    Args:
        source: a transformers config, or a directory with a config.json; None = the job's
            `hf_assets_path`.
        balance: balance options of all MoE layers; None = no auxiliary loss and no bias updates.
    """
    parallelize = partial(models.parallelize_hf_model, balance=balance)
    job = _make_own_loss_job("hf", TitanHF.Config(source=source), parallelize, seq_len=4096)
    job.model_spec.state_dict_adapter = models.HFNames
    return job


def _make_own_loss_job(
    flavor: str, model: BaseModel.Config, parallelize: Callable[..., nn.Module], *, seq_len: int
) -> OwnLossTrainer.Config:
    """Return the job of a model that returns its loss, with at most 4096 tokens a row."""
    spec = ModelSpec(
        name="moecore",
        flavor=flavor,
        model=model,
        parallelize_fn=partial(parallelize, version=V03),
        pipelining_fn=build_pipeline_schedule,
        post_optimizer_build_fn=register_step_hooks,
        state_dict_adapter=None,
    )
    return OwnLossTrainer.Config(
        model_spec=spec,
        loss=SumLoss.Config(),
        metrics=TitanMetrics.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            local_batch_size=1, seq_len=min(4096, seq_len), disable_cuda_graphs=True
        ),
    )


def hf() -> OwnLossTrainer.Config:
    """Return the job `hf_job()`: its model is in the directory `hf_assets_path`."""
    return hf_job()


# torchtitan finds a job by the name of a function in this module.
for _module, _jobs in (
    (qwen3_jobs, ("qwen3_moe_debug", "qwen3_30b_a3b")),
    (deepseek_v3_jobs, ("deepseek_v3_debugmodel", "deepseek_v3_16b", "deepseek_v3_671b")),
):
    for _job in _jobs:
        globals()[_job] = partial(lambda make: accelerated(make()), getattr(_module, _job))
for _name, _decoder in PRESETS.items():
    globals()[f"decoder_{_name.replace('-', '_')}"] = partial(decoder_job, _decoder, _name)
