import dataclasses
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.profiler import ProfilerActivity, profile

from moecore.base.options.memory import GEMM_LAST, MemoryOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, preset
from moecore.models.block import Block
from moecore.precision.apply import apply_precision
from moecore.train.graphs.regions import compile_blocks, find_compiled_modules
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.compiled import make_inductor_options
from tests.helpers.grids import beside
from tests.train.memory.blocks import NoisyBlock
from tests.train.memory.test_recompute import CPU, equal, gradients, kept_bytes, tokens

PRODUCTS = re.compile("aten::(mm|bmm|addmm|_scaled_dot_product_.*)")
PARTS = {
    "tiny-qwen3": (("norm", "rope", "qkv_proj"), ("norm", "rope")),
    "tiny-qwen3 in FP8": (("norm", "rope", "qkv_proj"),),
    "tiny-shared": (GEMM_LAST, (*GEMM_LAST, "qkv_proj", "mlp")),
    "tiny-deepseek-v3": (GEMM_LAST, (*GEMM_LAST, "mla_up_proj")),
}
pytestmark = pytest.mark.filterwarnings("error:MemoryOptions.recompute")
CASES = [(name, parts) for name, options in PARTS.items() for parts in options]
# Parts of others.
NIGHTLY = [
    ("tiny-qwen3", ("norm", "rope", "qkv_proj")),
    ("tiny-qwen3", ("norm", "rope")),
    *(("tiny-shared", parts) for parts in PARTS["tiny-shared"]),
    ("tiny-deepseek-v3", GEMM_LAST),
]


def build(name: str) -> Decoder:
    """Return a preset whose attention is one operation on a CPU: with heads of one size."""
    config = dataclasses.replace(preset(name.removesuffix(" in FP8")), num_layers=2)
    if config.mla is not None:
        mla = dataclasses.replace(config.mla, v_head_dim=config.mla.qk_head_dim)
        config = dataclasses.replace(config, mla=mla)
    model = Decoder(config)
    if name.endswith("FP8"):
        apply_precision(model, Precision(recipe=Recipe()))
    return model


def backend(options: dict[str, Any]) -> Any:
    """Return Inductor without its kernels: its joint pass, its cut, and torch's operations."""

    def partition(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if options:
            options["joint_custom_pre_pass"](module.graph)
        return min_cut_rematerialization_partition(module, *args, **kwargs)

    return aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=partition
    )


def keep_less(model: Decoder, parts: Any, *, compile: bool) -> Decoder:
    memory, blocks = MemoryOptions(recompute=parts), list(model.layers)
    compiled = set[nn.Module]()
    if compile:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compile_blocks(blocks, backend=backend(make_inductor_options(blocks, memory)))
        compiled = {module for block in blocks for module in find_compiled_modules(block)}
    apply_memory_options(blocks, memory, CPU, compiled_modules=compiled)
    return model


def ran(model: Decoder) -> tuple[dict[str, Tensor], int, Counter[str]]:
    """Return gradients, kept bytes and how often each product ran."""
    model(tokens(0), tokens(1)).backward()
    found = gradients(model)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        model(tokens(0), tokens(1)).backward()
    model.zero_grad()
    products = {e.key: e.count for e in prof.key_averages() if PRODUCTS.fullmatch(e.key)}
    return found, kept_bytes(model), Counter(products)


@cache
def bytes_of_all(name: str) -> int:
    """Return what a compiled model keeps that computes nothing again."""
    return ran(keep_less(build(name), (), compile=True))[1]


@pytest.mark.parametrize("case", beside(CASES, NIGHTLY), ids=str)
def test_bytes_bits_and_products_are_those_of_eager_regions(case: tuple[str, Any]) -> None:
    name, parts = case
    eager, eager_bytes, eager_products = ran(keep_less(build(name), parts, compile=False))
    compiled, compiled_bytes, products = ran(keep_less(build(name), parts, compile=True))
    equal(compiled, eager)
    assert compiled_bytes == pytest.approx(eager_bytes, rel=0.02)
    assert products <= eager_products, "an eager MLP runs its last product again, too"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled_bytes < 0.8 * bytes_of_all(name)


@pytest.mark.parametrize("parts", beside([(), ("norm", "rope")], [()]), ids=str)
def test_lengths_are_dynamic_from_the_second_one_on(parts: Any) -> None:
    """Each new length would be a graph, up to torch's limit, and eager from there on."""
    eager, compiled = (keep_less(build("tiny-qwen3"), parts, compile=c) for c in (False, True))
    for T in (48, 31, 7, 50, 12, 23, 64, 9, 41, 17, 5):
        found = []
        for model in (eager, compiled):
            model(tokens(0, T), tokens(1, T)).backward()
            found.append(gradients(model))
        for name, grad in found[0].items():
            error = (found[1][name] - grad).abs().max()
            assert error <= 1e-5 * grad.abs().max(), (T, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    assert kept_bytes(compiled) <= 1.02 * kept_bytes(eager)


class Whole(Block):
    """A block that names no region: it is compiled up to its MoE layer and from there on."""

    @property
    def compile_regions(self) -> tuple[str, ...]:
        raise AttributeError


def test_a_block_that_names_no_region_keeps_what_its_moe_layer_reads_besides() -> None:
    found = []
    for compile in (False, True):
        model = Decoder(preset("tiny-qwen3"))
        for block in model.layers:
            block.__class__ = Whole
        keep_less(model, ("norm", "rope", "qkv_proj"), compile=compile)
        found.append(ran(model))
    (eager, eager_bytes, _), (compiled, compiled_bytes, _) = found
    equal(compiled, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "up to it, and from there"
    one = 4 * tokens(0).numel() * model.config.dim
    assert compiled_bytes == eager_bytes + one * len(model.layers)


def test_inductor_takes_the_marks() -> None:
    options = make_inductor_options(
        Decoder(preset("tiny")).layers, MemoryOptions(recompute="gemm_last")
    )
    assert torch.compile(torch.sin, options=options) and options["joint_custom_pre_pass"].uuid()
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(torch.sin, options={"no_such_pass": options["joint_custom_pre_pass"]})


@pytest.mark.parametrize("parts", [GEMM_LAST, ("norm", "qkv_proj")], ids=str)
def test_random_numbers_are_those_of_forward(parts: Any) -> None:
    torch.manual_seed(0)
    block, x_BTD, found = NoisyBlock(), torch.randn(2, 16, 64), []
    for options in ({}, make_inductor_options([block], MemoryOptions(recompute=parts))):
        torch.compiler.reset()
        compiled = torch.compile(block, backend=backend(options))
        torch.manual_seed(1)
        for _ in range(2):
            compiled(x_BTD).square().sum().backward()
        found.append(gradients(block) | {"next": torch.rand(1)})
    equal(found[1], found[0])
