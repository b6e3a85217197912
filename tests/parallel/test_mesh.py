"""Both views of worlds up to 2048 ranks, on a fake process group, against a brute-force table.

The table is made by nested loops that count ranks, never by reshaping a range of ranks.
"""

import random

import pytest
import torch.distributed as dist

from moecore import Meshes, ParallelConfig, build_meshes
from moecore.planning import fake_world
from tests.helpers.grids import beside

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
NUM_FOLDINGS, MAX_WORLD = 300, 2048

pytestmark = pytest.mark.usefixtures("no_group_left")
Table = list[dict[str, int]]  # rank -> coordinate by dim name


def table_of(p: ParallelConfig, names: tuple[str, ...]) -> Table:
    """Count ranks in nested loops, the last dim fastest."""
    a, b, c, d, e = names
    table: Table = []
    for i in range(getattr(p, a)):
        for j in range(getattr(p, b)):
            for k in range(getattr(p, c)):
                for m in range(getattr(p, d)):
                    for n in range(getattr(p, e)):
                        table.append({a: i, b: j, c: k, d: m, e: n})
    return table


def members(table: Table, rank: int, moving: tuple[str, ...]) -> list[int]:
    """Ranks that share every coordinate with `rank` but those in `moving`, first-major."""
    mine = table[rank]
    fixed = [name for name in mine if name not in moving]
    group = [
        other
        for other, coordinate in enumerate(table)
        if all(coordinate[name] == mine[name] for name in fixed)
    ]
    return sorted(group, key=lambda r: tuple(table[r][name] for name in moving))


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def check(p: ParallelConfig, rank: int, world_size: int) -> Meshes:
    """Every group and number that a `Meshes` gives, for one rank."""
    with fake_world(world_size, rank):
        meshes = build_meshes(p, "cpu")
        full = meshes.parallel
        dense, expert = table_of(full, DENSE), table_of(full, EXPERT)
        assert len(dense) == len(expert) == world_size
        for mesh, names, table in ((meshes.dense, DENSE, dense), (meshes.expert, EXPERT, expert)):
            assert mesh.mesh_dim_names == names
            assert tuple(mesh.shape) == tuple(getattr(full, name) for name in names)
            for name in names:
                assert ranks_of(mesh.get_group(name)) == members(table, rank, (name,)), name
                assert mesh.get_local_rank(name) == table[rank][name]
        check_joined(meshes, dense, expert, rank)
        assert meshes.data_ranks == full.dp_replicate * full.dp_shard
        data = [(c["dp_replicate"], c["dp_shard"]) for c in dense]
        assert meshes.data_rank == sorted(set(data)).index(data[rank])
        assert meshes.device_type == "cpu"
        return meshes


def check_joined(meshes: Meshes, dense: Table, expert: Table, rank: int) -> None:
    dispatch = members(expert, rank, ("ep", "etp"))
    assert ranks_of(meshes.dispatch_group) == (dispatch if len(dispatch) > 1 else None)
    micro_batch = members(dense, rank, ("cp", "tp"))
    assert ranks_of(meshes.micro_batch_group) == (micro_batch if len(micro_batch) > 1 else None)
    stage = members(dense, rank, ("dp_replicate", "dp_shard", "cp", "tp"))
    assert ranks_of(meshes.stage_group) == stage
    assert stage == members(expert, rank, ("edp_replicate", "edp_shard", "ep", "etp"))
    assert meshes.pp_rank == dense[rank]["pp"]
    if meshes.parallel.pp == 1:
        assert meshes.pipeline_groups is None
    else:
        up, down = meshes.pipeline_groups
        assert ranks_of(up) == ranks_of(down) == members(dense, rank, ("pp",)) and up is not down
    for mesh, table, replicate, shard in (
        (meshes.dense_fsdp, dense, "dp_replicate", ("dp_shard", "cp")),
        (meshes.expert_fsdp, expert, "edp_replicate", ("edp_shard",)),
    ):
        replicas = members(table, rank, (replicate,))
        assert mesh.ndim == (2 if len(replicas) > 1 else 1)
        assert ranks_of(mesh.get_group(mesh.ndim - 1)) == members(table, rank, shard)
        if mesh.ndim == 2:
            assert ranks_of(mesh.get_group(0)) == replicas


