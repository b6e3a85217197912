"""Interpreted kernels over cp ranks, whose chunks of documents are no multiples of 64 tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.attention.linear import attend_linear
from moecore.kernels.triton_api import INTERPRET
from tests.attention.linear_cases import ratios_of_halves, shared_tokens
from tests.helpers.ranks import ranks_fixture
from tests.kernels.linear_attention.test_linear_attention import KINDS, rule_of

# Documents of 324, 0, 4 and 56 tokens: chunks of 81, 0, 1 and 14 tokens on each of two ranks.
BATCH = (1, 384, [0, 324, 324, 328, 384])


def ratios(rank: int, device: torch.device, kinds: list[str]) -> dict[str, list[float]]:
    """Return the error of o and each gradient in fp16 over the error of one process in fp16."""
    from tests.kernels import interpreter  # needs Triton

    assert INTERPRET and dist.group.WORLD is not None
    sequence, held = shared_tokens(ContextParallel(dist.group.WORLD), BATCH, True)
    do = torch.randn(1, 384, 1, 32, generator=torch.Generator().manual_seed(1))
    found = {}
    for kind in kinds:
        rule = rule_of(384, kind=kind, H=1, h=1, k=64, v=32)
        inputs = [None if x is None else x.detach()[None] for x in rule[:5]]

        def attend(own: Any, dtype: torch.dtype, sequence: Any, inputs=inputs, rule=rule) -> Any:
            leaves = [
                None if x is None else own(x).to(dtype if i < 3 else x.dtype).requires_grad_()
                for i, x in enumerate(inputs)
            ]
            o = attend_linear(*leaves, sequence, scale=rule.scale, norm_qk=rule.norm_qk)
            given = [x for x in leaves if x is not None]
            return [o.detach(), *torch.autograd.grad(o, given, own(do).to(dtype))]

        with interpreter.patched():
            found[kind] = ratios_of_halves(attend, sequence, held, torch.float16)
    return found


found = ranks_fixture(2, ratios, "kind")


@pytest.mark.interpret
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_over_ranks_are_at_most_twice_as_wrong_as_one_process(kind, found) -> None:
    assert max(found[kind]) <= 2
