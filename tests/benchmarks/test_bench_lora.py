import argparse
from pathlib import Path

import pytest
import torch
from benchmarks import bench_lora

from tests.benchmarks.forks import rows_of

pytest.importorskip(
    "peft", minversion="0.21", reason="the adapters are peft's, which the extra `test` has"
)

ARGUMENTS = "--preset tiny-qwen3 --layers 1 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_adapters_train(tmp_path: Path) -> None:
    words = f"{ARGUMENTS} --rank 4 --lr 0.01".split()
    (row,), said = rows_of("bench_lora", words, tmp_path, num_ranks=2)
    assert said.count("tokens/s/GPU") == 1 and row["losses"][-1] < row["losses"][0] - 0.05
    rate = 2 * 32 / row["step_ms"] * 1e3
    assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["moecore", "peft"])
def test_documents_train(tmp_path: Path, variant: str) -> None:
    words = f"{ARGUMENTS} --rank 4 --lr 0.01 --document-len 0 12 --variant {variant}".split()
    (plain, row), _ = rows_of("bench_lora", words, tmp_path, num_ranks=1)
    assert row["variant"] == variant and row["losses"][-1] < row["losses"][0] - 0.05
    assert plain["document_len"] is None and row["document_len"] == 12


@pytest.mark.slow
@pytest.mark.nightly
def test_all_weights_train(tmp_path: Path) -> None:
    words = f"{ARGUMENTS} --rank 0 --lr 0.01 --checkpointing --moments float8_e4m3fn".split()
    (row,), _ = rows_of("bench_lora", words, tmp_path, num_ranks=1)
    assert row["op"] == "sft" and row["losses"][-1] < row["losses"][0] - 0.05


def test_documents_end_in_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    shape = dict(batch_size=2, seq_len=6, preset="tiny-qwen3")
    device = torch.device("cpu")
    batch = bench_lora.make_batch(argparse.Namespace(variant="moecore", **shape), 4, device)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 6, 10, 12] and batch["max_length_q"] == 4
    starts = torch.tensor([True, False, False, False, True, False]).expand(2, 6)
    assert ((batch["labels"] == -100) == starts).all()
    plain = bench_lora.make_batch(argparse.Namespace(variant="peft", **shape), 4, device)
    assert plain["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert "cu_seq_lens_q" not in plain
