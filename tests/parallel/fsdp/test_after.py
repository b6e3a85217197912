"""A step has the gradients of its own batches, whatever the step before it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder
from tests.helpers.ranks import run_ranks
from tests.parallel.fsdp.test_failures import CONFIG
from tests.parallel.fsdp.units import resident_bytes

Grads = dict[str, Tensor]


class Model:
    """A decoder over ranks, and its steps of two micro-batches."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.decoder = Decoder(CONFIG, device="meta")
        options = FSDPOptions(dense_strategy="optim", experts_strategy="optim_grads_params")
        parallelize_moe(self.decoder, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
        self.decoder.to_empty(device="cpu")
        self.decoder.init_weights()
        self.step = TrainStep(self.decoder, num_micro_batches=2)

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 13), generator=generator)
        loss: Tensor = self.decoder(tokens[:, :-1], tokens[:, 1:].contiguous()) / 2
        return loss

    def run(self, first: int, behind: Callable[[], object] = lambda: None) -> Grads:
        """Return the gradients of a step, with something behind its backwards."""
        for number in (first, first + 1):
            with self.step.micro_batch():
                self.loss(number).backward()
        behind()
        found = {n: p.grad.full_tensor().clone() for n, p in self.decoder.named_parameters()}  # type: ignore[union-attr]
        self.decoder.zero_grad()
        self.step.finish()
        return found

    def change(self) -> None:
        with torch.no_grad():
            for param in self.decoder.parameters():
                param.mul_(1.25)


def of_kernels(model: Model) -> None:
    """Kernels put experts' gradients into sums, autograd does in the next step."""
    model.run(2)

    def hook(experts: nn.Module, _: object) -> None:
        for param in experts.parameters():
            if not param._backward_hooks:
                param.register_hook(lambda grad: grad)

    for layer in model.decoder.model.layers:
        layer.mlp.experts.register_forward_pre_hook(hook)


def of_an_idle_forward(model: Model) -> None:
    """A forward with gradients, whose backward never comes, is the last of a step."""
    model.run(2, behind=lambda: model.loss(4))
    assert resident_bytes(model.decoder) == 0


CASES = [of_kernels, of_an_idle_forward]


def worker(rank: int, _: torch.device) -> dict[str, tuple[Grads, Grads]]:
    plain = Model(rank)
    plain.change()
    want = plain.run(0)
    found = {}
    for case in CASES:
        model = Model(rank)
        case(model)
        model.change()
        found[case.__name__] = model.run(0)
    return {name: (grads, want) for name, grads in found.items()}


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Grads, Grads]]:
    found: dict[str, tuple[Grads, Grads]] = run_ranks(2, worker)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_those_of_its_own_batches(
    case: Callable[[Model], None], results: dict[str, tuple[Grads, Grads]]
) -> None:
    found, want = results[case.__name__]
    assert found.keys() == want.keys()
    for name, grad in found.items():
        assert (grad - want[name]).norm() <= 1e-6 * want[name].norm(), name
