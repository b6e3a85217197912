"""moecore as a training engine of verl: `strategy="moecore"` of an actor or a reference model.

    BaseEngine                     MoECoreEngine
    initialize                     `parallelize_moe`, `load_hf`, a `TrainStep`
    forward_backward_batch         verl's micro-batches as packed rows, verl's loss
    optimizer_step, zero_grad      `TrainStep.finish`, `drop`
    get_per_tensor_param           `stream_weights`
    to                             `TrainingOffload`
    save_, load_checkpoint         `save`, `load`

verl scales the losses of micro-batches, so that their sum, averaged over data ranks, is the loss of
the batch. Importing this module registers the engine; each worker imports the module if
`HFModelConfig.external_lib` is "moecore.integrations.verl".

Legend: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils import tensordict_utils
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config import EngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from moecore.base.options.fsdp import FSDPOptions
from moecore.families import use_causal_attention
from moecore.io import latest, load, load_hf, save, stream_weights
from moecore.models.log_probs import LogProbLoss
from moecore.models.loss import IGNORE_INDEX
from moecore.parallel.mesh import ParallelConfig, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.train.memory.training_offload import Part, TrainingOffload
from moecore.train.optim.adamw import AdamW
from moecore.train.step import TrainStep

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass
class MoECoreEngineConfig(EngineConfig):
    """verl's engine options and moecore's parallel degrees.

    Attributes:
        parallel: fields of `ParallelConfig` by name; pp, tp and cp must be 1.
    """

    strategy: str = "moecore"
    parallel: dict[str, int] = field(default_factory=dict)


@EngineRegistry.register(model_type="language_model", backend="moecore", device="cuda")
class MoECoreEngine(BaseEngine):
    """Trains a transformers causal language model on verl's batches, packed without padding.

    The arguments are verl's. The optimizer is `moecore.train.AdamW` with the additional arguments
    in `override_optimizer_config`. All methods are collective. ValueError for pp, tp or cp above 1,
    and for a batch with two temperatures.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: MoECoreEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config = optimizer_config
        self.mode: str | None = None
        shared = {n: d for n, d in engine_config.parallel.items() if n in ("pp", "tp", "cp")}
        if any(degree != 1 for degree in shared.values()):
            raise ValueError(f"parallel ({shared}) must have pp, tp and cp of 1: leave them out")
        # Before `initialize`, because verl's workers read the data ranks on construction.
        self._meshes = build_meshes(ParallelConfig(**engine_config.parallel))

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether weights are on the host outside of `train_mode` and `eval_mode`."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer state is on the host outside of `train_mode`."""
        return bool(self.engine_config.optimizer_offload)

    def initialize(self) -> None:
        """Build, shard and load the model of `model_config`, and build its optimizer."""
        engine_config, path = self.engine_config, self.model_config.local_path
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        use_causal_attention(model)
        fsdp = FSDPOptions(param_dtype=getattr(torch, engine_config.dtype))
        self.module = parallelize_moe(model, self._meshes, fsdp=fsdp)
        self.module.to_empty(device=self._meshes.device)
        load_hf(path, self.module)
        self.optimizer = self.lr_scheduler = None
        if not engine_config.forward_only:
            optimizer_config = self.optimizer_config
            options = {name: getattr(optimizer_config, name) for name in ("lr", "weight_decay")}
            options |= {"betas": tuple(optimizer_config.betas)}
            options |= optimizer_config.override_optimizer_config or {}
            self.optimizer = AdamW(self.module.parameters(), **options)
            self.lr_scheduler = self._make_lr_schedule(self.optimizer)
        max_norm = self.optimizer_config.clip_grad if self.optimizer else None
        self._step = TrainStep(self.module, self.optimizer, max_norm=max_norm)
        self._offload = TrainingOffload(self.module, self.optimizer)
        self._weights = stream_weights(self.module)
        model, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=model, optimizer=optimizer, grad=model)

    def _make_lr_schedule(self, optimizer: AdamW) -> LRScheduler:
        config = self.optimizer_config
        steps = config.lr_warmup_steps or 0
        if steps <= 0:
            steps = int(config.lr_warmup_steps_ratio * config.total_training_steps)
        schedule: LRScheduler
        if config.lr_scheduler_type == "constant":
            schedule = get_constant_schedule_with_warmup(optimizer, steps)
        else:
            names = ("min_lr_ratio", "num_cycles", "zero_indexed_step")
            options = {name: getattr(config, name) for name in names}
            total = config.total_training_steps
            schedule = get_cosine_schedule_with_warmup(optimizer, steps, total, **options)
        return schedule

    def train_mode(self, **options: Any) -> _ModeContext:
        """Return a context with model and optimizer on the device, in training mode."""
        return _ModeContext(engine=self, mode="train", **options)

    def eval_mode(self, **options: Any) -> _ModeContext:
        """Return a context with the model on the device, in eval mode."""
        return _ModeContext(engine=self, mode="eval", **options)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Loss | None, forward_only: bool = False
    ) -> Any:
        """Run a batch and return verl's output; without `loss_function`, only log-probs."""
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(self._meshes.device)
        dist.all_reduce(num_tokens, group=group)
        metrics = {"batch_num_tokens": num_tokens.item(), "dp_size": self.get_data_parallel_size()}
        tensordict_utils.assign_non_tensor(data, **metrics)
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group)
        outputs: list[dict[str, Any]] = []
        number = len(micro_batches)
        inputs = [self._make_inputs(b, loss_function, outputs, number) for b in micro_batches]
        if forward_only:
            self._step.compute_losses(inputs)
        else:
            self._step.num_micro_batches = number
            self._step.forward_backward(inputs)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _make_inputs(
        self,
        data: TensorDict,
        loss_function: Loss | None,
        outputs: list[dict[str, Any]],
        num_micro_batches: int,
    ) -> dict[str, Any]:
        """Return forward arguments with a loss that calls verl's and appends its output."""
        data = data.to(self._meshes.device)
        tokens_N, cu_seqlens = data["input_ids"].values(), data["input_ids"].offsets()
        labels_N = tokens_N.roll(-1)
        labels_N[cu_seqlens[1:] - 1] = IGNORE_INDEX
        temperature = torch.as_tensor(data["temperature"], device="cpu").unique().tolist()
        if len(temperature) > 1:
            raise ValueError(f"temperature ({temperature}) must be one number for a batch")

        def loss(log_probs_1N: Tensor, entropy_1N: Tensor | None) -> Tensor:
            named = {"log_probs": log_probs_1N, "entropy": entropy_1N}
            arguments = {
                name: torch.nested.nested_tensor_from_jagged(numbers_1N[0], cu_seqlens)
                for name, numbers_1N in named.items()
                if numbers_1N is not None
            }
            total, metrics = log_probs_1N.new_zeros(()), dict[str, Any]()
            if loss_function is not None:
                group = self.get_data_parallel_group()
                total, metrics = loss_function(model_output=arguments, data=data, dp_group=group)
            output = {"model_output": detach_tree(arguments), "loss": float(total.detach())}
            outputs.append(output | {"metrics": metrics})
            # `TrainStep.forward_backward` averages over micro-batches.
            return total * num_micro_batches

        get = tensordict_utils.get_non_tensor_data
        return {
            "input_ids": tokens_N[None],
            "cu_seqlens": cu_seqlens.int(),
            "max_seqlen": int(cu_seqlens.diff().max()),
            "use_cache": False,
            "log_prob_loss": LogProbLoss(
                labels_BT=labels_N[None],
                function=loss,
                temperature=float(temperature[0]),
                entropy=get(data=data, key="calculate_entropy", default=False),
            ),
        }

    def optimizer_zero_grad(self) -> None:
        """Discard the gradients of the current step."""
        self._step.drop()

    def optimizer_step(self) -> float:
        """Run the optimizer step; return the gradient norm before clipping. Host sync."""
        norm = self._step.finish().norm
        assert norm is not None, "the engine has an optimizer"
        return float(norm.total)

    def lr_scheduler_step(self) -> float:
        """Advance the LR schedule; return the new learning rate of the first param group."""
        assert self.lr_scheduler is not None, "the engine has an optimizer"
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return an iterator of (Hugging Face name, unsharded weight), and None."""
        return iter(self._weights), None

    def get_data_parallel_size(self) -> int:
        """Return the number of data ranks."""
        return self._meshes.data_ranks

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank among the data ranks."""
        return self._meshes.data_rank

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the data ranks."""
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True, because every rank is a data rank and has outputs."""
        return True

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move model, optimizer state or gradients to the host ("cpu") or the GPU (other names)."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        is_moved: dict[Part, bool] = {"weights": model, "buffers": model}
        is_moved |= {"optimizer": optimizer, "grads": grad}
        move = self._offload.offload if device == "cpu" else self._offload.onload
        for part in (part for part in is_moved if is_moved[part]):
            move(part)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save model, optimizer and schedule; keep the newest `max_ckpt_to_keep` (None = all)."""
        keep, scheduler = max_ckpt_to_keep or 0, self.lr_scheduler
        save(local_path, global_step, self.module, self.optimizer, scheduler=scheduler, keep=keep)

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        """Load the newest checkpoint in `local_path`; ValueError if there is no checkpoint."""
        newest = latest(local_path)
        if newest is None:
            raise ValueError(f"local_path ({local_path}) must have a checkpoint: save one there")
        load(newest, self.module, self.optimizer, scheduler=self.lr_scheduler)


class _ModeContext(BaseEngineCtx):
    """Context in which an engine's model is on the device, in mode "train" or "eval"."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, value, trace)
