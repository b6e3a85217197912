import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.bench_memory import OPTIONS, config_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore import CapacityConfig, MoEConfig
from moecore.base.options.memory import GEMM_LAST, OFFLOADED, MemoryOptions
from moecore.base.options.precision import Recipe
from moecore.base.saved_tensors import use_packer
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from moecore.models import Decoder, SparseKeysConfig, preset
from moecore.moe.experts import Experts
from moecore.moe.layer import MoELayer
from moecore.parallel.fsdp.units import find_blocks
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.offload import Offload
from moecore.train.memory.saved_bytes import count_saved_bytes
from tests.helpers.grids import beside

RECORDS = Path(__file__).parents[3] / "benchmarks/results/memory/2026-11-22-nvidia-h200.jsonl"
TOKENS = torch.randint(0, 60, (2, 48), generator=torch.Generator().manual_seed(0))
# With heads of two sizes, as MLA has, attention on a CPU keeps the scores of all pairs of tokens.
MODELS = ("tiny", "tiny-qwen3", "tiny-qwen3-next", "tiny-nemotron-h", "tiny-shared")
MODELS += ("tiny-deepseek-v3", "tiny-sparse", "qwen3-moe", "gpt-oss")
EVERY = {
    "nothing": (),
    "gemm_last": "gemm_last",
    "products": (*GEMM_LAST, "qkv_proj", "mla_up_proj", "mlp", "shared_experts"),
    "fc1": ("norm", "expert_fc1"),
    "moe": ("norm", "moe"),
}
KEPT = [(name, parts) for name in MODELS for parts in EVERY]  # every other one by day


def build(name: str) -> nn.Module:
    """Return a small model in moecore's layers."""
    if name.startswith("tiny"):
        is_sparse = name == "tiny-sparse"
        config = preset("tiny-deepseek-v3" if is_sparse else name)
        if config.mla is not None:
            config = replace(config, mla=replace(config.mla, v_head_dim=24))
        if is_sparse:
            sparse = SparseKeysConfig(num_heads=2, head_dim=16, top_k=8)
            config = replace(config, mla=replace(config.mla, sparse=sparse))
        return Decoder(config)
    from tests.families.transformers.hf_models import MODELS as OF_TRANSFORMERS

    model = OF_TRANSFORMERS[name]().train()
    swap_blocks(model, {})
    return model


def run(model: Any) -> Any:
    if isinstance(model, Decoder):
        return model(TOKENS, TOKENS)
    return model(TOKENS, use_cache=False, position_ids=torch.arange(48)[None])


class Saved:
    """Adds the bytes of real storages that are there when it is asked, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        params = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        self.weights = {p.untyped_storage().data_ptr() for p in params}
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __call__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            ref = StorageWeakRef(storage)
            self.found[ref.cdata] = ref, storage.nbytes()

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self.found.values() if not ref.expired())


def predicted(model: nn.Module, options: MemoryOptions, **how: Any) -> tuple[int, int]:
    """Return the bytes on the device and in host memory."""
    kept = count_saved_bytes(
        model, find_blocks(model), run, options=options, device_type="cpu", **how
    )
    everything = (*kept.blocks, kept.outside)
    return sum(one.num_bytes for one in everything), sum(sum(o.host.values()) for o in everything)


def counted(model: nn.Module, options: MemoryOptions) -> int:
    """Return the bytes that a real forward keeps; the model has the options from here on."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.recompute_fc1 = "expert_fc1" in options.parts
    apply_memory_options(find_blocks(model), options, torch.device("cpu"))
    saved = Saved(model)
    with use_packer(saved):
        out = run(model)
    num_bytes = saved.num_bytes
    del out
    return num_bytes


@pytest.mark.filterwarnings("ignore:MemoryOptions")
@pytest.mark.parametrize(("name", "parts"), beside(KEPT, KEPT[1::2], several=True))
def test_a_forward_keeps_what_was_predicted(name: str, parts: str) -> None:
    if not name.startswith("tiny"):
        pytest.importorskip("transformers", minversion="5")
    model, options = build(name), MemoryOptions(recompute=EVERY[parts])
    before = {n: p.clone() for n, p in model.named_parameters()}
    here, host = predicted(model, options)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert (here, host) == (counted(model, options), 0)
    assert predicted(model, options) == (here, 0)  # of a model that has the options already


# A table of positions, attention's, outlives its copy: it travels, and stays where it is, too.
@pytest.mark.parametrize("parts", [("norm", "mlp", "shared_experts", "experts"), OFFLOADED])
@pytest.mark.parametrize("name", ["tiny-shared", "tiny-deepseek-v3"])
def test_offload_moves_bytes_to_the_host(name: str, parts: tuple[Any, ...]) -> None:
    options = MemoryOptions(recompute="gemm_last", offload=parts, offload_fraction=0.5)
    with patch("moecore.train.memory.apply.Offload", partial(Offload, min_bytes=1)):
        model = build(name)
        whole, _ = predicted(model, MemoryOptions(recompute="gemm_last"))
        here, host = predicted(model, options)
        offload = apply_memory_options(find_blocks(model), options, torch.device("cpu"))
    loss = run(model)
    assert 0 < host == offload.out_bytes and here + host == whole
    del loss


