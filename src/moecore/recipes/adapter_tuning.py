"""The job of `moecore finetune --adapters`: several LoRA adapters over one base.

Each adapter has its own data, `--batch-size` rows of a micro-batch, its own mean loss and gradient
norm. Its weights therefore equal the weights of a run with only this adapter.

Legend: N adapters, A micro-batches, B rows of a micro-batch, T tokens of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.streams import copy_to_device
from moecore.io import save_adapters
from moecore.io.hf.lora import collect_adapter_tensors
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.models import make_adapter_loss
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.data import StepBatch, Steps
from moecore.recipes.finetuning import FineTuning
from moecore.recipes.hf_model import ADAPTERS, make_scored_inputs
from moecore.recipes.job import average_losses
from moecore.recipes.loop import print_on_rank_0
from moecore.recipes.metrics import Metrics


class AdapterSteps:
    """Joins the batches of readers {adapter number: reader}; `sampler` is this object.

    Readers with fewer steps begin again. Extras are the adapter of each row, int64 [A, B].
    """

    def __init__(self, readers: Mapping[int, Steps[StepBatch]]) -> None:
        self._readers, self.sampler = readers, self

    def __len__(self) -> int:
        """Return the number of steps of one pass of the longest data."""
        return max(len(reader.sampler) for reader in self._readers.values())

    def next_batch(self) -> StepBatch:
        """Return the rows of the next batches of all readers, in the order of the readers."""
        batches = [reader.next_batch() for reader in self._readers.values()]
        A, B, T = batches[0].tokens_ABT.shape
        bounds = [batch.cu_seqlens_An for batch in batches if batch.cu_seqlens_An is not None]
        padding = [batch.padding_ABT for batch in batches if batch.padding_ABT is not None]
        ids_n = torch.tensor(list(self._readers), dtype=torch.int64, device="cpu")
        return StepBatch(
            tokens_ABT=torch.cat([batch.tokens_ABT for batch in batches], 1),
            labels_ABT=torch.cat([batch.labels_ABT for batch in batches], 1),
            padding_ABT=torch.cat(padding, 1),
            cu_seqlens_An=torch.cat([cu_An + i * B * T for i, cu_An in enumerate(bounds)], 1),
            num_labels=torch.stack([batch.num_labels for batch in batches]).sum(),
            extras=(ids_n.repeat_interleave(B).expand(A, -1),),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all readers."""
        return {str(i): reader.sampler.state_dict() for i, reader in self._readers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the positions of `state`; ValueError if one is of other data."""
        for i, reader in self._readers.items():
            reader.sampler.load_state_dict(state.get(str(i), {}))


@dataclass(kw_only=True)
class AdapterTuning(FineTuning):
    """The job of several adapters; `batches` is an `AdapterSteps`."""

    held_out_of: Mapping[str, Sequence[Any]]  # examples that are evaluated, by adapter

    def list_clip_groups(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each adapter."""
        entries = (collect_adapter_tensors(self.model, name) for name in self.held_out_of)
        groups: list[Any] = [[entry.tensor for entry in tensors.values()] for tensors in entries]
        return groups

    def forward_backward(self, _num_labels: Tensor, batch: StepBatch | ScheduledBatch) -> Tensor:
        """Run the micro-batches; return this rank's part of the mean over adapters of the loss."""
        assert isinstance(batch, StepBatch)
        num_labels_AB = (batch.labels_ABT != IGNORE_INDEX).sum(2)
        counts_N = torch.zeros(len(self.held_out_of), dtype=torch.int64, device="cpu")
        counts_N.index_add_(0, batch.extras[0].flatten(), num_labels_AB.flatten())
        counts_N = copy_to_device(counts_N, self.device)
        dist.all_reduce(counts_N)
        num_copies = dist.get_world_size() // self.meshes.data_ranks
        loss = super().forward_backward(counts_N // num_copies, batch)
        self.losses_N = torch.stack(self.losses).sum(0)  # of this step, over all ranks
        dist.all_reduce(self.losses_N)
        self.losses_N /= num_copies
        return loss / len(self.losses_N)

    def make_inputs(
        self, num_labels: Tensor, micro_batches: Iterable[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Return the forward arguments; `num_labels` is of each adapter, or one for all."""
        inputs, divisors_N = [], num_labels.expand(len(self.held_out_of))
        self.losses = list[Tensor]()  # of each micro-batch
        for *parts, ids_B in micro_batches:
            self.losses.append(torch.zeros_like(divisors_N, dtype=torch.float32))
            loss = make_adapter_loss(parts[1], ids_B, divisors_N, self.losses[-1])
            inputs.append(make_scored_inputs(loss, *parts) | {"adapter_ids": ids_B})
        return inputs

    def get_data_metrics(self) -> dict[str, Any]:
        """Return the loss of each adapter in the last step."""
        losses = zip(self.held_out_of, self.losses_N, strict=True)
        return {f"loss/{name}": loss for name, loss in losses}

    def evaluate(self) -> Metrics:
        """Return "eval_loss/NAME" of adapters with evaluation data, and the mean "eval_loss"."""
        losses = Metrics()
        for i, (name, examples) in enumerate(self.held_out_of.items()):
            if examples:
                steps: Any = AdapterSteps({i: self.read(examples, self.eval_shape, seed=None)})
                batches = (steps.next_batch() for _ in range(len(steps)))
                losses[f"eval_loss/{name}"] = self.compute_eval_loss(batches, len(steps))
        return average_losses(losses)

    def finish(self) -> None:
        """Write each adapter to RUN_DIR/adapters/NAME in peft's format. Collective."""
        for name in self.held_out_of:
            save_adapters(self.model, self.args.run_dir / ADAPTERS / name, adapter=name)
        folder = self.args.run_dir / ADAPTERS
        print_on_rank_0(f"{folder} has the adapters {', '.join(self.held_out_of)}")
