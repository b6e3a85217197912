import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    CapacityConfig,
    ContextOptions,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
)
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from moecore.families.transformers.attention import _attend_causally
from moecore.families.transformers.context import CausalContext
from moecore.families.transformers.linear_attention import find_linear_layers
from moecore.packing import PackedCollator
from tests.families.transformers import hf_models
from tests.families.transformers.family_models import (
    BOUNDS,
    IS_BEFORE_5_23,
    batch,
    family_names,
    freeze_indexers,
    freeze_towers,
    tiny_model,
)
from tests.helpers.operations import Operations

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = dict(hidden_size=32, num_hidden_layers=2, vocab_size=99, num_experts_per_tok=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
TOKENS = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))


def make(*, causal: bool, **options: Any) -> nn.Module:
    experts = dict(num_experts=4, moe_intermediate_size=16)
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **experts, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if causal:
        use_causal_attention(model)
    return model


def loss_of(model: nn.Module, **inputs: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **inputs).loss


def test_loss_and_gradients_are_those_of_transformers_and_nothing_is_read() -> None:
    found, reads = [], []
    read = torch.ops.aten._local_scalar_dense.default
    for causal in (False, True):
        model = make(causal=causal)
        with Operations(lambda func, _: func is read or None) as host:
            loss = loss_of(model)
        reads.append(len(host.found))
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert reads[0] > 0 == reads[1]
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)


def test_masks_and_positions_are_refused() -> None:
    model = make(causal=True)
    for name in ("attention_mask", "position_ids"):
        with pytest.raises(ValueError, match=f"{name} must be None after use_causal_attention"):
            loss_of(model, **{name: torch.ones_like(TOKENS)})
    with pytest.raises(ValueError, match="must be given by name"):
        model.base_model(TOKENS, torch.ones_like(TOKENS))


@pytest.mark.parametrize("name", ["full", "deepseek_v32", "deepseek_v4"])
def test_keys_of_an_earlier_forward_are_refused(name: str) -> None:
    model = make(causal=True) if name == "full" else tiny_model(name)
    use_causal_attention(model)
    ids = TOKENS % 61
    cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"tokens \(8\) must be as many as their keys \(1[16]\)"):
        model(input_ids=ids[:, 8:], past_key_values=cache)


def test_what_it_does_not_compute_is_refused() -> None:
    model = make(causal=True, sliding_window=8, use_sliding_window=True, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout \(0.1\) must be None for use_causal_attention"):
        loss_of(model.train())
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"softcap \(30.0\) must be None"):
        _attend_causally(model, query, query, query, None, softcap=30.0)
    with pytest.raises(ValueError, match="position_bias"):
        _attend_causally(model, query, query, query, None, sliding_window=2, position_bias=1.0)
    for family in ("deepseek_v32", "deepseek_v4"):
        sparse = tiny_model(family)
        use_causal_attention(sparse)
        sparse.base_model.layers[0].self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match=r"attention_dropout \(0.1\) must be 0 for use_causal"):
            sparse(input_ids=TOKENS % 61)
    model.config.layer_types = ["chunked_attention"]
    with pytest.raises(ValueError, match=r"layer_types \('chunked_attention'\) must not be"):
        use_causal_attention(model)
    with pytest.raises(ValueError, match=r"cu_seqlens \(first and last \(0, 31\)\) must rise"):
        loss_of(make(causal=True), cu_seq_lens_q=torch.tensor([0, 31]))


@pytest.mark.parametrize("family", ["qwen4_exp", "mistral_large4"])
def test_attention_that_computes_with_masks_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match="which computes with masks, for use_causal_attention"):
        use_causal_attention(tiny_model(family))


BLOCKS = dict(layer_types=["minimax_m3_sparse"] * 2, index_block_size=4, index_topk_blocks=1)


@pytest.mark.parametrize(
    ("family", "argument", "options"),
    [
        ("inkling", "position_bias", {}),
        ("minimax_m3_vl", "block_indices", BLOCKS),  # dense without a mask
    ],
)
def test_what_attention_would_ignore_is_refused(
    family: str, argument: str, options: dict[str, Any]
) -> None:
    model = tiny_model(family, **options)
    use_causal_attention(model)
    with pytest.raises(ValueError, match=rf"{argument} \(\(2, .*\) must be None for use"):
        model(input_ids=TOKENS % 61, use_cache=False)