LAYERS: dict[str, tuple[MoEConfig, dict[str, Any]]] = {
    name: (MoEConfig(dim=256, hidden_dim=128, num_experts=8, top_k=2, **config), backend)
    for name, config, backend in (
        ("plain", {}, {}),
        ("fc1", {}, dict(recompute_fc1=True)),
        ("fp8 rows", {}, dict(recipe=Recipe())),
        ("fp8 rows alone", {}, dict(recipe=Recipe(keep_hidden="wide"))),
        ("rowwise", {}, dict(recipe=Recipe(scaling="rowwise"))),
        ("mxfp8", {}, dict(recipe=Recipe(scaling="mxfp8"))),
        ("nvfp4", {}, dict(recipe=Recipe(scaling="nvfp4"))),
        ("biased", dict(fc1_bias=True, fc2_bias=True), {}),
        ("latent", dict(latent_dim=128), {}),
        ("capacity", dict(capacity=CapacityConfig(factor=1.0, pad=True)), {}),
        ("expert choice", dict(assignment="expert_choice"), {}),
        ("sinkhorn", dict(assignment="sinkhorn"), {}),
    )
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_what_was_predicted(name: str) -> None:
    config, backend = LAYERS[name]
    layer = MoELayer(config)
    layer.experts.set_backend(backend.pop("backend", "auto"), **backend)
    x = torch.randn(96, 256, requires_grad=True)
    options = MemoryOptions(recompute=("expert_fc1",) if "recompute_fc1" in backend else ())
    given = x.detach().to("meta").requires_grad_()
    how: dict[str, Any] = dict(options=options, device_type="cpu")
    kept = count_saved_bytes(layer, [layer], lambda copy: copy(given), **how)
    saved = Saved(layer)
    with use_packer(saved):
        y = layer(x)
    assert kept.blocks[0].num_bytes + kept.outside.num_bytes == saved.num_bytes
    del y


def test_a_forward_in_the_place_of_a_class_s_counts_though_it_is_wrapped() -> None:
    """Sparse attention in chunks, which offload wraps."""
    pytest.importorskip("transformers", minversion="5")
    from tests.families.transformers.family_models import tiny_model

    model, options = tiny_model("glm_moe_dsa"), MemoryOptions(offload=("attention",))
    swap_blocks(model, {})
    of_class, _ = predicted(model, options)
    use_causal_attention(model)
    kept = predicted(model, options)
    apply_memory_options(find_blocks(model), options, torch.device("cpu"))
    assert kept[0] != of_class and predicted(model, options) == kept


def test_what_experts_keep_by_hand() -> None:
    """R rows of C columns, and an index: row ids, weights and ends of experts."""
    T, K, E, C, D = 96, 2, 8, 2 * 128, 256
    x = torch.empty(T, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer = MoELayer(LAYERS["plain"][0], device="meta", dtype=torch.bfloat16)
    parts: tuple[Any, ...]
    for parts, columns in (((), C), (("expert_fc1",), 0)):
        options = MemoryOptions(recompute=parts)
        call = dict(options=options, device_type="cuda")
        (kept,) = count_saved_bytes(layer, [layer], lambda copy: copy(x), **call).blocks  # type: ignore[arg-type]
        assert kept.device["experts"] == T * K * columns * 2 + T * K * (4 + 4) + E * 4
        assert kept.device["routing"] >= T * D * 2 + T * E * 4 + T * K * 4


@pytest.mark.parametrize(("scaling", "row_bytes"), [("mxfp8", 256 + 8), ("nvfp4", 128 + 17)])
def test_what_experts_keep_in_blackwell_formats(scaling: Any, row_bytes: int) -> None:
    """H of 256 columns: values, and a byte per block; of "nvfp4" one more per row."""
    T, K, E = 96, 2, 8
    x = torch.empty(T, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer = MoELayer(LAYERS["plain"][0], device="meta", dtype=torch.bfloat16)
    layer.experts.set_backend("auto", recipe=Recipe(scaling=scaling))
    call = dict(options=MemoryOptions(), device_type="cuda")
    (kept,) = count_saved_bytes(layer, [layer], lambda copy: copy(x), **call).blocks  # type: ignore[arg-type]
    assert kept.device["experts"] == T * K * row_bytes + T * K * (4 + 4) + E * 4


def test_a_gpu_keeps_what_was_predicted() -> None:
    """What an H200 allocated beside it: the model's last norm, its input and output.

    The first option of a record also has what a GPU allocates once, 1%.
    """
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    rows = [row for row in rows if row.get("op") == "memory" and not row["compile"]]
    rows = [row for row in rows if row["variant"] != "all"]  # of an option that is no more
    assert len({row["preset"] for row in rows}) == 2
    for row in rows:
        config = config_of(argparse.Namespace(**row))
        model = Decoder(config, device="meta")
        routers = {layer.router.weight for layer in model.modules() if isinstance(layer, MoELayer)}
        tokens = torch.zeros(row["batch_size"], row["seq_len"], dtype=torch.int64)
        kept = count_saved_bytes(
            model,
            find_blocks(model),
            lambda copy, tokens=tokens: copy.model(tokens),
            options=MemoryOptions(recompute=OPTIONS[row["variant"]]),
            device_type="cuda",
            get_compute_dtype=lambda p, routers=routers: (
                p.dtype if p in routers else torch.bfloat16
            ),
        )
        per_token = sum(one.num_bytes for one in kept.blocks) / tokens.numel()
        per_layer = (per_token + 4 * config.dim + 4) / config.num_layers
        rel = 0.011 if row["variant"] == "nothing" else 0.003
        assert per_layer == pytest.approx(row["kept_bytes_per_token_and_layer"], rel=rel), row
