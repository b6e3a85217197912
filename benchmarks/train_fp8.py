r"""Trains one decoder in bf16, in FP8 and with less optimizer state, and compares the losses.

    python -m benchmarks.train_fp8 --json benchmarks/results/fp8/training.json
    python -m benchmarks.train_fp8 --seeds 0 --steps 50 --device cpu
    python -m benchmarks.train_fp8 --variants bf16 bf16-moments fp8-moments remainder least-state
    torchrun --nproc-per-node 2 -m benchmarks.train_fp8 --probe-every 0 \
        --variants blockwise blockwise-gathered
    python -m benchmarks.fp8_runs benchmarks/results/fp8/training.json precision.png

A native decoder of 482 M parameters (4 layers of 32 experts, 4 per token) reads the bytes of text
that the machine has (`benchmarks/text.py`). The runs of a seed have the same weights, batches and
schedule; they differ in `parallelize_moe(precision=...)` or in `AdamW` alone. "bf16-torch" is a
control: bf16 once more, with experts multiplied by torch, so that other roundings alone make it
differ. With `--bytes-per-token 2` a token is two bytes of 65,536, so that the head is wide:
"blockwise-fp8-head" has its products in FP8 as well. Weights of "remainder" are bf16, and so are
its gradients. Its masters change as fp32 weights do, to the bit, so what it loses is the cost of
bf16 gradients. "bf16-weights" has no masters at all. "blockwise-gathered" is "blockwise" whose
units gather FP8: on one GPU they quantise linears, on several experts too. There each GPU has its
part of every batch. Routers stay fp32. Bytes per parameter are those of the tensors that are there,
of gradients before the optimizer steps.

Every `--probe-every` steps a run in FP8 computes the gradient of its batch once more, by a twin in
bf16 with the same weights and the same choice of experts; the cosine of both is kept per layer and
kind of parameter. Left to itself the twin would send some tokens elsewhere: that share is kept too.
After the last step the twin reads held-out text: what differs from the run's own loss there is the
cost of computing in FP8, and what is left the cost of having trained in it.

Losses, loads and cosines stay on the device until a run ends: a step has no host sync. The file is
written after each run, and runs that it has already from the same command are replaced.

Legend: S steps, B sequences, T tokens of a sequence, N bytes, L MoE layers, E experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.fp8_runs import BASE, GATHERED, Run, average_points, load_runs, summarize, write
from benchmarks.records import results_path
from benchmarks.text import Text, list_installed_folders, read_text
from moecore import (
    BalanceConfig,
    FSDPOptions,
    Meshes,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, DecoderConfig
from moecore.models.size import num_params
from moecore.moe.metrics import MoEMetrics
from moecore.moe.router import Router
from moecore.recipes.schedule import LearningRateSchedule
from moecore.rl import RouterReplay
from moecore.rl.choices import Choices
from moecore.train import AdamW

WIDE_HIDDEN = Precision(recipe=Recipe(keep_hidden="wide"), roles=("experts",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Options of a run: arguments of parallelize_moe and AdamW, dtype of weights."""

    parallelize: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    weights: torch.dtype = torch.float32


def make_fp8_variant(precision: str | Precision | Recipe, **fsdp: Any) -> Variant:
    return Variant(parallelize={"precision": precision}, fsdp=fsdp)


