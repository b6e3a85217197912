"""The job of `moecore pretrain` and `moecore train`: training of the native decoder on a corpus.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.progress import track_progress
from moecore.base.streams import copy_to_device
from moecore.io import export_hf
from moecore.models import Decoder
from moecore.moe.layer import MoELayer
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.corpora import CorpusSteps, Tokenizer
from moecore.recipes.data import GraphedStep, RandomSteps, StepBatch, Steps, pad_bounds
from moecore.recipes.decoder_config import export_config
from moecore.recipes.generate import write_samples
from moecore.recipes.hf_model import needs_export, write_export
from moecore.recipes.job import TrainingJob
from moecore.recipes.loop import describe_ranks, describe_start, print_on_rank_0
from moecore.recipes.metrics import Metrics, compute_padding_and_mfu
from moecore.recipes.report import EXPORT, SAMPLES
from moecore.recipes.schedule import is_due
from moecore.recipes.sdc import SDCCheck


@dataclass(kw_only=True)
class CorpusTraining(TrainingJob[StepBatch | ScheduledBatch]):
    """The job of `moecore pretrain` and `moecore train`: a `Decoder` on a corpus."""

    batches: CorpusSteps | RandomSteps | Steps[ScheduledBatch]
    tokenizer: Tokenizer
    validation: dict[str, StepBatch | ScheduledBatch]  # this data rank's, by name of the set
    bad_lines: int  # number of lines that the sources leave out

    chosen_by = "--data, --seq-len, --seed, --cp and the options of [corpus]"

    def __post_init__(self) -> None:
        super().__post_init__()

        def run_micro_batches(num_labels: Tensor, *tensors: Tensor) -> Tensor:
            inputs = make_decoder_inputs(num_labels, tensors, self.args.seq_len)
            return self.owner.forward_backward(inputs).sum()

        self.run_micro_batches: Callable[..., Tensor] = run_micro_batches
        if self.args.cuda_graph:
            self.run_micro_batches = GraphedStep(run_micro_batches, self.model)
        options = self.args.sdc_check
        self.sdc = options and SDCCheck(options, self.meshes.parallel, self.owner)

    def print_start(self) -> None:
        """Print the model, the ranks and the data of the run."""
        args, ranks = self.args, describe_ranks(self, get_dispatcher_name(self.model))
        begin, name = describe_start(self, "from scratch"), args.hf_config or args.preset
        data = "random tokens" if args.tokens == "random" else f"{len(args.data)} source(s)"
        print_on_rank_0(f"training {name} {begin} to step {args.steps} on {ranks}: {data}")

    def next_batch(self, step: int) -> StepBatch | ScheduledBatch:
        """Return this data rank's batch for a step; its number of rows follows the [batch] ramp."""
        if isinstance(self.batches, Steps):
            return self.batches.next_batch()
        rows = self.stage.sizes.get_rows(step)
        batch = self.batches.next_batch(rows // (self.shape.data_ranks * self.shape.batch_size))
        return pad_bounds(batch) if self.args.cuda_graph else batch

    def forward_backward(self, num_labels: Tensor, batch: StepBatch | ScheduledBatch) -> Tensor:
        """Run the micro-batches; return this rank's part of the mean loss over `num_labels`."""
        if isinstance(batch, ScheduledBatch):
            self.owner.num_micro_batches = len(batch.cps)
            return batch.compute_local_loss(self.owner.forward_backward(batch.inputs(self.device)))
        if self.owner.num_micro_batches != len(batch.tokens_ABT):
            self.owner.num_micro_batches = len(batch.tokens_ABT)
        tensors = (copy_to_device(tensor, self.device) for tensor in batch.list_tensors())
        return self.run_micro_batches(num_labels, *tensors)

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return "padding_share", and "mfu" if the device's peak TFLOP/s is known."""
        return compute_padding_and_mfu(counts, seconds, self.model.config, self.peak_tflops)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return "eval_loss/NAME" of each set, in nats per label, and "eval_loss". Collective."""
        if not self.validation:
            return {}
        self.model.eval()
        sets = track_progress(self.validation.items(), "evaluating", unit="sets", as_lines=True)
        losses = {f"eval_loss/{name}": self._compute_loss(rows) for name, rows in sets}
        self.model.train()
        return {"eval_loss": sum(losses.values()) / len(losses), **losses}

    def _compute_loss(self, batch: StepBatch | ScheduledBatch) -> float:
        """Return a validation set's mean loss per label over all ranks, in nats. Collective."""
        copies = dist.get_world_size() // self.meshes.data_ranks
        if isinstance(batch, ScheduledBatch):
            total = batch.compute_local_loss(self.owner.compute_losses(batch.inputs(self.device)))
        else:
            dist.all_reduce(num_labels := copy_to_device(batch.num_labels.clone(), self.device))
            divisor = (num_labels // copies).clamp(min=1)
            tensors = (copy_to_device(tensor, self.device) for tensor in batch.list_tensors())
            inputs = make_decoder_inputs(divisor, tensors, self.args.seq_len)
            total = self.owner.compute_losses(inputs).sum()
        dist.all_reduce(total)
        return float(total) / copies

    def sample(self, step: int) -> None:
        """Every `sample_every` steps, continue the prompts of [samples]; write and print texts."""
        options = self.args.samples
        if is_due(step, every=options.sample_every, last_step=self.args.steps):
            texts = write_samples(
                self.model,
                options.encode_prompts(self.tokenizer, self.model.config),
                self.tokenizer,
                self.args.run_dir / SAMPLES,
                step=step,
                num_tokens=options.sample_tokens,
                device=self.meshes.device,
            )
            for text in texts:
                print_on_rank_0(f"sample of step {step}: {text!r}")

    def get_data_metrics(self) -> Metrics:
        """Return "epoch/NAME" of each source, and if lines were skipped their count "bad_lines"."""
        epochs = self.batches.sampler.get_epochs()
        metrics = {f"epoch/{name}": float(epoch) for name, epoch in epochs.items()}
        return metrics | ({"bad_lines": float(self.bad_lines)} if self.bad_lines else {})

    def close(self) -> None:
        """Free communication buffers and stop the data loader's processes. Collective."""
        self.batches.sampler.close()
        super().close()

    def finish(self) -> None:
        """With --hf-config export a Hugging Face model; stop the data loader. Collective."""
        self.batches.sampler.close()
        target = self.args.run_dir / EXPORT
        if not self.args.hf_config:
            return
        if needs_export(self):
            config = export_config(self.args.hf_config, self.args.rotary, self.model.config)
            options: Any = {"dtype": self.args.get_compute_dtype(self.device), "config": config}

            def complete(draft: Path) -> None:
                if self.tokenizer.hf is not None:
                    self.tokenizer.hf.save_pretrained(draft)

            write_export(
                target,
                lambda draft, report: export_hf(self.model, draft, progress=report, **options),
                complete,
            )
        print_on_rank_0(f"{target} is ready for from_pretrained")


def make_decoder_inputs(
    num_labels: Tensor, tensors: Iterable[Tensor], seq_len: int
) -> list[dict[str, Any]]:
    """Return each micro-batch's `Decoder` arguments; `tensors` are `StepBatch.list_tensors()`."""
    tensors = tuple(tensors)
    names = ["tokens_BT", "labels_BT"]
    of_all: dict[str, Any] = {"num_tokens": num_labels}
    if len(tensors) > len(names):
        names += ["padding_mask_BT", "cu_seqlens"]
        of_all["max_seqlen"] = seq_len
    return [dict(zip(names, row, strict=True)) | of_all for row in zip(*tensors, strict=True)]


def get_dispatcher_name(model: Decoder) -> str:
    """Return the name of a model's dispatcher, or "dense" if the model has no MoE layers."""
    names = {type(m.dispatcher).__name__ for m in model.modules() if isinstance(m, MoELayer)}
    return "".join(names).removesuffix("Dispatcher").lower() or "dense"
