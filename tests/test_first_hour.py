import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from moecore import (
    BalanceConfig,
    CapacityConfig,
    Meshes,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.io import Saver, init_hf
from moecore.models import Decoder, preset
from moecore.train import Muon, assign_matrices
from tests.test_api import SECTIONS

pytestmark = pytest.mark.usefixtures("no_group_left")
CONFIG = MoEConfig(dim=32, hidden_dim=16, num_experts=4, top_k=2)


@pytest.fixture
def meshes() -> Meshes:
    return build_meshes(ParallelConfig(), "cpu")


def make(config: MoEConfig = CONFIG) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), MoELayer(config))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(message) and "\n" not in text and len(text) < 300, text


def of_root(model: nn.Module, meshes: Meshes) -> nn.Module:
    return fully_shard(model, mesh=meshes.dense_fsdp)


def of_part(model: nn.Module, meshes: Meshes) -> nn.Module:
    fully_shard(model[0], mesh=meshes.dense_fsdp)
    return model


def of_experts(model: nn.Module, meshes: Meshes) -> nn.Module:
    fully_shard(model[1].experts, mesh=meshes.dense_fsdp)
    return model


def of_tensors(model: nn.Module, meshes: Meshes) -> nn.Module:
    distribute_module(model[0], meshes.dense_fsdp)
    return model


def in_ddp(model: nn.Module, meshes: Meshes) -> nn.Module:
    return DistributedDataParallel(model)


def part_in_ddp(model: nn.Module, meshes: Meshes) -> nn.Module:
    model[0] = DistributedDataParallel(model[0])
    return model


def in_dp(model: nn.Module, meshes: Meshes) -> nn.Module:
    return nn.DataParallel(model)


SHARDED: list[tuple[Callable[[nn.Module, Meshes], nn.Module], str]] = [
    (of_root, "model (FSDPSequential) must not be sharded already: leave out fully_shard, "),
    (of_part, "0 (FSDPLinear) must not be sharded already: leave out fully_shard, "),
    (of_experts, "1.experts (FSDPExperts) must not be sharded already: leave out fully_shard, "),
    (of_tensors, "0.weight (a DTensor over ('dp_shard',)) must be whole, or cut over "),
    (in_ddp, "model (DistributedDataParallel) must not be wrapped for data parallelism, "),
    (part_in_ddp, "0 (DistributedDataParallel) must not be wrapped for data parallelism, "),
    (in_dp, "model (DataParallel) must not be wrapped for data parallelism, "),
]


@pytest.mark.parametrize(("shard", "message"), SHARDED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_model_that_is_sharded_or_wrapped_already(shard, message, meshes) -> None:
    refused(message, lambda: parallelize_moe(shard(make(), meshes), meshes))


def test_an_optimizer_that_was_made_before(meshes: Meshes, tmp_path: Any) -> None:
    model = make()
    early = adamw(model)
    parallelize_moe(model, meshes)
    message = "optimizer (AdamW) must hold parameters of the model, which parallelize_moe and "
    refused(message, lambda: TrainStep(model, early))
    part = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    refused(message, lambda: TrainStep(model, [part, early]))
    refused(message, lambda: Saver(tmp_path, model, early))
    TrainStep(model, adamw(model))
    other = nn.Parameter(torch.ones(1))
    TrainStep(model, torch.optim.AdamW([*model.parameters(), other]))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop of one's own, which shows its optimizer to nobody."""
    model(torch.randn(2, 3, 32)).square().mean().backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()


def test_an_optimizer_that_was_made_before_in_a_loop_of_ones_own(meshes: Meshes) -> None:
    model, shared = make(), nn.Linear(32, 32)
    shared.weight = model[0].weight  # of a plain module, which trains it after the call too
    early, of_shared = adamw(model), adamw(shared)
    own = torch.optim.SGD([nn.Parameter(torch.ones(1)), *model.parameters()], lr=1.0)
    parallelize_moe(model, meshes)
    message = "optimizer (AdamW) must hold parameters of the model, which parallelize_moe and "
    refused(message, lambda: one_step(model, early))
    refused(message.replace("AdamW", "SGD"), lambda: one_step(model, own))
    before = model[0].weight.full_tensor().clone()
    one_step(model, adamw(model))
    assert not torch.equal(before, model[0].weight.full_tensor())
    shared(torch.randn(3, 32)).sum().backward()
    of_shared.step()


def test_an_optimizer_that_was_made_before_to_empty(meshes: Meshes) -> None:
    with torch.device("meta"):
        model = make()
    early = adamw(parallelize_moe(model, meshes))
    model.to_empty(device="cpu")
    model.apply(lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)])
    one_step(model, early)  # `to_empty` has swapped the values, and left the parameters
    assert not torch.equal(model[0].weight.full_tensor(), torch.ones(32, 32))


