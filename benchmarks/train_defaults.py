r"""Trains one decoder with several recipes; compares losses, loads of experts, gradient norms.

    python -m benchmarks.train_defaults --seeds 0 1 2 --json benchmarks/results/train/defaults.json
    python -m benchmarks.train_defaults --device cpu --steps 20 --recipes default transformers

A decoder of 1.43 B parameters (8 layers of 32 experts, 8 per token) reads 16,384 tokens a step. The
text is that of the Python installation (`benchmarks/text.py`); its tokens are those of a byte-level
BPE of 32,768 ids that is trained on it. All runs of a seed read the same batches. Recipes differ in
`RECIPES` alone. "transformers" is the stock Qwen3-MoE class with its own initialisation and
auxiliary loss, in autocast, and torch's AdamW at the rate and decay of Qwen3-MoE in torchtitan.

Legend: S steps, B sequences, T tokens of a sequence, N tokens of the text, L MoE layers, E experts.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records import Environment, results_path
from benchmarks.text import list_installed_folders, read_text
from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.models import Decoder, DecoderConfig
from moecore.recipes.decoder_config import choose_balance
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.schedule import LearningRateSchedule

STOCK = "transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Options of a run; by default those of `moecore pretrain`.

    Attributes:
        embedding_std: of the initial embeddings.
        balance: of the MoE layers.
        moe: other fields of `MoEConfig`.
        optimizer: fields of `OptimizerConfig`.
        schedule: fields of `LearningRateSchedule`.
    """

    embedding_std: float = 1.0
    balance: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: {"router_lr_factor": 0.1})
    schedule: dict[str, Any] = field(default_factory=lambda: {"min_warmup_steps": 100})


BIAS: dict[str, Any] = {"score_function": "sigmoid", "expert_bias": True}
RECIPES: dict[str, Variant] = {
    "default": Variant(),
    "default-bias": Variant(moe=BIAS),
    "sign-0.001": Variant(moe=BIAS, balance={"bias_update_rate": 1e-3}),
    "sign-0.01": Variant(moe=BIAS, balance={"bias_update_rate": 1e-2}),
    "router-rate-1": Variant(optimizer={}),
    **{f"loss-{c}": Variant(balance={"global_batch_coef": c}) for c in (0.01, 0.1, 0.2)},
    "bias-loss": Variant(
        moe=BIAS,
        balance={"bias_update": "quantile", "bias_update_rate": 1.0, "global_batch_coef": 0.05},
    ),
    "embedding-0.02": Variant(embedding_std=0.02),
    "rate-6e-4": Variant(optimizer={"lr": 6e-4, "router_lr_factor": 0.1}),
    "warmup-15": Variant(schedule={"warmup_steps": 15}),
    "before": Variant(
        embedding_std=0.02,
        balance={"micro_batch_coef": 1e-3},
        optimizer={"lr": 6e-4},
        schedule={"warmup_steps": 15},
    ),
    STOCK: Variant(
        optimizer={"lr": 3e-4},
        schedule={"lr_schedule": "linear", "warmup_steps": 60, "min_lr_ratio": 0.0},
    ),
}
STOCK_LOSS = 1e-3  # router_aux_loss_coef of Qwen3-MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of the decoder, of the batch, of a piece of text, and of all text in bytes."""

    config: DecoderConfig
    batch_size: int
    seq_len: int
    piece: int
    text_bytes: int


def make_size(vocab_size: int, dim: int, hidden_dim: int, head_dim: int, **fields: Any) -> Size:
    layers, experts, top_k = (fields.pop(name) for name in ("layers", "experts", "top_k"))
    moe = MoEConfig(dim=dim, hidden_dim=hidden_dim, num_experts=experts, top_k=top_k)
    heads = dim // head_dim
    config = DecoderConfig(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        qk_norm="head",
        moe=moe,
    )
    return Size(config=config, **fields)


