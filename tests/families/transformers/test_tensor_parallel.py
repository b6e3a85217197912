"""Tensor parallelism of transformers models: what is refused, and checkpoints of other tp sizes.

Numbers are compared in test_families.py on two ranks, in test_hf_ranks.py, test_hf_context.py and
test_pipeline.py on four.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.core_model_loading import revert_weight_conversion

from moecore import Meshes, ParallelConfig, PipelineConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.params import shard_parameter
from moecore.base.torch_private import HAS_SEPARATE_PIECES, StridedShard, get_local_tensor
from moecore.families import use_causal_attention
from moecore.families.transformers.linear_tp_plans import plan_linear_attention
from moecore.families.transformers.module_plan import list_placements
from moecore.families.transformers.tp_plans import plan_modules
from moecore.io import Saver, load, stream_weights
from moecore.planning import fake_world
from moecore.precision.linear import find_weight_problem
from tests.families.transformers import hf_models as hm
from tests.families.transformers.family_models import batch as family_batch
from tests.families.transformers.family_models import fill, loss_of, tiny_model
from tests.families.transformers.test_log_probs import scored, stock
from tests.helpers.ranks import ranks_fixture
from tests.train.memory.blocks import counting_bytes


def state(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict().items()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step, (ids, labels) = TrainStep(model, optimizer), hm.batch()
    with step.micro_batch():
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    step.finish()


def checkpoints(folder: Path) -> bool:
    """A step after a checkpoint of tp = 2 on tp = 4 and on one data rank each, and files of it."""
    model = parallelize_moe(
        hm.random_model("gpt-oss"), build_meshes(ParallelConfig(tp=2, ep=2), "cpu")
    )
    optimizer = optimizer_of(model)
    train(model, optimizer)
    with Saver(folder / "run", model, optimizer) as saver:
        saved = saver.save(1, wait=True)
    before = state(model)
    train(model, optimizer)
    after, found = state(model), []
    for parallel in (dict(tp=4, ep=2), dict(ep=4)):
        other = hm.random_model("gpt-oss")
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        parallelize_moe(other, build_meshes(ParallelConfig(**parallel), "cpu"))
        again = optimizer_of(other)
        load(saved, other, again)
        loaded = state(other)
        found.append(all(torch.equal(loaded[n], before[n]) for n in before))
        train(other, again)
        trained = state(other)
        found.append(all(torch.allclose(trained[n], after[n], atol=1e-5) for n in after))
    return all(found)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "heads": (
        {"num_attention_heads": 6, "num_key_value_heads": 6},
        4,
        r"model.layers.0.self_attn: heads \(6\) .* must be multiples of ParallelConfig.tp \(4\)",
    ),
    "key heads": (
        {"num_attention_heads": 12, "num_key_value_heads": 3},
        4,
        r"key/value heads \(3\) must be multiples of ParallelConfig.tp \(4\), or the latter a div",
    ),
    "hidden dim": (
        {"mlp_only_layers": [0], "intermediate_size": 6},
        4,
        r"layers.0.mlp: the hidden dim \(6\) of Qwen3MoeMLP must be a multiple",
    ),
    "dropout": (
        {"attention_dropout": 0.1},
        2,
        r"attention_dropout \(0.1\) must be 0 under ParallelConfig.tp \(2\)",
    ),
}


def refused(meshes: dict[int, Meshes]) -> None:
    for options, tp, message in REFUSED.values():
        with pytest.raises(ValueError, match=message):
            parallelize_moe(hm.random_model("qwen3-moe", **options), meshes[tp])
    three = tiny_model("minimax", vocab_size=64)
    lightning = next(m for m in three.modules() if type(m).__name__ == "MiniMaxLightningAttention")
    lightning.num_attention_heads = 3
    with pytest.raises(ValueError, match=r"heads \(3\) and .* must be multiples of Para"):
        plan_modules(three, 2)
    with pytest.raises(NotImplementedError, match=r"no module can be cut: .*qkv_proj .* all heads"):
        parallelize_moe(tiny_model("zaya"), meshes[2])


HEADS = {
    "qwen3_5_moe": (4, {}, r"heads of linear attention \(2, 4\) must be multiples of"),
    "kimi_linear": (2, dict(num_heads=3), r"heads of linear attention \(3\) must be multiples of"),
    "nemotron_h": (6, dict(num_heads=12, n_groups=4), r"linear attention \(12, 4\) must be"),
}


@pytest.mark.parametrize("family", HEADS)
def test_heads_of_linear_attention_that_ranks_cannot_share(family: str) -> None:
    tp, numbers, message = HEADS[family]
    with torch.device("meta"):
        model = tiny_model(family)
    layer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    vars(layer).update(numbers)
    with pytest.raises(ValueError, match=message):
        plan_linear_attention("layer", layer, tp)


def test_attention_whose_indexer_selects_by_head_is_replicated() -> None:
    with torch.device("meta"):
        plans, replicated = plan_modules(tiny_model("minimax_m3_vl"), 2)
    assert any("indexer selects keys for each group of heads" in reason for reason in replicated)
    assert sum("Attention" in type(module).__name__ for module in plans) == 1


def test_a_kernel_of_a_whole_layer_is_not_run(monkeypatch: Any) -> None:
    """It has the projection of outputs, which a rank has a part of."""
    with torch.device("meta"):
        model = tiny_model("nemotron_h", vocab_size=64)
    mixer = next(m for m in model.modules() if type(m).__name__ == "NemotronHMamba2Mixer")
    of_file = inspect.unwrap(type(mixer).forward).__globals__
    monkeypatch.setitem(of_file, "mamba2_split_conv1d_scan_combined", lambda x, *_, **__: x)
    with fake_world(2):
        parallelize_moe(model, build_meshes(ParallelConfig(tp=2), "cpu"))
    assert of_file["mamba2_split_conv1d_scan_combined"](1, 2, headdim=3) is None


def cuts_with_adapters(model, target=".*\\.(q|o|gate|down)_proj", **options):
    peft = pytest.importorskip("peft", reason="adapters are its own")
    config = peft.LoraConfig(target_modules=target, **options)
    return plan_modules(peft.get_peft_model(model, config), 2)


@pytest.mark.skipif(not HAS_SEPARATE_PIECES, reason="torch < 2.13 has no tp of fused weights")
def test_ranks_that_shard_gate_above_up_divide_its_inputs() -> None:
    with fake_world(6), torch.device("meta"):
        model, meshes = tiny_model("granitemoeshared"), build_meshes(ParallelConfig(tp=2), "cpu")
        with pytest.raises(ValueError, match=r"dim 1 must be a multiple of 1 times the .* \(3\)"):
            parallelize_moe(model, meshes)


def test_parts_of_gate_above_up_that_fp8_cannot_multiply_stay_in_their_dtype() -> None:
    with fake_world(2), torch.device("meta"):
        mesh = build_meshes(ParallelConfig(tp=2), "cpu").dense["tp"]
        linears = [nn.Linear(32, rows) for rows in (48, 64)]
        for linear in linears:
            shard_parameter(linear, "weight", mesh, (StridedShard(0, split_factor=2),))
        assert (
            find_weight_problem(linears[0].weight)
            == "its weight [24, 32] is no matrix of multiples of 16"
        )
        assert find_weight_problem(linears[1].weight) is None


def test_adapters_are_cut_as_their_linears() -> None:
    cuts, whole = cuts_with_adapters(hm.random_model("qwen2-moe", mlp_only_layers=[0]))
    assert not whole
    attention, mlp, *_ = cuts
    for module, column, row in (attention, "q_proj", "o_proj"), (mlp, "gate_proj", "down_proj"):
        places = dict(list_placements(module, cuts[module]))
        outer, inner = module.get_submodule(column), module.get_submodule(row)
        found = {
            (name, kind): places.get((linear.get_submodule(kind), "weight"))
            for name, linear in (("column", outer), ("row", inner))
            for kind in ("base_layer", "lora_A.default", "lora_B.default")
        }
        assert found == {
            ("column", "base_layer"): Shard(0),
            ("column", "lora_A.default"): None,
            ("column", "lora_B.default"): Shard(0),
            ("row", "base_layer"): Shard(1),
            ("row", "lora_A.default"): Shard(1),
            ("row", "lora_B.default"): None,
        }


@pytest.mark.skipif(not HAS_SEPARATE_PIECES, reason="torch < 2.13 has no tp of fused weights")
def test_adapters_that_read_all_of_a_weight_leave_it_whole() -> None:
    model = hm.random_model("qwen2-moe", mlp_only_layers=[0])
    cuts, (reason,) = cuts_with_adapters(model, use_dora=True)
    assert not cuts and reason.endswith("(Qwen2MoeAttention), whose heads have no known size")
    cuts, (reason,) = cuts_with_adapters(hm.random_model("gpt-oss"))
    assert not cuts and reason.endswith("(GptOssAttention), whose o_proj has a bias and adapters")
    model = tiny_model("granitemoeshared")
    assert any(cut.halves for cut in plan_modules(model, 2)[0].values())
    cuts, _ = cuts_with_adapters(model, target=r".*\.input_linear")
    assert cuts and not any(cut.halves for cut in cuts.values())


def only_whole(meshes: Meshes) -> None:
    """A base model by itself, whose gradient no root would divide; documents that tp cuts."""
    model: Any = parallelize_moe(hm.random_model("qwen3-moe"), meshes)
    ids, _ = hm.batch()
    with pytest.raises(ValueError, match="Qwen3MoeModel must be called by its whole model"):
        model.model(input_ids=ids)
    places = torch.arange(11).expand(2, -1)
    message = r"rows of documents \(11 tokens\) must be multiples of tp"
    with pytest.raises(ValueError, match=message):
        model(
            input_ids=ids, position_ids=places, cu_seqlens=torch.tensor([0, 11, 22]), max_seqlen=11
        )


def phi3(num_key_value_heads: int) -> nn.Module:
    """Queries, keys and values of a dense model are one linear."""
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=num_key_value_heads)
    config = hm.transformers.Phi3Config(vocab_size=64, pad_token_id=None, **sizes, **heads)
    config._attn_implementation = "eager"
    model = hm.transformers.Phi3ForCausalLM(config)
    fill(model)
    return model.train()


def with_gradients(make: Callable[[], nn.Module], **degrees: int) -> tuple[nn.Module, bool]:
    """A tiny model over ranks, and whether it has the stock gradients and streams its weights."""
    plain, model = make(), make()
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    parallelize_moe(model, meshes)
    for rank in range(meshes.data_ranks):
        (loss_of(plain, family_batch(plain, rank)) / meshes.data_ranks).backward()
    loss_of(model, family_batch(model, meshes.data_rank)).backward()
    near = hm.worst(hm.whole_gradients(model), hm.whole_gradients(plain))[0] <= 1e-5
    plain = getattr(plain, "merge_and_unload", lambda: plain)()
    stock = revert_weight_conversion(plain, plain.state_dict())
    equal = [torch.equal(t, stock[n]) for n, t in stream_weights(model) if n in stock]
    return model, near and all(equal) and len(equal) > 4


def clipped() -> nn.Module:
    """Return a model whose attention clips queries, keys and values in place."""
    model = tiny_model("olmoe", vocab_size=64)
    model.config.clip_qkv = 0.3
    return model


def halve_in_place(module: nn.Module, _args: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor):  # else the record that a whole model returns
        first.mul_(0.5)


def written_in_place(make: Callable[[], nn.Module], **degrees: int) -> bool:
    """Whether gradients are stock where each module's output, and the logits, change in place."""
    plain, model = make(), make()
    parallelize_moe(model, build_meshes(ParallelConfig(**degrees), "cpu"))
    inputs, losses = family_batch(plain, 0), []
    for one in (plain, model):
        for name, module in one.named_modules():
            parts = name.split(".")
            # A router, experts and filters are no modules whose outputs a model's code gets.
            inside = {"mlp", "block_sparse_moe"} & {*parts[:-1]} or "conv1d" in parts
            inside = inside and parts[-1] != "experts"
            if name and not inside and "forward" in vars(type(module)):
                module.register_forward_hook(halve_in_place)
        logits = one(**inputs).logits
        logits /= 0.7
        targets = inputs["input_ids"].flatten() % logits.shape[-1]
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets))
        losses[-1] *= 3
        losses[-1].backward()
    near = hm.worst(hm.whole_gradients(model), hm.whole_gradients(plain))[0] <= 1e-5
    return near and torch.allclose(*losses, rtol=1e-5)


