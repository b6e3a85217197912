"""The patched interpreter has the types of Triton's own, and computes the same values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecore.kernels.common import INTERPRET

pytest.importorskip("triton")
if not INTERPRET:
    pytest.skip("the interpreter is off", allow_module_level=True)
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter as triton_interpreter

from tests.kernels import interpreter

pytestmark = pytest.mark.interpret
if not interpreter.CAN_PATCH:
    pytest.skip("another release of Triton", allow_module_level=True)

SCALARS = [tl.int1, tl.int32, tl.uint8, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv]
SHAPES = [[1], [8], [4, 16], [16, 4], [2, 1, 8]]


def facts(element_ty: Any) -> Iterator[tuple[Any, ...]]:
    """What kernels can learn of blocks and their tensors."""
    of_scalar = core.tensor(None, element_ty)
    yield len(of_scalar.shape), of_scalar.numel.value, of_scalar.dtype
    yield (triton_interpreter._get_np_dtype(element_ty),)
    for shape in SHAPES:
        for sizes in (shape, core.tuple([core.constexpr(n) for n in shape])):
            block = core.block_type(element_ty, sizes)
            yield block.name, block.numel, block.shape.values, block.scalar, block.shape.type.name
            yield (triton_interpreter._get_np_dtype(block),)
            tensor = core.tensor(None, block)
            yield tensor.type, tensor.dtype, tensor.numel.value, [n.value for n in tensor.shape]
            yield str(block.with_element_ty(element_ty)), str(block.with_element_ty(tl.int64))
            yield tuple(block == core.block_type(element_ty, s) for s in SHAPES)


@pytest.mark.parametrize("pointer", [False, True])
def test_types_are_those_of_triton(pointer: bool) -> None:
    types = [core.pointer_type(t) if pointer else t for t in SCALARS]
    patched = [list(facts(t)) for t in types for _ in range(2)]  # made, and found
    assert [[a == b for b in types] for a in types] == [[a is b for b in types] for a in types]
    with pytest.MonkeyPatch.context() as own:
        for owner, name, value in interpreter.TYPES_OF_TRITON:
            own.setattr(owner, name, value)
        own.delattr(core.tuple, "type")
        plain = [list(facts(t)) for t in types for _ in range(2)]
    assert patched == plain


@triton.jit
def _mix_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols)
    shifted = x + tl.sum(x, 0)[None, :] * (rows[:, None] - 1) + tl.max(x, 1)[:, None]
    tl.store(out_ptr + rows[:, None] * N + cols, tl.where(cols < N - 1, shifted, 2.0 * x))


def test_shapes_of_unequal_operands_broadcast() -> None:
    for M, N in ((4, 8), (8, 4), (4, 4), (1, 4)):
        x = torch.arange(M * N, dtype=torch.float32).view(M, N)
        out = torch.full_like(x, float("nan"))
        _mix_kernel[(1,)](x, out, M, N)
        rows = torch.arange(M)[:, None] - 1
        right = x + x.sum(0) * rows + x.amax(1, keepdim=True)
        right[:, -1] = 2 * x[:, -1]
        assert torch.equal(out, right)
