"""`moecore measure`: the seconds of operations on this machine, as a `CostTable`.

    moecore measure --out table.json
    torchrun --nproc-per-node 8 -m moecore measure --out table.json      collectives too

Each operation is warmed up and then timed in rounds. A read of more bytes than the L2 cache holds
precedes each round, so the host launches the call in time. The result is the median of the rounds,
and for collectives the largest median of all ranks.

Legend: M, N, K of a product, R rows of E experts, B rows of T tokens with H heads of d dims.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import grouped_mm, rms_norm

from moecore.base.torch_private import foreach_norm
from moecore.kernels.attention import AttentionMask, attention_backward, attention_forward, cudnn
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.cross_entropy import cross_entropy_
from moecore.kernels.grouped import cooperative, pingpong, wgrad
from moecore.kernels.rows import row_tiles
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.models import preset
from moecore.parallel.mesh import read_launcher_number
from moecore.planning.costs import CostTable, Point
from moecore.planning.dry_run import dry_run
from moecore.planning.gpus import GPUS, NODE, find_gpu_name
from moecore.planning.record import SUMS, Work
from moecore.planning.run import TrainingRun, build_model, build_optimizer, enter_run_world
from moecore.train.optim.adamw import AdamW
from moecore.train.step import TrainStep

Call = Callable[[], Any]
WARM_UP_S, ROUNDS, MAX_CALLS = 0.3, 15, 1000
STEPS = 3  # warm-up steps before the host's time per launch is measured
FLUSH_BYTES = 1 << 30
VOCAB = 151936
SWIGLU = ActivationOptions(kind="swiglu")
CUDNN, FLASH = "aten._scaled_dot_product_cudnn_attention", "aten._flash_attention"


class Sizes(NamedTuple):
    """The tensor sizes of the operations that a measurement times."""

    products: tuple[tuple[int, int, int], ...]  # M, N, K
    grouped: tuple[tuple[int, int, int, int], ...]  # E, R, D, F of an MoE layer
    attention: tuple[tuple[int, int, int, int, int], ...]  # B, H, T, d, v
    num_bytes: int  # of a tensor that is copied, stepped by the optimizer, or sent at most


FULL = Sizes(
    products=(
        *((1024, 2048, 2048), (4096, 4096, 2048), (16384, 4096, 2048), (16384, 2048, 4096)),
        *((16384, 4096, 4096), (16384, 7168, 7168), (4096, 2048, 16384), (2048, 151936, 2048)),
        (8192, 8192, 8192),
    ),
    grouped=(
        *((16, 131072, 2048, 768), (128, 262144, 2048, 768), (32, 131072, 7168, 2048)),
        *((8, 32768, 4096, 14336), (128, 196608, 1536, 256)),
    ),
    attention=(
        *((4, 32, 4096, 128, 128), (1, 32, 16384, 128, 128), (1, 32, 65536, 128, 128)),
        *((2, 128, 4096, 192, 128), (1, 32, 16384, 192, 128)),
    ),
    num_bytes=1 << 30,
)


# Of the kernels and units of a large model, with little to compute.
SMALL_MODEL = replace(preset("olmoe-1b-7b"), num_layers=2, vocab_size=4096)
QUEUED = TrainingRun(model=SMALL_MODEL, num_gpus=1, seq_len=256)


def run_measure(args: Any) -> int:
    """Time operations, write a `CostTable` to `args.out` on rank 0, and return 0."""
    if not torch.cuda.is_available():
        raise ValueError("device (cpu) must be a GPU: run `moecore measure` where torch sees one")
    device = torch.device("cuda", read_launcher_number("LOCAL_RANK", 0, min_value=0))
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    gpu = find_gpu_name(name)
    if gpu is None:
        raise ValueError(f"device ({name}) must be one of {', '.join(GPUS)}: use one of these")
    host = measure_host_seconds_per_launch(QUEUED, device)
    calls = [list_gpu_calls(device, FULL)]
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl", device_id=device)
        # First, because it refuses several nodes.
        calls.insert(0, list_collective_calls(device, FULL.num_bytes))
    points = [point for operations in calls for point in measure_calls(operations, device)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        table = CostTable.of(gpu).extend(points, f"measured on {name}, torch {torch.__version__}")
        replace(table, host_seconds=host).write(args.out)
        print(f"{len(points)} operations of {gpu} -> {args.out}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def measure_host_seconds_per_launch(run: TrainingRun, device: torch.device) -> float:
    """Train `run` with random weights on `device`; return the host's median seconds per launch."""
    times = []
    with enter_run_world(run):
        model = build_model(run, device.type)
        model.to_empty(device=device)
        model.init_weights()
        step = TrainStep(model, build_optimizer(run, model), max_norm=1.0)
        tokens_BT = torch.randint(
            0, run.planned_model.vocab_size, (run.batch_size, run.seq_len), device=device
        )
        inputs = [{"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1)}]
        for _ in range(STEPS + ROUNDS):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            step.forward_backward(inputs)
            step.finish()
            times.append(time.perf_counter() - start)
    return float(f"{median(times[STEPS:]) / len(dry_run(run).queued):.6g}")


def measure_calls(calls: Iterable[tuple[Work, Call]], device: torch.device) -> Iterator[Point]:
    """Time each call, and yield its median seconds on the slowest rank as a `Point`. Collective."""
    flush = torch.ones(
        FLUSH_BYTES // 4 if device.type == "cuda" else 1, device=device, dtype=torch.float32
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    for work, call in calls:
        # The time of the slowest rank gives all ranks the same number of warm-up calls.
        first_seconds = _all_reduce_max_seconds(_time_call(call, flush, 3), device)
        _time_call(call, flush, min(MAX_CALLS, int(WARM_UP_S / first_seconds)))
        seconds = _all_reduce_max_seconds(_time_call(call, flush, ROUNDS), device)
        yield Point(work=work, seconds=float(f"{seconds:.6g}"), date=date)


def list_gpu_calls(device: torch.device, sizes: Sizes) -> Iterator[tuple[Work, Call]]:
    """Yield (work, launch function) of each operation; tensors are allocated when yielded."""
    for M, N, K in sizes.products:
        a, b = _make_random_tensor(device, M, K), _make_random_tensor(device, K, N)
        num_bytes = 2 * (M * K + K * N + M * N)
        work = Work("aten.mm", "product", 2 * M * N * K, num_bytes, (M, N, K), "bfloat16")
        yield work, lambda a=a, b=b: a @ b  # type: ignore[misc]
    for E, R, D, F in sizes.grouped:
        yield from _make_grouped_matmul_calls(device, E, R, D, F)
    for B, H, T, d, v in sizes.attention:
        yield from _make_attention_calls(device, B, H, T, d, v)
    yield from _make_memory_bound_calls(device, sizes)
    device_bytes = torch.empty(sizes.num_bytes, dtype=torch.uint8, device=device)
    host_bytes = torch.empty(
        sizes.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu"
    )
    for name, target, source in (
        ("copy to host", host_bytes, device_bytes),
        ("copy to device", device_bytes, host_bytes),
    ):
        work = Work(name, "copy", 0, sizes.num_bytes, (), "uint8")
        yield work, lambda t=target, s=source: t.copy_(s, non_blocking=True)  # type: ignore[misc]


def list_collective_calls(device: torch.device, num_bytes: int) -> Iterator[tuple[Work, Call]]:
    """Yield (work, launch function) of collectives over the ranks of one node.

    The largest tensor has about `num_bytes` bytes. ValueError unless one node has 2 to 8 ranks.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if not 2 <= ranks <= NODE or read_launcher_number("LOCAL_WORLD_SIZE", ranks) != ranks:
        raise ValueError(f"ranks ({ranks}) must be 2 to {NODE} of one node: start as many there")
    for shift in (10, 6, 2, 0):
        numel = (num_bytes >> shift) // (2 * ranks) * ranks
        full, part = _make_random_tensor(device, numel), _make_random_tensor(device, numel // ranks)
        other = torch.empty_like(full)
        traffic = 2 * (full.nbytes - part.nbytes)  # sent and received

        def work(name: str, times: int = 1, traffic: int = traffic) -> Work:
            return Work(name, "collective", 0, times * traffic, (ranks,), "bfloat16")

        def send_to_next_rank(other: Tensor = other, full: Tensor = full) -> None:
            to, source = (rank + 1) % ranks, (rank - 1) % ranks
            ops = [dist.P2POp(dist.isend, full, to), dist.P2POp(dist.irecv, other, source)]
            for request in dist.batch_isend_irecv(ops):
                request.wait()

        yield work("all_gather"), lambda w=full, p=part: dist.all_gather_into_tensor(w, p)  # type: ignore[misc]
        yield work("reduce_scatter"), lambda w=full, p=part: dist.reduce_scatter_tensor(p, w)  # type: ignore[misc]
        yield work("all_reduce", 2), lambda w=full: dist.all_reduce(w)  # type: ignore[misc]
        yield work("all_to_all"), lambda w=full, o=other: dist.all_to_all_single(o, w)  # type: ignore[misc]
        send = Work("send", "collective", 0, 2 * full.nbytes, (ranks,), "bfloat16")
        yield send, send_to_next_rank


def _make_grouped_matmul_calls(
    device: torch.device, E: int, R: int, D: int, F: int
) -> Iterator[tuple[Work, Call]]:
    """Yield (work, launch function) of grouped matmuls with R rows, model dim D, hidden dim F."""
    ends = (torch.arange(1, E + 1, device=device) * (R // E)).int()
    x_RD, h_RC, a_RF = (_make_random_tensor(device, R, n) for n in (D, 2 * F, F))
    w1_ECD, w2_EDF = _make_random_tensor(device, E, 2 * F, D), _make_random_tensor(device, E, D, F)

    def work(name: str, N: int, K: int) -> Work:
        num_bytes, shape = 2 * (R * (N + K) + E * N * K), (E, R, N, K)
        return Work(name, "grouped product", 2 * R * N * K, num_bytes, shape, "bfloat16")

    products = (  # fc1, fc2, and their input gradients
        (x_RD, w1_ECD.transpose(1, 2)),
        (a_RF, w2_EDF.transpose(1, 2)),
        (x_RD, w2_EDF),
        (h_RC, w1_ECD),
    )
    for a, b in products:
        shape = (b.shape[2], b.shape[1])
        yield work("aten._grouped_mm", *shape), lambda a=a, b=b: grouped_mm(a, b, offs=ends)  # type: ignore[misc]
    if not has_hopper_kernels(device):
        return
    tiles = row_tiles.map_row_tiles(ends, R)
    weights_R = torch.ones(R, device=device, dtype=torch.float32)
    name = "sm90_bf16_grouped_kernel"
    yield (
        work(name, 2 * F, D),
        lambda: cooperative.cooperative_activation(x_RD, w1_ECD, tiles, weights_R, SWIGLU),
    )
    for i in (1, 3):
        a, b = products[i]
        shape = (b.shape[2], b.shape[1])
        yield work(name, *shape), lambda a=a, b=b: cooperative.cooperative_gemm(a, b, tiles)  # type: ignore[misc]
    yield (
        work("sm90_bf16_grouped_nn_act_bwd_kernel", F, D),
        lambda: pingpong.pingpong_activation_bwd(
            x_RD, w2_EDF, tiles, h_RC, weights_R, ends, SWIGLU
        ),
    )
    name = "sm90_bf16_grouped_wgrad_kernel"
    yield work(name, 2 * F, D), lambda: wgrad.grouped_wgrad(h_RC, x_RD, ends)
    yield work(name, D, F), lambda: wgrad.grouped_wgrad(x_RD, a_RF, ends)
    for lhs, rhs in ((h_RC, x_RD), (x_RD, a_RF)):
        shape = (lhs.shape[1], rhs.shape[1])
        out = torch.zeros(E, *shape, device=device, dtype=torch.float32)
        sums_work = replace(work(name + SUMS, *shape), num_bytes=2 * R * sum(shape) + out.nbytes)
        yield sums_work, lambda a=lhs, b=rhs, out=out: wgrad.grouped_wgrad(a, b, ends, out=out)  # type: ignore[misc]


def _make_attention_calls(
    device: torch.device, B: int, H: int, T: int, d: int, v: int
) -> Iterator[tuple[Work, Call]]:
    """Yield (work, launch function) of attention: B rows, T tokens, H heads, d dims (values v)."""
    q, k, do, values = (_make_random_tensor(device, B, T, H, n) for n in (d, d, v, v))
    mask, scale = AttentionMask(causal=True), d**-0.5
    name = CUDNN if cudnn.find_problem(q, k, values, mask) is None else FLASH  # as on meta
    shape = (B, H, T, d, v)
    flops, num_bytes = B * H * T * T * (d + v), 4 * B * T * H * (d + v)
    forward = Work(name, "attention", flops, num_bytes, shape, "bfloat16")
    yield forward, lambda: attention_forward(q, k, values, mask, scale)
    o, lse = attention_forward(q, k, values, mask, scale)
    sizes = (flops * 5 // 2, 2 * num_bytes, shape)
    backward = Work(f"{name}_backward", "attention", *sizes, "bfloat16")
    yield backward, lambda: attention_backward(do, q, k, values, o, lse, mask, scale)


def _make_memory_bound_calls(device: torch.device, sizes: Sizes) -> Iterator[tuple[Work, Call]]:
    """Yield (work, launch function) of copies, row gathers, activation, norm, loss and AdamW."""

    def work(name: str, num_bytes: int, dtype: str = "bfloat16") -> Work:
        """Return the work of an operation that moves `num_bytes` bytes."""
        return Work(name, "rows", 0, num_bytes, (), dtype)

    source, K, F = _make_random_tensor(device, sizes.num_bytes // 2), 8, 768
    target = torch.empty_like(source)
    yield work("aten.copy_", 2 * source.nbytes), lambda: target.copy_(source)
    D = 2048
    S = max(1, sizes.num_bytes // (2 * K * D))
    x_SD, y_RD, h_RC = (
        _make_random_tensor(device, n, m) for n, m in ((S, D), (S * K, D), (S * K, 2 * F))
    )
    order_R = torch.randperm(S * K, device=device).int()
    slots_SK = torch.empty_like(order_R)
    slots_SK[order_R.long()] = torch.arange(S * K, device=device, dtype=torch.int32)
    indices = (order_R // K, slots_SK.view(S, K))
    traffic = x_SD.nbytes + y_RD.nbytes + order_R.nbytes
    yield work("gather_rows", traffic), lambda: gather_rows(x_SD, *indices)
    yield work("sum_rows", traffic), lambda: sum_rows(y_RD, *indices)
    weights_R = torch.ones(S * K, device=device, dtype=torch.float32)
    traffic = h_RC.nbytes * 3 // 2 + weights_R.nbytes
    activation = partial(weighted_activation, h_RC, weights_R, None, SWIGLU)
    yield work("weighted_activation", traffic), activation
    weight_D = torch.ones(D, device=device, dtype=torch.bfloat16, requires_grad=True)
    y_RD.requires_grad_()
    normed_RD = rms_norm(y_RD, (D,), weight_D)
    yield work("rms_norm_fwd", 2 * y_RD.nbytes), lambda: rms_norm(y_RD, (D,), weight_D)
    backward = partial(grad, normed_RD, (y_RD, weight_D), x_SD.repeat(K, 1), retain_graph=True)
    yield work("rms_norm_bwd", 3 * y_RD.nbytes), backward
    logits_CV = torch.zeros(
        max(1, sizes.num_bytes // (4 * VOCAB)), VOCAB, device=device, dtype=torch.float32
    )
    labels_C = torch.zeros(logits_CV.shape[0], device=device, dtype=torch.int64)
    traffic = logits_CV.nbytes * 3 // 2
    loss = partial(cross_entropy_, logits_CV, labels_C, torch.bfloat16)
    yield work("cross_entropy", traffic, "float32"), loss
    param = nn.Parameter(torch.zeros(sizes.num_bytes // 4, device=device, dtype=torch.float32))
    param.grad = gradient = torch.ones_like(param)
    optimizer = AdamW([param], lr=1e-4)
    yield work("foreach_norm", param.nbytes, "float32"), lambda: foreach_norm([gradient])
    yield work("adamw", 7 * param.nbytes, "float32"), optimizer.step


def _make_random_tensor(device: torch.device, *shape: int) -> Tensor:
    """Return bf16 normal values [shape]: a GPU takes longer for random values than for zeros."""
    numel, size = prod(shape), min(prod(shape), 1 << 24)  # more elements repeat, which saves time
    values = torch.randn(size, device=device, dtype=torch.float32).bfloat16()
    return values.repeat(-(-numel // max(1, size)))[:numel].view(shape)


def _time_call(call: Call, cache_flush: Tensor, num_rounds: int) -> float:
    """Return the median seconds of calls; reading `cache_flush` before each empties the L2."""
    times, spans = [], []
    for _ in range(num_rounds):
        cache_flush.sum()
        if cache_flush.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            spans.append((begin, end))
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    if spans:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in spans]
    return median(times) if times else 0.0


def _all_reduce_max_seconds(seconds: float, device: torch.device) -> float:
    """All-reduce `seconds` with MAX, and return the longest time of all ranks."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)
