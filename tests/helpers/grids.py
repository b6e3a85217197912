"""Grids of cases: `make test` runs each value of each axis, `make nightly` all cases.

    @grid(layout=LAYOUTS, model=MODELS, option=OPTIONS)      of 2 x 2 x 3 cases 3 run
    def test(layout, model, option): ...

By day the longest axis is walked once, and the others along with it, from their beginning again
where they end.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def grid(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return a parametrization by the product of axes, whose other cases are marked `nightly`."""
    values = [list(axis) for axis in axes.values()]
    by_day = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    cases = []
    for places in product(*(range(len(axis)) for axis in values)):
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = [] if places in by_day else [pytest.mark.nightly]
        cases.append(pytest.param(*case, marks=marks))
    return pytest.mark.parametrize(list(axes), cases)


def beside(values: Iterable[Any], nightly: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return values for `parametrize`, some of them marked `nightly`.

    Args:
        values: of one parameter, or tuples of `several`.
        nightly: those of the values that run at night alone.
    """
    values, nightly = list(values), list(nightly)
    assert all(value in values for value in nightly)
    return [
        pytest.param(
            *(value if several else [value]),
            marks=[pytest.mark.nightly] if value in nightly else [],
        )
        for value in values
    ]


def beyond_each_value(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return cases of several parametrizations without a value that no case before them has.

    Cases whose values are all new come first, so that parameters change together.
    """
    found: set[pytest.Item] = set()
    tests: dict[tuple[Any, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.path, item.cls, item.originalname].append(item)
    for cases in tests.values():
        axes = zip(*(case.callspec._idlist for case in cases), strict=True)
        differ = [i for i, axis in enumerate(axes) if len(set(axis)) > 1]
        values = {case: {(i, case.callspec._idlist[i]) for i in differ} for case in cases}
        seen: set[tuple[int, str]] = set()
        found |= set() if len(differ) > 1 else set(cases)
        for is_new in (set.isdisjoint, lambda one, all_seen: not one <= all_seen):
            for case in cases:
                if is_new(values[case], seen):
                    seen |= values[case]
                    found.add(case)
    return {case for cases in tests.values() for case in cases} - found


def asked_for(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values of parameters in the tests of a file that are selected, each once."""
    found: list[Any] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if params.keys() >= set(names):
                values = tuple(params[name] for name in names)
                found += [] if values in found else [values]
    return [values[0] if len(names) == 1 else values for values in found]
