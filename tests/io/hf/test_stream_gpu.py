"""On GPUs: buckets that are gathered beside their use, and that another process opens.

python -m pytest -m gpu tests/io/hf
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.io import export_hf, open_bucket, share_bucket, stream_weights
from moecore.models import Decoder, preset
from tests.helpers.ranks import run_ranks
from tests.io.hf.test_config import TINY_JSON

pytestmark = pytest.mark.gpu
SLEEP = 2_000_000  # cycles, about 1 ms


def model_on(device: torch.device, **degrees: int) -> Any:
    model = Decoder(preset("tiny-deepseek-v3"))
    model.init_weights(seed=3)
    return parallelize_moe(model.to(device), build_meshes(ParallelConfig(**degrees), "cuda"))


def worker(rank: int, device: torch.device, folder: str) -> list[bool]:
    model = model_on(device, ep=2)
    export_hf(model, folder + "/files", config=TINY_JSON)
    wanted = load_file(folder + "/files/model.safetensors")
    stream, same = stream_weights(model, bucket_bytes=30_000), []
    for late in (False, True):
        found: dict[str, Tensor] = {}
        for name, tensor in stream:
            if late:  # the next bucket is gathered before this one is read
                torch.cuda._sleep(SLEEP)
            found[name] = tensor.clone()
        same.append(found.keys() == wanted.keys())
        same += [torch.equal(found[n].cpu(), t) for n, t in wanted.items()]
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1)
    same.append(list(dict(stream.changed_since(stream.version))) == ["model.norm.weight"])
    return same


def test_two_ranks_stream_the_bits_of_the_files(tmp_path: Path) -> None:
    same = run_ranks(2, worker, str(tmp_path), device_type="cuda")
    assert len(same) > 50 and all(same)


def engine(handles: Any, results: Any) -> None:
    """Another process: read each bucket where it lies."""
    while (text := handles.get()) is not None:
        bucket = open_bucket(pickle.loads(text))
        results.put({name: tensor.cpu() for name, tensor in bucket.tensors()})
        del bucket


def test_another_process_reads_buckets_in_place(no_group_left: None) -> None:
    model = model_on(torch.device("cuda", 0))
    context = mp.get_context("spawn")
    handles, results = context.Queue(), context.Queue()
    process = context.Process(target=engine, args=(handles, results))
    process.start()
    stream = stream_weights(model, bucket_bytes=200_000)
    want = {name: tensor.cpu() for name, tensor in stream}
    found: dict[str, Tensor] = {}
    before = torch.cuda.memory_allocated()
    for bucket in stream.buckets():
        torch.cuda.synchronize()
        handles.put(pickle.dumps(share_bucket(bucket)))
        found |= results.get(timeout=120)
    handles.put(None)
    process.join(120)
    del bucket
    torch.cuda.ipc_collect()
    assert process.exitcode == 0 and found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert torch.cuda.memory_allocated() <= before + 200_000
