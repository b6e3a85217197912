import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 80


@pytest.fixture(scope="module")
def balancing() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import balancing
    finally:
        sys.path.remove(str(EXAMPLES))
    return balancing


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of 80 steps, whose order other numbers of threads change, decide what is compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly  # each rule has its numbers in tests/moe/test_balance.py
@pytest.mark.usefixtures("no_group_left", "one_thread")
def test_every_way_evens_the_load(balancing: ModuleType, tmp_path: Path) -> None:
    corpus = balancing.read_corpus()
    early, late = "the same per micro-batch", "bias, quantile"
    names = ("none", "micro-batch loss", "bias, sign", late, early)
    ways = [w for w in balancing.WAYS if w.name in names]
    curves = {w.name: balancing.train(w, corpus, steps=STEPS, seed=0) for w in ways}
    assert set(curves) == set(names)
    none_loss, none_load = curves.pop("none").compute_means()
    assert none_load > 6, "without balancing one expert takes nearly all tokens"
    for name, curve in curves.items():
        loss, load = curve.compute_means()
        assert load < 0.75 * none_load, f"{name}: {load} against {none_load}"
        assert curve.loads[-1] < curve.loads[0], f"{name}: the load falls"
        assert abs(loss - none_loss) < 0.1, f"{name}: {loss} against {none_loss}"
    first = {name: sum(curves[name].loads[:10]) for name in (early, late)}
    assert first[early] < 0.6 * first[late], "what is solved before choosing is not a step late"
    assert all(curve.eval_loss < 3 for curve in curves.values())
    balancing.plot(curves, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert balancing.format_table(curves).count("\n") == 1 + len(curves)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.xyz", "end in a format of matplotlib: use .png"),
        ("none/a.png", "be in a folder that is there: create it"),
        ("folder.png", "be a plain file: use another name"),
        ("a.png", None),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_runs(
    name: str, wanted: str | None, balancing: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert balancing.find_plot_problem(tmp_path / name) == wanted
