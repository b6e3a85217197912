from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore import ParallelConfig, PipelineConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import HAS_SEPARATE_PIECES, get_local_tensor
from moecore.io import export_hf, merge_adapters, save_adapters
from moecore.io.hf import changes
from moecore.io.hf.stream import WeightStream, stream_weights
from moecore.models import Decoder, preset
from moecore.train import AdamW
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.io.hf.test_config import TINY_JSON
from tests.parallel.pipeline.stages import build
from tests.train.memory.blocks import counting_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_SEPARATE_PIECES, reason="torch < 2.13 has no etp of fused weights"),
]
WORLD, BUCKET, SMALL = 4, 200_000, 30_000
CONFIG = preset("tiny-deepseek-v3")
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {},
    "replicate2-fsdp2": dict(dp_replicate=2, edp_replicate=2),
    "ep2-edp2": dict(ep=2, edp_shard=2),
    "ep2-etp2": dict(ep=2, etp=2),
    "tp2-ep2": dict(tp=2, ep=2),
    "cp2-ep4": dict(cp=2, ep=4),
}


def native(**degrees: int) -> nn.Module:
    model = Decoder(CONFIG)
    model.init_weights(seed=3)
    return parallelize_moe(model, build_meshes(ParallelConfig(**degrees), "cpu"))


def staged() -> nn.Module:
    """Layers 0 and 2 on one stage, 1 and 3 on the other, each sharded over two ranks."""
    stages = PipelineConfig(layout="Et|t|t|tL", schedule="interleaved")
    meshes = build_meshes(ParallelConfig(pp=2, ep=2), "cpu")
    model = random_model("qwen3-moe", num_hidden_layers=4)
    return parallelize_moe(model, meshes, pipeline=stages)


def read(files: Path) -> dict[str, Tensor]:
    return {n: t for file in files.glob("*.safetensors") for n, t in load_file(file).items()}


