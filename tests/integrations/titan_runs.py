"""One run of torchtitan's Trainer on ranks that exist already, and what the tests ask of it.

It is of the version that is installed: 0.2, or 0.3 from torch 2.14 on. An option is the same in
both if nothing else is said; `a__b` stands for a.b of the command line.
"""

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from moecore import BalanceConfig, MoEConfig
from moecore.base.params import init_normal_
from moecore.models import Decoder, DecoderConfig
from moecore.moe.balance import BalanceGroups
from moecore.moe.layer import MoELayer
from moecore.moe.state import MoEState
from moecore.parallel.model.parallel_state import get_request

try:
    TITAN = version("torchtitan")
except PackageNotFoundError:
    TITAN = ""
V03 = TITAN.startswith("0.3")
SPECS = f"tests.integrations.titan_{'v03_' if V03 else ''}specs"
EP, TP, ETP = (f"parallelism__{n}_parallel_degree" for n in ("expert", "tensor", "expert_tensor"))
CP, PP = (f"parallelism__{n}_parallel_degree" for n in ("context", "pipeline"))
AC, BATCH = "activation_checkpoint__mode", "training__local_batch_size"
VALIDATION = "validator__enable" if V03 else "validation__enable"
ASSETS = "hf_assets_path" if V03 else "model__hf_assets_path"
# torchtitan's own models are cut over tp by the first of its backends.
OWN_TP = {TP: 2, "parallelism__spmd_backend": "partial_dtensor"} if V03 else {TP: 2}
TWO_BATCHES = {"training__global_batch_size": 4}  # of one sample each on two data ranks
# Every graph is made, none is turned into C++: that takes minutes here.
COMPILE = {"compile__enable": True, "compile__backend": "aot_eager"}

VOCAB, DIM, SEQ_LEN, STEPS, EOS = 96, 32, 16, 2, 3
LR, EPS, WEIGHT_DECAY = 1e-2, 1e-3, 0.1  # with eps 1e-8 the first steps are the gradients' signs
DECODER = DecoderConfig(
    vocab_size=VOCAB,
    dim=DIM,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=64,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    moe=MoEConfig(
        dim=DIM,
        hidden_dim=16,
        num_experts=8,
        top_k=3,
        shared_hidden_dim=16,
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(bias_update_rate=0.01, micro_batch_coef=0.01),
    ),
)
# Without prediction modules, for pipelines, and wide enough for scales of 128 columns.
WIDE = replace(
    DECODER,
    dim=128,
    head_dim=32,
    num_mtp_layers=0,
    mtp_loss_coef=0.0,
    moe=replace(DECODER.moe, dim=128, hidden_dim=128, shared_hidden_dim=128),
)


