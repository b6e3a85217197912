"""Trains one golden path: the loss and gradient norm of every step, a digest of the parameters.

`train_step` alone knows the calls of a training loop.

    TRITON_INTERPRET=1 python -m tests.golden.runs triton    prints the result of this path
"""

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import Meshes, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig
from moecore.train import AdamW
from tests.golden.paths import PATHS, Path
from tests.helpers.parts import on_parts

VOCAB, BATCHES = 61, 4  # the batches repeat, so that losses fall
Batch = tuple[Tensor, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]
Result = dict[str, Any]


def run_path(path: Path) -> Result:
    """Train on this rank; the same result on every rank. Collective."""
    if path.kind == "torchtitan":
        return _run_torchtitan(path)
    meshes = build_meshes(path.parallel, "cpu")
    if path.kind == "transformers":
        from tests.families.transformers.hf_models import random_model

        model, forward = random_model("qwen3-moe"), _transformers_loss
    else:
        model, forward = Decoder(_decoder_config(path)), _decoder_loss(path, meshes)
    _fill(model.to(path.dtype))
    parallelize_moe(model, meshes, **path.options)
    # An eps of the size of the gradients: the division then does not magnify rounding.
    make_optimizer = AdamW if path.fused else on_parts(torch.optim.AdamW)
    optimizer = make_optimizer(model.parameters(), lr=path.lr, eps=1e-2, weight_decay=0.1)
    batches = _batches(path, meshes)
    losses, norms = [], []
    for step in range(path.steps):
        loss, norm = train_step(model, optimizer, batches[step % BATCHES], forward, path)
        losses.append(_over_data_ranks(loss, meshes, path))
        norms.append(norm)
    return _result(losses, norms, dict(model.state_dict()))


def train_step(model, optimizer, micro_batches, forward, path) -> tuple[float, float]:
    """One optimizer step; returns this rank's loss and the gradient's norm."""
    count, total = len(micro_batches), 0.0
    step = TrainStep(model, max_norm=1.0, num_micro_batches=count)
    for batch in micro_batches:
        with step.micro_batch():
            loss = forward(model, batch)
            loss = loss if path.sums else loss / count
            loss.backward()
        total += loss.item()
    norm = step.clip()
    assert norm.finite, norm.non_finite
    optimizer.step()
    optimizer.zero_grad()
    step.finish()
    return total, norm.total


def _decoder_config(path: Path) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=_vocabulary(path),
        dim=path.moe.dim,
        num_layers=path.layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_hidden_dim=48 if path.layers > 1 else 0,
        moe=path.moe,
        dense_layers=(0,) if path.layers > 1 else (),
        qk_norm="head",
        max_seq_len=32,
        ce_chunk_tokens=7,
    )


def _decoder_loss(path: Path, meshes: Meshes) -> Forward:
    if not path.sums:
        return lambda model, batch: model(*batch)
    counted = sum(int((y != -100).sum()) for _, y in _micro_batch(path, meshes.data_ranks, 0, 0))
    num_tokens = counted * path.accumulate  # the same number in every micro-batch
    return lambda model, batch: model(*batch, num_tokens=num_tokens)


def _transformers_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Weights that every platform represents alike, large enough for uneven routing."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point() and "norm" not in name and "expert_bias" not in name:
            whole = torch.randint(-1024, 1025, tensor.shape, generator=generator)
            tensor.copy_(whole * (0.375 / 1024))


def _batches(path: Path, meshes: Meshes) -> list[list[Batch]]:
    """Return [batch][micro-batch] of this rank."""
    return [
        [
            _micro_batch(path, meshes.data_ranks, step, n)[meshes.data_rank]
            for n in range(path.accumulate)
        ]
        for step in range(BATCHES)
    ]


def _vocabulary(path: Path) -> int:
    """Return a size that tensor parallelism cuts evenly."""
    return VOCAB - VOCAB % path.parallel.tp


def _micro_batch(path: Path, data_ranks: int, step: int, n: int) -> list[Batch]:
    """Return [data rank] -> tokens and labels; data ranks hold different numbers of tokens."""
    generator = torch.Generator().manual_seed(100 * step + n)
    found = []
    for r in range(data_ranks):
        shape = (path.sequences, path.length + 2 * r)
        tokens = torch.randint(0, _vocabulary(path), shape, generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        found.append((tokens, labels))
    return found


def _over_data_ranks(loss: float, meshes: Meshes, path: Path) -> float:
    """Return the mean, or the sum, of the data ranks' losses."""
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, loss)
    total = math.fsum(every[:: len(every) // meshes.data_ranks])
    return total if path.sums else total / meshes.data_ranks


def _run_torchtitan(path: Path) -> Result:
    from examples.torchtitan.cpu import prepare

    prepare()
    from tests.integrations.titan_runs import train

    options = dict(
        parallelism__expert_parallel_degree=path.parallel.ep,
        training__steps=path.steps,
        optimizer__eps=1e-2,
        optimizer__implementation="foreach",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = train("moecore_tiny_qwen3", folder, **options)
    return _result(run.losses, run.norms, run.state)


def _result(losses: list[float], norms: list[float], state: dict[str, Tensor]) -> Result:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "losses": [float(x).hex() for x in losses],
        "norms": [float(x).hex() for x in norms],
        "parameters": digest.hexdigest(),
    }


def worker(rank: int, device: torch.device, paths: dict[str, Path]) -> dict[str, Result]:
    return {name: run_path(path) for name, path in paths.items()}


def main(name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(run_path(PATHS[name])), flush=True)
    os._exit(0)  # without destructors, as in tests/helpers/ranks.py


if __name__ == "__main__":
    main(sys.argv[1])
