"""Padding of a transformers model's own attention mask: no expert computes it, no loss counts it.

Expected values are by hand, from the router logits that stock transformers gives real tokens.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig, Meshes, parallelize_moe
from moecore.families import use_causal_attention
from moecore.families.transformers.experts import get_image_mask, has_vision_experts
from moecore.families.transformers.guards import NATIVE
from moecore.packing import PackedCollator
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers.family_models import batch, loss_of, tiny_model
from tests.families.transformers.hf_models import enable_checkpointing

transformers = pytest.importorskip("transformers", minversion="5")

K = 2
LOSS = BalanceConfig(micro_batch_coef=1.0)


def rows(side: str, seed: int) -> dict[str, Tensor]:
    """Two rows of 10, the first with 4 real tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.ones(2, 10, dtype=torch.int64)
    mask_BT[0, 4:] = 0
    mask_BT = mask_BT.flip(1) if side == "left" else mask_BT
    return {"input_ids": torch.randint(1, 61, (2, 10), generator=generator)} | {
        "attention_mask": mask_BT
    }


def balance_loss(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return E / K * sum_e f_e p_e of real tokens in stock's router, and counts [E]."""
    logits = model(**given, output_router_logits=True).router_logits
    loss, counts = torch.zeros(()), []
    for logits_TE in logits:
        real_NE = logits_TE[given["attention_mask"].flatten() == 1].float()
        E = real_NE.shape[1]
        counts_E = torch.bincount(real_NE.topk(K).indices.flatten(), minlength=E)
        shares_E, scores_E = counts_E / len(real_NE), real_NE.softmax(-1).mean(0)
        loss = loss + E / K * (shares_E * scores_E).sum()
        counts.append(counts_E)
    return loss, torch.stack(counts)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("recompute", [False, True])
def test_balance_losses_count_real_tokens(side: str, recompute: bool, meshes: Meshes) -> None:
    """Two forwards, of other masks, before their backwards: each keeps its own."""
    stock, model = (tiny_model("qwen3_moe") for _ in range(2))
    given = [rows(side, 0), rows("left", 1)]
    wanted = [balance_loss(stock, each) for each in given]
    sum(loss for loss, _ in wanted).backward()
    parallelize_moe(model, meshes, moe={"balance": LOSS})
    if recompute:
        enable_checkpointing(model)
    state = get_moe_state(model)
    state.set_num_micro_batches(2)
    outputs = [0.0 * model(**each).logits.sum() for each in given]
    for output in outputs:
        output.backward()
    counts = torch.stack(list(state.finish_step().tokens_per_expert.values()))
    assert int(counts[0].sum()) == K * (4 + 10) * 2
    assert torch.equal(counts, sum(counts for _, counts in wanted))
    want = {n: p.grad / 2 for n, p in stock.named_parameters() if n.endswith("gate.weight")}
    found = dict(model.named_parameters())
    for name, grad in want.items():
        own = found[name].grad.full_tensor()
        assert (own - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("family", ["deepseek_v3", "jamba", "gemma4", "nemotron_h", "ernie4_5_moe"])
def test_all_routers_leave_padding_out(family: str, meshes: Meshes) -> None:
    model = parallelize_moe(tiny_model(family), meshes)
    given = rows("right", 0)
    model(**given).logits.sum().backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    assert {int(n.sum()) for n in counts} == {K * 14}


def test_the_mask_of_images_is_found_by_name() -> None:
    block = next(m for m in tiny_model("ernie4_5_vl_moe").modules() if has_vision_experts(m))
    hidden, kinds = torch.zeros(1, 2, 8), torch.ones(1, 2, dtype=torch.int)
    for args, names in ((), ["kinds", "hidden"]), ((hidden,), ["kinds"]), ((hidden, kinds), []):
        values = {"kinds": ("moe_mm_token_type_ids", kinds), "hidden": ("hidden_states", hidden)}
        assert get_image_mask(block, args, dict(values[name] for name in names)) is kinds
    assert get_image_mask(block, (hidden,), {}) is None


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_of_one_modality_leave_padding_out(images, recompute, meshes) -> None:
    """Rows of 9 tokens, 5 of an image in each, or none; the first has 2 of padding."""
    model = parallelize_moe(tiny_model("ernie4_5_vl_moe"), meshes)
    if recompute:
        enable_checkpointing(model)
    given = batch(model, 0)
    if images:
        given["moe_mm_token_type_ids"][:, 1] = 1  # as the token before an image
    else:
        given = {"input_ids": given["input_ids"]}
    mask_BT = torch.ones_like(given["input_ids"])
    mask_BT[0, :2] = 0
    loss_of(model, given | {"attention_mask": mask_BT}).backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.items()
    found = {(n.split(".")[-2], int(x.sum())) for n, x in counts}
    num_images = 9 if images else 0
    assert found == {("text_moe", K * (16 - num_images)), ("vision_moe", K * num_images)}


@pytest.mark.parametrize("part", ["model", ""])
def test_a_mask_by_position(part: str, meshes: Meshes) -> None:
    model = tiny_model("qwen3_moe").get_submodule(part)
    parallelize_moe(model, meshes)
    model(*rows("right", 0).values())[0].sum().backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    assert [int(n.sum()) for n in counts] == [K * 14] * 2


def test_a_packed_batch_is_understood(meshes: Meshes) -> None:
    """Documents of 7, 3 and 11 in a row of 32, beside each document in a row of its own."""
    documents = [torch.randint(1, 61, (n,)).tolist() for n in (7, 3, 11)]
    batch = PackedCollator(row_tokens=32, rows=1)([{"input_ids": d} for d in documents])
    model, stock = (tiny_model("qwen3_moe") for _ in range(2))
    parallelize_moe(model, meshes, moe={"balance": LOSS})
    packed = model(**batch)
    logits = packed.logits.detach()
    (packed.loss * 0).backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    assert [int(n.sum()) for n in counts] == [K * 21] * 2
    alone = torch.cat([stock(input_ids=torch.tensor([d])).logits[0] for d in documents])
    assert (logits[0, :21] - alone).abs().max() <= 1e-5 * alone.abs().max()
    other = model(**batch | {"num_tokens": 2 * batch["num_tokens"]})
    torch.testing.assert_close(other.loss, packed.loss / 2)
    with pytest.raises(ValueError, match="cu_seqlens must come with position_ids"):
        model(**{name: value for name, value in batch.items() if name != "position_ids"})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "afmoe", "qwen3_next"])
