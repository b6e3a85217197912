"""moecore as a training engine of verl: `strategy="moecore"` of an actor or a reference model.

    BaseEngine                     MoECoreEngine
    initialize                     `parallelize_moe`, `load_hf`, a `TrainStep`
    forward_backward_batch         verl's micro-batches as packed rows, verl's loss, router replay
    optimizer_step, zero_grad      `TrainStep.finish`, `drop`
    get_per_tensor_param           `stream_weights`
    to                             `TrainingOffload`
    save_, load_checkpoint         `save`, `load`

verl scales the losses of micro-batches, so that their sum, averaged over data ranks, is the loss of
the batch. The tp, cp and pp ranks of a data rank receive the same batch. One of them returns the
outputs to verl: the rank with index 0 in tp and cp in the last pipeline stage. With dynamic context
parallelism, all ranks receive the full batch, and only the first data rank returns outputs.

Importing this module registers the engine; each worker imports the module if
`HFModelConfig.external_lib` is "moecore.integrations.verl".

Legend: N tokens of a batch, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from sys import maxsize
from typing import Any, NamedTuple

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

from moecore.base.options.context import ContextOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.rank_checks import gather_objects
from moecore.families import use_causal_attention
from moecore.io import latest, load, load_hf, save, stream_weights
from moecore.models.log_probs import LogProbLoss
from moecore.parallel.mesh import ParallelConfig, build_meshes, make_data_group
from moecore.parallel.model.parallel_state import get_request
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.rl.batches import schedule_rows
from moecore.rl.micro_batches import RolloutRow, RowLimits, build_row
from moecore.rl.rollouts import Rollouts
from moecore.rl.routes import RoutedLayers
from moecore.train.loss_scale import make_loss_scale
from moecore.train.memory.training_offload import Part, TrainingOffload
from moecore.train.optim.adamw import AdamW
from moecore.train.step import TrainStep

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


class _BatchPart(NamedTuple):
    """A part of verl's batch, and its packed row."""

    data: TensorDict
    sequence_idxs: list[int]  # in the batch; [] = only padding
    row: RolloutRow
    output: dict[str, Any]  # of verl; empty on a rank that does not return the outputs


@dataclass
class MoECoreEngineConfig(EngineConfig):
    """verl's engine options and moecore's parallel degrees.

    Attributes:
        parallel: fields of `ParallelConfig` by name. Pipeline stages run the schedule "1f1b".
        dynamic_context: choose the context parallel ranks of each micro-batch: 1, 2, 4, ... data
            ranks. The first data rank returns the outputs of all sequences.
    """

    strategy: str = "moecore"
    parallel: dict[str, int] = field(default_factory=dict)
    dynamic_context: bool = False


