from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels import prepared
from moecore.kernels.common import launch, make_gluon_descriptor
from moecore.kernels.triton_api import gl, gluon, hopper, tl, triton

pytest.importorskip("triton")
if not prepared.IS_SUPPORTED:
    pytest.skip("launches are prepared for Triton 3.6, compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime import jit


@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    source, target, count, stride, scale, flag, BLOCK: tl.constexpr, SIGN: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at * stride, mask=at < count)
    if flag:
        x = (x * scale).to(x.dtype)
    if target is not None:
        tl.store(target + at, SIGN * x, mask=at < count)


@gluon.jit
def blocks_kernel(x_desc, y_desc, out, ROWS: gl.constexpr):
    x = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    hopper.tma.store_wait(0)
    hopper.tma.async_copy_shared_to_global(y_desc, [0, 0], x)
    gl.store(out, ROWS)


Launches = list[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """What the launcher in C is called with, on CPU tensors; maps are the arguments of the call."""
    found: Launches = []

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.launcher_cls = nvidia.CudaLauncher
            self.utils = SimpleNamespace(
                load_binary=lambda name, *_: (1, f"function {len(found)} {name}", 0, 0, 1024),
                get_device_properties=lambda _: {"max_shared_mem": 232448},
                fill_tma_descriptor=lambda *args: repr(args),
            )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 7

    module = SimpleNamespace(launch=lambda *args: found.append(args))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: module)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(prepared, "GPU_FLAG", "is_cpu")
    monkeypatch.setattr(prepared, "current_device", lambda: -1)
    for name in ("_SITES", "_KINDS", "_METAS", "_DESCRIPTORS"):
        monkeypatch.setattr(prepared, name, {})
    for kernel in (copy_kernel, blocks_kernel):
        kernel.device_caches.clear()
    yield found


def plainly(run: Any) -> None:
    """Run with Triton's own path for arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "IS_SUPPORTED", False)
        run()


def comparable(launch: tuple[Any, ...], signature: dict[str, str]) -> tuple[Any, ...]:
    """A launch with addresses for tensors, hooks without calls, and nothing for constants."""
    head, args = list(launch[:13]), list(launch[13:])
    head[10] = None  # what hooks are given
    head[11:] = [None if not getattr(hook, "calls", None) else hook for hook in head[11:]]
    args = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    if len(args) == len(signature):
        kinds = signature.values()
        args = [None if kind == "constexpr" else arg for arg, kind in zip(args, kinds, strict=True)]
    return (*head, *args)


def run_copy(x: Tensor, out: Tensor | None, count: int = 5, stride: int = 2, **how: Any) -> None:
    how = dict(scale=0.5, flag=True, BLOCK=32, SIGN=-1) | how
    scale, flag = how.pop("scale"), how.pop("flag")
    launch(copy_kernel, 3, x, out, count, stride, scale, flag, **how)


X, Y = torch.zeros(64), torch.zeros(64)
VARIANTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "as it is": ((X, Y), {}),
    "other addresses": ((Y, X), {}),
    "a pointer between lines of 16 bytes": ((X[1:], Y), {}),
    "another such pointer": ((X, Y[3:]), {}),
    "other dtype": ((X.bfloat16(), Y), {}),
    "a parameter": ((torch.nn.Parameter(X), Y), {}),
    "no pointer": ((X, None), {}),
    "another count": ((X, Y, 16), {}),
    "a count of one": ((X, Y, 1), {}),
    "a stride of one": ((X, Y, 5, 1), {}),
    "a stride of 16": ((X, Y, 5, 16), {}),
    "a stride beyond int32": ((X, Y, 5, 2**31), {}),
    "another scale": ((X, Y), {"scale": 2.0}),
    "a scale of integers": ((X, Y), {"scale": 2}),
    "flag off": ((X, Y), {"flag": False}),
    "no flag": ((X, Y), {"flag": None}),
    "another block": ((X, Y), {"BLOCK": 64}),
    "another sign": ((X, Y), {"SIGN": 1}),
    "more warps": ((X, Y), {"num_warps": 8}),
    "without fusion": ((X, Y), {"enable_fp_fusion": False}),
}


def test_launches_are_those_of_triton(launches: Launches) -> None:
    """Every variant, behind every other, once kept: the same function, grid and arguments."""
    for args, how in VARIANTS.values():
        run_copy(*args, **how)
    kernels = list(copy_kernel.device_caches[0][0].values())
    signatures = {kernel.function: kernel.src.signature for kernel in kernels}
    for name, (args, how) in VARIANTS.items():
        launches.clear()
        run_copy(*args, **how)
        plainly(lambda args=args, how=how: run_copy(*args, **how))
        mine, triton_s = (comparable(found, signatures[found[4]]) for found in launches)
        assert mine == triton_s, name


def test_only_new_keys_take_the_way_of_triton(launches, monkeypatch) -> None:
    for args, how in VARIANTS.values():
        run_copy(*args, **how)
    kept = {name for name, (args, how) in VARIANTS.items() if is_prepared(args, how)}
    assert set(VARIANTS) - kept == {"a stride beyond int32"}


def is_prepared(args: tuple[Any, ...], how: dict[str, Any]) -> bool:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_kernel, "pre_run_hooks", [])
        patch.setattr(prepared, "store_launch", lambda *_: None)
        before = prepared.launch_prepared
        patch.setattr(
            "moecore.kernels.common.launch_prepared",
            lambda *args: found.append(before(*args)) or found[-1],
        )
        run_copy(*args, **how)
    return found[0]


NUMBERS = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63]
VALUES = [*NUMBERS, True, False, None, 0.0, 1.0, 2.5]
POINTERS = [t[at:] for t in (X, X.bfloat16(), X.int(), X.bool()) for at in (0, 1, 2, 4, 8)]


@pytest.mark.parametrize("is_specialised", [True, False])
def test_keys_separate_what_triton_separates(is_specialised: bool) -> None:
    """For every pair of values of an argument: where Triton compiles anew, the key is another."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    place = 3 if is_specialised else 2
    seen = []
    for value in [*VALUES, *POINTERS, *[torch.nn.Parameter(p) for p in POINTERS[:3]]]:
        args: list[Any] = [X, Y, 4, 4, 1.0, True]
        args[place] = value
        functions = prepared._generate_launch_functions(copy_kernel, tuple(args))
        key = functions[0](*args)
        own = jit.native_specialize_impl(backend, value, False, is_specialised, True)
        is_known = type(value) is not int or -(2**31) <= value < 2**31
        assert own[0] in ("i64", "u64") or is_known
        seen.append(((tuple(map(type, args)), key), own))
    for (mine, own), (other, its) in itertools.combinations(seen, 2):
        beyond = {own[0], its[0]} == {"i64", "u64"}  # neither is kept
        assert own == its or mine != other or beyond, (own, its)