EXPERTS = dict(num_local_experts=4, intermediate_size=16)
LATENT = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=4,
    n_routed_experts=4,
    moe_intermediate_size=16,
    intermediate_size=16,
    n_group=1,
    topk_group=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", HEADS | dict(num_experts=4, moe_intermediate_size=16)),
    "mixtral, window": ("MixtralConfig", HEADS | EXPERTS | dict(sliding_window=4)),
    "gpt-oss, window and sinks": ("GptOssConfig", HEADS | EXPERTS | dict(sliding_window=4)),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "phimoe, window of masks": ("PhimoeConfig", HEADS | EXPERTS | dict(sliding_window=4)),
    "qwen2-moe, window of masks": (
        "Qwen2MoeConfig",
        dict(num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16)
        | dict(sliding_window=4, use_sliding_window=True),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_documents_windows_and_sinks_are_those_of_transformers(name: str) -> None:
    """Against the model's own attention with masks, each document in a row of its own."""
    config_class, options = OTHERS[name]
    found: list[list[Tensor]] = []
    cuts = [0, 5, 16, 17, 32]  # across the rows
    for kind in ("one by one", "packed", "rows", "rows, own"):
        config = getattr(transformers, config_class)(**SIZES, **options)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.3)
        if kind in ("packed", "rows"):
            use_causal_attention(model)
        if kind == "one by one":
            flat = TOKENS.flatten()[None]
            logits = [model(input_ids=flat[:, a:b]).logits for a, b in pairwise(cuts)]
            result = torch.cat(logits, 1).view(2, 16, -1)
        elif kind == "packed":
            given: dict[str, Any] = dict(cu_seq_lens_q=torch.tensor(cuts, dtype=torch.int32))
            result = model(input_ids=TOKENS, use_cache=False, **given).logits
            places = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)]).view(2, 16)
            given |= dict(cu_seq_lens_k=given["cu_seq_lens_q"], max_length_q=15, max_length_k=15)
            again = model(input_ids=TOKENS, position_ids=places, use_cache=False, **given).logits
            assert torch.equal(result, again)
        else:
            result = model(input_ids=TOKENS, use_cache=False).logits
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        (result * weights).sum().backward()
        found.append([result, *(p.grad for p in model.parameters() if p.grad is not None)])
    for want, got in ((found[0], found[1]), (found[3], found[2])):
        for w, g in zip(want, got, strict=True):
            assert (w - g).abs().max() <= 1e-5 * w.abs().max()
    assert (found[0][0] - found[3][0]).abs().max() > 0.1


LINEAR = ["qwen3_next", "qwen3_5_moe", "kimi_linear", "granitemoehybrid", "lfm2_moe", "minimax"]
SPARSE = ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2", "dots3_note", "hy_v4"]
SPARSE += [name for name in ("hy_v4_vl",) if name in family_names()]
CHUNKED = ["llama4"]
TOWERS = ["qwen3_vl_moe", "glm4v_moe", "qwen3_omni_moe", "ernie4_5_vl_moe"]
TOWERS += ["deepseek_ocr2", "step3p7", "unlimited_ocr"]


@pytest.mark.parametrize("family", [*LINEAR, *SPARSE, *CHUNKED, *TOWERS])
def test_documents_of_other_attention_are_those_of_transformers(family: str) -> None:
    """Against the stock model, each document in a row of its own."""
    stock, model = tiny_model(family), tiny_model(family)
    for one in (stock, model):
        freeze_indexers(one)
        freeze_towers(one)
    use_causal_attention(model)
    cuts, ids = [0, 1, 3, 16, 16, 32], 52 + TOKENS % 9
    want = torch.cat(
        [stock(ids.flatten()[None, a:b]).logits for a, b in pairwise(cuts) if b > a], 1
    )
    documents = {"cu_seq_lens_q": torch.tensor(cuts, dtype=torch.int32)}
    if family == "qwen3_omni_moe" and IS_BEFORE_5_23:  # its towers are beside the base model
        with pytest.raises(ValueError, match=r"cu_seqlens must be None .* audio_tower"):
            model(ids, **documents)
        return
    got = model(ids, **documents).logits
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (want * weights).sum().backward()
    (got.view(want.shape) * weights).sum().backward()
    found = {"logits": got.detach().view(want.shape)} | hf_models.whole_gradients(model)
    expected = {"logits": want.detach()} | hf_models.whole_gradients(stock)
    error, name = hf_models.worst(found, expected)
    assert error <= BOUNDS.get(family, 1e-5), f"{name}: {error}"
    with torch.no_grad():
        assert (stock(ids.view(1, -1)).logits - want).abs().max() > 0.1
        torch.testing.assert_close(stock(ids).logits, model(ids).logits)
        if family not in LINEAR:
            return
        with pytest.raises(ValueError, match=r"use_cache \(True\) must be False for linear"):
            model(ids, cu_seq_lens_q=torch.tensor(cuts), use_cache=True)


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h"])
def test_time_steps_of_documents_have_the_limits_of_the_model(family: str) -> None:
    """Against the stock model, whose limits cut steps at both ends."""
    cuts, ids, found = [0, 3, 16, 32], TOKENS % 61, []
    for kind in ("unlimited", "one by one", "packed"):
        model = tiny_model(family)
        for layer in find_linear_layers(model):
            layer.time_step_limit = (0.0, math.inf) if kind == "unlimited" else (0.5, 0.7)
        if kind == "packed":
            use_causal_attention(model)
            logits = model(ids, cu_seq_lens_q=torch.tensor(cuts)).logits.view(1, 32, -1)
        else:
            rows = [ids.view(1, -1)[:, a:b] for a, b in pairwise(cuts)]
            logits = torch.cat([model(row).logits for row in rows], 1)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        (logits * weights).sum().backward()
        found.append({"logits": logits.detach()} | hf_models.whole_gradients(model))
    unlimited, want, got = found
    assert hf_models.worst(unlimited, want)[0] > 1e-2 and hf_models.worst(got, want)[0] <= 1e-4


