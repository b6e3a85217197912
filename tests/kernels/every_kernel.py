"""One small run of every kernel, for a memory checker on a GPU:

    compute-sanitizer --tool memcheck python -m tests.kernels.every_kernel

`test_every_kernel.py` fails when a kernel has been forgotten here.
"""

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moecore.kernels
from moecore import MoEConfig, MoELayer
from moecore.base.options.layer import BalanceConfig
from moecore.base.options.precision import Recipe
from moecore.kernels import cross_entropy
from moecore.kernels.adamw import BLOCK, AdamWOptions, AdamWTensors, adamw_
from moecore.kernels.exchange.operations import limit_rows
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertWeights
from moecore.kernels.grouped import scaled_rows as sr
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.scaled import mixed_format_gemm, mixed_format_wgrad
from moecore.kernels.hyper_connections import SinkhornOptions, collapse_streams, expand_streams
from moecore.kernels.invariant.product import invariant_product
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.kernels.momentum import momentum_
from moecore.kernels.routing.clones import assign_physical_ids, plan_clones
from moecore.kernels.routing.counts import add_expert_counts
from moecore.kernels.routing.margins import NUM_BINS, add_margins_, compute_even_bias
from moecore.kernels.routing.route import route_weights
from moecore.kernels.rows import quantised, shard_blocks
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.cast import compute_amax, quantise_matrix
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.four_bit import dequantise, quantise
from moecore.kernels.rows.free_list import PagePool, return_pages
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaled_activation import ExpertOrder, microscaled_activation
from moecore.kernels.rows.microscaled_rows import pack_microscaled_rows, widen_microscaled_rows
from moecore.kernels.rows.move import copy_first_rows, gather_rows
from moecore.kernels.rows.packed import gather_packed_rows, pack_rows, view_packed_rows
from moecore.kernels.rows.pages import PageLayout, stash_or_restore_rows, take_pages_for_rows
from moecore.kernels.rows.quantised_activation import quantised_activation, quantised_activation_bwd
from moecore.kernels.rows.record import Rows, widen_rows
from moecore.kernels.rows.rotary import rotary
from moecore.kernels.rows.row_tiles import map_row_tiles
from moecore.kernels.rows.scaled_cast import scaled_cast
from moecore.kernels.rows.scaling import KINDS, Blocks
from moecore.kernels.rows.shard_matrices import pack_shard_, write_square_amax_
from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.gathered import attend_to_selected, differentiate_selected
from moecore.kernels.sparse_attention.index import compute_span_scores, round_to_fp8, select_keys
from moecore.kernels.sparse_attention.keys import SpanOfKeys
from tests.kernels.choices import SIGMOID
from tests.kernels.experts.chosen import expert_mlp

# What one GPU alone can not run: `tests/kernels/exchange` plays the ranks.
OF_SEVERAL_RANKS = {"_spread_kernel", "_reduce_kernel"}
LOSSES = BalanceConfig(micro_batch_coef=0.01, sequence_coef=0.01, z_loss_coef=1e-3)


