"""Every kernel, as its operation launches it at real sizes, compiles for an H200 without one.

The interpreter accepts programs that the compiler refuses, and shows no register spills. Operations
run on CPU tensors with launches replaced by compilation; their values mean nothing here.
"""

import importlib
import itertools
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import moecore.kernels
from moecore.base.options.precision import Recipe
from moecore.kernels import adamw, cross_entropy, hyper_connections, momentum
from moecore.kernels.common import NVFP4_TRITON
from moecore.kernels.experts import contract, expert_mlp
from moecore.kernels.grouped import block_scaled, fp8, scaled, scaled_rows, wgrad
from moecore.kernels.invariant import product
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.kernels.routing import (
    balance,
    balance_loss,
    clones,
    counts,
    entropy,
    margins,
    route,
    router_logits,
)
from moecore.kernels.rows import (
    activation,
    cast,
    e4m3,
    four_bit,
    free_list,
    index,
    microscaled,
    microscaled_activation,
    microscaled_rows,
    pages,
    quantised,
    quantised_activation,
    record,
    row_tiles,
    scaling,
    shard_blocks,
    shard_matrices,
)
from moecore.kernels.rows import move as rows
from moecore.kernels.rows import packed as fp8_rows
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaled_cast import scaled_cast
from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.gathered import attend_to_selected, differentiate_selected
from moecore.kernels.sparse_attention.index import compute_span_scores, round_to_fp8, select_keys
from moecore.kernels.sparse_attention.keys import SpanOfKeys
from tests.helpers.grids import beside
from tests.kernels.choices import BASE
from tests.kernels.experts.test_expert_mlp import Sink
from tests.kernels.linear_attention.pieces import Pieces

triton = pytest.importorskip("triton")

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
T, D, F, E, K = 64, 2048, 768, 128, 8
MAX_SPILL_BYTES = 0
SHARED_MEMORY_BYTES = 232448  # of one program on Hopper; the compiler does not check it


@pytest.fixture(autouse=True)
def compiled(monkeypatch, request) -> Iterator[dict[str, Any]]:
    """Launches compile for sm_90, or a parameter, and are collected by kernel name and variant."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.jit import JITFunction

    arch = getattr(request, "param", 90)

    class OfflineDriver(CudaDriver):
        def __init__(self) -> None:
            pass

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return arch  # what is compiled for a device is not compiled again

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    kernels: dict[str, Any] = {}
    launch = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[f"{kernel.name} {kernel.hash[:8]}"] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    for module in pkgutil.walk_packages(moecore.kernels.__path__, "moecore.kernels."):
        loaded = importlib.import_module(module.name)
        for name in ("can_use_kernel", "has_hopper_kernels", "can_multiply_fp8"):
            if hasattr(loaded, name):
                monkeypatch.setattr(loaded, name, lambda *_: True)
    active = triton.runtime.driver
    monkeypatch.setattr(active, "_active", OfflineDriver())
    yield kernels


def dump(kernel: Any, folder: Any, option: str) -> str:
    """Return what cuobjdump prints about the machine code."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    return subprocess.run([tool, option, path], capture_output=True, text=True).stdout


