"""load_hf and export_hf on four ranks: every shard bit for bit, and only its own bytes read."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.base.params import compute_global_indices
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import HAS_SEPARATE_PIECES, get_local_tensor
from moecore.io import save as save_native
from moecore.io.hf import files as hf_files
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.convert import native_to_hf
from moecore.io.hf.export import export_hf
from moecore.io.hf.load import load_hf
from moecore.models import Decoder, preset
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.io.hf.dirs import assert_same_directory, fp8_state, mxfp4_state, write_directory
from tests.io.hf.states import hf_state, native_state
from tests.io.hf.test_config import TINY_JSON

pytestmark = pytest.mark.slow
WORLD, BLOCK = 4, 24
LAYOUTS = {
    "fsdp": ParallelConfig(),
    "ep2-edp2": ParallelConfig(ep=2, edp_shard=2),
    "ep2-etp2": ParallelConfig(ep=2, etp=2),
    "tp2-ep2-replicate2": ParallelConfig(tp=2, ep=2, edp_replicate=2, edp_shard=1),
}
CONFIG = preset("tiny-deepseek-v3")
SOURCES = ("native", "native gpt-oss", "qwen2-moe", "mixtral", "deepseek-v3", "gpt-oss")
CASES = [("native", layout) for layout in LAYOUTS]
CASES += [("qwen2-moe", "fsdp"), ("mixtral", "ep2-edp2"), ("mixtral", "fsdp")]
CASES += [("native gpt-oss", "ep2-etp2")]
CASES += [("deepseek-v3", "ep2-edp2"), ("gpt-oss", "ep2-etp2"), ("gpt-oss", "fsdp")]
if HAS_SEPARATE_PIECES:  # etp of gate above up
    CASES.append(("qwen2-moe", "ep2-etp2"))
SAVED = [case for case in CASES if case[1] == "ep2-etp2"]


def gpt_oss() -> nn.Module:
    """MXFP4 needs sizes that are multiples of 32."""
    return random_model("gpt-oss", hidden_size=64, intermediate_size=32, num_local_experts=4)


def hf_config(name: str) -> dict[str, Any]:
    """The config.json of a native decoder."""
    return TINY_JSON if name == "native" else gpt_oss().config.to_dict()  # type: ignore[operator]


def make_module(name: str) -> nn.Module:
    if name.startswith("native"):
        return Decoder(decoder_config_from_hf(hf_config(name)))
    if name == "gpt-oss":
        return gpt_oss()
    return random_model(name, tie_word_embeddings=name == "mixtral")


def write_sources(root: Path) -> None:
    """Write each model's directory, and beside it the state dict that it must give."""
    g = torch.Generator().manual_seed(3)
    state = {n: torch.randn(t.shape, generator=g) for n, t in Decoder(CONFIG).state_dict().items()}
    stored, truth = fp8_state(hf_state(state, CONFIG, layout="per_expert"), BLOCK)
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = TINY_JSON | {"quantization_config": quantization}
    write_directory(root / "native", stored, config, num_shards=3)
    save(root, "native", native_state(truth, CONFIG))
    model = gpt_oss()
    stored, truth = mxfp4_state(model.state_dict())
    write_directory(root / "gpt-oss", stored, model.config.to_diff_dict(), num_shards=3)
    config = model.config.to_dict()
    write_directory(root / "native gpt-oss", stored, config, num_shards=3)
    save(root, "native gpt-oss", native_state(truth, decoder_config_from_hf(config)))
    save(root, "gpt-oss", truth)
    for name in ("qwen2-moe", "mixtral", "deepseek-v3"):
        model = make_module(name)
        model.save_pretrained(root / name, max_shard_size="60KB")
        save(root, name, model.state_dict())
    random_model("qwen3-moe").bfloat16().save_pretrained(root / "Qwen3-30B-A3B")


def save(root: Path, name: str, truth: dict[str, Tensor]) -> None:
    save_file({n: t.clone() for n, t in truth.items()}, root / f"{name}.truth")


def build(name: str, layout: str) -> nn.Module:
    meshes = build_meshes(LAYOUTS[layout], "cpu")
    with torch.device("meta"):
        model = make_module(name)
    parallelize_moe(model, meshes)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        get_local_tensor(tensor).fill_(float("nan"))
    return model


