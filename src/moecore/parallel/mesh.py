"""`build_meshes`: creates a dense and an expert device mesh over the same ranks.

    axes of the dense mesh,  outermost first: pp, dp_replicate,  dp_shard,  cp, tp
    axes of the expert mesh, outermost first: pp, edp_replicate, edp_shard, ep, etp

Only pp must be equal in both meshes; the other degrees are independent. The innermost axes have
consecutive ranks, so tp, ep and etp groups are inside one host if their sizes allow it.

Example, 8 ranks, dp_shard=4 tp=2 and edp_shard=2 ep=4: ranks 0 and 1 are a tp group, ranks 0 to 3
are an ep group, and ranks 0 and 4 have shards of the same experts (edp_shard).

Source: arXiv:2504.14960 (separate meshes for attention and for MoE layers).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moecore.base.fabric import read_nvlink_domain_id
from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import CheckedRecord, Count, FieldErrors, OneOf, check_arguments, quote
from moecore.base.rank_checks import check_equal, gather_objects, list_field_entries
from moecore.base.torch_private import (
    choose_small_tensor_device_type,
    get_default_timeout,
    has_cpu_backend,
    is_inside_custom_ops,
    set_timeout_to_default,
)
from moecore.parallel.rendezvous import join_store

DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "edp_replicate", "edp_shard", "ep", "etp")

DeviceType = Annotated[str, OneOf(("cpu", "cuda"))]
# int >= 1; -1 = the number of ranks divided by the other degrees
Degree = Annotated[Count | Literal[-1], "use -1 once per view, for what is left"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(CheckedRecord):
    """Parallel degrees of the dense and of the expert mesh.

    World = pp * dp_replicate * dp_shard * cp * tp = pp * edp_replicate * edp_shard * ep * etp.
    -1 means the world size divided by the mesh's other degrees. Each mesh may have one -1.

    Attributes:
        pp: pipeline stages, equal in both meshes.
        dp_replicate: replicas of each dense shard (HSDP).
        dp_shard: data ranks over which dense parameters are sharded.
        cp: context parallel ranks; dense parameters are sharded over these ranks too.
        tp: tensor parallel ranks of attention and dense MLPs.
        edp_replicate: replicas of each expert shard.
        edp_shard: ranks over which one expert's parameters are sharded.
        ep: expert parallel ranks; each has num_experts / ep experts.
        etp: expert tensor parallel ranks; each has hidden_dim / etp of each expert.
    """

    pp: Annotated[Count, "both views share it, so use pp=1 for none"] = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = -1
    cp: Degree = 1
    tp: Degree = 1
    edp_replicate: Degree = 1
    edp_shard: Degree = -1
    ep: Degree = 1
    etp: Degree = 1

    def _find_field_errors(self) -> FieldErrors:
        for view, names in (("dense", DENSE_DIMS), ("expert", EXPERT_DIMS)):
            open_names = [name for name in names if getattr(self, name) == -1]
            if len(open_names) > 1:
                yield (
                    open_names[1],
                    f"be given, because {open_names[0]} (-1) already takes what is left of the "
                    f"{view} view: set one of them",
                )

    def resolve(self, world_size: Count) -> ParallelConfig:
        """Return a copy with every -1 replaced by the degree for `world_size` ranks.

        Raises a ValueError if the product of a mesh's degrees is not `world_size`.
        """
        check_arguments(ParallelConfig.resolve, locals())
        updates: dict[str, int] = {}
        for view, names in (("dense", DENSE_DIMS), ("expert", EXPERT_DIMS)):
            degrees = {name: getattr(self, name) for name in names}
            product = math.prod(value for value in degrees.values() if value != -1)
            factors = " * ".join(f"{n}={v}" for n, v in degrees.items() if v not in (1, -1)) or "1"
            if world_size % product:
                start = f"start ranks with torchrun --nproc-per-node {product}, or lower a degree"
                fix = "change one of the degrees or the number of ranks"
                raise ValueError(
                    f"ParallelConfig {view} view ({factors} = {product}) must divide the world "
                    f"size ({world_size}): {start if world_size == 1 else fix}"
                )
            open_names = [n for n, v in degrees.items() if v == -1]
            if open_names:
                updates[open_names[0]] = world_size // product
            elif product != world_size:
                raise ValueError(
                    f"ParallelConfig {view} view ({factors} = {product}) must equal the world size "
                    f"({world_size}): set one degree to -1 to take what is left"
                )
        return replace(self, **updates)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Meshes:
    """The dense and the expert mesh of all ranks, and the process groups made from them.

    Attributes:
        parallel: the resolved degrees (no -1).
        dense: mesh of attention, norms, embeddings, routers and shared experts.
        expert: mesh of the routed experts.
        dense_fsdp: axes (dp_replicate, dp_shard x cp) that replicate and shard dense parameters. A
            dp_replicate of 1 is omitted. With cp > 1 the sharding axis is named dp_shard_cp.
        expert_fsdp: axes (edp_replicate, edp_shard) for experts. An edp_replicate of 1 is omitted.
        dispatch_group: the ep x etp ranks that exchange tokens, etp innermost; None = one rank.
        micro_batch_group: the cp x tp ranks of one data rank's micro-batch; None = one rank.
        ranks_per_domain: number of consecutive ranks in an NVLink domain or on a host.
        stage_group: all ranks of this pipeline stage.
        pipeline_groups: two communicators of the ranks that differ only in pp, one for messages to
            higher ranks and one for messages to lower ranks, which overlap. None if pp is 1.
        reason: why `parallelize_moe` chose these degrees; None = the caller passed the meshes.
    """

    parallel: ParallelConfig
    dense: DeviceMesh
    expert: DeviceMesh
    dense_fsdp: DeviceMesh
    expert_fsdp: DeviceMesh
    dispatch_group: dist.ProcessGroup | None
    micro_batch_group: dist.ProcessGroup | None
    ranks_per_domain: int
    stage_group: dist.ProcessGroup
    pipeline_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    reason: str | None = None

    def __repr__(self) -> str:
        if not dist.is_initialized():
            return f"Meshes({self.parallel}, whose process group is destroyed)"
        ranks = f"Meshes({self.device_type}, rank {dist.get_rank()} of {dist.get_world_size()}"
        lines = [ranks]
        for view, mesh in (("dense ", self.dense), ("expert", self.expert)):
            axes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
            sizes = {name: size for name, size in axes if size > 1}
            text = " ".join(f"{name}={size}" for name, size in sizes.items())
            place = " ".join(f"{name}={mesh.get_local_rank(name)}" for name in sizes)
            lines.append(f"  {view} {text}, this rank {place}" if sizes else f"  {view} one rank")
        return "\n".join(lines) + ")"

    @property
    def data_ranks(self) -> int:
        """Number of data parallel ranks. The cp and tp ranks of a data rank share micro-batches."""
        return self.parallel.dp_replicate * self.parallel.dp_shard

    @property
    def data_rank(self) -> int:
        """This rank's index among the data parallel ranks, from 0 to `data_ranks` - 1."""
        shard = self.dense.get_local_rank("dp_shard")
        return self.dense.get_local_rank("dp_replicate") * self.parallel.dp_shard + shard

    @property
    def pp_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.dense.get_local_rank("pp")

    @property
    def device_type(self) -> str:
        """The device type of both meshes, "cpu" or "cuda"."""
        return self.dense.device_type

    @property
    def device(self) -> torch.device:
        """The device on which models compute: `device_type`, or meta in a dry run."""
        return torch.device("meta" if is_inside_custom_ops() else self.device_type)


