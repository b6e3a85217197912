import copy
from collections import Counter
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import FSDPOptions
from moecore.base.copies import copy_modules, make_meta_parameter
from moecore.models import Decoder, DecoderConfig, preset
from moecore.parallel.fsdp.units import find_blocks, find_units
from moecore.parallel.pipeline.run import forward_pipeline, run_pipeline
from moecore.parallel.pipeline.stages import AbsentModule, get_hidden_shape, remove_other_stages
from tests.parallel.pipeline.emulated import assert_same, run_stages, staged, stages_of

TABLE, LAYERS = "model.embed_tokens.weight", 3
CONFIGS = {
    "qwen3": replace(preset("tiny-qwen3"), num_layers=LAYERS),
    "by token id": replace(preset("tiny-qwen3"), num_layers=LAYERS, hash_layers=2),
    "tied, shared experts": preset("tiny-shared"),
    "tied, mtp": replace(preset("tiny-shared"), num_mtp_layers=2, mtp_loss_coef=0.4),
    "latent, mtp": replace(preset("tiny-deepseek-v3"), num_mtp_layers=2),
    "latent, repeated": replace(preset("tiny-deepseek-v3"), mtp_repeats=2),
}
LAYOUTS = [  # with two MTP modules
    ("EtttmmL", 1),
    ("Et|ttmmL", 1),
    ("Ett|tmmL", 2),
    ("Et||tt|mmL", 2),
    ("E|ttt|mmL", 3),
    ("E|t|tt|m|m|L", 3),
    ("Et|ttm||mL", 2),
]


def make(name: str) -> Decoder:
    """A decoder of large weights, so that no part is invisible."""
    model = Decoder(CONFIGS[name])
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(6.0)
    return model


def batch(kind: str = "labels") -> dict[str, Any]:
    g = torch.Generator().manual_seed(5)
    text = torch.randint(0, 128, (2, 17), generator=g)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    labels[0, :5] = -100
    inputs: dict[str, Any] = {"tokens_BT": tokens, "labels_BT": labels}
    if kind == "documents":
        inputs["cu_seqlens"] = torch.tensor([0, 5, 16, 19, 32], dtype=torch.int32)
        inputs["max_seqlen"] = 13
    if kind == "padding":
        inputs["padding_mask_BT"] = torch.arange(16).expand(2, -1) >= torch.tensor([[11], [16]])
        inputs["num_tokens"] = torch.tensor(40)
        labels[inputs["padding_mask_BT"]] = -100
    return inputs


def layout_of(layout: str, config: DecoderConfig) -> str:
    head, *others = layout.split("m")
    own, more = others[: config.num_mtp_layers], others[config.num_mtp_layers :]
    return "m".join((head, *own)) + "".join(more)


@pytest.mark.parametrize("kind", ["labels", "documents", "padding"])
@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_equal_the_whole_model(name, layout, num_ranks, kind):
    model, inputs = make(name), batch(kind)
    layout = layout_of(layout, model.config)
    result = run_stages(model, layout, num_ranks, inputs, backward=True)
    loss = model(**inputs)
    loss.backward()
    assert_same(model, loss, result, table=TABLE)
    if model.config.num_mtp_layers:
        last = result.ranks[layout.count("|") % num_ranks]
        assert torch.equal(last.mtp_losses, model.mtp_losses)


@pytest.mark.parametrize("mode", ["eval", "logits"])
@pytest.mark.parametrize(("layout", "num_ranks"), [("Et||tt|mmL", 2), ("E|t|tt|m|m|L", 3)])
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_without_predicted_tokens(name, layout, num_ranks, mode):
    model, inputs = make(name).train(mode != "eval"), batch()
    if mode == "logits":
        del inputs["labels_BT"]
    layout = layout_of(layout, model.config)
    with torch.no_grad():
        result = run_stages(model, layout, num_ranks, inputs, backward=False)
        assert torch.equal(result.output, model(**inputs))


def test_the_layers_of_other_stages_do_not_run():
    model, calls = make("latent, mtp"), Counter[str]()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    stages = stages_of("Et|t|tmm|L")
    hidden: Tensor | None = None
    parts = ["model.embed_tokens", "model.norm", "lm_head", "mtp.0", "mtp.1"]
    parts += [f"model.layers.{i}" for i in range(LAYERS)]
    ran = [
        {"model.embed_tokens", "model.layers.0"},
        {"model.layers.1"},
        {"model.layers.2", "model.norm", "mtp.0", "mtp.1", "model.embed_tokens"},
        {"lm_head"},
    ]
    for stage, expected in zip(stages, ran, strict=True):
        calls.clear()
        hidden = staged(model)(stage=stage, hidden=hidden, **batch())
        assert calls.keys() & set(parts) == expected and calls[""] == 1


def test_a_rank_keeps_what_its_stages_need():
    layout = stages_of("Et|t||tm|m|L")

    def kept(name: str, *indices: int) -> set[str]:
        model = Decoder(CONFIGS[name], device="meta")
        remove_other_stages(staged(model), [replace(layout[i], index=i) for i in indices])
        names = {n.removeprefix("model.") for n, _ in model.named_parameters()}
        return {".".join(n.split(".")[:2]) for n in names}

    table, norm, head = "embed_tokens.weight", "norm.weight", "lm_head.weight"
    assert kept("tied, mtp", 0) == {table, "layers.0"}
    assert kept("tied, mtp", 1, 5) == {"layers.1", table}
    assert kept("latent, mtp", 1, 5) == {"layers.1", head} and kept("tied, mtp", 2) == set()
    assert kept("tied, mtp", 3) == {"layers.2", norm, "mtp.0", table}
    assert kept("latent, mtp", 2, 4) == {"mtp.1", table}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_the_whole_model(name):
    whole = Decoder(CONFIGS[name]).state_dict()
    held = set[str]()
    for stage in stages_of(layout_of("Et|t|tm|mL", CONFIGS[name])):
        model = Decoder(CONFIGS[name], device="meta")
        remove_other_stages(staged(model), [stage])
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(7)
        model.init_weights()
        for key, value in model.state_dict().items():
            assert torch.equal(value, whole[key]), key
        held |= model.state_dict().keys()
    assert held == whole.keys()