def test_a_stock_model_mixes_documents_only_with_a_word(family: str, meshes: Meshes) -> None:
    """By position_ids alone, which masks of the second and third family do not read."""
    documents = [torch.randint(1, 61, (n,)).tolist() for n in (7, 3, 11)]
    whole = PackedCollator(row_tokens=32, rows=1)([{"input_ids": d} for d in documents])
    packed: dict[str, Any] = {n: whole[n] for n in ("input_ids", "position_ids")}  # type: ignore
    model = tiny_model(family)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([d])).logits[0] for d in documents])
        mixed = (model(**packed).logits[0, :21] - alone).abs().max() > 0.1 * alone.abs().max()
    assert mixed == (family != "qwen3_moe")
    parallelize_moe(model, meshes)
    if family == "qwen3_moe":
        logits = model(**packed).logits[0, :21]
        assert (logits - alone).abs().max() <= 1e-5 * alone.abs().max()
    elif family == "qwen3_next":
        message = r"layer_types\[0\] \('linear_attention'\) may not keep"
        with pytest.warns(UserWarning, match=message):
            model(**packed)
        packed["cu_seqlens"] = whole["cu_seqlens"]
        with pytest.raises(ValueError, match=r"documents apart: call use_causal_attention"):
            model(**packed)
        use_causal_attention(model)
        logits = model(**packed).logits[0, :21]
        assert (logits - alone).abs().max() <= 1e-5 * alone.abs().max()
    else:
        with pytest.raises(ValueError, match="'eager' attention, whose mask does not read them"):
            model(**packed)


def test_a_mask_of_pairs_tells_attention_alone(meshes: Meshes) -> None:
    """It goes on to work, with one warning; padding_mask beside it tells MoE layers."""
    given = rows("right", 0)
    real_BT = given["attention_mask"].bool()
    can_read_B1TT = (torch.ones(10, 10).tril().bool() & real_BT[:, None])[:, None]
    bias_B1TT = torch.zeros(2, 1, 10, 10).masked_fill(~can_read_B1TT, -1e9)
    stock, model = (tiny_model("qwen3_moe") for _ in range(2))
    parallelize_moe(model, meshes)
    ids = given["input_ids"]
    with pytest.warns(UserWarning, match=r"attention_mask \(4 dims\) names no padding") as seen:
        logits = [model(input_ids=ids, attention_mask=bias_B1TT).logits for _ in range(2)]
    assert len(seen) == 1
    torch.testing.assert_close(logits[0][real_BT], stock(**given).logits[real_BT])
    logits[0].sum().backward()
    told = model(input_ids=ids, attention_mask=bias_B1TT, padding_mask=~real_BT)
    torch.testing.assert_close(told.logits[real_BT], logits[0][real_BT])
    told.logits.sum().backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    assert [int(n.sum()) for n in counts] == [K * (20 + 14)] * 2


def test_names_of_the_decoder_are_refused(meshes: Meshes) -> None:
    model = parallelize_moe(tiny_model("qwen3_moe"), meshes)
    ids = rows("right", 0)["input_ids"]
    for name, alternative in NATIVE.items():
        message = re.escape(f"{name} must be given as {alternative} to Qwen3MoeFor")
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids, **{name: ids})


@pytest.mark.parametrize("causal", [False, True])
def test_the_longest_document_comes_with_documents(causal: bool, meshes: Meshes) -> None:
    model = parallelize_moe(tiny_model("qwen3_moe"), meshes)
    if causal:
        use_causal_attention(model)
    with pytest.raises(ValueError, match=r"max_seqlen \(10\) must come with cu_seqlens \(None\)"):
        model(input_ids=rows("right", 0)["input_ids"], max_seqlen=10)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_end_with_rows_whose_labels_are_shifted(causal: bool, meshes: Meshes) -> None:
    """A label of the first token of a row would be lost."""
    model = parallelize_moe(tiny_model("qwen3_moe"), meshes)
    if causal:
        use_causal_attention(model)
    ids = torch.arange(16).view(2, 8)
    given = dict(input_ids=ids, position_ids=torch.arange(16).view(2, 8) % 12)
    given["cu_seqlens"] = torch.tensor([0, 12, 16])
    with pytest.raises(ValueError, match=r"cu_seqlens must have 8, where a row begins, because l"):
        model(**given, labels=ids)
    assert model(**given, labels=ids, shift_labels=ids, use_cache=False).loss > 0
