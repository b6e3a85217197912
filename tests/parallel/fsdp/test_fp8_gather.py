from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moecore import (
    DenseOptions,
    FSDPOptions,
    MemoryOptions,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.base.params import compute_global_indices
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.rows.cast import quantise_matrix
from moecore.kernels.rows.quantised import quantise_weights
from moecore.kernels.rows.shard_blocks import make_dense_operand, view_as_matrices
from moecore.models import Decoder
from moecore.moe.param_reader import get_fp8_blocks
from moecore.parallel.fsdp.formats import BlockFormat
from moecore.parallel.fsdp.transport import PackedTransport
from moecore.parallel.fsdp.unit import Unit
from moecore.precision.linear import Fp8Products
from moecore.train import AdamW
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture, run_ranks
from tests.parallel.fsdp.units import units
from tests.parallel.model.test_plan import planned
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

WORLD, BOUND = 4, 3e-3
DEVICE_TYPE: list[Any] = ["cpu"]  # of this process
# Matrices of 384 rows or columns are cut into 96, within blocks; others are less than a block.
CONFIG = small_decoder(384, 128, vocab_size=60, head_dim=16, dense=96, experts=2, shared=48)
ROUNDED = Recipe(power_of_two=False)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
FP8 = replace(BF16, fp8_param_gather=True)
LAYOUTS = {
    "model dim": ParallelConfig(),
    "tp, ep": ParallelConfig(tp=2, ep=2),
    "hybrid": ParallelConfig(dp_replicate=2, edp_replicate=2),
}
# What must not change a bit of a training.
SAME: dict[str, dict[str, Any]] = {
    "kept": dict(dense_strategy="optim"),
    "far ahead": dict(prefetch_blocks=2),
    "together": dict(blocks_per_unit=2),
    "checkpoints": {},
    "regions": {},
}
# Scales that round with each way of cutting a matrix, powers of two with one.
RECIPES = {"model dim": (Recipe(), ROUNDED), "tp, ep": (ROUNDED,), "hybrid": (ROUNDED,)}
REGIONS = MemoryOptions(recompute=("norm", "activation", "qkv_proj", "mlp", "expert_fc1"))


def make(parallel, fsdp, precision="blockwise", memory=None) -> Decoder:
    model, meshes = Decoder(CONFIG, device="meta"), meshes_of(parallel)
    parallelize_moe(model, meshes, fsdp=fsdp, precision=precision, memory=memory)
    model.to_empty(device=meshes.device_type)
    model.init_weights(0)
    return model


@cache
def meshes_of(parallel: ParallelConfig) -> Meshes:
    return build_meshes(parallel, DEVICE_TYPE[0])


def fp8_units(model: Decoder) -> list[Unit]:
    return [unit for unit in units(model) if isinstance(unit._format, BlockFormat)]


@contextmanager
def poisoned() -> Iterator[None]:
    """What is freed is NaN in FP8."""
    free = Unit.reshard

    def free_and_poison(unit: Unit) -> None:
        free(unit)
        if isinstance(unit._format, BlockFormat) and unit.buffer.holder is None:  # type: ignore[union-attr]
            unit.buffer.get_flat(unit.device).fill_(0x7F)  # type: ignore[union-attr]
            unit.buffer.last_use.record()  # type: ignore[union-attr]

    with patch.object(Unit, "reshard", free_and_poison):
        yield


def whole_of(param: Any) -> Tensor:
    """What a rank computes with, in the dtype in which it is trained."""
    whole, used = param.sharded.detach().full_tensor(), param.unsharded
    if not isinstance(used, DTensor):
        return whole
    return distribute_tensor(whole, used.device_mesh, used.placements).to_local()


def differs(model: Decoder, power_of_two: bool) -> list[str]:
    """Names of weights whose bytes or scales are not those of one rank."""
    wrong = []
    for unit in fp8_units(model):
        unit.wait_for_unshard()
        for param in unit.params:
            weight, found = whole_of(param), get_fp8_blocks(param.unsharded)
            assert found is not None and weight.dtype == torch.float32
            assert get_local_tensor(param.unsharded).untyped_storage().nbytes() == 2
            rows, columns = weight.shape[:-1].numel(), weight.shape[-1]
            if weight.ndim > 2:
                matrices = weight.reshape(-1, weight.shape[1:-1].numel(), columns)
                blocks = quantise_weights(matrices, power_of_two=power_of_two)
                want, got = blocks.rows, view_as_matrices(found, blocks.rows.values.shape).rows
            else:
                want = quantise_matrix(
                    weight, "block", power_of_two=power_of_two, columnwise=False
                ).rows
                got = make_dense_operand(found)
            same = torch.equal(got.scales, want.scales)
            same &= torch.equal(*(side.values.view(torch.uint8) for side in (got, want)))
            if not same:
                wrong.append(f"{param.slot.param} [{rows}, {columns}]")
        unit.reshard()
    return wrong


def bits(parallel: ParallelConfig, recipe: Recipe) -> dict[str, Any]:
    model = make(parallel, FP8, recipe)
    with torch.no_grad():  # neighbours of one block are of many sizes
        for param in model.parameters():
            rows = compute_global_indices(param)[0].to(param.device)
            get_local_tensor(param).mul_(2.0 ** (rows % 7).view(-1, *[1] * (param.ndim - 1)))
    for unit in fp8_units(model):
        unit.refresh_sharded_params()
    wrong = differs(model, recipe.power_of_two)
    names = sorted(param.slot.param for unit in fp8_units(model) for param in unit.params)
    return {"wrong": wrong, "names": names}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 60, (1, 17), generator=generator)
    tokens = torch.where(torch.arange(17) % 2 == 0, tokens, tokens.roll(1))  # something to learn
    tokens = tokens.to(DEVICE_TYPE[0])
    return tokens[:, :-1], tokens[:, 1:]


