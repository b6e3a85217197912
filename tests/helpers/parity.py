"""One composition of parallel degrees against one process: what `test_parity.py` runs per case.

Every rank trains the same tiny decoder for a step of SGD and one of AdamW. Rank 0 repeats them in
one process with `moe_reference` in place of every MoE layer and reports, per quantity, the worst
error of an element relative to its tensor's largest one. Data ranks hold different numbers of
tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from moecore import (
    BalanceConfig,
    CapacityConfig,
    CloneOptions,
    ContextOptions,
    DispatchOptions,
    FSDPOptions,
    MemoryOptions,
    Meshes,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision
from moecore.kernels.experts.triton_products import GATHER_FIRST
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks, make_row_cu_seqlens
from moecore.models import Decoder, DecoderConfig
from moecore.models.block import Block
from moecore.moe.balance import LOSS_NAMES
from moecore.moe.clones import Clones
from moecore.moe.dispatch.exchange import Exchange
from moecore.moe.experts import Experts
from moecore.moe.forced_routing import force_even_load
from moecore.moe.placement import ExpertPlacement
from moecore.precision.apply import apply_precision
from moecore.train import AdamW
from tests.helpers.parts import on_parts
from tests.helpers.sliced import sliced
from tests.helpers.whole import Held, gather_whole
from tests.moe.moe_cases import ALL_LOSSES, CONFIGS
from tests.moe.reference import ReferenceOutput, moe_reference
from tests.parallel.fsdp.units import unit_of

OF_GPT_OSS: dict[str, Any] = dict(attention_bias="all", windows=(5, 0), attention_sinks=True)
OPTIMIZERS = ("sgd", "adamw")  # one per step
SIZES: dict[str, Any] = dict(dim=48, hidden_dim=48, num_experts=24, top_k=3)
MOE = MoEConfig(**SIZES, balance=ALL_LOSSES)
BALANCED = replace(MOE, normalize_weights=False, shared_hidden_dim=32)
MODELS = {
    "softmax": MOE,
    "gated-shared": replace(MOE, shared_hidden_dim=32, shared_gate=True, activation="geglu"),
    "sigmoid": replace(
        MOE,
        score_function="sigmoid",
        num_groups=6,
        top_groups=3,
        routed_scaling_factor=2.5,
        expert_bias=True,
        shared_hidden_dim=16,
        balance=replace(ALL_LOSSES, bias_update_rate=0.01),
    ),
    "biases": replace(CONFIGS["gpt-oss"], **SIZES, balance=ALL_LOSSES),
    # Forced choices: a rounded hidden state would pick other experts than fp32 does.
    "balanced": BALANCED,
    # Wide enough for kernels that gather their rows first.
    "balanced-wide": replace(BALANCED, hidden_dim=GATHER_FIRST["fc1"]),
    "relu2": replace(
        MOE,
        activation="relu2",
        expert_bias=True,
        balance=BalanceConfig(global_batch_coef=0.1, bias_update_rate=0.02),
    ),
    # Rules that compare the tokens of a micro-batch, which tp ranks share.
    "latent-capacity": replace(
        MOE,
        latent_dim=24,
        latent_norm_eps=1e-6,
        # By probability two tokens within rounding of each other could change places.
        capacity=CapacityConfig(factor=1.0, drop="position"),
        shared_hidden_dim=16,
        num_shared_experts=2,
        shared_gate=True,
        activation="silu",
    ),
    "sinkhorn": replace(
        MOE, assignment="sinkhorn", score_function="sqrtsoftplus", routed_scaling_factor=1.5
    ),
    "expert-choice": replace(
        MOE,
        assignment="expert_choice",
        capacity=CapacityConfig(factor=1.5),
        balance=BalanceConfig(z_loss_coef=0.01),
    ),
    "top-1": replace(
        MOE,
        top_k=1,
        score_function="sigmoid",
        normalize_weights=False,
        weights_on_input=True,
        capacity=CapacityConfig(factor=1.2, drop="position"),
        num_groups=4,
        top_groups=2,
        group_experts=3,
        expert_bias=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One composition and the options that ride on it."""

    world: int
    parallel: dict[str, int]
    model: str = "softmax"
    dispatcher: str = "alltoall"
    domain: int | None = None  # ranks of one, with dispatcher "hierarchical"
    nvlink: NVLinkOptions | None = None  # with dispatcher "nvlink"
    clones: CloneOptions | None = None
    memory: MemoryOptions | None = None
    expert_backend: str = "torch"
    loss: str = "mean"
    accumulate: int = 1
    sequences: int = 1  # times as many on every data rank
    context: ContextOptions | None = None  # with cp
    packed: bool = False  # documents of different lengths in the rows
    precision: Precision | None = None
    tied: bool = False
    pipeline: PipelineConfig | None = None
    layers: int = 0  # all of MoE; 0 = as few as show what is to be shown
    meta: bool = False
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)
    tamper: str = ""
    bf16: bool = False
    sliced: bool = False  # products over tp are parts of their exchanges
    recompute: bool = False  # activation checkpointing of every block
    frozen: bool = False  # routed experts do not train
    torch_optimizers: bool = False  # AdamW fused: torch plans every operation on DTensors

    @property
    def is_rough(self) -> bool:
        """Whether rounding decides: then one process that rounds likewise is the measure."""
        return self.bf16 or self.precision is not None

    @property
    def name(self) -> str:
        degrees = "-".join(f"{k}{v}" for k, v in self.parallel.items())
        options = f"{self.model}-{self.dispatcher}-{self.loss}"
        flags = "bf16", "sliced", "packed", "recompute", "frozen"
        extras = [n for n in flags if getattr(self, n)]
        extras += ["fp8"] if self.precision else []
        extras += [self.expert_backend] if self.expert_backend != "torch" else []
        extras += [f"accumulate_{self.accumulate}"] if self.accumulate > 1 else []
        extras += [f"domains_of_{self.domain}"] if self.domain else []
        extras += _choices(self.nvlink) if self.nvlink else []
        extras += [f"clones_{self.clones.per_rank}"] if self.clones else []
        extras += ["stash"] if self.memory and self.memory.stash else []
        extras += [self.context.way] if self.context else []
        extras += [self.pipeline.schedule, str(self.pipeline.layout)] if self.pipeline else []
        return "-".join([f"{self.world}r", degrees, options, *extras]) + self.tamper