def fused(folder: Path) -> bool:
    """An MLP with gate and up in one matrix, and its files on other tp sizes."""
    model, near = with_gradients(tiny("granitemoeshared"), tp=2, ep=2)
    optimizer = optimizer_of(model)
    optimizer.step()
    (weight,) = {p.placements for n, p in model.named_parameters() if "input_linear" in n}
    assert weight == (Shard(1), StridedShard(0, split_factor=2))
    with Saver(folder / "fused", model, optimizer) as saver:
        saved = saver.save(1, wait=True)
    before, equal = tensors(model, optimizer), []
    for parallel in (dict(tp=4, ep=2), dict(ep=4)):
        other = tiny("granitemoeshared")()
        parallelize_moe(other, build_meshes(ParallelConfig(**parallel), "cpu"))
        again = optimizer_of(other)
        load(saved, other, again)
        with Saver(folder / f"fused{parallel}", other, again) as saver:
            back = saver.save(1, wait=True)
        optimizer.step()
        load(back, model, optimizer)
        found = tensors(other, again), tensors(model, optimizer)
        equal += [torch.equal(a, b) for one in found for a, b in zip(one, before, strict=True)]
    return near and all(equal)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return whole parameters and their moments."""
    found = [p.detach() for p in model.parameters()]
    found += [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def padded(meshes: Meshes) -> bool:
    """Gradients of a tied embedding of 64 rows, one of which is padding and is not trained."""
    options: dict[str, Any] = dict(vocab_size=64, pad_token_id=52, tie_word_embeddings=True)
    models = [hm.random_model("qwen3-moe", **options) for _ in range(2)]
    parallelize_moe(models[1], meshes)
    ids, labels = hm.batch()
    ids[:, 3:7] = 52
    for model in models:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    expected, ours = (hm.whole_gradients(model) for model in models)
    parts = [p for n, p in models[1].named_parameters() if n.endswith("embed_tokens.weight")]
    assert len(parts) == 1 and parts[0].placements[-1] == Shard(0)  # type: ignore[attr-defined]
    for wrong in (64, -1):  # which no rank has a row of
        ids[0, 0] = wrong
        with pytest.raises(ValueError, match=r"tokens .* must be in \[0, vocab_size 64\)"):
            models[1](input_ids=ids)
    return hm.worst(ours, expected)[0] <= 1e-5


def scores(meshes: Meshes) -> bool:
    """Log-probabilities, entropies and gradients of packed documents."""
    plain = hm.random_model("gpt-oss", vocab_size=64)
    model = hm.random_model("gpt-oss", vocab_size=64)
    use_causal_attention(model)
    parallelize_moe(model, meshes)
    *wanted, grads = stock(plain)
    found = scored(model)
    found[2].backward()
    numbers = zip(found, wanted, strict=True)
    is_near = all((a - b).abs().max() <= 1e-6 * max(1, b.abs().max()) for a, b in numbers)
    return bool(is_near and hm.worst(hm.whole_gradients(model), grads)[0] <= 2e-5)


def stages(schedule: Any, layout: str, *, tied: bool = False) -> bool:
    """Gradients of two stages of two tp ranks, and their norm."""
    meshes = build_meshes(ParallelConfig(pp=2, tp=2, ep=2), "cpu")
    options = dict(vocab_size=64, tie_word_embeddings=tied)
    plain, model = (hm.random_model("qwen3-moe", **options) for _ in range(2))
    parallelize_moe(model, meshes, pipeline=PipelineConfig(layout=layout, schedule=schedule))
    step = TrainStep(model, optimizer_of(model), num_micro_batches=2)
    ids, labels = hm.batch()
    inputs = [dict(input_ids=x, labels=y) for x, y in ((ids, labels), (ids.flip(0), labels))]
    losses = step.forward_backward(inputs)
    for given in inputs:
        (plain(**given, use_cache=False).loss / 2).backward()
    expected, ours = hm.whole_gradients(plain), hm.whole_gradients(model)
    error = hm.worst(ours, {name: expected[name] for name in ours})[0]
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    found = step.finish().norm
    assert found is not None and losses is not None
    return bool(error <= 1e-5 and abs(found.total / norm - 1) <= 1e-5)


def frozen(meshes: Meshes) -> bool:
    """Gradients where only a router and a norm are trained, whose others all ranks have alike."""
    names = ("mlp.gate.weight", "input_layernorm.weight")
    models = [hm.random_model("qwen3-moe") for _ in range(2)]
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(names))
    parallelize_moe(models[1], meshes)
    ids, labels = hm.batch()
    for model in models:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    expected, ours = (hm.whole_gradients(model) for model in models)
    return hm.worst(ours, expected)[0] <= 1e-5


def vocabulary_bytes(meshes: Meshes) -> int:
    """What 4,096 more ids take at the peak of a step: embedding, head, gradients, no logits."""
    peaks, (ids, labels) = [], hm.batch()
    for size in (4096, 8192):
        model = hm.random_model("qwen3-moe", vocab_size=size)
        how = FSDPOptions(dense_strategy="no_shard", embedding_strategy="no_shard")
        parallelize_moe(model, meshes, fsdp=how)
        with counting_bytes() as made:
            model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        peaks.append(made.peak + sum(get_local_tensor(p).nbytes for p in model.parameters()))
    return peaks[1] - peaks[0]


def tiny(family: str) -> Callable[[], nn.Module]:
    return partial(tiny_model, family, vocab_size=64)


def saves_memory(meshes: dict[int, Meshes]) -> bool:
    alone = vocabulary_bytes(build_meshes(ParallelConfig(), "cpu"))
    return abs(2 * vocabulary_bytes(meshes[2]) / alone - 1) <= 0.05


# What each case computes from the meshes by tp and a folder.
CASES: dict[str, Callable[[dict[int, Meshes], Path], bool]] = {
    "memory": lambda meshes, _: saves_memory(meshes),
    "checkpoints": lambda _, folder: checkpoints(folder),
    **({"fused": lambda _, folder: fused(folder)} if HAS_SEPARATE_PIECES else {}),
    "heads in one linear": lambda *_: with_gradients(tiny("minimax"), tp=2, ep=2)[1],
    "groups of two ranks": lambda *_: with_gradients(tiny("nemotron_h"), tp=4, ep=2)[1],
    "clipped in place": lambda *_: with_gradients(clipped, tp=2, ep=2)[1],
    "written in place": lambda *_: written_in_place(clipped, tp=2, ep=2),
    "linear attention written in place": lambda *_: written_in_place(
        tiny("qwen3_next"), tp=2, ep=2
    ),
    "experts written in place": lambda *_: written_in_place(tiny("phimoe"), tp=2, ep=2),
    "kinds in one linear": lambda *_: with_gradients(partial(phi3, 2), tp=2)[1],
    "fewer key heads in one linear": lambda *_: with_gradients(partial(phi3, 2), tp=4)[1],
    "frozen": lambda meshes, _: frozen(meshes[4]),
    "padded": lambda meshes, _: padded(meshes[4]),
    "scores": lambda meshes, _: scores(meshes[2]),
    "stages": lambda *_: stages("1f1b", "Et|tL", tied=True),
    "a stage without attention": lambda *_: stages("1f1b", "Ett|L"),
    "deferred": lambda *_: stages("zero-bubble", "Et|tL"),
}


def worker(rank: int, device: torch.device, folder: str, names: list[str]) -> dict[str, bool]:
    meshes = {tp: build_meshes(ParallelConfig(tp=tp), "cpu") for tp in (2, 4)}
    refused(meshes)
    only_whole(meshes[2])
    own = {name: CASES[name](meshes, Path(folder)) for name in names}
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, own)
    return {name: all(found[name] for found in every) for name in own}


found = ranks_fixture(4, worker, "name", in_folder=True)


@pytest.mark.parametrize("name", CASES)
def test_over_tp(name: str, found: dict[str, bool]) -> None:
    assert found[name]
