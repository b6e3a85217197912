"""The job of `moecore pretrain` and `moecore train`: training of the native decoder on a corpus.

Legend: B rows, T tokens of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moecore.io import export_hf
from moecore.models import Decoder
from moecore.moe.layer import MoELayer
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.corpora import CorpusSteps, Tokenizer
from moecore.recipes.data import RandomSteps, StepBatch, Steps, pad_bounds
from moecore.recipes.decoder_config import export_config
from moecore.recipes.generate import write_samples
from moecore.recipes.hf_model import needs_export, write_export
from moecore.recipes.job import TextTraining, average_losses
from moecore.recipes.loop import print_on_rank_0
from moecore.recipes.metrics import Metrics, compute_padding_and_mfu
from moecore.recipes.report import EXPORT, SAMPLES
from moecore.recipes.schedule import is_due
from moecore.train import QKClip
from moecore.train.step_result import StepResult


@dataclass(kw_only=True)
class CorpusTraining(TextTraining):
    """The job of `moecore pretrain` and `moecore train`: a `Decoder` on a corpus."""

    batches: CorpusSteps | RandomSteps | Steps[ScheduledBatch]
    tokenizer: Tokenizer
    validation: dict[str, StepBatch | ScheduledBatch]  # this data rank's, by name of the set
    bad_lines: int  # number of lines that the sources leave out
    qk_clip: QKClip | None = None

    chosen_by = "--data, --seq-len, --seed, --cp and the options of [corpus]"

    def print_start(self) -> None:
        """Print the model, the ranks and the data of the run."""
        args, ranks = self.args, self.describe_ranks(get_dispatcher_name(self.model))
        begin, name = self.describe_start("from scratch"), args.hf_config or args.preset
        data = "random tokens" if args.tokens == "random" else f"{len(args.data)} source(s)"
        print_on_rank_0(f"training {name} {begin} to step {args.steps} on {ranks}: {data}")

    def next_batch(self, step: int) -> StepBatch | ScheduledBatch:
        """Return this data rank's batch for a step; its number of rows follows the [batch] ramp."""
        if isinstance(self.batches, Steps):
            return self.batches.next_batch()
        rows = self.stage.sizes.get_rows(step)
        batch = self.batches.next_batch(rows // (self.shape.data_ranks * self.shape.batch_size))
        return pad_bounds(batch) if self.args.cuda_graph else batch

    def make_inputs(
        self, num_labels: Tensor, micro_batches: Iterable[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Return the `Decoder` arguments of micro-batches; each loss is divided by `num_labels`."""
        inputs, names = [], ("tokens_BT", "labels_BT", "padding_mask_BT", "cu_seqlens")
        for tensors in micro_batches:
            arguments: dict[str, Any] = dict(zip(names, tensors, strict=False))
            if "cu_seqlens" in arguments:
                arguments["max_seqlen"] = self.args.seq_len
            inputs.append(arguments | {"num_tokens": num_labels})
        return inputs

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return "padding_share", and "mfu" if the device's peak TFLOP/s is known."""
        return compute_padding_and_mfu(counts, seconds, self.model.config, self.peak_tflops)

    def finish_step(self) -> StepResult:
        """Update the weights, and with --qk-clip scale queries and keys."""
        result = super().finish_step()
        if self.qk_clip is not None:
            self.qk_clip.step(is_skipped=result.is_skipped)
        return result

    def evaluate(self) -> Metrics:
        """Return "eval_loss/NAME" of each set, in nats per label, and "eval_loss". Collective."""
        sets = self.validation.items()
        return average_losses({f"eval_loss/{n}": self.compute_eval_loss([x]) for n, x in sets})

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


def get_dispatcher_name(model: Decoder) -> str:
    """Return the name of a model's dispatcher, or "dense" if the model has no MoE layers."""
    names = {type(m.dispatcher).__name__ for m in model.modules() if isinstance(m, MoELayer)}
    return "".join(names).removesuffix("Dispatcher").lower() or "dense"
