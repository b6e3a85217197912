"""A step of a family over two pipeline stages, and one of its adapters, beside stock's.

Each returns the family's cell of the table in docs/huggingface.md, and numbers with those of one
process of stock transformers and peft; none where the family is refused.
"""

import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import Meshes, PipelineConfig, TrainStep, parallelize_moe
from moecore.cli import main
from moecore.families.transformers.stock import find_towers
from tests.families.transformers.family_models import batch, config_values, loss_of, tiny_model
from tests.helpers.parts import on_parts
from tests.parallel.pipeline.emulated import staged

Found = dict[str, Tensor]
Case = tuple[str, Found, Found]  # the cell, numbers of two ranks, numbers of stock
# What the refusal of stages has -> the cell.
NO_STAGES = {
    "it changes hidden states": "no, operations between its layers",
    "in front of a layer": "no, modules in front of its layers",
    "beside its layers": "no, parameters beside its layers",
    "no embedding, or no head": "no, no embedding or head",
    "returns hidden states alone": "no, layers return several tensors",
}
# A router's class -> why moecore's router cannot replace it.
OWN_ROUTERS = {
    "Ernie4_5_VLMoeMoeTopKRouter": "other experts for images",
    "Gemma4TextRouter": "trained factors of experts",
    "InklingTopkRouter": "shared experts are weighted, too",
    "Lfm2MoeTopKRouter": "1e-6 in the sum of weights",
    "PhimoeTopKRouter": "sparsemixer",
    "ZayaRouter": "an MLP across layers",
}
# Whose experts peft takes for matrices [out, in] unless they are marked.
MARKED = {"llama4": "yes, with experts.is_transposed set"}
# Of MLPs, which peft may take for experts' matrices; a router; what peft refuses in Mamba layers.
NOT_ADAPTED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
NOT_ADAPTED += ("router.proj", "mixer.out_proj")
# Experts that return their input have rows in gate_up_proj of stock.
DOWN_ALONE = {"longcat_flash": "yes, of experts down_proj alone"}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(mine: Found) -> Found:
    """Return the tensors of both ranks by name; of one that both hold, the bits are the same."""
    every: list[Any] = [None, None]
    dist.all_gather_object(every, mine)
    first, second = every
    assert all(torch.equal(first[name], second[name]) for name in first.keys() & second.keys())
    return first | second


def over_stages(family: str, meshes: Meshes) -> Case:
    """Two micro-batches over two stages: losses, gradients, their norm."""
    stock = tiny_model(family)
    cell = cell_of_stages(stock)
    if not cell.startswith("yes"):
        return cell, {}, {}
    given = [text_rows(stock, seed) for seed in range(2)]
    model = parallelize_moe(tiny_model(family), meshes, pipeline=PipelineConfig())
    optimizer = on_parts(torch.optim.SGD)(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, num_micro_batches=2)
    found = {"losses": step.forward_backward(given)}
    grads = {f"grad/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= gathered({name: whole(grad) for name, grad in grads.items()})
    norm = step.finish().norm
    losses = [stock(**one).loss for one in given]
    (sum(losses) / 2).backward()
    grads = {f"grad/{n}": p.grad for n, p in stock.named_parameters() if p.grad is not None}
    expected = grads | {"losses": torch.stack(losses).detach()}
    expected["norm"] = torch.nn.utils.get_total_norm([g.double() for g in grads.values()])
    return cell, found | {"norm": torch.tensor(norm.total)}, expected


def text_rows(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return ids and labels of a batch, without images."""
    ids_BT = batch(model, seed)["input_ids"]
    if find_towers(model):
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(52, 61, ids_BT.shape, generator=generator)
    return {"input_ids": ids_BT, "labels": ids_BT}


def cell_of_stages(model: nn.Module) -> str:
    """Return the first reason why a model is not cut, or "yes"."""
    try:
        staged(model)
    except NotImplementedError as error:
        return next(cell for part, cell in NO_STAGES.items() if part in str(error))
    return "yes, of text" if find_towers(model) else "yes"


@cache
def cell_of_plan(family: str, *degrees: str) -> str:
    """Return "yes" if `moecore plan` plans a family's config.json, or the line of its refusal.

    An error that the command does not report in one line is raised.
    """
    out, err = StringIO(), StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out), redirect_stderr(err):
        Path(folder, "config.json").write_text(json.dumps(config_values(family)))
        command = ["plan", "--config", folder, "--gpus", "2", "--seq-len", "64", *degrees]
        code = main(command)
    if code == 0:
        assert "tokens/s" in out.getvalue()
        return "yes"
    # Warnings of transformers and the progress of a search may precede the line.
    return "no, " + err.getvalue().splitlines()[-1].removeprefix("moecore: ")


def with_adapters(family: str, meshes: Meshes) -> Case:
    """A batch on each of two data ranks: losses and gradients of adapters, in peft's form."""
    from peft import get_peft_model_state_dict

    from tests.families.transformers.lora_cases import in_peft_form

    model = parallelize_moe(adapted(family), meshes)
    loss = loss_of(model, batch(model.get_base_model(), meshes.data_rank))
    loss.backward()
    found = {f"grad/{n}": grad for n, grad in in_peft_form(model, grads=True).items()}
    found |= gathered({f"loss/{meshes.data_rank}": loss.detach()})
    stock, expected = adapted(family), {}
    for rank in range(2):
        loss = loss_of(stock, batch(stock.get_base_model(), rank))
        (loss / 2).backward()
        expected[f"loss/{rank}"] = loss.detach()
    grads = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    grads = get_peft_model_state_dict(stock, state_dict=grads)
    expected |= {f"grad/{n}": grad for n, grad in grads.items()}
    return MARKED.get(family, DOWN_ALONE.get(family, "yes")), found, expected


def adapted(family: str) -> Any:
    """Adapters of random values on experts, and on the linears of layers outside of MoE blocks."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(family)
    experts = {n: m for n, m in model.named_modules() if n.endswith(".experts")}
    if family in MARKED:
        for module in experts.values():
            module.is_transposed = True
    stacks = [
        f"{name}.{n}"
        for name, m in experts.items()
        for n, p in m.named_parameters()
        if p.ndim == 3 and (family not in DOWN_ALONE or n == "down_proj")
    ]
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=linears_of_layers(model, experts),
        target_parameters=stacks,
    )
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model.train()


def linears_of_layers(model: nn.Module, experts: dict[str, nn.Module]) -> list[str]:
    """Return the names of linears in decoder layers that are in no MoE block and no MLP."""
    layers = {name.rpartition(".layers.")[0] + ".layers." for name in experts}
    blocks = [name.rpartition(".")[0] for name in experts]
    inside = tuple(f"{name}." for name in blocks if not name.rpartition(".")[2].isdigit())
    found = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    found = [n for n in found if n.startswith(tuple(layers)) and not n.startswith(inside)]
    return [name for name in found if not name.endswith(NOT_ADAPTED)]