def _choices(options: NVLinkOptions) -> list[str]:
    """Name what differs from the defaults."""
    values = {f.name: (getattr(options, f.name), f.default) for f in fields(options)}
    return [f"{name}_{value}" for name, (value, default) in values.items() if value != default]


def run_case(case: Case, device: torch.device) -> dict[str, float]:
    """Return quantity -> worst relative error on rank 0, {} elsewhere.

    A case in bf16 or FP8 returns our error over that of one process, both against fp32. What did
    not overlap although it was asked to, or did without, is infinitely wrong.
    """
    torch.manual_seed(0)
    parallel = ParallelConfig(**case.parallel)
    meshes = build_meshes(parallel, device.type, ranks_per_domain=case.domain)
    config = decoder_config(case)
    initial = initial_state(case, config, device)
    if case.meta:
        model = decoder_of(case, config, device="meta")
    else:
        model = filled(case, config, initial, device)
    parallelize(model, meshes, case)
    if case.meta:
        model.to_empty(device=device)
        model.init_weights(seed=5)
        initial = {n: t.to(device) for n, t in gather_whole(model.state_dict()).items()}
        if dist.get_rank() == 0:
            reference = Decoder(config).to(device)
            reference.init_weights(seed=5)
            assert all(torch.equal(initial[n], t) for n, t in reference.state_dict().items()), (
                "meta initialisation must not depend on the layout"
            )
    tamper(model, meshes, case.tamper)
    batches = make_batches(case, meshes, device)
    with counted_copies() as copies, sliced() if case.sliced else nullcontext() as slices:
        found = train(model, meshes, batches, case)
    found = {name: t.to(device) for name, t in gather_whole(found).items()}
    if dist.get_rank() != 0:
        return {}
    expected = train_reference(config, initial, batches, case, device)
    errors = overlap_errors(case, copies)
    if slices is not None and device.type == "cpu":  # GPUs that ranks share exchange in turn
        errors["slices"] = 0.0 if slices["all_gather"] and slices["all_to_all"] else float("inf")
    if not case.is_rough:
        return errors | {name: worst_error(found[name], expected[name]) for name in expected}
    plain = train_reference(config, initial, batches, case, device, is_rough=True)
    names = [n for n in expected if n.startswith(("loss/0", "norm/0", "grad/"))]
    return errors | {n: error_ratio(found[n], plain[n], expected[n]) for n in names}


