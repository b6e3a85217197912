import shlex
import tomllib

import pytest
from benchmarks import card as cards
from benchmarks.bench_train import split_arguments

from moecore.recipes.train import parse_arguments

NAMES = sorted(path.stem for path in cards.CARDS.glob("*.toml"))
ROW = {
    "gpu": "NVIDIA H200", "date": "2026-11-26T08:00:00Z", "commit": "abc", "torch": "2.11",
    "triton": None, "tokens_per_second_per_gpu": 9000.5, "tflops_per_gpu": 300.25,
    "step_ms": 181.5, "peak_gib": 52.1,
    "losses": [12.5, 11.0, 7.25], "layers": 6,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_card_runs_a_step_that_exists(name: str) -> None:
    card = tomllib.loads((cards.CARDS / f"{name}.toml").read_text())
    own, rest = split_arguments(shlex.split(card["arguments"]))
    args = parse_arguments([*rest, "--checkpoint-every", "0", "--sample-every", "0"])
    assert (own.routing == "balanced") == (card["routing"] == "forced balance")
    assert f"{args.model['num_layers']} of " in card["what"] and card["published"]
    ran = cards.format_command(card, "folder")
    assert ran[ran.index("--nproc-per-node") + 1] == str(card["gpus"]) and "folder" in ran


def test_a_record_is_kept_and_shown() -> None:
    found = cards.select_fields(ROW)
    assert (found["loss_step_1"], found["loss_step_50"], found["day"]) == (12.5, 7.25, "2026-11-26")
    kept = tomllib.loads("\n".join(["[[measured]]", *cards.format_toml(found)]))
    card = {"what": "a model", "routing": "natural", "published": [{"who": "X", "step_ms": 9.0}]}
    shown = cards.table(card | kept, found)
    assert shown[4:] == [
        "| found | 9,000 | 300.2 | 181.5 | 52.1 | 12.5 | 7.25 |",
        "| NVIDIA H200, 2026-11-26, abc | 9,000 | 300.2 | 181.5 | 52.1 | 12.5 | 7.25 |",
        "| published: X |  |  | 9 |  |  |  |",
    ]