def test_a_moe_layer_whose_block_has_no_attention_is_told_of_documents_and_padding() -> None:
    model, cuts = tiny_model("nemotron_h"), torch.tensor([0, 20, 32], dtype=torch.int32)
    (layer,) = swap_blocks(model, {}).values()
    use_causal_attention(model)
    padding = torch.arange(32).view(2, 16) >= 20
    inputs: list[dict[str, Any]] = []
    layer.register_forward_pre_hook(lambda *args: inputs.append(args[2]), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=TOKENS % 61, cu_seqlens=cuts, padding_mask=padding, use_cache=False)
    assert torch.equal(inputs[0]["padding_mask"], padding)
    assert torch.equal(inputs[0]["cu_seqlens"], cuts)


def found_in(name: str, batches: list[dict[str, Any]], *, checkpointing: bool) -> dict[str, Tensor]:
    """Return losses and gradients of micro-batches whose backwards come after all forwards."""
    model, capacity = hf_models.random_model(name), CapacityConfig(factor=1.1, drop="position")
    for layer in swap_blocks(model, {}).values():
        balance = BalanceConfig(sequence_coef=0.5)
        layer.set_config(replace(layer.config, capacity=capacity, balance=balance))
    use_causal_attention(model)
    if checkpointing:
        hf_models.enable_checkpointing(model)
    losses = [model(**batch, use_cache=False).loss for batch in batches]
    torch.stack(losses).sum().backward()
    return {"losses": torch.stack(losses).detach()} | hf_models.whole_gradients(model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_moe_layers_balance_and_drop_by_document(name: str, checkpointing: bool) -> None:
    """Packed rows against one document a row, of which padding is not routed."""
    g = torch.Generator().manual_seed(0)
    groups = [[torch.randint(0, 61, (n,), generator=g) for n in ns] for ns in ((9, 5, 12), (7, 16))]
    packed = [PackedCollator(row_tokens=16, rows=2, shift_labels=False)(one) for one in groups]
    rows = []
    for documents in groups:
        whole = [torch.cat([ids, ids.new_full((16 - len(ids),), -100)]) for ids in documents]
        labels = torch.stack(whole)
        ids = labels.clamp(min=0)
        rows.append({"input_ids": ids, "labels": labels, "padding_mask": labels < 0})
    how = dict(checkpointing=checkpointing)
    want = found_in(name, rows, **how)
    hf_models.assert_equal_numbers(found_in(name, [dict(one) for one in packed], **how), want)
    unaware = [{n: x for n, x in one.items() if n != "padding_mask"} for one in packed]
    assert hf_models.worst(found_in(name, unaware, **how), want)[0] > 1e-3


def test_documents_of_a_model_that_mixes_otherwise_are_refused() -> None:
    model = tiny_model("jamba")
    use_causal_attention(model)
    ids = TOKENS % 61
    model(input_ids=ids)
    with pytest.raises(ValueError, match=r"cu_seqlens must be None for a model with layer_types"):
        model(input_ids=ids, cu_seqlens=torch.tensor([0, 16, 32]))


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "ernie4_5_vl_moe"])
def test_images_are_refused_with_documents_and_are_stock_without(family: str) -> None:
    stock, model = tiny_model(family), tiny_model(family)
    use_causal_attention(model)
    given = batch(model, 0)
    want, got = stock(**given), model(**given)
    torch.testing.assert_close(got.logits, want.logits)
    got.logits.square().sum().backward()
    want.logits.square().sum().backward()
    pairs = zip(model.named_parameters(), stock.parameters(), strict=True)
    grads = {n: (p.grad, q.grad) for (n, p), q in pairs if q.grad is not None}
    assert any(".patch_embed." in name for name in grads)
    for a, b in grads.values():
        torch.testing.assert_close(a, b, atol=1e-4 * float(b.abs().max()), rtol=0)
    cuts = torch.tensor([0, 9, 18])
    message = r"image_grid_thw must be None for .* which do not run its towers"
    with pytest.raises(ValueError, match=message):
        model(**given, cu_seqlens=cuts)
    grids = torch.arange(9).expand(3, 2, 9)
    with pytest.raises(ValueError, match=r"position_ids \(3, 2, 9\) must be \[B, T\] with packed"):
        model(input_ids=given["input_ids"], cu_seqlens=cuts, position_ids=grids)
    other = rf"a model with model\..*\({type(model).__name__[:5]}.*|Conv3d\).*"
    parallelize_moe(stock, build_meshes(ParallelConfig(), "cpu"))
    with pytest.raises(ValueError, match=other + r": call use_causal_attention\(model\)"):
        stock(**given, cu_seqlens=cuts)