@contextmanager
def counted_copies() -> Iterator[Counter[str]]:
    """Count what dispatcher "nvlink" sends beside the experts' products, and forwards' clones."""
    counts: Counter[str] = Counter()
    make = Clones.from_plan

    def counting_clones(*args: Any) -> Clones:
        counts["clones"] += 1
        return make(*args)

    def counting(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def run(self: Exchange, sent: Tensor) -> None:
            counts[name] += 1
            method(self, sent)

        return run

    with (
        patch.object(Exchange, "start_copies", counting("sums", Exchange.start_copies)),
        patch.object(Clones, "from_plan", counting_clones),
    ):
        yield counts


def overlap_errors(case: Case, copies: Counter[str]) -> dict[str, float]:
    """Return 0 for what was sent beside products exactly if the case asks for it, else inf.

    And for clones, which are there if the case has them.
    """
    are_right = {"clones": (copies["clones"] > 0) == (case.clones is not None)}
    if case.nvlink is not None:
        # Between domains no copy engine carries gradients; with biases they are needed at once.
        can = case.dispatcher == "nvlink" and not MODELS[case.model].fc1_bias
        wanted = can and case.nvlink.overlap_weight_grads
        are_right["overlap"] = (copies["sums"] > 0) == wanted
    return {name: 0.0 if is_right else float("inf") for name, is_right in are_right.items()}


def decoder_config(case: Case) -> DecoderConfig:
    """Return two MoE blocks; before them a dense one where units are shared or results rough."""
    has_dense = case.is_rough or case.fsdp.blocks_per_unit > 1
    return DecoderConfig(
        vocab_size=84,
        dim=48,
        num_layers=case.layers or (3 if has_dense else 2),
        num_heads=24,
        num_kv_heads=12,
        head_dim=4,
        mlp_hidden_dim=48 if has_dense else 0,
        moe=MODELS[case.model],
        dense_layers=(0,) if has_dense else (),
        qk_norm="head",
        tie_embeddings=case.tied,
        max_seq_len=512,
        ce_chunk_tokens=7,
        **OF_GPT_OSS if case.model == "biases" else {},
    )


def decoder_of(case: Case, config: DecoderConfig, device: str) -> Decoder:
    model = Decoder(config, device=device)
    if case.model.startswith("balanced"):
        force_even_load(model)
    return model


def filled(
    case: Case, config: DecoderConfig, state: dict[str, Tensor], device: torch.device
) -> Decoder:
    """Return a decoder of this state, which needs no other before."""
    model = decoder_of(case, config, device="meta").to_empty(device=device)
    model.load_state_dict(state)
    return model


def initial_state(case: Case, config: DecoderConfig, device: torch.device) -> dict[str, Tensor]:
    """Weights large enough for uneven routing and gradients that no rounding hides."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, tensor in Decoder(config, device="meta").state_dict().items():
        assert tensor.dtype == torch.float32
        values = torch.ones(tensor.shape)
        if "norm" not in name:
            wide = tensor.shape[-1] / MOE.hidden_dim if name.endswith("experts.w2") else 1.0
            values = torch.randn(tensor.shape, generator=generator) * 0.2 / wide**0.5
        state[name] = (values.bfloat16().float() if case.bf16 else values).to(device)
    return state


def parallelize(model: nn.Module, meshes: Meshes, case: Case) -> None:
    _freeze(model, case)
    if case.recompute:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    nvlink = case.nvlink
    if nvlink is not None and case.dispatcher == "hierarchical":
        nvlink = replace(nvlink, max_tokens=128)  # ranks have different numbers of tokens
    parallelize_moe(
        model,
        meshes,
        dispatch=DispatchOptions(
            name=case.dispatcher if meshes.dispatch_group else "auto",
            nvlink=nvlink,
            clones=case.clones,
        ),  # type: ignore[arg-type]
        memory=case.memory,
        expert_backend=case.expert_backend,  # type: ignore[arg-type]
        loss=case.loss,  # type: ignore[arg-type]
        context=case.context,
        precision=case.precision,
        fsdp=case.fsdp,
        pipeline=case.pipeline,
    )


def _freeze(model: nn.Module, case: Case) -> None:
    for module in model.modules():
        if isinstance(module, Experts) and case.frozen:
            module.requires_grad_(False)


Batch = dict[str, Tensor]  # the arguments of a forward


def make_batches(case: Case, meshes: Meshes, device: torch.device) -> list[list[list[Batch]]]:
    """Return [step][micro-batch][data rank] -> tokens and labels, a different length per rank."""
    generator = torch.Generator().manual_seed(2)
    p = meshes.parallel
    unit = 2 * p.cp if p.cp > 1 else 1  # documents are multiples of it
    parts = p.tp * unit

    def batch(data_rank: int, micro: int) -> Batch:
        length = parts * (2 + data_rank % 3) + (0 if parts > 1 else data_rank % 2)
        if case.pipeline is not None:  # micro-batches of a rank differ as well
            length += parts * (micro % 3)
        if case.is_rough:  # sums long enough that one unlucky rounding does not decide
            length *= 10
        shape = (case.sequences * (1 + data_rank % 2), length)
        tokens = torch.randint(0, 60, shape, generator=generator)
        labels = torch.randint(0, 60, shape, generator=generator)
        labels[:, -1] = -100
        found = {"tokens_BT": tokens.to(device), "labels_BT": labels.to(device)}
        if case.packed:  # the last but one may cross a row
            num = tokens.numel() // unit
            ends = sorted({1, max(1, num - 2), num})
            found["cu_seqlens"] = torch.tensor([0, *ends]) * unit
        return found

    ranks, micros = range(meshes.data_ranks), range(case.accumulate)
    return [[[batch(r, i) for r in ranks] for i in micros] for _ in OPTIMIZERS]


def make_optimizer(
    model: nn.Module, name: str, *, is_torchs: bool, **of_adamw: Any
) -> torch.optim.Optimizer:
    torchs, ours = (torch.optim.SGD, torch.optim.AdamW), (on_parts(torch.optim.SGD), AdamW)
    sgd, adamw = torchs if is_torchs else ours
    if name == "sgd":
        return sgd(model.parameters(), lr=0.05)
    # An eps of the size of the gradients: AdamW's division then does not magnify rounding.
    return adamw(model.parameters(), lr=0.01, eps=1e-2, weight_decay=0.1, **of_adamw)


def loss_scale(case: Case, step: list[list[Batch]]) -> dict[str, Any]:
    """The keyword that makes a rank's loss a sum over the global token count."""
    if case.loss == "mean":
        return {}
    return {"num_tokens": sum(int((b["labels_BT"] != -100).sum()) for micro in step for b in micro)}


def train(
    model: nn.Module, meshes: Meshes, batches: list[list[list[Batch]]], case: Case
) -> dict[str, Any]:
    """A step of each optimizer on this rank; returns what this rank holds of every tensor."""
    how = dict(fused=True) if case.torch_optimizers else {}
    is_torchs = case.torch_optimizers
    optimizers = {n: make_optimizer(model, n, is_torchs=is_torchs, **how) for n in OPTIMIZERS}
    owner = TrainStep(model, max_norm=0.7, num_micro_batches=case.accumulate)
    found: dict[str, Any] = {}
    for i, step in enumerate(batches):
        loss_of_rank = torch.zeros((), device=step[0][0]["tokens_BT"].device)
        if case.pipeline is not None:
            scale = loss_scale(case, step)
            losses = owner.forward_backward([micro[meshes.data_rank] | scale for micro in step])
            loss_of_rank += losses.sum() / (case.accumulate if case.loss == "mean" else 1)
        for micro in step if case.pipeline is None else ():
            with owner.micro_batch():
                loss = model(**micro[meshes.data_rank], **loss_scale(case, step))
                loss = loss / case.accumulate if case.loss == "mean" else loss
                loss.backward()
            loss_of_rank += loss.detach()
        every = [torch.empty_like(loss_of_rank) for _ in range(dist.get_world_size())]
        dist.all_gather(every, loss_of_rank)
        of_stage = dist.get_world_size() // meshes.parallel.pp
        found[f"loss/{i}"] = torch.stack(every)[: of_stage : of_stage // meshes.data_ranks]
        norm = owner.clip()
        found[f"norm/{i}"] = torch.tensor(norm.total)
        if i == 0:
            scale = max(1.0, (norm.total + 1e-6) / 0.7)
            grads = {n: p.grad for n, p in named(model.named_parameters()) if p.requires_grad}
            for name, grad in grads.items():
                held = Held.of(grad)
                found[f"grad/{name}"] = replace(held, local=held.local * scale)
        metrics = owner.finish().metrics
        for name, counts in named(metrics.tokens_per_expert.items()):
            found[f"counts/{i}/{name}"] = counts.float()
        for name, losses in named(metrics.aux_losses.items()):
            found[f"aux/{i}/{name}"] = losses
        for name, entropy in named(metrics.router_entropy.items()):
            found[f"entropy/{i}/{name}"] = entropy
        optimizers[OPTIMIZERS[i]].step()
        model.zero_grad()
    found |= {f"after/{n}": t for n, t in named(model.state_dict().items())}
    owner.check()
    return found


def named(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Take the names that activation checkpointing adds out of qualified names."""
    return ((name.replace("_checkpoint_wrapped_module.", ""), value) for name, value in items)


def train_reference(
    config: DecoderConfig,
    initial: dict[str, Tensor],
    batches: list[list[list[Batch]]],
    case: Case,
    device: torch.device,
    is_rough: bool = False,
) -> dict[str, Any]:
    """The same steps in one process, data rank after data rank; rounded as ours if asked."""
    model = filled(case, config, initial, device)
    if is_rough and case.bf16:
        model.to(torch.bfloat16)
    if is_rough and case.precision:
        apply_precision(model, case.precision)
    _freeze(model, case)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    outputs: dict[str, list[ReferenceOutput]] = defaultdict(list)
    for name, layer in layers.items():
        forward = _reference_forward(outputs[name], case.parallel.get("cp", 1))
        layer.forward = MethodType(forward, layer)
    optimizers = {n: make_optimizer(model, n, is_torchs=True) for n in OPTIMIZERS}
    expected: dict[str, Any] = {}
    for i, step in enumerate(batches):
        ranks, prior = range(len(step[0])), dict.fromkeys(layers, 0)
        losses, counts, aux = [0.0] * len(ranks), defaultdict(int), defaultdict(int)
        entropies = defaultdict(list)  # of each token
        for micro in step:
            micro_losses = [model(**batch, **loss_scale(case, step)) for batch in micro]
            shares = {
                n: prior[n] + sum(o.routing.counted_NE.sum(0) for o in outputs[n]) for n in layers
            }
            for rank, loss in enumerate(micro_losses):
                loss = loss / case.accumulate if case.loss == "mean" else loss
                total = loss / len(ranks) if case.loss == "mean" else loss
                for name, layer in layers.items():
                    values = _aux_losses(layer.config, outputs[name][rank], shares[name])
                    values = values / (len(ranks) * case.accumulate)
                    total = total + values.sum()
                    aux[name] = aux[name] + values.detach()
                    counts[name] = counts[name] + outputs[name][rank].counts_E
                    entropies[name].append(_entropies(outputs[name][rank]))
                total.backward()
                losses[rank] += loss.detach()
            prior = shares
            for values in outputs.values():
                values.clear()
        expected[f"loss/{i}"] = torch.stack(losses)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained.values()])
        expected[f"norm/{i}"] = norm
        if i == 0:
            expected |= {f"grad/{n}": p.grad.clone() for n, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        for name, layer in layers.items():
            expected[f"counts/{i}/{name}"] = counts[name].float()
            expected[f"aux/{i}/{name}"] = aux[name]
            expected[f"entropy/{i}/{name}"] = torch.cat(entropies[name]).mean()
            rate = layer.config.balance.bias_update_rate
            if rate:
                count = counts[name].double()
                layer.router.expert_bias += rate * torch.sign(count.mean() - count).float()
        optimizers[OPTIMIZERS[i]].step()
        model.zero_grad()
    return expected | {f"after/{n}": t.clone() for n, t in model.state_dict().items()}


def _reference_forward(outputs: list[ReferenceOutput], cp: int) -> Any:
    def forward(
        self: MoELayer,
        x_BTD: Tensor,
        cu_seqlens: Tensor | None = None,
        depth: int = 0,
        **more: Any,
    ) -> Tensor:
        assert depth == 0, "no prediction of later tokens"
        assert not any(value is not None for value in more.values()), "whole rows, no padding"
        params = dict(self.named_parameters()) | dict(self.named_buffers())
        is_dealt = self.get_part("router").forced_ids is not None
        given = dealt(self, x_BTD, cu_seqlens, cp) if is_dealt else None
        out = moe_reference(x_BTD, params, self.config, cu_seqlens=cu_seqlens, given_ids_NK=given)
        outputs.append(out)
        return out.y_BTD

    return forward


def dealt(layer: MoELayer, x_BTD: Tensor, cu_seqlens: Tensor | None, cp: int) -> Tensor:
    """Return the forced choices of rows; each cp rank deals by the order of the tokens it holds."""
    (B, T, _), device = x_BTD.shape, x_BTD.device
    num, E, K = B * T // cp, layer.config.num_experts, layer.config.top_k
    ids_tK = layer.get_part("router").forced_ids(num, E, K, device)
    borders = make_row_cu_seqlens(B, B * T, device) if cu_seqlens is None else cu_seqlens.to(device)
    held = assign_tokens_to_cp_ranks(borders, B * T, cp)
    ids_NK = ids_tK.new_empty(B * T, K)
    ids_NK[held.flatten()] = ids_tK.repeat(cp, 1)
    return ids_NK


def _aux_losses(config: MoEConfig, out: ReferenceOutput, counts_E: Tensor) -> Tensor:
    """The four losses of one data rank, with the global batch's share of each expert."""
    share_E = counts_E / counts_E.sum()
    even = config.num_experts * (share_E * out.mean_scores_E).sum()
    losses = out.losses | {"global_batch": config.balance.global_batch_coef * even}
    return torch.stack([losses[name] for name in LOSS_NAMES])


def _entropies(out: ReferenceOutput) -> Tensor:
    """How undecided the router is about each token of a data rank."""
    return torch.distributions.Categorical(out.routing.scores_NE.detach()).entropy()


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Largest element error over the largest element; nan stays nan and fails every bound."""
    if found.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().clamp(min=1e-6)
    return float((found.float() - expected.float()).abs().max() / scale)


def error_ratio(found: Tensor, plain: Tensor, expected: Tensor) -> float:
    """Our error over that of plain bf16: the larger of whole tensor and worst row.

    The floor is half a rounding step of bf16, relative to the tensor or its largest row.
    """
    tensors = [t.float().cpu() for t in (found, plain, expected)]
    rows = [t.reshape(-1, t.shape[-1] if t.ndim else 1) for t in tensors]
    scale = rows[2].norm(dim=-1)
    ours, theirs = ((r - rows[2]).norm(dim=-1) for r in rows[:2])
    whole = ours.norm() / (theirs.norm() + 2**-9 * scale.norm())
    worst = ours.max() / (theirs.max() + 2**-9 * scale.max())
    return float(torch.maximum(whole, worst))


def tamper(model: nn.Module, meshes: Meshes, what: str) -> None:
    """Break one thing on purpose; the suite must notice."""
    if what == "-no-gradient-scale":
        for module in model.modules():
            unit = unit_of(model, module) if isinstance(module, Experts) else None
            if unit is not None:
                unit.gradients.divisor = float(meshes.expert_fsdp.size())
    elif what == "-wrong-group":
        p, world = meshes.parallel, dist.get_world_size()
        size = p.ep * p.etp
        groups = [
            dist.new_group(list(range(i, world, world // size))) for i in range(world // size)
        ]
        group = groups[dist.get_rank() % (world // size)]
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.dispatcher.placement = ExpertPlacement(
                    group=group, num_experts=module.config.num_experts, ep=p.ep, etp=p.etp
                )
