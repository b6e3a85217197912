r"""Reinforcement learning on one GPU: log-probabilities, GRPO, weight export and offload.

    python -m benchmarks.bench_rl --results benchmarks/results/rl
    python -m benchmarks.bench_rl --preset tiny-qwen3 --layers 2 --sequences 4 --seq-len 32 \
        --prompt 4 --max-tokens 64 --plain-tokens 64 --device cpu

A transformers Qwen3-MoE model of the preset's sizes with random weights, in bf16 (fp32 on CPUs),
and rollouts of random tokens. All sequences have one length, so neither variant has padding.

    moecore             `Engine`: sequences packed into rows of at most --max-tokens
    moecore+invariant   the same with batch_invariant=True
    transformers        the stock model with the same weights, SDPA without masks (causal, the flash
                        kernel on GPUs) and grouped_mm experts: log_softmax of fp32 logits and a
                        gather, rows of [sequences, tokens] in micro-batches of at most
                        --plain-tokens, whose logits must fit

None is compiled. They alternate within every round. "rl_log_probs" is a forward without gradients,
"rl_grpo" forward and backward of GRPO. Log-probabilities and losses of the two must agree, else no
row is written. Then, only for moecore, after a step of AdamW (bf16 moments):

    rl_weights      a pass of `Engine.weights`; the baseline copies all parameters on the device
    rl_offload      `Engine.offload("all")`; the baseline copies to pinned host memory
    rl_onload       `Engine.onload("all")`; the baseline copies from it

"left" is the device memory that the driver counts while everything is offloaded, which includes the
CUDA context and other programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.hf_configs import make_hf_config
from benchmarks.records import append_rows, results_path
from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.families import use_causal_attention
from moecore.io import init_hf
from moecore.models import preset
from moecore.rl import GRPO, Engine, Rollouts
from moecore.train import AdamW

Row = dict[str, Any]
APART = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # most mean difference of log-probabilities
COPY_BYTES = 1 << 30
REPEATS = 3  # of offload and onload
KL_COEF = 0.04  # of GRPO()


class StockModel:
    """The transformers model, with log-probabilities and GRPO in plain PyTorch.

    Args:
        args: of the command line.
        rollouts: with all fields that GRPO needs.
    """

    def __init__(self, args: argparse.Namespace, rollouts: Rollouts) -> None:
        self.model = make_stock_model(args)
        self.rows = max(1, args.plain_tokens // args.seq_len)
        self.rollouts = rollouts

    def log_probs(self) -> Tensor:
        """Return log-probabilities of all tokens except each sequence's first, [n, T - 1]."""
        with torch.no_grad():
            return torch.cat([self._of(slice(i, i + self.rows)) for i in self._starts()])

    def grpo(self) -> Tensor:
        """Run forward and backward of GRPO and return the loss."""
        loss = torch.zeros((), device=self.rollouts.tokens_N.device)
        for start in self._starts():
            part = slice(start, start + self.rows)
            old, ref, advantages, mask = (
                self._by_sequence(x)[part, 1:]
                for x in (
                    self.rollouts.old_log_probs_N,
                    self.rollouts.ref_log_probs_N,
                    self.rollouts.advantages_N,
                    self.rollouts.response_mask_N,
                )
            )
            log_probs = self._of(part)
            ratio, log_r = (log_probs - old).exp(), ref - log_probs
            gain = torch.min(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
            tokens = (KL_COEF * (log_r.exp() - 1 - log_r) - gain).where(mask, 0)
            own = (tokens.sum(1) / mask.sum(1)).sum() / self.rollouts.num_sequences
            own.backward()
            loss += own.detach()
        return loss

    def prepare(self) -> None:
        """Drop gradients."""
        self.model.zero_grad(set_to_none=True)

    def _starts(self) -> range:
        return range(0, self.rollouts.num_sequences, self.rows)

    def _by_sequence(self, values_N: Any) -> Tensor:
        return values_N.unflatten(0, (self.rollouts.num_sequences, -1))

    def _of(self, part: slice) -> Tensor:
        ids = self._by_sequence(self.rollouts.tokens_N)[part]
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]


