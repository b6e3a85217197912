"""moecore inside torchtitan 0.2.x, by configuration alone: importing this module registers models.

    torchtitan.train --experimental.custom_import moecore.integrations.torchtitan.v02.specs \
        --model.name NAME

| NAME                | model                                              | flavors              |
|---------------------|----------------------------------------------------|----------------------|
| moecore_qwen3       | torchtitan's Qwen3 with moecore's MoE layers       | torchtitan's         |
| moecore_deepseek_v3 | torchtitan's DeepSeek-V3 with moecore's MoE layers | torchtitan's         |
| moecore             | moecore's own decoder                              | `models.PRESETS`     |
| moecore_hf          | a Hugging Face MoE model, `model.hf_assets_path`'s | assets               |

The registry is torchtitan's, and it wants its entries made at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.integrations.torchtitan.options import import_error

try:
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
except ModuleNotFoundError as error:
    raise import_error(
        error,
        "moecore.integrations.torchtitan.v02.specs needs torchtitan 0.2 (pip install "
        "'torchtitan<0.3'): with torchtitan 0.3 use --module "
        "moecore.integrations.torchtitan.v03.jobs",
    ) from error
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import (
    OptimizersContainer,
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.deepseek_v3.infra.parallelize import apply_non_moe_tp as deepseek_v3_tp
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.qwen3.infra.parallelize import apply_non_moe_tp as qwen3_tp
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
from torchtitan.protocols import BaseModelArgs

from moecore.base.options.layer import BalanceConfig
from moecore.integrations.torchtitan.hf_model import HFNames, Source
from moecore.integrations.torchtitan.step import MoEMetricsProcessor, finish_before_step
from moecore.integrations.torchtitan.v02.decoder import (
    TitanDecoder,
    TitanDecoderArgs,
    build_sum_loss,
    parallelize_decoder,
    with_labels,
)
from moecore.integrations.torchtitan.v02.hf import TitanHF, TitanHFArgs, parallelize_hf
from moecore.integrations.torchtitan.v02.parallel import parallelize_titan
from moecore.models import PRESETS, DecoderConfig
from moecore.train import AdamW


def accelerated(spec: TrainSpec) -> TrainSpec:
    """Return the TrainSpec of a torchtitan model whose MoE blocks become moecore layers.

    Names, shapes and the layout of checkpoints stay torchtitan's. Selection biases move if the
    given spec moves them (DeepSeek-V3 does, Qwen3 does not).

    Args:
        spec: of torchtitan's Qwen3Model or DeepSeekV3Model or a subclass, with any flavors.

    Raises:
        NotImplementedError: for another model, or a spec with functions of its own that would be
            replaced.
    """
    dense_tp = next((tp for c, tp in _DENSE_TP.items() if issubclass(spec.model_cls, c)), None)
    if dense_tp is None:
        raise NotImplementedError(
            f"TrainSpec.model_cls ({spec.model_cls.__name__}) must be one of "
            f"{', '.join(c.__name__ for c in _DENSE_TP)}: write a parallelize_fn around "
            "moecore.integrations.torchtitan.v02.parallel.parallelize_titan"
        )
    for field, known in _REPLACED.items():
        value = getattr(spec, field)
        if value not in known:
            raise NotImplementedError(
                f"TrainSpec.{field} ({value!r:.80}) must be torchtitan's own, because moecore's "
                "takes its place: set yours on the spec that accelerated returns, around the one "
                "that it has there"
            )
    parallelize = partial(
        parallelize_titan,
        dense_tp=dense_tp,
        update_bias=spec.build_optimizers_fn is build_optimizers_with_moe_load_balancing,
    )
    return replace(
        spec,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_metrics_processor_fn=build_metrics_processor,
    )


def decoder_spec(flavors: Mapping[str, DecoderConfig]) -> TrainSpec:
    """Return the TrainSpec of moecore's own decoder.

    The decoder makes its loss itself, in chunks, so logits of all tokens never exist; labels reach
    it through the data loader, see `with_labels`.

    Args:
        flavors: name -> config.
    """
    args = {name: TitanDecoderArgs(config=config) for name, config in flavors.items()}
    return _own_loss_spec(TitanDecoder, args, parallelize_decoder)


def hf_spec(
    flavors: Mapping[str, Source | None], *, balance: BalanceConfig | None = None
) -> TrainSpec:
    """Return the TrainSpec of Hugging Face MoE models (transformers >= 5).

    Loss and labels are as in `decoder_spec`. Which models: those with an adapter, see
    docs/adapters.md.

    Args:
        flavors: name -> a transformers config, or a directory with a config.json; None = the
            job's `model.hf_assets_path`.
        balance: of every MoE layer; None = no auxiliary loss, and selection biases stay.
    """
    args = {name: TitanHFArgs(source) for name, source in flavors.items()}
    spec = _own_loss_spec(TitanHF, args, partial(parallelize_hf, balance=balance))
    return replace(spec, state_dict_adapter=HFNames)


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> OptimizersContainer:
    """Return torchtitan's optimizers, which call `finish_step` of every model part first.

    A fused AdamW is moecore's: the same steps and state, in less time.

    Args:
        optimizer_config: torchtitan's `job_config.optimizer`.
        ft_manager: torchtitan's fault tolerance, or None.
    """
    c = optimizer_config
    as_titan = c.early_step_in_backward or (ft_manager is not None and ft_manager.enabled)
    if (c.name, c.implementation) == ("AdamW", "fused") and not as_titan:
        options = {
            "lr": c.lr,
            "betas": (c.beta1, c.beta2),
            "eps": c.eps,
            "weight_decay": c.weight_decay,
        }
        optimizers = OptimizersContainer(model_parts, AdamW, options)
    else:
        optimizers = build_titan_optimizers(model_parts, c, parallel_dims, ft_manager)
    finish_before_step(optimizers, model_parts)
    return optimizers


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> MoEMetricsProcessor:
    """Return the metrics processor; the signature is torchtitan's."""
    return MoEMetricsProcessor(job_config, parallel_dims, tag)