@dataclass
class Run:
    """Losses and gradient norms per step, the first step's gradients, the logged metrics."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)  # parameters that are no DTensors
    expert_meshes: set[tuple[str, ...]] = field(default_factory=set)
    dispatchers: set[str] = field(default_factory=set)  # names of their classes
    backends: set[str] = field(default_factory=set)
    request: Any = None  # of `parallelize_moe`, without what is of this process
    graphs: int = 0  # that torch.compile made


READ = cache(inspect.getsource)
IMPORTED = "tests.integrations.titan_imported"  # of ranks: it takes longer than a job


def prepare() -> None:
    """Make torchtitan run on CPU ranks; it is imported here."""
    if V03:
        from examples.torchtitan import cpu_v03 as cpu
    else:
        from examples.torchtitan import cpu  # type: ignore[no-redef]
    cpu.prepare()


def arguments(name: str, folder: str, specs: str = SPECS, **options: Any) -> list[str]:
    """The command line of `torchtitan.train` for one tiny job."""
    if V03:  # the specs have the rest
        settings: dict[str, Any] = {"module": specs, "config": name, "dump_folder": folder}
    else:
        settings = {
            "job.dump_folder": folder,
            "model.name": name,
            "model.flavor": "tiny",
            "experimental.custom_import": specs,
            "training.seq_len": SEQ_LEN,
            "training.steps": STEPS,
            "training.local_batch_size": 1,
            "training.mixed_precision_param": "float32",
            "metrics.log_freq": 1,
            "lr_scheduler.warmup_steps": 1,
            "lr_scheduler.decay_ratio": 0.0,
            "optimizer.lr": LR,
            "optimizer.eps": EPS,
            "optimizer.weight_decay": WEIGHT_DECAY,
            # Of torch: foreach plans for a second per step.
            "optimizer.implementation": "fused",
            "activation_checkpoint.mode": "none",
            "debug.seed": 7,
        }
        if any(key.startswith("moecore") for key in options):
            settings["job.custom_config_module"] = "moecore.integrations.torchtitan.options"
    settings |= {key.replace("__", "."): value for key, value in options.items()}
    words, last = [], []
    for key, value in settings.items():
        if V03 and key == AC.replace("__", "."):
            last = [f"activation_checkpoint:{value}"]
        elif isinstance(value, bool):
            head, _, tail = key.rpartition(".")
            words.append(f"--{key}" if value else f"--{head}.no-{tail}")
        else:
            words += [f"--{key}", str(value)]
    return words + last


def parsed(words: list[str]) -> Any:
    """What torchtitan makes of a command line, without a search for sources that are not there.

    Its merged records are made while it runs. For the help of each, `inspect` would read the module
    `types`: half of the time of a command line.
    """
    from torchtitan.config import ConfigManager

    with patch.object(inspect, "getsource", _source_of):
        return ConfigManager().parse_args(words)


def _source_of(thing: Any) -> str:
    if getattr(thing, "__module__", "") == "types":
        raise OSError("made while it runs")
    return READ(thing)


def build_trainer(name: str, folder: str, **options: Any) -> Any:
    """What `torchtitan.train` would train, from its command line. Collective."""
    for key, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[key] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.compiler.reset()
    counters.clear()
    job = parsed(arguments(name, folder, **options))
    if V03:
        return job.build()
    from torchtitan.train import Trainer

    return Trainer(job)


def train(name: str, folder: str, **options: Any) -> Run:
    """Run `torchtitan.train`'s Trainer to the end. Collective."""
    return follow(build_trainer(name, folder, **options))


def refusal(name: str, folder: str, **options: Any) -> str:
    """What a job that may not be is told. Collective."""
    with pytest.raises((NotImplementedError, ValueError)) as error:
        build_trainer(name, folder, **options)
    return str(error.value)


def follow(trainer: Any) -> Run:
    """Let a Trainer train to its end, and close it. Collective."""
    import torchtitan.distributed.utils as dist_utils

    run = Run()
    model, clip = trainer.model_parts[0], dist_utils.clip_grad_norm_
    log = trainer.metrics_processor.logger.log

    def clip_and_keep(*args: Any, **kwargs: Any) -> Tensor:
        if not run.grads:
            run.grads = {_clean(n): whole(p.grad) for n, p in model.named_parameters()}
        norm = clip(*args, **kwargs)
        run.norms.append(norm.item())
        return norm

    def keep_metrics(metrics: dict[str, Any], step: int) -> None:
        run.metrics.append(metrics)
        run.losses.append(metrics["loss_metrics/global_avg_loss"])
        log(metrics, step)

    trainer.metrics_processor.logger.log = keep_metrics
    dist_utils.clip_grad_norm_ = clip_and_keep
    try:
        trainer.train()
    finally:
        dist_utils.clip_grad_norm_ = clip
        trainer.close()
    if (found := get_request(model)) is not None:
        run.request = replace(found, meshes=None, family=None)  # type: ignore[arg-type]
    run.graphs = counters["stats"]["unique_graphs"]
    for module in model.modules():
        if isinstance(module, MoELayer):
            run.dispatchers.add(type(module.dispatcher).__name__)
            run.backends.add(module.get_part("experts").backend)
    run.state = {_clean(n): whole(t) for n, t in model.state_dict().items()}
    for param_name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            run.plain.append(param_name)
        elif ".experts." in param_name or ".inner_experts." in param_name:
            run.expert_meshes.add(param.device_mesh.mesh_dim_names or ())
    return run


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every parameter of these models has a gradient"
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def _clean(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def relative_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest error over the tensor's scale, by name; the names must agree."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in wanted.items()
    }


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-5) -> None:
    """Every tensor within `bound` of its scale."""
    wrong = {n: e for n, e in relative_errors(found, wanted).items() if not e <= bound}
    assert not wrong, wrong