def main() -> int:
    """Measure, print and record."""
    args = parse_arguments()
    device = torch.device(args.device)
    engine = build(args, device)
    rollouts = make_rollouts(args, engine, device)
    plain = StockModel(args, rollouts)
    problem = describe_difference(engine, plain, rollouts)
    if problem:
        print(f"bench_rl: error: {problem}: no numbers", file=sys.stderr)
        return 1
    rows = measure_algorithms(args, engine, plain, rollouts)
    del plain
    release(device)
    engine.forward_backward(rollouts, GRPO())
    engine.step.finish()
    rows += [*measure_weights(engine, device), *measure_offload(engine, device)]
    rows = [describe(args) | row for row in rows]
    for row in rows:
        print(format_row(row), flush=True)
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_rl", rows)
    engine.step.close()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b", help="a Qwen3-MoE one, whose sizes the model has")
    add("--layers", type=int, default=6, help="cut it to so many")
    add("--sequences", type=int, default=16)
    add("--seq-len", type=int, default=2048, help="tokens of a prompt and its response")
    add("--prompt", type=int, default=128, help="tokens of a prompt")
    add("--max-tokens", type=int, default=32768, help="of a row of moecore's")
    add("--plain-tokens", type=int, default=8192, help="of a micro-batch of transformers'")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def describe(args: argparse.Namespace) -> Row:
    """Return the fields that distinguish two runs."""
    names = ("preset", "layers", "sequences", "seq_len", "prompt", "max_tokens", "plain_tokens")
    return {name: getattr(args, name) for name in names}


def make_stock_model(args: argparse.Namespace) -> Any:
    """Return the transformers model with random weights, the same in every call."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_hf_config(args.preset, args.layers),
            dtype=choose_dtype(args),
            attn_implementation="sdpa",
        )
    model.to_empty(device=args.device)
    init_hf(model)
    return model.train()


def choose_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype of weights and products."""
    return torch.float32 if args.device == "cpu" else torch.bfloat16


def build(args: argparse.Namespace, device: torch.device) -> Engine:
    """Return an engine of the model after parallelize_moe."""
    model = make_stock_model(args)
    use_causal_attention(model)
    parallelize_moe(model, build_meshes(ParallelConfig(), device.type))
    optimizer = AdamW(
        model.parameters(),
        lr=1e-6,
        moment_dtype=torch.bfloat16,
        master_remainder=choose_dtype(args) == torch.bfloat16,
    )
    return Engine(model, TrainStep(model, optimizer, max_norm=1.0), max_tokens=args.max_tokens)


def make_rollouts(args: argparse.Namespace, engine: Engine, device: torch.device) -> Rollouts:
    """Return random rollouts with old and reference log-probabilities near the policy's."""
    g = torch.Generator().manual_seed(0)
    vocabulary = preset(args.preset).vocab_size
    ids = torch.randint(0, vocabulary, (args.sequences, args.seq_len), generator=g)
    made = Rollouts.of(list(ids[:, : args.prompt]), list(ids[:, args.prompt :]))
    found_N = engine.log_probs(made).log_probs_N
    noise_N = torch.randn(len(found_N), generator=g).to(device) / 10
    return made.replace(
        tokens_N=made.tokens_N.to(device),
        response_mask_N=made.response_mask_N.to(device),
        old_log_probs_N=found_N + noise_N,
        ref_log_probs_N=found_N - noise_N,
        advantages_N=made.expand_to_tokens(torch.randn(args.sequences, generator=g)).to(device),
    )


def describe_difference(engine: Engine, plain: StockModel, rollouts: Rollouts) -> str | None:
    """Return why log-probabilities or losses of the two differ, or None if they agree."""
    mask_N = rollouts.response_mask_N
    mine_N = engine.log_probs(rollouts).log_probs_N[mask_N]
    theirs_N = F.pad(plain.log_probs(), (1, 0)).flatten()[mask_N]
    loss = engine.forward_backward(rollouts, GRPO()).loss
    engine.step.drop()
    apart = float((mine_N - theirs_N).abs().mean()), float((loss - plain.grpo()).abs())
    plain.prepare()
    limit = APART[plain.model.dtype]
    if max(apart) > limit:
        return f"log-probabilities and losses differ by {apart[0]:.3g} and {apart[1]:.3g}"
    return None


def measure_algorithms(
    args: argparse.Namespace, engine: Engine, plain: StockModel, rollouts: Rollouts
) -> list[Row]:
    """Return a row per op and variant."""
    invariant = Engine(engine.model, engine.step, max_tokens=args.max_tokens, batch_invariant=True)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "rl_log_probs": {
            "moecore": lambda: engine.log_probs(rollouts),
            "moecore+invariant": lambda: invariant.log_probs(rollouts),
            "transformers": plain.log_probs,
        },
        "rl_grpo": {
            "moecore": lambda: engine.forward_backward(rollouts, GRPO()),
            "moecore+invariant": lambda: invariant.forward_backward(rollouts, GRPO()),
            "transformers": plain.grpo,
        },
    }

    def prepare(_: str) -> None:
        engine.step.drop()
        plain.prepare()

    device, rows = torch.device(args.device), []
    for op, variants in calls.items():
        timings = harness.time_variants(
            variants, device=device, effort=choose_effort(device), prepare=prepare
        )
        for name, timing in timings.items():
            prepare(name)
            peak = harness.measure_peak(variants[name], device=device)
            rate = args.sequences * args.seq_len / timing.ms * 1e3
            row = {"op": op, "variant": name, "tokens_per_second": rate, "peak_bytes": peak}
            row |= {"ratio": timing.ms / timings["transformers"].ms}
            rows.append(row | dataclasses.asdict(timing))
        prepare("")
    return rows


