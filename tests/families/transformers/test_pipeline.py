import copy
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from moecore import ParallelConfig, PipelineConfig, build_meshes, parallelize_moe
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from moecore.families.transformers.packing import find_packing_problem
from moecore.io import init_hf
from moecore.parallel.pipeline.stages import remove_other_stages
from moecore.planning import fake_world
from tests.families.transformers import family_models
from tests.families.transformers.hf_models import batch, learned, padding_mask, random_model
from tests.parallel.pipeline.emulated import assert_same, run_stages, staged, stages_of

TABLE = "model.embed_tokens.weight"
LAYOUTS = [("EttL", 1), ("Et|tL", 1), ("Et|tL", 2), ("E||tt|L", 2), ("E|t|t|L", 3)]


def llama(**kwargs: Any) -> nn.Module:
    """A dense model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **kwargs))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.normal_(0, 0.3)
    return model.train()


def with_layers(name: str) -> nn.Module:
    """A model whose MoE blocks are moecore's."""
    model = random_model(name, num_hidden_layers=2)
    assert swap_blocks(model, {})
    return model


def sparse() -> nn.Module:
    model = family_models.tiny_model("deepseek_v32")
    family_models.freeze_indexers(model)
    return model


def with_indexers(family: str, **values: Any) -> nn.Module:
    """Return a tiny model whose layers, as many as `indexer_types`, have chosen keys."""
    kind, number = family_models.model_class(family), len(values["indexer_types"])
    # "indexed_attention", or another name before transformers 5.18
    layer_types = kind.config_class().layer_types[:1] * number
    values |= {"num_hidden_layers": number, "layer_types": layer_types}
    config = family_models.tiny_config(kind.config_class, values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config)
    family_models.fill(model)
    family_models.freeze_indexers(model)
    return model.train()


def sharing() -> nn.Module:
    """Layers attend to keys that the layer before has chosen."""
    kinds = ["full", "shared", "shared", "full"]
    mlps = ["dense"] + ["sparse"] * 3
    return with_indexers("glm_moe_dsa", indexer_types=kinds, mlp_layer_types=mlps)


def inkling() -> nn.Module:
    if family_models.IS_BEFORE_5_23:
        pytest.skip("Inkling of transformers < 5.23 has a norm between embedding and layers")
    model: nn.Module = family_models.tiny_model("inkling")
    return model


FAMILIES = {
    "qwen3-moe": lambda: random_model("qwen3-moe", num_hidden_layers=2),
    "mixtral": lambda: random_model("mixtral", num_hidden_layers=2),
    "deepseek-v3": lambda: random_model("deepseek-v3", num_hidden_layers=2),
    "deepseek-v3, MoELayers": lambda: with_layers("deepseek-v3"),
    "gpt-oss": lambda: random_model("gpt-oss", num_hidden_layers=2, sliding_window=4),
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "nemotron, kinds of layers": lambda: family_models.tiny_model("nemotron_h"),
    "gated delta": lambda: family_models.tiny_model("qwen3_next"),
    "sparse": sparse,
    "sparse, keys of the layer before": sharing,
    "a factor of logits": lambda: family_models.tiny_model("cohere2_moe"),
    "the device of an embedding is read": lambda: family_models.tiny_model("llama4"),
    "the dtype of a head is read": lambda: with_indexers("hy_v4", indexer_types=["full"] * 2),
    "factors of embeddings": lambda: family_models.tiny_model("granitemoe"),
    "factors in front of the head": inkling,
    "a tower": lambda: family_models.tiny_model("qwen3_vl_moe"),
    "streams, side by side": lambda: family_models.tiny_model("qwen4_exp"),
    "streams, stacked, and choices by token id": lambda: family_models.tiny_model("deepseek_v4"),
}


def inputs_of(kind: str = "rows") -> dict[str, Any]:
    ids, labels = batch()
    inputs = {"input_ids": ids, "labels": labels}
    if kind == "mask":
        inputs["attention_mask"] = padding_mask()
        inputs["labels"] = learned(labels, padding_mask())
    if kind == "positions":
        starts = torch.tensor([[0] * 4 + [4] * 7, [0] * 9 + [9] * 2])
        inputs["position_ids"] = torch.arange(11) - starts
    if kind == "documents":
        inputs["cu_seqlens"] = torch.tensor([0, 4, 11, 20, 22], dtype=torch.int32)
        inputs["max_seqlen"] = 9
    return inputs