def test_a_refused_call_leaves_an_optimizer_its_parameters(meshes: Meshes) -> None:
    model = make()
    early = adamw(model)
    refused(
        "DispatchOptions.name ('nvlink')", lambda: parallelize_moe(model, meshes, dispatch="nvlink")
    )
    early.step()


def test_an_optimizer_of_other_parameters_beside_the_models_own(meshes: Meshes) -> None:
    """Such as a temperature that the loss has."""
    model, other = make(), nn.Parameter(torch.ones(()))
    parallelize_moe(model, meshes)
    step = TrainStep(model, [adamw(model), torch.optim.SGD([other], lr=0.5)])
    with step.micro_batch():
        (model(torch.randn(2, 3, 32)).square().mean() * 0 + other).backward()
    step.finish()
    assert other.item() == 0.5


def test_an_optimizer_of_a_model_on_meta(meshes: Meshes) -> None:
    with torch.device("meta"):
        model = make()
    parallelize_moe(model, meshes)
    refused("0.weight (on meta) must have storage before", lambda: TrainStep(model, adamw(model)))
    TrainStep(model)
    model.to_empty(device="cpu")
    TrainStep(model, adamw(model))


def muon(lr: Any) -> Muon:
    return Muon(assign_matrices(Decoder(preset("tiny"))), lr=torch.tensor(lr))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model, meshes: build_meshes(ParallelConfig(ep=8), "cpu"),
            "ParallelConfig expert view (ep=8 = 8) must divide the world size (1): start ranks "
            "with torchrun --nproc-per-node 8, or lower a degree",
        ),
        (lambda model, meshes: TrainStep([]), "model ([]) must be at least one model"),
        (
            lambda model, meshes: TrainStep(model),
            "model (Sequential) must be parallelized to have a balance record: call parallelize_",
        ),
        (
            lambda model, meshes: init_hf(nn.Linear(2, 2)),
            "model (Linear) must be a transformers model, whose config has an initializer_range: ",
        ),
        (
            lambda model, meshes: muon(float("nan")),
            "lr (nan) must be a finite number >= 0: pass another tensor",
        ),
        (
            lambda model, meshes: muon([0.1, 0.2]),
            "lr (2,) must be one number: pass a tensor of one",
        ),
        (
            lambda model, meshes: Decoder(preset("tiny"), device="meta")(torch.ones(1, 4)),
            "tokens (torch.float32) must be ids: pass tokens.long()",
        ),
    ],
)
def test_what_does_not_belong_there(call: Any, message: str, meshes: Meshes) -> None:
    refused(message, lambda: call(make(), meshes))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module], meshes: Meshes) -> None:
    model = nn.Sequential(kind(11, 32, sparse=True), make())
    message = f"0 ({kind.__name__}) must not have sparse gradients, which units cannot reduce: "
    refused(message, lambda: parallelize_moe(model, meshes))


def test_a_model_in_fp64_is_refused_before_it_is_sharded(meshes: Meshes) -> None:
    message = "dtype of the experts (torch.float64) must be torch.float32, bfloat16 or float16"
    refused(message, lambda: parallelize_moe(make().double(), meshes))
    model = parallelize_moe(make().double(), meshes, expert_backend="sequential")
    assert model(torch.randn(2, 3, 32, dtype=torch.float64)).dtype == torch.float64


def test_gpus_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "device_type ('cuda') must be 'cpu' on this host"
    refused(message, lambda: build_meshes(ParallelConfig(), "cuda"))
    assert not dist.is_initialized()