def passed(stream: WeightStream) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stream}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether all ranks have these bits, by the same names in the same order."""
    same = found.keys() == wanted.keys() and all(
        t.dtype == wanted[n].dtype and torch.equal(t, wanted[n]) for n, t in found.items()
    )
    return len(set(gather_objects((same, *found)))) == 1 and same


def exported(model: nn.Module, path: Path, **options: Any) -> dict[str, Tensor]:
    export_hf(model, path, **options)
    return read(path)


def most_bytes(stream: WeightStream) -> int:
    with counting_bytes() as live:
        for _ in stream:
            pass
    return live.peak


def native_case(root: Path, layout: str) -> dict[str, Any]:
    model = native(**LAYOUTS[layout])
    wanted = exported(model, root / layout, config=TINY_JSON)
    stream = stream_weights(model, bucket_bytes=BUCKET)
    metas = [(meta.name, meta.dtype, meta.shape) for meta in stream.metadata()]
    found = {"equal": equal(passed(stream), wanted)}
    assert metas == [(n, wanted[n].dtype, wanted[n].shape) for n, *_ in metas]
    if layout in ("ep2-etp2", "cp2-ep4"):
        options: dict[str, Any] = dict(dtype=torch.bfloat16, layout="fused")
        halves = exported(model, root / f"{layout}-bf16", config=TINY_JSON, **options)
        found["equal"] &= equal(passed(stream_weights(model, **options)), halves)
    if layout == "ep2-etp2":
        stream = stream_weights(model, bucket_bytes=SMALL)
        found["sizes"] = [bucket.flat.nbytes for bucket in stream.buckets()]
        found["most"] = max(gather_objects(most_bytes(stream)))
    return found


def lora_case(root: Path) -> dict[str, Any]:
    """Adapters apart, merged by the stream, and merged in place; on experts in FP8 alone too."""
    from moecore.base.options.precision import Precision, Recipe
    from moecore.precision import store_experts_in_fp8
    from tests.families.transformers.lora_cases import adapted_model, in_peft_form, updates

    found: dict[str, Any] = {}
    precision = Precision(recipe=Recipe(), roles=("experts",))
    sizes = dict(num_hidden_layers=1, hidden_size=128, moe_intermediate_size=256)
    for case, degrees in (("fsdp", dict(ep=2, edp_shard=2)), ("stored", dict(ep=2, etp=2))):
        is_stored = case == "stored"
        model = adapted_model("qwen3-moe", sizes)
        meshes = build_meshes(ParallelConfig(**degrees), "cpu")
        parallelize_moe(model, meshes, precision=precision if is_stored else None)
        if is_stored:
            store_experts_in_fp8(model)
        with model.disable_adapter():
            base = exported(model, root / f"lora-{case}-base")
        save_adapters(model, root / f"lora-{case}")
        dist.barrier()
        adapters = load_file(root / f"lora-{case}" / "adapter_model.safetensors")
        apart = stream_weights(model, bucket_bytes=300_000, lora="apart")
        found[f"apart {case}"] = equal(passed(apart), base | adapters)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "q_proj.lora_B" in name:
                    get_local_tensor(param).add_(1)
        changed = [name for name, _ in apart.changed_since(apart.version)]
        found[f"changed {case}"] = len(changed) == 1 and "q_proj.lora_B" in changed[0]
        stream = stream_weights(model, bucket_bytes=300_000)
        merged = passed(stream)
        found[f"base {case}"] = merged.keys() == base.keys()
        if is_stored:  # merged in place nowhere: the base plus what one matrix at a time adds
            deltas = updates(in_peft_form(model), dim=128, scale=6 / 4)
            found["stored"] = equal(merged, base | {n: base[n] + delta for n, delta in deltas})
        else:
            merge_adapters(model)
            found["merged"] = equal(merged, exported(model, root / "lora-merged"))
            found["after"] = equal(passed(stream), merged)
    return found


def changes_case() -> dict[str, list[Any]]:
    """What a step, a write and a rank that leaves do to a stream, by rank."""
    model = native(ep=2, edp_shard=2)
    router = "model.layers.1.mlp.router.weight"
    trained = [p for n, p in model.named_parameters() if n != router]
    model.get_parameter(router).requires_grad_(False)
    step = TrainStep(model, AdamW(trained, lr=1e-2), max_norm=1.0)
    tokens = torch.arange(24).view(2, 12) + dist.get_rank()

    def train() -> None:
        with step.micro_batch():
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        step.finish()

    def left(*, early: bool) -> None:
        for _ in stream:
            if early:
                break

    def stepped() -> None:
        for number, _ in enumerate(stream):
            if number == 9:
                train()

    def wrote(name: str, write: Any) -> None:
        """Change a parameter on one rank alone in mid-pass, past every counter."""
        local = get_local_tensor(model.get_parameter(name))
        for number, _ in enumerate(stream):
            if number == 9 and dist.get_rank() == 2:
                write(local)

    found: dict[str, Any] = {}
    stream = stream_weights(model, bucket_bytes=BUCKET)
    train()
    before, version = passed(stream), stream.version
    found["same"] = list(dict(stream.changed_since(version)))
    train()
    changed, delta = passed(stream.changed_since(version)), passed(stream)
    moved = [n for n, t in delta.items() if not torch.equal(t, before[n])]
    found["delta"] = list(changed) == moved and all(
        torch.equal(changed[n], delta[n]) for n in moved
    )
    found["frozen"] = [n for n in delta if n not in changed]
    with torch.no_grad():  # on one rank alone, past every counter
        if dist.get_rank() == 2:
            get_local_tensor(model.get_parameter("model.norm.weight")).data.neg_()
    late = stream.changed_since(stream.version)
    found["one rank"] = [meta.name for meta in late.metadata()]
    train()
    found["late"] = error_of(lambda: passed(late))
    other = stream_weights(model)
    found["other"] = error_of(lambda: other.changed_since(stream.version))
    found["none"] = error_of(lambda: other.version)
    found["stepped"] = error_of(stepped)
    # The first tensor has been given by then, the last one has not.
    found["wrote"] = [
        error_of(lambda name=name, write=write: wrote(name, write))  # type: ignore[misc]
        for name in ("model.embed_tokens.weight", "model.norm.weight")
        for write in (
            lambda x: x.data.add_(1.0),
            lambda x: torch._foreach_add_([x.data], 1.0),
            lambda x: x.data.view(-1)[-1:].neg_(),
            lambda x: x.detach().numpy().__iadd__(1.0),
        )
    ]
    found["left"] = error_of(lambda: left(early=dist.get_rank() == 1))
    with closing(iter(stream)) as one:
        next(one)
        found["two"] = error_of(lambda: passed(stream))
    train()
    found["after"] = equal(passed(stream), passed(stream_weights(model)))
    return {name: gather_objects(value) for name, value in found.items()}


def worker(rank: int, device: torch.device, folder: str, layouts: set[str]) -> dict[str, Any]:
    root = Path(folder)
    changes.CHUNK = 1 << 8  # so that small tensors have several
    found: dict[str, Any] = {
        layout: native_case(root, layout) for layout in LAYOUTS if layout in layouts
    }
    wanted = passed(stream_weights(build("whole")))  # a tied head, whose table two stages hold
    found["native stages"] = equal(passed(stream_weights(build("turns"))), wanted)
    model = staged()
    wanted = exported(model, root / "staged")
    found["staged"] = equal(passed(stream_weights(model, bucket_bytes=BUCKET)), wanted)
    wanted = exported(model, root / "staged-fused", layout="fused")
    fused = stream_weights(model, bucket_bytes=BUCKET, layout="fused")
    found["staged fused"] = equal(passed(fused), wanted)
    return found | lora_case(root) | {"changes": changes_case()}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    layouts = {"ep2-etp2", *asked_for(request, "layout")}  # which is measured, too
    return run_ranks(WORLD, worker, str(tmp_path_factory.mktemp("streams")), layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_has_the_bits_of_the_files(results: dict[str, Any], layout: str) -> None:
    assert results[layout]["equal"]


def test_two_buckets_are_there_at_a_time(results: dict[str, Any]) -> None:
    measured = results["ep2-etp2"]
    sizes, largest = measured["sizes"], 4 * 128 * 64  # an embedding in fp32
    assert len(sizes) > 10 and max(sizes) == largest and sum(s < SMALL for s in sizes) > 10
    # The largest and its neighbour, both with the memory of messages, and what digests need.
    assert measured["most"] <= 2 * SMALL + largest


def test_stages_and_adapters(results: dict[str, Any]) -> None:
    found = {n: value for n, value in results.items() if n not in (*LAYOUTS, "changes")}
    assert all(value is True for value in found.values()) and len(found) == 12


def test_a_stream_gives_what_changed(results: dict[str, Any]) -> None:
    found = results["changes"]
    assert found["same"] == [[]] * WORLD and found["delta"] == [True] * WORLD
    gate = "model.layers.1.mlp.gate."  # of a frozen router, whose bias has no rate
    assert found["frozen"] == [[f"{gate}weight", f"{gate}e_score_correction_bias"]] * WORLD
    assert found["one rank"] == [["model.norm.weight"]] * WORLD
    for text in found["other"]:
        assert text.startswith("version (of another stream) must be one that this stream has")
    for text in found["none"]:
        assert text.startswith("version (None) must be of a pass to its end")


def test_what_ends_a_stream_is_one_line_on_every_rank(results: dict[str, Any]) -> None:
    found = results["changes"]
    for text in found["stepped"]:
        assert text.startswith("weights (changed) must stay as they are while a stream of them is")
    for texts in found["wrote"]:
        assert all(text.startswith("weights (changed) must stay") for text in texts)
        assert len(texts) == 8
    for text in found["late"]:
        assert text.startswith("weights (changed) must be those of the call of changed_since")
    for text in found["two"]:
        assert text.startswith("stream (with an open pass) must have one pass at a time")
    of_leaver = found["left"].pop(1)
    assert of_leaver == "no error"
    assert set(found["left"]) == {"rank 1 has left a stream of weights before its end"}
    assert found["after"] == [True] * WORLD
