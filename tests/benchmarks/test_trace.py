import pytest
from benchmarks.trace import break_down, format_table

from moecore.planning.report import OTHER, Kernel, find_kernel_category
from tests.kernels.every_kernel import OF_SEVERAL_RANKS, every_kernel

US = 1e-3  # ms


def kernel(name: str, start: float, end: float) -> Kernel:
    return Kernel(name=name, start=start, end=end)


def test_the_worked_example() -> None:
    found = break_down([kernel("gemm", 0, 3), kernel("ncclAllReduce", 2, 6), kernel("gemm", 7, 8)])
    assert found.wall == pytest.approx(8 * US)
    assert found.exposed == pytest.approx(3 * US) and found.idle == pytest.approx(1 * US)
    assert found.categories == pytest.approx({"dense products": 4 * US, "nccl": 4 * US})
    assert found.kernels == 3 and found.longest["gemm"] == (pytest.approx(4 * US), 2)
    assert found.gaps == {"ncclAllReduce -> gemm": (pytest.approx(1 * US), 1)}
    assert format_table(found)[-1].endswith("| 0.0 | 12.5% |")


def test_two_communications_at_once_are_exposed_once() -> None:
    found = break_down([kernel("nccl", 0, 4), kernel("_spread_kernel", 1, 5), kernel("x", 4, 9)])
    assert found.exposed == pytest.approx(4 * US) and found.idle == 0


def test_steps_share_the_time() -> None:
    found = break_down([kernel("gemm", 0, 1), kernel("gemm", 3, 4)], num_steps=2)
    assert (found.wall, found.kernels) == (pytest.approx(2 * US), 1)


def test_nothing_ran() -> None:
    assert break_down([]).wall == 0


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("_reduce_kernel", "nvlink dispatch"),
        ("sm90_bf16_grouped_nn_act_bwd_kernel", "experts"),
        ("sm90_bf16_grouped_wgrad_kernel", "experts"),
        ("_sum_rows_fwd_kernel", "experts"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "dense products"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
        ("_gather_packed_rows_kernel", "experts"),
        ("_cast_kernel", "quantisation"),
        ("amax_parts_kernel", "quantisation"),
        ("quantise_experts_kernel", "quantisation"),
        ("quantised_activation_fwd_kernel", "experts"),
        ("sm90_fp8_grouped_nt_kernel", "experts"),
        ("_product_kernel", "routing"),
        ("_scaled_cast_kernel", "optimizer"),
    ],
)
def test_categories(name: str, category: str) -> None:
    assert find_kernel_category(name) == category


def test_every_kernel_of_the_package_has_a_category() -> None:
    """One that is forgotten would count as "other", and as compute where it waits for a rank."""
    pytest.importorskip("triton")
    others = {name for name in every_kernel() if find_kernel_category(name) == OTHER}
    assert not others
    found = {find_kernel_category(name) for name in OF_SEVERAL_RANKS}
    assert found == {"nvlink dispatch"}
