"""A sparse attention layer of DeepSeek-V3.2 or V4, forward and backward, in milliseconds and GiB.

    python -m benchmarks.bench_sparse_attention
    torchrun --nproc-per-node 2 -m benchmarks.bench_sparse_attention --variants sparse

    sparse             after `use_causal_attention`: queries in chunks, each with selected keys
    sparse, FP8        the same with the indexer's scores in FP8
    sparse, learning   the first with the loss of its indexer
    all, learning      the warm-up of the indexer: attention to all keys, in chunks
    eager              transformers' own, with scores and a mask of all pairs
    dense              DeepSeek-V3's layer, which has no indexer, by torch's fused attention
    windows of 4       DeepSeek-V4's layer with a compressed key per 4 tokens and an indexer
    windows of 128     DeepSeek-V4's layer with a compressed key per 128 tokens

One row of one document. Under torchrun the variants before "eager" also run over context parallel
ranks, beside each GPU with the whole row. Calls alternate. A time is the median over rounds; a peak
is a call's memory besides weights and inputs. A variant that does not fit is measured with half the
tokens, or a quarter and so on, and its row has the number of tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bench_linear_attention import time_calls
from benchmarks.harness import synchronize
from benchmarks.records import append_rows, results_path
from moecore.attention.context_parallel.local_tokens import ContextParallel, LocalTokens
from moecore.attention.sequence import Sequence
from moecore.base.options.indexer import IndexerConfig
from moecore.families.transformers.compressed_attention import use_compressed_attention
from moecore.families.transformers.linear_attention import SEQUENCE
from moecore.families.transformers.sparse_attention import add_indexer_losses, use_sparse_attention

MODULE = "benchmarks.bench_sparse_attention"
SMALL = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
SMALL_INDEXER = dict(index_n_heads=4, index_head_dim=16, index_topk=16)
SMALL_V4 = dict(hidden_size=64, num_attention_heads=4, q_lora_rank=32, o_lora_rank=16)
WINDOWS = {
    "windows of 4": "compressed_sparse_attention",
    "windows of 128": "heavily_compressed_attention",
}
VARIANTS = (
    "sparse",
    "sparse, FP8",
    "sparse, learning",
    "all, learning",
    "eager",
    "dense",
    *WINDOWS,
)
Call = Callable[[], Any]


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    world, device = int(os.environ.get("WORLD_SIZE", "1")), torch.device(args.device)
    if world > 1:
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
    layers = {name: make_layer(name, args.small).to(device) for name in args.variants}
    if device.type == "cuda":
        layers = {name: layer.bfloat16() for name, layer in layers.items()}
    for tokens in args.tokens:
        calls = {
            name: find_fitting_call(layer, name, tokens, device) for name, layer in layers.items()
        }
        if world > 1:
            over_ranks = {
                f"{name}, over ranks": (tokens, make_call(layer, name, tokens, device, True))
                for name, layer in layers.items()
                if name not in ("eager", "dense", *WINDOWS)
            }
            calls |= over_ranks
        timed = {name: call for name, (_, call) in calls.items()}
        times = time_calls(timed, args.rounds, device, warm_up=1)
        rows = []
        for name, (fits, call) in calls.items():
            row = dict(op="sparse_attention", shape=f"{fits} tokens", backend=name)
            rows.append(row | dict(ms=round(times[name], 3), gib=measure_memory(call, device)))
            if world == 1 or dist.get_rank() == 0:
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if args.results is not None and (world == 1 or dist.get_rank() == 0):
            append_rows(args.results, MODULE, rows, num_gpus=world)
    if world > 1:
        dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192, 32768], help="of the row")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    add("--rounds", type=int, default=3)
    add("--small", action="store_true", help="four heads, for a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    return parser.parse_args()


def make_layer(name: str, small: bool) -> nn.Module:
    """Return the layer of a variant with random weights."""
    from transformers import DeepseekV3Config, DeepseekV32Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    sizes: dict[str, Any] = SMALL if small else {}
    torch.manual_seed(0)
    if name in WINDOWS:
        return make_compressed_layer(WINDOWS[name], small)
    if name == "dense":
        config = DeepseekV3Config(**sizes)
        config._attn_implementation = "sdpa"
        return DeepseekV3Attention(config, 0)
    config = DeepseekV32Config(**sizes, **(SMALL_INDEXER if small else {}))
    config._attn_implementation = "eager"
    layer = DeepseekV32Attention(config, 0)
    if name != "eager":
        use_sparse_attention(layer)
    if name == "sparse, FP8":
        add_indexer_losses(layer, IndexerConfig(stage="frozen", fp8_scores=True))
    if name.endswith("learning"):
        stage = "warm_up" if name.startswith("all") else "sparse"
        add_indexer_losses(layer, IndexerConfig(stage=stage))  # type: ignore[arg-type]
    return layer


def make_compressed_layer(layer_type: str, small: bool) -> nn.Module:
    """Return DeepSeek-V4's attention layer with random weights, and its rotary embedding in it."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

    config = DeepseekV4Config(**(SMALL_V4 if small else {}))
    config._attn_implementation = "eager"
    layer = stock.DeepseekV4Attention(config, config.layer_types.index(layer_type))
    use_compressed_attention(layer)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.02)
    layer.rotary = stock.DeepseekV4RotaryEmbedding(config)
    return layer


