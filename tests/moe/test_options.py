"""Every config and every single option of a layer: the oracle, hard inputs, low precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import MoELayer
from moecore.base.options.layer import CapacityConfig
from moecore.moe.micro_batch import MicroBatch
from tests.moe import moe_cases as mc
from tests.moe.reference import moe_reference


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backend", ["torch", "sequential"])
@pytest.mark.parametrize("name", mc.CASES)
def test_against_the_oracle(name: str, backend: str, training: bool, masked: bool) -> None:
    layer = mc.make_layer(mc.CASES[name]).train(training)
    layer.get_part("experts").set_backend(backend)
    mask = mc.padding(3, 7) if masked else None
    mc.compare_with_oracle(layer, mc.tokens(3, 7, 32), padding_mask=mask)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", mc.CASES)
def test_against_the_oracle_with_all_auxiliary_losses(name: str, masked: bool) -> None:
    layer = mc.make_layer(mc.with_losses(mc.CASES[name]))
    mc.compare_with_oracle(
        layer, mc.tokens(2, 9, 32), padding_mask=mc.padding(2, 9) if masked else None
    )


class Tape:
    """Gives fixed choices."""

    def __init__(self, ids_TK: Tensor) -> None:
        self.ids_TK = ids_TK
        self.seen: list[Tensor] = []

    def get_recorded_choice(self, num_tokens, device, choose) -> tuple[Tensor, Tensor | None]:
        assert num_tokens == self.ids_TK.shape[0]
        return self.ids_TK, None

    def observe_choice(self, ids_TK: Tensor) -> None:
        self.seen.append(ids_TK)


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.7)], ids=["all", "capacity"])
def test_given_choices(order: Any, capacity: CapacityConfig | None) -> None:
    """Weights are of the live scores; an id of -1 is no choice, and a token may have none."""
    config = replace(mc.with_losses(mc.BASE), score_order=order, capacity=capacity, top_k=3)
    layer, x, mask = mc.make_layer(config), mc.tokens(2, 8, 32), mc.padding(2, 8)
    generator = torch.Generator().manual_seed(3)
    ids_TK = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(16)]).int()
    ids_TK[2, 1], ids_TK[4] = -1, -1
    tape = Tape(ids_TK)
    layer.router.tape = tape
    params = mc.leaves(layer)
    x_ours, x_ref = (x.clone().requires_grad_() for _ in range(2))
    out = moe_reference(x_ref, params, config, padding_mask_BT=mask, given_ids_NK=ids_TK)
    (out.y_BTD.square().sum() + sum(out.losses.values())).backward()
    y = layer(x_ours, mask)
    y.square().sum().backward()
    mc.assert_equal_to_scale(y, out.y_BTD, "y")
    mc.assert_equal_to_scale(x_ours.grad, x_ref.grad, "x")
    for name, parameter in layer.named_parameters():
        mc.assert_equal_to_scale(parameter.grad, params[name].grad, name)
    assert torch.equal(tape.seen[0], ids_TK.masked_fill(mask.flatten()[:, None], -1))
    assert torch.equal(layer.tracker.counts.choices_E, out.counts_E)


@pytest.mark.parametrize("shape", [(0, 32), (0, 5, 32), (3, 0, 32)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", mc.CASES)
def test_zero_tokens(name: str, masked: bool, shape: tuple[int, ...]) -> None:
    layer = mc.make_layer(mc.with_losses(mc.CASES[name]))
    mask = torch.zeros(shape[:-1], dtype=torch.bool) if masked else None
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x, mask)
    assert y.shape == shape
    y.sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{parameter_name}: FSDP waits for every gradient"
        assert (parameter.grad == 0).all(), parameter_name
    assert int(layer.tracker.counts.choices_E.sum()) == 0


@pytest.mark.parametrize("name", mc.CASES)
def test_padding_alone(name: str) -> None:
    """Nothing is routed, lost or counted; the shared experts still read every token."""
    config = mc.with_losses(mc.CASES[name])
    layer, x = mc.make_layer(config), mc.tokens(2, 5, 32).requires_grad_()
    mask = torch.ones(2, 5, dtype=torch.bool)
    routing = layer.router(x.detach().view(10, 32), micro_batch_of(mask))
    assert (routing.expert_ids_TK == -1).all() and (routing.chosen_ids_TK == -1).all()
    y = layer(x, mask)
    assert config.shared_hidden_dim or (y == 0).all()
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for parameter_name, parameter in layer.named_parameters():
        shared = parameter_name.startswith("shared")
        assert parameter.grad is not None and parameter.grad.isfinite().all()
        assert shared or (parameter.grad == 0).all(), parameter_name
    counts = layer.tracker.counts
    assert counts is not None and not counts.choices_E.any() and not counts.losses.any()
    assert counts.capacity_choices_E is None or not counts.capacity_choices_E.any()
    before = layer.router.selection_bias
    before = None if before is None else before.clone()
    mc.make_state(layer).finish_step()
    assert before is None or torch.equal(layer.router.selection_bias, before)


def micro_batch_of(mask_BT: Tensor) -> MicroBatch:
    return MicroBatch(num_sequences=mask_BT.shape[0], padding_mask_T=mask_BT.reshape(-1))


@pytest.mark.parametrize("shape", [(3, 4), (3, 5), (4, 3)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    layer, x = mc.make_layer(mc.BASE), mc.tokens(3, 4, 32)
    if shape == (3, 4):
        with pytest.raises(ValueError, match=r"padding_mask.*torch.uint8.*must be bool"):
            layer(x, torch.zeros(shape, dtype=torch.uint8))
        return
    with pytest.raises(ValueError, match=r"padding_mask.*must be bool of the shape of x"):
        layer(x, torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("name", mc.CASES)
def test_padding_has_no_part(name: str) -> None:
    """Whatever it holds changes no bit; attention gives NaN for a row that may look nowhere."""
    layer, x, mask = (
        mc.make_layer(mc.with_losses(mc.CASES[name])),
        mc.tokens(2, 9, 32),
        mc.padding(2, 9),
    )
    mask[0, 0] = True
    found = []
    for content in (torch.zeros(()), 30 * mc.tokens(2, 9, 32, seed=9), torch.tensor(float("nan"))):
        torch.manual_seed(0)
        x_ours = torch.where(mask[..., None], content, x).requires_grad_()
        y = layer(x_ours, mask)
        torch.where(mask[..., None], 0, y).square().sum().backward()
        is_nan = bool(content.isnan().any())
        assert is_nan or x_ours.grad[mask].eq(0).all(), "padding gets no gradient"
        counts, grads = layer.tracker.counts, {n: p.grad for n, p in layer.named_parameters()}
        of_shared = [n for n in grads if is_nan and n.startswith("shared")]
        grads = {n: g.clone() for n, g in grads.items() if n not in of_shared}
        seen = [
            y[~mask].detach(),
            x_ours.grad[~mask],
            counts.choices_E.clone(),
            counts.losses.clone(),
        ]
        found.append(dict(enumerate(seen)) | grads)
        layer.zero_grad()
        layer.tracker.reset()
    for other in found[1:]:
        assert all(t.isfinite().all() for t in other.values())
        assert not [n for n, t in other.items() if not torch.equal(t, found[0][n])]


@pytest.mark.parametrize("backend", ["torch", "sequential"])
@pytest.mark.parametrize("name", mc.CASES)
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(name: str, backend: str) -> None:
    """The router is fp32 in all three, so routing is equal and only the experts round."""
    config = mc.CASES[name]
    layer = mc.make_layer(config, std=0.2).bfloat16()
    layer.get_part("experts").set_backend(backend)
    x, factor, mask = (
        mc.tokens(2, 40, 32).bfloat16(),
        mc.tokens(2, 40, 32, seed=2),
        mc.padding(2, 40),
    )

    def plain(dtype: torch.dtype) -> dict[str, Tensor]:
        params = {n: t.detach().to(dtype).requires_grad_() for n, t in mc.leaves(layer).items()}
        x_in = x.detach().to(dtype).requires_grad_()
        y = mc.oracle_of(config, x_in, params, padding_mask_BT=mask).y_BTD
        (y.float() * factor).sum().backward()
        grads = {n: t.grad for n, t in params.items() if t.grad is not None}
        return {"y": y.detach(), "x": x_in.grad} | grads  # type: ignore[return-value]

    truth, rounded = plain(torch.float32), plain(torch.bfloat16)
    x_ours = x.clone().requires_grad_()
    torch.manual_seed(0)
    y = layer(x_ours, mask)
    assert y.dtype == torch.bfloat16
    (y.float() * factor).sum().backward()
    ours = {"y": y.detach(), "x": x_ours.grad}
    ours |= {n: p.grad for n, p in layer.named_parameters()}
    for key, found in ours.items():
        assert found is not None and found.dtype == torch.bfloat16
        if key.startswith("router") and mc.has_constant_weights(config):
            continue  # what rounding leaves of 0 has no scale
        mc.assert_twice_as_good(found, rounded[key], truth[key], key)


@pytest.mark.parametrize(
    "name", ["gpt-oss", "latent-input", "three-gates", "expert-choice", "gelu"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast an input of either dtype works, as it does for nn.Linear."""
    layer, x = mc.make_layer(mc.CASES[name]), mc.tokens(2, 9, 32).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    expected = layer(x.detach().float()).detach()
    assert float((y.detach().float() - expected).abs().max() / expected.abs().max()) < 0.03


@pytest.mark.parametrize("name", mc.CASES)
def test_meta_then_to_empty_then_init_equals_a_real_build(name: str) -> None:
    layer, real = MoELayer(mc.CASES[name], device="meta"), MoELayer(mc.CASES[name])
    assert all(t.is_meta for t in [*layer.parameters(), *layer.buffers()])
    layer.to_empty(device="cpu")
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data.fill_(float("nan"))
    layer.init_weights(key="moe")
    real.init_weights(key="moe")
    assert layer.state_dict().keys() == real.state_dict().keys()
    for key, tensor in real.state_dict().items():
        assert torch.equal(layer.state_dict()[key], tensor), key