def with_all_layers(layout: str, model: nn.Module) -> str:
    extra = "t" * (model.config.get_text_config().num_hidden_layers - 2)
    return layout.replace("t", f"t{extra}", 1)


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_equal_the_whole_model(family, layout, num_ranks):
    model = FAMILIES[family]()
    check(model, with_all_layers(layout, model), num_ranks, inputs_of())


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(("qwen3-moe", "gpt-oss", "llama"), ("mask", "positions", "documents")),
        ("gated delta", "documents"),
        ("sparse", "documents"),
        ("sparse, keys of the layer before", "documents"),
    ],
)
def test_masks_and_documents_reach_every_stage(family, kind):
    model = FAMILIES[family]()
    if kind == "documents":
        use_causal_attention(model)
    plain, inputs = copy.deepcopy(model), inputs_of(kind)
    check(model, with_all_layers("Et|t|L", model), 3, inputs)
    with torch.no_grad():
        others = {name: inputs[name] for name in ("input_ids", "labels")}
        assert not torch.equal(plain(**inputs).loss, plain(**others).loss)


def check(model: nn.Module, layout: str, num_ranks: int, inputs: dict[str, Any]) -> None:
    """Compare a loss, gradients and logits with those of the whole."""
    result = run_stages(model, layout, num_ranks, inputs, backward=True)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    names = [name for name, param in model.named_parameters() if param.ndim == 2]
    assert_same(model, loss, result, table=next(n for n in names if "embed" in n))
    without = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = run_stages(model, layout, num_ranks, without, backward=False).output
        assert torch.equal(logits, model(**without, use_cache=False).logits)


