"""Linear attention over context parallel ranks, whose states go from piece to piece."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore.attention.context_parallel.local_tokens import ContextParallel, LocalTokens
from moecore.attention.linear import attend_linear, causal_conv1d
from moecore.attention.sequence import Sequence, make_packed_sequence
from moecore.kernels.linear_attention import DeltaRule
from tests.kernels.linear_attention.oracle import convolution_ref, delta_rule_ref

H, h, K, V, D, W = 3, 1, 4, 8, 4, 4
KINDS = ("delta", "by channel", "no rates", "unaligned")
UNALIGNED = (6, 10)  # key and value dims whose rows are no multiples of 16 bytes
HALVES = (2, 256, [0, 64, 320, 320, 512])  # rows, tokens, documents of the tests in bf16


def shared_tokens(
    cp: ContextParallel,
    batch: tuple[int, int, list[int]],
    packed: bool,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> tuple[Sequence, LocalTokens]:
    """Return the `Sequence` of full rows, or of packed documents, and this rank's tokens of it."""
    B, T, documents = batch
    sequence = Sequence()
    if packed:
        sequence = make_packed_sequence(torch.tensor(documents), None, (B, T), device)
    return sequence, LocalTokens(cp, (B, T), sequence.cu_seqlens, sequence.max_seqlen)


def linear_errors(cp, batch, packed, kind) -> list[float]:
    """Return the largest errors of outputs and gradients of this rank's tokens, by the fp64."""
    B, T, documents = batch
    g = torch.Generator().manual_seed(3)
    k_dim, v_dim = UNALIGNED if kind == "unaligned" else (K, V)
    shapes = [(B, T, h, k_dim), (B, T, h, k_dim), (B, T, H, v_dim), *[(B, T, H)] * 2, (B, T, D)]
    if kind == "by channel":
        shapes[3] = (B, T, H, k_dim)
    q, k, v, decays, betas, x = (torch.randn(s, generator=g) for s in shapes)
    leaves = [q, k, v, -decays.square() / 8, betas.sigmoid(), x]
    weight, bias = torch.randn(D, W, generator=g), torch.randn(D, generator=g)
    do, dy = (torch.randn(s, generator=g) for s in ((B, T, H, v_dim), (B, T, D)))
    sequence, held = shared_tokens(cp, batch, packed)
    borders = documents if packed else [T * row for row in range(B + 1)]
    whole = [leaf.double().requires_grad_() for leaf in leaves]
    filters = [weight.double().requires_grad_(), bias.double().requires_grad_()]
    flat = [leaf.flatten(0, 1) for leaf in whole]
    has_rates = kind != "no rates"
    how: dict[str, Any] = dict(scale=0.4, norm_qk=has_rates)
    rule = DeltaRule(*flat[:4], flat[4] if has_rates else None, **how)
    o_THv, _ = delta_rule_ref(rule, borders)
    y_TD = convolution_ref(flat[5], filters[0], filters[1], borders)
    outs = o_THv.view(do.shape), y_TD.view(dy.shape)
    options: Any = dict(allow_unused=True, materialize_grads=True)
    given = (do.double(), dy.double())
    wants = torch.autograd.grad(outs, [*whole, *filters], given, **options)
    own = [held.slice_local(leaf).requires_grad_() for leaf in leaves]
    own_filters = [weight.requires_grad_(), bias.requires_grad_()]
    over_ranks = replace(sequence, positions_BT=None, local_tokens=held)
    o = attend_linear(*own[:4], own[4] if has_rates else None, over_ranks, **how)
    y = causal_conv1d(own[5], weight, bias, over_ranks, apply_silu=False)
    given = (held.slice_local(do), held.slice_local(dy))
    found = list(torch.autograd.grad((o, y), [*own, *own_filters], given, **options))
    for grad in found[6:]:
        torch.distributed.all_reduce(grad, group=cp.group)
    pairs = [(o, held.slice_local(outs[0])), (y, held.slice_local(outs[1]))]
    pairs += zip(found[:6], map(held.slice_local, wants[:6]), strict=True)
    pairs += zip(found[6:], wants[6:], strict=True)
    return [relative(got.detach(), want.detach()) for got, want in pairs]


def linear_half_ratios(cp: ContextParallel, packed: bool, device: torch.device) -> list[float]:
    """Return the error of o and each gradient in bf16 over that of one process in bf16."""
    B, T, _ = HALVES
    g = torch.Generator().manual_seed(1)
    halves = [(B, T, 2, 64), (B, T, 2, 64), (B, T, 4, 32), (B, T, 4, 32)]
    q, k, v, do = (torch.randn(s, generator=g).bfloat16().to(device) for s in halves)
    decays, betas = (torch.randn(B, T, 4, generator=g).to(device) for _ in range(2))
    gates = [-decays.square() / 8, betas.sigmoid()]
    batch = HALVES if packed else (B, T, [0, T, 2 * T])
    sequence, held = shared_tokens(cp, batch, True, device)

    def attend(own: Any, dtype: torch.dtype, sequence: Sequence) -> list[Tensor]:
        heads = [own(x).to(dtype).requires_grad_() for x in (q, k, v)]
        leaves = [*heads, *(own(x).requires_grad_() for x in gates)]
        o = attend_linear(*leaves, sequence, scale=0.2, norm_qk=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, own(do).to(dtype))]

    return ratios_of_halves(attend, sequence, held)


def ratios_of_halves(
    attend: Any, sequence: Sequence, held: LocalTokens, dtype: torch.dtype = torch.bfloat16
) -> list[float]:
    """Return errors of `attend(slice of rows, dtype, sequence)` in 16 bits over one process's."""
    exact, plain, ours = (
        [held.slice_local(x).float() for x in attend(lambda x: x, torch.float32, sequence)],
        [held.slice_local(x).float() for x in attend(lambda x: x, dtype, sequence)],
        attend(held.slice_local, dtype, replace(sequence, local_tokens=held)),
    )
    zipped = zip(exact, plain, (x.float() for x in ours), strict=True)
    return [float((z - x).norm() / ((y - x).norm() + 2**-9 * x.norm())) for x, y, z in zipped]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-9))