@share_call_errors
def build_meshes(
    parallel: ParallelConfig,
    device_type: DeviceType | None = None,
    *,
    ranks_per_domain: Count | None = None,
) -> Meshes:
    """Build the dense and the expert mesh over all ranks of the default process group.

    If no process group exists, one is initialised from torchrun's environment, or with this process
    as the only rank. Collective: every rank must pass the same arguments.

    Args:
        parallel: the degrees; -1 = the world size divided by the mesh's other degrees.
        device_type: "cuda" or "cpu"; default: cuda if available.
        ranks_per_domain: number of consecutive ranks with access to each other's memory, for
            dispatcher "hierarchical". None = the ranks of an NVLink domain if every GPU is in a
            domain across hosts, otherwise torchrun's ranks per host. Pass it under other launchers.

    Raises:
        ValueError: if the product of the degrees is not the world size, if arguments differ between
            ranks, or if `ranks_per_domain` does not divide the world size.
    """
    arguments = locals()
    has_gpu = torch.cuda.is_available()
    if not dist.is_initialized() and "RANK" in os.environ:  # ranks share errors in this group
        start_process_group("cuda" if has_gpu and device_type != "cpu" else "cpu")
    with share_errors():
        check_arguments(build_meshes, arguments)
        device_type = device_type or ("cuda" if has_gpu else "cpu")
        if device_type == "cuda" and not has_gpu:
            raise ValueError("device_type ('cuda') must be 'cpu' on this host: torch sees no GPU")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        p = parallel.resolve(world_size)
        domain = _resolve_ranks_per_domain(ranks_per_domain, world_size)
    if not dist.is_initialized():
        start_process_group(device_type)

    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    set_timeout_to_default(world.get_group())
    facts = list_field_entries(p) | dict(ranks_per_domain=ranks_per_domain, device_type=device_type)
    # Ranks with different degrees would create different groups.
    check_equal(facts, choose_small_tensor_device_type(world.get_group()))
    if ranks_per_domain is None and device_type == "cuda" and "LOCAL_WORLD_SIZE" in os.environ:
        domain = count_ranks_per_fabric(read_nvlink_domain_id()) or domain
    dense = _make_mesh(device_type, tuple(getattr(p, d) for d in DENSE_DIMS), DENSE_DIMS)
    expert = _make_mesh(device_type, tuple(getattr(p, d) for d in EXPERT_DIMS), EXPERT_DIMS)
    stage_group, pipeline_groups = _make_stage_groups(world, dense, p)
    return Meshes(
        parallel=p,
        dense=dense,
        expert=expert,
        dense_fsdp=_make_dense_fsdp(dense, p),
        expert_fsdp=_select_fsdp_axes(expert),
        dispatch_group=_make_inner_axes_group(expert, ("ep", "etp")),
        micro_batch_group=_make_inner_axes_group(dense, ("cp", "tp")),
        ranks_per_domain=domain,
        stage_group=stage_group,
        pipeline_groups=pipeline_groups,
    )


