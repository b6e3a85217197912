"""The whole MoELayer in FP8 against the layer in bf16, in the same rounds.

Rows `layer_fwd` and `layer_fwd_bwd` as in `bench_layer.py`, with moecore's bf16 in `bf16_ms`:

    blockwise           weights quantised in advance, as for the later micro-batches of a step
    blockwise+weights   weights quantised in every forward, and saved for its backward
    blockwise-wide      the first, with FC1's output saved in bf16
    rowwise, tensorwise only if selected by --backend; torch's products
    tensorwise-e5m2     the same, with gradients in E5M2 and moecore's products
    te-blockwise        Transformer Engine's products, which quantise weights again in backward

Quantised weights count as saved if a forward creates them.

A variant whose error against bf16 exceeds that of FP8 (`agreement.py`) gets no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import harness, layers
from benchmarks.agreement import count_roundings, describe_error
from benchmarks.bench_layer import Contender, measure
from benchmarks.records import Row
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape
from moecore import MoELayer
from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from moecore.base.torch_private import tree_leaves
from moecore.kernels.common import has_hopper_kernels
from moecore.moe.experts import Experts
from moecore.moe.records import Routing

TESTS = [*(layers.GPU_TESTS if torch.cuda.is_available() else layers.CPU_TESTS), *layers.FP8_TESTS]
TESTS += ["tests/kernels/grouped/test_scaled_rows.py", *layers.TE_TESTS]

BF16 = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Variant:
    """A variant of the layer in FP8.

    Attributes:
        recipe: of the experts.
        shares: whether forwards share the quantised weights.
        by_name: only if selected by --backend.
    """

    recipe: Recipe
    shares: bool
    by_name: bool = False


TENSORWISE = Recipe(scaling="tensorwise", backend="te")
HYBRID = Recipe(scaling="tensorwise", grad_format="e5m2")
WAYS = {
    "blockwise": FP8Variant(recipe=Recipe(), shares=True),
    "blockwise+weights": FP8Variant(recipe=Recipe(), shares=False),
    "blockwise-wide": FP8Variant(recipe=Recipe(keep_hidden="wide"), shares=True),
    "rowwise": FP8Variant(recipe=Recipe(scaling="rowwise"), shares=True, by_name=True),
    "tensorwise": FP8Variant(recipe=Recipe(scaling="tensorwise"), shares=True, by_name=True),
    "tensorwise-e5m2": FP8Variant(recipe=HYBRID, shares=True, by_name=True),
    "te-blockwise": FP8Variant(recipe=Recipe(backend="te"), shares=False),
    "te-tensorwise": FP8Variant(recipe=TENSORWISE, shares=False, by_name=True),
}


class Fp8Contender(Contender):
    """The layer with experts in FP8 and the layer's own weights.

    Args:
        layer: the layer.
        name: a key of `WAYS`.
        x_TD: tokens.
        dy_TD: gradient of the output.
    """

    def __init__(self, layer: MoELayer, name: str, x_TD: Tensor, dy_TD: Tensor) -> None:
        super().__init__(layer, name, x_TD, dy_TD)
        self.way, own = WAYS[name], layer.get_part("experts")
        self.experts = Experts(own.config, layout=own.layout, device="meta")
        for role, parameter in own.named_parameters():
            self.experts.register_parameter(role, parameter)
        self.experts.set_backend("auto", recipe=self.way.recipe)

    def prepare(self) -> None:
        """Put the experts into the layer; drop gradients and unshared quantised weights."""
        self.layer.experts = self.experts
        if self.way.shares:
            self.experts.reader.start_micro_batch(is_last=False)
        else:
            self.experts.reader.drop_copies()
        for tensor in (self.x, *self.module.parameters()):
            tensor.grad = None

    def list_existing(self) -> list[Tensor]:
        """Return parameters, buffers and shared quantised weights."""
        found = super().list_existing()
        if self.way.shares:
            weights = self.experts._prepare_weights(self.x.dtype)
            assert weights.quantised is not None
            found += tree_leaves(weights.quantised)
        return found


@pytest.mark.proven_by(*TESTS)
def test_layer_fp8(shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    layer, x_TD = layers.make_layer(shape, routing, device=session.device)
    dy_TD = torch.randn_like(x_TD)
    with torch.no_grad():
        ids_TK = layer.get_part("router")(x_TD).expert_ids_TK
        six = layers.SixProducts(layer, x_TD, ids_TK)
    reached = layers.compute_hottest(ids_TK, shape.num_experts)
    x_TD.requires_grad_()
    plain = Contender(layer, choose_bf16_backend(session.device), x_TD, dy_TD)
    chosen = session.backends or [name for name, way in WAYS.items() if not way.by_name]
    ways = {
        name: Fp8Contender(layer, name, x_TD, dy_TD)
        for name, way in WAYS.items()
        if name in chosen and is_supported(way.recipe, session.device, routing)
    }
    if not ways:
        pytest.skip(f"no backend of {', '.join(session.backends)} runs here with this routing")
    check_agreement(plain, ways)
    group: dict[str, Contender] = {BF16: plain, **ways}
    timings = time_together(group, six, session)
    beside: dict[str, Row] = {}
    for name, contender in group.items():
        own = timings | {key: timings[f"{name} {key}"] for key in ("fwd", "fwd+bwd")}
        for fields in measure(contender, own, shape, ceilings.tflops):
            row = Row(shape=shape.name, routing=routing, hottest=reached, **fields)
            base = beside.get(row.op) if name != BF16 else None
            session.add(row if base is None else add_bf16(row, base))
            if name == BF16:
                beside[row.op] = row


def is_supported(recipe: Recipe, device: torch.device, routing: str) -> bool:
    """Return whether this machine supports a recipe (Transformer Engine: learned routing only)."""
    if recipe.backend == "moecore":
        return True
    return routing == "learned" and te.find_recipe_problem(recipe, device) is None


def choose_bf16_backend(device: torch.device) -> str:
    """Return the backend that "auto" chooses for a layer in bf16."""
    return "triton" if has_hopper_kernels(device) else "torch"


def check_agreement(plain: Contender, contenders: dict[str, Fp8Contender]) -> None:
    """Fail if a contender's error against bf16 exceeds that of FP8.

    A token's gradient through its K routing weights is a sum that may cancel, so the error of a row
    has no bound: rows are compared without this gradient.
    """
    for by_row in (False, True):
        with without_weight_grads(plain.layer) if by_row else nullcontext():
            expected = compute_results(plain)
            for name, contender in contenders.items():
                found = compute_results(contender)
                for tensor, roundings in count_roundings(contender.way.recipe).items():
                    pair = found[tensor], expected[tensor]
                    problem = describe_error(*pair, roundings, by_row=by_row)
                    if problem is not None:
                        pytest.fail(f"{name} in {tensor}: {problem}: no numbers")


@contextmanager
def without_weight_grads(layer: MoELayer) -> Iterator[None]:
    """Return a context in which a layer's routing weights get no gradient."""

    def detach(router: nn.Module, args: object, routing: Routing) -> Routing:
        return replace(routing, weights_TK=routing.weights_TK.detach())

    with layer.get_part("router").register_forward_hook(detach):
        yield


