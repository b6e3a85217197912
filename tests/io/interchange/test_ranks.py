import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.io import load
from moecore.io.hf.export import export_hf
from moecore.io.interchange.convert import dcp_to_native
from moecore.models import Decoder, preset
from tests.helpers.ranks import run_ranks
from tests.io.hf.test_config import TINY_JSON
from tests.io.hf.test_export_check import loaded, logits, upcycled
from tests.io.interchange.test_convert import assert_same, decoder

pytestmark = pytest.mark.slow
CONFIG = preset("tiny-deepseek-v3")


def dense(layers: tuple[int, ...] = (0, 1)) -> torch.nn.Module:
    return upcycled("Qwen2", "E4G2T4", layers=layers)


def worker(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    root = Path(folder)
    meshes = build_meshes(ParallelConfig(ep=2), "cpu")
    model = decoder(CONFIG)
    parallelize_moe(model, meshes)
    state = {"model": model.state_dict(), "optimizer": {"model.norm.weight": torch.ones(2)}}
    dcp.save(state, checkpoint_id=root / "dcp")
    hf = dense(layers=(1,))
    parallelize_moe(hf, meshes)
    report = export_hf(hf, root / "hf", max_shard_bytes=20_000)
    return {"shards": report.shards}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    assert run_ranks(2, worker, str(root))["shards"] > 2
    return root


def test_a_dcp_directory_of_sharded_parameters(root, tmp_path):
    files = [path.name for path in (root / "dcp").glob("*.distcp")]
    assert len(files) == 2
    (tmp_path / "config.json").write_text(json.dumps(TINY_JSON))
    path = dcp_to_native(root / "dcp", tmp_path / "run", config=tmp_path)
    found = Decoder(CONFIG)
    load(path, found)
    assert_same(found, decoder(CONFIG))


def test_an_upcycled_model_on_ranks(root):
    found, config = loaded(root / "hf")
    assert config["model_type"] == "qwen2_moe" and config["mlp_only_layers"] == [0]
    torch.testing.assert_close(logits(found), logits(dense(layers=(1,))), rtol=1e-5, atol=1e-5)