HALF_MOMENTS, FP8_MOMENTS = ({"moment_dtype": t} for t in (torch.bfloat16, torch.float8_e4m3fn))
SPLIT = {"master_remainder": True}
VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "bf16-torch": Variant(parallelize={"expert_backend": "torch"}),
    "auto": make_fp8_variant("auto"),
    "blockwise": make_fp8_variant("blockwise"),
    f"blockwise{GATHERED}": make_fp8_variant("blockwise", fp8_param_gather=True),
    "blockwise-fp8-head": make_fp8_variant(Precision(recipe=Recipe(), fp8_head=True)),
    "auto-wide-hidden": make_fp8_variant(WIDE_HIDDEN),
    "rowwise": make_fp8_variant("rowwise"),
    "tensorwise": make_fp8_variant("tensorwise"),
    "mxfp8": make_fp8_variant("mxfp8"),
    "nvfp4": make_fp8_variant("nvfp4"),
    "nvfp4-untransformed": make_fp8_variant(Recipe(scaling="nvfp4", hadamard=False)),
    "nvfp4-nearest": make_fp8_variant(Recipe(scaling="nvfp4", stochastic_rounding=False)),
    "bf16-moments": Variant(optimizer=HALF_MOMENTS),
    "fp8-moments": Variant(optimizer=FP8_MOMENTS),
    "bf16-weights": Variant(weights=torch.bfloat16),
    "remainder": Variant(optimizer=SPLIT, weights=torch.bfloat16),
    "least-state": Variant(optimizer=SPLIT | FP8_MOMENTS, weights=torch.bfloat16),
}
TEXT_BYTES = {"cuda": 48 << 20, "cpu": 2 << 20}
EVAL_EVERY, EVAL_BATCHES = 100, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A decoder and the sizes of its batches."""

    config: DecoderConfig
    batch_size: int
    seq_len: int
    bytes_per_token: int = 1


def make_size(
    dim: int, hidden_dim: int, experts: int, top_k: int, layers: int, **reads: int
) -> Size:
    """Return a decoder of MoE layers whose products can all run in FP8."""
    head_dim = min(dim, 128)
    moe = MoEConfig(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=experts,
        top_k=top_k,
        balance=BalanceConfig(micro_batch_coef=0.01),
    )
    config = DecoderConfig(
        vocab_size=256,
        dim=dim,
        num_layers=layers,
        num_heads=dim // head_dim,
        num_kv_heads=max(1, dim // head_dim // 2),
        head_dim=head_dim,
        qk_norm="head",
        moe=moe,
    )
    return Size(config=config, **reads)


SIZES = {
    "cuda": make_size(1536, 768, 32, 4, 4, batch_size=32, seq_len=512),
    "cpu": make_size(128, 128, 4, 2, 2, batch_size=4, seq_len=32),
}


class Batches:
    """All batches of a run on the device, by step: a pure function of seed and text.

    Args:
        bytes_N: uint8.
        size: of the batches.
        steps: number of batches.
        seed: of the places of the rows in the text; None = spread evenly.
        device: of the batches.
        part: index of this rank's part of each batch, and the number of parts.
    """

    def __init__(
        self,
        bytes_N: Tensor,
        size: Size,
        *,
        steps: int,
        seed: int | None,
        device: torch.device,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        length = (size.seq_len + 1) * size.bytes_per_token
        num = bytes_N.numel() - length + 1
        if num <= 0:
            raise ValueError(
                f"text ({bytes_N.numel()} bytes) must be longer than a sequence "
                f"({length - 1}): read more"
            )
        shape = (steps, size.batch_size)
        if seed is None:
            starts = torch.linspace(0, num - 1, shape[0] * shape[1]).long().view(shape)
        else:
            starts = torch.randint(num, shape, generator=torch.Generator().manual_seed(seed))
        self.bytes_N, self.starts_SB = bytes_N.to(device), starts[:, part[0] :: part[1]].to(device)
        self.within_N = torch.arange(length, device=device)
        self.place_values = 256 ** torch.arange(size.bytes_per_token, device=device)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens_BT and labels_BT, int64."""
        bytes_BN = self.bytes_N[self.starts_SB[step][:, None] + self.within_N].long()
        rows_BT = (bytes_BN.unflatten(1, (-1, len(self.place_values))) * self.place_values).sum(2)
        return rows_BT[:, :-1], rows_BT[:, 1:]

    def __len__(self) -> int:
        return self.starts_SB.shape[0]