def losses(rank, parallel, fsdp, steps, micro=1, memory=None) -> list[float]:
    """The mean of all ranks' losses in each step; four batches come again and again."""
    torch.manual_seed(0)
    model = make(parallel, fsdp, memory=memory)
    owner = TrainStep(model, AdamW(model.parameters(), lr=5e-5), max_norm=1.0)
    owner.num_micro_batches = micro
    found, data = [], rank // parallel.tp
    for step in range(steps):
        for i in range(micro):
            with owner.micro_batch():
                loss = model(*batch((step * micro + i) % 4, data))
                loss.backward()
        owner.finish()
        found.append(loss.detach())
    sums = torch.stack(found).double()
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


@contextmanager
def recomputing() -> Iterator[None]:
    """Blocks are recomputed by torch's checkpoints."""
    from moecore.models.block import Block

    call = Block.__call__
    with patch.object(
        Block,
        "__call__",
        lambda block, *args, **kwargs: checkpoint(
            partial(call, block), *args, use_reentrant=False, **kwargs
        ),
    ):
        yield


def representable(rank: int) -> dict[str, Any]:
    """Weights that are FP8 values: gathers in bf16 quantise them to the same products.

    Also what a forward and a backward send, in each of both.
    """
    found, sent = [], []
    for fsdp in (FP8, BF16):
        model = make(LAYOUTS["model dim"], fsdp)
        with torch.no_grad():
            for param in model.parameters():
                get_local_tensor(param).mul_(8).round_().div_(8)
        with counted(model) as num_bytes:
            model(*batch(0, rank)).backward()
        grads = {name: get_local_tensor(p.grad).clone() for name, p in model.named_parameters()}  # type: ignore[arg-type]
        found.append(grads)
        sent.append(num_bytes)
    ours, theirs = found
    same = {name: torch.equal(grad, theirs[name]) for name, grad in ours.items()}
    return {"representable": same, "sent": sent}


@contextmanager
def counted(model: Decoder) -> Iterator[dict[str, int]]:
    """Count the bytes that are sent: of experts in gathers, and in reductions."""
    experts = {u._transport for u in units(model) if u.options.name.endswith("experts")}
    sent = {"gathered": 0, "amax": 0}
    gather, reduce = PackedTransport.all_gather, dist.all_reduce

    def gathered(transport: PackedTransport, regions: list[Tensor], *args: Any) -> Any:
        if transport in experts:
            sent["gathered"] += sum(region.nbytes for region in regions)
        return gather(transport, regions, *args)

    def reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **how: Any) -> Any:
        sent["amax"] += tensor.nbytes if op == dist.ReduceOp.MAX else 0
        return reduce(tensor, op, group, **how)

    with (
        patch.object(PackedTransport, "all_gather", gathered),
        patch.object(dist, "all_reduce", reduced),
    ):
        yield sent


def refused_reads(rank: int) -> dict[str, str]:
    """What reads values that are not there."""
    errors = {}
    model = make(LAYOUTS["model dim"], FP8)
    block = model.model.layers[1]
    mixed = partial(create_selective_checkpoint_contexts, [])
    forward = block.mlp.forward

    def selective(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=mixed, **kwargs)

    def plain(self: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, read(self.weight))

    from moecore.base.params import get_local_param as read

    attention = block.self_attn.q_proj
    for name, target, forward_of in (
        ("selective", block.mlp, selective),
        ("plain", attention, partial(plain, attention)),
    ):
        with patch.object(target, "forward", forward_of):
            errors[name] = error_of(lambda: model(*batch(0, rank)))
    model(*batch(0, rank)).backward()
    return errors


def late_backwards(parallel: ParallelConfig) -> list[str]:
    """Errors of backwards whose weight is freed, and of those whose weight is gathered again."""
    model = make(parallel, FP8)
    errors: list[str] = []
    for unit in fp8_units(model):
        unit.refresh_sharded_params()
        (param, *_), x = unit.params, torch.randn(4, unit.params[0].shape[-1])
        for is_late in (True, False) if len(param.shape) == 2 else ():
            unit.wait_for_unshard()
            y = Fp8Products(Recipe())(x.bfloat16().requires_grad_(), param.unsharded)
            unit.reshard()
            if not is_late:
                unit.wait_for_unshard()
            errors.append(error_of(y.sum().backward))
            unit.reshard()
    return errors


