import itertools
from typing import Any

import pytest
import torch
from benchmarks import layers
from benchmarks.gate import ROOT
from benchmarks.shapes import SHAPES

TINY, CPU = SHAPES["tiny"], torch.device("cpu")


def choice(routing: str) -> torch.Tensor:
    layer, x_TD = layers.make_layer(TINY, routing, device=CPU)
    with torch.no_grad():
        return layer.router(x_TD).expert_ids_TK


def test_hottest_by_hand() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]], dtype=torch.int32)
    assert layers.compute_hottest(ids, 4) == 2.0  # 4 choices of 8, on 4 experts: mean 2


def test_even_routing_is_even_and_skewed_routing_reaches_its_skew() -> None:
    assert layers.compute_hottest(choice("even"), TINY.num_experts) == 1.0
    found = layers.compute_hottest(choice("skewed"), TINY.num_experts)
    assert found == pytest.approx(TINY.skew, rel=layers.SKEW_TOLERANCE)
    assert 1.0 < layers.compute_hottest(choice("learned"), TINY.num_experts) < 2.0


def test_skewed_bias_has_hot_and_cool_experts() -> None:
    logits = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    bias = layers.compute_skewed_bias(logits, 4, 5.0)
    counts = torch.bincount((logits + bias).topk(4).indices.flatten(), minlength=64)
    mean = counts.float().mean()
    assert float(counts.max() / mean) == pytest.approx(5.0, rel=0.02)
    assert int((counts < 0.7 * mean).sum()) > 64 / 4, "the others are not simply even"


def test_six_products_are_those_of_a_loop_over_experts(monkeypatch: Any) -> None:
    layer, x_TD = layers.make_layer(TINY, "learned", device=CPU)
    with torch.no_grad():
        ids_TK = layer.router(x_TD).expert_ids_TK
        six = layers.SixProducts(layer, x_TD, ids_TK)
    found, grouped_mm = [], layers.grouped_mm
    monkeypatch.setattr(
        layers, "grouped_mm", lambda *a, **k: found.append(grouped_mm(*a, **k)) or found[-1]
    )
    six.all()
    stops = [0, *six.offsets_E.tolist()]
    assert stops[-1] == TINY.rows
    by_row = [(six.x_RD, layer.experts.w1.flatten(1, 2).transpose(1, 2))]
    by_row += [(six.a_RF, layer.experts.w2.transpose(1, 2)), (six.dy_RD, layer.experts.w2)]
    by_row += [(six.dh_R2F, layer.experts.w1.flatten(1, 2))]
    by_expert = [(six.dy_RD, six.a_RF), (six.dh_R2F, six.x_RD)]
    spans = list(itertools.pairwise(stops))
    expected = [
        torch.cat([rows[a:b] @ w[e] for e, (a, b) in enumerate(spans)]) for rows, w in by_row
    ]
    expected += [torch.stack([p[a:b].T @ q[a:b] for a, b in spans]) for p, q in by_expert]
    order = [0, 1, 2, 4, 3, 5]  # as `all` runs them: the input gradient, then the weight gradient
    for i, result in zip(order, found, strict=True):
        torch.testing.assert_close(result, expected[i].detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not layers.has_transformers(), reason="transformers is not installed")
def test_the_competitor_computes_the_same_layer() -> None:
    layer, x_TD = layers.make_layer(TINY, "learned", device=CPU)
    block = layers.make_transformers_block(layer)
    with torch.no_grad():
        y, theirs = layer(x_TD), block(x_TD[None])[0]
    # Its router rounds logits to bf16, so a token near a tie may go to another expert.
    rows = (y - theirs).float().norm(dim=-1) / y.float().norm(dim=-1)
    assert float(rows.median()) < 0.02
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert {p.untyped_storage().data_ptr() for p in block.parameters()} == weights


def test_what_proves_the_layer_has_tests_for_the_device() -> None:
    """Else the gate would refuse the layer for want of a test, on a GPU alone."""
    for path in (*layers.GPU_TESTS, *layers.FP8_GPU_TESTS):
        text = (ROOT / path).read_text()
        assert "device: str" in text or "mark.gpu" in text, path
    assert all((ROOT / path).is_file() for path in (*layers.CPU_TESTS, *layers.FP8_CPU_TESTS))
