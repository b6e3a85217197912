"""Grids of cases: `make test` runs those that have every pair of values, `make nightly` all.

    @grid(layout=LAYOUTS, model=MODELS, option=OPTIONS)      of 2 x 2 x 3 cases 6 run
    def test(layout, model, option): ...

A case runs if the places of its values add up to a multiple of the shortest axis's length. Then
every value of an axis meets every value of each other axis: a third axis completes the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def grid(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return a parametrization by the product of axes, whose other cases are marked `nightly`."""
    values = [list(axis) for axis in axes.values()]
    assert len(values) > 2, "two axes have no pair that another case has"
    shortest = min(map(len, values))
    cases = []
    for places in product(*(range(len(axis)) for axis in values)):
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        marks = [] if sum(places) % shortest == 0 else [pytest.mark.nightly]
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