def worker(rank: int, device: torch.device, same: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        results[f"bits {name}"] = [bits(parallel, recipe) for recipe in RECIPES[name]]
    with poisoned():
        short = partial(losses, rank, LAYOUTS["model dim"], steps=2, micro=2)
        results["base"] = short(fsdp=FP8)
        for name in same:
            with recomputing() if name == "checkpoints" else nullcontext():
                memory = REGIONS if name == "regions" else None
                results[name] = short(fsdp=replace(FP8, **SAME[name]), memory=memory)
        results |= representable(rank)
        results["refused"] = refused_reads(rank)
        for name in ("model dim", "tp, ep"):
            results[f"late {name}"] = late_backwards(LAYOUTS[name])
    bits_of_ranks = gather_objects({n: r for n, r in results.items() if n.startswith("bits")})
    return results | {"everyone": bits_of_ranks}


def gpu_worker(rank: int, device: torch.device) -> dict[str, Any]:
    DEVICE_TYPE[0] = "cuda"
    results: dict[str, Any] = {"wrong": bits(LAYOUTS["model dim"], Recipe())["wrong"]}
    options = {"fp8": FP8, "bf16": BF16, "kept": replace(FP8, dense_strategy="optim")}
    with poisoned():
        for name, fsdp in options.items():
            results[name] = losses(rank, LAYOUTS["model dim"], fsdp, 10)
    return results


@pytest.mark.gpu
def test_on_gpus() -> None:
    """Bytes are gathered beside compute. One step's loss is noisy: bf16's mean is compared."""
    results = run_ranks(2, gpu_worker, device_type="cuda")
    assert results["wrong"] == [] and results["kept"] == results["fp8"]
    assert abs(sum(results["fp8"]) / sum(results["bf16"]) - 1) < BOUND


results = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_one_rank(layout: str, results: dict[str, Any]) -> None:
    for rank in results["everyone"]:
        for found in rank[f"bits {layout}"]:
            assert found["wrong"] == []
            assert len(found["names"]) == 4 + 3 + 4 + 2 + 2, found["names"]


@pytest.mark.parametrize("name", SAME)
def test_when_units_are_gathered_changes_no_bit(name: str, results: dict[str, Any]) -> None:
    assert results[name] == results["base"]


def test_gradients_of_fp8_values_are_those_of_bf16_gathers(results: dict[str, Any]) -> None:
    same = results["representable"]
    assert [name for name, is_same in same.items() if not is_same] == []


def test_half_the_bytes_and_the_amax(results: dict[str, Any]) -> None:
    fp8, bf16 = results["sent"]
    assert bf16["amax"] == 0 and 2 * fp8["gathered"] == bf16["gathered"] > 0
    assert fp8["amax"] < fp8["gathered"] / 100


@pytest.mark.parametrize("layout", ["model dim", "tp, ep"])
def test_a_late_backward_raises(layout: str, results: dict[str, Any]) -> None:
    late, again = results[f"late {layout}"][::2], results[f"late {layout}"][1::2]
    assert len(late) == 2 and again == ["no error"] * 2
    assert all("modified" in error for error in late), late


def tied() -> Decoder:
    model = Decoder(CONFIG, device="meta")
    model.model.layers[0].self_attn.v_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    return model


def dora() -> Any:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    model: Any = Decoder(CONFIG, device="meta")
    return peft.get_peft_model(model, config)


MXFP8, NVFP4 = (
    Precision(recipe=Recipe(scaling=scaling), roles=("experts",)) for scaling in ("mxfp8", "nvfp4")
)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no FP8": (None, {"precision": None}, "there are none: set precision='blockwise'"),
    "by row": (None, {"precision": "rowwise"}, "there are none: set precision='blockwise'"),
    "mxfp8": (None, {"precision": MXFP8}, "quantise rows and columns apart"),
    "odd": (None, {"precision": NVFP4, "parallel": 1, "world": 128}, r"dim \(384\) / .* \(128\)"),
    "whole experts": (
        None,
        {"precision": Precision(recipe=Recipe(), roles=("experts",)), "parallel": 2},
        "weights that several ranks share",
    ),
    "compiled": (None, {"dense": DenseOptions(compile=True)}, r"Options.compile \(True\) = False"),
    "fp64": (torch.float64, {}, r"\(torch.float64\) must be kept in fp32 or bf16"),
    "tied": (tied, {}, "v_proj.weight must not be tied|k_proj.weight must not be tied"),
    "DoRA": (dora, {}, r"q_proj must have no DoRA, which reads its weight, with FSDPOptions\.fp8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, how, message = REFUSED[case]
    how = {"precision": "blockwise", "fsdp": FP8, **how}
    parallel, world = ParallelConfig(ep=how.pop("parallel", 1)), how.pop("world", 2)
    model = make() if callable(make) else Decoder(CONFIG, device="meta", dtype=make)
    with pytest.raises(ValueError, match=message):
        planned(world, parallel, model, **how)


def test_what_reads_values_is_refused(results: dict[str, Any]) -> None:
    assert set(results["refused"]) == {"selective", "plain"}
    for message in results["refused"].values():
        assert "was gathered or is stored in FP8" in message and "fp8_param_gather" in message
