"""The private names of torch's symmetric memory: each is there, and one file uses them."""

import operator
from pathlib import Path

import pytest
from torch.distributed import _symmetric_memory

import moecore
from moecore.moe.dispatch import peer_memory

NAMES = [
    "_SymmetricMemory.empty_strided_p2p",
    "_SymmetricMemory.get_remote_tensor",
    "rendezvous",
]


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    operator.attrgetter(name)(_symmetric_memory)


def test_one_file_uses_symmetric_memory() -> None:
    source = Path(moecore.__file__).parent
    users = [path for path in source.rglob("*.py") if "symmetric_memory" in path.read_text()]
    assert users == [Path(peer_memory.__file__)]
    text = users[0].read_text()
    assert all(name.split(".")[-1] in text for name in NAMES), "a name that nobody uses"