@EngineRegistry.register(model_type="language_model", backend="moecore", device="cuda")
class MoECoreEngine(BaseEngine):
    """Trains a transformers causal language model on verl's batches, packed without padding.

    The arguments are verl's. The optimizer is `moecore.train.AdamW` with the additional arguments
    in `override_optimizer_config`. A dtype of "float16" has a dynamic loss scale. All methods are
    collective. ValueError for a batch with two temperatures, and with `dynamic_context` for a batch
    without `max_token_len_per_gpu`.
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
        # Before `initialize`, because verl's workers read the data ranks on construction.
        self._meshes = build_meshes(ParallelConfig(**engine_config.parallel))
        self._is_dynamic = engine_config.dynamic_context
        self._data_group = make_data_group(self._meshes, self.get_data_parallel_size())

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
        self.module = parallelize_moe(
            model,
            self._meshes,
            loss="sum",
            fsdp=fsdp,
            pipeline=PipelineConfig() if self._meshes.parallel.pp > 1 else None,
            context=ContextOptions(dynamic=True) if self._is_dynamic else None,
        )
        self.module.to_empty(device=self._meshes.device)
        load_hf(path, self.module)
        self._layers = RoutedLayers.from_model(self.module, self._meshes)
        self.optimizer = self.lr_scheduler = None
        if not engine_config.forward_only:
            optimizer_config = self.optimizer_config
            options = {name: getattr(optimizer_config, name) for name in ("lr", "weight_decay")}
            options |= {"betas": tuple(optimizer_config.betas)}
            options |= optimizer_config.override_optimizer_config or {}
            self.optimizer = AdamW(self.module.parameters(), **options)
            self.lr_scheduler = self._make_lr_schedule(self.optimizer)
        max_norm = self.optimizer_config.clip_grad if self.optimizer else None
        scale = make_loss_scale(self.module)
        self._step = TrainStep(self.module, self.optimizer, max_norm=max_norm, loss_scale=scale)
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
        """Run a batch and return verl's output; without `loss_function`, only log-probs.

        If `EngineConfig.router_replay` is enabled, the experts in `routed_experts` are replayed. In
        mode "R2", a forward of a batch without `routed_experts` returns the routers' experts.
        """
        meshes, get = self._meshes, tensordict_utils.get_non_tensor_data
        num_tokens = data["loss_mask"].sum().to(meshes.device)
        dist.all_reduce(num_tokens, group=self._data_group)
        values = {"batch_num_tokens": num_tokens.item(), "dp_size": self.get_data_parallel_size()}
        tensordict_utils.assign_non_tensor(data, **values, sp_size=meshes.parallel.cp)
        # verl 0.9 sets this flag only for other engines.
        has_replay = get(data=data, key="enable_routing_replay", default=True)
        has_replay = has_replay and self.engine_config.router_replay.mode != "disabled"
        rollouts = self._make_rollouts(data, has_routes=has_replay)
        micro_batches = self._split_batch(data, rollouts)
        rows = [micro_batch.row for micro_batch in micro_batches]
        records = has_replay and forward_only and rollouts.routes_NLK is None
        records = records and self.engine_config.router_replay.mode == "R2"
        inputs = [self._make_inputs(micro_batch, loss_function) for micro_batch in micro_batches]
        with self._layers.record_routes() if records else self._layers.replay_rows(rows):
            if forward_only:
                self._step.compute_losses(inputs)
            else:
                self._step.num_micro_batches = len(inputs)
                self._step.forward_backward(inputs)
        outputs = [(batch.sequence_idxs, batch.output) for batch in micro_batches if batch.output]
        groups = list((meshes.pipeline_groups or ())[:1])
        if self._is_dynamic:
            for axis in ("dp_shard", "dp_replicate"):
                groups.append(meshes.dense.get_group(axis))
                outputs = [x for of_rank in gather_objects(outputs, groups[-1]) for x in of_rank]
        indices, output_list = zip(*outputs, strict=True) if outputs else ((), ())
        # With "use_dynamic_bsz", verl puts the sequences in the order of the batch.
        data = tensordict_utils.get_tensordict({}, {"use_dynamic_bsz": True})
        result = postprocess_batch_func(output_lst=output_list, indices=indices, data=data)
        if records:
            routes_NLK = self._layers.gather_routes(rows, len(rollouts.tokens_N), groups)
            offsets = rollouts.cu_seqlens.to(routes_NLK.device)
            routes = torch.nested.nested_tensor_from_jagged(routes_NLK, offsets)
            result["model_output"]["routed_experts"] = routes
        return result

    def _split_batch(self, data: TensorDict, rollouts: Rollouts) -> list[_BatchPart]:
        """Return the micro-batches of this rank. Collective over the data ranks."""
        meshes, get = self._meshes, tensordict_utils.get_non_tensor_data
        cp, tp = meshes.parallel.cp, meshes.parallel.tp
        if self._is_dynamic:
            max_tokens = get(data=data, key="max_token_len_per_gpu", default=None)
            if max_tokens is None:
                raise ValueError(
                    "max_token_len_per_gpu (None) must be a number with dynamic_context, the most "
                    "tokens of a data rank in a micro-batch: set it"
                )
            limits = RowLimits(max_tokens=max_tokens, cp=cp, tp=tp)
            select = tensordict_utils.index_select_tensor_dict
            return [
                _BatchPart(select(data, idxs or [0]), idxs, row, {})
                for idxs, row in schedule_rows(rollouts, limits, 1, meshes)
            ]
        parts, indices = prepare_micro_batches(data=data, dp_group=self._data_group)
        indices = indices or torch.arange(len(data), device="cpu").view(len(parts), -1).tolist()
        limits = RowLimits(max_tokens=maxsize, cp=cp, tp=tp)  # verl has split the batch
        return [
            _BatchPart(part, idxs, build_row(rollouts, idxs, limits, meshes.device), {})
            for part, idxs in zip(parts, indices, strict=True)
        ]

    def _make_rollouts(self, data: TensorDict, *, has_routes: bool) -> Rollouts:
        """Return the sequences of a batch, whose tokens are responses except each first token."""
        tokens_N, cu_seqlens = data["input_ids"].values(), data["input_ids"].offsets()
        mask_N = torch.ones_like(tokens_N, dtype=torch.bool)
        mask_N[cu_seqlens[:-1]] = False
        temperature = torch.as_tensor(data["temperature"], device="cpu").unique().tolist()
        if len(temperature) > 1:
            raise ValueError(f"temperature ({temperature}) must be one number for a batch")
        routes_NLK = None
        if has_routes and "routed_experts" in data:
            routes_NLK = data["routed_experts"].values().int()
            # verl fills tokens that the rollout server did not record with zeros.
            is_missing_N = (routes_NLK == 0).flatten(1).all(1)
            routes_NLK = routes_NLK.masked_fill(is_missing_N[:, None, None], -1)
        rollouts = Rollouts(
            tokens_N=tokens_N,
            cu_seqlens=cu_seqlens,
            response_mask_N=mask_N,
            routes_NLK=routes_NLK,
            temperature=float(temperature[0]),
        )
        if has_routes:
            self._layers.check_routes(rollouts)
        return rollouts

    def _make_inputs(self, micro_batch: _BatchPart, loss_function: Loss | None) -> dict[str, Any]:
        """Return forward arguments with a loss that calls verl's and sets `micro_batch.output`."""
        data, sequence_idxs, row, output = micro_batch
        cu_seqlens = row.rollouts.cu_seqlens.to(self._meshes.device)

        def nest(numbers_BT: Tensor) -> Tensor:
            """Return verl's layout: the value of a token is at the token before it."""
            numbers_N = row.scatter_to_tokens(numbers_BT).roll(-1)
            return torch.nested.nested_tensor_from_jagged(numbers_N, cu_seqlens)

        def loss(log_probs_BT: Tensor, entropy_BT: Tensor | None) -> Tensor:
            total, metrics = log_probs_BT.flatten()[:0].sum(), dict[str, Any]()
            if not sequence_idxs:  # only padding
                return total
            named = {"log_probs": log_probs_BT, "entropy": entropy_BT}
            arguments = {name: nest(x_BT) for name, x_BT in named.items() if x_BT is not None}
            if loss_function is not None:
                batch, group = data.to(self._meshes.device), self._data_group
                total, metrics = loss_function(model_output=arguments, data=batch, dp_group=group)
            if row.is_first:
                scores = {name: x.cpu() for name, x in detach_tree(arguments).items()}
                number = float(total.detach())
                output.update(model_output=scores, loss=number, metrics=metrics)
            return total / self.get_data_parallel_size()

        request, get = get_request(self.module), tensordict_utils.get_non_tensor_data
        assert request is not None, "the model is parallelized"
        inputs = request.family.make_forward_arguments(row.batch)
        inputs |= {"cp": row.cp} if self._is_dynamic else {}
        return inputs | {
            "log_prob_loss": LogProbLoss(
                labels_BT=row.labels_BT,
                function=loss,
                temperature=row.rollouts.temperature,
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
        """Return the number of data ranks, to which verl sends different sequences."""
        return 1 if self._is_dynamic else self._meshes.data_ranks

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank among the data ranks."""
        return 0 if self._is_dynamic else self._meshes.data_rank

    def get_data_parallel_group(self) -> Any:
        """Return the group of the data ranks with this rank's indices in pp, cp and tp."""
        return self._data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank returns the outputs of its data rank to verl."""
        meshes, axes = self._meshes, ["cp", "tp"]
        axes += ["dp_replicate", "dp_shard"] if self._is_dynamic else []
        is_last = meshes.pp_rank == meshes.parallel.pp - 1
        return is_last and not any(meshes.dense.get_local_rank(axis) for axis in axes)

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
        extra, model, optimizer = self._step.state_dict(), self.module, self.optimizer
        save(local_path, global_step, model, optimizer, extra, scheduler=scheduler, keep=keep)

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        """Load the newest checkpoint in `local_path`; ValueError if there is no checkpoint."""
        newest = latest(local_path)
        if newest is None:
            raise ValueError(f"local_path ({local_path}) must have a checkpoint: save one there")
        extra = load(newest, self.module, self.optimizer, scheduler=self.lr_scheduler)
        self._step.load_state_dict(extra)


class _ModeContext(BaseEngineCtx):
    """Context in which an engine's model is on the device, in mode "train" or "eval"."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, value, trace)