def every_kernel() -> set[str]:
    """Return the names of all kernels of the package."""
    from triton.runtime.jit import JITFunction

    names = set()
    for info in pkgutil.walk_packages(moecore.kernels.__path__, "moecore.kernels."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                names.add(value.__name__)
    return names - OF_SEVERAL_RANKS


def run_all(device: str) -> None:
    """Run every kernel at least once."""
    run_layer(device, 1)
    run_layer(device, 100)
    run_layer(device, 4100)  # splits tokens in the router's gradient, and pairs in the index
    run_layer(device, 333, hidden_dim=640)  # gathers X before FC1
    run_layer(device, 333, hidden_dim=1032, activation="geglu")  # dY too
    run_layer(device, 130, hidden_dim=2048, activation="clamped_swiglu")  # X again in backward
    run_layer(device, 100, score_function="sigmoid", num_groups=4, top_groups=2, expert_bias=True)
    run_layer(device, 100, balance=LOSSES)
    run_pieces(device)
    run_loss(device)


def run_layer(device: str, num_tokens: int, **changes: Any) -> None:
    """A bf16 layer forward and backward."""
    sizes: dict[str, Any] = dict(dim=256, hidden_dim=136, num_experts=8, top_k=2)
    config = MoEConfig(**(sizes | changes))
    layer = MoELayer(config, device=device, dtype=torch.bfloat16)
    layer.get_part("experts").set_backend("triton")
    x_BTD = torch.randn(1, num_tokens, config.dim, device=device, dtype=torch.bfloat16)
    layer(x_BTD.requires_grad_()).float().square().mean().backward()


def run_pieces(device: str) -> None:
    """What a layer launches only with options of its own."""
    T, E, K = 37, 8, 2
    ids_TK = torch.randint(0, E, (T, K), device=device, dtype=torch.int32)
    weights_TK = torch.rand(T, K, device=device)
    index = build_index(ids_TK, weights_TK, first_expert=2, num_local_experts=4, row_multiple=16)
    words = torch.zeros(8, dtype=torch.int32, device=device)
    limit_rows(index.offsets_e, 40, words, words.clone())
    x_TD = torch.randn(T, 72, device=device, dtype=torch.bfloat16)
    scaled_cast(x_TD, torch.float32, 0.5)
    angles_Td = torch.randn(T, 4, device=device)
    rotary(x_TD.view(1, T, 9, 8).requires_grad_(), angles_Td, angles_Td).sum().backward()
    invariant_product(x_TD, x_TD.t(), x_TD[:, 0])
    run_streams(x_TD.view(T, 4, 18))
    run_linear_attention(device)
    run_adamw(device)
    flags = torch.ones(2, device=device)
    how = dict(grad_scale=flags[0], found_inf=flags[1])
    momentum_(x_TD, x_TD.float(), torch.bfloat16, decay=0.9, nesterov=True, **how)
    histogram = torch.zeros(E, NUM_BINS, dtype=torch.int64, device=device)
    scores_of = (torch.randn(T, E, device=device), torch.zeros(E, device=device), K, "softmax")
    add_margins_(histogram, *scores_of, torch.arange(T, device=device) < 3)
    compute_even_bias(histogram, scores_of[1], K)
    own_T, half_Td = torch.arange(T, device=device), x_TD[:, :64].contiguous()
    indexer = IndexerHeads(half_Td.view(T, 2, 32), half_Td[:, :32], half_Td[:, :2].float())
    span = SpanOfKeys(0, T, torch.zeros_like(own_T), own_T)
    indexer, k_scales = round_to_fp8(indexer)
    scores = compute_span_scores(indexer, span, k_scales)
    selected = select_keys(scores, 0, 7)
    for num_heads, latent_dim, key_dim in ((1, 32, 64), (128, 512, 576), (64, 512, 512)):
        keys = torch.randn(T, key_dim, device=device, dtype=torch.bfloat16)
        q = torch.randn(T, num_heads, key_dim, device=device, dtype=torch.bfloat16)
        o, lse = attend_to_selected(q, keys, selected, latent_dim, 0.5, None)
        args = (q, keys, selected, o, lse, lse, 0.5, keys.float())
        differentiate_selected(*args, num_visible_keys=T, returns_output=key_dim > latent_dim)
    index_of = (index.row_ids_R, index.slots_SK, index.offsets_e[-1])
    views = view_packed_rows(pack_rows(x_TD[:, :64].contiguous()), 64)
    gather_packed_rows(*views, x_TD.dtype, *index_of)
    gather_rows(x_TD, index.row_ids_R, index.slots_SK, index.offsets_e[-1])
    run_quantised(device, index)
    add_expert_counts(torch.zeros(1, E, dtype=torch.int64, device=device), ids_TK)
    loads_E = torch.arange(E, device=device, dtype=torch.int32)
    plan = plan_clones(loads_E, num_ranks=2, clones_per_rank=1)
    assign_physical_ids(ids_TK, loads_E, plan, num_local_experts=E // 2, clones_per_rank=1)
    options = replace(SIGMOID, top_k=K)
    logits_TE = torch.randn(T, E, device=device, requires_grad=True)
    route_weights(logits_TE, ids_TK, options).sum().backward()
    for kind, saves_h in (("relu2", True), ("swiglu", False)):
        run_experts(kind, saves_h, x_TD, index)
    x_TD = torch.randn(T, 128, device=device, dtype=torch.bfloat16)
    run_experts("swiglu", True, x_TD, index, hidden_dim=128, recipe=Recipe(keep_hidden="fp8"))
    run_mixed(x_TD[:32])


def run_streams(streams_TND: Tensor) -> None:
    """A collapse and an expansion of streams, and their gradients."""
    weights = (torch.randn(24, 72), torch.randn(24), torch.randn(3))
    options = SinkhornOptions(iterations=20, eps=1e-6, norm_eps=1e-6)
    given = (weight.to(streams_TND.device).requires_grad_() for weight in weights)
    x_TD, collapsed = collapse_streams(streams_TND, *given, options)
    expand_streams(x_TD, collapsed).sum().backward()


def run_linear_attention(device: str) -> None:
    """Delta rules of both kinds of decays, a short convolution, and their gradients."""
    cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32, device=device)
    x_TD, weight = (torch.randn(s, device=device).bfloat16() for s in ((100, 128), (128, 4)))
    x_TD, g_TH = x_TD.requires_grad_(), torch.zeros(100, 2, device=device)
    y_TD = causal_convolution(x_TD, weight, None, cu_seqlens, apply_silu=True)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in y_TD.split((32, 32, 64), dim=1))
    rule = DeltaRule(q, k, v, g_TH, g_TH.sigmoid().bfloat16(), scale=0.2, norm_qk=True)
    rules = rule, rule._replace(g_THk=g_TH[..., None].repeat(1, 1, 32))
    sum(gated_delta_rule(one, cu_seqlens)[0].float().sum() for one in rules).backward()


