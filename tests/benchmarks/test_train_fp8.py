import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import fp8_runs, train_fp8
from benchmarks.fp8_runs import Run
from benchmarks.text import Text

from moecore import Meshes, ParallelConfig, TrainStep, build_meshes

SIZE = train_fp8.make_size(128, 128, 4, 2, 1, batch_size=2, seq_len=32)


@pytest.fixture
def meshes(no_group_left: None) -> Meshes:
    return build_meshes(ParallelConfig(), "cpu")


def some_text(size: int = 4096) -> Text:
    bytes_N = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).byte()
    return Text(train_N=bytes_N, held_out_N=bytes_N[:512], num_files=2, digest="abc")


def batches(seed: int | None, steps: int = 3) -> train_fp8.Batches:
    return train_fp8.Batches(
        some_text().train_N, SIZE, steps=steps, seed=seed, device=torch.device("cpu")
    )


def test_batches_follow_from_the_seed_and_labels_are_the_next_bytes() -> None:
    tokens, labels = batches(7).at(2)
    assert tokens.shape == labels.shape == (SIZE.batch_size, SIZE.seq_len)
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and torch.equal(tokens, batches(7).at(2)[0])
    assert not torch.equal(tokens, batches(8).at(2)[0])
    spread = batches(None, steps=2)
    assert int(spread.starts_SB[0, 0]) == 0
    assert int(spread.starts_SB[-1, -1]) == 4096 - SIZE.seq_len - 1


def test_kinds_of_parameters() -> None:
    get_key = train_fp8.get_key
    assert get_key("model.layers.3.mlp.experts.w1") == "layers.3.experts"
    assert get_key("model.layers.12.mlp.router.weight") == "layers.12.router"
    assert get_key("model.layers.0.self_attn.q_proj.weight") == "layers.0.attention"
    assert get_key("model.layers.0.input_layernorm.weight") == "layers.0.norms"
    assert get_key("lm_head.weight") == get_key("model.norm.weight") == "ends"


@pytest.mark.parametrize("variant", ["bf16", "blockwise"])
def test_a_twin_follows_the_weights_and_the_choices(meshes: Meshes, variant: str) -> None:
    """In bf16 it computes the same bits; in FP8 what FP8 rounds, whatever the weights became."""
    model = train_fp8.build_model(SIZE, variant, 0, meshes)
    probe = train_fp8.Probe(model, train_fp8.build_model(SIZE, "bf16", 1, meshes))
    owner = TrainStep(model)
    for step in range(2):
        tokens, labels = batches(0).at(step)
        with probe.recording(), owner.micro_batch():
            model(tokens, labels).backward()
        probe.compare(step, tokens, labels)
        owner.drop()
        with torch.no_grad():
            for param in model.parameters():
                train_fp8.get_local(param).mul_(1.5)
    cosines = torch.stack(probe.cosines)
    assert cosines.shape == (2, len(probe.names)) and probe.steps == [0, 1]
    if variant == "bf16":
        torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-6)
        assert torch.stack(probe.moved).tolist() == [0.0, 0.0]
    else:
        assert 0.97 < float(cosines.min()) < 0.9999
        assert all(float(share) < 0.2 for share in probe.moved)
    assert all(p.grad is None for p in probe.twin.parameters())


def test_moved_is_the_share_of_choices_that_another_router_lacks() -> None:
    ours = {"a": [torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)]}
    others = {"a": [torch.tensor([[1, 0], [2, 1]], dtype=torch.int32)]}
    assert float(train_fp8.compute_moved(ours, others, SIZE.config)) == 0.25
    assert float(train_fp8.compute_moved(ours, ours, SIZE.config)) == 0.0


