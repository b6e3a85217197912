"""What is used of torch's symmetric memory, and of its handles, is there."""

import operator

import pytest
from torch.distributed import _symmetric_memory

from moecore.kernels.common import launches_on_meta
from moecore.moe.dispatch.peer_memory import find_known_problem

NAMES = [
    "_SymmetricMemory.empty_strided_p2p",
    "_SymmetricMemory.get_remote_tensor",
    "rendezvous",
]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    operator.attrgetter(name)(_symmetric_memory)


def test_more_ranks_than_a_mask_names_are_refused() -> None:
    with launches_on_meta(lambda *_: None):  # GPUs are taken to be there
        assert find_known_problem(64, "cpu") is None
        assert find_known_problem(65, "cpu") == "must have ep * etp (65) <= 64: use 'alltoall'"