def run_quantised(device: str, index: Any) -> None:
    """Operands of torch.uint8 products."""
    R, how = index.row_ids_R.shape[0], {"power_of_two": True}
    tiles = map_row_tiles(index.offsets_e, R)
    x_TD = torch.randn(index.slots_SK.shape[0], 256, device=device, dtype=torch.bfloat16)
    rows = quantised.quantise_rows(x_TD, **how)
    quantised.gather_row_blocks(rows, index.row_ids_R, index.slots_SK, index.num_rows)
    quantised.tile_tokens(rows, index.row_ids_R, tiles)
    quantised.quantise_weights(x_TD.new_zeros(2, 128, 256), **how)
    copy_first_rows(*torch.zeros(2, R, 64, dtype=torch.uint8, device=device), index.num_rows)
    run_pages(device, index)
    widen_rows(rows, index.num_rows.clamp(max=rows.values.shape[0]))
    h_RC = torch.randn(R, 512, device=device, dtype=torch.bfloat16)
    args = (h_RC.abs()[:, :256].contiguous(), index.weights_R)
    options = ActivationOptions(kind="swiglu")
    quantised_activation(h_RC, index.weights_R, index.num_rows, options, **how)
    dh, _, _ = quantised_activation_bwd(Rows(h_RC), *args, index.num_rows, options, **how)
    quantised.tile_tokens(dh, None, tiles)
    end = torch.full((1,), len(x_TD) - 5, device=device).int()
    for kind in KINDS.values():
        quantise_matrix(x_TD[:, 16:161], kind, new_amax=compute_amax(x_TD)[:1], **how)
    quantise_matrix(x_TD[:, 16:161], "row", columnwise=False, **how)
    for per_row in (False, True):
        for columns in (False, True):
            more = dict(per_row=per_row, columnwise=columns, **how)
            sr.quantise_expert_rows(x_TD[: len(x_TD) - 3, 32:], end, sr.pad_offsets(end), **more)
            sr.quantise_expert_matrices(x_TD[None, :48], **more)
    for recipe in (Recipe(scaling="mxfp8"), Recipe(scaling="nvfp4")):
        for packed in (False, True):
            for over_rows in (False, True):
                quantise_microscaled(
                    x_TD[:, 32:], recipe, over_rows=over_rows, is_gradient=True, pack=packed
                )
            quantise_microscaled_matrices(x_TD[None, :32], recipe, pack=packed)
        packed_rows = pack_microscaled_rows(x_TD, recipe)
        widen_microscaled_rows(*packed_rows, x_TD.dtype)
    rows_T = torch.arange(len(x_TD) // 32 * 32, device=device)
    h, swiglu = x_TD[: len(rows_T)], ActivationOptions(kind="swiglu")
    dy, order = h[:, : h.shape[1] // 2].contiguous(), ExpertOrder(1, True, rows_T)
    microscaled_activation(h, dy, None, None, swiglu, order)
    run_block_scaled(x_TD)
    for kind in ("nf4", "nvfp4"):
        dequantise(quantise(x_TD[:, :64], kind), torch.bfloat16)
    part = torch.randn(2, 24, 144, device=device)
    place = shard_blocks.MatrixShard.from_slice(torch.Size([2, 80, 144]), 1, 56, 24)
    scales, values = torch.zeros(2, *place.scales_shape, device=device), part.to(torch.uint8)
    shard_blocks.write_block_amax_(part, place, scales[0])
    shard_blocks.quantise_blocks_(part, place, scales[0], scales[1], values, **how)
    shard_blocks.transpose_values(values[:, :16].contiguous(), 128)
    squares, of_matrices = torch.zeros(10, 9, device=device), torch.zeros(2, device=device)
    write_square_amax_(part, place, squares)
    packed = values.view(-1)[: part.numel() // 2]
    recipe = Recipe(scaling="nvfp4")
    pack_shard_(part, place, squares, of_matrices, squares.to(FP8), packed, recipe)


def run_block_scaled(x_TD: Tensor) -> None:
    """Products of one group, in bf16 where a GPU multiplies no scales."""
    recipe = Recipe(scaling="mxfp8")
    rows, columns = (
        quantise_microscaled(x_TD, recipe, over_rows=i, pack=True) for i in (False, True)
    )
    matrix = quantise_microscaled_matrices(x_TD[None, :32], recipe, pack=True).rows
    assert matrix is not None
    T, W = (torch.full((1,), n, device=x_TD.device).int() for n in (len(x_TD), 64))
    block_scaled_gemm(rows, matrix, T, recipe, torch.bfloat16)
    block_scaled_wgrad(columns, columns, W, recipe)


def run_mixed(x_TD: Tensor) -> None:
    """Products of one group, of E5M2 by E4M3."""
    T, ones = len(x_TD), torch.ones(1, x_TD.shape[1], device=x_TD.device)
    end = torch.full((1,), T, dtype=torch.int32, device=x_TD.device)
    a, b = Blocks(x_TD.to(torch.float8_e5m2), ones[0, :T], "row"), x_TD.to(FP8)
    mixed_format_gemm(a, Blocks(b[None], ones[:, :T], "row"), end, torch.bfloat16)
    x, y = (Blocks(t.T.contiguous(), ones, "row") for t in (a.values, b))
    mixed_format_wgrad(x, y, end, torch.bfloat16)


def run_pages(device: str, index: Any) -> None:
    """Rows to pages of the device and of the host, and back."""
    S, R = index.slots_SK.shape[0], index.row_ids_R.shape[0]
    pool = PagePool.allocate(2, 256, torch.device(device), num_host_pages=2)
    layout = PageLayout.from_matrices(pool, [(64, True), (32, False)], S, R)
    matrices = [torch.zeros(n, B, dtype=torch.uint8, device=device) for n, B in ((S, 64), (R, 32))]
    table, other = layout.make_table(), layout.make_table()
    take_pages_for_rows(table, layout, index.slots_SK, index.num_rows)
    stash_or_restore_rows(matrices, table, layout, stash=True)
    stash_or_restore_rows(
        matrices, table, layout, stash=False, released_table=(other, layout.num_entries)
    )
    return_pages(table, layout.num_entries, pool)


def run_adamw(device: str) -> None:
    """A tensor at an odd address and a longer one, moments of all dtypes, masters split."""
    options = AdamWOptions(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

    def tensors(dtype: torch.dtype) -> list[Tensor]:
        longer = torch.rand(8 * BLOCK, device=device)
        return [longer.to(dtype), torch.rand(9, device=device)[1:].to(dtype)]

    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        steps = [torch.ones((), device=device)] * 2
        for weight in (torch.float32, torch.bfloat16):
            columns = map(tensors, (weight, weight, dtype, dtype))
            blocks = [torch.zeros(8 * BLOCK, dtype=torch.uint8, device=device) for _ in range(2)]
            exponents = [b.view(-1, 2) for b in blocks] if dtype == torch.uint8 else ()
            remainders = tensors(torch.int16) if weight == torch.bfloat16 else ()
            adamw_(AdamWTensors(*columns, steps, [0, 1], exponents, remainders), options)


def run_experts(kind, saves_h, x_TD, index, *, hidden_dim=136, recipe=None) -> None:
    """Experts without a gate, experts whose FC1 runs again in backward, and those in FP8."""
    act, D = ActivationOptions(kind=kind), x_TD.shape[1]
    columns = 2 * hidden_dim if act.gated else hidden_dim
    w1, w2 = (
        torch.randn(shape, device=x_TD.device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((4, columns, D), (4, D, hidden_dim))
    )
    options = ExpertMLPOptions(activation=act, products="triton", saves_h=saves_h, recipe=recipe)
    expert_mlp(
        Rows(x_TD), ExpertWeights(w1_eCD=w1, w2_eDF=w2), index, options
    ).float().sum().backward()


def run_loss(device: str) -> None:
    """Rows of one step and of several, aligned or not; gradients in place, apart and not wanted."""
    for V in (7, 100, 50257, 65544):
        logits_CV = torch.randn(3, V, device=device)
        labels_C = torch.tensor([V - 1, -100, 0], device=device)
        for dtype in (None, torch.bfloat16, torch.float32):
            cross_entropy.cross_entropy_(logits_CV, labels_C, dtype)
        high, total, _ = cross_entropy.softmax_statistics(logits_CV, labels_C).unbind(1)
        for dtype in (torch.bfloat16, torch.float32):
            cross_entropy.softmax_gradient_(logits_CV, labels_C, high, total, dtype)
    logits_CV = torch.randn(3, 16512, device=device).bfloat16()
    labels_C = torch.tensor([16511, -100, 0], device=device)
    cross_entropy.cross_entropy_blocks(logits_CV, labels_C, power_of_two=True)
    high, total, _ = cross_entropy.softmax_statistics(logits_CV, labels_C).unbind(1)
    cross_entropy.softmax_gradient_blocks(logits_CV, labels_C, high, total, power_of_two=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    run_all("cuda")
    torch.cuda.synchronize()
    print(f"{len(every_kernel())} kernels ran")