def build_model(size: Size, variant: str, seed: int, meshes: Meshes) -> Decoder:
    """Return a model with the variant's options; equal seeds give equal weights, up to rounding."""
    model, how = Decoder(size.config, device="meta"), VARIANTS[variant]
    model.to(how.weights)
    for module in model.modules():
        if isinstance(module, Router):
            module.float()
    kept = {"param_dtype": torch.bfloat16, "dense_strategy": "optim"}
    fsdp = FSDPOptions(**kept, **how.fsdp)
    parallelize_moe(model, meshes, fsdp=fsdp, **how.parallelize)
    model.to_empty(device=meshes.device_type)
    model.init_weights(seed)
    if how.weights != torch.float32:  # whose noise is another one's
        wide = Decoder(size.config, device=meshes.device_type)
        wide.init_weights(seed)
        with torch.no_grad():
            for param, given in zip(model.parameters(), wide.parameters(), strict=True):
                get_local(param).copy_(given)
    return model


def count_bytes_per_parameter(params: Sequence[Tensor], tensors: Iterable[Tensor]) -> float:
    """Return the bytes of this rank's parts of tensors over the number of parameters."""
    return sum(get_local(t).nbytes for t in tensors) / sum(get_local(p).numel() for p in params)


class Probe:
    """Compares a run with a bf16 twin that has the same weights.

    Args:
        model: the trained model.
        twin: computes in bf16.
    """

    def __init__(self, model: Decoder, twin: Decoder) -> None:
        self.model, self.twin, self.owner = model, twin, TrainStep(twin)
        self.own, self.others = RouterReplay(model), RouterReplay(twin)
        self.names = sorted({get_key(name) for name, _ in model.named_parameters()})
        self.steps: list[int] = []
        self.cosines: list[Tensor] = []
        self.moved: list[Tensor] = []

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of the forward and backward that `compare` repeats."""
        return self.own.record()

    def compare(self, step: int, tokens_BT: Tensor, labels_BT: Tensor) -> None:
        """Compare the recorded forward and backward with the twin's on the same batch."""
        choices = self.own.choices()
        self._copy_weights()
        with torch.no_grad(), self.others.record():
            self.twin(tokens_BT, labels_BT)
        self.moved.append(compute_moved(choices, self.others.choices(), self.model.config))
        with self.others.replay(choices), self.owner.micro_batch():
            self.twin(tokens_BT, labels_BT).backward()
        self.cosines.append(self._cosines())
        self.steps.append(step)
        self.owner.drop()

    def compute_held_out_loss(self, batches: Batches) -> Tensor:
        """Return the twin's loss with the model's weights; fp64 on the device."""
        self._copy_weights()
        return compute_held_out_loss(self.twin, batches)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        tensors = (*self.model.parameters(), *self.model.buffers())
        copies = (*self.twin.parameters(), *self.twin.buffers())
        for tensor, copy in zip(tensors, copies, strict=True):
            get_local(copy).copy_(get_local(tensor))

    @torch.no_grad()
    def _cosines(self) -> Tensor:
        """Return the cosines of the gradients, fp64 [names], without a sync."""
        sums = {name: [] for name in self.names}
        others = dict(self.twin.named_parameters())
        for name, param in self.model.named_parameters():
            a, b = (get_local(p.grad).flatten().float() for p in (param, others[name]))
            sums[get_key(name)].append(torch.stack([a @ b, a @ a, b @ b]).double())
        dots = torch.stack([torch.stack(sums[name]).sum(0) for name in self.names])
        return dots[:, 0] / (dots[:, 1] * dots[:, 2]).sqrt()


def compute_moved(ours: Choices, others: Choices, config: DecoderConfig) -> Tensor:
    """Return the share of our expert choices that the others lack; fp64 on the device."""
    assert config.moe is not None
    shares = []
    for name, (ids_TK,) in ours.items():
        chosen_TE = ids_TK.new_zeros(ids_TK.shape[0], config.moe.num_experts)
        chosen_TE.scatter_(1, others[name][0].long(), 1)
        shares.append(1 - chosen_TE.gather(1, ids_TK.long()).double().mean())
    return torch.stack(shares).mean()