def close(found: list[float], wanted: list[float], bound: float = 1e-5) -> bool:
    """Whether two series agree within `bound` of each value."""
    return bool(torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=bound, atol=0))


class RandomBatches:
    """Sample i is a function of i alone, so every layout sees the same global batch."""

    def __init__(self, dp_rank: int, dp_world_size: int, batch: int, seq_len: int) -> None:
        self.batch, self.seq_len, self.next = batch, seq_len, 0
        self.first, self.step = dp_rank * batch, dp_world_size * batch

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.next * self.step + self.first
            tokens, labels = samples(first, self.batch, self.seq_len)
            self.next += 1
            yield {"input": tokens, **({"positions": positions(tokens)} if V03 else {})}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.next * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["seen"] // self.step if state_dict else 0


def positions(tokens_BT: Tensor) -> Tensor:
    """Places of tokens in their documents, each of which ends with EOS."""
    found = torch.zeros_like(tokens_BT)
    for t in range(1, tokens_BT.shape[1]):
        found[:, t] = torch.where(tokens_BT[:, t - 1] == EOS, 0, found[:, t - 1] + 1)
    return found


def samples(first: int, count: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [count, seq_len]; every third sample has labels that do not count."""
    rows = []
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        rows.append(torch.randint(VOCAB, (seq_len + 1,), generator=generator))
    tokens = torch.stack(rows)
    labels = tokens[:, 1:].clone()
    ignored = torch.arange(first, first + count) % 3 == 0
    labels[ignored, :5] = -100
    return tokens[:, :-1].contiguous(), labels


@torch.no_grad()
def refill(model: nn.Module, block: str) -> None:
    """Fill matrices the same on every layout, and large in MoE blocks.

    On CPU meshes torch fills every shard with the same random numbers, so that experts and router
    rows would be copies of each other and choices ties. And as torchtitan fills them, experts add
    too little to be seen in the loss.
    """
    for path, param in model.named_parameters():
        if param.ndim > 1:
            init_normal_(param, std=0.2 if block in path else 0.05, key=_clean(path))


def random_block(block: nn.Module) -> nn.Module:
    """A block whose parameters and buffers are all random, and large."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.3, generator=generator)
    return block


def decoder_oracle() -> Run:
    """The decoder in one process: four forwards a step, and plain AdamW."""
    model = Decoder(DECODER)
    model.init_weights(7)
    refill(model, ".mlp.")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    state = MoEState(layers, BalanceGroups())
    state.set_num_micro_batches(4)
    optimizer, run = adamw(model), Run()
    for step in range(STEPS):
        batch = [samples(4 * step + i, 1, SEQ_LEN) for i in range(4)]
        total = sum((labels != -100).sum() for _, labels in batch)
        losses = [model(tokens, labels, num_tokens=total) for tokens, labels in batch]
        for loss in losses:
            loss.backward()
        run.losses.append(float(sum(loss.detach() for loss in losses)))
        clip(run, model)
        metrics = state.finish_step()
        run.metrics.append(
            {"moe/load_max_over_mean": max(metrics.compute_load_max_over_mean().values())}
        )
        run.metrics[-1]["moe/aux_loss"] = metrics.compute_total_aux_loss()
        optimizer.step()
        optimizer.zero_grad()
    run.state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return run


def adamw(model: nn.Module) -> torch.optim.AdamW:
    options = dict(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY)
    return torch.optim.AdamW(model.parameters(), **options)


def clip(run: Run, model: nn.Module) -> None:
    """Clip an oracle's gradients; the norm and the first step's gradients are recorded."""
    run.grads = run.grads or {n: whole(p.grad) for n, p in model.named_parameters()}
    run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