def _own_loss_spec(
    model_cls: type[Any], args: Mapping[str, BaseModelArgs], parallelize: Callable[..., nn.Module]
) -> TrainSpec:
    """The TrainSpec of a model that makes its loss itself."""
    return TrainSpec(
        model_cls=model_cls,
        model_args=args,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=with_labels(build_text_dataloader),
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_sum_loss,
        build_metrics_processor_fn=build_metrics_processor,
    )


def _qwen3_tp(model: nn.Module, tp_mesh: DeviceMesh, job_config: JobConfig) -> None:
    qwen3_tp(
        model,
        tp_mesh,
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        enable_float8_tensorwise_tp=False,
        enable_async_tp=False,
        cp_enabled=False,
    )


def _deepseek_v3_tp(model: nn.Module, tp_mesh: DeviceMesh, job_config: JobConfig) -> None:
    deepseek_v3_tp(
        model,
        tp_mesh,
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        enable_float8_tensorwise_tp=False,
        cp_enabled=False,
    )


_DENSE_TP = {qwen3.Qwen3Model: _qwen3_tp, deepseek_v3.DeepSeekV3Model: _deepseek_v3_tp}
# What `accelerated` replaces, and what may be lost by it.
_REPLACED: dict[str, tuple[Any, ...]] = {
    "parallelize_fn": (parallelize_qwen3, parallelize_deepseekv3),
    "build_optimizers_fn": (build_titan_optimizers, build_optimizers_with_moe_load_balancing),
    "build_metrics_processor_fn": (None,),
}

register_train_spec("moecore_qwen3", accelerated(qwen3.get_train_spec()))
register_train_spec("moecore_deepseek_v3", accelerated(deepseek_v3.get_train_spec()))
register_train_spec("moecore", decoder_spec(PRESETS))
register_train_spec("moecore_hf", hf_spec({"assets": None}))