def measure_weights(engine: Engine, device: torch.device) -> list[Row]:
    """Return the row of a pass of `Engine.weights`, against copies of all parameters."""
    stream = engine.weights()
    params = [get_local_tensor(p.detach()) for p in engine.model.parameters()]
    place = torch.empty(max(p.nbytes for p in params), dtype=torch.uint8, device=device)

    def copy() -> None:
        for p in params:
            place[: p.nbytes].view(p.dtype).view(p.shape).copy_(p)

    sizes = [tensor.nbytes for _, tensor in stream]
    calls: dict[str, Callable[[], Any]] = {"moecore": lambda: [None for _ in stream], "copy": copy}
    timings = harness.time_variants(calls, device=device, effort=choose_effort(device))
    row = make_move_row("rl_weights", sum(sizes), timings["moecore"].ms)
    copied = sum(p.nbytes for p in params)
    return [
        row | make_copy_fields(row, copied / timings["copy"].ms / 1e6) | {"tensors": len(sizes)}
    ]


def measure_offload(engine: Engine, device: torch.device) -> list[Row]:
    """Return the rows of offload and onload, against copies of pinned memory."""
    states = [s for o in engine.step.optimizers for s in o.state.values()]
    tensors = [*engine.model.parameters(), *(t for s in states for t in s.values())]
    num_bytes = sum(t.nbytes for t in tensors if isinstance(t, Tensor))
    before, times = get_used_memory(device), []
    for _ in range(1 + REPEATS):  # the first one pins host memory
        off = time_call(lambda: engine.offload("all"), device)
        left = get_used_memory(device)
        times.append((off, time_call(lambda: engine.onload("all"), device)))
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    copies = (lambda: on_host.copy_(on_device), lambda: on_device.copy_(on_host))
    rows = []
    for i, op in enumerate(("rl_offload", "rl_onload")):
        row = make_move_row(op, num_bytes, 1e3 * sorted(t[i] for t in times[1:])[REPEATS // 2])
        copy_s = min(time_call(copies[i], device) for _ in range(1 + REPEATS))
        row |= make_copy_fields(row, COPY_BYTES / copy_s / 1e9)
        if op == "rl_offload":
            row |= {"first_ms": 1e3 * times[0][0], "before_bytes": before, "left_bytes": left}
        rows.append(row)
    return rows


def make_move_row(op: str, num_bytes: int, ms: float) -> Row:
    """Return the row of a move of `num_bytes` bytes."""
    return {"op": op, "variant": "moecore", "ms": ms, "bytes": num_bytes} | {
        "gbps": num_bytes / ms / 1e6
    }


def make_copy_fields(row: Row, copy_gbps: float) -> Row:
    """Return the fields for the rate of plain copies and the row's share of that rate."""
    return {"copy_gbps": copy_gbps, "share": row["gbps"] / copy_gbps}


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, including its work on the device."""
    harness.synchronize(device)
    start = time.perf_counter()
    call()
    harness.synchronize(device)
    return time.perf_counter() - start


def get_used_memory(device: torch.device) -> int | None:
    """Return the device memory in use, as counted by the driver; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def release(device: torch.device) -> None:
    """Return cached memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def choose_effort(device: torch.device) -> harness.Effort:
    """Return the effort of measurements on the device."""
    return harness.QUICK if device.type == "cuda" else harness.SMOKE


def format_row(row: Row) -> str:
    """Return the row as a line."""
    start = f"{row['op']:<13} {row['variant']:<18}{row['ms']:>9.1f} ms"
    if "tokens_per_second" in row:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
        spread = f"({row['p20']:.1f}-{row['p80']:.1f})"
        rate = f"{row['tokens_per_second']:>9.0f} tokens/s"
        return f"{start} {spread} {rate}  x{row['ratio']:.3f}  peak {peak}"
    line = (
        f"{start}  {row['bytes'] / 1e9:.3f} GB at {row['gbps']:.1f} GB/s, {row['share']:.2f} of "
        f"copies' {row['copy_gbps']:.1f} GB/s"
    )
    if row.get("left_bytes") is not None:
        before, left = (row[name] / 2**30 for name in ("before_bytes", "left_bytes"))
        line += f", {left:.2f} GiB left of {before:.2f}, the first {row['first_ms']:.0f} ms"
    return line


if __name__ == "__main__":
    sys.exit(main())