def test_a_model_in_eval_mode_is_told_once(meshes: Meshes) -> None:
    """`from_pretrained` gives eval mode; a step then counts nothing and balances nothing."""
    model = parallelize_moe(nn.Sequential(make(), MoELayer(CONFIG)), meshes).eval()
    step = TrainStep(model, adamw(model), num_micro_batches=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(4):
            with step.micro_batch():
                model(torch.randn(8, 32)).square().mean().backward()
            if step._progress.num_done == 2:
                step.finish()
    texts = [str(w.message) for w in seen if "eval mode" in str(w.message)]
    assert len(texts) == 1 and "call model.train() before training" in texts[0]
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with step.micro_batch():
                model(torch.randn(8, 32)).square().mean().backward()
        assert all(n.sum() for n in step.finish().metrics.tokens_per_expert.values())


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return a loss, its gradients and the dropped choices of a step."""
    torch.manual_seed(1)
    step = TrainStep(model)
    with step.micro_batch():
        loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [loss, *grads, *step.finish().metrics.dropped_per_expert.values()]


def test_fields_of_layers_that_a_model_does_not_set(meshes: Meshes) -> None:
    """They give what a layer gives that was built with them, and leave the model's balance."""
    balance = BalanceConfig(micro_batch_coef=0.1)
    fields: dict[str, Any] = dict(capacity=CapacityConfig(factor=0.5), router_jitter=0.1)
    own = parallelize_moe(make(replace(CONFIG, balance=balance, **fields)), meshes)
    given = parallelize_moe(make(replace(CONFIG, balance=balance)), meshes, moe=fields)
    assert own[1].config == given[1].config == given[1].router.config
    expected, found = trained(own), trained(given)
    assert len(found) == len(expected) and found[-1].sum() > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"top_k": 1}, "moe ('top_k') must name one of 'balance', 'capacity', 'router_dtype', '"),
        ({"balance": 0.1}, "MoEConfig.balance (0.1) must be a BalanceConfig: pass BalanceConfig("),
        ({"capacity": 1.25}, "MoEConfig.capacity (1.25) must be a CapacityConfig or None: pass"),
        ({"router_jitter": 1}, "MoEConfig.router_jitter (1) must be a finite number >= 0 and < 1"),
    ],
)
def test_fields_that_no_model_can_change(moe: Any, message: str, meshes: Meshes) -> None:
    model = make()
    refused(message, lambda: parallelize_moe(model, meshes, moe=moe))
    assert model[1].config == CONFIG


WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
from importlib import import_module
for name in {modules}:
    import_module(name)
from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.train import AdamW

model = parallelize_moe(Decoder(preset("tiny")), build_meshes(ParallelConfig(), "cpu"))
step = TrainStep(model, AdamW(model.parameters()), max_norm=1.0)
tokens = torch.arange(18).view(2, 9)
with step.micro_batch():
    model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
assert step.finish().norm.finite and "triton" not in sys.modules
try:
    import_module("moecore.integrations.torchtitan.{version}")
except ImportError as error:
    print(error)
"""


def test_without_triton_all_imports_and_a_decoder_trains() -> None:
    """CPU builds of torch lack it; torchtitan imports it, and then the error names triton."""
    installed = find_spec("torchtitan") is not None and metadata.version("torchtitan")
    version = "v03.jobs" if installed and installed.startswith("0.3") else "v02.specs"
    code = WITHOUT_TRITON.format(modules=[*SECTIONS, "moecore.cli"], version=version)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = f"moecore.integrations.torchtitan.{version} needs torchtitan"
    if installed:
        expected = "triton (None) must be installed for torchtitan"
    assert done.stdout.startswith(expected), done.stdout


def test_make_venv_is_never_silent_for_long() -> None:
    """pip prints nothing while it downloads or unpacks gigabytes."""
    script = (Path(__file__).parents[1] / "tools" / "make_venv.sh").read_text()
    begin = script.index("STILL_S=")
    progress = script[begin : script.index("\n}\n", begin) + 3]
    pip = "sleep 0.5; printf '  Downloading torch'; sleep 0.5; echo '.whl (9 GB)'; sleep 0.5"
    run = f'set -eu; say() {{ echo "$*"; }}; {progress} STILL_S=0.2; ({pip}) | progress'
    lines = subprocess.check_output(["bash", "-c", run], text=True).splitlines()
    assert re.fullmatch(r"\d+ s: still resolving packages", lines[0])
    named = [line.partition(": ")[2] for line in lines]
    place = named.index("Downloading torch.whl (9 GB)")
    assert named[place + 1] == "still downloading torch.whl (9 GB)"