def wrong_shards(model: nn.Module, truth: dict[str, Tensor]) -> list[str]:
    """Names of tensors of which some rank holds something else than its part of the truth."""
    wrong = []
    for name, tensor in model.state_dict().items():
        local, want = get_local_tensor(tensor), truth[name]
        for dim, index in enumerate(compute_global_indices(tensor)):
            want = want.index_select(dim, index)
        if not torch.equal(local, want.to(local.dtype)):
            wrong.append(name)
    return sorted({name for names in gather_objects(wrong) for name in names})


def shard_bytes(model: nn.Module) -> tuple[int, int]:
    """Elements that this rank holds, and that the model has."""
    tensors = list({id(t): t for t in model.state_dict(keep_vars=True).values()}.values())
    mine = sum(get_local_tensor(t).numel() for t in tensors)
    return mine, sum(t.numel() for t in tensors)


def run_case(root: Path, name: str, layout: str, truth: dict[str, Tensor]) -> dict[str, Any]:
    model = build(name, layout)
    reports = gather_objects(load_hf(root / name, model))
    found = {"wrong": wrong_shards(model, truth), "reports": reports}
    found["share"] = gather_objects(shard_bytes(model))
    if name == "mixtral":
        found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    exported = root / f"{name}-{layout}"
    exports = gather_objects(
        export_hf(
            model,
            exported,
            config=hf_config(name) if name.startswith("native") else None,
            max_shard_bytes=40_000,
            layout="fused" if name.endswith("gpt-oss") else "per_expert",
        ),
    )
    again = build(name, layout)
    load_hf(exported, again)
    if (name, layout) in SAVED:
        save_native(root / f"run-{name}-{layout}", 1, model, None)
    return found | {"again": wrong_shards(again, truth), "exports": exports}


def errors_on_ranks(root: Path) -> dict[str, list[str]]:
    """What every rank raises when something is wrong, on all or on one."""
    found, model, other = {}, build("qwen2-moe", "fsdp"), build("native", "fsdp")
    found["missing"] = gather_objects(error_of(lambda: load_hf(root / "none", model)))
    found["other model"] = gather_objects(error_of(lambda: load_hf(root / "native", model)))
    rank = dist.get_rank()
    if rank == 2:
        object.__setattr__(other, "config", replace(CONFIG, norm_eps=1e-3))
    found["one rank"] = gather_objects(
        error_of(lambda: export_hf(other, root / "broken", config=TINY_JSON))
    )
    if rank == 2:
        object.__setattr__(other, "config", CONFIG)
    hidden = root / "qwen2-moe" if rank != 2 else root / "qwen3-hidden"
    hidden.mkdir(exist_ok=True)
    found["hidden"] = gather_objects(error_of(lambda: load_hf(hidden, model)))
    found["unchanged"] = gather_objects(
        all(bool(get_local_tensor(t).isnan().all()) for t in model.state_dict().values())
    )
    with shrinking() if rank == 2 else nullcontext():
        found["shrinking"] = gather_objects(error_of(lambda: load_hf(root / "native", other)))
    found["left behind"] = gather_objects(sorted(p.name for p in root.glob("*broken*")))
    return found


@contextmanager
def shrinking() -> Iterator[None]:
    """Let the tenth read of this rank find that the file has changed."""
    reads: list[int] = []
    read = hf_files.HFFiles.read

    def failing(self: Any, name: str, box: Any) -> Tensor:
        reads.append(1)
        if len(reads) == 10:
            raise OSError("has changed meanwhile")
        return read(self, name, box)

    hf_files.HFFiles.read = failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        hf_files.HFFiles.read = read  # type: ignore[method-assign]


def run_docs(root: Path) -> list[int]:
    """Run the code of docs/huggingface.md on a small model; return what each rank read."""
    page = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text()
    text = page.partition("\n## Upcycling\n")[0]
    names: dict[str, Any] = {}
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 4, "docs/huggingface.md has lost an example"
    for block in blocks:
        block = block.replace('"runs/tiny"', '"hf/Qwen3-30B-A3B"').replace('"hf/', f'"{root}/')
        # tests/families/transformers/test_hf.py compiles
        block = block.replace("compile=True", "compile=False")
        exec(block.replace("ep=-1, edp_shard=1", "ep=4"), names)
    assert names["done"].norm.finite
    return gather_objects(names["report"].bytes_read)


def worker(rank, device, root, cases):
    truths = {name: load_file(Path(root, f"{name}.truth")) for name in SOURCES}
    results: dict[Any, Any] = {c: run_case(Path(root), *c, truths[c[0]]) for c in cases}
    results["docs"] = run_docs(Path(root))
    results["errors"] = errors_on_ranks(Path(root))
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    write_sources(root)
    return root


