from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.io.hf import buckets as hf_buckets
from moecore.io.hf import collect as hf_collect
from moecore.io.hf import export as hf_export
from moecore.io.hf.export import export_hf
from moecore.models import Decoder, preset
from tests.helpers.ranks import run_ranks
from tests.io.hf.test_config import TINY_JSON

CONFIG = preset("tiny-deepseek-v3")
EMBEDDING = "model.embed_tokens.weight"
# Where a rank can fail: its own tensors, its part of each, memory of a tensor, its file's end.
POINTS = ("get_detached_shard", "find_shard_runs", "empty", "add", "finish")


@contextmanager
def failing(point: str, nth: int) -> Iterator[None]:
    """Let the nth call fail, and all after it, as when memory is used up."""
    calls: list[int] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) >= nth:
                raise RuntimeError(f"{point}: out of memory")
            return original(*args, **kwargs)

        return call

    class Torch:
        """torch, as the collector sees it."""

        empty = staticmethod(wrapped(torch.empty))

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        if point == "empty":
            patch.setattr(hf_buckets, "torch", Torch())
        elif point in ("add", "finish"):
            writer = hf_export.ShardWriter
            patch.setattr(writer, point, wrapped(getattr(writer, point)))
        else:
            patch.setattr(hf_collect, point, wrapped(getattr(hf_collect, point)))
        yield


def attempt(model: torch.nn.Module, path: Path) -> str:
    try:
        export_hf(model, path, config=TINY_JSON, max_shard_bytes=40_000)
    except RuntimeError as error:
        return str(error)
    return ""


def worker(rank: int, device: torch.device, folder: str) -> dict[Any, Any]:
    root, model = Path(folder), Decoder(CONFIG)
    model.init_weights(seed=3)
    parallelize_moe(model, build_meshes(ParallelConfig(ep=2), "cpu"))
    found: dict[Any, Any] = {}
    for bad in (0, 1):
        for point in POINTS:
            for nth in (1, 7):
                if rank == bad:
                    with failing(point, nth):
                        message = attempt(model, root / "broken")
                else:
                    message = attempt(model, root / "broken")
                dist.barrier()  # rank 0 removes the draft
                left = sorted(path.name for path in root.iterdir())
                found[bad, point, nth] = gather_objects((message, left))
    found["message"] = attempt(model, root / "whole")
    weight = model.state_dict()[EMBEDDING]
    found["want"] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("errors")
    return run_ranks(2, worker, str(root)) | {"root": root}


@pytest.mark.parametrize("nth", [1, 7])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("bad", [0, 1])
def test_both_ranks_raise_the_error_of_one(results, bad, point, nth):
    for message, left in results[bad, point, nth]:
        assert message == f"{point}: out of memory (on rank {bad})" and left == []


def test_the_next_export_is_whole(results):
    assert results["message"] == ""
    found: dict[str, Tensor] = {}
    for file in (results["root"] / "whole").glob("*.safetensors"):
        found |= load_file(file)
    assert torch.equal(found[EMBEDDING], results["want"])
