"""Candidate kernels still compile for Hopper; whether they are right and fast, a GPU says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.variants.grouped_gemm_gluon import launch_arguments, mg_kernel

from tests.kernels.test_compile import SHARED_MEMORY_BYTES, bf16, compiled, ints, spilled_bytes  # noqa: F401

CONFIGS = {"turns": (128, 128, 64, 8, 4, 216, 56), "eight warps": (128, 256, 64, 8, 3, 216, 56)}
E, D, F, R = 8, 2048, 768, 512
CASES = {
    "FC1 + activation": (lambda: (bf16(64, D), bf16(E, 2 * F, D)), True, True, 1),
    "FC2": (lambda: (bf16(R, F), bf16(E, D, F)), False, True, 0),
    "FC2 input gradient + activation": (lambda: (bf16(64, D), bf16(E, D, F)), True, False, 2),
    "FC1 input gradient": (lambda: (bf16(R, 2 * F), bf16(E, 2 * F, D)), False, False, 0),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_candidate_compiles(
    name: str,
    config: str,
    compiled: dict[str, Any],  # noqa: F811
    tmp_path: Any,
) -> None:
    make, gather, b_nk, epilogue = CASES[name]
    options = dict(gather=gather, b_nk=b_nk, epi=epilogue, w=torch.zeros(R), h=bf16(R, 2 * F))
    _, arguments = launch_arguments(*make(), ints(R), R, ints(1000), cfg=CONFIGS[config], **options)
    mg_kernel.run(*arguments, grid=(1,), warmup=True, num_warps=4 if config == "turns" else 8)
    (kernel,) = compiled.values()
    assert spilled_bytes(kernel, tmp_path) <= 64
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
