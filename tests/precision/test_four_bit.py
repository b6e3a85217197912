import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    CloneOptions,
    DispatchOptions,
    MemoryOptions,
    ParallelConfig,
    Precision,
    Recipe,
    build_meshes,
    parallelize_moe,
)
from moecore.base.torch_private import HAS_SEPARATE_PIECES, get_local_tensor
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import (
    export_hf,
    init_adapters,
    init_hf,
    latest,
    load,
    load_hf,
    merge_adapters,
    save,
    save_adapters,
)
from moecore.kernels.rows.four_bit import FORMATS, dequantise, quantise
from moecore.moe import stored_weights
from moecore.moe.stored_weights import get_four_bit_blocks, read_four_bit_values
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.precision import stored as stored_linears
from tests.families.transformers.hf_models import random_model
from tests.families.transformers.lora_cases import adapted_model, batches, lora_config, peft
from tests.helpers.ranks import run_ranks
from tests.precision.test_stored import results

KINDS: list[Any] = list(FORMATS)
kinds = pytest.mark.parametrize("kind", KINDS)
QWEN = dict(num_hidden_layers=2, hidden_size=128, moe_intermediate_size=128)
GPT_OSS = dict(hidden_size=64, intermediate_size=64)
MODELS = {"qwen3-moe": QWEN, "gpt-oss": GPT_OSS}


def parallelized(name: str, kind: str | None, **options: Any) -> nn.Module:
    folding = options.pop("folding", {})
    model = adapted_model(name, MODELS[name])
    meshes = build_meshes(ParallelConfig(**folding), "cpu")
    precision: Any = None if kind is None else Precision(frozen=kind)
    return parallelize_moe(model, meshes, precision=precision, **options)


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of experts by name."""
    ends = ("gate_up_proj", "down_proj")
    return {n: p for n, p in model.named_parameters() if n.endswith(ends) and "experts" in n}


def rounded(model: nn.Module, stored: nn.Module) -> nn.Module:
    """The model with the values that the weights in 4 bits of `stored` have."""
    with torch.no_grad():
        sources = dict(stored.named_parameters())
        for name, param in model.named_parameters():
            blocks = get_four_bit_blocks(sources[name])
            assert blocks is not None or name not in matrices(model)
            if blocks is not None:
                get_local_tensor(param).copy_(read_four_bit_values(blocks, param.dtype))
    return model


def compare(rank: int, device: torch.device, name: str, kind: str, folding: Any) -> int:
    """Bytes of the experts, whose results are those of a plain base."""
    stored = parallelized(name, kind, folding=folding)
    found = results(stored)
    expected = results(rounded(parallelized(name, None, folding=folding), stored))
    for key, value in expected.items():
        # Products of gpt-oss's matrices, which are stored transposed, add in another order.
        tolerance = 0 if name == "qwen3-moe" else 1e-5
        assert torch.allclose(found[key], value, rtol=tolerance, atol=tolerance), key
    params = matrices(stored).values()
    assert all(get_local_tensor(p).untyped_storage().nbytes() == 4 for p in params)
    return sum(t.nbytes for p in params for t in get_four_bit_blocks(p).tensors())  # type: ignore[union-attr]


@kinds
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_of_the_dequantised_values(no_group_left, name, kind) -> None:
    num_bytes = compare(0, torch.device("cpu"), name, kind, {})
    model = adapted_model(name, MODELS[name])
    numel = sum(p.numel() for p in matrices(model).values())
    if FORMATS[kind].has_row_scale:
        dims = MODELS[name].values() if name == "gpt-oss" else (128, 128)
        assert len(set(dims)) == 1, "rows of all matrices have as many values"
        num_bytes -= numel // min(dims)
    assert num_bytes * 8 == FORMATS[kind].bits * numel


@kinds
@pytest.mark.parametrize("name", MODELS)
def test_plans_count_all_scales(no_group_left: None, name: str, kind: Any) -> None:
    sizes = MODELS[name] | dict(hidden_size=128)
    model = adapted_model(name, sizes)
    precision = Precision(frozen=kind, frozen_dense=True)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)
    named = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    blocks = {n: get_four_bit_blocks(p) for n, p in named.items()}
    found = {n: sum(t.nbytes for t in b.tensors()) for n, b in blocks.items() if b is not None}
    assert len(found) > len(matrices(model)) > 1
    params = get_parallel_state(model).plan.params
    assert {p.name: p.num_bytes() for p in params if p.frozen} == found


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("dense", [False, True], ids=["experts", "linears"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "checkpointing"])
def test_gpus_compute_the_same(
    no_group_left: None, kind: Any, recomputes: bool, dense: bool
) -> None:
    """By moecore's kernels for Hopper, with the memory that 4 bits promise."""
    sizes = dict(num_hidden_layers=4, hidden_size=1024, moe_intermediate_size=512, head_dim=64)
    found: list[dict[str, Tensor]] = []
    models, saved = list[nn.Module](), list[int]()
    for precision in (Precision(frozen=kind, frozen_dense=dense), None):
        base = random_model("qwen3-moe", **sizes).bfloat16()
        if recomputes:
            enable_activation_checkpointing(base)
        model = peft.get_peft_model(base, lora_config(init_lora_weights=False))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.normal_(std=0.1)
        meshes = build_meshes(ParallelConfig(), "cuda")
        parallelize_moe(model, meshes, precision=precision)
        models.append(model if precision else rounded(model, models[0]))
        ids = torch.randint(0, 61, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # units are made
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        saved.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach()} | {n: get_local_tensor(g) for n, g in grads.items()})
        del loss  # its graph has activations, which the next assignment would free in between
    stored, plain = found
    assert stored.keys() == plain.keys() and len(stored) > 20
    assert torch.equal(stored["loss"], plain["loss"])
    for name, value in plain.items():  # attention's backward adds in any order
        assert torch.allclose(stored[name], value, atol=0.01 * value.abs().max().item()), name
    assert saved[0] <= saved[1] + (4 << 20)  # no matrix in bf16 waits for backward