def get_key(name: str) -> str:
    """Return layer and kind of a parameter.

    Example: "model.layers.3.mlp.experts.w1" -> "layers.3.experts", "lm_head.weight" -> "ends".
    """
    found = re.search(r"layers\.(\d+)\.(.*)", name)
    if found is None:
        return "ends"  # embedding, last norm, head
    kinds = {"experts": ".experts.", "router": ".router.", "attention": "self_attn."}
    inside = f".{found[2]}"
    kind = next((kind for kind, part in kinds.items() if part in inside), "norms")
    return f"layers.{found[1]}.{kind}"


def get_local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every parameter has a gradient"
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compute_loads(metrics: MoEMetrics) -> Tensor:
    """Return the busiest expert's load over the mean, worst layer and mean of layers; fp64 [2]."""
    counts_LE = torch.stack(list(metrics.tokens_per_expert.values())).double()
    loads_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1e-9)
    return torch.stack([loads_L.max(), loads_L.mean()])


@torch.no_grad()
def compute_held_out_loss(model: Decoder, batches: Batches) -> Tensor:
    """Return the mean loss of all batches, fp64 on the device."""
    model.eval()
    losses = [model(*batches.at(i)).double() for i in range(len(batches))]
    model.train()
    return reduce_mean(torch.stack(losses).mean())


def reduce_mean(values: Tensor) -> Tensor:
    """Return the mean over all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


def train(seed: int, variant: str, text: Text, args: argparse.Namespace, meshes: Meshes) -> Run:
    """Return the curves of one run."""
    device, size = torch.device(meshes.device_type), args.size
    part = dist.get_rank(), dist.get_world_size()
    reads = {"size": size, "device": device, "part": part}
    batches = Batches(text.train_N, steps=args.steps, seed=seed, **reads)
    unseen = Batches(text.held_out_N, steps=EVAL_BATCHES, seed=None, **reads)
    model = build_model(size, variant, seed, meshes)
    probe = None
    if args.probe_every and "precision" in VARIANTS[variant].parallelize:
        probe = Probe(model, build_model(size, BASE, seed, meshes))
    how = {"betas": (0.9, 0.95), "weight_decay": 0.1, **VARIANTS[variant].optimizer}
    params = list(model.parameters())
    optimizer = AdamW(params, **how)
    owner = TrainStep(model, optimizer, max_norm=1.0)
    values = torch.zeros(args.steps, 4, device=device, dtype=torch.float64)
    held_out: list[tuple[int, Tensor]] = []
    grads: list[Tensor] = []
    schedule = LearningRateSchedule(warmup_steps=max(1, round(0.05 * args.steps)))
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule.compute_factor(
                step + 1, num_steps=args.steps, count_steps=int
            )
        tokens_BT, labels_BT = batches.at(step)
        is_probed = probe is not None and step % args.probe_every == 0
        with probe.recording() if is_probed else nullcontext(), owner.micro_batch():
            loss = model(tokens_BT, labels_BT)
            loss.backward()
        if is_probed:
            probe.compare(step, tokens_BT, labels_BT)
        grads = [get_local(p.grad).to("meta") for p in params] if step == 0 else grads
        done = owner.finish()
        values[step, 0] = loss.detach()
        values[step, 1:3] = compute_loads(done.metrics)
        values[step, 3] = done.is_skipped
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == args.steps:
            held_out.append((step + 1, compute_held_out_loss(model, unseen)))
    run = Run(seed=seed, variant=variant)
    state = [t for slots in optimizer.state.values() for t in slots.values()]
    for name, tensors in (("weights", params), ("gradients", grads), ("state", state)):
        run.bytes_per_parameter[name] = count_bytes_per_parameter(params, tensors)
    if probe is not None:
        run.held_out_in_bf16 = float(probe.compute_held_out_loss(unseen))
    return collect(run, reduce_mean(values), held_out, probe)


def collect(
    run: Run, values: Tensor, held_out: list[tuple[int, Tensor]], probe: Probe | None
) -> Run:
    """Fill a run's results from the values on the device."""
    losses, loads, mean_loads, skipped = values.T.tolist()
    run.losses, run.loads, run.mean_loads = map(average_points, (losses, loads, mean_loads))
    run.skipped = int(sum(skipped))
    run.held_out = [[step, float(loss)] for step, loss in held_out]
    if probe is not None:
        run.probe_steps = probe.steps
        columns = torch.stack(probe.cosines).T.tolist()
        run.moved = torch.stack(probe.moved).tolist()
        run.cosines = dict(zip(probe.names, columns, strict=True))
    return run


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments, with `size` added.

    Raises:
        ValueError: for a number that is out of range.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and batches")
    add("--variants", nargs="+", default=[BASE, "blockwise"], choices=VARIANTS, help="what to run")
    add("--steps", type=int, default=500, help="optimizer steps of each run")
    add("--lr", type=float, default=6e-4, help="peak of warm-up and cosine")
    add("--batch-size", type=int, help="sequences of a step (None = the size's)")
    add("--bytes-per-token", type=int, default=1, choices=(1, 2), help="256 or 65,536 tokens")
    add("--probe-every", type=int, default=50, help="steps between gradient cosines; 0 = none")
    add("--device", default=here, choices=tuple(SIZES), help="chooses the size too")
    add("--json", type=results_path, help="file of the curves; runs of other seeds in it stay")
    args = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("batch_size", 1), ("probe_every", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} ({value}) must be >= {least}: raise it")
    config, n = SIZES[args.device].config, args.bytes_per_token
    config = dataclasses.replace(config, vocab_size=256**n)
    args.size = dataclasses.replace(SIZES[args.device], config=config, bytes_per_token=n)
    if args.batch_size is not None:
        args.size = dataclasses.replace(args.size, batch_size=args.batch_size)
    return args


