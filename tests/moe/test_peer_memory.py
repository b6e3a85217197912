"""What is used of torch's symmetric memory, and of its handles, is there."""

import operator

import pytest
from torch.distributed import _symmetric_memory

NAMES = [
    "_SymmetricMemory.empty_strided_p2p",
    "_SymmetricMemory.get_remote_tensor",
    "rendezvous",
]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    operator.attrgetter(name)(_symmetric_memory)