def _resolve_ranks_per_domain(ranks_per_domain: int | None, world_size: int) -> int:
    """Return `ranks_per_domain`; if None, the ranks per host if they divide the world."""
    if ranks_per_domain is None:
        host_size = read_launcher_number("LOCAL_WORLD_SIZE", world_size)
        return host_size if world_size % host_size == 0 else world_size
    if world_size % ranks_per_domain:
        raise ValueError(
            f"ranks_per_domain ({ranks_per_domain}) must divide the world size ({world_size}): "
            "give the ranks of a host"
        )
    return ranks_per_domain


def count_ranks_per_fabric(local_fabric: str | None) -> int | None:
    """Return the largest n for which each group of n consecutive ranks is in one NVLink domain.

    `local_fabric` is the id of the multi-host NVLink domain of this rank's GPU. If any rank has no
    such domain (None), the result is None. Domains of 72 and 56 ranks give 8. Collective.
    """
    names = gather_objects(local_fabric)
    if None in names:
        return None
    return math.gcd(*(len(list(run)) for _, run in groupby(names)))


class DomainGroups(NamedTuple):
    """Two process groups that split `Meshes.dispatch_group`: inside and across NVLink domains."""

    inside: dist.ProcessGroup  # the ranks of this rank's domain
    across: dist.ProcessGroup  # the ranks with this rank's index in each domain


