"""CorpusTraining: the decoder of `moecore pretrain` on a corpus, and its export."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecore.base.progress import show_progress, track
from moecore.io import export_hf
from moecore.io.checkpoint.ranks import on_first_rank
from moecore.models import Decoder
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.corpora import CorpusSteps, ScheduledCorpusSteps, Tokenizer
from moecore.recipes.data import StepBatch, to_device
from moecore.recipes.decoder_config import export_config
from moecore.recipes.graphs import pad_borders
from moecore.recipes.loop import begins, ranks_of, say
from moecore.recipes.metrics import Metrics
from moecore.recipes.native import DecoderJob, dispatcher_of, inputs_of
from moecore.recipes.report import EXPORT, SAMPLES
from moecore.recipes.samples import write_samples
from moecore.recipes.schedule import is_due


@dataclass(kw_only=True)
class CorpusTraining(DecoderJob):
    """A decoder on a corpus; with --dynamic-cp on `ScheduledBatch`.

    Attributes:
        batches: steps of the corpus.
        tokenizer: of its text.
        validation: this rank's rows of each set.
        bad_lines: lines of the sources that are left out because they are broken.
    """

    batches: CorpusSteps | ScheduledCorpusSteps
    tokenizer: Tokenizer
    validation: dict[str, StepBatch | ScheduledBatch]
    bad_lines: int

    chosen_by = "--data, --seq-len, --seed, --cp and the options of [corpus]"

    def begin(self) -> None:
        """Print model, data and ranks."""
        args, ranks = self.args, ranks_of(self, dispatcher_of(self.model))
        begin, name = begins(self, "from scratch"), args.hf_config or args.preset
        say(f"training {name} {begin} to step {args.steps} on {ranks}: {len(args.data)} source(s)")

    def next_batch(self, step: int) -> StepBatch | ScheduledBatch:
        """Return the batch of this data rank."""
        if isinstance(self.batches, ScheduledCorpusSteps):
            return self.batches.next()
        rows = self.stage.sizes.rows(step)
        batch = self.batches.next(rows // (self.shape.data_ranks * self.shape.batch_size))
        return pad_borders(batch) if self.args.cuda_graph else batch

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return the loss on each validation set, and their mean. Waits for the device."""
        if not self.validation:
            return {}
        self.model.eval()
        sets = track(self.validation.items(), "evaluating", unit="sets", lines=True)
        losses = {f"eval_loss/{name}": self._loss(rows) for name, rows in sets}
        self.model.train()
        return {"eval_loss": sum(losses.values()) / len(losses), **losses}

    def _loss(self, batch: StepBatch | ScheduledBatch) -> float:
        copies = dist.get_world_size() // self.meshes.data_ranks
        if isinstance(batch, ScheduledBatch):
            total = batch.loss_of(self.owner.losses(batch.inputs(self.device)))
            dist.all_reduce(total)
            return float(total) / copies
        num_labels = to_device(batch.num_labels.clone(), self.device)
        dist.all_reduce(num_labels)
        tensors = (to_device(tensor, self.device) for tensor in batch.tensors())
        inputs = inputs_of((num_labels // copies).clamp(min=1), tensors, self.args.seq_len)
        total = self.owner.losses(inputs).sum()
        dist.all_reduce(total)
        return float(total) / copies

    def sample(self, step: int) -> None:
        """Continue the prompts of [samples], if it is due."""
        options = self.args.samples
        if is_due(step, every=options.sample_every, steps=self.args.steps):
            write_samples(
                self.model,
                options.prompts(self.tokenizer, max_seq_len=self.model.config.max_seq_len),
                self.tokenizer,
                self.args.run_dir / SAMPLES,
                step=step,
                num_tokens=options.sample_tokens,
            )

    def position(self) -> Metrics:
        """Return the epoch of each source, the number of broken lines."""
        epochs = self.batches.sampler.epochs()
        metrics = {f"epoch/{name}": float(epoch) for name, epoch in epochs.items()}
        return metrics | ({"bad_lines": float(self.bad_lines)} if self.bad_lines else {})

    def close(self) -> None:
        """End the workers, and free what the next stage makes anew."""
        self.batches.sampler.close()
        super().close()

    def finish(self) -> None:
        """End the workers and export a directory that `from_pretrained` loads."""
        self.batches.sampler.close()
        target = self.args.run_dir / EXPORT
        if not self.args.hf_config:
            return
        if self.start < self.args.steps or not target.exists():
            dtype = self.args.compute_dtype(self.device)
            config = export_config(self.args.hf_config, self.args.rotary, self.model.config)
            export(self.model, config, dtype, self.tokenizer, target)
        say(f"{target} is ready for from_pretrained")


def export(
    model: Decoder, config: Any, dtype: torch.dtype, tokenizer: Tokenizer, target: Path
) -> None:
    """Write a directory that transformers loads; a draft until all of it is there. Collective."""
    draft = target.with_name(f".{target.name}.draft")
    on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))
    with show_progress("exporting", unit="B") as report:
        export_hf(model, draft, config=config, dtype=dtype, progress=report)

    def complete() -> None:
        if tokenizer.hf is not None:
            tokenizer.hf.save_pretrained(draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)

    on_first_rank(complete)