def get_settings(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Return the settings that runs must share to be compared."""
    config, folder = args.size.config, dataclasses.asdict(args.size.config)
    return {
        "parameters": num_params(config),
        "decoder": folder,
        "steps": args.steps,
        "tokens_per_step": args.size.batch_size * args.size.seq_len,
        "seq_len": args.size.seq_len,
        "lr": args.lr,
        "text": {
            "digest": text.digest,
            "files": text.num_files,
            "train_bytes": text.train_N.numel(),
            "held_out_bytes": text.held_out_N.numel(),
        },
    }


def main(arguments: list[str]) -> int:
    """Run every seed in every variant, and print comparisons."""
    try:
        args = parse_arguments(arguments)
        text = read_text(list_installed_folders(), most_bytes=TEXT_BYTES[args.device])
        common = get_settings(args, text)
        runs = load_runs(args.json, common) if args.json else []
    except ValueError as error:
        print(f"train_fp8: error: {error}", file=sys.stderr)
        return 2
    meshes = build_meshes(ParallelConfig(), args.device)
    show = partial(print, flush=True) if dist.get_rank() == 0 else lambda _: None
    show(
        f"{common['parameters'] / 1e6:.0f} M parameters, {common['tokens_per_step']} tokens a step,"
        f" {text.train_N.numel() / 1e6:.1f} MB of {text.num_files} files (digest {text.digest})"
    )
    for seed in args.seeds:
        for variant in args.variants:
            runs = [run for run in runs if (run.seed, run.variant) != (seed, variant)]
            runs.append(train(seed, variant, text, args, meshes))
            show(summarize(runs[-1:])[0])
            if args.json and dist.get_rank() == 0:
                write(args.json, common, runs)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    show("\n".join(["all runs:", *summarize(runs)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
