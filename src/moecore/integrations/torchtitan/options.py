"""What a torchtitan job can choose about its moecore layers: section `moecore` of the job config.

    [job]
    custom_config_module = "moecore.integrations.torchtitan.options"

    [moecore]
    dispatcher = "nvlink"
    row_factor = 1.5

Without the first two lines there is no such section, and every default holds. torchtitan builds its
parser from the types of these fields, so this module has no postponed annotations.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from moecore.base.options.dispatch import DispatcherName, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions


@dataclass
class MoECore:
    """Choices of `parallelize_moe`, under its names; torchtitan's help shows these texts.

    Attributes:
        dispatcher: how tokens travel, see docs/dispatchers.md.
        row_factor: `NVLinkOptions.row_factor`; "auto" takes nvlink only with
            one, because no step can run again.
        expert_backend: how the experts' matrices are multiplied.
        recompute: parts of `MemoryOptions.recompute`, or "gemm_last" alone.
        prefetch_blocks: how many blocks ahead parameters are gathered.
        blocks_per_unit: how many blocks are gathered together.
        hf_weights: Hugging Face directory that fills the model before the first step; None = from
            the seed. Of Hugging Face models and moecore's decoder.
    """

    dispatcher: DispatcherName = "auto"
    row_factor: float | None = None
    expert_backend: Literal["auto", "triton", "torch", "te", "sequential"] = "auto"
    recompute: list[str] = field(default_factory=list)
    prefetch_blocks: int = FSDPOptions().prefetch_blocks
    blocks_per_unit: int = FSDPOptions().blocks_per_unit
    hf_weights: str | None = None


@dataclass
class JobConfig:
    """What torchtitan adds to its own JobConfig."""

    moecore: MoECore = field(default_factory=MoECore)


def memory_options(options: MoECore) -> MemoryOptions:
    """Return the job's memory options; raise a ValueError for unknown parts."""
    parts: Any = tuple(options.recompute)
    return MemoryOptions(recompute="gemm_last" if parts == ("gemm_last",) else parts)


def moecore_options(job_config: Any) -> MoECore:
    """Return the job's choices; the defaults for a job without the section."""
    options = getattr(job_config, "moecore", None)
    return MoECore() if options is None else options


def nvlink_options(options: MoECore) -> NVLinkOptions | None:
    """Return the nvlink dispatcher's options, None where it was not chosen."""
    factor = options.row_factor
    if factor is None:
        return NVLinkOptions(row_factor=None) if options.dispatcher == "nvlink" else None
    if options.dispatcher not in ("auto", "nvlink"):
        raise ValueError(
            f"moecore.row_factor ({factor}) must go with moecore.dispatcher "
            f"({options.dispatcher!r}) = 'nvlink' or 'auto': drop it"
        )
    return NVLinkOptions(row_factor=factor)


NEEDS = {
    "v02.specs": "torchtitan 0.2 (pip install 'torchtitan<0.3'): with torchtitan 0.3 use --module "
    "moecore.integrations.torchtitan.v03.jobs",
    "v03.jobs": "torchtitan 0.3 (pip install 'torchtitan>=0.3', torch >= 2.14): with torchtitan "
    "0.2 use moecore.integrations.torchtitan.v02.specs",
}


def import_error(error: ModuleNotFoundError, module: str) -> ImportError:
    """Return the error to raise in a module for that of an import from torchtitan."""
    if (error.name or "").partition(".")[0] == "triton":
        return ImportError(
            "triton (None) must be installed for torchtitan, which imports it; CPU builds of torch "
            "lack it: pip install 'triton>=3.6'"
        )
    return ImportError(f"moecore.integrations.torchtitan.{module} needs {NEEDS[module]}")


def dispatcher_of(options: MoECore) -> DispatcherName:
    """Return the dispatcher: "auto" is all-to-all without a row factor, which fits any routing."""
    if options.dispatcher == "auto" and options.row_factor is None:
        return "alltoall"
    return options.dispatcher