@pytest.mark.parametrize("made", ["itself", "deepcopy", "copy_modules"])
def test_a_cut_model_has_the_units_of_its_parts(made):
    model = Decoder(CONFIGS["qwen3"], device="meta")
    remove_other_stages(staged(model), stages_of("E|tt|t||L")[1:3])
    if made == "deepcopy":
        model = copy.deepcopy(model)
    elif made == "copy_modules":
        model = copy_modules(model, make_meta_parameter)[model]
    layers = list(model.layers)
    assert find_blocks(model) == layers
    units = find_units(model, FSDPOptions(param_dtype=torch.bfloat16))
    assert units.blocks == layers and not units.heads
    assert units.experts == [layer.mlp.experts for layer in layers]
    remove_other_stages(staged(model), [])
    assert not list(model.parameters()) and find_blocks(model) == []
    assert isinstance(model.lm_head, AbsentModule) and len(model.layers) == LAYERS


def test_shapes_by_hand():
    model, inputs = make("latent, mtp"), batch()
    stages = stages_of("Et||tt|m|m|L")
    shapes = [get_hidden_shape(staged(model), stages[i], inputs) for i in (2, 3, 4, 5)]
    assert shapes == [(2, 16, 64), (2, 16, 64), (2, 2, 16, 64), (3, 2, 16, 64)]
    model.eval()
    shapes = [get_hidden_shape(staged(model), stages[i], inputs) for i in (2, 3, 4, 5)]
    assert shapes == [(2, 16, 64), (2, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64)]
    for index in (0, 1):
        with pytest.raises(ValueError, match=f"^stage \\({index}\\) must get hidden states"):
            get_hidden_shape(staged(model), stages[index], inputs)


WRONG_INPUTS = [
    ({"tokens_BT": None}, "tokens_BT (None) must be in every micro-batch of pipeline stages"),
    ({"labels_BT": None}, "labels_BT or log_prob_loss (None) must be in every micro-batch of"),
    ({"tokens_BT": torch.ones(2, 16)}, "tokens (torch.float32) must be ids"),
]


@pytest.mark.parametrize("run", [run_pipeline, forward_pipeline])
@pytest.mark.parametrize(("changed", "message"), WRONG_INPUTS)
def test_micro_batches_are_checked_before_ranks_communicate(run, changed, message):
    model = make("qwen3")
    pipeline: Any = SimpleNamespace(model=staged(model))  # and nothing to communicate with
    more = [None] * (len(signature(run).parameters) - 2)
    with pytest.raises(ValueError) as error:
        run(pipeline, [batch(), batch() | changed], *more)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


X = torch.zeros(2, 16, 64)
WRONG = [
    (0, X, "hidden ((2, 16, 64)) must be None in the stage with the embedding and given in every"),
    (1, None, "hidden (None) must be None in the stage with the embedding and given in every"),
    (1, X[:, :8], "hidden (2, 8, 64) (torch.float32) must be floating with the shape (2, 16, 64)"),
    (1, X.long(), "hidden (2, 16, 64) (torch.int64) must be floating with the shape (2, 16, 64)"),
    (2, X[:1], "hidden (1, 16, 64) (torch.float32) must be floating with the shape (2, 16, 64)"),
    (3, X, "hidden (2, 16, 64) (torch.float32) must be floating with the shape (3, 2, 16, 64)"),
    (4, X, "stage (4) must be one that this rank has, but model.layers.2 is elsewhere"),
]


@pytest.mark.parametrize(("index", "hidden", "message"), WRONG)
def test_what_is_no_stage_of_a_rank_is_refused(index, hidden, message):
    model = make("latent, mtp")
    stages = [*stages_of("Et|tmm||L"), replace(stages_of("t")[0], index=4, layers=(2,))]
    remove_other_stages(staged(model), stages[:4])
    with pytest.raises(ValueError) as error:
        staged(model)(stage=stages[index], hidden=hidden, **batch())
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_models_and_layouts_that_do_not_fit_are_refused():
    model = make("qwen3")
    for layout, message in (
        ("Ett|ttL", r"^stage 1 layers \(\(2, 3\)\) must be of the 3 of the model"),
        ("Ett|tmL", r"^stage 1 mtp \(\(0,\)\) must be of the 0 of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            remove_other_stages(staged(model), stages_of(layout))
    stages = stages_of("Ett|tL")
    remove_other_stages(staged(model), stages[:1])
    with pytest.raises(ValueError, match=r"^stages \(\[1\]\) must be of a model that has"):
        remove_other_stages(staged(model), stages[1:])
    with pytest.raises(ValueError, match=r"^stage \(0\) must be one that this rank has, but model"):
        model(**batch())
    with pytest.raises(NotImplementedError, match=r"^model \(Linear\) must be a Decoder or"):
        remove_other_stages(staged(nn.Linear(2, 2)), stages)
