"""Digests of weights, by which a stream detects changed bits between and during its passes.

Version counters of torch miss fused optimizers, replayed CUDA graphs and writes to `.data`. A
digest is a multilinear hash with random factors: 32-bit words times 64-bit factors, summed modulo
2^64, twice. Two different tensors have equal digests with a probability below 2^-64. A large tensor
is hashed in chunks, and the digests of the chunks are hashed again.

    digest([w0, w1, ..]) = (sum of f0[i] * w[i], sum of f1[i] * w[i])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import get_local_tensor
from moecore.moe.param_reader import get_fp8_blocks

# Words per product, 16 bytes each: a CPU's cache has room for them, and a GPU hides its launches.
CHUNK, CHUNK_ON_GPU = 1 << 16, 1 << 21


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Digests (hashes) of this rank's shards in a pass of a `WeightStream`, valid only for it."""

    digests: Mapping[str, Any] = field(repr=False)
    owner: object = field(repr=False)


class Digests:
    """Computes 128-bit hashes (digests) of tensors; random factors differ between objects."""

    def __init__(self) -> None:
        self._seed = int.from_bytes(os.urandom(7), "little")
        self._factors: dict[tuple[int, torch.device], Tensor] = {}

    def compute(self, tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[int, int]]:
        """Compute the digest of each named list of tensors, as two integers. Host sync."""
        with torch.no_grad():
            digests = {
                name: self._fingerprint_tensors(map(list_local_storage, ts))
                for name, ts in tensors.items()
            }
        self._factors.clear()
        by_device: dict[torch.device, list[str]] = {}
        for name, digest in digests.items():
            by_device.setdefault(digest.device, []).append(name)
        values: dict[str, tuple[int, int]] = {}
        for names in by_device.values():
            rows = torch.stack([digests[name] for name in names]).tolist()
            values |= {name: (a, b) for name, (a, b) in zip(names, rows, strict=True)}
        return values

    def _fingerprint_tensors(self, tensor_lists: Iterable[list[Tensor]]) -> Tensor:
        """Compute one digest, int64 [2] on the device, of all tensors in the lists."""
        digests = [self._hash_bytes(_view_as_bytes(x)) for tensors in tensor_lists for x in tensors]
        if len(digests) == 1:
            return digests[0]
        return self._hash_bytes(_view_as_bytes(torch.stack(digests)), 2)

    def _hash_bytes(self, bytes_n: Tensor, hash_level: int = 0) -> Tensor:
        """Compute the digest, int64 [2], of uint8 [n]; levels above 0 hash digests."""
        words = torch.nn.functional.pad(bytes_n, (0, -bytes_n.numel() % 4)).view(torch.int32)
        key = (hash_level, bytes_n.device)
        if key not in self._factors:
            generator = torch.Generator(bytes_n.device).manual_seed(self._seed + hash_level)
            chunk = CHUNK if bytes_n.device.type == "cpu" else CHUNK_ON_GPU
            values = torch.empty(2, chunk, dtype=torch.int64, device=bytes_n.device)
            self._factors[key] = values.random_(-(2**63), None, generator=generator)
        factors = self._factors[key]
        parts: tuple[Tensor, ...] = words.split(factors.shape[1])
        sums = [(factors[:, : len(x)] * x).sum(1) for x in parts]
        if len(sums) == 1:
            return sums[0]
        return self._hash_bytes(_view_as_bytes(torch.stack(sums)), hash_level + 1)


def list_local_storage(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that store this rank's shard: the local tensor, or FP8 data and scales."""
    blocks = get_fp8_blocks(tensor)
    return [get_local_tensor(tensor).detach()] if blocks is None else blocks.tensors()


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's bytes as uint8 [n]; copy them unless they start at a multiple of 4."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bits if bits.storage_offset() % 4 == 0 else bits.clone()