SIZES = {
    "cuda": make_size(
        32768, 2048, 768, 128, layers=8, experts=32, top_k=8,
        batch_size=8, seq_len=2048,
        piece=64, text_bytes=24 << 20,
    ),
    "cpu": make_size(
        512, 64, 32, 16, layers=2, experts=8, top_k=2,
        batch_size=4, seq_len=64,
        piece=16, text_bytes=2 << 20,
    ),
}  # fmt: skip


def encode_text(size: Size) -> Tensor:
    """Return the token ids of the text; int32 [N]."""
    from tokenizers import ByteLevelBPETokenizer

    text = read_text(list_installed_folders(), most_bytes=size.text_bytes).train_N
    words = bytes(text.tolist()).decode(errors="replace")
    pieces = [words[i : i + 20000] for i in range(0, len(words), 20000)]
    tokenizer = ByteLevelBPETokenizer()
    vocab_size = size.config.vocab_size
    tokenizer.train_from_iterator(pieces, vocab_size=vocab_size, show_progress=False)
    ids = [token for code in tokenizer.encode_batch(pieces) for token in code.ids]
    return torch.tensor(ids, dtype=torch.int32)


def iterate_batches(
    tokens_N: Tensor, size: Size, *, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens_BT and labels_BT of each step; a row has pieces from many places in the text."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(size.piece)
    num_pieces = -(-(size.seq_len + 1) // size.piece)
    for _ in range(steps):
        shape = (size.batch_size, num_pieces, 1)
        starts = torch.randint(len(tokens_N) - size.piece, shape, generator=generator)
        rows_BT = tokens_N[(starts + places).to(tokens_N.device)].long().flatten(1)
        yield rows_BT[:, : size.seq_len].contiguous(), rows_BT[:, 1 : size.seq_len + 1].contiguous()


class NativeRun:
    """moecore's decoder with moecore's optimizer."""

    def __init__(self, size: Size, variant: Variant, seed: int, device: str) -> None:
        moe = size.config.moe
        assert moe is not None
        moe = replace(moe, **variant.moe)
        balance = BalanceConfig(**(variant.balance or choose_balance(moe)))
        moe = replace(moe, balance=balance)
        model = Decoder(replace(size.config, moe=moe), device="meta")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        fsdp = FSDPOptions(param_dtype=dtype, dense_strategy="optim")
        parallelize_moe(model, build_meshes(ParallelConfig(), device), fsdp=fsdp)
        model.to_empty(device=device)
        model.init_weights(seed, embedding_std=variant.embedding_std)
        self.optimizers = OptimizerConfig(**variant.optimizer).build_optimizers(model)
        self.model, self.owner = model, TrainStep(model, self.optimizers, max_norm=1.0)

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step; return loss, gradient norm and tokens of each expert [L, E]."""
        with self.owner.micro_batch():
            loss = self.model(tokens_BT, labels_BT)
            loss.backward()
        result = self.owner.finish()
        counts = torch.stack(list(result.metrics.tokens_per_expert.values()))
        return loss.detach(), torch.tensor(float(result.norm)), counts


class StockRun:
    """transformers' model with torch's AdamW."""

    def __init__(self, size: Size, variant: Variant, seed: int, device: str) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes, moe = size.config, size.config.moe
        assert moe is not None
        config = Qwen3MoeConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.dim,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            moe_intermediate_size=moe.hidden_dim,
            num_experts=moe.num_experts,
            num_experts_per_tok=moe.top_k,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=STOCK_LOSS,
            tie_word_embeddings=False,
            experts_implementation="grouped_mm",
        )
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = Qwen3MoeForCausalLM(config)
        self.device, self.num_experts = device, moe.num_experts
        is_matrix = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": is_matrix}, {"params": others, "weight_decay": 0.0}]
        self.optimizers = [
            torch.optim.AdamW(
                groups, lr=variant.optimizer["lr"], betas=(0.9, 0.95), weight_decay=0.1
            )
        ]

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step; return loss, gradient norm and tokens of each expert [L, E]."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            out = self.model(tokens_BT, labels=labels_BT, shift_labels=labels_BT)
        out.loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        top_k = self.model.config.num_experts_per_tok
        chosen = [logits.topk(top_k).indices.flatten() for logits in out.router_logits]
        counts = torch.stack([torch.bincount(ids, minlength=self.num_experts) for ids in chosen])
        loss = out.loss - self.model.router_aux_loss_coef * out.aux_loss
        return loss.detach(), norm.detach(), counts


def train(
    name: str, size: Size, tokens_N: Tensor, *, steps: int, seed: int, device: str
) -> dict[str, Any]:
    """Return the curves of one run."""
    variant = RECIPES[name]
    run: Any = (StockRun if name.startswith(STOCK) else NativeRun)(size, variant, seed, device)
    schedule = LearningRateSchedule(**variant.schedule)
    peaks = [[group["lr"] for group in o.param_groups] for o in run.optimizers]
    losses, norms, loads, least = [], [], [], []
    begin = time.perf_counter()
    for step, batch in enumerate(iterate_batches(tokens_N, size, steps=steps, seed=seed), 1):
        factor = schedule.compute_factor(step, num_steps=steps, count_steps=int)
        for optimizer, rates in zip(run.optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor * group.get("lr_factor", 1.0)
        loss, norm, counts_LE = run.step(*batch)
        losses.append(loss.float())
        norms.append(norm.float())
        loads.append(compute_loads(counts_LE))
        least.append(counts_LE.amin())
    curves = {
        "losses": torch.stack(losses).tolist(),
        "norms": torch.stack(norms).tolist(),
        "worst_load": torch.stack(loads)[:, 0].tolist(),
        "mean_load": torch.stack(loads)[:, 1].tolist(),
        "least_tokens": torch.stack(least).tolist(),
    }
    return {"recipe": name, "seed": seed, "seconds": time.perf_counter() - begin, **curves}


def compute_loads(counts_LE: Tensor) -> Tensor:
    """Return the busiest expert's load over the mean: of the worst layer, and mean over layers."""
    loads_L = counts_LE.double().amax(1) / counts_LE.double().mean(1).clamp(min=1e-9)
    return torch.stack([loads_L.max(), loads_L.mean()])


def summarize(run: dict[str, Any]) -> str:
    """Return a line with the values that defaults are judged by."""
    losses, loads = run["losses"], run["worst_load"]
    jump = max((b - min(losses[:i]) for i, b in enumerate(losses) if i >= 5), default=0.0)
    window = losses[-20:]
    at = {step: max(loads[step - 5 : step + 5]) for step in (50, 200) if step < len(loads)}
    idle = sum(least == 0 for least in run["least_tokens"][50:])
    norms = " ".join(f"{n:.1f}" for n in run["norms"][:4])
    shown = " ".join(f"{load:.2f}@{step}" for step, load in at.items())
    return (
        f"{run['recipe']:24} seed {run['seed']} loss {sum(window) / len(window):.3f} "
        f"jump {jump:.2f} load {shown} last {loads[-1]:.2f} worst after 50 "
        f"{max(loads[50:], default=0):.2f} idle {idle} norms {norms} {run['seconds']:.0f} s"
    )


def main() -> None:
    """Train all recipes with all seeds, print a line for each, and write the curves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda", choices=SIZES)
    parser.add_argument("--json", type=results_path, help="file of the curves")
    args = parser.parse_args()
    size = SIZES[args.device]
    tokens_N = encode_text(size).to(args.device)
    print(f"{len(tokens_N)} tokens", flush=True)
    runs = []
    for seed in args.seeds:
        for name in args.recipes:
            steps = {"steps": args.steps, "seed": seed, "device": args.device}
            runs.append(train(name, size, tokens_N, **steps))
            print(summarize(runs[-1]), flush=True)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if args.json:
                record = {"environment": asdict(Environment.here()), "runs": runs}
                args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
