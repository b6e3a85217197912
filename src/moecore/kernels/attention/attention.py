"""Attention of one block: chooses the implementation and calls it.

    flash4.py     all blocks on Hopper and later, if the package flash-attn-4 is installed
    cudnn.py      rows of one document on Hopper and later
    flash.py      documents and sliding windows, rows of one document on Ampere
    reference.py  all other blocks, any device

The first module whose `find_problem` returns None is used. Letters and notes: `contract.py`.
"""

from collections.abc import Sequence

from torch import Tensor

from moecore.kernels.attention import cudnn, flash, flash4, reference
from moecore.kernels.attention.contract import AttentionKernel, AttentionMask, QKVBlock
from moecore.kernels.common import disable_autocast, warn_on_fallback

KERNELS: Sequence[AttentionKernel] = (flash4, cudnn, flash)


def choose_attention_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
) -> AttentionKernel:
    """Return the first attention implementation that supports these inputs, otherwise `reference`.

    Warns on a GPU if it returns `reference`, or FlashAttention 2 because flash-attn-4 is missing.
    """
    for kernel in KERNELS:
        if kernel.find_problem(q, k, v, mask) is None:
            if kernel is flash and (mask.is_packed or mask.window is not None):
                flash4.warn_if_missing(q.device)
            return kernel
    warn_on_fallback(q, f"attention of {q.dtype} with head dims {q.shape[-1]} and {v.shape[-1]}")
    return reference


def attention_forward(
    q_BTHd: Tensor, k_BShd: Tensor, v_BShv: Tensor, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output of queries over keys and values. No autograd, no host sync.

    Args:
        q_BTHd: any float dtype, any strides; T may be 0.
        k_BShd, v_BShv: dtype of q, any strides. H is a multiple of h.
        mask: the keys that each query sees.
        scale: factor on the dot products of queries and keys.

    Returns:
        o_BTHv in the dtype of q, and lse_BHT, the log-sum-exp of each query's scores, fp32 (fp64
        for fp64). A query that sees no key has output 0 and lse -inf. Both have any strides.
    """
    _check_shapes(q_BTHd, k_BShd, v_BShv)
    with disable_autocast(q_BTHd):
        kernel = choose_attention_kernel(q_BTHd, k_BShd, v_BShv, mask)
        return kernel.forward(QKVBlock(q_BTHd, k_BShd, v_BShv, mask, scale))


def attention_backward(
    do_BTHv: Tensor,
    q_BTHd: Tensor,
    k_BShd: Tensor,
    v_BShv: Tensor,
    o_BTHv: Tensor,
    lse_BHT: Tensor,
    mask: AttentionMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. No autograd, no host sync.

    o_BTHv and lse_BHT (fp32) are the final output and log-sum-exp: over the keys of all calls, and
    the attention sinks. dq is the contribution of these keys, which the caller sums over all calls.
    """
    _check_shapes(q_BTHd, k_BShd, v_BShv)
    with disable_autocast(q_BTHd):
        kernel = choose_attention_kernel(q_BTHd, k_BShd, v_BShv, mask)
        block = QKVBlock(q_BTHd, k_BShd, v_BShv, mask, scale)
        return kernel.backward(block, do_BTHv.to(q_BTHd.dtype), o_BTHv, lse_BHT)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a ValueError if the shapes or dtypes of q, k and v do not match."""
    (B, _, H, d), (_, S, h, _) = q.shape, k.shape
    if k.shape != (B, S, h, d) or v.shape[:3] != (B, S, h) or H % max(h, 1):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [{B}, S, h, {d}] and [{B}, S, h, v]"
            f" with h a divisor of {H}, as q {tuple(q.shape)}: pass heads last but one"
        )
    if not q.dtype == k.dtype == v.dtype:
        relation = f"must have the dtype of q ({q.dtype}): convert them"
        raise ValueError(f"k ({k.dtype}) and v ({v.dtype}) {relation}")