FOLDINGS = [dict(ep=4), dict(ep=2, etp=2)][: 1 + HAS_SEPARATE_PIECES]


@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
@pytest.mark.slow
def test_ranks_compute_the_same_bits(folding: dict[str, int]) -> None:
    assert run_ranks(4, compare, "qwen3-moe", "nf4", folding) > 0


def watch_dequantised(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return the list of the memory of every matrix that is dequantised from now on."""
    alive: list[weakref.ref[Any]] = []

    def watched(*args: Any) -> Tensor:
        value = dequantise(*args)
        alive.append(weakref.ref(value.untyped_storage()))
        return value

    for module in (stored_weights, stored_linears):  # experts, linears
        monkeypatch.setattr(module, "dequantise", watched)
    return alive


@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "checkpointing"])
def test_backward_dequantises_again(
    no_group_left: None, monkeypatch: pytest.MonkeyPatch, recomputes: bool
) -> None:
    """No dequantised matrix waits for backward, in which each is made once more."""
    alive = watch_dequantised(monkeypatch)
    model = parallelized("qwen3-moe", "nf4")
    if recomputes:
        enable_activation_checkpointing(model)
    loss = model(**batches(0)[0], use_cache=False).loss
    assert len(alive) == 4 and not any(ref() is not None for ref in alive)
    loss.backward()
    assert len(alive) == 8 and not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("backend", ["torch", "sequential"])
def test_backends_read_the_same_values(no_group_left: None, backend: Any) -> None:
    stored = parallelized("qwen3-moe", "mxfp4", expert_backend=backend)
    plain = rounded(parallelized("qwen3-moe", None, expert_backend=backend), stored)
    found, expected = results(stored), results(plain)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("part", ["expert_fc1", "moe"])
def test_recomputed_layers(no_group_left: None, part: Any) -> None:
    expected = results(parallelized("qwen3-moe", "nf4"))
    found = results(parallelized("qwen3-moe", "nf4", memory=MemoryOptions(recompute=(part,))))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def adapted_on_meta(base: nn.Module, precision: Any) -> nn.Module:
    """Return a model of the config of `base` with adapters, parallelized on meta."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.config, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, lora_config())
    return parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)


def test_a_merged_export_is_that_of_peft(no_group_left, tmp_path) -> None:
    """From meta to trained adapters to a merged export, without the experts' own values."""
    from transformers import AutoModelForCausalLM

    base = random_model("qwen3-moe", **QWEN).bfloat16()
    base.save_pretrained(tmp_path / "base")
    model = adapted_on_meta(base, "nf4")
    model.to_empty(device="cpu")
    load_hf(tmp_path / "base", model)
    init_adapters(model)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_" in key:
                get_local_tensor(param).normal_(std=0.1)
    save_adapters(model, tmp_path / "adapters")
    with pytest.raises(ValueError, match="must be merged into the weights"):
        export_hf(model, tmp_path / "merged")
    merge_adapters(model)
    export_hf(model, tmp_path / "merged")
    with pytest.raises(ValueError, match="active adapters that are not merged"):
        merge_adapters(model)
    # peft's own merge into a model of the dequantised values
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        for key, param in stock.named_parameters():
            if "experts." in key:
                param.copy_(dequantise(quantise(param, "nf4"), torch.float32))
    expected = peft.PeftModel.from_pretrained(stock, tmp_path / "adapters").merge_and_unload()
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    for (name, wanted), value in zip(expected.named_parameters(), stored.parameters(), strict=True):
        scale = wanted.abs().max().item()
        assert torch.allclose(value.float(), wanted, rtol=2**-8, atol=1e-3 * scale), name