def find_fitting_call(
    layer: nn.Module, name: str, tokens: int, device: torch.device
) -> tuple[int, Call]:
    """Return the largest of `tokens`, `tokens` / 2, ... whose call fits in memory, and the call."""
    while True:
        call = make_call(layer, name, tokens, device)
        try:
            call()
            return tokens, call
        except torch.OutOfMemoryError:
            if tokens < 1024:
                raise
        del call
        torch.cuda.empty_cache()
        tokens //= 2


def make_call(
    layer: Any, name: str, tokens: int, device: torch.device, over_ranks: bool = False
) -> Call:
    """Return a call that runs forward and backward of the layer; `over_ranks`: collective."""
    weights, options = list(layer.parameters()), dict[str, Any]()
    dtype = weights[0].dtype
    g = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, tokens, layer.config.hidden_size, generator=g, device=device).to(dtype)
    places = torch.arange(tokens, device=device)
    if name in WINDOWS:
        options["position_ids"] = places[None]
        turns: Any = {
            kind: layer.rotary(x, position_ids=places[None], layer_type=kind)
            for kind in ("main", "compress")
        }
    else:
        r = layer.qk_rope_head_dim
        frequencies = 10000.0 ** -(torch.arange(0, r, 2, device=device) / r)
        angles = places[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[None]
        turns = angles.cos().to(dtype), angles.sin().to(dtype)
    if over_ranks:
        assert dist.group.WORLD is not None
        local = LocalTokens(ContextParallel(dist.group.WORLD), (1, tokens))
        x, options[SEQUENCE] = local.slice_local(x), Sequence(local_tokens=local)
        turns = local.slice_local(turns[0]), local.slice_local(turns[1])

    def call() -> None:
        leaf, mask = x.detach().requires_grad_(), make_mask(name, x)
        y = layer(leaf, position_embeddings=turns, attention_mask=mask, **options)[0]
        torch.autograd.grad(y, [leaf, *weights], x, allow_unused=True)

    return call


def make_mask(name: str, x_1TD: Tensor) -> Tensor | None:
    """Return the mask that transformers makes for its own attention."""
    if name != "eager":
        return None
    tokens = x_1TD.shape[1]
    least = torch.finfo(x_1TD.dtype).min
    return x_1TD.new_full((tokens, tokens), least).triu_(1)[None, None]


def measure_memory(call: Call, device: torch.device) -> float | None:
    """Return the peak memory of a call in GiB; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(device)
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


if __name__ == "__main__":
    raise SystemExit(main())
