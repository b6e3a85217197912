from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    ContextOptions,
    IndexerConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.kernels.sparse_attention import attention
from moecore.kernels.sparse_attention.index import round_to_fp8
from moecore.models import Decoder
from tests.io.hf.states import native_state
from tests.models.hf_pairs import gradients, make_pair

CUTS = torch.tensor([0, 9, 20, 32])  # documents of two rows; the last ends with padding


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(32) >= 29).view(2, 16)
    labels = ids.roll(-1).masked_fill(mask, -100)
    labels.view(-1)[CUTS[1:] - 1] = -100
    return dict(ids=ids, labels=labels, mask=mask)


def trained(model: nn.Module, config: IndexerConfig, **given: Any) -> dict[str, Any]:
    """Return the loss, those of indexers by layer, and a state dict of gradients."""
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), indexer=config)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with step.micro_batch():
        out = model(**given)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
    found = gradients(model)
    return dict(loss=loss, losses=step.finish().metrics.indexer_losses, grads=found)


CONFIGS = {
    "sparse": IndexerConfig(loss_coef=0.5),
    "sparse, FP8": IndexerConfig(loss_coef=0.5, fp8_scores=True),
    "warm_up": IndexerConfig(stage="warm_up", loss_coef=0.5),
    "frozen, FP8": IndexerConfig(stage="frozen", fp8_scores=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_and_what_indexers_learn(name: str, monkeypatch: Any) -> None:
    pytest.importorskip("transformers", reason="its class is what is compared with")
    hf, config = make_pair("deepseek-v3.2")
    ours, given = Decoder(config), batch()
    ours.load_state_dict(native_state(hf.state_dict(), config))
    how, calls = CONFIGS[name], list[int]()
    monkeypatch.setattr(
        attention, "round_to_fp8", lambda indexer: calls.append(1) or round_to_fp8(indexer)
    )
    packed: Any = dict(cu_seqlens=CUTS, max_seqlen=12)
    names = dict(input_ids=given["ids"], shift_labels=given["labels"], padding_mask=given["mask"])
    want = trained(hf.train(), how, labels=given["labels"], use_cache=False, **names, **packed)
    own = dict(tokens_BT=given["ids"], labels_BT=given["labels"], padding_mask_BT=given["mask"])
    got = trained(ours, how, **own, **packed)
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0)
    assert len(calls) == 2 * 3 * how.fp8_scores  # of two models with three layers
    if how.stage == "frozen":
        assert not want["losses"] and not got["losses"]
    else:
        assert len(want["losses"]) == 3 and min(want["losses"].values()) > 1e-3
    for name, loss in want["losses"].items():
        torch.testing.assert_close(got["losses"][name], loss, rtol=1e-5, atol=0)
    for name, grad in native_state(want["grads"], config).items():
        scale = grad.abs().max()
        is_frozen = how.stage == "frozen" and ".indexer." in name
        assert (scale > 0) != is_frozen or "expert_bias" in name, name
        assert (got["grads"][name] - grad).abs().max() <= 1e-5 * scale, name


def test_scores_in_fp8_need_a_hadamard_matrix() -> None:
    _, config = make_pair("deepseek-v3.2")
    assert config.mla is not None and config.mla.sparse is not None
    sparse = replace(config.mla.sparse, head_dim=12)
    model = Decoder(replace(config, mla=replace(config.mla, sparse=sparse)), device="meta")
    with pytest.raises(ValueError, match=r"fp8_scores \(True\) must be False .* head_dim \(12\)"):
        trained(model, IndexerConfig(fp8_scores=True))


def test_indexers_without_a_config_learn_nothing() -> None:
    _, config = make_pair("deepseek-v3.2")
    model, given = Decoder(config), batch()
    model(given["ids"], given["labels"]).backward()
    unused = {n for n, p in model.named_parameters() if p.grad is None}
    assert unused == {n for n, _ in model.named_parameters() if ".indexer." in n}


def test_other_ways_of_context_parallelism_are_refused() -> None:
    _, config = make_pair("deepseek-v3.2")
    model = Decoder(config, device="meta")
    assert model.context_options(ContextOptions(), 2, 1).way == "allgather"
    with pytest.raises(ValueError, match=r"ContextOptions.way \('p2p'\) must be 'allgather' for"):
        model.context_options(ContextOptions(way="p2p"), 2, 1)
