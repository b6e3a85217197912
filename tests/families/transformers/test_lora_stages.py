from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import ParallelConfig, PipelineConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import export_hf, load_adapters, merge_adapters, save_adapters, stream_weights
from tests.families.transformers.family_models import batch, tiny_model
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks

peft = pytest.importorskip("peft")


def with_adapters() -> Any:
    torch.manual_seed(0)
    names = ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model("qwen3_moe"), config)


def batches(model: Any) -> list[dict[str, Tensor]]:
    given = [batch(model, seed) for seed in range(2)]
    return [one | {"labels": one["input_ids"]} for one in given]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def worker(rank: int, device: torch.device, folder: str) -> float:
    model = with_adapters()
    parallelize_moe(model, build_meshes(ParallelConfig(pp=2), "cpu"), pipeline=PipelineConfig())
    optimizer = on_parts(torch.optim.SGD)(adapters(model).values(), lr=0.1)
    step = TrainStep(model, optimizer, num_micro_batches=2)
    step.forward_backward(batches(model))
    norm = step.finish().norm.total
    save_adapters(model, folder)
    before = {n: p.detach().clone() for n, p in adapters(model).items()}
    with torch.no_grad():
        for param in adapters(model).values():
            param.zero_()
    load_adapters(model, folder)
    after = adapters(model)
    assert all(torch.equal(after[n].to_local(), p.to_local()) for n, p in before.items())
    merge_where_a_stage_has_none(f"{folder}/merged")
    dist.barrier()
    return float(norm)


def merge_where_a_stage_has_none(folder: str) -> None:
    model, pipeline = with_adapters(), PipelineConfig(layout="E|ttL")
    parallelize_moe(model, build_meshes(ParallelConfig(pp=2), "cpu"), pipeline=pipeline)
    names = [name for name, _ in stream_weights(model, lora="apart")]
    assert sum(".lora_" in name for name in names) == len(adapters(with_adapters()))
    merge_adapters(model)
    export_hf(model, folder)
    expected = r"PeftModelForCausalLM\) must have active adapters that are not merged"
    with pytest.raises(ValueError, match=expected):
        merge_adapters(model)


@pytest.mark.filterwarnings("ignore")
def test_a_step_over_stages_is_that_of_stock_peft(tmp_path: Path) -> None:
    norm = run_ranks(2, worker, str(tmp_path))
    merged = tiny_model("qwen3_moe").from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in with_adapters().merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], weight, rtol=1e-5, atol=1e-6), name
    stock = with_adapters()
    for given in batches(stock.base_model.model):
        (stock(**given).loss / 2).backward()
    own = adapters(stock)
    want = torch.nn.utils.get_total_norm([p.grad for p in own.values()])
    assert norm == pytest.approx(float(want), rel=1e-5)
    found = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path).state_dict()
    for name, param in own.items():
        stepped = param.detach() - 0.1 * param.grad
        assert (found[name] - stepped).abs().max() <= 1e-5 * stepped.abs().max(), name
