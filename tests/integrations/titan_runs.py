"""One run of torchtitan's Trainer on ranks that exist already, and what the tests ask of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from moecore.moe.layer import MoELayer

SEQ_LEN, STEPS, LR, EPS, WEIGHT_DECAY = 16, 3, 1e-2, 1e-3, 0.1
SPECS = "tests.integrations.titan_specs"


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
    graphs: int = 0  # that torch.compile made


def arguments(name: str, folder: str, **options: Any) -> list[str]:
    """The command line of `torchtitan.train` for one tiny job; `a__b` stands for a.b."""
    settings: dict[str, Any] = {
        "job.dump_folder": folder,
        "model.name": name,
        "model.flavor": "tiny",
        "experimental.custom_import": SPECS,
        "training.seq_len": SEQ_LEN,
        "training.steps": STEPS,
        "training.local_batch_size": 1,
        "training.mixed_precision_param": "float32",
        "metrics.log_freq": 1,
        "lr_scheduler.warmup_steps": 1,
        "lr_scheduler.decay_ratio": 0.0,
        "optimizer.lr": LR,
        # With the usual 1e-8 the first steps are the gradients' signs, and rounding decides some.
        "optimizer.eps": EPS,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.implementation": "fused",  # of torch foreach plans for a second per step
        "activation_checkpoint.mode": "none",
        "debug.seed": 7,
    }
    settings |= {key.replace("__", "."): value for key, value in options.items()}
    words: list[str] = []
    for key, value in settings.items():
        flag = f"--{key}"
        if isinstance(value, bool):
            head, _, tail = key.rpartition(".")
            words.append(flag if value else f"--{head}.no-{tail}")
        else:
            words += [flag, str(value)]
    return words


def train(name: str, folder: str, **options: Any) -> Run:
    """Run `torchtitan.train`'s Trainer from its command line to the end. Collective."""
    import torchtitan.train as titan
    from torchtitan.config import ConfigManager

    for key, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[key] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.compiler.reset()
    counters.clear()
    return follow(titan.Trainer(ConfigManager().parse_args(arguments(name, folder, **options))))


def follow(trainer: Any) -> Run:
    """Let a Trainer of any version train to its end, and close it. Collective."""
    import torchtitan.distributed.utils as dist_utils

    run = Run()
    model, clip = trainer.model_parts[0], dist_utils.clip_grad_norm_
    log = trainer.metrics_processor.logger.log

    def clip_and_keep(*args: Any, **kwargs: Any) -> Tensor:
        if not run.grads:
            run.grads = {_clean(n): _whole(p.grad) for n, p in model.named_parameters()}
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
    run.graphs = counters["stats"]["unique_graphs"]
    for module in model.modules():
        if isinstance(module, MoELayer):
            run.dispatchers.add(type(module.dispatcher).__name__)
            run.backends.add(module.part("experts").backend)
    run.state = {_clean(n): _whole(t) for n, t in model.state_dict().items()}
    for param_name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            run.plain.append(param_name)
        elif ".experts." in param_name:
            run.expert_meshes.add(param.device_mesh.mesh_dim_names or ())
    return run


def _whole(tensor: Tensor | None) -> Tensor:
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
