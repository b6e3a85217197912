"""MoETrainer: transformers' Trainer around a `TrainStep`.

    Trainer                              MoETrainer
    accelerator.prepare(model)           model and optimizer unchanged
    get_batch_samples                    the batches of a step are its micro-batches
    training_step                        runs in `TrainStep.micro_batch()`
    accelerator.clip_grad_norm_          `TrainStep.clip()`, over both meshes
    accelerator.backward                 backward of the scaled loss, in fp16
    optimizer.step, model.zero_grad      Trainer's
    on_step_end                          `TrainStep.finish()`
    _save_checkpoint, resume             `Saver`, `load`
    save_model                           `export_hf`

`parallelize_moe(loss="mean")` averages gradients over data ranks, as DDP does, so Trainer's losses
are not changed. Six private methods of Trainer are overridden or called, because there are no
public methods; tests/integrations/test_transformers_trainer.py compares their signatures.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from moecore.base.failures import share_errors
from moecore.integrations.transformers import arguments, run_state
from moecore.integrations.transformers.run_state import GENERATORS, STATE
from moecore.integrations.transformers.scheduled import ScheduledSteps, is_dynamic
from moecore.io import Saver, export_hf, load, save_adapters
from moecore.io.checkpoint.directory import CHECKPOINTS, make_step_path
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.io.hf.merge import find_unmerged_layers
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.parallel.model.parameter_guards import check_optimizer_is_newer
from moecore.train.loss_scale import make_loss_scale
from moecore.train.step import StepResult, TrainStep


class MoETrainer(Trainer):
    """A transformers Trainer for a model that `parallelize_moe` has sharded.

    Batches, losses and updates equal Trainer's under DDP. To combine MoETrainer with a TRL trainer,
    inherit from both: `class MoESFTTrainer(MoETrainer, SFTTrainer)`.

    Checkpoints are written to `output_dir/checkpoints` in the background. `save_model` writes a
    Hugging Face directory. Training logs include the load of each MoE layer. fp16 models train with
    a `DynamicLossScale`.

    Attributes:
        result: result of the last optimizer step; None before the first step.

    Raises:
        ValueError: for a model that is not parallelized, loss="sum" without
            `ContextOptions.dynamic`, an optimizer that was built before `parallelize_moe`, or
            arguments or accelerate settings that wrap, cast or save the model.
    """

    result: StepResult | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("peft_config") is not None:
            raise ValueError(
                f"peft_config ({type(kwargs['peft_config']).__name__}) must be None for "
                "MoETrainer: call get_peft_model before parallelize_moe"
            )
        super().__init__(*args, **kwargs)
        with share_errors():
            check_optimizer_is_newer(self.model, self.optimizer)
            self._check_logits()
            self._steps = ScheduledSteps(self) if is_dynamic(self.model) else None
        self._root = Path(self.args.output_dir) / CHECKPOINTS
        self._saver: Saver | None = None
        self.add_callback(_RunCallback(self))

    def _check_logits(self) -> None:
        """Raise ValueError if an option or override reads logits although cp shards rows."""
        if arguments.shards_rows(self.model):
            is_overridden = type(self).prediction_step is not MoETrainer.prediction_step
            arguments.check_logits(self, overrides_prediction=is_overridden)

    def create_accelerator_and_postprocess(self) -> None:
        """Check model and arguments (ValueError), then create the Accelerator."""
        with share_errors():
            arguments.check_trainer_arguments(self.args)
            arguments.check_model(self.model, self.args)
        super().create_accelerator_and_postprocess()
        arguments.check_accelerator(self.accelerator)
        self.accelerator.__class__ = ShardedAccelerator  # Trainer has no argument for it
        sources = 1 if is_dynamic(self.model) else get_moe_state(self.model).groups.data_ranks
        self.accelerator.copies = self.args.world_size // sources

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train, and return Trainer's `TrainOutput`. Collective.

        `resume_from_checkpoint` is a checkpoint directory; True = the newest in
        `output_dir/checkpoints`; None = a new run.

        Raises:
            ValueError: if there is no checkpoint to resume from, or if a new run would save into a
                directory with older checkpoints.
            OSError: if a checkpoint cannot be written.
        """
        saves = self.args.save_strategy != SaveStrategy.NO
        self._checkpoint = run_state.find_checkpoint_to_resume(
            resume_from_checkpoint, self._root, will_save=saves
        )
        with ExitStack() as self._open:
            self._resume_directory = None
            if self._checkpoint is not None:
                self._resume_directory = self._open.enter_context(TemporaryDirectory())
                text = run_state.read_state_text(self._checkpoint)
                (Path(self._resume_directory) / "trainer_state.json").write_text(text)
            return super().train(self._resume_directory, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return a step's batches, and Trainer's count of labels or None."""
        if self._steps is not None:
            return list(islice(epoch_iterator, num_batches)), None
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples[0]:
            self.accelerator.owner.num_micro_batches = len(samples[0])
            if isinstance(samples[0][0], Mapping):  # not prompts, from which inputs are made later
                self.accelerator.owner.announce(samples[0])
        result: tuple[list[Any], Tensor | int | None] = samples
        return result

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of samples in a step, without the replicas on cp and tp ranks."""
        return int(super().get_total_train_batch_size(*args, **kwargs) // self.accelerator.copies)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a micro-batch, or of a `ScheduledBatch`; return its loss."""
        if self._steps is not None:
            return self._steps.run_training_step(inputs, self.accelerator.owner)
        with self.accelerator.owner.micro_batch():
            result: Tensor = super().training_step(model, inputs, *args, **kwargs)
            return result

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Return loss, logits and labels of a batch; with a `ScheduledBatch`, only the loss."""
        arguments.check_prediction(self.model, prediction_loss_only)
        if self._steps is not None:
            return self._steps.evaluate(inputs, model), None, None
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the FLOPs that Trainer counts for a batch."""
        return int(super().floating_point_ops(_add_token_counts(inputs)))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log `logs`; add the last step's MoE metrics and loss scale if `logs` has a loss."""
        if "loss" in logs and self.result is not None:
            logs.update(self.result.metrics.to_dict(per_expert=False))
            if self.result.loss_scale is not None:
                logs["loss_scale"] = float(self.result.loss_scale)
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face directory, or only unmerged peft adapters. Collective."""
        folder = Path(output_dir or self.args.output_dir)
        export_to_folder(self.model, folder)
        if self.is_world_process_zero():
            for part in (getattr(self.model, "generation_config", None), self.processing_class):
                if part is not None:
                    part.save_pretrained(folder)

    def _begin_run(self) -> None:
        """Create the TrainStep and the Saver, and load the checkpoint to resume from."""
        with share_errors():
            self._check_logits()  # options may be set after the constructor
        args = self.args
        owner = TrainStep(
            self.model,
            max_norm=args.max_grad_norm or math.inf,
            num_micro_batches=args.gradient_accumulation_steps,
            loss_scale=make_loss_scale(self.model),
        )
        owner.drop()  # an earlier call of `train` may have ended in a step
        self.accelerator.owner = owner
        if self._checkpoint is not None and self._resume_directory is not None:
            extra = load(self._checkpoint, self.model, self.optimizer, scheduler=self.lr_scheduler)
            owner.load_state_dict(extra)
            if args.process_index < len(extra[GENERATORS]):
                run_state.set_host_rng_state(extra[GENERATORS][args.process_index])
            # Trainer loads the states of all generators after it has skipped batches.
            self._save_rng_state(self._resume_directory)
        if args.save_strategy != SaveStrategy.NO:
            keep, scheduler = args.save_total_limit or 0, self.lr_scheduler
            saver = Saver(self._root, self.model, self.optimizer, scheduler=scheduler, keep=keep)
            self._saver = self._open.enter_context(saver)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of a batch, also of a packed or scheduled batch."""
        super()._track_num_input_tokens(_add_token_counts(inputs))

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return False, so that Trainer clips by the Accelerator, which clips on both meshes."""
        return False

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Start a background save; ValueError with save_strategy "no"."""
        if self._saver is None:
            raise ValueError(
                "save_strategy ('no') must be another one for a callback that saves: use 'steps'"
            )
        self.accelerator.owner.check()  # raises an error if the step has lost tokens
        self.store_flos()
        step, state = self.state.global_step, self.state
        if state.best_global_step == step:
            state.best_model_checkpoint = str(make_step_path(self._root, step))
        states: dict[str, list[Any]] = {}  # of callbacks by class name, in Trainer's format
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        state.stateful_callbacks = {n: s if len(s) > 1 else s[0] for n, s in states.items()}
        generators = gather(run_state.get_host_rng_state()[None].to(self.args.device))
        extra = {STATE: run_state.encode_state(state), GENERATORS: generators.cpu()}
        extra |= self.accelerator.owner.state_dict()
        self._saver.save(step, extra, wait=False)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `_begin_run` loads, when the optimizer exists."""

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint after all saves have ended."""
        assert self._saver is not None
        self._saver.close()  # the best checkpoint may not be complete yet
        load(self.state.best_model_checkpoint, self.model)


def _add_token_counts(inputs: Any) -> Any:
    """Return a batch with the `attention_mask` from which Trainer counts tokens."""
    if isinstance(inputs, ScheduledBatch):
        tokens_N = torch.ones(inputs.num_tokens, dtype=torch.bool, device="cpu")
        return {"input_ids": tokens_N, "attention_mask": tokens_N}
    if isinstance(inputs, Mapping) and "padding_mask" in inputs:  # of a `PackedBatch`
        return {**inputs, "attention_mask": ~inputs["padding_mask"]}
    return inputs


class _RunCallback(TrainerCallback):
    """Calls a MoETrainer at the begin and end of a run and after each step."""

    def __init__(self, trainer: MoETrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the run and load the checkpoint to resume from."""
        self._trainer._begin_run()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Finish the TrainStep after Trainer's optimizer step, and raise errors of saves."""
        trainer = self._trainer
        trainer.result = trainer.accelerator.owner.finish()
        if trainer._saver is not None:
            trainer._saver.check()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error if the last step has lost tokens."""
        self._trainer.accelerator.owner.check()


class ShardedAccelerator(Accelerator):
    """An Accelerator that does not wrap model or optimizer; a `TrainStep` clips gradients."""

    owner: TrainStep  # set before the first step
    copies: int = 1  # consecutive ranks with the same data, of cp and tp

    @property
    def num_processes(self) -> int:
        """Number of ranks with different data."""
        return int(super().num_processes // self.copies)

    @property
    def process_index(self) -> int:
        """Index of this rank among the ranks with different data."""
        return int(super().process_index // self.copies)

    def gather(self, tensor: Any) -> Any:
        """All-gather along dim 0, without the replicas on cp and tp ranks. Collective."""

        def drop_copies(rows: Tensor) -> Tensor:
            first_copies: Tensor = rows.unflatten(0, (self.num_processes, self.copies, -1))[:, 0]
            return first_copies.flatten(0, 1)

        all_rows = super().gather(tensor)
        return recursively_apply(drop_copies, all_rows) if self.copies > 1 else all_rows

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return False: accelerate has not placed the model on devices."""
        return False

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move the model to the device without a wrapper, as accelerate does for evaluation."""
        result: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return result

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Return the optimizer unwrapped, because checkpoints depend on its class."""
        return optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of a micro-batch's loss times the fp16 loss scale, if any."""
        super().backward(self.owner.scale_loss(loss), **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> float:
        """Clip to the TrainStep's max_norm, not `max_norm`; return the norm before clipping."""
        return self.owner.clip().total


def export_to_folder(model: nn.Module, folder: Path) -> None:
    """Export a model, or only its unmerged adapter, to `folder`; replace files. Collective."""
    if find_unmerged_layers(model):
        save_adapters(model, folder, adapter=cast(Any, model).active_adapter)
        return
    draft = folder / ".export"
    run_on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))  # of a killed process
    export_hf(model, draft)
    run_on_first_rank(lambda: _replace_export(draft, folder))


def _replace_export(draft: Path, folder: Path) -> None:
    """Move an export's files from `draft` to `folder`, config.json last."""
    config = folder / "config.json"
    config.unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for file in sorted(draft.iterdir(), key=lambda file: file.name == config.name):
        file.replace(folder / file.name)
    draft.rmdir()
