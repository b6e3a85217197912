from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    IndexerConfig,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.families import use_causal_attention
from moecore.kernels.sparse_attention import attention, index
from moecore.kernels.sparse_attention.index import select_keys
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers import hf_models
from tests.families.transformers.family_models import tiny_model
from tests.families.transformers.indexer_cases import recorded
from tests.helpers.operations import Operations
from tests.kernels.sparse_attention.test_sparse_attention import count_made

CUTS = [0, 9, 16, 32]  # the last document ends with padding
PADDING = 3


def batch() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (2, 16), generator=g)
    mask = torch.zeros(32, dtype=torch.bool)
    mask[-PADDING:] = True
    labels = ids.masked_fill(mask.view(2, 16), -100)
    labels.view(-1)[CUTS[:-1]] = -100
    return dict(
        input_ids=ids,
        labels=labels,
        cu_seqlens=torch.tensor(CUTS),
        max_seqlen=16,
        padding_mask=mask.view(2, 16),
    )


def make(family: str, stage: str) -> nn.Module:
    model = tiny_model(family)
    if stage == "warm_up":  # all keys of the rows
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 64
    return model


def by_hand(model: nn.Module, given: dict[str, Any], coef: float) -> dict[str, Tensor]:
    """Return losses and gradients of a stock model, a document at a time."""
    ids, labels, losses = given["input_ids"].view(1, -1), given["labels"].view(1, -1), []
    num_items = int((labels != -100).sum())
    with recorded(model) as divergences:
        for a, b in pairwise(CUTS):
            rows = dict(input_ids=ids[:, a:b], labels=labels[:, a:b], use_cache=False)
            # Padding behind a document's tokens is seen by none of them.
            losses.append(model(**rows, num_items_in_batch=num_items).loss)
    found = {"loss": torch.stack(losses).sum()}
    for name, parts in divergences.items():
        of_tokens = torch.cat(parts, 1)[0, : 32 - PADDING]
        found[f"indexer loss of {name}"] = coef * of_tokens.sum() / (32 - PADDING)
    torch.stack([*found.values()]).sum().backward()
    return {n: x.detach() for n, x in found.items()} | hf_models.whole_gradients(model)


def trained(model: nn.Module, given: dict[str, Any], config: IndexerConfig) -> dict[str, Any]:
    """Return the same of a parallelized model and its metrics."""
    meshes = build_meshes(ParallelConfig(), "cpu")
    parallelize_moe(model, meshes, indexer=config)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with step.micro_batch():
        loss = model(**given, use_cache=False).loss
        loss.backward()
    found = {"loss": loss.detach()} | hf_models.whole_gradients(model)
    metrics = step.finish().metrics
    losses, shown = metrics.indexer_losses, metrics.to_dict()
    assert shown["indexer_loss"] == pytest.approx(sum(map(float, losses.values())))
    return found | {f"indexer loss of {n}": x.squeeze() for n, x in losses.items()}


def test_all_but_indexers_may_be_frozen() -> None:
    found = {}
    for is_frozen in (False, True):
        model = tiny_model("deepseek_v32")
        for name, param in model.named_parameters():
            param.requires_grad_(".indexer." in name or not is_frozen)
        found[is_frozen] = trained(model, batch(), IndexerConfig(stage="warm_up"))
    want = {name: found[False][name] for name in found[True]}
    assert sum("grad/" in name for name in want) == 2 * 5
    hf_models.assert_equal_numbers(found[True], want)


def test_indexers_without_a_config_learn_nothing() -> None:
    model, given = tiny_model("deepseek_v32"), batch()
    use_causal_attention(model)
    model(**given, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert {n for n, grad in grads.items() if grad is None} == {n for n in grads if "indexer" in n}


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_a_model_makes_no_tensor_of_all_pairs(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "CHUNK_NUMBERS", 2**12)
    monkeypatch.setattr(index, "SCORES", 2**12)
    tokens, largest = 640, {}
    ids = torch.arange(tokens)[None] % 61
    config = IndexerConfig() if family == "deepseek_v32" else None
    for is_stock in (True, False):
        model = tiny_model(family)
        model.config.max_position_embeddings = tokens
        if not is_stock:
            use_causal_attention(model)
            parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), indexer=config)
        with Operations(count_made) as made:
            model(ids, labels=ids, use_cache=False).loss.backward()
        largest[is_stock] = max(made.found)
    assert largest[False] < tokens**2 / 2 < tokens**2 < largest[True]


@pytest.mark.parametrize("how", ["checkpointing", "region"])
def test_the_same_keys_are_selected_again(how: str, monkeypatch: Any) -> None:
    selected: list[Tensor] = []

    def noted(*args: Any) -> Tensor:
        selected.append(select_keys(*args))
        return selected[-1]

    monkeypatch.setattr(attention, "select_keys", noted)
    found = {}
    for again in (False, True):
        model, memory = tiny_model("deepseek_v32"), None
        if again and how == "checkpointing":
            hf_models.enable_checkpointing(model)
        elif again:
            memory = MemoryOptions(recompute="gemm_last")
        meshes = build_meshes(ParallelConfig(), "cpu")
        parallelize_moe(model, meshes, indexer=IndexerConfig(), memory=memory)
        selected.clear()
        model(**batch(), use_cache=False).loss.backward()
        found[again] = hf_models.whole_gradients(model)
        number = 2 * (1 + (again and how == "checkpointing"))  # a region keeps what was selected
        assert len(selected) == number
        first, second = selected[:2], selected[-2:]
        assert number == 2 or all(map(torch.equal, first, reversed(second)))
    assert all(torch.equal(found[True][name], grad) for name, grad in found[False].items())


def test_adapters_have_their_part_in_keys_and_values() -> None:
    peft = pytest.importorskip("peft", reason="adapters are its own")
    logits, ids = [], batch()["input_ids"]
    for is_stock in (True, False):
        model = tiny_model("deepseek_v32")
        config = peft.LoraConfig(target_modules=["q_b_proj", "kv_b_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config)
        if not is_stock:
            use_causal_attention(model)
        logits.append(adapted(input_ids=ids, use_cache=False).logits)
        with adapted.disable_adapter(), torch.no_grad():
            plain = model(input_ids=ids, use_cache=False).logits
        assert (plain - logits[-1]).abs().max() > 0.1
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()


def test_evaluation_counts_nothing() -> None:
    model = parallelize_moe(
        tiny_model("glm_moe_dsa"), build_meshes(ParallelConfig(), "cpu"), indexer=IndexerConfig()
    )
    with torch.no_grad():
        model(**batch(), use_cache=False)
    model.eval()(**batch(), use_cache=False).loss.backward()
    (loss,) = get_moe_state(model).finish_step().indexer_losses.values()
    assert loss == 0


def test_a_shared_indexer_needs_one_before_it() -> None:
    model = tiny_model("glm_moe_dsa")
    use_causal_attention(model)
    del model.base_model.layers[0]
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"indexer_types\[1\] \('shared'\) must stand behind"):
        model(**batch(), use_cache=False)


@pytest.mark.parametrize("stage", ["sparse", "warm_up"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note"])
def test_indexers_learn_the_probabilities_of_attention(family: str, stage: Any) -> None:
    config = IndexerConfig(stage=stage, loss_coef=0.7)
    want = by_hand(make(family, stage), batch(), 0.7)
    model = tiny_model(family)
    if stage == "sparse":
        hf_models.enable_checkpointing(model)  # divergences of forwards that run again count once
    got = trained(model, batch(), config)
    hf_models.assert_equal_numbers(got, want)
    assert any("indexer loss" in name for name in got)
