"""Grouped products of MXFP8 and NVFP4 operands: their reference, interpreted, and for Blackwell."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import HAS_TRITON, triton
from moecore.kernels.grouped import block_scaled
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_gemm_ref
from moecore.kernels.rows.microscaling import (
    emulated,
    emulated_matrices,
    pack_e2m1,
    quantise_mxfp8,
    quantise_nvfp4,
    tensor_scales,
    to_e8m0,
)

MXFP8, NVFP4 = Recipe(scaling="mxfp8"), Recipe(scaling="nvfp4", power_of_two=False)
VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else (0, 0)
needs_new = pytest.mark.skipif(VERSION < (3, 9), reason="Triton is older than 3.9")
both = pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
OFFSETS = [5, 5, 140]  # of 150 rows


def operand(x: Tensor, recipe: Recipe, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes and scales along the last dim."""
    if recipe.scaling == "mxfp8":
        values, scales = quantise_mxfp8(x, (1, 32))
        return values, to_e8m0(scales)
    values, scales = quantise_nvfp4(x, (1, 16), scale)
    return pack_e2m1(values), scales


def inputs(recipe: Recipe, N: int = 96, K: int = 160) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the arguments, and rows and matrices."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*n, K, generator=generator) for n in ((150,), (3, N)))
    of_x = tensor_scales(x.abs().amax().reshape(1, 1), recipe)
    of_w = tensor_scales(w.abs().amax((1, 2), keepdim=True), recipe)
    offsets_e = torch.tensor(OFFSETS, dtype=torch.int32)
    found = [*operand(x, recipe, of_x), *operand(w, recipe, of_w), (of_x * of_w).flatten()]
    return [*found, offsets_e], x, w


def check(found: Tensor, expected: Tensor) -> None:
    """Both are rounded to bf16 once, of sums in another order: a step of bf16 apart at most."""
    used = OFFSETS[-1]
    wrong = (found[:used].float() - expected[:used].float()).abs()
    assert (wrong <= 2.0**-7 * expected[:used].float().abs() + 1e-5).all()


@both
def test_the_reference_is_the_product_of_emulated_operands(recipe: Recipe) -> None:
    args, x, w = inputs(recipe)
    a = emulated(x, recipe)
    b = emulated_matrices(w, recipe)
    assert b.rows is not None
    found, start = block_scaled_gemm_ref(*args), 0
    for i, end in enumerate(OFFSETS):
        rows = slice(start, end)
        if recipe.scaling == "mxfp8":  # matrices of "nvfp4" have blocks of 16 x 16
            expected = a.values[rows] @ b.rows.values[i].T
            torch.testing.assert_close(found[rows].float(), expected, rtol=2**-8, atol=1e-4)
        exact = x[rows] @ w[i].T
        if start < end:
            error = (found[rows].float() - exact).norm() / exact.norm()
            assert error == pytest.approx(0.038 if recipe.scaling == "mxfp8" else 0.134, rel=0.15)
        start = end
    assert not found[OFFSETS[-1] :].any()


@needs_new
@pytest.mark.interpret
@both
@pytest.mark.parametrize(("N", "K"), [(96, 160), (40, 64), (64, 512)])
def test_interpreted(N: int, K: int, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    read = interpreter._dot_scaled_scale_to_f32

    def scales(handle: Any, compute_type: Any) -> Any:
        """Read scales of E4M3 too: Triton 3.9's interpreter takes each byte for E8M0."""
        if handle.dtype.is_int():
            return read(handle, compute_type)
        return torch.from_numpy(handle.data).view(torch.float8_e4m3fn).float().numpy()

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", scales)
    monkeypatch.setattr(block_scaled, "num_sms", lambda _: 3)
    args, *_ = inputs(recipe, N, K)
    check(block_scaled_gemm(*args), block_scaled_gemm_ref(*args))


def compiled(recipe: Recipe, arch: int) -> Any:
    """Return the kernel as it is launched, for a GPU that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = block_scaled._block_scaled_gemm_kernel
    P, B = (1, 32) if recipe.scaling == "mxfp8" else (2, 16)
    constants: dict[str, Any] = {**block_scaled.PROGRAM, "P": P, "B": B, "E_POW2": 8}
    constants |= {"FORMAT": "e4m3" if P == 1 else "e2m1", "BLOCK_K": block_scaled.BYTES_K * P}
    warps = constants.pop("num_warps")
    values, scales = ("*fp8e4nv", "*u8") if P == 1 else ("*u8", "*fp8e4nv")
    types = [values, scales, values, scales, "*fp32", "*i32", "*bf16", "i32", "i32", "i32"]
    types += ["constexpr"] * len(constants)
    names = kernel.arg_names
    whole = [i for i, n in enumerate(names) if n in ("N", "K") or n.endswith("_ptr")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in whole}
    signature = dict(zip(names, types, strict=True))
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps))


INSTRUCTIONS = {
    (100, "mxfp8"): r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
    (100, "nvfp4"): r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale",
    (120, "mxfp8"): r"mma\.sync\S*kind::mxf8f6f4\.block_scale\S*ue8m0",
    (120, "nvfp4"): r"mma\.sync\S*kind::mxf4nvf4\.block_scale\S*ue4m3",
}
SHARED_BYTES = {100: 232448, 120: 101376}  # of one program: what each architecture has


@needs_new
@both
@pytest.mark.parametrize("arch", [100, 120])
def test_blackwell_has_the_instruction(arch: int, recipe: Recipe, tmp_path: Any) -> None:
    kernel = compiled(recipe, arch)
    assert re.search(INSTRUCTIONS[arch, recipe.scaling], kernel.asm["ptx"])
    assert kernel.metadata.shared <= SHARED_BYTES[arch]
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True)
    spilled = [int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", done.stdout)]
    assert spilled and max(spilled) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [MXFP8, pytest.param(NVFP4, marks=needs_new)])
def test_on_a_gpu(recipe: Recipe) -> None:
    args, *_ = inputs(recipe)
    found = block_scaled_gemm(*(t.cuda() for t in args))
    check(found.cpu(), block_scaled_gemm_ref(*args))