def make_domain_groups(meshes: Meshes) -> DomainGroups:
    """Create the groups inside and across domains for dispatcher "hierarchical". Collective."""
    num_ranks, domain_size = meshes.parallel.ep * meshes.parallel.etp, meshes.ranks_per_domain
    sizes = (dist.get_world_size() // num_ranks, num_ranks // domain_size, domain_size)
    view = _make_mesh(meshes.device_type, sizes, ("dispatch", "domain", "place"))
    return DomainGroups(inside=view.get_group("place"), across=view.get_group("domain"))


def check_dispatch_domains(meshes: Meshes) -> None:
    """Raise a ValueError unless dispatcher "hierarchical" can split ep * etp ranks into domains."""
    p, domain_size = meshes.parallel, meshes.ranks_per_domain
    relation = None
    if domain_size == 1 or p.ep * p.etp <= domain_size:
        relation = f"be between 2 and half of ep * etp ({p.ep * p.etp}): use 'auto', or tell it"
    elif (p.ep * p.etp) % domain_size:
        relation = f"divide ep * etp ({p.ep * p.etp}): choose another ep, or use 'alltoall'"
    elif domain_size % p.etp:
        relation = f"be a multiple of etp ({p.etp}), which stays inside: lower etp"
    if relation is not None:
        raise ValueError(
            f"ranks_per_domain ({domain_size}) of build_meshes must, with dispatcher "
            "('hierarchical'), " + relation
        )


def make_data_group(meshes: Meshes, num_ranks: int) -> dist.ProcessGroup:
    """Create the group of `num_ranks` consecutive data ranks with equal pp, cp and tp. Collective.

    `num_ranks` divides the number of data ranks.
    """
    inner = meshes.parallel.cp * meshes.parallel.tp
    sizes = (dist.get_world_size() // (num_ranks * inner), num_ranks, inner)
    return _make_mesh(meshes.device_type, sizes, ("outer", "data", "inner")).get_group("data")


def make_context_groups(meshes: Meshes, cp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the cp group and the cp x tp group of `cp` consecutive data ranks. Collective."""
    size, tp = dist.get_world_size(), meshes.parallel.tp
    view = _make_mesh(meshes.device_type, (size // (cp * tp), cp, tp), ("data", "cp", "tp"))
    group = _make_inner_axes_group(view, ("cp", "tp"))
    assert group is not None, "cp is at least 2"
    return view.get_group("cp"), group


def split_context_group(
    meshes: Meshes, cp: int, inner_size: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the inner cp group (`inner_size` consecutive ranks) and the outer. Collective."""
    tp, size = meshes.parallel.tp, dist.get_world_size()
    sizes = (size // (cp * tp), cp // inner_size, inner_size, tp)
    view = _make_mesh(meshes.device_type, sizes, ("data", "cp_outer", "cp_inner", "tp"))
    return view.get_group("cp_inner"), view.get_group("cp_outer")


def make_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return `group` if it has a CPU backend, otherwise a gloo group of its ranks. Collective."""
    if has_cpu_backend(group):
        return group
    result: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=get_default_timeout(),
        use_local_synchronization=True,
    )
    return result


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes and groups of `meshes`, in order. No communication."""
    ranks, local_rank = torch.zeros((), dtype=torch.int, device="cpu"), dist.get_rank()
    for mesh in meshes:  # along an axis of a mesh, ranks have equal distances at every coordinate
        ranks = ranks.reshape(*ranks.shape, *(1 for _ in mesh.shape)) + (mesh.mesh - local_rank)
    return DeviceMesh.from_group(
        [group for mesh in meshes for group in mesh.get_all_groups()],
        meshes[0].device_type,
        mesh=ranks + local_rank,
        mesh_dim_names=tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ()),
    )


def _make_mesh(device_type: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Create a mesh over all ranks, outermost axis first, with the default group's timeout."""
    view = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for name in names:
        set_timeout_to_default(view.get_group(name))
    return view


def start_process_group(device_type: str, timeout: timedelta | None = None) -> None:
    """Initialise the default process group, of one rank if torchrun's RANK is not set.

    With "cuda", GPU number LOCAL_RANK becomes the current device. `timeout` None = torch's default.
    Raises a ValueError if a launcher's variable is out of range, or WORLD_SIZE differs on ranks.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        max_gpu = torch.cuda.device_count() - 1
        torch.cuda.set_device(read_launcher_number("LOCAL_RANK", 0, min_value=0, max_value=max_gpu))
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    world_size = read_launcher_number("WORLD_SIZE", 1)
    read_launcher_number("RANK", 0, min_value=0, max_value=world_size - 1)
    read_launcher_number("MASTER_PORT", 29500, min_value=0, max_value=65535)
    store, rank, world_size = join_store(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def read_launcher_number(
    name: str, default: int, *, min_value: int = 1, max_value: int = 2**31 - 1
) -> int:
    """Return an environment variable as an int, or `default`; ValueError if out of range."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isdecimal() and len(text) <= 10 and min_value <= int(text) <= max_value):
        raise ValueError(
            f"{name} ({quote(text)}) must be a whole number from {min_value} to {max_value}: start "
            "ranks with torchrun, which sets this variable"
        )
    return int(text)


def _select_fsdp_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return axes 1 and 2 (replicate, shard) of a mesh, without a replicate axis of size 1."""
    names = mesh.mesh_dim_names or ()
    return mesh[names[1 if mesh.shape[1] > 1 else 2 : 3]]


def _make_dense_fsdp(dense_mesh: DeviceMesh, parallel: ParallelConfig) -> DeviceMesh:
    """Return the mesh (dp_replicate, dp_shard x cp) for dense parameters. Collective if cp > 1."""
    if parallel.cp == 1:
        return _select_fsdp_axes(dense_mesh)
    names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
    sizes = (parallel.pp, parallel.dp_replicate, parallel.dp_shard * parallel.cp, parallel.tp)
    return _select_fsdp_axes(_make_mesh(dense_mesh.device_type, sizes, names))


def _make_inner_axes_group(mesh: DeviceMesh, names: tuple[str, str]) -> dist.ProcessGroup | None:
    """Return one group over the two innermost axes `names` of `mesh`; None if it has one rank."""
    sizes = mesh.shape[-2:]
    if sizes == (1, 1):
        return None
    if 1 in sizes:  # the other axis has this group already
        return mesh.get_group(names[1 - sizes.index(1)])
    inner, flat_name = math.prod(sizes), "_".join(names)
    flat = _make_mesh(mesh.device_type, (mesh.size() // inner, inner), ("outer", flat_name))
    return flat.get_group(flat_name)


def _make_stage_groups(
    world_mesh: DeviceMesh, dense_mesh: DeviceMesh, parallel: ParallelConfig
) -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup] | None]:
    """Return this stage's group, and two groups of the pp ranks (None if pp is 1). Collective."""
    if parallel.pp == 1:
        return world_mesh.get_group(), None
    sizes = (parallel.pp, world_mesh.size() // parallel.pp)
    view = _make_mesh(world_mesh.device_type, sizes, ("pp", "stage"))
    up, down = dense_mesh.get_group("pp"), view.get_group("pp")
    if up is down:  # both are the default group, where each stage is one rank
        down = dist.new_group(timeout=get_default_timeout())
    return view.get_group("stage"), (up, down)
