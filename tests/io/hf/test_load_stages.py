from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moecore import ParallelConfig, PipelineConfig, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.export import export_hf
from moecore.io.hf.load import load_hf
from moecore.models import Decoder
from moecore.parallel.model.parallel_state import PARALLEL_STATE
from moecore.parallel.pipeline.stage_replicas import make_all_stages
from tests.families.transformers.hf_models import transformers
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks
from tests.models.hf_pairs import make_pair
from tests.parallel.pipeline.stages import local

KINDS = ("native", "transformers")


def make(kind: str, path: Path, device: str) -> Any:
    if kind == "native":
        return Decoder(decoder_config_from_hf(path), device=device)
    with torch.device(device):
        config = transformers.AutoConfig.from_pretrained(path)
        return transformers.AutoModelForCausalLM.from_config(config)


def stage_of(kind: str, path: Path, rank: int, *, lost: int | None = None) -> nn.Module:
    """Return the embedding and layers 0 and 2, or the rest; `lost` is a layer of neither."""
    model = make(kind, path, "meta")
    meshes = build_meshes(ParallelConfig(pp=2), "cpu")
    stages = PipelineConfig(layout="Et|t|t|L", schedule="interleaved")
    parallelize_moe(model, meshes, pipeline=stages)
    if lost is not None:
        model.model.layers[lost] = nn.Identity()
        setattr(model, PARALLEL_STATE, SimpleNamespace(all_stages=make_all_stages(model, meshes)))
    return model.to_empty(device="cpu")


def worker(rank: int, device: torch.device, folder: str) -> list[Any]:
    path, found = Path(folder), {}
    for kind in KINDS:
        whole = make(kind, path, "cpu")
        load_hf(path, whole)
        wanted, model = whole.state_dict(), stage_of(kind, path, rank)
        report, state = load_hf(path, model), model.state_dict()
        lost = stage_of(kind, path, rank, lost=1)
        found[kind] = {
            "wrong": [name for name, t in state.items() if not torch.equal(local(t), wanted[name])],
            "names": sorted(state),
            "whole": sorted(wanted),
            "left over": report.left_over + report.missing,
            "lost": error_of(lambda lost=lost: load_hf(path, lost)),
        }
        for which, one in (("stages", model), ("whole", whole)):
            export_hf(one, path / f"{kind}-{which}", config=path, max_shard_bytes=60_000)
    return gather_objects(found)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("hf")
    make_pair("qwen3")[0].save_pretrained(path)
    found: list[Any] = run_ranks(2, worker, str(path))
    return [path, *found]


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_takes_its_own(results: list[Any], kind: str) -> None:
    first, second = (of_rank[kind] for of_rank in results[1:])
    for result in (first, second):
        assert result["wrong"] == [] and result["left over"] == ()
    assert sorted(first["names"] + second["names"]) == first["whole"]
    assert first["names"] and second["names"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_stage_has_is_refused(results: list[Any], kind: str) -> None:
    for of_rank in results[1:]:
        assert "model.layers.1." in of_rank[kind]["lost"]
        assert "is no tensor of the model" in of_rank[kind]["lost"]


@pytest.mark.parametrize("kind", KINDS)
def test_stages_export_the_files_of_the_whole_model(results: list[Any], kind: str) -> None:
    folders = [results[0] / f"{kind}-{which}" for which in ("stages", "whole")]
    found, wanted = ({p.name: p.read_bytes() for p in f.iterdir()} for f in folders)
    assert len(wanted) > 4 and found == wanted
