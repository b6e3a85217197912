"""OnMeta: runs a model on meta, with the saved tensors and operations of a GPU or CPU.

Attention saves queries, keys, values, its output and one fp32 sum per row and head, as flash and
memory-efficient kernels do. A norm on a GPU saves its input and one fp32 number per row. moecore's
own kernels are recorded without running (`kernels/meta.py`). A bool mask that indexes a tensor is
assumed to select all elements.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moecore.base.torch_private import (
    get_storage_key,
    is_grouped_mm,
    run_backward,
    scaled_mm,
    tree_map_only,
)
from moecore.kernels.meta import record_launch

META = torch.device("meta")
ATTRIBUTES = {
    Tensor.data_ptr, Tensor.detach, Tensor.is_contiguous, Tensor.is_inference, Tensor.is_neg,
    Tensor.numel, Tensor.storage_offset, Tensor.stride, Tensor.untyped_storage, Tensor.view,
}  # fmt: skip

PLAIN_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size}


class OnMeta(TorchFunctionMode):
    """Runs operations on meta, and saves the tensors that `device_type` saves for backward."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._is_gpu = device_type == "cuda"
        # By storage: a tensor that keeps it alive, and a tensor on meta of the same bytes.
        self.meta_copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "__get__" or func in ATTRIBUTES:  # the same of a tensor on meta
            return func(*args, **kwargs)
        if func is Tensor.backward:
            func, args, kwargs = torch.autograd.backward, ([args[0]], [kwargs["gradient"]]), {}
        if func is torch.autograd.backward:  # what it computes again is seen
            grads = [torch.ones_like(x) if g is None else g for x, g in zip(*args, strict=True)]
            with self:
                return run_backward(args[0], grads)
        on_meta = {x.is_meta for x in list_tensors(args, kwargs)}
        if True not in on_meta:
            return func(*args, **kwargs)
        if False in on_meta:
            args, kwargs = tree_map_only(Tensor, self.move_to_meta, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            return _AttentionOnMeta.apply(*args[:3], mask)
        if func is F.rms_norm and self._is_gpu:
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            return _RMSNormOnMeta.apply(args[0], weight)
        if func in (torch.nonzero, Tensor.nonzero):
            return _list_all_indices(*args, **kwargs)
        if func is Tensor.__getitem__:
            args = args[0], tuple(_expand_masks(args[1]))
        if is_grouped_mm(func):
            return _run_grouped_mm(*args, **kwargs)
        if func is scaled_mm:  # whose checks on meta refuse columns that are no multiple of 128
            out = args[0].new_empty(args[0].shape[0], args[1].shape[1], dtype=args[-1])
            record_launch("scaled_mm_v2", *args[:2], *args[2], *args[5], out)
            return out
        return func(*args, **kwargs)

    def move_to_meta(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor for a real tensor; views of one storage share a meta storage."""
        if tensor.is_meta or type(tensor) is not Tensor:
            return tensor
        key = get_storage_key(tensor)
        if key not in self.meta_copies:
            num_bytes = tensor.untyped_storage().nbytes()
            self.meta_copies[key] = tensor, torch.empty(num_bytes, dtype=torch.uint8, device=META)
        storage = self.meta_copies[key][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=META)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def list_tensors(*values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if type(value) in PLAIN_VALUES:  # most of them, at a tenth of the time
            continue
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += list_tensors(*value) if value else ()
        elif isinstance(value, dict):
            tensors += list_tensors(*value.values()) if value else ()
    return tensors


def _list_all_indices(x: Tensor, *, as_tuple: bool = False) -> Any:
    """Return the result of `torch.nonzero` for an `x` without zeros, on meta."""
    indices = torch.empty(x.numel(), x.ndim, dtype=torch.int64, device=META)
    return indices.unbind(1) if as_tuple else indices


def _expand_masks(index: Any) -> Iterator[Any]:
    """Yield the entries of a tensor index; a bool mask becomes indices of all its elements."""
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        yield from _list_all_indices(part, as_tuple=True) if is_mask else (part,)


class _AttentionOnMeta(torch.autograd.Function):
    """Attention on meta, which saves the tensors that flash kernels save for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        B, H, T, _ = q.shape
        out = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
        sums = q.new_empty(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        record_launch("attention_fwd", q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, out, sums = ctx.saved_tensors
        dq_sums = torch.empty_like(q, dtype=torch.float32)  # cuDNN's, while it runs
        input_grads = tuple(torch.empty_like(x) for x in (q, k, v))
        record_launch("attention_bwd", q, k, v, out, sums, *grads, *input_grads)
        del dq_sums
        return *input_grads, None


class _RMSNormOnMeta(torch.autograd.Function):
    """RMSNorm on meta, which saves the tensors that a fused GPU kernel saves for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        out = torch.empty_like(x)
        record_launch("rms_norm_fwd", x, out, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), None if weight is None else torch.empty_like(weight)
        record_launch("rms_norm_bwd", x, rstd, *grads, dx)
        return dx, dweight


class _GroupedProductOnMeta(torch.autograd.Function):
    """Grouped matrix product on meta: each group of rows is multiplied by its own matrix."""

    @staticmethod
    def forward(ctx: Any, a_RK: Tensor, b_eKN: Tensor, offs: Tensor) -> Tensor:
        """Return a meta tensor [rows, columns]; `offs` has the end of each group of rows."""
        of_a, of_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a_RK if of_b else None, b_eKN if of_a else None, offs)
        ctx.shapes = a_RK.shape, b_eKN.shape
        out_RN = a_RK.new_empty(a_RK.shape[0], b_eKN.shape[2])
        record_launch("grouped_mm", a_RK, b_eKN, out_RN)
        return out_RN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_RN,), (a_RK, b_eKN, _) = grads, ctx.saved_tensors
        da_RK = None if b_eKN is None else dout_RN.new_empty(ctx.shapes[0])
        db_eKN = None if a_RK is None else dout_RN.new_empty(ctx.shapes[1])
        if da_RK is not None:
            record_launch("grouped_mm", da_RK, b_eKN, dout_RN)
        if db_eKN is not None:
            record_launch("grouped_mm", a_RK, db_eKN, dout_RN)
        return da_RK, db_eKN, None


def _run_grouped_mm(a_RK: Tensor, b_eKN: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Return the result of torch's grouped_mm on meta, for any dtype."""
    if b_eKN.ndim == 2:  # of weights' gradients, without their own: [M, R] by [R, N] -> [e, M, N]
        dw_eMN = a_RK.new_empty(len(offs), a_RK.shape[0], b_eKN.shape[1])
        record_launch("grouped_mm", a_RK, b_eKN, dw_eMN)
        return dw_eMN
    out: Tensor = _GroupedProductOnMeta.apply(a_RK, b_eKN, offs)
    return out
