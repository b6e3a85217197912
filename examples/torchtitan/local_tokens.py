"""Registers models that need no download and no tokenizer, each under the name of a model.

    --experimental.custom_import local_tokens --model.name local_moecore_qwen3

`local_qwen3` is torchtitan's Qwen3, `local_moecore_qwen3` the same with moecore's MoE layers,
`local_moecore` moecore's own decoder, `local_moecore_hf` a Hugging Face model.
Their tokens are uniform random ids of the vocabulary, or with `training.dataset_path` those of a
.npy file such as text.py writes. For measurements: every run of a layout sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models import qwen3
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from moecore.integrations.torchtitan.models import DecoderArgs
from moecore.integrations.torchtitan.v02.specs import TitanHFArgs, add_labels

NUM_RANDOM = 1 << 24  # ids drawn once; longer runs see them again


class LocalTokens(BaseDataLoader):
    """Batches of consecutive ids; rank and step choose where they begin.

    Args:
        tokens_N: int ids.
        rank: of all data ranks.
        num_ranks: data ranks.
        batch: sequences of a rank.
        seq_len: tokens of a sequence.

    Raises:
        ValueError: when there are fewer ids than one batch of all ranks needs.
    """

    def __init__(
        self, tokens_N: np.ndarray, *, rank: int, num_ranks: int, batch: int, seq_len: int
    ) -> None:
        self.rows = len(tokens_N) // (seq_len + 1)
        if self.rows < batch * num_ranks:
            raise ValueError(
                f"training.dataset_path ({len(tokens_N)} tokens) must hold one batch of all ranks "
                f"({batch * num_ranks} x {seq_len + 1}): use more text"
            )
        self.tokens_NS = tokens_N[: self.rows * (seq_len + 1)].reshape(self.rows, seq_len + 1)
        self.first, self.batch, self.stride = rank * batch, batch, num_ranks * batch
        self.step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.step * self.stride + self.first
            rows = np.arange(first, first + self.batch) % self.rows
            ids_BS = torch.from_numpy(self.tokens_NS[rows].astype(np.int64))
            self.step += 1
            yield {"input": ids_BS[:, :-1].contiguous()}, ids_BS[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict.get("step", 0)


def build_local_tokens(
    *, dp_rank: int, dp_world_size: int, job_config: Any, **_: Any
) -> BaseDataLoader:
    """A build_dataloader_fn."""
    training = job_config.training
    return LocalTokens(
        read_tokens(training.dataset_path, _vocab_size(job_config)),
        rank=dp_rank,
        num_ranks=dp_world_size,
        batch=training.local_batch_size,
        seq_len=training.seq_len,
    )


def read_tokens(path: str | None, vocab_size: int) -> np.ndarray:
    """Return int ids [N] of a .npy file, or random ones without a path.

    Raises:
        ValueError: for ids that are not below `vocab_size`.
    """
    if path is None:
        return np.random.default_rng(0).integers(vocab_size, size=NUM_RANDOM, dtype=np.int32)
    tokens_N: np.ndarray = np.load(path)
    if tokens_N.max(initial=0) >= vocab_size:
        raise ValueError(
            f"training.dataset_path ({path}) must hold ids ({tokens_N.max()}) < the model's "
            f"vocabulary ({vocab_size}): make it with a smaller --vocab-size"
        )
    return tokens_N


def _vocab_size(job_config: Any) -> int:
    model = job_config.model
    args: Any = get_train_spec(model.name).model_args[model.flavor]
    if isinstance(args, TitanHFArgs):
        args.update_from_config(job_config)  # reads the config, which torchtitan asks for later
        return args.hf_config.vocab_size
    return args.decoder.vocab_size if isinstance(args, DecoderArgs) else args.vocab_size


def local(spec: TrainSpec) -> TrainSpec:
    return replace(
        spec,
        build_dataloader_fn=build_local_tokens,
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )


register_train_spec("local_qwen3", local(qwen3.get_train_spec()))
register_train_spec("local_moecore_qwen3", local(get_train_spec("moecore_qwen3")))
for name in ("moecore", "moecore_hf"):
    own_loss = replace(
        local(get_train_spec(name)), build_dataloader_fn=add_labels(build_local_tokens)
    )
    register_train_spec(f"local_{name}", own_loss)
