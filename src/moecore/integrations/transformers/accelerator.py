"""The Accelerator of a `MoETrainer`: devices, data loaders and gathers, but no part of a step."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore.train.step import TrainStep


class ShardedAccelerator(Accelerator):
    """An Accelerator that wraps no model and no optimizer, and clips through a `TrainStep`.

    Processes are data ranks to it: cp ranks read the same batches.

    Attributes:
        owner: of the optimizer steps, set before the first one.
        cp: context parallel ranks, neighbours.
    """

    owner: TrainStep
    cp: int = 1

    @property
    def num_processes(self) -> int:
        """Ranks with different data."""
        return super().num_processes // self.cp

    @property
    def process_index(self) -> int:
        """Index of this rank's data."""
        return super().process_index // self.cp

    def gather(self, tensor: Any) -> Any:
        """Return tensors of all data ranks, one after the other along the first dim. Collective."""
        gathered = super().gather(tensor)
        return recursively_apply(self._of_data_ranks, gathered) if self.cp > 1 else gathered

    def _of_data_ranks(self, gathered: Tensor) -> Tensor:
        return gathered.unflatten(0, (self.num_processes, self.cp, -1))[:, 0].flatten(0, 1)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return False: the model is not placed by accelerate (see `device_map.py`)."""
        return False

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the model itself, on the device; that is what evaluation mode does."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Return the optimizer itself, which a checkpoint must know by its class."""
        return optimizer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of a micro-batch's loss, times the loss scale of fp16."""
        super().backward(self.owner.scale(loss), **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> float:
        """Clip the step's gradient over both meshes, at the norm that `owner` was made with."""
        return self.owner.clip().total
