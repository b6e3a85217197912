"""Weights gathered as "tensorwise" and "nvfp4" quantise them: no bit of a training changes.

Gathers in fp32 are the definition: products quantise the whole weight then, on every rank.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    CloneOptions,
    DispatchOptions,
    FSDPOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    explain,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder
from moecore.moe.amax_history import AmaxHistory
from moecore.moe.low_rank import LowRank
from moecore.parallel.fsdp.formats import MatrixFormat, QuantisedFormat
from moecore.parallel.fsdp.size import compute_rank_bytes
from moecore.parallel.fsdp.transport import PackedTransport
from moecore.parallel.fsdp.unit import Unit
from moecore.train import AdamW
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.units import units
from tests.parallel.model.test_plan import planned
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

# Of four ranks each has 24 of 96 rows or columns, which cuts squares of 16.
CONFIG = small_decoder(
    96, 32, vocab_size=60, num_heads=2, head_dim=16, dense=96, experts=2, shared=16
)
PRECISIONS: dict[str, Any] = {
    "tensorwise": Recipe(scaling="tensorwise", power_of_two=False),
    "delayed": Precision(
        recipe=Recipe(scaling="tensorwise", power_of_two=False, grad_format="e5m2", amax_history=2),
        roles=("attention", "mlp", "experts"),
    ),
    "nvfp4": Recipe(scaling="nvfp4"),
    "nvfp4, exact": Recipe(scaling="nvfp4", power_of_two=False),
}
LAYOUTS = {
    "model dim": ParallelConfig(),
    "tp, ep": ParallelConfig(tp=2, ep=2),
    "hybrid": ParallelConfig(dp_replicate=2, edp_replicate=2),
}
CLONES = dict(dispatch=DispatchOptions(clones=CloneOptions(per_rank=1, min_share=0.0)))
WIDE = FSDPOptions()
QUANTISED = replace(WIDE, fp8_param_gather=True)
# What is quantised, layout, changes of `FSDPOptions`, other arguments of the call.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "tensorwise": ("tensorwise", "model dim", {}, {}),
    "tensorwise, cut": ("tensorwise", "tp, ep", {}, CLONES),
    "tensorwise, whole": ("tensorwise", "hybrid", dict(dense_strategy="no_shard"), {}),
    "delayed": ("delayed", "model dim", {}, {}),
    "delayed, cut": ("delayed", "tp, ep", dict(dense_strategy="optim"), CLONES),
    "nvfp4": ("nvfp4", "model dim", {}, {}),
    "nvfp4, cut": ("nvfp4", "tp, ep", {}, CLONES),
    "nvfp4, adapted": ("nvfp4", "hybrid", {}, {}),
    "nvfp4, resident": ("nvfp4", "hybrid", dict(dense_strategy="optim"), {}),
    "exact": ("nvfp4, exact", "tp, ep", {}, {}),
}


def trained(rank: int, case: str, fsdp: FSDPOptions) -> tuple[dict[str, Tensor], int]:
    """Losses, gradients and parameters of two steps, of this rank's part; the experts' bytes."""
    name, layout, options, call = CASES[case]
    parallel = LAYOUTS[layout]
    model, meshes = Decoder(CONFIG, device="meta"), build_meshes(parallel, "cpu")
    if "adapted" in case:
        low = (nn.Parameter(torch.empty(2, *n, device="meta")) for n in ((4, 96), (64, 4)))
        model.model.layers[1].mlp.experts.add_low_rank_updates(
            "w1", LowRank({"one": tuple(low)}, {"one": 0.5})
        )
    fsdp = replace(fsdp, **options)
    parallelize_moe(model, meshes, fsdp=fsdp, precision=PRECISIONS[name], **call)
    model.to_empty(device="cpu")
    model.init_weights(0)
    with torch.no_grad():  # neighbours are of many sizes, an expert unlike the other
        for param in model.parameters():
            local = get_local_tensor(param)
            if param.shape[1:] in ((4, 96), (64, 4)):
                local.copy_(torch.cos(torch.arange(local.numel())).view_as(local) / 32)
            local.mul_(2.0 ** (torch.arange(local.numel()) % 7 - 2).view(local.shape))
    quantised = [unit for unit in units(model) if isinstance(unit._format, QuantisedFormat)]
    assert bool(quantised) == fsdp.fp8_param_gather
    experts = {unit._transport for unit in units(model) if unit.options.name.endswith("experts")}
    num_bytes, gather = 0, PackedTransport.all_gather

    def counted(transport: PackedTransport, regions: list[Tensor], *args: Any) -> Any:
        nonlocal num_bytes
        num_bytes += sum(region.nbytes for region in regions) * (transport in experts)
        return gather(transport, regions, *args)

    owner = TrainStep(model, AdamW(model.parameters(), lr=1e-2), max_norm=1.0)
    owner.num_micro_batches = micro_batches = 1 + ("resident" in case)
    found: dict[str, Tensor] = {}
    for step in range(2):
        for micro in range(micro_batches):
            seed = 100 * step + 10 * micro + rank // parallel.tp
            tokens = torch.randint(0, 60, (1, 17), generator=torch.Generator().manual_seed(seed))
            with owner.micro_batch(), patch.object(PackedTransport, "all_gather", counted):
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
            found[f"loss {step} {micro}"] = loss.detach()
        for key, param in model.named_parameters():
            assert param.grad is not None
            found[f"grad {step} {key}"] = get_local_tensor(param.grad).clone()
        owner.finish()
    found |= {key: get_local_tensor(p).detach().clone() for key, p in model.named_parameters()}
    return found, num_bytes


def free_and_poison(unit: Unit) -> None:
    """Free, and leave bytes that would show."""
    FREE(unit)
    buffer = unit.buffer if isinstance(unit._format, QuantisedFormat) else None
    if buffer is not None and buffer.holder is None:
        buffer.get_flat(unit.device).fill_(0x7F)
        buffer.last_use.record()


FREE = Unit.reshard


def worker(rank: int, device: torch.device, cases: list[str]) -> list[dict[str, Any]]:
    results: dict[str, Any] = {}
    for case in cases:
        wide, wide_bytes = trained(rank, case, WIDE)
        with patch.object(Unit, "reshard", free_and_poison):
            narrow, num_bytes = trained(rank, case, QUANTISED)
        assert wide.keys() == narrow.keys()
        assert all(tensor.isfinite().all() for tensor in wide.values())
        different = [name for name in wide if not torch.equal(wide[name], narrow[name])]
        results[case] = different, wide_bytes, num_bytes
    return gather_objects(results)


results = ranks_fixture(4, worker, "case")


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_wide_gathers(case: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        different, wide_bytes, num_bytes = rank[case]
        assert different == []
        if not any(word in case for word in ("whole", "adapted")):  # others are wide
            assert num_bytes * (8 if "nvfp4" in case or case == "exact" else 4) == wide_bytes > 0


@pytest.mark.parametrize(("name", "size"), [("tensorwise", 1.0), ("nvfp4", 0.5), ("blockwise", 1)])
def test_bytes(name: str, size: float) -> None:
    """What a plan counts of the experts, whose bf16 gathers have two bytes."""
    bf16 = replace(WIDE, param_dtype=torch.bfloat16)
    config = replace(CONFIG, dim=128, moe=replace(CONFIG.moe, dim=128, hidden_dim=128))
    found = []
    for fsdp in (bf16, replace(bf16, fp8_param_gather=True)):
        model = Decoder(config, device="meta")
        plan = planned(4, ParallelConfig(), model, fsdp=fsdp, precision=name)
        roles = compute_rank_bytes(plan).roles
        assert ("in NVFP4" in explain(plan)) == (fsdp.fp8_param_gather and name == "nvfp4")
        found.append(next(role.unsharded for role in roles if role.role == "experts"))
    assert found[1] / found[0] == size / 2


@pytest.mark.parametrize("past", [0.0, 8.0])
def test_a_linear_that_no_step_has_run_is_scaled_by_its_own_magnitudes(past: float) -> None:
    recipe = Recipe(scaling="tensorwise", power_of_two=False, amax_history=2)
    shard = torch.linspace(-3, 3, 6 * 16).view(6, 16)
    history = AmaxHistory(2)
    history.load_recorded_amax({"weight": torch.tensor([past, 0.0])}, torch.device("cpu"))
    history.allocate_recorded_amax(torch.device("cpu"))  # of a step that has run other linears
    amax, scales = torch.zeros(1), torch.zeros(1)
    part: Any = SimpleNamespace(first=0, of_matrices=amax, scales=scales, history=history)
    values = torch.empty(shard.numel(), dtype=torch.uint8)
    matrices = MatrixFormat(torch.float32, recipe, None)
    matrices._write_amax(shard, part)
    matrices._quantise_shard(shard, part, values)
    found = values.view(torch.float8_e4m3fn).float().view_as(shard) * scales
    # E4M3 has 3 bits behind the first one, and 448 as its largest value.
    torch.testing.assert_close(scales, torch.tensor([(past or 3.0) / 448]))
    torch.testing.assert_close(found, shard, rtol=2**-4, atol=1e-3)