def spilled_bytes(kernel: Any, folder: Any) -> int:
    """Local memory per thread: stack frame of the machine code."""
    usage = dump(kernel, folder, "--dump-resource-usage")
    return max(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


HIGH_WORD = re.compile(r"UIADD3\.X UR\d+, (UR\d+), (?:0x[48]0000|-0x[37]ffff)\w+, URZ")
WRITE = re.compile(r"(?:@\S+ )?(U\w+|R2UR|S2UR)(\S*) (?:UP\d, )*UR(\d+), (.*)")


def wrong_descriptors(machine_code: str) -> list[str]:
    """Return additions of the high word of a wgmma descriptor to another value than zero.

    ptxas 12.8 of Triton 3.6 did this in a forward of Kimi delta attention with 4 warps. Outputs
    were wrong on an H200, and a larger run ended with an illegal memory access. The last write in
    the order of the text counts.
    """
    values: dict[str, str] = {}
    wrong = []
    for line in re.findall(r"/\*[0-9a-f]{4,5}\*/ +([^;]+?) *;", machine_code):
        if (added := HIGH_WORD.match(line)) and values.get(added[1]) != "URZ":
            wrong.append(line)
        if write := WRITE.match(line):
            first = int(write[3])
            values[f"UR{first}"] = write[4] if write[1] == "UMOV" else write[1]
            if ".64" in write[2] or "WIDE" in write[2]:
                values[f"UR{first + 1}"] = write[1]
    return wrong


def dead_barriers(kernel: Any) -> set[str]:
    """Barriers that no partition uses: the compiler lets other buffers have their memory."""
    text = kernel.asm["ttgir"]
    captured = re.search(r"ttg\.warp_specialize\(([^)]*)\)", text)
    if captured is None:  # Triton's own pipelines invalidate their barriers
        return set()
    made = set(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*xi64", text))
    assert made, "a ring has barriers"
    return made - set(re.findall(r"%\w+", captured[1]))


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def run_route(function: str, groups: int = 1, group_experts: int = 2) -> None:
    logits, options = torch.zeros(T, E, requires_grad=True), replace(BASE, score_function=function)
    options = replace(options, top_k=K, num_groups=groups, group_experts=group_experts)
    options = replace(options, top_groups=max(1, groups // 2))
    route.route(logits, torch.zeros(E), options)[1].sum().backward()


def run_invariant_products(dtype: torch.dtype) -> None:
    """A linear with and without a bias, and its gradients."""
    x, w = torch.zeros(T, D, dtype=dtype), torch.zeros(F, D, dtype=dtype)
    product.invariant_product(x, w.t(), w[:, 0])
    product.invariant_product(x, w.t(), dtype=torch.float32)
    product.invariant_product(x.t(), x)


def run_momentum() -> None:
    flag = torch.ones(())
    how = dict(grad_scale=flag, found_inf=flag)
    values = torch.zeros(T, D)
    momentum.momentum_(values, values, torch.bfloat16, decay=0.9, nesterov=True, **how)


def run_adamw(moment_dtype: torch.dtype, split: bool = False) -> None:
    weights = [torch.zeros(T, D), torch.zeros(7)]
    if split:
        weights = [w.bfloat16() for w in weights]
    moments = [w.to(moment_dtype) for w in weights]
    remainders = [w.to(torch.int16) for w in weights] if split else ()
    exponents = ()
    if moment_dtype == torch.uint8:
        exponents = [torch.zeros(w.numel() // 128 + 1, 2, dtype=torch.uint8) for w in weights]
    steps = [torch.zeros(()) for _ in weights]
    adamw.adamw_(
        adamw.AdamWTensors(
            weights, weights, moments, moments, steps, [0, 1], exponents, remainders
        ),
        adamw.AdamWOptions(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        grad_scale=steps[0],
        found_inf=steps[1],
    )


def run_route_weights() -> None:
    """All experts' columns, as expert choice has them."""
    logits = torch.zeros(T, E, requires_grad=True)
    route.route_weights(logits, ints(T, E), replace(BASE, top_k=E)).sum().backward()


def run_logits(dtype: torch.dtype) -> None:
    weight = torch.zeros(E, D, dtype=dtype, requires_grad=True)
    router_logits.router_logits(bf16(T, D).requires_grad_(), weight).sum().backward()


def run_activations(*kinds: str, interleaved: bool = False) -> None:
    for kind in kinds:
        run_activation(kind, interleaved)


def run_balance(function: str, padding: bool = False) -> None:
    logits = torch.zeros(T, E, requires_grad=True)
    mask = torch.zeros(T, dtype=torch.bool) if padding else None
    sums, z = balance.balance_statistics(logits, 2, function, mask)
    counted = counts.count_experts_and_tokens(ints(T, K), 2, E, mask)
    balance_loss.balance_loss(sums, z, counted, [1.0, 1.0, 0.0, 1.0]).sum().backward()


def run_index(K: int = K, E: int = E) -> None:
    weights = torch.zeros(T, K, requires_grad=True)
    made = index.build_index(
        ints(T, K), weights, first_expert=0, num_local_experts=E, row_multiple=16
    )
    made.weights_R.sum().backward()


def run_rows(K: int = K) -> None:
    R = T * K
    rows.gather_rows(bf16(T, D), ints(R), ints(T, K), ints())
    rows.sum_rows(bf16(R, D), ints(R), ints(T, K), ints())


def run_margins(E: int, K: int) -> None:
    histogram = torch.zeros(E, margins.NUM_BINS, dtype=torch.int64)
    where = (torch.zeros(T, E), torch.zeros(E), K, "sigmoid")
    margins.add_margins_(histogram, *where)
    margins.add_margins_(histogram, *where, torch.zeros(T, dtype=torch.bool))
    margins.compute_even_bias(histogram, where[1], K)


def run_clones(P: int, c: int) -> None:
    plan = clones.plan_clones(ints(E), num_ranks=P, clones_per_rank=c, min_share=0.02)
    clones.assign_physical_ids(
        ints(T, K), ints(E), plan, num_local_experts=E // P, clones_per_rank=c
    )


def run_entropy(E: int) -> None:
    for function in ("softmax", "sqrtsoftplus"):
        total = torch.zeros(2, dtype=torch.int64)
        entropy.add_entropy_(total, torch.zeros(T, E), function)
        entropy.add_entropy_(total, torch.zeros(T, E), function, torch.zeros(T, dtype=torch.bool))


def run_fp8_rows(D: int) -> None:
    packed = fp8_rows.pack_rows(bf16(T, D))
    views = fp8_rows.view_packed_rows(packed, D)
    fp8_rows.gather_packed_rows(*views, torch.bfloat16, ints(T * K), ints(T, K), ints())


def run_quantised_rows(travelled: bool) -> None:
    tiles = row_tiles.map_row_tiles(ints(E), T * K)
    sources = quantised.quantise_rows(bf16(T, D), power_of_two=True, num_rows=ints())
    if travelled:
        sources = record.Rows.from_bytes(fp8_rows.pack_rows(bf16(T, D)), D, torch.bfloat16)
    record.widen_rows(sources, ints())
    record.widen_rows(sources)
    blocks = quantised.gather_row_blocks(sources, ints(T * K), ints(T, K), ints())
    quantised.gather_row_blocks(sources, None, None, ints())
    quantised.tile_tokens(sources, ints(T * K), tiles)
    quantised.tile_tokens(blocks, None, tiles)


def run_quantised_weights() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for power_of_two in (True, False):
            w = torch.zeros(2, F, D, dtype=dtype)
            for layouts in ({}, {"rowwise": False}, {"columnwise": False}):
                quantised.quantise_weights(w, power_of_two=power_of_two, **layouts)


def run_microscaled(recipe: Recipe, packed: bool = False) -> None:
    x, experts = bf16(T * K, D), torch.zeros(T * K, dtype=torch.int64)
    how: dict[str, Any] = dict(expert_M=experts, num_experts=E, pack=packed)
    for is_gradient in (False, True)[packed:]:
        microscaled.quantise_microscaled(x, recipe, is_gradient=is_gradient, **how)
        how_rows: dict[str, Any] = dict(over_rows=True, source_rows_M=experts, **how)
        microscaled.quantise_microscaled(x, recipe, is_gradient=is_gradient, **how_rows)
    microscaled.quantise_microscaled(x, recipe, over_rows=True)
    for dtype in (torch.bfloat16, torch.float32)[: 2 - packed]:
        microscaled.quantise_microscaled_matrices(
            torch.zeros(2, F, D, dtype=dtype), recipe, pack=packed
        )


def run_saved_rows(recipe: Recipe) -> None:
    """X of a layer, and H, as experts save them for backward."""
    for columns in (7168, 2 * F):
        packed = microscaled_rows.pack_microscaled_rows(bf16(T, columns), recipe)
        microscaled_rows.widen_microscaled_rows(*packed, torch.bfloat16)


def run_block_scaled(recipe: Recipe) -> None:
    def operand(*shape: int, rows: int = 1) -> Any:
        *lead, M, columns = shape
        scales = torch.zeros(*lead, M // rows, columns // recipe.weight_multiple, dtype=torch.uint8)
        if recipe.scaling == "mxfp8":
            values = torch.zeros(shape, dtype=torch.uint8).view(e4m3.FP8)
            return scaling.Blocks(values, scales, "packed")
        values = torch.zeros(*lead, M, columns // 2, dtype=torch.uint8)
        return scaling.Blocks(values, scales.view(e4m3.FP8), "packed", torch.zeros(E + 1))

    matrices = operand(E, F, D, rows=recipe.weight_block[0] or 1)
    for dtype in (torch.bfloat16, torch.float32):
        rows = operand(T * K, D)
        block_scaled.block_scaled_gemm(rows, matrices, ints(E), recipe, dtype)
        sides = operand(D, T * K), operand(F, T * K)
        how: dict[str, Any] = dict(out=torch.zeros(E, D, F, dtype=dtype))
        for adds in (False, True):
            block_scaled.block_scaled_wgrad(*sides, ints(E), recipe, accumulate=adds, **how)


def run_mixed() -> None:
    """Products of E5M2 gradients with E4M3 matrices and rows."""

    def operand(fmt: str, *shape: int, scales: tuple[int, ...]) -> Any:
        values = torch.zeros(shape, dtype=torch.uint8).view(scaling.DTYPES[fmt])
        return scaling.Blocks(values, torch.zeros(scales), "row")

    dy = operand("e5m2", T * K, D, scales=(T * K,))
    matrices = operand("e4m3", E, F, D, scales=(E, F))
    scaled.mixed_format_gemm(dy, matrices, ints(E), torch.bfloat16)
    sides = operand("e5m2", D, T * K, scales=(E, D)), operand("e4m3", F, T * K, scales=(E, F))
    scaled.mixed_format_wgrad(*sides, ints(E), torch.bfloat16)


def run_scaled_rows(per_row: bool) -> None:
    """Operands of experts, with a scale per row or one."""
    offsets_e, padded_e = ints(E), scaled_rows.pad_offsets(ints(E))
    how: dict[str, Any] = dict(per_row=per_row)
    for dtype in (torch.bfloat16, torch.float32):
        x_RD, w_eND = torch.zeros(T * K, D, dtype=dtype), torch.zeros(E, F, D, dtype=dtype)
        for fmt, power_of_two in (("e4m3", True), ("e5m2", False)):
            how |= dict(power_of_two=power_of_two)
            for layouts in ({}, {"columnwise": False}, {"rowwise": False}):
                scaled_rows.quantise_expert_rows(
                    x_RD, offsets_e, padded_e, fp8_format=fmt, **how, **layouts
                )
                if fmt == "e4m3":
                    scaled_rows.quantise_expert_matrices(w_eND, **how, **layouts)
            if not per_row:
                one = dict(amax=torch.ones(1), new_amax=torch.ones(1))
                scaled_rows.compute_row_amax(x_RD, offsets_e, torch.ones(1))
                scaled_rows.quantise_expert_rows(
                    x_RD, offsets_e, padded_e, fp8_format=fmt, **how, **one
                )


def run_shard_blocks() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        part = torch.zeros(2, F, D // 8, dtype=dtype)
        place = shard_blocks.MatrixShard.from_slice(torch.Size([2, F, D]), 2, D // 8, D // 8)
        amax, values = torch.zeros(place.scales_shape), part.to(torch.uint8)
        shard_blocks.write_block_amax_(part, place, amax)
        for power_of_two in (True, False):
            how = {"power_of_two": power_of_two}
            shard_blocks.quantise_blocks_(part, place, amax, amax.clone(), values, **how)
    shard_blocks.transpose_values(values)


def run_shard_squares() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        part = torch.zeros(2, F, D // 8, dtype=dtype)
        place = shard_blocks.MatrixShard.from_slice(torch.Size([2, F, D]), 2, D // 8, D // 8)
        squares, amax = torch.zeros(2 * F // 16, D // 16), torch.zeros(2)
        shard_matrices.write_square_amax_(part, place, squares)
        shard_matrices.write_finite_amax_(part, 0, amax)
        where = (squares, amax, squares.to(e4m3.FP8), torch.zeros(part.numel() // 2).byte())
        for power_of_two in (True, False):
            recipe = Recipe(scaling="nvfp4", power_of_two=power_of_two)
            shard_matrices.pack_shard_(part, place, *where, recipe)


def run_quantised_activation(kind, power_of_two, dtype, in_fp8=False) -> None:
    options = activation.ActivationOptions(kind=kind)
    weights = torch.zeros(T * K)
    h = torch.zeros(T * K, 2 * F if options.gated else F, dtype=dtype)
    da, how = h[:, :F].contiguous(), {"power_of_two": power_of_two}
    place = weights, ints(), options
    _, kept = quantised_activation.quantised_activation(h, *place, quantise_h=in_fp8, **how)
    quantised_activation.quantised_activation_bwd(kept or Rows(h), da, *place, **how)


def run_activation(kind: str, interleaved: bool) -> None:
    options = activation.ActivationOptions(kind=kind, interleaved=interleaved)
    h = bf16(T * K, 2 * F if options.gated else F)
    activation.weighted_activation(h, torch.zeros(T * K), ints(), options)
    activation.weighted_activation_bwd(h, bf16(T * K, F), torch.zeros(T * K), ints(), options)


def run_experts(kind: str, add_to: torch.dtype | None, D: int = D, F: int = F) -> None:
    act = activation.ActivationOptions(kind=kind)
    R, C = T * K, 2 * F if act.gated else F
    w1, w2 = bf16(E, C, D).requires_grad_(), bf16(E, D, F).requires_grad_()
    sinks: Any = (None, None)
    if add_to is not None:
        sinks = tuple(Sink(torch.zeros(w.shape, dtype=add_to)) for w in (w1, w2))
    where = index.ExpertIndex(ints(R), torch.zeros(R), ints(T, K), ints(E))
    options = contract.ExpertMLPOptions(activation=act, products="triton")
    rows = record.Rows(bf16(T, D).requires_grad_())
    weights = contract.ExpertWeights(w1_eCD=w1, w2_eDF=w2, sinks=sinks)
    expert_mlp.expert_mlp(rows, weights, where, options).sum().backward()


def run_adapted_experts(rank: int, **more: Any) -> None:
    """A frozen base, of FP8 maybe, with low-rank updates of both matrices."""
    act = activation.ActivationOptions(kind="swiglu")
    sides = [bf16(E, rank, D), bf16(E, 2 * F, rank), bf16(E, rank, F), bf16(E, D, rank)]
    a1, b1, a2, b2 = (side.requires_grad_() for side in sides)
    updates: Any = dict(
        update1=contract.LowRankUpdate(a1, b1), update2=contract.LowRankUpdate(a2, b2)
    )
    weights = contract.ExpertWeights(w1_eCD=bf16(E, 2 * F, D), w2_eDF=bf16(E, D, F), **updates)
    where = index.ExpertIndex(ints(T * K), torch.zeros(T * K), ints(T, K), ints(E))
    options = contract.ExpertMLPOptions(activation=act, products="triton", **more)
    rows = record.Rows(bf16(T, D).requires_grad_())
    expert_mlp.expert_mlp(rows, weights, where, options).sum().backward()


def run_wide_wgrad() -> None:
    x, y, ids = bf16(T * K, D), bf16(T * K, F), ints(T * K)
    for row_ids in (None, ids):
        for transposed in (False, True):
            how = {"row_ids_R": row_ids, "transposed": transposed, "dtype": torch.float32}
            wgrad.grouped_wgrad(x, y, ints(E), **how, scale=0.5)


def run_fp8_products() -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

    tiles = row_tiles.map_row_tiles(ints(E), T * K)
    a = scaling.Blocks(zeros(T * K, D), torch.zeros(D // 128, T * K), "tile")
    b = scaling.Blocks(zeros(E, F, D), torch.zeros(E, F // 128, D // 128), "block")
    fp8.fp8_gemm(a, b, ints(E), tiles, torch.bfloat16)
    x, y = (
        scaling.Blocks(
            zeros(tiles.max_tiles, C, 128), torch.zeros(tiles.max_tiles, C // 128), "block"
        )
        for C in (D, F)
    )
    for dtype in (torch.float32, torch.bfloat16):
        fp8.fp8_wgrad(x, y, tiles, dtype=dtype)
        fp8.fp8_wgrad(x, y, tiles, out=torch.zeros(E, D, F, dtype=dtype), accumulate=True)


def run_used(row_bytes: int) -> None:
    rows.copy_first_rows(*torch.zeros(2, T, row_bytes, dtype=torch.uint8), ints(1)[0])


def run_dequantise(kind: Any) -> None:
    four_bit.dequantise(four_bit.quantise(torch.ones(8, 256), kind), torch.bfloat16)


def run_pages(x_bytes: int, h_bytes: int, num_host_pages: int = 0, k: int = K) -> None:
    page_bytes = 64 * max(x_bytes, h_bytes)
    pool = free_list.PagePool.allocate(
        8, page_bytes, torch.device("cpu"), num_host_pages=num_host_pages
    )
    layout = pages.PageLayout.from_matrices(pool, [(x_bytes, True), (h_bytes, False)], T, T)
    matrices = [torch.zeros(T, width, dtype=torch.uint8) for width in (x_bytes, h_bytes)]
    table, other = layout.make_table(), layout.make_table()
    pages.take_pages_for_rows(table, layout, ints(T, k), ints(1)[0])
    pages.stash_or_restore_rows(matrices, table, layout, stash=True)
    pages.stash_or_restore_rows(matrices, table, layout, stash=False)
    pages.stash_or_restore_rows(
        matrices, table, layout, stash=False, released_table=(other, layout.num_entries)
    )
    pages.stash_or_restore_rows([None, matrices[1]], table, layout, stash=False)
    free_list.return_pages(table, layout.num_entries, pool)


def run_cross_entropy(V: int) -> None:
    labels = torch.zeros(T, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32, None):
        cross_entropy.cross_entropy_(torch.zeros(T, V), labels, dtype)
    cross_entropy.cross_entropy_(bf16(T, V), labels, torch.bfloat16)
    high, total, _ = cross_entropy.softmax_statistics(torch.zeros(T, V), labels).unbind(1)
    for dtype in (torch.bfloat16, torch.float32):
        cross_entropy.softmax_gradient_(torch.zeros(T, V), labels, high, total, dtype)


def run_cross_entropy_in_blocks(V: int) -> None:
    logits, labels = bf16(T, V), torch.zeros(T, dtype=torch.int64)
    for power_of_two in (True, False):
        cross_entropy.cross_entropy_blocks(logits, labels, power_of_two=power_of_two)
    high, total, _ = cross_entropy.softmax_statistics(logits, labels).unbind(1)
    cross_entropy.softmax_gradient_blocks(logits, labels, high, total, power_of_two=True)


def run_delta_rule(has_rates: bool, *decay_dims: int, k: int = 128, v: int = 128) -> None:
    gates, decays = (torch.zeros(T, 4, *dims, requires_grad=True) for dims in ((), decay_dims))
    heads = (bf16(T, n, d).requires_grad_() for n, d in ((2, k), (2, k), (4, v)))
    rule = DeltaRule(*heads, decays, gates.bfloat16() if has_rates else None, 0.1, has_rates)
    pieces = Pieces([[T // 2, T // 2]])
    outs = (gated_delta_rule(rule, pieces.cu_seqlens, chain=chain)[0] for chain in (None, pieces))
    sum(o.sum() for o in outs).backward()


def run_convolution(channels: int) -> None:
    x, cu_seqlens = bf16(T, channels).requires_grad_(), torch.tensor([0, T], dtype=torch.int32)
    y = causal_convolution(x, bf16(channels, 4), bf16(channels), cu_seqlens, apply_silu=True)
    y.sum().backward()


def run_hyper_connections(D: int, dtype: torch.dtype) -> None:
    """A collapse and an expansion of four streams, and their gradients."""
    streams = torch.zeros(T, 4, D, dtype=dtype, requires_grad=True)
    weights = (torch.zeros(24, 4 * D, requires_grad=True), torch.zeros(24), torch.zeros(3))
    options = hyper_connections.SinkhornOptions(iterations=20, eps=1e-6, norm_eps=1e-6)
    x, mixed = hyper_connections.collapse_streams(streams, *weights, options)
    hyper_connections.expand_streams(x, mixed).sum().backward()


def run_index_scores(heads: int, dim: int, fp8: bool = False) -> None:
    own = torch.arange(T)
    index_of = IndexerHeads(bf16(T, heads, dim), bf16(4 * T, dim), torch.zeros(T, heads))
    rounded = round_to_fp8(index_of) if fp8 else (index_of, None)
    compute_span_scores(rounded[0], SpanOfKeys(0, 4 * T, own, own), rounded[1])


def run_gathered_attention(H: int, dim: int, top_k: int, rotary_dim: int = 64) -> None:
    """Forward and backward of queries with selected keys, as DeepSeek-V3.2's, or V4's."""
    q, keys, selected = bf16(T, H, dim), bf16(4 * T, dim), ints(T, top_k)
    o, lse = attend_to_selected(q, keys, selected, dim - rotary_dim, 0.1, torch.zeros(H))
    attend_to_selected(q, keys, selected, dim - rotary_dim, 0.1, None)
    differentiate_selected(
        *(q, keys, selected, o, lse, lse, 0.1, keys.float()),
        num_visible_keys=len(keys),
        returns_output=rotary_dim > 0,
    )


CASES: dict[str, tuple[Callable[[], None], int]] = {
    "route": (lambda: run_route("softmax"), 2),
    "route weights": (run_route_weights, 2),
    "route sqrtsoftplus": (lambda: run_route("sqrtsoftplus"), 2),
    "route groups": (lambda: run_route("sigmoid", 8), 2),
    "route groups by one expert": (lambda: run_route("softmax", 8, 1), 2),
    "route groups by four experts": (lambda: run_route("sqrtsoftplus", 4, 4), 2),
    "router_logits bf16": (lambda: run_logits(torch.bfloat16), 3),
    "router_logits fp32": (lambda: run_logits(torch.float32), 3),
    "balance softmax": (lambda: run_balance("softmax"), 6),
    "balance sigmoid": (lambda: run_balance("sigmoid"), 6),
    "balance sqrtsoftplus, padding": (lambda: run_balance("sqrtsoftplus", True), 6),
    "index": (run_index, 4),
    **{f"dequantise {kind}": (partial(run_dequantise, kind), 1) for kind in four_bit.FORMATS},
    "index scores, 64 heads of 128": (lambda: run_index_scores(64, 128), 1),
    "index scores, 32 heads of 64": (lambda: run_index_scores(32, 64), 1),
    "index scores in FP8": (lambda: run_index_scores(64, 128, True), 2),
    "selection of keys": (lambda: select_keys(torch.zeros(T, 32768), 0, 2048), 1),
    "attention to selected keys": (lambda: run_gathered_attention(128, 576, 2048), 6),
    "attention of 16 heads to selected keys": (lambda: run_gathered_attention(16, 576, 2048), 6),
    "attention of other dims to selected keys": (lambda: run_gathered_attention(96, 320, 300), 6),
    "attention to compressed keys": (lambda: run_gathered_attention(64, 512, 640, 0), 5),
    "attention to keys without rotary dims": (lambda: run_gathered_attention(16, 256, 300, 0), 5),
    "index of expert choice": (lambda: run_index(1024, 1024), 5),
    "rows": (run_rows, 2),
    "rows of expert choice": (lambda: run_rows(1024), 2),
    "cross_entropy": (lambda: run_cross_entropy(151936), 7),
    "cross_entropy in blocks": (lambda: run_cross_entropy_in_blocks(151936), 4),
    "cross_entropy of an odd vocabulary": (lambda: run_cross_entropy(50257), 7),
    "activations": (lambda: run_activations("swiglu", "gelu", "relu", "limited_swiglu"), 8),
    "other activations": (lambda: run_activations("situ_glu", "silu"), 4),
    "clamped_swiglu interleaved": (lambda: run_activation("clamped_swiglu", True), 2),
    "experts swiglu": (lambda: run_experts("swiglu", None), 8),
    "experts geglu, fp32 main gradients": (lambda: run_experts("geglu", torch.float32), 8),
    "experts of odd multiples of 8": (lambda: run_experts("swiglu", None, 200, 392), 8),
    "experts of odd multiples of 8, main gradients": (
        lambda: run_experts("relu2", torch.float32, 24, 40),
        9,
    ),
    "experts limited_swiglu": (lambda: run_experts("limited_swiglu", None), 8),
    "experts situ_glu": (lambda: run_experts("situ_glu", None), 8),
    "experts relu2, bf16 main gradients": (lambda: run_experts("relu2", torch.bfloat16), 9),
    "experts gelu": (lambda: run_experts("gelu", None), 9),
    "adapted experts": (lambda: run_adapted_experts(16), 16),
    "adapted experts of a large rank": (lambda: run_adapted_experts(136), 16),
    "adapted experts in FP8": (lambda: run_adapted_experts(16, recipe=Recipe()), 26),
    "weight gradients in fp32": (run_wide_wgrad, 4),
    "products of FP8": (run_fp8_products, 6),
    "margins": (lambda: run_margins(128, 8), 3),
    "margins of many experts": (lambda: run_margins(1536, 24), 3),
    "clones over 8 ranks": (lambda: run_clones(8, 2), 5),
    "clones over 64 ranks": (lambda: run_clones(64, 2), 5),
    "entropy": (lambda: run_entropy(128), 4),
    "entropy of many experts": (lambda: run_entropy(1536), 4),
    "rows as FP8": (lambda: run_fp8_rows(7168), 2),
    "rows as FP8, odd": (lambda: run_fp8_rows(2896), 2),
    "rows of FP8 products": (lambda: run_quantised_rows(False), 7),
    "rows of FP8 products that travelled": (lambda: run_quantised_rows(True), 8),
    "weights of FP8 products": (run_quantised_weights, 12),
    "parts of such weights": (run_shard_blocks, 7),
    "expert rows and matrices by row": (lambda: run_scaled_rows(True), 24),
    "expert rows and matrices by tensor": (lambda: run_scaled_rows(False), 26),
    "products of two FP8 formats": (run_mixed, 2),
    "products of MXFP8": (lambda: run_block_scaled(Recipe(scaling="mxfp8")), 6),
    "rows saved in MXFP8": (lambda: run_saved_rows(Recipe(scaling="mxfp8")), 4),
    "rows saved in NVFP4": (lambda: run_saved_rows(Recipe(scaling="nvfp4")), 4),
    "parts of NVFP4 weights": (run_shard_squares, 8),
    **{
        f"quantised {kind}": (
            lambda kind=kind: run_quantised_activation(kind, kind != "gelu", torch.bfloat16),
            3,
        )
        for kind in activation.KINDS
    },
    "quantised, H in FP8": (
        lambda: run_quantised_activation("swiglu", True, torch.bfloat16, in_fp8=True),
        3,
    ),
    "quantised fp32": (lambda: run_quantised_activation("geglu", True, torch.float32), 3),
    "momentum": (run_momentum, 1),
    "batch-invariant products": (lambda: run_invariant_products(torch.bfloat16), 3),
    "batch-invariant products of fp32": (lambda: run_invariant_products(torch.float32), 3),
    "gated delta rule": (lambda: run_delta_rule(True), 8),
    "kimi delta attention": (lambda: run_delta_rule(True, 128), 9),
    "delta rule without rates, of wide values": (lambda: run_delta_rule(False, v=3 * 64), 8),
    "short convolution": (lambda: run_convolution(8192), 2),
    "hyper-connections": (lambda: run_hyper_connections(7168, torch.bfloat16), 7),
    "hyper-connections of fp32": (lambda: run_hyper_connections(4096, torch.float32), 5),
    "pages": (lambda: run_pages(2 * D, 6 * F), 6),
    "pages of odd rows, of the host too": (lambda: run_pages(1001, 24, 4, 128), 6),
    "used rows": (lambda: run_used(6 * D), 1),
    "cast of a gradient": (lambda: scaled_cast(bf16(T, D), torch.float32, 0.125), 1),
}


NIGHTLY = [  # of kernels that another case compiles at other sizes, or with another activation
    "route groups by four experts",
    "balance sqrtsoftplus, padding",
    "cross_entropy of an odd vocabulary",
    "experts geglu, fp32 main gradients",
    "experts of odd multiples of 8",
    "experts of odd multiples of 8, main gradients",
    "attention of 16 heads to selected keys",
    "experts limited_swiglu",
    "experts situ_glu",
    "experts relu2, bf16 main gradients",
    "experts gelu",
    "adapted experts of a large rank",
    "adapted experts in FP8",
    "margins of many experts",
    "clones over 64 ranks",
    "entropy of many experts",
    "rows as FP8, odd",
    "expert rows and matrices by row",
    *(f"quantised {kind}" for kind in activation.KINDS if kind not in ("swiglu", "relu2")),
    "batch-invariant products of fp32",
    "hyper-connections of fp32",
    "pages of odd rows, of the host too",
]


@pytest.mark.parametrize("name", beside(CASES, NIGHTLY))
def test_compiles_for_hopper_without_spills(name, compiled, tmp_path) -> None:
    run, at_least = CASES[name]
    run()
    assert len(compiled) >= at_least, sorted(compiled)
    spills = {k: n for k, kernel in compiled.items() if (n := spilled_bytes(kernel, tmp_path))}
    assert all(n <= MAX_SPILL_BYTES for n in spills.values()), spills
    for name, kernel in compiled.items():
        assert not wrong_descriptors(dump(kernel, tmp_path, "-sass")), name
    shared = {k: kernel.metadata.shared for k, kernel in compiled.items()}
    assert max(shared.values()) <= SHARED_MEMORY_BYTES, shared
    dead = {k: names for k, kernel in compiled.items() if (names := dead_barriers(kernel))}
    assert not dead, dead


@pytest.mark.parametrize(("H", "dim"), [(128, 576), (16, 576), (96, 320)])
def test_attention_to_selected_keys_copies_16_bytes(H: int, dim: int, compiled) -> None:
    """A mask of keys would make the loads of scores 2 bytes wide, and backward 1.5 times slower."""
    run_gathered_attention(H, dim, 300)
    for name, kernel in compiled.items():
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"], name
        assert not re.search(r"ld\.global\S*\.b16", kernel.asm["ptx"]), name


MICROSCALED = [  # every pair of two of the three by day
    pytest.param(arch, scaling, packed, marks=[pytest.mark.nightly] * (num_changed % 2))
    for arch, scaling, packed in itertools.product((90, 100), ("mxfp8", "nvfp4"), (True, False))
    for num_changed in [(arch == 90) + (scaling == "mxfp8") + packed + 1]
]


@pytest.mark.parametrize(("compiled", "scaling", "packed"), MICROSCALED, indirect=["compiled"])
def test_microscaled_operands(scaling, packed, compiled, tmp_path, monkeypatch, request) -> None:
    """GPUs divide as IEEE has it, spill nothing, and threads exchange no values."""
    monkeypatch.setattr(microscaled, "get_emulated_dtype", lambda _: torch.bfloat16)
    run_microscaled(Recipe(scaling=scaling, power_of_two=scaling == "mxfp8"), packed)
    least = {"mxfp8": 7, "nvfp4": 12}[scaling] // (1 + packed)
    assert len(compiled) >= least, sorted(compiled)
    for name, kernel in compiled.items():
        assert kernel.metadata.target.arch == request.node.callspec.params["compiled"]
        assert spilled_bytes(kernel, tmp_path) == 0, name
        ptx = kernel.asm["ptx"]
        assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx), name
        assert ("div.rn.f32" in ptx) == (scaling == "nvfp4" and "microscale" in name), name
        if not packed and "microscale" in name:
            assert kernel.metadata.shared == 0, name


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("compiled", [90, 100], indirect=True)
def test_activation_in_mxfp8_operands(packed, compiled, tmp_path, monkeypatch, request) -> None:
    """One kernel activates and quantises, and in backward writes three operands."""
    monkeypatch.setattr(microscaled_activation, "get_emulated_dtype", lambda _: torch.bfloat16)
    options = activation.ActivationOptions(kind="swiglu")
    order = microscaled_activation.ExpertOrder(E, packed, torch.zeros(T * K, dtype=torch.int64))
    for da in (None, bf16(T * K, F)):
        inputs = bf16(T * K, 2 * F), da, torch.zeros(T * K), ints(), options
        microscaled_activation.microscaled_activation(*inputs, order)
    assert len(compiled) == 3  # and one adds the gradients of routing weights
    for name, kernel in compiled.items():
        assert kernel.metadata.target.arch == request.node.callspec.params["compiled"]
        assert spilled_bytes(kernel, tmp_path) == 0, name


BLOCK_SCALED = {  # instructions, and shared memory of one program
    100: (
        {
            "mxfp8": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
            "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale",
        },
        232448,
    ),
    120: (
        {
            "mxfp8": r"mma\.sync\S*kind::mxf8f6f4\.block_scale\S*ue8m0",
            "nvfp4": r"mma\.sync\S*kind::mxf4nvf4\.block_scale\S*ue4m3",
        },
        101376,
    ),
}


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("compiled", BLOCK_SCALED, indirect=True)
def test_products_of_blocks(scaling, compiled, tmp_path, request) -> None:
    """Blackwell multiplies values and scales in one instruction."""
    run_block_scaled(Recipe(scaling=scaling))
    instructions, shared_bytes = BLOCK_SCALED[request.node.callspec.params["compiled"]]
    assert len(compiled) == 6
    # Triton 3.6 spills where NVFP4 gradients are added.
    max_spill = 16 if scaling == "nvfp4" and VERSION < NVFP4_TRITON else 0
    for name, kernel in compiled.items():
        assert re.search(instructions[scaling], kernel.asm["ptx"]), name
        assert "cp.async.c" in kernel.asm["ptx"], f"{name} reads byte by byte"
        assert kernel.metadata.shared <= shared_bytes, name
        assert spilled_bytes(kernel, tmp_path) <= max_spill, name


@pytest.mark.parametrize("per_row", beside([True, False], [True]))
def test_transposed_rows_are_written_16_bytes_at_a_time(per_row, compiled) -> None:
    run_scaled_rows(per_row)
    for name, kernel in compiled.items():
        assert "st.global.b8" not in kernel.asm["ptx"], name


def test_two_fp8_formats_are_multiplied_by_tensor_cores(compiled: dict[str, Any]) -> None:
    """One instruction takes E5M2 and E4M3; sums of 128 are added in fp32."""
    run_mixed()
    for name, kernel in compiled.items():
        ptx = kernel.asm["ptx"]
        assert re.search(r"wgmma\.\S+\.f32\.e5m2\.e4m3", ptx), name
        assert "cp.async.c" in ptx, f"{name} reads byte by byte"
        assert "add.f32" in ptx or "add.rn.f32" in ptx, name


def test_transposed_gradient_is_staged_by_matrix_stores(compiled: dict[str, Any]) -> None:
    """A transposed tile stored value by value would take longer than its product."""
    args = (bf16(T, D), bf16(T * K, 2 * F), ints(E))
    wgrad.grouped_wgrad(*args, row_ids_R=ints(T * K), transposed=True)
    (kernel,) = compiled.values()
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("moment_dtype", "split", "loads"),
    [  # of 16, 8 and 4 bytes: weight, gradient, moments, remainder
        (torch.float32, False, (4, 0, 0)),
        (torch.bfloat16, False, (2, 2, 0)),
        (torch.uint8, False, (2, 0, 2)),
        (torch.uint8, True, (0, 3, 2)),
        (torch.float32, True, (2, 3, 0)),
    ],
)
def test_adamw_moves_four_elements_at_a_time(
    moment_dtype, split, loads, compiled, tmp_path
) -> None:
    run_adamw(moment_dtype, split)
    (kernel,) = compiled.values()
    assert spilled_bytes(kernel, tmp_path) <= MAX_SPILL_BYTES
    ptx = kernel.asm["ptx"]
    block = adamw.FP8_BLOCK if moment_dtype == torch.uint8 else adamw.BLOCK
    fours = block // (4 * 32 * adamw.NUM_WARPS)  # of a thread
    for kind, count in zip(("v4.b32", "v2.b32", "b32"), loads, strict=True):
        assert len(re.findall(rf"ld\.global\.{kind} ", ptx)) >= fours * count, (kind, count)
    # Of FP8 moments alone the exponents of four blocks.
    assert kernel.metadata.shared <= 8 * (moment_dtype == torch.uint8), "threads exchange elements"


def test_used_rows_move_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    run_used(6 * D)
    (kernel,) = compiled.values()
    assert "ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v4.b32" in kernel.asm["ptx"]


def test_rows_of_pages_move_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    run_pages(6 * D, 4 * F)
    copies = [kernel for name, kernel in compiled.items() if "_copy_pages" in name]
    assert len(copies) == 4
    for kernel in copies:
        for operation in ("ld.global", "st.global"):
            assert f"{operation}.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize("kind", ["tile", "block", "row", "tensor"])
@pytest.mark.parametrize(("fmt", "power_of_two"), [("e4m3", True), ("e4m3", False), ("e5m2", True)])
def test_casts_move_vectors(kind, fmt, power_of_two, compiled, tmp_path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 2048, dtype=dtype)
        for sides in ((True, True), (True, False), (False, True)):
            cast._launch_quantise(x, None, None, cast._CastOptions(kind, fmt, power_of_two, *sides))
    if kind == "tensor":
        one = torch.zeros(1)
        cast._launch_quantise(x, one, one, cast._CastOptions(kind, fmt, power_of_two, True, True))
    for name, kernel in compiled.items():
        assert spilled_bytes(kernel, tmp_path) == 0, name
        if name.startswith("cast"):
            assert "ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v4" in kernel.asm["ptx"]
            assert f"satfinite.{fmt}x2" in kernel.asm["ptx"]