def test_the_layers_of_other_stages_do_not_run():
    model, calls = FAMILIES["qwen3-moe"](), Counter[str]()
    parts = ["", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    for name in parts:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    modules, hidden = list(model.modules()), None
    for stage in stages_of("E|t|t|L") * 2:
        calls.clear()
        hidden = staged(model)(
            stage=stage, hidden=None if stage.embedding else hidden, **inputs_of()
        )
        expected = {1: "model.layers.0", 2: "model.layers.1"}
        assert calls["model.layers.0"] + calls["model.layers.1"] == (stage.index in expected)
        assert stage.index not in expected or calls[expected[stage.index]] == 1
        assert calls["model.embed_tokens"] == stage.embedding
        assert calls["model.norm"] == calls["lm_head"] == stage.loss
        assert calls[""] == 1 and list(model.modules()) == modules


def test_a_rank_keeps_what_its_stages_need():
    stages, kept = stages_of("Et|t|L"), []
    for family in ("llama", "llama, tied"):
        for stage in stages:
            model = FAMILIES[family]()
            remove_other_stages(staged(model), [stage])
            names = {name.split(".")[1] for name, _ in model.named_parameters()}
            kept.append(names | {n for n in model.state_dict() if n == "lm_head.weight"})
    middle = {"layers"}
    assert kept[:3] == [{"embed_tokens", "layers"}, middle, {"norm", "weight", "lm_head.weight"}]
    assert kept[3:] == [
        {"embed_tokens", "layers"},
        middle,
        {"embed_tokens", "norm", "lm_head.weight"},
    ]


@pytest.mark.parametrize(
    "family",
    [
        "gated delta",
        "the device of an embedding is read",
        "streams, stacked, and choices by token id",
    ],
)
def test_a_stage_needs_no_layers_of_other_stages_for_documents(family):
    """Each of the tiny model's layers is of a kind of its own."""
    for stage in stages_of(with_all_layers("Et|tL", FAMILIES[family]())):
        model = FAMILIES[family]()
        assert find_packing_problem(model) is None
        remove_other_stages(staged(model), [stage])
        assert find_packing_problem(model) is None
        use_causal_attention(model)


@pytest.mark.parametrize("family", ["qwen3-moe", "llama, tied"])
def test_values_are_those_of_the_whole_model(family):
    whole, held = FAMILIES[family](), set[str]()
    init_hf(whole, seed=3)
    expected = whole.state_dict()
    for stage in stages_of("Et|t|L"):
        model = FAMILIES[family]()
        remove_other_stages(staged(model), [stage])
        init_hf(model, seed=3)
        state = model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
        held |= state.keys()
    assert held == expected.keys()


REFUSED = {
    "switch_transformers": "has an encoder",
    "glm5_next": "it changes hidden states in front of model.language_model.norm",
    "deepseek_ocr2": "has model.view_separator beside its layers",
    "gemma4": "it runs model.embed_tokens_per_layer in front of a layer",
    "zaya": "has model.input_hidden_states_scale beside its layers",
    "openai_privacy_filter": "has no embedding, or no head",
    "inkling2": "its forward fails where model.layers.0 returns hidden states alone",
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_more_than_their_parts_are_refused(family, device):
    """By the whole model, before any rank runs a stage of it."""
    with torch.device(device):
        model = family_models.tiny_model(family)
    with pytest.raises(NotImplementedError) as error:
        staged(model)
    message = str(error.value)
    assert message.startswith(f"model ({type(model).__name__}) must be embedding, layers, norm and")
    assert REFUSED[family] in message and "\n" not in message


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_before_ranks_agree(rank):
    with fake_world(2, rank):
        meshes = build_meshes(ParallelConfig(pp=2), "cpu")
        with pytest.raises(NotImplementedError, match="Inkling2ForCausalLM"):
            parallelize_moe(family_models.tiny_model("inkling2"), meshes, pipeline=PipelineConfig())


@pytest.mark.parametrize("rank", range(4))
def test_what_tp_cuts_is_asked_of_the_whole_model(rank):
    """The last stage has no attention."""
    how: dict[str, Any] = dict(pipeline=PipelineConfig(layout="Ett|L"))
    with fake_world(4, rank):
        meshes = build_meshes(ParallelConfig(pp=2, tp=2), "cpu")
        model = parallelize_moe(FAMILIES["qwen3-moe"](), meshes, **how)
        parts = {name.split(".")[-2]: param for name, param in model.named_parameters()}
        assert (
            parts.keys() == {"norm", "lm_head"}
            if rank > 1
            else parts["o_proj"].to_local().shape[1] == 16
        )
        with pytest.raises(NotImplementedError, match=r"tp \(2\) must be 1 for Inkling.*r_proj"):
            parallelize_moe(family_models.tiny_model("inkling"), meshes, **how)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_stage_begins_with_a_layer_that_reads_more_of_the_one_before(rank):
    with fake_world(2, rank):
        meshes = build_meshes(ParallelConfig(pp=2), "cpu")
        expected = r"layout \('Ett\|ttL'\) must begin no stage with layer 2, .* any of \[1, 2\]"
        with pytest.raises(ValueError, match=expected):
            parallelize_moe(sharing(), meshes, pipeline=PipelineConfig(layout="Ett|ttL"))


def test_a_layer_with_more_results_is_refused():
    """Its model takes both forms, so that only its forward shows it."""
    model = FAMILIES["qwen3-moe"]()
    model.model.layers[0].register_forward_hook(lambda *found: (found[-1], None))
    with pytest.raises(NotImplementedError, match="DecoderLayer returns more than hidden states"):
        staged(model)(stage=stages_of("Et|tL")[0], hidden=None, **inputs_of())


WRONG = [
    (1, None, "hidden (None) must be None in the stage with the embedding and given in every"),
    (0, (2, 11, 32), "hidden ((2, 11, 32)) must be None in the stage with the embedding and"),
    (1, (2, 10, 32), "hidden (2, 10, 32) (torch.float32) must be floating with the shape (2,"),
    (2, (2, 11, 32), "stage (2) must be one that this rank has, but model.norm is elsewhere"),
]


@pytest.mark.parametrize(("index", "shape", "message"), WRONG)
def test_what_is_no_stage_of_a_rank_is_refused(index, shape, message):
    model, stages = FAMILIES["qwen3-moe"](), stages_of("Et|t|L")
    remove_other_stages(staged(model), stages[:2])
    hidden = None if shape is None else torch.zeros(shape)
    with pytest.raises(ValueError) as error:
        staged(model)(stage=stages[index], hidden=hidden, **inputs_of())
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


WRONG_INPUTS = [
    ({"input_ids": None}, "input_ids (None) must be in every micro-batch of pipeline stages"),
    ({"labels": None}, "labels or log_prob_loss (None) must be in every micro-batch of pipeline"),
    ({"output_router_logits": True}, "output_router_logits must be left out of a pipeline stage"),
    ({"use_cache": True}, "use_cache must be left out of a pipeline stage"),
    ({"inputs_embeds": torch.ones(2)}, "inputs_embeds must be left out of a pipeline stage"),
    ({"past_key_values": object()}, "past_key_values must be left out of a pipeline stage"),
    ({"cache": object()}, "cache must be left out of a pipeline stage"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_INPUTS)
def test_micro_batches_that_no_stages_run(changed, message):
    with pytest.raises(ValueError) as error:
        staged(FAMILIES["qwen3-moe"]()).check_inputs(inputs_of() | changed)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_images_are_refused():
    """Towers do not run in stages, whatever the stage."""
    inputs = inputs_of() | {"pixel_values": torch.ones(2)}
    with pytest.raises(ValueError, match="pixel_values must be None for Qwen3VLMoeModel with pipe"):
        staged(FAMILIES["a tower"]()).check_inputs(inputs)


def test_towers_are_with_the_embedding():
    model = FAMILIES["a tower"]()
    remove_other_stages(staged(model), stages_of("E|tt|L")[:1])
    assert {name.split(".")[1] for name, _ in model.named_parameters()} == {
        "visual",
        "language_model",
    }
    model = FAMILIES["a tower"]()
    remove_other_stages(staged(model), stages_of("E|tt|L")[1:])
    assert not any("visual" in name for name, _ in model.named_parameters())


def test_router_logits_of_a_config_are_refused():
    model = FAMILIES["qwen3-moe"]()
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits must be left out of a pipeline"):
        staged(model).check_inputs(inputs_of())
