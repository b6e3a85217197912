r"""A sparse attention layer of DeepSeek-V3.2's size, forward and backward, in milliseconds and GiB.

    python -m benchmarks.bench_sparse_attention

    sparse             after `use_causal_attention`: chunks of queries, and keys selected for each
    sparse, learning   the same with the loss of its indexer
    all, learning      the warm-up of the indexer: attention to all keys, in chunks
    eager              transformers' own, with scores and a mask of all pairs
    dense              DeepSeek-V3's layer, which has no indexer, by torch's fused attention

One row of one document. Calls take turns. A time is the median over rounds; a peak is what a call
allocates beside weights and inputs. A variant that does not fit is measured at half the tokens, and
so on, and its row says at how many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records import append_rows, results_path
from moecore.base.options.indexer import IndexerConfig
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
VARIANTS = ("sparse", "sparse, learning", "all, learning", "eager", "dense")
Call = Callable[[], Any]


def main() -> int:
    """Measure and report."""
    args = parse()
    device = torch.device(args.device)
    layers = {name: make_layer(name, args.small).to(device) for name in args.variants}
    if device.type == "cuda":
        layers = {name: layer.bfloat16() for name, layer in layers.items()}
    for tokens in args.tokens:
        calls = {name: fitting(layer, name, tokens, device) for name, layer in layers.items()}
        times = time_calls({name: call for name, (_, call) in calls.items()}, args.rounds, device)
        rows = []
        for name, (fits, call) in calls.items():
            row = dict(op="sparse_attention", shape=f"{fits} tokens", backend=name)
            rows.append(row | dict(ms=round(times[name], 3), gib=peak_of(call, device)))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if args.results is not None:
            append_rows(args.results, MODULE, rows, num_gpus=1)
    return 0


def parse() -> argparse.Namespace:
    """Return the arguments."""
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
    """Return the layer of a variant, random."""
    from transformers import DeepseekV3Config, DeepseekV32Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    sizes: dict[str, Any] = SMALL if small else {}
    torch.manual_seed(0)
    if name == "dense":
        config = DeepseekV3Config(**sizes)
        config._attn_implementation = "sdpa"
        return DeepseekV3Attention(config, 0)
    config = DeepseekV32Config(**sizes, **(SMALL_INDEXER if small else {}))
    config._attn_implementation = "eager"
    layer = DeepseekV32Attention(config, 0)
    if name != "eager":
        use_sparse_attention(layer)
    if name.endswith("learning"):
        stage = "warm_up" if name.startswith("all") else "sparse"
        add_indexer_losses(layer, IndexerConfig(stage=stage))  # type: ignore[arg-type]
    return layer


def fitting(layer: nn.Module, name: str, tokens: int, device: torch.device) -> tuple[int, Call]:
    """Return the largest of `tokens`, a half, a quarter, ... whose call fits, and the call."""
    while True:
        call = call_of(layer, name, tokens, device)
        try:
            call()
            return tokens, call
        except torch.OutOfMemoryError:
            if tokens < 1024:
                raise
        del call
        torch.cuda.empty_cache()
        tokens //= 2


def call_of(layer: Any, name: str, tokens: int, device: torch.device) -> Call:
    """Return a forward and backward of a layer."""
    dtype = layer.o_proj.weight.dtype
    g = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, tokens, layer.o_proj.out_features, generator=g, device=device).to(dtype)
    r = layer.qk_rope_head_dim
    frequencies = 10000.0 ** -(torch.arange(0, r, 2, device=device) / r)
    angles = torch.arange(tokens, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[None]
    turns = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = list(layer.parameters())

    def call() -> None:
        leaf = x.detach().requires_grad_()
        y = layer(leaf, position_embeddings=turns, attention_mask=mask_of(name, leaf))[0]
        torch.autograd.grad(y, [leaf, *weights], x, allow_unused=True)

    return call


def mask_of(name: str, x_1TD: Tensor) -> Tensor | None:
    """Return the mask that transformers makes for its own attention."""
    if name != "eager":
        return None
    tokens = x_1TD.shape[1]
    least = torch.finfo(x_1TD.dtype).min
    return x_1TD.new_full((tokens, tokens), least).triu_(1)[None, None]


def time_calls(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Return milliseconds of each call; they take turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + rounds):
        for name, call in calls.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_of(call: Call, device: torch.device) -> float | None:
    """Return the GiB that a call allocates at most; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait(device)
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