def test_descriptors_are_encoded_once_for_an_address(launches: Launches) -> None:
    x, y, out = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))

    def run(source: Tensor, block: tuple[int, int] = (32, 64)) -> None:
        descriptors = [make_gluon_descriptor(t, block) for t in (source, y)]
        launch(blocks_kernel, 1, *descriptors, out, ROWS=1)

    for source in (x, out):
        run(source)
    assert make_gluon_descriptor(x, (32, 64)) is make_gluon_descriptor(x.view(64, 64), (32, 64))
    assert make_gluon_descriptor(x, (32, 64)) is not make_gluon_descriptor(x[:32], (32, 64))
    wide = make_gluon_descriptor(x.view(32, 2, 64), (32, 64))
    assert wide.shape == (64, 64) and wide is not make_gluon_descriptor(x, (32, 64))
    for source, block in ((x, (32, 64)), (out, (32, 64)), (x[:32], (32, 64)), (x, (16, 64))):
        run(source, block)
        launches.clear()
        run(source, block)
        plainly(lambda source=source, block=block: run(source, block))
        mine, triton_s = (comparable(found, {}) for found in launches)
        assert mine[:-1] == triton_s[:-1]  # the last is the constant


def test_a_descriptor_holds_no_memory() -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert not isinstance(make_gluon_descriptor(x, (32, 64)).base, Tensor)


def test_hooks_see_launches(launches: Launches) -> None:
    """Profilers set hooks, which the plain path calls."""
    seen: list[Any] = []
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        run_copy(X, Y)
        hook.add(seen.append)
        run_copy(X, Y)
        hook.remove(seen.append)
        assert hook in launches[-1][11:13]
        run_copy(X, Y)
        assert launches[-1][11:13] == (None, None)


def test_another_device_takes_the_way_of_triton(launches, monkeypatch) -> None:
    """A tensor that is not on the current device is launched under a guard."""
    run_copy(X, Y)
    assert is_prepared((X, Y), {})
    monkeypatch.setattr(prepared, "current_device", lambda: 1)
    assert not is_prepared((X, Y), {})


def test_entries_of_a_site_are_bounded(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_ENTRIES", 2)
    for sign in (1, 2, 3):
        run_copy(X, Y, SIGN=sign)
        assert is_prepared((X, Y), {"SIGN": sign})
    assert not is_prepared((X, Y), {"SIGN": 1})


def test_the_launcher_of_triton_takes_what_entries_give() -> None:
    """Grid, stream, function, two flags, two scratch buffers, metadata, and three for hooks."""
    assert nvidia._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
