"""TrainStep: the one owner of an optimizer step, from its first micro-batch to its metrics.

    micro_batch() x n    forward and backward; or forward_backward(), which runs all of them
    finish()             errors of transport -> clip -> optimizer -> zero_grad -> counts -> biases
                         (and the scales of delayed scaling, after zero_grad)

Micro-batches of a step share their communication: units that `FSDPOptions` leaves unsharded from
forward to backward are gathered once per step, and reduced with the last micro-batch. Until then
they keep whole gradients in `FSDPOptions.reduce_dtype`, which `optimizer.zero_grad()` does not
reach. Other units gather and reduce for every micro-batch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore.base.fields import Count, MaxNorm, check_arguments
from moecore.base.torch_names import mark
from moecore.moe.lanes import Lanes
from moecore.moe.state import NumMicroBatches
from moecore.parallel.across import sum_copies
from moecore.parallel.attached import attached_in, capacity_of, moe_state
from moecore.parallel.pipeline.orders import PAIRING
from moecore.parallel.pipeline.run import forward_pipeline, run_pipeline
from moecore.parallel.pipeline.stages import loss_of
from moecore.parallel.shard.clip import GradientNorm, step_clipped, unscale_and_clip_
from moecore.parallel.shard.late_parameters import refuse_earlier
from moecore.parallel.shard.progress import Progress
from moecore.precision.apply import advance_amax, has_history
from moecore.train.loss_scale import DynamicLossScale, LossScale, check_loss_scale
from moecore.train.rerun import Reruns, drop_step
from moecore.train.step_checks import agree, check_real, listed
from moecore.train.step_result import StepResult, joined

T = TypeVar("T")


class TrainStep:
    """Runs the optimizer steps of a parallelized model, one after another. Made on every rank.

    A nan or inf in the gradient of any rank leaves weights, optimizer state and expert biases as
    they were on every rank. Fused optimizers (`moecore.train.AdamW`, torch's with fused=True) skip
    and clip on the device, while they read the gradients; with others the host waits for the norm.

    Args:
        model: of `parallelize_moe`, or several that are parts of one.
        optimizer: of the model, or several, which together hold every parameter with a gradient.
            None leaves the optimizer to the caller: see `clip`.
        max_norm: of the gradient of all models together, > 0; `math.inf` only measures.
        num_micro_batches: forwards and backwards of one step. The caller divides the loss by it, as
            auxiliary losses are divided.
        loss_scale: for fp16, which needs one. The caller's backward is `scale(loss).backward()`;
            auxiliary losses get it, and gradients are divided by it where they are clipped.

    Raises:
        ValueError: for a model that is not parallelized, a number out of range, or a model that
            needs a loss scale or can have none; on every rank when ranks differ in a number, in
            the loss scale's options, in the optimizers' classes and options as they are now, or in
            what is trained (`requires_grad`).

    Example:
        step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=4)
        for batch in data:
            for tokens in batch.chunk(4):
                with step.micro_batch():
                    (model(tokens[:, :-1], tokens[:, 1:]) / 4).backward()
            done = step.finish()
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        max_norm: MaxNorm = math.inf,
        num_micro_batches: NumMicroBatches = 1,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        check_arguments(TrainStep.__init__, locals())
        models = [model] if isinstance(model, nn.Module) else list(model)
        if not models:
            raise ValueError("model ([]) must be at least one model: pass that of parallelize_moe")
        self._states = [moe_state(one) for one in models]
        records = [record for one in models for record in attached_in(one)]
        self._pipeline = records[0].pipeline if len(models) == 1 else None
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._optimizers = listed(optimizer)
        check_real(self._model, self._optimizers, loss_scale)
        for one in models:
            check_loss_scale(one, loss_scale)
        refuse_earlier(self._model, self._optimizers)
        agree(
            self._model,
            records[0].request,
            max_norm,
            num_micro_batches,
            loss_scale,
            self._optimizers,
        )
        self._max_norm = max_norm
        self._norm: GradientNorm | None = None
        self._progress = Progress()
        self._is_delayed = has_history(self._model)
        self._exchanges = [r.exchanges for r in records if r.exchanges is not None]
        self._engines = [r.engine for r in records if r.engine is not None]
        for engine in self._engines:  # a later TrainStep of the same model takes over
            engine.progress = weakref.ref(self._progress)
        request = records[0].request
        self._reruns = Reruns([capacity_of(one) for one in models], request.meshes.device)
        asked = request.pipeline
        self._is_overlapped = asked is not None and asked.schedule == "overlapped"
        self._lanes = Lanes([engine.resume for engine in self._engines])
        self._scale: LossScale | None = None
        self._is_scaled = True  # the running micro-batch's loss
        if loss_scale is not None:
            self._scale = LossScale(loss_scale, next(self._model.parameters()).device)
        for state in self._states:
            state.set_loss_scale(None if self._scale is None else self._scale.value)
        self.num_micro_batches = num_micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step; it may be set between steps."""
        return self._num_micro_batches

    @num_micro_batches.setter
    def num_micro_batches(self, number: int) -> None:
        self._progress.check_between("num_micro_batches")
        if self._progress.done:
            raise ValueError(
                f"num_micro_batches ({number}) must be set between steps, because losses are "
                f"divided by it: {self._progress.done} micro-batches of this step are done"
            )
        for state in self._states:
            state.set_num_micro_batches(number)
        self._num_micro_batches = number

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Return the context in which forward and backward of one micro-batch run."""
        self._progress.check_between("micro_batch()")
        if self._pipeline is not None:
            raise ValueError(
                "micro_batch() must not run a pipeline's stages one by one: call forward_backward()"
            )
        if self._progress.done >= self.num_micro_batches:
            raise ValueError(
                f"micro_batch() must come at most num_micro_batches ({self.num_micro_batches}) "
                "times in a step: call finish()"
            )
        is_last = self._progress.done + 1 == self.num_micro_batches
        with self._running(1, to_come=0 if is_last else math.inf):
            yield

    @contextmanager
    def micro_batches(self, *, forwards: Count | None = None, pairs: bool = True) -> Iterator[None]:
        """Return the context of all micro-batches of a step, several of them in flight.

        Forwards and backwards run in any order in it, as a pipeline's schedule has them: on every
        rank in the same one. What stays whole is reduced once, by the last backward of each unit
        after the last forward has begun. Forwards may lack their backward. A global-batch balance
        loss counts micro-batches in the order of their forwards.

        Args:
            forwards: of each model with gradients in the step; None = num_micro_batches. More
                where parts of a model run one by one. Other numbers than come cost overlap, or
                further reductions.
            pairs: whether `side_by_side` is for overlap here. For it dispatcher "alltoall" gathers
                rows before it knows how many travel: min(ep, top_k) * etp of each token.

        Raises:
            ValueError: after a micro_batch() of this step.
        """
        check_arguments(TrainStep.micro_batches, locals())
        self._progress.check_between("micro_batches()")
        if self._progress.done:
            raise ValueError(
                f"micro_batches() must be all of a step, of which {self._progress.done} "
                "micro-batches are done: call finish()"
            )
        for state in self._states:
            for layer in state.layers.values():
                layer.dispatcher.lanes = self._lanes if pairs else None
        self._progress.is_several = True
        try:
            with self._running(self.num_micro_batches, to_come=forwards or self.num_micro_batches):
                yield
        finally:
            self._progress.is_several = False

    def side_by_side(self, forward: Callable[[], T], backward: Callable[[], None]) -> T:
        """Return what a forward returns, run beside the backward of another micro-batch.

        Both take turns where tokens travel between ranks: while an exchange of one runs, the other
        computes. Dispatchers "alltoall" and "allgather" have such places; without any the backward
        follows the forward. Every rank runs the same pairs. Gradients have the bits of the forward
        and then the backward.

        Units that are freed after each use ("optim_grads_params") are gathered again whenever both
        want the same buffer.

        Args:
            forward: of a micro-batch, in this thread.
            backward: of an earlier one, in another thread.

        Raises:
            ValueError: outside of `micro_batches`.
            RuntimeError: within another pair, or after a backward that has failed.
            Exception: that of the forward or of the backward, which ends both.

        Example:
            with step.micro_batches():
                loss = loss_of(0)
                for i in range(1, step.num_micro_batches):
                    loss = step.side_by_side(partial(loss_of, i), loss.backward)
                loss.backward()
        """
        if not (self._progress.is_open and self._progress.is_several):
            raise ValueError(
                "side_by_side() must be within micro_batches(): open it around the step"
            )
        with ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.paired())
            return self._lanes.run(forward, backward)

    @contextmanager
    def _running(self, number: int, *, to_come: float) -> Iterator[None]:
        """Announce the next micro-batches of the step, and end them."""
        progress = self._progress
        progress.is_last = progress.done + 1 == self.num_micro_batches
        for engine in self._engines:
            engine.start_micro_batches(to_come=to_come)
        for state in self._states:
            state.start_micro_batch(is_last=progress.is_last, in_flight=number > 1)
        progress.is_open = progress.has_failed = True
        self._is_scaled = self._scale is None
        try:
            with self._reruns.watched("skips"):
                yield
            self._check_scaled()
            progress.done += number
            if progress.done == self.num_micro_batches:
                for engine in self._engines:
                    engine.end_micro_batches()
            progress.has_failed = False
        finally:
            progress.is_open = False

    def forward_backward(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Run forward and backward of all micro-batches of a step; return their losses.

        Over pipeline stages each rank runs its part of them, in the order of the schedule. Every
        pipeline rank is given the same micro-batches. A whole model runs one after the other, or
        with schedule "overlapped" each forward beside the backward before it.
        `finish` follows.

        Args:
            micro_batches: num_micro_batches of them: keyword arguments of the model, which returns
                its loss. A "mean" loss is divided by their number here; a loss scale is applied.

        Returns:
            fp32 [num_micro_batches] on the device, detached, not divided: the same on all pipeline
            ranks, each data rank's own. No host sync, but one where `NVLinkOptions.row_factor` or
            `StashOptions.factor` may be too small: then all of it runs again, with the same random
            numbers.

        Raises:
            ValueError: for another number of micro-batches, or after a micro_batch() of this step.
            PipelineError: when a neighbouring stage is gone; it names stage and micro-batch.
        """
        if len(micro_batches) != self.num_micro_batches:
            raise ValueError(
                f"micro_batches ({len(micro_batches)}) must be num_micro_batches "
                f"({self.num_micro_batches}): set TrainStep.num_micro_batches between steps"
            )
        run = partial(self._run_all, micro_batches)
        tapes = [tape for state in self._states for tape in state.tapes]
        return self._reruns.run(run, self.drop, tapes)

    def _run_all(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Run forward and backward of all micro-batches once; return their losses."""
        pipeline = self._pipeline
        if pipeline is None and self._is_overlapped:
            return torch.stack(self._run_in_pairs(micro_batches))
        if pipeline is None:
            return torch.stack([self._run_alone(inputs) for inputs in micro_batches])
        forwards = pipeline.num_chunks * self.num_micro_batches
        with self.micro_batches(forwards=forwards, pairs=pipeline.config.schedule in PAIRING):
            losses = run_pipeline(
                self._model, pipeline, micro_batches, self._divided, self.side_by_side
            )
        sum_copies(self._model)
        return losses

    @torch.no_grad()
    def losses(self, micro_batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the losses of any number of micro-batches without gradients, between steps.

        Args:
            micro_batches: as in `forward_backward`, for the model in its mode (`model.eval()`).

        Returns:
            As `forward_backward`.
        """
        self._progress.check_closed("losses()")
        if self._pipeline is not None:
            return forward_pipeline(self._model, self._pipeline, micro_batches)
        return torch.stack([loss_of(self._model(**inputs)).float() for inputs in micro_batches])

    def _run_in_pairs(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Run each forward beside the backward before it; return the losses."""
        losses: list[Tensor] = []

        def forward(inputs: Mapping[str, Any]) -> Tensor:
            loss = loss_of(self._model(**inputs))
            losses.append(loss.detach().float())
            return self._divided(loss)

        with self.micro_batches():
            loss = forward(micro_batches[0])
            for inputs in micro_batches[1:]:
                loss = self.side_by_side(partial(forward, inputs), loss.backward)
            loss.backward()
        return losses

    def _run_alone(self, inputs: Mapping[str, Any]) -> Tensor:
        with self.micro_batch():
            loss = loss_of(self._model(**inputs))
            self._divided(loss).backward()
        return loss.detach().float()

    def _divided(self, loss: Tensor) -> Tensor:
        """Return what a micro-batch's backward begins with."""
        is_mean = self._states[0].loss == "mean"
        return self.scale(loss / self.num_micro_batches if is_mean else loss)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for backward; without one the loss itself.

        Args:
            loss: of a micro-batch, divided by their number.
        """
        self._is_scaled = True
        return loss if self._scale is None else loss * self._scale.value

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of it, for `extra`: the loss scale, {} without one."""
        return {} if self._scale is None else self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, in place; between steps.

        Args:
            state: it may hold more, such as all of `extra`; without a loss scale nothing is read.

        Raises:
            ValueError: when it has no loss scale, or within a micro-batch.
        """
        self._progress.check_closed("load_state_dict()")
        if self._scale is not None:
            self._scale.load_state_dict(state)

    def clip(self) -> GradientNorm:
        """Clip the gradient of a step whose optimizer is the caller's. Waits for the device.

        Gradients are divided by the loss scale first.

        A nan or inf on any rank sets all gradients to None, so that an optimizer changes nothing.
        The caller's step and zero_grad follow, then `finish`.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: where `finish` clips, before the last micro-batch, or as `clip_grad_norm_`.
        """
        if self._optimizers:
            raise ValueError(
                f"optimizer ({type(self._optimizers[0]).__name__}) must be None for clip(): leave "
                "clip() out, finish() does it"
            )
        self._check_complete("clip()")
        with mark("moecore::clip"):
            self._norm = unscale_and_clip_(
                self._model, self._max_norm, self._value, is_wrong=self._reruns.is_short()
            )
        return self._norm

    def finish(self) -> StepResult:
        """End the step: clip, optimizer, zero_grad, counts of all ranks, expert biases.

        Call it on every rank. One collective for the norm and one for the counts of all layers, and
        one more with quantile balancing. No host sync with fused optimizers, or without any.

        Raises:
            ValueError: before the last micro-batch, or before `clip` with a loss scale and no
                optimizer; when a layer with auxiliary losses saw another
                number of micro-batches; when no optimizer holds a parameter that has a gradient;
                when a parameter was added after `parallelize_moe`.
            ExchangeError: when an exchange went wrong on this rank, as far as the host can see
                without waiting (`check` waits): before anything moves and before any collective.
                Other ranks may not know, so let the process end.
        """
        self._check_complete("finish()")
        if self._scale is not None and not self._optimizers and self._norm is None:
            raise ValueError(
                "finish() must follow clip() where a loss_scale is given and no optimizer: call "
                "clip() before your optimizer's step, it divides gradients by the scale"
            )
        self._progress.has_failed = True  # unless it gets to its end
        with mark("moecore::finish"):
            for engine in self._engines:
                engine.end_step()
            is_short = self._reruns.is_short()
            self._reruns.poll(skips=bool(self._optimizers) or self._norm is not None)
            for state in self._states:
                state.check_step()
            if self._optimizers:
                self._norm = step_clipped(
                    self._model,
                    self._max_norm,
                    self._optimizers,
                    loss_scale=self._value,
                    is_wrong=is_short,
                )
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            if self._is_delayed:
                advance_amax(self._model)
            norm, self._norm = self._norm, None
            skipped = False if norm is None else norm.skipped
            self._reruns.end_step(skipped)
            metrics = [state.reduce_step(skipped=skipped) for state in self._states]
            loss_scale = None
            if self._scale is not None:
                assert norm is not None
                loss_scale = self._scale.value.clone()
                self._scale.update(norm.skipped)
        self._progress.restart()
        lr = self._optimizers[0].param_groups[0]["lr"] if self._optimizers else None
        if isinstance(lr, Tensor):  # which a scheduler changes in place
            lr = lr.clone()
        return StepResult(
            norm=norm, skipped=skipped, metrics=joined(metrics), lr=lr, loss_scale=loss_scale
        )

    def drop(self) -> None:
        """Drop the step: its gradients, counts and micro-batches, as if they had never run.

        For a loss that is not finite, or an exception in a forward; after one in a backward the
        next forward raises. Call it on every rank. No communication, no host sync.
        """
        self._progress.check_closed("drop()")
        drop_step(self._model)
        self._norm = None

    def check(self) -> None:
        """Raise an ExchangeError for what went wrong with tokens on their way; one host sync.

        Only dispatcher "nvlink" and a stash have something to find: else this returns at once.
        """
        self._reruns.check()

    def close(self) -> None:
        """Free the buffers of dispatcher "nvlink"; collective. The next forward makes new ones.

        Also after an ExchangeError, which this raises like `check`, to go on in the same processes.
        """
        for exchanges in self._exchanges:
            exchanges.close()

    @property
    def _value(self) -> Tensor | None:
        return None if self._scale is None else self._scale.value

    def _check_scaled(self) -> None:
        if not self._is_scaled:
            raise ValueError(
                "micro_batch() must scale its loss where a loss_scale is given: call "
                "step.scale(loss).backward(), and drop() this step"
            )

    def _check_complete(self, what: str) -> None:
        self._progress.check_between(what)
        if self._progress.done != self.num_micro_batches:
            raise ValueError(
                f"{what} must follow num_micro_batches ({self.num_micro_batches}) micro-batches, "
                f"but {self._progress.done} are done: run forward and backward of each in "
                "`with step.micro_batch():`, set num_micro_batches before the step, or drop()"
            )