def compute_results(contender: Contender) -> dict[str, Tensor]:
    """Return the output "y" and the gradients of "x", "w1" and "w2"."""
    y, dx = contender.result()
    found = {name: p.grad for name, p in contender.experts.named_parameters()}
    contender.prepare()  # drops all gradients, so that no other backward adds to these
    return {"y": y, "x": dx, **found}


def time_together(
    group: dict[str, Contender], six: layers.SixProducts, session: Session
) -> dict[str, harness.Timing]:
    """Time the baselines "two" and "six", and "<name> fwd" and "<name> fwd+bwd" of contenders."""
    calls: dict[str, harness.Call] = {"two": six.forward, "six": six.all}
    for name, contender in group.items():
        calls[f"{name} fwd"] = contender.forward
        calls[f"{name} fwd+bwd"] = contender.forward_backward

    def prepare(call: str) -> None:
        name = call.partition(" ")[0]
        if name in group:
            group[name].prepare()

    return harness.time_variants(
        calls, device=session.device, effort=session.effort, prepare=prepare
    )


def add_bf16(row: Row, base: Row) -> Row:
    """Return the row with the time and the saved bytes of bf16 in the same rounds."""
    assert row.saved_bytes is not None and base.saved_bytes
    return replace(
        row,
        bf16_ms=base.ms,
        speedup=base.ms / row.ms,
        saved_over_bf16=row.saved_bytes / base.saved_bytes,
    )