HEADS_OF_CLASSES = {
    "TokenClassification": "ForTokenClassification",
    "SequenceClassification": "ForSequenceClassificationLoss",
    "QuestionAnswering": "ForQuestionAnsweringLoss",
}


def with_head(head: str) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, moe_intermediate_size=16, pad_token_id=0
    )
    return getattr(transformers, f"Qwen3MoeFor{head}")(config)


class WithBonus(transformers.Qwen3MoeForCausalLM):
    """Adds a term to the loss, whose mean over a rank's tokens is not that over all tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = self.loss_function(out.logits, kwargs["labels"], 99) + out.logits.mean()
        return out


def loss_set_by_user() -> nn.Module:
    model = make(causal=False)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    return model


OTHER_LOSSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        head: (partial(with_head, head), rf"its loss \({loss}\) is not ForCausalLMLoss")
        for head, loss in HEADS_OF_CLASSES.items()
    },
    "no head": (lambda: make(causal=False).model, "its forward has no loss"),
    "a loss of the user": (loss_set_by_user, r"its loss \(<lambda>\) is not ForCausalLMLoss"),
    "a forward of the user": (
        lambda: WithBonus(make(causal=False).config),
        "its forward is not transformers' own",
    ),
}


@pytest.mark.parametrize("kind", OTHER_LOSSES)
def test_losses_that_are_no_sum_over_tokens_are_refused_over_cp(kind: str) -> None:
    build, message = OTHER_LOSSES[kind]
    for options in (ContextOptions(), ContextOptions(dynamic=True)):
        with pytest.raises(NotImplementedError, match=rf"^cp \(2\) must be 1 for .*{message}"):
            CausalContext(build()).context_options(options, 2, 1)


POSITIONS = torch.arange(16)[None] % 8


def refuse_documents(model: nn.Module, message: str, told: bool) -> None:
    if told:
        use_causal_attention(model)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    packed = dict(cu_seqlens=torch.tensor([0, 8, 16, 32]), position_ids=POSITIONS)
    with pytest.raises(ValueError, match=rf"cu_seqlens must be None for a model with {message}"):
        model(input_ids=TOKENS % 61, **packed)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering"])
def test_documents_of_a_head_of_whole_rows_are_refused(head: str, told: bool) -> None:
    """The head would read one token, or all, of a row that holds several documents."""
    model = with_head(head)
    refuse_documents(model, rf"a head of whole rows \(For{head}Loss of Qwen3MoeFor{head}\)", told)


def test_documents_of_a_head_of_tokens_are_kept_apart() -> None:
    model, cuts = with_head("TokenClassification").eval(), [0, 5, 16, 32]
    with torch.no_grad():
        alone = [model(input_ids=TOKENS.view(1, -1)[:, a:b]).logits for a, b in pairwise(cuts)]
        use_causal_attention(model)
        got = model(input_ids=TOKENS, cu_seq_lens_q=torch.tensor(cuts)).logits
    torch.testing.assert_close(got.view(1, 32, -1), torch.cat(alone, 1))


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "short_mscale"])
def test_documents_that_would_share_angles_are_refused(rope_type: str, told: bool) -> None:
    rope = dict(rope_type=rope_type, rope_theta=1e4, factor=4.0)
    rope |= dict(original_max_position_embeddings=8)
    if rope_type == "longrope":
        rope |= dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    if rope_type == "short_mscale":  # of a rotary embedding with factors for short and long rows
        model = tiny_model("phimoe")
        model.model.rotary_emb.rope_type = "yarn"
    else:
        model = make(causal=False, rope_parameters=rope)
    name, value = "model.rotary_emb", model.model.rotary_emb.rope_type
    message = rf"rope_type \('{value}'\) of {name}, which reads the longest position of all rows"
    refuse_documents(model, message, told)
    if not told:
        with pytest.raises(ValueError, match=f"position_ids must be of rows .* with {message}"):
            model.train()(input_ids=TOKENS % 61, position_ids=POSITIONS.expand(2, -1))