@pytest.fixture(scope="module")
def results(root: Path, request: pytest.FixtureRequest) -> dict[Any, Any]:
    return run_ranks(WORLD, worker, str(root), asked_for(request, "case"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_shards_are_loaded_bit_for_bit_and_only_their_bytes(case, results):
    assert results[case]["wrong"] == results[case]["again"] == []
    name, layout = case
    reports, shares = results[case]["reports"], results[case]["share"]
    for report, (mine, whole) in zip(reports, shares, strict=True):
        assert report.missing == report.left_over == ()
        stored = report.total_bytes
        if name not in ("native", "native gpt-oss", "gpt-oss"):  # fp32
            assert (report.bytes_read, stored) == (4 * mine, 4 * whole)
        else:  # a share, and the blocks of scales that it touches; tp leaves more replicated
            assert report.bytes_read < (0.5 if "tp" in layout else 0.35) * stored
    if layout == "fsdp":  # nothing is replicated, but small selection biases
        total = sum(report.bytes_read for report in reports)
        assert stored <= total < 1.25 * stored


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_export_holds_a_tensor_at_a_time(case, results):
    """Each rank writes shards in its turn, and holds one tensor and one message at most."""
    exports = results[case]["exports"]
    report = exports[0]
    assert report.shards >= WORLD and all(e.written_bytes > 0 for e in exports)
    written = sum(e.written_bytes for e in exports)
    assert report.total_bytes < written < report.total_bytes + 200 * (report.tensors + 9)
    largest = LARGEST[case[0]]
    again = largest if case[0] == "native gpt-oss" else 0  # written in another order
    peak = max(e.peak_bytes for e in exports)
    assert largest <= peak <= 2 * largest + again and peak <= max(40_000, largest) + largest + again
    assert again or peak < report.total_bytes


# Bytes of the largest Hugging Face tensor in fp32: an embedding, or stacked experts.
LARGEST = {
    "native": 4 * 128 * 64,
    "qwen2-moe": 4 * 61 * 32,
    "mixtral": 4 * 61 * 32,
    "deepseek-v3": 4 * 61 * 32,
    "gpt-oss": 4 * 4 * 64 * 64,
    "native gpt-oss": 4 * 4 * 64 * 64,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_write_the_same_directory(layout, root, results):
    assert_same_directory(root / "native-fsdp", root / f"native-{layout}")


@pytest.mark.parametrize("case", SAVED, ids="-".join)
def test_a_native_checkpoint_of_four_ranks_converts_to_the_same(case, root, results, tmp_path):
    exported = root / "-".join(case)
    layout = "fused" if case[0].endswith("gpt-oss") else "per_expert"
    run = root / f"run-{'-'.join(case)}" / "step-000001"
    native_to_hf(run, tmp_path / "out", config=exported, layout=layout)
    found, want = load_file(tmp_path / "out" / "model.safetensors"), {}
    for file in exported.glob("*.safetensors"):
        want |= load_file(file)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_every_rank_raises_and_nothing_changes(results):
    assert results["mixtral", "ep2-edp2"]["tied"] and results["mixtral", "fsdp"]["tied"]
    errors = results["errors"]
    assert len(set(errors["missing"])) == 1
    assert "none) must be a Hugging Face directory: it is not there" in errors["missing"][0]
    assert len(set(errors["other model"])) == 1
    assert "model.embed_tokens.weight (128, 64) must be (61, 32)" in errors["other model"][0]
    assert "model_type ('deepseek_v3') must be that of the model" in errors["other model"][0]
    assert "(and 171 more)" in errors["other model"][0] and len(set(errors["one rank"])) == 1
    assert "norm_eps (1e-06) must be that of the model (0.001)" in errors["one rank"][0]
    assert set(errors["shrinking"]) == {"has changed meanwhile (on rank 2)"}
    assert all("must be visible to every rank" in text for text in errors["hidden"])
    assert errors["unchanged"] == [True] * WORLD and errors["left behind"] == [[]] * WORLD


def test_the_examples_of_the_docs_run(results, root):
    read = results["docs"]
    assert min(read) > 0
    assert sum(read) < 1.2 * (root / "Qwen3-30B-A3B" / "model.safetensors").stat().st_size
    found, want = (
        load_file(root / "mine" / "model.safetensors"),
        load_file(root / "Qwen3-30B-A3B" / "model.safetensors"),
    )
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
