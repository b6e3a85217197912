"""The loss of distillation against torch's own KL divergence and cross-entropy, in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.models.distillation import (
    Distillation,
    DistillationLoss,
    StoredLogProbs,
    TeacherForward,
    TopLogProbs,
)
from tests.helpers.ranks import run_ranks
from tests.models.test_loss import Recorder, make

N, V = 37, 104
CASES = [(kl_type, top_k) for kl_type in ("forward", "reverse") for top_k in (None, 5, 999)]


def plain_loss(
    student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], options: Distillation
) -> Tensor:
    """Return the mean over labels, from all logits."""
    hidden, weight, labels = student
    counts = labels != -100
    z, y = (hidden @ weight.t())[counts], (teacher[0] @ teacher[1].t())[counts].detach()
    x = z
    if options.top_k is not None:
        y, ids = y.topk(min(options.top_k, V))
        x = z.gather(1, ids)
    log_p, log_q = ((logits / options.temperature).log_softmax(1) for logits in (x, y))
    pair = (log_p, log_q) if options.kl_type == "forward" else (log_q, log_p)
    kl = F.kl_div(*pair, reduction="batchmean", log_target=True) * options.temperature**2
    return (1 - options.kd_ratio) * F.cross_entropy(z, labels[counts]) + options.kd_ratio * kl


def compute(
    student: tuple[Tensor, ...],
    teacher: tuple[Tensor, ...],
    options: Distillation,
    group: Any = None,
    chunk: int = 7,
) -> Tensor:
    """Return the loss of heads whose hidden states these are."""
    hidden, weight, labels = student[0][None], student[1], student[2][None]
    stored = TeacherForward(labels, top_k=options.top_k, heads=[])
    rest: Any = (labels, lambda x: x)
    ways: Any = {"chunk_tokens": chunk, "group": group}
    with torch.no_grad():
        assert stored.compute_from_hidden(teacher[0][None], teacher[1], *rest, **ways) == 0
    loss = DistillationLoss(
        labels_BT=labels, num_tokens=(labels != -100).sum(), teacher=stored, options=options
    )
    return loss.compute_from_hidden(hidden, weight, *rest, **ways)


def make_options(kl_type: str, top_k: int | None, ratio: float = 0.3) -> Distillation:
    return Distillation(
        teacher=Path("a"), kl_type=kl_type, temperature=1.7, top_k=top_k, kd_ratio=ratio
    )


def leaves(student: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, weight, labels = student
    return *(x.detach().double().requires_grad_() for x in (hidden, weight)), labels


@pytest.mark.parametrize(("kl_type", "top_k"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_equal_torchs(
    kl_type: str, top_k: int | None, dtype: torch.dtype
) -> None:
    options = make_options(kl_type, top_k)
    student, teacher = make(N, 13, V, dtype), make(N, 24, V, dtype, seed=1)
    exact = leaves(student)
    wanted = plain_loss(exact, tuple(x.detach().double() for x in teacher), options)
    (3 * wanted).backward()
    found = compute(student, teacher, options)
    (3 * found).backward()
    error = 1e-12 if dtype == torch.float64 else 1e-5
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(student[:2], exact, strict=False))]
    for got, want in pairs:
        assert got.dtype == dtype and (got - want).abs().max() <= error * want.abs().max()


@pytest.mark.parametrize(
    ("kl_type", "top_k", "is_stored"), [(*case, False) for case in CASES] + [("forward", 5, True)]
)
def test_logits_of_all_tokens_never_exist(kl_type: str, top_k: int | None, is_stored: bool) -> None:
    """Neither of the student nor of the teacher, in forward and backward."""
    n, v, chunk = 800, 200, 50
    student, teacher = make(n, 8, v), make(n, 12, v, seed=1)
    options = make_options(kl_type, top_k and min(top_k, 9))
    args: tuple[Any, ...] = (student, teacher, options)
    with Recorder() as seen:
        if is_stored:
            loss = compute_stored(*args, torch.arange(n), chunk=chunk)
        else:
            loss = compute(*args, chunk=chunk)
        loss.backward()
    assert student[0].grad is not None and seen.largest == chunk * v


@pytest.mark.parametrize(("kl_type", "top_k"), CASES)
def test_the_teacher_as_student_has_no_loss(kl_type: str, top_k: int | None) -> None:
    student = make(N, 13, V, torch.float64)
    loss = compute(student, student, make_options(kl_type, top_k, ratio=1.0))
    loss.backward()
    assert abs(float(loss.detach())) < 1e-15
    assert all(x.grad.abs().max() < 1e-15 for x in student[:2])


def on_ranks(rank: int, device: torch.device) -> None:
    group = dist.group.WORLD
    rows = slice(rank * V // 4, (rank + 1) * V // 4)
    for kl_type, top_k in CASES:
        options = make_options(kl_type, top_k)
        student, teacher = make(N, 13, V, torch.float64), make(N, 24, V, torch.float64, seed=1)
        exact = leaves(student)
        plain_loss(exact, teacher, options).backward()
        hidden, weight = student[0], student[1].detach()[rows].clone().requires_grad_()
        part = hidden, weight, student[2]
        of_teacher = teacher[0], teacher[1][rows]
        found = compute(part, of_teacher, options, group)
        found.backward()
        assert torch.allclose(found, plain_loss(exact, teacher, options), rtol=1e-12)
        dist.all_reduce(hidden.grad)  # each rank has a part of the sum
        assert (hidden.grad - exact[0].grad).abs().max() < 1e-13
        assert (weight.grad - exact[1].grad[rows]).abs().max() < 1e-13
        if top_k is not None:
            weight.grad = None
            stored = compute_stored(part, of_teacher, options, torch.arange(N), group)
            stored.backward()
            assert torch.allclose(stored, found, rtol=1e-12)
            assert (weight.grad - exact[1].grad[rows]).abs().max() < 1e-13


def test_a_vocabulary_over_four_ranks() -> None:
    run_ranks(4, on_ranks)


def compute_stored(
    student: tuple[Tensor, ...],
    teacher: tuple[Tensor, ...],
    options: Distillation,
    tokens: Tensor,
    group: Any = None,
    chunk: int = 7,
) -> Tensor:
    """Return the part of the loss that is of `tokens`, as on a cp rank, from stored values."""
    hidden, weight, labels = student
    ways: Any = {"chunk_tokens": chunk, "group": group}
    scores = TopLogProbs(labels[None], top_k=options.top_k, heads=[])
    with torch.no_grad():
        scores.compute_from_hidden(teacher[0][None], teacher[1], labels[None], lambda x: x, **ways)
    learned = labels[None] != -100
    ids, log_probs = (x[learned] for x in scores.rows)
    stored = StoredLogProbs(full_labels_BT=labels[None], ids_Mk=ids.int(), log_probs_Mk=log_probs)
    loss = DistillationLoss(
        labels_BT=stored.labels_BT, num_tokens=learned.sum(), teacher=stored, options=options
    )
    local = stored.labels_BT[:, tokens]
    return loss.compute_from_hidden(hidden[tokens][None], weight, local, lambda x: x, **ways)


STORED = [("forward", 5), ("reverse", 5), ("forward", 999)]


@pytest.mark.parametrize(("kl_type", "top_k"), STORED)
def test_stored_log_probs_equal_the_teachers_logits(kl_type: str, top_k: int) -> None:
    options, teacher = make_options(kl_type, top_k), make(N, 24, V, torch.float64, seed=1)
    live, stored = make(N, 13, V, torch.float64), make(N, 13, V, torch.float64)
    wanted = compute(live, teacher, options)
    wanted.backward()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))  # over two cp ranks
    losses = [compute_stored(stored, teacher, options, part) for part in order.split(20)]
    sum(losses).backward()
    grads = ((a.grad, b.grad) for a, b in zip(stored[:2], live, strict=False))
    for got, want in [(sum(losses), wanted), *grads]:
        assert (got - want).abs().max() <= 1e-12 * want.abs().max()


def test_the_top_log_probs_are_of_the_full_vocabulary() -> None:
    hidden, weight, labels = make(N, 24, V, torch.float64)
    scores = TopLogProbs(labels[None], top_k=5, heads=[])
    with torch.no_grad():
        scores.compute_from_hidden(hidden[None], weight, labels[None], lambda x: x)
        wanted = (hidden @ weight.t()).log_softmax(1).topk(5)
    ids, log_probs = (x[0] for x in scores.rows)
    assert torch.equal(ids, wanted.indices)
    assert torch.allclose(log_probs, wanted.values, rtol=1e-12)


def test_other_heads_are_refused() -> None:
    logits, _, labels = make(N, 13, V)
    with pytest.raises(NotImplementedError, match="without a bias"):
        TeacherForward(labels, top_k=None, heads=[]).compute_from_logits(logits)
