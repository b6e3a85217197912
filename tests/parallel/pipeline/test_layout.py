from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.parallel.pipeline.layout import LayoutCosts, balanced_layout, even_layout, parse_layout
from tests.parallel.pipeline.costs import sum_stages

PP8 = "Et*3|(tt|)*29m|L"  # DeepSeek-V3: 61 layers and one MTP module
PP4 = "Et*4|(tttt|)*14tmL"
DEEPSEEK = dict(num_layers=61, num_mtp_layers=1)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        (PP8, ["Ettt", *["tt"] * 29, "m", "L"]),
        (PP4, ["Etttt", *["tttt"] * 14, "tmL"]),
        ("E t * 3|\n(t | (t|)*2 t)*2 L", ["Ettt", "t", "t", "t", "tt", "t", "t", "tL"]),
        ("Ett||t*0|tL", ["Ett", "", "", "tL"]),
        ("Et*2*3L", ["EttttttL"]),
    ],
)
def test_stages(text: str, letters: list[str]) -> None:
    numbers = {"num_layers": "".join(letters).count("t"), "num_mtp_layers": 1 * ("m" in text)}
    layout = parse_layout(text, **numbers)
    assert [stage.letters for stage in layout.stages] == letters
    assert [stage.index for stage in layout.stages] == list(range(len(letters)))
    assert [i for s in layout.stages for i in s.layers] == list(range(numbers["num_layers"]))
    assert [i for s in layout.stages for i in s.mtp] == list(range(numbers["num_mtp_layers"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tL", "must have one t per layer, found 3 for num_layers (4): use 'Ett|ttL'"),
        ("Ett|ttmL", "one m per MTP module, found 1 for num_mtp_layers (0): use 'Ett|ttL'"),
        ("Ett|tt", "must have one L, at its end, found 0: use 'Ett|ttL'"),
        ("EtL|ttLt", "must have one L, at its end, found 2: use 'Ett|ttL'"),
        ("tE|tttL", "must have one E, at its start, found 1: use 'Ett|ttL'"),
        ("(Ett|)*2L", "must have one E, at its start, found 2: use 'Ett|t|tL'"),
        ("Etmt|ttL", "must have every m after the last t: use 'Ett|ttL'"),
        ("Ett|xtL", "must be of E, t, m, L, |, ( ) and *n, found 'x': remove it"),
        ("Et*|tL", "must be of E, t, m, L, |, ( ) and *n, found '*': remove it"),
        ("*2EtL", "must have a letter or a group before *2: remove it"),
        ("E(t|*2L", "must have a ) for each (: close the group"),
        ("Et)|L", "must have a ( for each ): remove the )"),
        ("E(t*60000)*60000L", "must have at most 65536 letters: lower *60000"),
        ("Et*" + "9" * 5000 + "L", "must have at most 65536 letters: lower *99999999"),
        ("E" + "t" * 60000 + "L", "must have one t per layer, found 60000 for num_layers (4)"),
        ("E|" * 30000 + "L", "must have one E, at its start, found 30000"),
    ],
)
def test_a_string_that_is_no_layout_of_the_model(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layout(text, num_layers=4)
    error = str(caught.value)
    assert error.startswith("layout ('") and message in error and "\n" not in error
    if "use '" in error:
        assert parse_layout(error.split("use '")[1][:-1], num_layers=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 3))
def test_the_text_of_a_layout_is_read_back(layers: list[int], num_mtp_layers: int) -> None:
    letters = "E" + "|".join("t" * number for number in [1, *layers]) + "m" * num_mtp_layers + "L"
    numbers = {"num_layers": 1 + sum(layers), "num_mtp_layers": num_mtp_layers}
    layout = parse_layout(letters, **numbers)
    assert parse_layout(layout.text, **numbers) == layout and len(layout.text) <= len(letters)


def test_texts() -> None:
    layout = parse_layout(PP8, **DEEPSEEK)
    assert layout.text == PP8 and parse_layout(PP4, **DEEPSEEK).text == "Et*4|(t*4|)*14tmL"


def test_ranks_must_divide_the_stages() -> None:
    layout = parse_layout("Et|t|tL", num_layers=3)
    assert layout.chunks(3) == 1 and layout.chunks(1) == 3
    message = r"^layout \('Et\|t\|tL'\) must have a number of stages that pp \(2\) divides, found 3"
    with pytest.raises(ValueError, match=message + r": use 'Et\|t\|t\|L' of 4$"):
        layout.chunks(2)


def test_even_layouts() -> None:
    assert even_layout(8, num_stages=4).text == "Ett|tt|tt|ttL"
    assert even_layout(3, num_stages=2, num_mtp_layers=1).text == "Ett|tmL"
    assert even_layout(2, num_stages=4).text == "Et|t||L"
    assert even_layout(1, num_stages=1).text == "EtL"
    shared = frozenset({2, 3, 4, 6, 7, 8, 10, 11})  # borders 6, 8 -> 5, 9; 4 and 5 -> 5
    assert even_layout(12, num_stages=2, bound_layers=shared).text == "Et*5|t*7L"
    assert even_layout(12, num_stages=3, bound_layers=shared).text == "Et*5|t*4|t*3L"
    assert even_layout(4, num_stages=2, bound_layers=frozenset({1, 2, 3})).text == "E|t*4L"
    with pytest.raises(ValueError, match=r"^num_layers \(100000\) must be a whole number >= 1 and"):
        even_layout(100000, num_stages=2)


def brute_force(costs: LayoutCosts, num_stages: int) -> tuple[float, int]:
    """Return the least cost of the slowest stage, and then the fewest parts of the last stage."""
    parts = [costs.embedding, *costs.layers, *costs.mtp, costs.loss]
    free = [i for i in range(1, len(parts)) if i - 1 not in costs.bound]
    found = []
    for borders in combinations_with_replacement(free, num_stages - 1):
        ends = [0, *borders, len(parts)]
        found.append((max(sum(parts[i:j]) for i, j in pairwise(ends)), len(parts) - ends[-2]))
    return min(found)


whole = st.integers(0, 6).map(float)


@settings(max_examples=150, deadline=None)
@given(
    st.frozensets(st.integers(1, 5)),
    st.builds(
        LayoutCosts,
        embedding=whole,
        layers=st.lists(whole, min_size=1, max_size=6).map(tuple),
        mtp=st.lists(whole, max_size=2).map(tuple),
        loss=whole,
    ),
    st.integers(1, 5),
)
def test_a_balanced_layout_is_the_best_of_all(bound, costs, num_stages) -> None:
    costs = replace(costs, bound=bound & {*range(1, len(costs.layers))})
    layout = balanced_layout(costs, num_stages=num_stages)
    assert len(layout.stages) == num_stages
    last = layout.stages[-1]
    num_last = len(last.letters) if num_stages > 1 else len(costs.layers) + len(costs.mtp) + 2
    assert (max(sum_stages(costs, layout)), num_last) == brute_force(costs, num_stages)
    numbers = {"num_layers": len(costs.layers), "num_mtp_layers": len(costs.mtp)}
    assert parse_layout(layout.text, **numbers) == layout


def test_a_balanced_layout_finds_that_of_the_report() -> None:
    """Embedding and three dense layers cost as much as two MoE layers."""
    costs = LayoutCosts(embedding=0.2, layers=(0.6,) * 3 + (1.0,) * 58, mtp=(1.7,), loss=1.2)
    assert balanced_layout(costs, num_stages=32).text == PP8
    even = even_layout(61, num_stages=32, num_mtp_layers=1)
    assert max(sum_stages(costs, even)) > max(sum_stages(costs, parse_layout(PP8, **DEEPSEEK)))
    with pytest.raises(ValueError, match=r"^LayoutCosts.layers \(\(\)\) must have a cost per"):
        LayoutCosts(layers=())
    with pytest.raises(ValueError, match=r"^LayoutCosts.bound .* must be of layers 1 to 1: leave"):
        LayoutCosts(layers=(1.0, 1.0), bound=frozenset({2}))


def test_stages_of_one_cost_are_alike_though_sums_are_rounded() -> None:
    """0.1 + 0.1 + 0.1 > 0.5 - 0.2, so the first stage would be below three parts."""
    costs = LayoutCosts(layers=(0.1,) * 5, embedding=0.1, loss=0.1)
    assert balanced_layout(costs, num_stages=3).text == "Ett|t*3|L"
