"""One rank's part of `moecore finetune`: the jobs of all objectives."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.streams import copy_to_device
from moecore.models import DecoderConfig
from moecore.models.distillation import (
    Distillation,
    DistillationLoss,
    StoredLogProbs,
    TeacherForward,
)
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.data import BatchShape, StepBatch, Steps
from moecore.recipes.examples import Examples, encode_row
from moecore.recipes.hf_model import export_run, make_causal_lm_inputs, make_scored_inputs
from moecore.recipes.job import TextTraining
from moecore.recipes.loop import print_on_rank_0
from moecore.recipes.metrics import Metrics, compute_padding_and_mfu
from moecore.recipes.preferences import (
    encode_preference,
    encode_unpaired_preference,
    make_pair_batch,
    make_unpaired_batch,
)
from moecore.rl import DPO, KTO, Engine, Rollouts
from moecore.train.step import TrainStep


@dataclass(kw_only=True)
class FineTuning(TextTraining):
    """The job of `moecore finetune`: a model of a Hugging Face directory on chats."""

    batches: Steps[StepBatch | ScheduledBatch]
    examples: list[Any]  # that are trained
    held_out: list[Any]  # that are evaluated
    data: Examples  # all examples of --data with counts of rows, for messages
    packs: bool  # whether rows have several documents
    decoder: DecoderConfig | None  # the config for counts of FLOPs; None = unknown
    read: Callable[..., Steps[Any]]  # of (examples, shape, seed)

    options: ClassVar[Any] = None  # the record of the objective's options
    num_sequences: ClassVar[int] = 1  # of an example
    encode: ClassVar[Any] = staticmethod(encode_row)  # makes examples of a row
    make_batch: ClassVar[Any] = None  # of (examples, seq_len); None = packed rows

    is_transformers = True
    saves_memory = "add --recompute, lower --seq-len"
    chosen_by = "--data, --seq-len, --eval-every and --cp"

    def print_start(self) -> None:
        """Print data, model and ranks, and the evaluation loss before the first step."""
        args, begin = self.args, self.describe_start("from its weights")
        data = f"{len(self.examples)} examples" + ("" if self.packs else ", not packed")
        notes = {
            "held out": len(self.held_out),
            "cut": self.data.num_cut,
            "left out": len(self.data.problems),
        }
        data += "".join(f", {count} {label}" for label, count in notes.items() if count)
        print_on_rank_0(f"data: {self.data.report}")
        print_on_rank_0(
            f"fine-tuning {args.model} {begin} to step {args.steps} on {self.describe_ranks()}: "
            f"{data}"
        )
        before = self.evaluate() if self.start == 0 else {}
        if before:
            print_on_rank_0(f"eval loss {before['eval_loss']:.3f} before the first step")

    def iterate_micro_batches(self, batch: StepBatch) -> Iterator[Sequence[Tensor]]:
        """Yield each micro-batch's tensors on the device, without the micro-batch dimension A."""
        if self.packs:
            yield from super().iterate_micro_batches(batch)
            return
        for parts in zip(*batch.list_tensors()[:3], strict=True):
            T = int((~parts[2]).sum(1).max().clamp(min=1))  # of the longest document
            yield [copy_to_device(part[:, :T].contiguous(), self.device) for part in parts]

    def make_inputs(
        self, num_labels: Tensor, micro_batches: Iterable[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Return the forward arguments of micro-batches; each loss is divided by `num_labels`."""
        return [make_causal_lm_inputs(num_labels, *parts) for parts in micro_batches]

    def evaluate(self) -> Metrics:
        """Return "eval_loss" in nats per answer token; {} without evaluation data. Collective."""
        if not self.held_out:
            return {}
        steps = self.read(self.held_out, self.eval_shape, seed=None)
        batches = (steps.next_batch() for _ in range(len(steps.sampler)))
        return {"eval_loss": self.compute_eval_loss(batches, len(steps.sampler))}

    @property
    def eval_shape(self) -> BatchShape:
        """The shape of a batch of evaluation data: one micro-batch on each data rank."""
        return replace(self.shape, grad_accum=1)

    def compute_metrics(self, token_counts: list[int], seconds: float) -> Metrics:
        """Return "answer_tokens", "padding_share", and "mfu" if FLOPs and GPU peak are known."""
        shares = compute_padding_and_mfu(token_counts, seconds, self.decoder, self.peak_tflops)
        return {"answer_tokens": token_counts[0], **shares}

    def finish(self) -> None:
        """Export the trained model to RUN_DIR/export. Collective."""
        export_run(self)


@dataclass(kw_only=True)
class PreferenceTuning(FineTuning):
    """The job of objective "dpo": pairs of a chosen and a rejected answer to one prompt."""

    reference: Any  # the frozen model; None = the trained model without its LoRA adapters
    objective: Any  # the options

    unit = "pair"
    options: ClassVar[Any] = DPO
    num_sequences = 2
    encode: ClassVar[Any] = staticmethod(encode_preference)
    make_batch: ClassVar[Any] = staticmethod(make_pair_batch)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A micro-batch has capacity for `batch_size` examples of the greatest length.
        max_tokens = self.num_sequences * self.shape.batch_size * self.shape.seq_len
        self.engine = Engine(
            self.model, self.owner, max_tokens=max_tokens, reference=self.reference
        )

    def forward_backward(self, num_labels: Tensor, batch: Any) -> Tensor:
        """Run forward and backward; return (mean loss over all ranks) / (number of data ranks)."""
        rollouts = self.prepare_rollouts(batch)
        result = self.engine.forward_backward(rollouts, self.objective)
        self.data_metrics = self.average_preference_metrics(result.scores.log_probs_N, rollouts)
        return result.loss / self.meshes.data_ranks  # every rank has the mean

    def average_preference_metrics(self, log_probs_N: Tensor, rollouts: Rollouts) -> Metrics:
        """Return means of TRL's metrics, such as "rewards/chosen", over all ranks. Collective."""
        log_ratios_i2 = self.objective.compute_log_ratios(log_probs_N, rollouts)
        rewards_i2 = self.objective.beta * log_ratios_i2
        margins_i = rewards_i2[:, 0] - rewards_i2[:, 1]
        sums = torch.stack([*rewards_i2.sum(0), margins_i.sum(), (margins_i > 0).sum()])
        sums = torch.cat([sums, sums.new_full((1,), len(margins_i))])
        dist.all_reduce(sums)
        *totals, num_pairs = sums.tolist()
        names = ("chosen", "rejected", "margins", "accuracies")
        pairs = zip(names, totals, strict=True)
        return {f"rewards/{name}": total / num_pairs for name, total in pairs}

    def prepare_rollouts(self, batch: Any) -> Rollouts:
        """Return the sequences of a batch, with the reference model's log-probs. Collective."""
        return self.add_reference_log_probs(batch.rollouts)

    def add_reference_log_probs(self, rollouts: Rollouts) -> Rollouts:
        """Return `rollouts` on the device, with the reference model's log-probs. Collective."""
        group_size, advantages_N = self.objective.group_size, rollouts.advantages_N
        scores = self.engine.reference_log_probs(rollouts, group_size=group_size)
        return rollouts.replace(
            ref_log_probs_N=scores.log_probs_N,
            response_mask_N=rollouts.response_mask_N.to(self.device),
            advantages_N=None if advantages_N is None else advantages_N.to(self.device),
        )

    def sum_losses(self, batch: Any) -> Tensor:
        """Return the sum of the losses of this data rank's examples, 0-dim."""
        rollouts = self.prepare_rollouts(batch)
        group_size = self.objective.group_size
        log_probs_N = self.engine.log_probs(rollouts, group_size=group_size).log_probs_N
        losses: Tensor = self.objective.compute_losses(log_probs_N, rollouts)
        return losses.sum()

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return "answer_tokens", the step's tokens of completions: counts[2]."""
        return {"answer_tokens": counts[2]}


@dataclass(kw_only=True)
class UnpairedTuning(PreferenceTuning):
    """The job of objective "kto": completions with a label, desirable or undesirable."""

    unit = "completion"
    options = KTO
    num_sequences = 1
    encode = staticmethod(encode_unpaired_preference)
    make_batch = staticmethod(make_unpaired_batch)

    @property
    def eval_shape(self) -> BatchShape:
        """The shape of a training step, because the KL term needs several completions."""
        return self.shape

    def prepare_rollouts(self, batch: Any) -> Rollouts:
        """Set `objective.kl` from prompts with mismatched completions; return the sequences."""
        rollouts = self.add_reference_log_probs(batch.mismatched)
        log_probs_N = self.engine.log_probs(rollouts).log_probs_N
        log_ratios_n = self.objective.compute_log_ratios(log_probs_N, rollouts)
        sums = torch.stack([log_ratios_n.sum(), log_ratios_n.new_tensor(len(log_ratios_n))])
        dist.all_reduce(sums)
        self.objective = replace(self.objective, kl=max(0.0, float(sums[0] / sums[1].clamp(min=1))))
        return super().prepare_rollouts(batch)

    def average_preference_metrics(self, log_probs_N: Tensor, rollouts: Rollouts) -> Metrics:
        """Return means of TRL's metrics over the completions of all ranks. Collective."""
        rewards_n = self.objective.beta * self.objective.compute_log_ratios(log_probs_N, rollouts)
        is_desirable_n = self.objective.find_desirable(rollouts)
        values = rewards_n, rollouts.sum_responses(log_probs_N), torch.ones_like(rewards_n)
        values_n3 = torch.stack(values, dim=1)
        sums = torch.stack(
            [values_n3[mask_n].sum(0) for mask_n in (is_desirable_n, ~is_desirable_n)]
        )
        dist.all_reduce(sums)
        metrics: Metrics = {"kl": self.objective.kl}
        for name, (reward, log_prob, count) in zip(
            ("chosen", "rejected"), sums.tolist(), strict=True
        ):
            if count:  # a batch may have only desirable completions
                metrics |= {f"rewards/{name}": reward / count, f"logps/{name}": log_prob / count}
        if sums[:, 2].all():
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


@dataclass(kw_only=True)
class DistillationTuning(FineTuning):
    """The job of objective "distill": answers, and a teacher's logits or log-probabilities."""

    reference: Any  # the frozen teacher; None = batches have its log-probabilities
    objective: Distillation

    options: ClassVar[Any] = Distillation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference_step = None if self.reference is None else TrainStep(self.reference)
        self._heads = list[Tensor]()

    def make_inputs(
        self, num_labels: Tensor, micro_batches: Iterable[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Run forwards of the teacher, if any; return the student's forward arguments. Collective.

        The tensors of a micro-batch without a teacher end with ids and log-probabilities [M, k].
        """
        if self.reference_step is None:
            inputs = [
                make_scored_inputs(
                    StoredLogProbs(
                        full_labels_BT=parts[1], ids_Mk=parts[-2], log_probs_Mk=parts[-1]
                    ),
                    *parts[:-2],
                )
                for parts in micro_batches
            ]
        else:
            top_k, heads = self.objective.top_k, self._heads
            inputs = [
                make_scored_inputs(TeacherForward(parts[1], top_k=top_k, heads=heads), *parts)
                for parts in micro_batches
            ]
            self.reference_step.compute_losses(inputs)
        for arguments in inputs:
            teacher = arguments["log_prob_loss"]
            arguments["log_prob_loss"] = DistillationLoss(
                labels_BT=teacher.labels_BT,
                num_tokens=num_labels,
                teacher=teacher,
                options=self.objective,
            )
        return inputs


JOBS: dict[str, type[FineTuning]] = {
    "sft": FineTuning,
    "dpo": PreferenceTuning,
    "kto": UnpairedTuning,
    "distill": DistillationTuning,
}