def test_a_run_end_to_end(no_group_left, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train_fp8, "read_text", lambda folders, most_bytes: some_text())
    monkeypatch.setitem(train_fp8.SIZES, "cpu", SIZE)
    monkeypatch.setattr(train_fp8, "EVAL_BATCHES", 2)
    path = tmp_path / "runs.json"
    # A rate at which three steps of moments in FP8 show in the loss, on any CPU.
    common = ["--steps", "3", "--lr", "0.02", "--probe-every", "2", "--device", "cpu"]
    common += ["--json", str(path)]
    assert train_fp8.main([*common, "--seeds", "0"]) == 0
    low = ["bf16", "fp8-moments", "least-state"]  # in the file
    pair = ["--seeds", "2", "--variants", "blockwise", "blockwise-gathered"]
    assert train_fp8.main([*common[:-2], *pair]) == 0
    assert "/ blockwise: curve x" in capsys.readouterr().out
    assert train_fp8.main([*common, "--seeds", "1", "--variants", *low]) == 0
    found = json.loads(path.read_text())
    runs = [Run(**run) for run in found["runs"]]
    seeds = [(run.seed, run.variant) for run in runs]
    assert seeds == [(0, "bf16"), (0, "blockwise"), *((1, variant) for variant in low)]
    base, fp8, *others = runs
    scales = 2 / 128  # bytes of both, and a little more of parameters that fill no block
    for run, weights, grads, state in (
        (base, 4, 4, 8),
        (others[0], 4, 4, 8),
        (others[1], 4, 4, 2 + scales),
        (others[2], 2, 2, 4 + scales),
    ):
        found_bytes = run.bytes_per_parameter
        assert found_bytes["weights"] == pytest.approx(weights, abs=0.02)
        assert found_bytes["gradients"] == pytest.approx(grads, abs=0.02)
        assert found_bytes["state"] == pytest.approx(state, abs=0.02)
    for run in others[1:]:
        assert 0 < abs(run.losses[0] - others[0].losses[0]) < 0.01 * others[0].losses[0]
    assert len(fp8.losses) == len(fp8.loads) == len(fp8.mean_loads) == 1  # of three steps
    assert 0 < abs(fp8.losses[0] - base.losses[0]) < 0.01 * base.losses[0]
    assert fp8.probe_steps == [0, 2] and not base.cosines
    assert all(len(values) == 2 for values in fp8.cosines.values())
    assert fp8.held_out[-1][0] == 3 and fp8.skipped == 0 and base.held_out_in_bf16 is None
    assert 0 < abs(fp8.held_out_in_bf16 - fp8.held_out[-1][1]) < 0.01 * fp8.held_out[-1][1]
    assert found["settings"]["parameters"] == sum(
        p.numel() for p in train_fp8.Decoder(SIZE.config, device="meta").parameters()
    )
    out = capsys.readouterr().out
    assert "blockwise" in out and "/ bf16: curve x" in out and "cosine >= " in out
    assert train_fp8.main([*common, "--lr", "1e-3"]) == 2
    assert "must have runs of the same lr: name another file" in capsys.readouterr().err


def made(seed: int, variant: str, loss: float) -> Run:
    points = 2 * fp8_runs.LAST
    return Run(
        seed=seed,
        variant=variant,
        losses=[9.0] * fp8_runs.LAST + [loss] * fp8_runs.LAST,
        loads=[2.0] * points,
        mean_loads=[1.5] * points,
        held_out=[[points * fp8_runs.POINT, 2 * loss]],
    )


def test_ratios_are_to_bf16_of_the_same_seed() -> None:
    other = made(1, "blockwise", 1.01)
    other.cosines, other.moved = {"ends": [0.9, 0.99], "layers.0.experts": [0.8, 0.9]}, [0.1, 0.02]
    runs = [made(0, "bf16", 2.0), made(1, "bf16", 1.0), other, made(0, "blockwise", 1.98)]
    lines = fp8_runs.summarize(runs)
    assert len(lines) == 5 and not any("/ bf16" in line for line in (lines[0], lines[2]))
    assert "loss x0.9900 held out x0.9900" in lines[1]
    assert "loss x1.0100 held out x1.0100 load x1.000" in lines[3]
    assert "cosine >= 0.8000 (layers.0.experts), 10.00% of choices moved" in lines[3]
    assert lines[4].startswith("blockwise over 2 seeds, / bf16: curve x1.0000 (0.9950 to 1.0050)")
    assert " loss x1.0000 (0.9900 to 1.0100)" in lines[4]


def test_plot(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    other = made(0, "blockwise", 1.01)
    other.cosines, other.probe_steps = {"layers.0.experts": [0.9, 0.99]}, [0, 50]
    other.moved = [0.1, 0.02]
    path = tmp_path / "runs.json"
    fp8_runs.write(path, {"lr": 1.0}, [made(0, "bf16", 1.0), other])
    monkeypatch.setattr(sys, "argv", ["fp8_runs", str(path), str(tmp_path / "plot.png")])
    assert fp8_runs.main() == 0 and (tmp_path / "plot.png").stat().st_size > 1000
