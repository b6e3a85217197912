import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moecore.io import Saver, load
from moecore.train.memory import host
from moecore.train.memory.host import HostCopies
from tests.io.checkpoint.kills import build, fill, loaded_step


def some_tensors() -> dict[str, Tensor]:
    """All shapes and dtypes at once, among them scalars, empty ones and one not contiguous."""
    g = torch.Generator().manual_seed(1)
    sizes = [(3, 5), (), (0, 4), (17,), (70, 3), (9, 9), (1,), (40,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
    found = {
        f"{size}-{dtype}": (torch.rand(size, generator=g) * 9).to(dtype)
        for size in sizes
        for dtype in dtypes
    }
    return found | {"transposed": torch.rand(6, 4, generator=g).t()}


def places(copies: HostCopies) -> dict[str, tuple[int, int]]:
    return {n: (c.data_ptr(), c.data_ptr() + c.nbytes) for n, c in copies._copies.items()}


@pytest.mark.parametrize("slab", [64, 512, 2**30])
def test_copies_are_equal_and_apart(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB_BYTES", slab)
    tensors, copies = some_tensors(), HostCopies()
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    found = copies.copy_tensors(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert found.keys() == want.keys()
    for name, copy in found.items():
        assert (copy.dtype, copy.shape) == (want[name].dtype, want[name].shape)
        assert torch.equal(copy, want[name]) and copy.is_contiguous(), name
    spans = sorted(span for span in places(copies).values() if span[0] != span[1])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_memory_is_made_once_and_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: 8 x 100 kB and 40 x 64 B in slabs of 512 kB: 5 + 3, and what is left; 1 MB."""
    monkeypatch.setattr(host, "SLAB_BYTES", 2**19)
    tensors = {f"large{i}": torch.ones(25_000) for i in range(8)}
    tensors |= {f"small{i}": torch.ones(16) for i in range(40)}
    copies = HostCopies()
    copies.reserve_like(tensors)
    first = places(copies)
    slabs = [slab.memory.numel() for slab in copies._slabs["cpu"].slabs]
    assert slabs == [2**19, 2**19]
    copies.copy_tensors(tensors)
    copies.copy_tensors(dict(list(tensors.items())[3:]))
    assert places(copies) == first
    copies.copy_tensors(tensors | {"later": torch.ones(5)})  # such as an optimizer's first state
    assert {n: p for n, p in places(copies).items() if n != "later"} == first
    assert [slab.memory.numel() for slab in copies._slabs["cpu"].slabs] == slabs


def test_a_tensor_that_changes_its_shape_costs_no_more_slabs() -> None:
    copies = HostCopies()
    for length in (5, 6, 7, 8, 3000):
        tensor = torch.arange(length)
        assert torch.equal(copies.copy_tensors({"position": tensor})["position"], tensor)
    assert copies.copy_tensors({"position": torch.ones(2)})["position"].dtype == torch.float32
    assert sum(slab.memory.numel() for slab in copies._slabs["cpu"].slabs) == 64


def test_a_tensor_larger_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB_BYTES", 128)
    tensors = {"small": torch.ones(8), "huge": torch.rand(1000)}
    copies = HostCopies()
    assert torch.equal(copies.copy_tensors(tensors)["huge"], tensors["huge"])
    assert [slab.memory.numel() for slab in copies._slabs["cpu"].slabs] == [
        4096
    ]  # and small in its end
    copies.clear()
    assert places(copies) == {} and copies._slabs["cpu"].slabs == []


def on_cuda(value: float, width: int = 2048) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """192 MiB of fp32; step counts stay on the CPU."""
    model, _ = build(value, width)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, value)
    return model, optimizer


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path, own_stream: bool) -> None:
    """Work before the call is still on its way, and the next step overwrites at once."""
    model, optimizer = on_cuda(0.0)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with Saver(tmp_path, model, optimizer, keep=1) as saver, torch.cuda.stream(stream):
        saver.prepare()
        assert all(slab.memory.is_pinned() for slab in saver._copies._slabs["cuda"].slabs)
        for step in (1, 2, 3):
            torch.cuda._sleep(100_000_000)  # about 50 ms
            fill(model, optimizer, float(step))
            assert not stream.query(), "the step must be on its way"
            saver.save(step, {"step": step}, wait=False)
            fill(model, optimizer, -7.0)
            saver._wait_for_previous_save()
            assert loaded_step(tmp_path, 2048) == step


@pytest.mark.gpu
def test_the_first_save_pins_nothing_after_prepare(tmp_path: Path) -> None:
    model, optimizer = on_cuda(1.0)
    with Saver(tmp_path, model, optimizer) as saver:
        saver.prepare()
        pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
        saver.save(1, {"step": 1}, wait=False)
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
    assert loaded_step(tmp_path, 2048) == 1


@pytest.mark.gpu
def test_a_save_does_not_wait_for_other_streams(tmp_path: Path) -> None:
    model, optimizer = on_cuda(1.0, width=64)
    other = torch.cuda.Stream()
    with Saver(tmp_path, model, optimizer) as saver:
        saver.prepare()
        with torch.cuda.stream(other):
            torch.cuda._sleep(4_000_000_000)  # about 2 s
        path = saver.save(1, {"step": 1}, wait=False)
        assert not other.query()
    assert load(path, *on_cuda(0.0, width=64))["step"] == 1
