"""Section `moecore` of a torchtitan job config: options of moecore's layers and optimizers.

    [job]
    custom_config_module = "moecore.integrations.torchtitan.options"

    [moecore.dispatch]
    name = "nvlink"

    [moecore.dispatch.nvlink]
    row_factor = 1.5

Without `custom_config_module`, all options have their defaults. The fields are the arguments of
`parallelize_moe` for which torchtitan has no option, and options of optimizers. torchtitan builds
its parser from the types of the fields, so this module does not postpone annotations.
"""

from dataclasses import dataclass, field
from typing import Any, get_args

from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import CloneOptions, DispatchOptions, NVLinkOptions, RowFactor
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import BalanceConfig, CapacityConfig, MoEConfig, MoEOverrides
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.names import Strategy
from moecore.base.options.precision import Precision, Recipe
from moecore.integrations.torchtitan.sections import (
    list_changed_fields,
    make_section,
    read_arguments,
    read_changed_arguments,
    replace_name_in_errors,
)
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.train import AdamW, Muon

# Arguments that the section does not have -> the option to set instead.
ELSEWHERE = {
    "adapters": "`accelerated(spec)`, for models that moecore knows",
    "dense.compile": "`compile.enable` with component `model`",
    "indexer": "no: indexers of sparse attention do not learn in its jobs",
    "loss": "torchtitan's: a sum over the global number of tokens",
    "fsdp.param_dtype": "`training.mixed_precision_param`",
    "fsdp.reduce_dtype": "`training.mixed_precision_reduce`",
    "memory.fused_loss": "always on: the models' losses are made in chunks",
    "context.dynamic": "no: its batches are those of `moecore.packing.schedule_documents`",
    "muon.lr": "`optimizer.lr`, and its schedule",
    "muon.weight_decay": "`optimizer.weight_decay`",
}


def _list_arguments_outside_section(prefix: str) -> tuple[str, ...]:
    """Return the arguments that the section `prefix` ("" = top level) does not have as fields."""
    split = (name.rpartition(".") for name in ELSEWHERE)
    return tuple(name for head, _, name in split if head == prefix)


def _make_switchable_section(source: Any, **replacements: Any) -> Any:
    """Return a section with the arguments of `source` and a field `enable` (default False)."""
    return make_section(source, enable=(bool, False), **replacements)


_MODEL_FIELDS = tuple(
    name for name in MoEConfig.__dataclass_fields__ if name not in MoEOverrides.__annotations__
)
# None = torchtitan's option decides.
_STRATEGY = (Strategy | None, None)
_CAPACITY = _make_switchable_section(CapacityConfig, factor=(float | None, None))

MoECore: Any = make_section(
    parallelize_moe,
    without=_list_arguments_outside_section(""),
    hf_weights=(str | None, None),
    documents=(bool, False),
    dispatch=(
        make_section(
            DispatchOptions,
            nvlink=(
                make_section(NVLinkOptions, row_factor=(get_args(RowFactor)[0] | None, None)),
                None,
            ),
            clones=(_make_switchable_section(CloneOptions), None),
        ),
        None,
    ),
    dense=(make_section(DenseOptions, without=_list_arguments_outside_section("dense")), None),
    memory=(
        make_section(
            MemoryOptions,
            without=_list_arguments_outside_section("memory"),
            stash=(_make_switchable_section(StashOptions), None),
        ),
        None,
    ),
    moe=(
        make_section(
            MoEConfig,
            without=_MODEL_FIELDS,
            balance=(make_section(BalanceConfig), None),
            capacity=(_CAPACITY, None),
        ),
        None,
    ),
    context=(
        make_section(ContextOptions, without=_list_arguments_outside_section("context")),
        None,
    ),
    precision=(_make_switchable_section(Precision, recipe=(make_section(Recipe), None)), None),
    fsdp=(
        make_section(
            FSDPOptions,
            without=_list_arguments_outside_section("fsdp"),
            dense_strategy=_STRATEGY,
            experts_strategy=_STRATEGY,
        ),
        None,
    ),
    pipeline=(make_section(PipelineConfig), None),
    adamw=(make_section(AdamW), None),
    muon=(
        make_section(Muon, without=_list_arguments_outside_section("muon"), enable=(bool, False)),
        None,
    ),
)


@dataclass
class JobConfig:
    """The fields that torchtitan merges into its JobConfig."""

    moecore: MoECore = field(default_factory=MoECore)


def get_moecore_options(job_config: Any) -> Any:
    """Return the section `moecore` of a torchtitan job, or the default section."""
    options = getattr(job_config, "moecore", None)
    return MoECore() if options is None else options


def make_parallelize_arguments(
    moecore_section: Any, parallel: ParallelConfig, **fsdp_fields: Any
) -> dict[str, Any]:
    """Convert a job's section `moecore` to arguments of `parallelize_moe`, except balance."""
    keywords = read_arguments(moecore_section, "moecore", without=("dispatch", "moe", "fsdp"))
    section = moecore_section.dispatch
    dispatch = read_arguments(section, "moecore.dispatch")
    if dispatch["name"] != "nvlink" and not list_changed_fields(section.nvlink):
        dispatch["nvlink"] = None
    is_parallel = parallel.ep * parallel.etp > 1
    if dispatch["name"] == "auto" and section.nvlink.row_factor is None and is_parallel:
        dispatch["name"] = "alltoall"  # whose capacity has no limit
    keywords["dispatch"] = replace_name_in_errors(
        lambda: DispatchOptions(**dispatch), DispatchOptions, "moecore.dispatch"
    )
    if not list_changed_fields(moecore_section.context):
        keywords["context"] = None
    keywords["pipeline"] = keywords["pipeline"] if parallel.pp > 1 else None
    fsdp_options = {
        name: value for name, value in vars(moecore_section.fsdp).items() if value is not None
    }
    keywords["fsdp"] = replace_name_in_errors(
        lambda: FSDPOptions(**(fsdp_fields | fsdp_options)), FSDPOptions, "moecore.fsdp"
    )
    moe = read_changed_arguments(moecore_section.moe, "moecore.moe")
    return keywords | {"moe": {name: value for name, value in moe.items() if name != "balance"}}


NEEDS = {
    "v02.specs": "torchtitan 0.2 (pip install 'torchtitan<0.3'): with torchtitan 0.3 use --module "
    "moecore.integrations.torchtitan.v03.jobs",
    "v03.jobs": "torchtitan 0.3 (pip install 'torchtitan>=0.3', torch >= 2.14): with torchtitan "
    "0.2 use moecore.integrations.torchtitan.v02.specs",
}


def make_import_error(error: ModuleNotFoundError, module: str) -> ImportError:
    """Return the ImportError for a module ("v02.specs") that needs another torchtitan version."""
    if (error.name or "").partition(".")[0] == "triton":
        return ImportError(
            "triton (None) must be installed for torchtitan, which imports it; CPU builds of torch "
            "lack it: pip install 'triton>=3.6'"
        )
    return ImportError(f"moecore.integrations.torchtitan.{module} needs {NEEDS[module]}")
