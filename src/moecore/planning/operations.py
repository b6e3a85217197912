"""torch's operations, this package's kernels and collectives -> Work, from what each is given.

Legend: R rows of experts, e experts of a rank, M N K the sizes of one product, B rows, T tokens of
a row, H heads, d and v dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_names import storage_key
from moecore.moe.dispatch.exchange import COPY, REDUCE, SPREAD
from moecore.planning.work import Kind, Work
from moecore.train.memory.on_meta import tensors_of

PRODUCTS = {"mm": 0, "bmm": 0, "scaled_mm_v2": 0, "addmm": 1, "addmm_": 1}  # where a and b begin
GROUPED_PRODUCT = "scaled_grouped_mm"  # torch's in FP8
WITHOUT_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "set_", "alias")
EXCHANGES = (COPY, REDUCE, SPREAD)
HOST_COPIES = ("copy to host", "copy to device")
SUMS = "_fp32"  # of a product that writes or adds gradients in fp32
Args = Sequence[Any]


def work_of_operation(
    name: str, args: Args, kwargs: Mapping[str, Any], out: Any, *, changes: bool
) -> Work | None:
    """Return what an operation of torch does on the device; None for views and new memory.

    Args:
        name: without its namespace, leading underscores and overload.
        args: as it is called.
        kwargs: likewise.
        out: what it returns.
        changes: whether it writes memory, new or given.
    """
    if not changes or name in WITHOUT_WORK or not (tensors := tensors_of(args, kwargs, out)):
        return None
    if name in PRODUCTS:
        return _product(name, args, tensors)
    if name == GROUPED_PRODUCT:
        (R, K), (*_, N) = args[0].shape, args[1].shape
        e = args[1].shape[0]
        if out.ndim == 3:  # of weights' gradients: [N, R] times [R, K] of each expert's rows
            (N, R), (e, _, K) = args[0].shape, out.shape
        return _grouped(name, (e, R, N, K), tensors)
    if "attention" in name:
        return _attention(name, [t for t in tensors if t.ndim == 4], "backward" in name)
    return Work(name, "rows", 0, _bytes(tensors), (), _dtype(tensors[0]))


def work_of_kernel(name: str, args: Args) -> Work:
    """Return what a kernel of this package does, or what stands for one of torch's on meta."""
    if name in EXCHANGES:
        ranks, num_bytes = args
        return Work(name, "collective", 0, num_bytes, (ranks,), "bfloat16")
    tensors = [t for t in (getattr(arg, "base", arg) for arg in args) if isinstance(t, Tensor)]
    if name.startswith("attention"):
        return _attention(name, tensors, name.endswith("bwd"))
    if name in PRODUCTS:
        return _product(name, args, tensors)
    if name in GROUPED:
        return _grouped(name, GROUPED[name](args), tensors)
    dtype = _dtype(tensors[0]) if tensors else "uint8"
    kind: Kind = "copy" if name in HOST_COPIES else "rows"
    return Work(name, kind, 0, _bytes(tensors), (), dtype)


def work_of_collective(name: str, args: Args, num_ranks: int) -> Work:
    """Return what a collective moves: this rank's part of what it sends and receives.

    An all-reduce sends and receives the one tensor that it is given.

    Args:
        name: without its namespace.
        args: as it is called.
        num_ranks: of its group.
    """
    tensors = tensors_of(args)
    dtype = _dtype(tensors[0]) if tensors else "uint8"
    num_bytes = sum(t.nbytes for t in tensors) * (2 if name.startswith("allreduce") else 1)
    return Work(name, "collective", 0, num_bytes, (num_ranks,), dtype)


def _product(name: str, args: Args, tensors: Sequence[Tensor]) -> Work:
    a, b = args[PRODUCTS[name] :][:2]
    M, N, K = prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    return Work(name, "product", 2 * M * N * K, _bytes(tensors), (M, N, K), _dtype(a))


def _attention(name: str, tensors: Sequence[Tensor], is_backward: bool) -> Work:
    """Return the work of causal attention; a backward multiplies five times where one does two."""
    heads = tensors[1:] if name.endswith("backward") else tensors  # torch's begins with dO
    (B, H, T, d), v = heads[0].shape, heads[2].shape[-1]
    flops = B * H * T * T * (d + v) * (5 if is_backward else 2) // 2
    shape = (B, H, T, d, v)
    return Work(name, "attention", flops, _bytes(tensors), shape, _dtype(heads[0]))


def _grouped(name: str, shape: tuple[int, int, int, int], tensors: Sequence[Tensor]) -> Work:
    """Return the work of a grouped product of (e, R, N, K); one of fp32 sums has another name."""
    flops, dtype = 2 * prod(shape[1:]), _dtype(tensors[0])
    if any(t.dtype == torch.float32 and t.ndim == 3 for t in tensors):
        name += SUMS
    return Work(name, "grouped product", flops, _bytes(tensors), shape, dtype)


def _cooperative(args: Args) -> tuple[int, int, int, int]:
    a, b, h, out = args[0], args[1], args[4], args[6]
    (R, K), N = a.shape, (out if h is None else h).shape[1]
    return prod(b.shape) // (N * K), R, N, K


def _activation_bwd(args: Args) -> tuple[int, int, int, int]:
    R, D, F = args[-3:]
    return prod(args[2].shape) // (D * F), R, F, D


def _wgrad(args: Args) -> tuple[int, int, int, int]:
    y_RN, (e, M, N) = args[2], args[7:10]
    return e, y_RN.shape[0], N, M


def _fp8(args: Args) -> tuple[int, int, int, int]:
    b, out_RN, K, N = args[1], args[5], *args[7:9]
    return prod(b.shape) // (N * K), out_RN.shape[0], N, K


def _fp8_wgrad(args: Args) -> tuple[int, int, int, int]:
    x, (e, M, N) = args[0], args[7:10]
    return e, prod(x.shape) // M, N, M


def _gemm(args: Args) -> tuple[int, int, int, int]:
    out_RN, (e, N, K) = args[5], args[6:9]
    return e, out_RN.shape[0], N, K


def _gemm_activation(args: Args) -> tuple[int, int, int, int]:
    h_RC, (e, _, D) = args[5], args[7:10]
    return e, *h_RC.shape, D


def _grouped_mm(args: Args) -> tuple[int, int, int, int]:
    a_RK, b_eKN, _ = args
    e, K, N = b_eKN.shape
    return e, a_RK.shape[0], N, K


# Kernel -> (e, R, N, K) of the arguments that its launcher gives it.
GROUPED: dict[str, Callable[[Args], tuple[int, int, int, int]]] = {
    "sm90_bf16_grouped_kernel": _cooperative,
    "sm90_bf16_grouped_nn_act_bwd_kernel": _activation_bwd,
    "sm90_bf16_grouped_wgrad_kernel": _wgrad,
    "sm90_fp8_grouped_nt_kernel": _fp8,
    "sm90_fp8_grouped_wgrad_kernel": _fp8_wgrad,
    "_grouped_gemm_fwd_kernel": _gemm,
    "_grouped_gemm_activation_fwd_kernel": _gemm_activation,
    "grouped_mm": _grouped_mm,
}


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of different tensors."""
    found = {(storage_key(t), t.storage_offset(), t.shape): t.nbytes for t in tensors}
    return sum(found.values())


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
