"""TrainStep: runs an optimizer step, from its first micro-batch to its metrics.

micro_batch() x n    forward and backward; forward_backward() runs all n
finish()             errors of exchanges -> clip -> optimizer -> zero_grad
                     -> scales of delayed scaling -> counts -> expert biases -> StepResult
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore.base.failures import publish_errors, share_call_errors, share_errors
from moecore.base.fields import Count, MaxNorm, check_arguments
from moecore.base.torch_private import annotate_range
from moecore.moe.pairs import Pairs
from moecore.moe.state import NumMicroBatches
from moecore.parallel.fsdp.progress import Progress, check_grad_enabled, check_requires_grad
from moecore.parallel.model.clip import GradientNorm, clip_and_step
from moecore.parallel.model.parallel_state import (
    all_reduce_stage_copies,
    end_argument_comparison,
    get_capacity,
    get_moe_state,
    list_parallel_states,
)
from moecore.parallel.pipeline.orders import PAIRING
from moecore.parallel.pipeline.run import forward_pipeline, run_pipeline
from moecore.parallel.pipeline.stages import get_loss
from moecore.precision.amax import advance_amax, has_amax_history
from moecore.train.graphs.regions import drop_graphs
from moecore.train.loss_scale import DynamicLossScale, LossScale
from moecore.train.rerun import Reruns, drop_step
from moecore.train.spikes import SpikeLimit, SpikeOptions
from moecore.train.step_checks import (
    check_clip_groups,
    check_micro_batch,
    check_micro_batches,
    check_num_micro_batches_is_unchanged,
    check_side_by_side,
    check_step_arguments,
    compare_ranks,
)
from moecore.train.step_result import StepResult, merge_model_metrics

T = TypeVar("T")


class TrainStep:
    """Runs optimizer steps of a parallelized model: micro-batches, clipping, update, metrics.

    A nan or inf in the gradient of any rank skips the step: weights, optimizer state and expert
    biases do not change on any rank. Fused optimizers (`moecore.train.AdamW`, torch's with
    fused=True) skip and clip on the device. With any other optimizer the host waits for the norm.
    Construct it on every rank.

    Args:
        model: a model from `parallelize_moe`, or several models that are parts of one model.
        optimizer: one or several optimizers that together have every parameter with a gradient.
            None = the caller runs the optimizer: see `clip`.
        max_norm: the maximum gradient norm over all models, > 0; None only measures the norm.
        num_micro_batches: forwards and backwards of one step. The caller divides the loss by this
            number; auxiliary losses are divided by it here.
        loss_scale: options of the loss scale, which fp16 needs. The caller's backward is
            `scale_loss(loss).backward()`; auxiliary losses are scaled here, and clipping divides
            gradients by the scale.
        clip_groups: groups of parameters, of which each is clipped to `max_norm` by its own norm,
            such as the parameters of each LoRA adapter; None = all parameters have one norm.
        skip_spikes: skip a step whose gradient norm is far above the previous norms; None = off.

    Raises:
        ValueError: when a model is not parallelized, a number is out of range, or a model needs a
            loss scale or must not have one; on every rank when ranks differ in a number, in the
            loss scale's options, in the optimizers' classes and current options, or in the trained
            parameters (`requires_grad`).

    Example:
        step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=4)
        for batch in data:
            for tokens in batch.chunk(4):
                with step.micro_batch():
                    (model(tokens[:, :-1], tokens[:, 1:]) / 4).backward()
            done = step.finish()
    """

    @share_call_errors
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        max_norm: MaxNorm | None = None,
        clip_groups: Sequence[Sequence[nn.Parameter]] | None = None,
        num_micro_batches: NumMicroBatches = 1,
        loss_scale: DynamicLossScale | None = None,
        skip_spikes: SpikeOptions | None = None,
    ) -> None:
        with share_errors():
            check_arguments(TrainStep.__init__, locals())
            models, self.optimizers = check_step_arguments(model, optimizer, loss_scale)
            check_clip_groups(models, clip_groups)
        self._max_norm = math.inf if max_norm is None else max_norm
        self._clip_groups = clip_groups
        self._states = [get_moe_state(module) for module in models]
        records = [record for module in models for record in list_parallel_states(module)]
        self._pipeline = records[0].pipeline if len(models) == 1 else None
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        request = self._request = records[0].request
        entries: dict[str, Any] = {
            "TrainStep.max_norm": float(self._max_norm),
            "TrainStep.clip_groups": clip_groups and [len(group) for group in clip_groups],
            "TrainStep.num_micro_batches": num_micro_batches,
            "TrainStep.loss_scale": loss_scale,
            "TrainStep.skip_spikes": skip_spikes,
            "TrainStep.optimizer is None": not self.optimizers,
        }
        compare_ranks(entries, self.model, self.optimizers, request)
        self._norm: GradientNorm | None = None
        self._progress = Progress()
        self._has_amax_history = has_amax_history(self.model)
        self._exchanges = [pool for r in records for pool in r.pools]
        self._engines = [r.engine for r in records if r.engine is not None]
        self._arguments = [r.arguments for r in records if r.arguments is not None]
        for engine in self._engines:  # a later TrainStep of the same model takes over
            engine.progress = weakref.ref(self._progress)
        self._reruns = Reruns([get_capacity(module) for module in models], request.meshes.device)
        self._is_overlapped = getattr(request.pipeline, "schedule", None) == "overlapped"
        self._pairs = Pairs(self._engines)
        self._has_scaled_loss = True  # the running micro-batch's loss
        device = request.meshes.device  # sharded parameters may be in host memory
        self._scale = None if loss_scale is None else LossScale(loss_scale, device)
        self._spikes = None if skip_spikes is None else SpikeLimit(skip_spikes, device)
        self._scale_value = None if self._scale is None else self._scale.value
        for state in self._states:
            state.set_loss_scale(self._scale_value)
        self.num_micro_batches = num_micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step; it may be set between steps."""
        return self._progress.number

    @num_micro_batches.setter
    def num_micro_batches(self, num_micro_batches: int) -> None:
        check_num_micro_batches_is_unchanged(self._progress, num_micro_batches)
        for state in self._states:
            state.set_num_micro_batches(num_micro_batches)
        self._progress.number = num_micro_batches

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Return the context in which the caller runs forward and backward of one micro-batch."""
        number = self._progress.num_done + 1
        with publish_errors(f"micro-batch {number} of {self.num_micro_batches}"):
            check_micro_batch(self._progress, has_stages=self._pipeline is not None)
            with self._open_micro_batches(1, 0 if number == self.num_micro_batches else math.inf):
                yield

    @contextmanager
    def micro_batches(self, *, forwards: Count | None = None, pairs: bool = True) -> Iterator[None]:
        """Return the context of all micro-batches of a step, of which several may be in flight.

        Forwards and backwards may run in any order that is the same on all ranks, such as a
        pipeline's schedule. Gradients of an FSDP module that stays unsharded until its backward are
        reduced once, in its last backward after the last forward has begun. A forward without a
        backward is allowed. A global-batch balance loss counts micro-batches in forward order.

        Args:
            forwards: number of forwards with gradients per model and step; None =
                num_micro_batches. It is larger if model chunks run separately. A wrong number loses
                overlap or causes more gradient reductions.
            pairs: whether forward and backward alternate at exchanges in `side_by_side`. Dispatcher
                "alltoall" then allocates the maximum of min(ep, top_k) * etp send rows per token.

        Raises:
            ValueError: when a micro_batch() of this step has run.
        """
        check_arguments(TrainStep.micro_batches, locals())
        check_micro_batches(self._progress)
        layers = [layer for state in self._states for layer in state.layers.values()]
        for layer in layers:
            alternates = pairs and layer.dispatcher.can_alternate
            layer.dispatcher.pairs = self._pairs if alternates else None
        self._pairs.can_alternate = any(layer.dispatcher.pairs for layer in layers)
        self._progress.is_several, number = True, self.num_micro_batches
        try:
            context = f"a step of {number} micro-batches"
            with publish_errors(context), self._open_micro_batches(number, forwards or number):
                yield
        finally:
            self._progress.is_several = False

    def side_by_side(self, forward: Callable[[], T], backward: Callable[[], None]) -> T:
        """Run a forward concurrently with another micro-batch's backward; return its result.

        Forward and backward alternate at exchanges: one computes during an exchange of the other.
        With dispatchers "local", "nvlink" and "nccl_ep" the backward instead follows the forward.
        Gradients have the same bits. Every rank must overlap the same passes. FSDP modules of
        strategy "optim_grads_params" are all-gathered again if both passes need the same buffer.
        The forward runs in this thread, and the backward in a second thread.

        Raises:
            ValueError: when it is called outside of `micro_batches`.
            RuntimeError: when calls are nested, or after a backward has failed.
            Exception: the exception of the forward or of the backward; it ends both.
        """
        check_side_by_side(self._progress)
        return self._pairs.run_pair(forward, backward)

    @contextmanager
    def _open_micro_batches(
        self, num_micro_batches: int, pending_forwards: float
    ) -> Iterator[None]:
        """Return the context of micro-batches with `pending_forwards` forwards; inf = any."""
        progress = self._progress
        progress.is_last = progress.num_done + 1 == self.num_micro_batches
        in_parts = num_micro_batches < pending_forwards < math.inf
        for engine in self._engines:
            engine.start_micro_batches(pending_forwards=pending_forwards, runs_stages=in_parts)
        for state in self._states:
            state.start_micro_batch(is_last=progress.is_last, in_flight=num_micro_batches > 1)
        progress.is_open = progress.has_failed = True
        self._has_scaled_loss = self._scale is None
        try:
            with self._reruns.watch_shortages("skips"):
                yield
            if not self._has_scaled_loss:
                raise ValueError(
                    "micro_batch() must scale its loss where a loss_scale is given: call "
                    "step.scale_loss(loss).backward(), and drop() this step"
                )
            for engine in self._engines:
                engine.run_missing_backwards()
            progress.num_done += num_micro_batches
            if progress.num_done == self.num_micro_batches:
                for engine in self._engines:
                    engine.end_micro_batches()
            progress.has_failed = False
        finally:
            progress.is_open = False

    def announce(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Set which micro-batches of the step have tokens, before the first micro-batch.

        An auxiliary loss is the mean over the micro-batches of all data ranks that have tokens, so
        backward needs their number. `forward_backward` calls this method. A loop over
        `micro_batch()` must call `announce` if some micro-batches may be only padding. Collective
        if the model has auxiliary losses; no host sync.

        Args:
            micro_batches: as in `forward_backward`; only masks and shapes are read.
        """
        family = self._request.family
        depths = range(1 + family.count_predictions(self.model))
        flags = [[family.has_tokens(inputs, k) for k in depths] for inputs in micro_batches]
        for state in self._states:
            state.announce_micro_batches(flags, self._request.meshes.device)

    def forward_backward(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Run forward and backward of all micro-batches of a step; return their losses.

        With pipeline stages, each rank runs its stages in the order of the schedule, and every
        pipeline rank passes the same micro-batches. Without stages, micro-batches run sequentially,
        or with schedule "overlapped" two at a time (`side_by_side`). Call `finish` next.

        Args:
            micro_batches: num_micro_batches mappings of the model's keyword arguments. A "mean"
                loss is divided by num_micro_batches here, and the loss scale is applied.

        Returns:
            The undivided losses: fp32 [num_micro_batches] on the device, detached, equal on all
            pipeline ranks of a data rank. If rows exceed the capacity of `NVLinkOptions.row_factor`
            or `StashOptions.factor`, the step is repeated. To learn this, the host waits for the
            last forward, or with a stash or pipeline stages for the last backward.

        Raises:
            ValueError: for another number of micro-batches, after micro_batch(), or in no_grad().
            PipelineError: when a neighbouring stage has failed; names stage and micro-batch.
        """
        with publish_errors(f"a step of {self.num_micro_batches} micro-batches"):
            if len(micro_batches) != self.num_micro_batches:
                raise ValueError(
                    f"micro_batches ({len(micro_batches)}) must be num_micro_batches "
                    f"({self.num_micro_batches}): set TrainStep.num_micro_batches between steps"
                )
            check_grad_enabled("forward_backward()")
            run = partial(self._run_micro_batches, micro_batches)
            tapes = [tape for state in self._states for tape in state.choice_tapes]
            return self._reruns.run_until_rows_fit(run, self.drop, tapes)

    def _run_micro_batches(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        self.announce(micro_batches)
        pipeline = self._pipeline
        if pipeline is None:
            if self._is_overlapped:
                return torch.stack(self._run_in_pairs(micro_batches))
            return torch.stack([self._run_micro_batch(inputs) for inputs in micro_batches])
        forwards = pipeline.num_chunks * self.num_micro_batches
        with self.micro_batches(forwards=forwards, pairs=pipeline.config.schedule in PAIRING):
            self._has_scaled_loss = True  # only the rank of the last stage scales the loss
            losses = run_pipeline(pipeline, micro_batches, self._normalize_loss, self.side_by_side)
        all_reduce_stage_copies(self.model)
        return losses

    @publish_errors("compute_losses()")
    @torch.no_grad()
    def compute_losses(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return fp32 losses [n] of n micro-batches without gradients; call it between steps."""
        self._progress.check_not_in_micro_batch("compute_losses()")
        if self._pipeline is not None:
            return forward_pipeline(self._pipeline, micro_batches)
        return torch.stack([get_loss(self.model(**inputs)).float() for inputs in micro_batches])

    def _run_in_pairs(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Overlap each forward with the previous micro-batch's backward; return fp32 losses."""
        losses: list[Tensor] = []

        def forward(inputs: Mapping[str, Any]) -> Tensor:
            loss = get_loss(self.model(**inputs))
            losses.append(loss.detach().float())
            return self._normalize_loss(loss)

        with self.micro_batches():
            loss = forward(micro_batches[0])
            for inputs in micro_batches[1:]:
                loss = self.side_by_side(partial(forward, inputs), loss.backward)
            self._reruns.start_capacity_all_reduce()
            loss.backward()
        return losses

    def _run_micro_batch(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run forward and backward of one micro-batch; return its undivided loss, 0-dim fp32."""
        with self.micro_batch():
            loss = get_loss(self.model(**inputs))
            if self._progress.is_last:
                self._reruns.start_capacity_all_reduce()
            self._normalize_loss(loss).backward()
        return loss.detach().float()

    def _normalize_loss(self, loss: Tensor) -> Tensor:
        """Divide a "mean" loss by num_micro_batches, multiply by the loss scale, and return it."""
        check_requires_grad(loss)
        is_mean = self._states[0].loss == "mean"
        return self.scale_loss(loss / self.num_micro_batches if is_mean else loss)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale. The caller divides `loss` by num_micro_batches."""
        self._has_scaled_loss = True
        return loss if self._scale_value is None else loss * self._scale_value

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the state of `loss_scale` and of `skip_spikes`, for a checkpoint."""
        parts = [part for part in (self._scale, self._spikes) if part is not None]
        return {name: value for part in parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` in place, between steps; ValueError if the loss scale is missing."""
        self._progress.check_not_in_micro_batch("load_state_dict()")
        if self._scale is not None:
            self._scale.load_state_dict(state)
        if self._spikes is not None:
            self._spikes.load_state_dict(state)

    @publish_errors("clip()")
    def clip(self) -> GradientNorm:
        """Clip gradients for the caller's own optimizer, and return their norm. Host sync.

        Gradients are divided by the loss scale first. A nan or inf on any rank sets all gradients
        to None, so that an optimizer changes nothing. Then call step, zero_grad and `finish`.

        Raises:
            ValueError: when this object has an optimizer, when micro-batches are missing, and for
                the reasons of `clip_grad_norm_`.
        """
        if self.optimizers:
            raise ValueError(
                f"optimizer ({type(self.optimizers[0]).__name__}) must be None for clip(): leave "
                "clip() out, finish() does it"
            )
        self._progress.check_complete("clip()", self.num_micro_batches)
        self._norm = self._clip_and_step(self._compute_skip_flag())
        return self._norm

    @publish_errors("finish()")
    def finish(self) -> StepResult:
        """End the step: clip, run optimizers, zero gradients, reduce loads, update expert biases.

        Call `finish` on every rank. One collective reduces the norm, one all layers' token counts,
        and one serves quantile balancing. No host sync with fused optimizers or no optimizer.

        Raises:
            ValueError: when micro-batches are missing, a layer with auxiliary losses ran another
                number of micro-batches, there is a loss scale without an optimizer and `clip` was
                not called, no optimizer has a parameter with a gradient, or a parameter was
                created after `parallelize_moe`.
            ExchangeError: when an exchange failed on this rank and the error has reached the host
                (`check` waits for it), before any update or collective. Other ranks may not raise,
                so let the process end.
        """
        self._progress.check_complete("finish()", self.num_micro_batches)
        if self._scale is not None and not self.optimizers and self._norm is None:
            raise ValueError(
                "finish() must follow clip() where a loss_scale is given and no optimizer: call "
                "clip() before your optimizer's step, it divides gradients by the scale"
            )
        self._progress.has_failed = True  # until `restart`, at the end
        with annotate_range("moecore::finish"):
            for engine in self._engines:
                engine.end_step()
            is_wrong = self._compute_skip_flag()
            self._reruns.raise_visible_errors(skips=bool(self.optimizers) or self._norm is not None)
            for state in self._states:
                state.check_step()
            if self.optimizers:
                self._norm = self._clip_and_step(is_wrong)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            norm, self._norm = self._norm, None
            is_skipped = False if norm is None else norm.skipped
            if self._has_amax_history:
                advance_amax(self.model, self._request.meshes.stage_group, is_skipped=is_skipped)
            self._reruns.end_step(is_skipped)
            metrics = [state.reduce_step(is_skipped=is_skipped) for state in self._states]
            loss_scale = None
            if self._scale is not None and norm is not None:
                loss_scale = self._scale.value.clone()
                self._scale.update_scale(norm.overflowed)
            if self._spikes is not None and norm is not None:
                self._spikes.record_norm(norm.total_on_device)
        self._progress.start_next_step()
        if norm is not None and norm.is_read and not norm.finite:
            for arguments in self._arguments:  # the host has waited: it can name the reason
                arguments.raise_pending_errors()
        lr = self.optimizers[0].param_groups[0]["lr"] if self.optimizers else None
        lr = lr.clone() if isinstance(lr, Tensor) else lr  # a scheduler changes it in place
        all_metrics = merge_model_metrics(metrics)
        return StepResult(
            norm=norm, is_skipped=is_skipped, metrics=all_metrics, lr=lr, loss_scale=loss_scale
        )

    def drop(self) -> None:
        """Drop gradients, token counts and micro-batches of the step, as if they had never run.

        Call it on every rank when a loss is not finite, or after an exception in a forward. After
        an exception in a backward the next forward raises. No communication, no host sync.
        """
        self._progress.check_not_in_micro_batch("drop()")
        drop_step(self.model)
        self._norm = None

    def check(self) -> None:
        """Wait for the device, and raise the pending error of a step; one host sync.

        Without dispatcher "nvlink", a stash, and ranks that share input rows, it returns at once.

        Raises:
            ExchangeError: when an exchange failed or rows exceeded a capacity.
            ValueError: when ranks that must have equal input rows received different rows.
        """
        self._reruns.check_capacities()
        for arguments in self._arguments:
            arguments.raise_pending_errors()

    def close(self) -> None:
        """Free graphs of parts, and buffers that ranks access ("nvlink", `FSDPOptions.nccl_ub`).

        Collective. Later forwards allocate new buffers. After an ExchangeError, buffers are freed
        and the error is raised; training can continue.
        """
        drop_graphs(self.model)
        for exchanges in self._exchanges:
            exchanges.close()

    def _compute_skip_flag(self) -> Tensor | None:
        """Return a 0-dim bool: skip if rows exceed a buffer or inputs differ; None = no check."""
        values = self._reruns.has_shortage(), end_argument_comparison(self.model)
        flags = [flag for flag in values if flag is not None]
        return torch.stack(flags).any() if flags else None

    def _clip_and_step(self, is_wrong: Tensor | None) -> GradientNorm:
        """Clip all gradients and step the optimizers, if any; `is_wrong` skips the step."""
        return clip_and_step(
            self.model,
            self._max_norm,
            self.optimizers,
            groups=self._clip_groups,
            loss_scale=self._scale_value,
            has_invalid_grads=is_wrong,
            skip_threshold=None if self._spikes is None else self._spikes.compute_limit(),
        )
