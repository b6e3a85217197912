"""Every private name of FSDP2 that moecore uses is there, in the torch that is installed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.testing._internal.distributed.fake_pg import FakeStore

import moecore
from moecore import ParallelConfig, build_meshes
from moecore.fsdp import internals
from moecore.fsdp.internals import groups_of

# What an object has that its class has not needs a forward, or fully_shard.
NAMES: dict[str, tuple[str, ...]] = {
    "module": ("_get_fsdp_state", "reshard"),
    "state": (
        "_modules",
        "_is_root",
        "_training_state",
        "_modules_to_run_forward",
        "_pre_backward",
        "_state_ctx",
        "_comm_ctx",
    ),
    "state context": ("iter_forward_root", "post_backward_final_callback_queued"),
    "communication": (
        "post_forward_order",
        "all_gather_state",
        "all_gather_copy_in_stream",
        "all_gather_stream",
    ),
    "group": (
        "fsdp_params",
        "is_unsharded",
        "unshard",
        "wait_for_unshard",
        "_training_state",
        "_post_forward_indices",
        "_all_gather_result",
        "_module_to_pre_save_state_dict_hook_handle",
    ),
    "parameter": (
        "sharded_param",
        "_unsharded_param",
        "unsharded_accumulated_grad",
        "_setattr_on_modules",
    ),
    "all-gather": ("all_gather_event", "all_gather_work"),
}
EITHER = ("_fsdp_param_groups", "_fsdp_param_group")  # of the state


@pytest.fixture
def owners(no_group_left: None) -> Iterator[dict[str, Any]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=build_meshes(ParallelConfig(), "cpu").dense_fsdp)
    model(torch.ones(2, 2))
    assert isinstance(model, FSDPModule)
    state: Any = model._get_fsdp_state()
    (group,) = groups_of(state)
    yield {
        "module": model,
        "state": state,
        "state context": state._state_ctx,
        "communication": state._comm_ctx,
        "group": group,
        "parameter": group.fsdp_params[0],
        "all-gather": SimpleNamespace(**dict.fromkeys(AllGatherResult._fields)),
    }


def test_every_name_is_there(owners: dict[str, Any]) -> None:
    missing = [f"{o}.{n}" for o, names in NAMES.items() for n in names if not hasattr(owners[o], n)]
    assert missing == [], "torch has renamed them: see moecore/fsdp/internals.py"
    assert any(hasattr(owners["state"], name) for name in EITHER)
    assert owners["group"]._module_to_pre_save_state_dict_hook_handle, "state_dict() frees"
    assert {"FORWARD", "POST_BACKWARD", "IDLE"} <= set(internals.TrainingState.__members__)


def test_no_other_file_uses_them() -> None:
    """What is listed is what is used, and only there."""
    private = {n for names in (*NAMES.values(), EITHER) for n in names if n.startswith("_")}
    private -= {"_modules", "_unsharded_param"}  # of nn.Module too; read by getattr
    used = private_names(inspect.getsource(internals))
    own = {"_state", "_groups"}
    assert used - own - {"_modules", "_unsharded_param"} == private - {EITHER[0]}
    for path in Path(moecore.__file__).parent.rglob("*.py"):
        if path.name != "internals.py":
            assert not private_names(path.read_text()) & private, path


def private_names(source: str) -> set[str]:
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute))
    return {n.attr for n in nodes if n.attr.startswith("_") and not n.attr.startswith("__")}


def test_groups_of_a_unit_in_either_spelling() -> None:
    one, two = object(), object()
    for state, groups in (
        (SimpleNamespace(_fsdp_param_group=None), []),
        (SimpleNamespace(_fsdp_param_group=one), [one]),
        (SimpleNamespace(_fsdp_param_groups=[]), []),
        (SimpleNamespace(_fsdp_param_groups=[one, two]), [one, two]),
    ):
        assert groups_of(state) == groups
