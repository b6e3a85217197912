"""a @ b^T of quantised operands, by torch's scaled product or its reference.

Letters: M and N rows of the operands, K the columns over which the product sums.
"""

import functools

import torch
from torch import Tensor

from moecore.base.torch_private import is_plain_eager, scaled_mm
from moecore.kernels.common import disable_autocast, has_hopper_kernels
from moecore.kernels.ops import Op, is_plain
from moecore.kernels.rows.scaling import Blocks, matmul_ref

# Values of torch.nn.functional.ScalingType, which the operator takes as integers.
SCALING_TYPES = {"tensor": 0, "row": 1, "tile": 4, "block": 5}


@functools.cache
def _has_scaled_product(device: torch.device, scale_kind: str) -> bool:
    """Whether torch multiplies operands of this kind on the FP8 tensor cores of a device."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    # cuBLASLt multiplies tiles and blocks only on Hopper.
    return capability == (9, 0) if scale_kind in ("tile", "block") else capability >= (8, 9)


def _multiply_with_torch(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """Return a @ b^T, by torch's scaled matmul if the GPU supports it, otherwise dequantised."""
    (M, K), N, device = a.values.shape, b.values.shape[0], a.values.device
    is_meta = device.type == "meta"
    is_supported = has_hopper_kernels(device) if is_meta else _has_scaled_product(device, a.kind)
    if not M * N * K or not is_supported:
        with disable_autocast(a.values):
            return matmul_ref(a, b).to(dtype)
    # cuBLASLt reads scales of tiles column by column, and scales of blocks in rows of a multiple of
    # four. `cast.py` writes these layouts, so nothing is copied here.
    result: Tensor = scaled_mm(
        a.values,
        b.values.T,
        [_view_scales(a, is_first=True)],
        [SCALING_TYPES[a.kind]],
        [],
        [_view_scales(b, is_first=False)],
        [SCALING_TYPES[b.kind]],
        [],
        None,
        dtype,
    )
    return result


def _view_scales(operand: Blocks, *, is_first: bool) -> Tensor:
    """Return a view of an operand's scales for torch's scaled matmul; `is_first` = operand a."""
    if operand.kind == "row":
        return operand.scales if is_first else operand.scales.T
    return operand.scales.reshape(1) if operand.kind == "tensor" else operand.scales.T


_product_op = Op(
    "fp8_product",
    lambda *flat: _multiply_with_torch(Blocks(*flat[:3]), Blocks(*flat[3:6]), flat[6]),
    lambda a, _, __, b, *options: a.new_empty(a.shape[0], b.shape[0], dtype=options[-1]),
    schema="(Tensor a_MK, Tensor a_scales, str a_kind, "
    "Tensor b_NK, Tensor b_scales, str b_kind, ScalarType dtype) -> Tensor",
)


def multiply_fp8(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """Return a [M, K] @ b [N, K]^T of FP8 operands; M, N and K include padding.

    The matmul sums in fp32 and rounds once to `dtype`. Not differentiable, no host sync.
    """
    if is_plain_eager() and is_plain(a.values):
        return _multiply_with_torch(a, b, dtype)
    y_MN: Tensor = _product_op(a.values, a.scales, a.kind, b.values, b.scales, b.kind, dtype)
    return y_MN
