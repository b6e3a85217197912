"""accelerate and Trainer raise for a parallelized model, which they would wrap once more.

accelerate calls `len(model.hf_device_map)` of whatever it is about to wrap, in one process and in
many, because it refuses models that are spread over devices already. A parallelized model is one:
its map has no entry for other readers (such as `generate`), and its length is the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from torch import nn

from moecore.families.transformers.stock import is_pretrained


class ShardedDeviceMap(Mapping[str, str]):
    """A device map without entries that must not be counted.

    Args:
        name: of the model's class.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> NoReturn:
        raise ValueError(
            f"model ({self._name}) must not be wrapped by Trainer or accelerate, because "
            "parallelize_moe has sharded it: use moecore.integrations.transformers.MoETrainer, or "
            "moecore.TrainStep in a loop of your own"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __getitem__(self, key: str) -> str:
        raise KeyError(key)


def refuse_accelerate(model: nn.Module) -> None:
    """Make Trainer and accelerate raise for a model and for the transformers models in it."""
    for module in model.modules():
        if module is model or is_pretrained(module):
            module.hf_device_map = ShardedDeviceMap(type(module).__name__)  # type: ignore[assignment]
