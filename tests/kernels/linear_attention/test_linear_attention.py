"""Linear attention and short convolutions of documents against their definitions in fp64.

With the mark gpu the kernels of flash-linear-attention; else plain PyTorch.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.linear_attention import DeltaRule, causal_convolution, fla, gated_delta_rule
from moecore.kernels.linear_attention.gated_delta import gated_delta_rule_ref
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


def test_why_the_package_is_not_used() -> None:
    assert "must be of 16 bits on cuda" in str(fla.find_problem(rule_of(4)))
    assert "key dims (512) must be <= 256" in str(fla.find_problem(rule_of(4, k=512)))


@pytest.mark.parametrize("version", [(3, 3, 1), (3, 4, 0), (3, 7, 0), (3, 7, 1)])
def test_where_the_package_cannot_differentiate(version, monkeypatch) -> None:
    """A decay per head on Hopper, between two releases of Triton; not a decay per channel."""
    for name in ("_find_device_problem", "_find_import_problem"):
        monkeypatch.setattr(fla, name, lambda *_: None)
    monkeypatch.setattr(fla, "has_hopper_kernels", lambda _: True)
    monkeypatch.setattr(fla, "find_spec", lambda _: None)
    monkeypatch.setattr(fla, "TRITON", version)
    found = {kind: fla.find_problem(rule_of(4, kind=kind)) for kind in KINDS}
    is_wrong = (3, 4) <= version < (3, 7, 1)
    assert {kind for kind, reason in found.items() if reason} == (
        {kind for kind in KINDS if kind != "by channel"} if is_wrong else set()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.parametrize("name", BORDERS)
def test_kernels_are_at_most_twice_as_wrong_as_plain_pytorch(name, has_initial, kind) -> None:
    """In bf16, of gates and states in fp32 too; both sides against fp64 of the same numbers."""
    pytest.importorskip("fla", reason="the kernels are those of flash-linear-attention")
    borders, dims = BORDERS[name], dict(H=4, h=2, k=64, v=32)
    rule = rule_of(borders[-1], "cuda", kind=kind, **dims)
    halves = (x.detach().bfloat16().requires_grad_() for x in rule[:3])
    rule, initial = DeltaRule(*halves, *rule[3:]), None
    if has_initial:
        initial = torch.randn(len(borders) - 1, 4, 64, 32, device="cuda").requires_grad_()
    leaves = [x for x in (*rule[:5], initial) if x is not None]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    if (reason := fla._find_triton_problem(rule)) is not None:
        pytest.skip(reason)
    assert fla.find_problem(rule) is None
    runs: list[Any] = [
        delta_rule_ref(rule, borders, initial),
        fla.gated_delta_rule(rule, cu_seqlens, initial),
        in_bf16(rule, cu_seqlens, initial),
    ]
    want, got, plain = ([*outs, *grads(outs, leaves)] for outs in runs)
    for w, g, p in zip(want, got, plain, strict=True):
        assert relative(g, w) <= 2 * relative(p, w) + 4e-3


def in_bf16(rule: DeltaRule, cu_seqlens: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, rounded where kernels round: products of chunks have operands of 16 bits."""
    with torch.autocast("cuda", torch.bfloat16):
        return gated_delta_rule_ref(rule, cu_seqlens, initial)


@pytest.mark.gpu
@pytest.mark.parametrize("has_before", [False, True])
def test_convolutions_of_kernels(has_before: bool) -> None:
    pytest.importorskip("fla", reason="the kernels are those of flash-linear-attention")
    borders, (D, W) = BORDERS["documents"], (64, 4)
    x, weight = (torch.randn(s, device="cuda").bfloat16() for s in ((203, D), (D, W)))
    before = torch.randn(len(borders) - 1, W - 1, D, device="cuda").bfloat16()
    given = before if has_before else None
    leaves = [y.requires_grad_() for y in (x, weight, given) if y is not None]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    assert fla.find_convolution_problem(x) is None
    got = causal_convolution(
        x, weight, None, cu_seqlens, previous_tokens_nwD=given, apply_silu=True
    )
    want = F.silu(convolution_ref(x, weight, None, borders, given))
    pairs = [(got, want), *zip(grads((got,), leaves), grads((want,), leaves), strict=True)]
    assert max(relative(found, expected) for found, expected in pairs) <= 8e-3
