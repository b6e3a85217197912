"""peft's LoRA on a native decoder over tensor parallel ranks equals one process.

Four ranks, two of which share rows: losses, gradients of A and B, adapters' files, merged export.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.io import export_hf, init_adapters, load_adapters, merge_adapters, save_adapters
from moecore.models import Decoder
from moecore.planning import fake_world
from tests.families.transformers.hf_models import whole_gradients, worst
from tests.helpers.ranks import run_ranks
from tests.models.hf_pairs import make_pair

peft = pytest.importorskip("peft", minversion="0.21", reason="adapters are its own")

CASES = {
    "qwen2-moe": r".*(q|k|v|o)_proj",
    "deepseek": r".*(q_a|q_b|kv_a|kv_b|o|gate|up|down)_proj(_with_mqa)?",
}


def adapted(name: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return a decoder with random adapters, and the config of its files."""
    hf, config = make_pair(name)
    torch.manual_seed(0)
    decoder, options = Decoder(replace(config, vocab_size=96)), dict(r=3, lora_alpha=6) | options
    model = peft.get_peft_model(decoder, peft.LoraConfig(target_modules=CASES[name], **options))
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn_like(param) * 0.2)
    return model, hf.config.to_dict() | dict(vocab_size=96)


def batch(data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(data_rank)
    return torch.randint(0, 61, (2, 12), generator=generator)


def files(path: Path) -> dict[str, Tensor]:
    found = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    return {name: tensor for one in found for name, tensor in one.items()}


def worker(rank: int, device: torch.device, folder: Path) -> dict[str, dict[str, Any]]:
    meshes = build_meshes(ParallelConfig(tp=2, ep=2), "cpu")
    results = {}
    for name in CASES:
        model, config = adapted(name)
        plain, _ = adapted(name)
        parallelize_moe(model, meshes)
        tokens = batch(meshes.data_rank)
        loss = model(tokens, tokens)
        loss.backward()
        found = whole_gradients(model)
        losses = gather_objects(loss.detach())
        expected: dict[str, Tensor] = {}
        for data_rank in range(2):
            own = plain(batch(data_rank), batch(data_rank))
            (own / 2).backward()
            found |= {f"loss/{data_rank}": losses[2 * data_rank + 1]}
            expected[f"loss/{data_rank}"] = own.detach()
        expected |= whole_gradients(plain)
        save_adapters(model, folder / name)
        if rank == 0:
            plain.save_pretrained(folder / f"{name}-plain")
        init_adapters(model)
        load_adapters(model, folder / name)
        with pytest.raises(NotImplementedError, match="merge_and_unload of peft must not be"):
            model.merge_and_unload()
        merge_adapters(model)
        export_hf(model, folder / f"{name}-merged", config=config)
        export_hf(plain.merge_and_unload(), folder / f"{name}-plain-merged", config=config)
        found["merged"], expected["merged"] = (m(tokens).detach() for m in (model, plain))
        results[name] = {"worst": worst(found, expected), "number": len(expected)}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(4, worker, folder)


@pytest.mark.parametrize("name", CASES)
def test_adapters_over_tp_equal_one_process(results: Any, folder: Path, name: str) -> None:
    error, where = results[name]["worst"]
    assert error <= 1e-5, f"{where}: {error}"
    assert results[name]["number"] > 20
    for kind in ("", "-merged"):
        path = f"{name}-plain{kind}"
        ours, theirs = files(folder / f"{name}{kind}"), files(folder / path)
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(use_dora=True), NotImplementedError, r"q_proj \(Linear\) must be LoRA of linears wi"),
        (dict(lora_dropout=0.1), ValueError, r"LoraConfig.lora_dropout \(0.1\) must be 0 under"),
    ],
)
def test_adapters_that_tp_refuses(options: Any, error: type[Exception], message: str) -> None:
    model, _ = adapted("qwen2-moe", **options)
    with fake_world(2):
        meshes = build_meshes(ParallelConfig(tp=2), "cpu")
        with pytest.raises(error, match=message):
            parallelize_moe(model, meshes)
