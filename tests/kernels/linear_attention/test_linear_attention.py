"""Linear attention and short convolutions of documents against their definitions in fp64.

With a device the kernels, on GPUs or interpreted; else plain PyTorch.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.linear_attention import (
    DeltaRule,
    causal_convolution,
    chunked,
    gated_delta_rule,
)
from moecore.kernels.linear_attention.gated_delta import gated_delta_rule_ref
from moecore.kernels.zigzag import find_document_ids, get_shared_table
from tests.kernels.conftest import check_without_host
from tests.kernels.linear_attention.oracle import convolution_ref, delta_rule_ref

# Empty documents, of one token, of one chunk, and of several with a rest.
BORDERS = {"documents": [0, 3, 3, 4, 68, 132, 203, 203], "one": [0, 9], "one chunk": [0, 64]}


KINDS = ("delta", "by channel", "no rates")


def rule_of(T: int, device: str = "cpu", *, kind: str = "delta", **dims: int) -> DeltaRule:
    """Return random arguments that need gradients; decays from none to nearly all."""
    H, h, k, v = (dims.get(n, d) for n, d in (("H", 4), ("h", 2), ("k", 8), ("v", 6)))
    g = torch.Generator().manual_seed(T)
    q, keys, values, decays, betas = (
        torch.randn(s, generator=g).to(device)
        for s in (
            (T, h, k),
            (T, h, k),
            (T, H, v),
            (T, H, k) if kind == "by channel" else (T, H),
            (T, H),
        )
    )
    given = (q, keys, values, -F.softplus(3 * decays), betas.sigmoid())
    leaves = [x.requires_grad_() for x in given]
    if kind == "no rates":
        return DeltaRule(*leaves[:4], None, scale=0.4, norm_qk=False)
    return DeltaRule(*leaves, scale=0.4, norm_qk=True)


def relative(got: Tensor, want: Tensor) -> float:
    difference = (got.detach().double() - want.detach().double()).abs().max()
    return float(difference / want.detach().abs().max().clamp(min=1e-9))


def grads(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients of fixed weights of what comes out."""
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=g).to(x) for x in outs]
    return list(torch.autograd.grad(outs, leaves, weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("name", BORDERS)
def test_the_rule_is_its_definition(name: str, has_initial: bool, kind: str) -> None:
    borders = BORDERS[name]
    rule = rule_of(borders[-1], kind=kind)
    initial = torch.randn(len(borders) - 1, 4, 8, 6).requires_grad_() if has_initial else None
    leaves = [x for x in (*rule[:5], initial) if x is not None]
    got = gated_delta_rule(rule, torch.tensor(borders, dtype=torch.int32), initial)
    want = delta_rule_ref(rule, borders, initial)
    pairs = [*zip(got, want, strict=True)]
    pairs += zip(grads(got, leaves), grads(want, leaves), strict=True)
    for found, expected in pairs:
        assert relative(found, expected) <= 5e-6


def test_layers_share_tables_of_documents() -> None:
    borders, made = torch.tensor([0, 2, 5], dtype=torch.int32), []

    def make(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
        made.append(num_tokens)
        return find_document_ids(cu_seqlens, num_tokens)

    with torch.inference_mode():
        table = get_shared_table(make, borders, 5)
    assert get_shared_table(make, borders, 5) is table and not table.is_inference()
    get_shared_table(make, borders, 4)
    assert made == [5, 4]
    borders[1] = 3
    assert get_shared_table(make, borders, 5).tolist() == [0, 0, 0, 1, 1]
    freed = weakref.ref(borders)
    del borders
    assert freed() is None


def test_in_fp64_it_is_its_definition_to_the_last_digits() -> None:
    rule = rule_of(203)
    rule = DeltaRule(*(x.double() for x in rule[:5]), scale=0.4, norm_qk=False)
    got = gated_delta_rule(rule, torch.tensor(BORDERS["documents"]))
    want = delta_rule_ref(rule, BORDERS["documents"])
    assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= 1e-12


@pytest.mark.parametrize("has_before", [False, True])
def test_the_convolution_is_its_definition(has_before: bool) -> None:
    borders, (D, W) = BORDERS["documents"], (5, 4)
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=g) for s in ((203, D), (D, W), (D,)))
    before = torch.randn(len(borders) - 1, W - 1, D, generator=g) if has_before else None
    leaves = [y.requires_grad_() for y in (x, weight, bias, before) if y is not None]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    got = causal_convolution(
        x, weight, bias, cu_seqlens, previous_tokens_nwD=before, apply_silu=True
    )
    want = F.silu(convolution_ref(x, weight, bias, borders, before))
    pairs = [(got, want), *zip(grads((got,), leaves), grads((want,), leaves), strict=True)]
    assert max(relative(found, expected) for found, expected in pairs) <= 2e-6


def test_why_kernels_are_not_used() -> None:
    assert "must be of 16 bits on cuda" in str(chunked.find_problem(rule_of(4)))


def make_low_rule(borders, device, kind, has_initial, **dims: int):
    """Return a rule of 16 bits on a device, its initial states or None, and its leaves."""
    # The interpreter multiplies no bf16.
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    rule = rule_of(borders[-1], device, kind=kind, **dims)
    rule = DeltaRule(*(x.detach().to(dtype).requires_grad_() for x in rule[:3]), *rule[3:])
    shape = len(borders) - 1, dims["H"], dims["k"], dims["v"]
    initial = torch.randn(shape, device=device).requires_grad_() if has_initial else None
    return rule, initial, [x for x in (*rule[:5], initial) if x is not None]


# The last has wide values and repeated keys, whose triangular systems are ill-conditioned. Keys are
# not repeated with a decay per key dim, because only the kernels round decayed keys.
DIMS = {
    **{name: dict(H=4, h=2, k=64, v=128) for name in BORDERS},
    "repeated": dict(H=2, h=1, k=16, v=176),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("name", DIMS)
def test_kernels_are_at_most_twice_as_wrong_as_plain_pytorch(
    name, has_initial, kind, device
) -> None:
    """In 16 bits, of gates and states in fp32 too; both sides against fp64 of the same numbers."""
    borders = BORDERS.get(name, [0, 130])
    rule, initial, leaves = make_low_rule(borders, device, kind, has_initial, **DIMS[name])
    if name == "repeated" and kind != "by channel":
        with torch.no_grad():
            rule.k_Thk.copy_(rule.k_Thk[:1] + 0.01 * rule.k_Thk)
            rule.g_THk.mul_(0.01)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    assert chunked.find_problem(rule) is None
    check_errors(rule, borders, initial, leaves, gated_delta_rule(rule, cu_seqlens, initial))


def test_strong_decays_of_key_dims_do_not_overflow(device) -> None:
    """Every seventh token forgets: sums of logarithms of decays in a chunk are far below -88."""
    borders = BORDERS["documents"]
    rule, initial, leaves = make_low_rule(borders, device, "by channel", True, **DIMS["one"])
    with torch.no_grad():
        rule.g_THk[::7].mul_(60)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    assert chunked.find_problem(rule) is None
    check_errors(rule, borders, initial, leaves, gated_delta_rule(rule, cu_seqlens, initial))


def check_errors(rule, borders, initial, leaves, outs: tuple[Tensor, Tensor]) -> None:
    """Compare the worst errors of outputs and gradients with those of PyTorch in 16 bits."""
    device, dtype = rule.v_THv.device.type, rule.v_THv.dtype
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    with torch.autocast(device, dtype):  # rounds where kernels round: operands of products
        plain_outs = gated_delta_rule_ref(rule, cu_seqlens, initial)
    runs: list[Any] = [delta_rule_ref(rule, borders, initial), outs, plain_outs]
    want, got, plain = ([*run, *grads(run, leaves)] for run in runs)
    for w, g, p in zip(want, got, plain, strict=True):
        assert relative(g, w) <= 2 * relative(p, w) + 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["delta", "by channel"])
def test_kernels_do_not_wait_for_the_device_and_repeat_their_bits(kind) -> None:
    borders = BORDERS["documents"]
    rule, initial, leaves = make_low_rule(borders, "cuda", kind, True, H=4, h=2, k=128, v=128)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    weights = [torch.randn_like(x) for x in (rule.v_THv, initial)]

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        outs = gated_delta_rule(DeltaRule(*inputs[:5], *rule[5:]), cu_seqlens, inputs[5])
        return *outs, *torch.autograd.grad(outs, inputs, weights)

    check_without_host(step, leaves)


@pytest.mark.parametrize("has_before", [False, True])
def test_convolutions_of_kernels(has_before: bool, device: str) -> None:
    borders, (D, W) = BORDERS["documents"], (72, 4)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    g = torch.Generator().manual_seed(0)
    shapes = (203, D), (D, W), (D,), (len(borders) - 1, W - 1, D)
    *given, before = (torch.randn(s, generator=g).to(device, dtype) for s in shapes)
    given = [*given, before if has_before else None]
    x, weight, bias, before = given
    leaves = [y.requires_grad_() for y in given if y is not None]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)
    got = causal_convolution(
        x, weight, bias, cu_seqlens, previous_tokens_nwD=before, apply_silu=True
    )
    want = F.silu(convolution_ref(x, weight, bias, borders, before))
    pairs = [(got, want), *zip(grads((got,), leaves), grads((want,), leaves), strict=True)]
    bound = 2e-6 if device == "cpu" else 3e-2  # the weights of gradients are rounded too
    assert max(relative(found, expected) for found, expected in pairs) <= bound
