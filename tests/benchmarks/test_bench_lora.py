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
@pytest.mark.parametrize(
    "words",
    [
        "--rank 4",
        "--rank 4 --document-len 12",
        "--rank 4 --document-len 12 --variant peft",
        "--rank 0 --checkpointing --moments float8_e4m3fn",
    ],
)
def test_a_variant_trains(words: str, tmp_path: Path) -> None:
    num_ranks = 1 if "peft" in words else 2
    words = f"{ARGUMENTS} --lr 0.01 {words}"
    (row,), said = rows_of("bench_lora", words.split(), tmp_path, num_ranks=num_ranks)
    assert said.count("tokens/s/GPU") == 1 and row["losses"][-1] < row["losses"][0] - 0.05
    rate = 2 * 32 / row["step_ms"] * 1e3
    assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)


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
