import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import (
    CapacityConfig,
    CloneOptions,
    DispatchOptions,
    MemoryOptions,
    NVLinkOptions,
    ParallelConfig,
    StashOptions,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.integrations.torchtitan.options import ELSEWHERE, MoECore, make_parallelize_arguments
from moecore.integrations.torchtitan.sections import (
    SOURCE,
    call_section,
    list_changed_fields,
    read_arguments,
)

PAGE = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text()
EP2 = ParallelConfig(dp_shard=2, edp_shard=1, ep=2)


def sections(section: Any = MoECore, path: str = "moecore") -> Iterator[tuple[str, Any]]:
    yield path, section
    for f in fields(section):
        if is_dataclass(f.type):
            yield from sections(f.type, f"{path}.{f.name}")


def plain(section: Any) -> set[str]:
    return {f.name for f in fields(section) if not is_dataclass(f.type)}


def rows(header: str) -> dict[str, str]:
    """First cell -> second of the page's table with this header."""
    found, names = PAGE[PAGE.index(header) :].split("\n\n")[0], {}
    for line in found.splitlines()[2:]:
        name, value, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        names[name.strip("`")] = value
    return names


def test_the_page_has_a_row_per_section_with_every_field() -> None:
    found = {name: set(re.findall(r"`(\w+)`", v)) for name, v in rows("| section |").items()}
    assert found == {path: plain(section) for path, section in sections()}


def test_the_page_names_every_argument_that_is_set_elsewhere() -> None:
    assert rows("| argument |") == ELSEWHERE


@pytest.mark.parametrize("path", [path for path, _ in sections() if path != "moecore.moe"])
def test_a_section_has_every_option_of_its_call(path: str) -> None:
    section = dict(sections())[path]
    source, _ = getattr(section, SOURCE)
    inner = path.removeprefix("moecore").strip(".")
    away = {n.rpartition(".")[2] for n in ELSEWHERE if n.rpartition(".")[0] == inner}
    options = {n for n, p in signature(source).parameters.items() if p.kind is p.KEYWORD_ONLY}
    more = {"enable", "documents", "hf_weights", "adamw", "muon"}
    assert {f.name for f in fields(section)} - more == options - away


def test_defaults_ask_for_nothing() -> None:
    job = MoECore()
    assert not list_changed_fields(job)
    found = make_parallelize_arguments(job, EP2)
    assert found.pop("memory") == MemoryOptions()
    assert {n for n, v in found.items() if v} == {"dispatch", "dense", "expert_backend", "fsdp"}


def test_values_of_a_job_become_those_of_the_call() -> None:
    job = MoECore()
    job.memory.recompute, job.memory.offload = ["gemm_last"], ["norm", "experts"]
    job.memory.offload_fraction = [0.5]
    job.memory.stash.enable, job.memory.stash.page_rows = True, 8
    stash = StashOptions(page_rows=8)
    job.dispatch.name, job.dispatch.nvlink.timeout_s = "nvlink", 5.0
    job.moe.capacity.enable, job.moe.capacity.factor = True, 1.5
    job.precision.enable, job.precision.roles = True, ["experts"]
    job.precision.overrides = ["*.0.*=none", "*.1.*=rowwise"]
    job.precision.recipe.scaling = "tensorwise"
    job.muon.enable, job.muon.ns_dtype = True, "float32"
    with pytest.raises(ValueError, match=r"'experts' beside stash, which keeps their rows: drop"):
        make_parallelize_arguments(job, EP2)
    job.memory.offload = ["norm"]
    found = make_parallelize_arguments(job, EP2)
    assert found["memory"] == MemoryOptions(
        recompute="gemm_last", offload=("norm",), offload_fraction=0.5, stash=stash
    )
    nvlink = NVLinkOptions(row_factor=None, timeout_s=5.0)
    assert found["dispatch"] == DispatchOptions(name="nvlink", nvlink=nvlink)
    assert found["moe"] == {"capacity": CapacityConfig(factor=1.5)}
    assert found["precision"] == Precision(
        recipe=Recipe(scaling="tensorwise"),
        roles=("experts",),
        overrides=(("*.0.*", None), ("*.1.*", Recipe(scaling="rowwise"))),
    )
    muon = read_arguments(job.muon, "moecore.muon")
    assert muon["ns_dtype"] is torch.float32 and muon["ns_coefficients"] == (3.4445, -4.775, 2.0315)
    assert (
        make_parallelize_arguments(job, ParallelConfig(pp=2, ep=1))["pipeline"].schedule == "1f1b"
    )


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        (
            "memory",
            "recompute",
            ["nor"],
            r"moecore.memory.recompute \(\('nor',\)\) must be a tuple",
        ),
        ("stash", "page_rows", 8, r"moecore.memory.stash.page_rows must go with .*stash.enable"),
        ("precision", "overrides", ["a=b"], r"moecore.precision.overrides \('a=b'\) must be PAT"),
        ("adamw", "moment_dtype", "half?", r"moecore.adamw.moment_dtype \('half\?'\) must be a d"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_jobs_name(section, field, value, message):
    job = MoECore()
    owner = job.memory.stash if section == "stash" else getattr(job, section)
    setattr(owner, field, value)
    if section == "precision":
        owner.enable = True
    with pytest.raises(ValueError, match=message) as error:
        make_parallelize_arguments(job, EP2)
        read_arguments(job.adamw, "moecore.adamw")
    assert "\n" not in str(error.value)


def test_help_has_the_texts_of_the_options() -> None:
    section = type(MoECore().dispatch.clones)
    assert section.__doc__ and section.__doc__ == CloneOptions.__doc__
    assert call_section(section(enable=True), "moecore.dispatch.clones").per_rank == 2
