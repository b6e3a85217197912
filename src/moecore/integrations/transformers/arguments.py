"""Checks for Trainer arguments and accelerate settings that would wrap, cast or save the model."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

from moecore.base.fields import quote
from moecore.integrations.transformers.scheduled import is_dynamic
from moecore.parallel.model.parallel_state import get_moe_state, get_request

_PRECISION = "give parallelize_moe fsdp=FSDPOptions(param_dtype=torch.bfloat16)"
_SHARDING = "leave it out, parallelize_moe has sharded the model"
# Field that must be off -> the fix in the error.
REFUSED = {
    "bf16": _PRECISION,
    "fp16": _PRECISION.replace("bfloat16", "float16") + ", which brings its loss scale",
    "bf16_full_eval": _PRECISION,
    "fp16_full_eval": _PRECISION.replace("bfloat16", "float16"),
    "fsdp": _SHARDING,
    "deepspeed": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_compile": "use parallelize_moe(dense=DenseOptions(compile=True))",
    "use_liger_kernel": "it replaces modules of the sharded model",
    "auto_find_batch_size": "set per_device_train_batch_size",
    "save_only_model": "checkpoints are for resuming, save_model() exports",
    "push_to_hub": "upload the directory that save_model() writes",
    "enable_jit_checkpoint": "use save_steps, saves run in the background",
}

# Allowed prefixes of Accelerator.distributed_type, on any device.
_PLAIN_TYPES = ("NO", "MULTI_")


def check_trainer_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for arguments of Trainer that `MoETrainer` does not support."""
    for name, fix in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"{name} ({value}) must be off for MoETrainer: {fix}")
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu ({args.n_gpu}) must be 1 for MoETrainer: start one process per GPU with "
            "torchrun, or set CUDA_VISIBLE_DEVICES"
        )
    if not args.accelerator_config.even_batches:
        raise ValueError(
            "accelerator_config.even_batches (False) must be True for MoETrainer: every rank must "
            "run the same number of forwards"
        )
    if args.load_best_model_at_end and args.save_total_limit:
        raise ValueError(
            f"save_total_limit ({args.save_total_limit}) must be None with load_best_model_at_end: "
            "the oldest checkpoints are removed, and one of them may be the best"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise ValueError if accelerate's settings enable wrapping, casting or compiling."""
    kind = str(accelerator.distributed_type.value)
    backend = str(accelerator.state.dynamo_plugin.backend.value)
    settings = (
        ("mixed_precision", accelerator.mixed_precision, "no", _PRECISION),
        ("dynamo_backend", backend.lower(), "no", REFUSED["torch_compile"]),
        ("distributed_type", kind, kind if kind.startswith(_PLAIN_TYPES) else "plain", _SHARDING),
    )
    for name, value, requirement, fix in settings:
        if value != requirement:
            raise ValueError(
                f"{name} ({value}) of accelerate's config must be off for MoETrainer: {fix}"
            )


def check_model(model: nn.Module, args: TrainingArguments) -> None:
    """Raise ValueError if Trainer's arguments do not support a model's loss or parallel degrees."""
    state = get_moe_state(model)
    if state.loss != "mean" and not is_dynamic(model):
        raise ValueError(
            f"loss ({state.loss!r}) of parallelize_moe must be 'mean' for MoETrainer: leave it "
            "out, Trainer divides by the tokens of all ranks itself"
        )
    request = get_request(model)
    assert request is not None, "the model has a state"
    processes = state.groups.data_ranks * state.groups.cp * request.meshes.parallel.tp
    if processes != args.world_size:
        fix = "build meshes with pp=1, and start all processes with torchrun"
        if args.device.type == "cpu" and not args.use_cpu and args.world_size == 1:
            fix = "pass TrainingArguments(use_cpu=True), without which accelerate makes no process "
            fix += "group of ranks that have no GPU"
        raise ValueError(
            f"data ranks times cp times tp ({processes}) must equal the processes of "
            f"TrainingArguments ({args.world_size}): {fix}"
        )


def shards_rows(model: nn.Module) -> bool:
    """Whether cp shards rows, so each rank has logits of only a part of each row."""
    return is_dynamic(model) or get_moe_state(model).groups.cp > 1


def check_logits(trainer: Trainer, *, overrides_prediction: bool) -> None:
    """Raise ValueError if an option or overridden method of a trainer reads full rows' logits."""
    args, cp = trainer.args, get_moe_state(trainer.model).groups.cp
    function, smoothing = trainer.compute_loss_func, args.label_smoothing_factor
    class_name, own_loss = type(trainer).__name__, type(trainer).compute_loss
    requirements = (
        ("compute_metrics", trainer.compute_metrics is None, "None"),
        ("preprocess_logits_for_metrics", trainer.preprocess_logits_for_metrics is None, "None"),
        (f"label_smoothing_factor ({smoothing})", not smoothing, "0"),
        (f"compute_loss_func ({quote(function)})", function is None, "None"),
        (f"compute_loss of {class_name}", own_loss is Trainer.compute_loss, "that of Trainer"),
        (f"prediction_step of {class_name}", not overrides_prediction, "that of MoETrainer"),
    )
    for name, is_met, requirement in requirements:
        if not is_met:
            raise ValueError(
                f"{name} must be {requirement} with ParallelConfig.cp ({cp}) > 1 or "
                "ContextOptions.dynamic, where a rank has the logits of its own tokens: leave it "
                "out, or use cp=1"
            )


def check_prediction(model: nn.Module, prediction_loss_only: bool) -> None:
    """Raise ValueError if a prediction returns logits although cp shards rows."""
    if not prediction_loss_only and shards_rows(model):
        raise ValueError(
            "prediction_loss_only (False) must be True with ParallelConfig.cp > 1 or "
            "ContextOptions.dynamic, where a rank has the logits of its own tokens: pass "
            "TrainingArguments(prediction_loss_only=True), or predict with cp=1"
        )