def test_worked_example_of_the_module() -> None:
    p = ParallelConfig(dp_shard=4, tp=2, edp_shard=2, ep=4)
    with fake_world(8, 0):
        meshes = build_meshes(p, "cpu")
        assert ranks_of(meshes.dense.get_group("tp")) == [0, 1]
        assert ranks_of(meshes.dispatch_group) == [0, 1, 2, 3]
        assert ranks_of(meshes.expert.get_group("edp_shard")) == [0, 4]
    with fake_world(8, 5):
        meshes = build_meshes(p, "cpu")
        assert ranks_of(meshes.dense.get_group("tp")) == [4, 5]
        assert ranks_of(meshes.dispatch_group) == [4, 5, 6, 7]
        assert ranks_of(meshes.expert.get_group("edp_shard")) == [1, 5]
        assert ranks_of(meshes.dense_fsdp.get_group()) == [1, 3, 5, 7]
        assert (meshes.data_rank, meshes.data_ranks) == (2, 4)


def random_split(rng: random.Random, number: int, parts: int) -> list[int]:
    """`parts` factors of `number`: each prime goes to a random one."""
    factors, prime = [1] * parts, 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            factors[rng.randrange(parts)] *= prime
            number //= prime
    return factors


def random_folding(rng: random.Random) -> tuple[ParallelConfig, int]:
    world = rng.choice([2, 6, 8, 12, 16, 24, 30, 48, 60, 64, 72, 96, 120, 128, 210, 256, 360])
    if rng.random() < 0.05:
        world = rng.choice([512, 720, 1024, 1260, 1536, MAX_WORLD])
    pp, rest = random_split(rng, world, 2)
    if rng.random() < 0.5:
        pp, rest = 1, world
    dense = dict(zip(DENSE[1:], random_split(rng, rest, 4), strict=True))
    expert = dict(zip(EXPERT[1:], random_split(rng, rest, 4), strict=True))
    for view in (dense, expert):
        if rng.random() < 0.5:
            view[rng.choice(list(view))] = -1
    return ParallelConfig(pp=pp, **dense, **expert), world


CHUNKS = 6


@pytest.mark.parametrize("chunk", beside(range(CHUNKS), range(2, CHUNKS)))
def test_random_foldings_match_the_brute_force_table(chunk: int) -> None:
    rng = random.Random(1000 + chunk)
    for _ in range(NUM_FOLDINGS // CHUNKS):
        p, world = random_folding(rng)
        for rank in {rng.randrange(world), rng.choice([0, world - 1])}:
            check(p, rank, world)


def test_invalid_foldings_raise_before_any_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a group was made")

    rng = random.Random(7)
    with fake_world(64, 0):
        monkeypatch.setattr(dist, "new_group", forbidden)
        monkeypatch.setattr("moecore.parallel.mesh.init_device_mesh", forbidden)
        wrong = [ParallelConfig(tp=3), ParallelConfig(ep=128), ParallelConfig(pp=5)]
        while len(wrong) < 60:
            p, world = random_folding(rng)
            if world != 64:
                try:
                    p.resolve(64)
                except ValueError:
                    wrong.append(p)
        for p in wrong:
            with pytest.raises(ValueError, match=r"ParallelConfig .* world size"):
                build_meshes(p, "cpu")


def test_invalid_folding_starts_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"world size \(1\)"):
        build_meshes(ParallelConfig(ep=2), "cpu")
    with pytest.raises(ValueError, match="device_type"):
        build_meshes(ParallelConfig(), "tpu")
    assert not dist.is_initialized()