def test_published_mxfp4_is_kept(no_group_left: None, tmp_path: Path) -> None:
    """gpt-oss's blocks have the same values after the load."""
    from tests.io.hf.dirs import plain_mxfp4, random_mxfp4, write_directory

    model = random_model("gpt-oss", **GPT_OSS)
    tensors, truth = {}, {}
    for i, (name, value) in enumerate(model.state_dict().items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = random_mxfp4(tuple(value.shape), seed=i)  # type: ignore[arg-type]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            truth[name] = plain_mxfp4(blocks, scales)
        else:
            tensors[name] = value
    write_directory(tmp_path, tensors, model.config.to_dict())
    parallelize_moe(
        model.requires_grad_(False), build_meshes(ParallelConfig(), "cpu"), precision="mxfp4"
    )
    load_hf(tmp_path, model)
    for name, param in matrices(model).items():
        blocks = get_four_bit_blocks(param)
        assert blocks is not None
        assert torch.equal(read_four_bit_values(blocks, torch.float32), truth[name])


def test_seeds_checkpoints_and_dtypes(no_group_left: None, tmp_path: Path) -> None:
    model = parallelized("qwen3-moe", "nf4")
    init_hf(model, 3)
    plain = parallelized("qwen3-moe", None)
    init_hf(plain, 3)
    for name, param in matrices(plain).items():
        wanted = quantise(get_local_tensor(param).detach(), "nf4")
        blocks = get_four_bit_blocks(matrices(model)[name])
        assert blocks is not None and torch.equal(blocks.values, wanted.values)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)
    expected = results(model)
    save(tmp_path, 1, model, optimizer)
    with torch.no_grad():
        for param in trained:
            param.zero_()
    load(latest(tmp_path), model, optimizer)
    found = results(model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    model.bfloat16()
    assert next(iter(matrices(model).values())).dtype == torch.bfloat16
    for name, param in matrices(model).items():
        blocks = get_four_bit_blocks(param)
        assert blocks is not None and blocks.scales.dtype == torch.float32, name


REFUSED = {
    r"\(trained\) must be frozen with Precision.frozen \('nf4'\)": dict(trained=True),
    r"rows of 96\) must divide by 64 with Precision.frozen": dict(moe_intermediate_size=96),
    r"DispatchOptions.clones must be None with Precision.frozen": dict(
        dispatch=DispatchOptions(clones=CloneOptions())
    ),
    r"Precision.overrides must give the experts of \S+ no recipe with Precision.frozen": dict(
        precision=Precision(frozen="nf4", overrides=(("*.experts", Recipe()),))
    ),
}


@pytest.mark.parametrize(("message", "case"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_cannot_be_combined(no_group_left: None, message: str, case: Any) -> None:
    case = dict(case)
    sizes = QWEN | {n: case.pop(n) for n in ("moe_intermediate_size",) if n in case}
    model = adapted_model("qwen3-moe", sizes).requires_grad_(case.pop("trained", False))
    meshes = build_meshes(ParallelConfig(), "cpu")
    with pytest.raises(ValueError, match=message) as error:
        parallelize_moe(model, meshes, **dict(precision="nf4") | case)
    assert "\n" not in str(error.value)


def refused(rank: int, device: torch.device) -> str:
    with pytest.raises(ValueError) as error:
        parallelized("qwen3-moe", "nf4", folding=dict(edp_shard=2))
    return str(error.value)


@pytest.mark.slow
def test_experts_of_several_ranks_are_refused() -> None:
    message = run_ranks(2, refused)
    assert message.startswith("ParallelConfig.edp_shard (2) must be 1 with Precision.frozen")


def test_rules_of_the_record() -> None:
    with pytest.raises(ValueError, match=r"Precision.frozen \('nf4'\) must be None with a recipe"):
        Precision(recipe=Recipe(), frozen="nf4")
    assert Precision(recipe=Recipe(), roles=("attention",), frozen="nf4").frozen == "nf4"
    assert Precision.of("mxfp4") == Precision(frozen="mxfp4")
    assert Precision.of("nvfp4") == Precision(recipe=Recipe(scaling="nvfp4"))
    with pytest.raises(ValueError, match=r"Precision.fp8_head \(True\) must be False with recipe"):
        Precision(frozen="nf4", fp8_head=True)
    with pytest.raises(ValueError, match="must have a role where no override has a recipe"):
        Precision()
