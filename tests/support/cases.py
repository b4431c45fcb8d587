"""Which cases of a parametrised test run with every change, and which only at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings


def rest_nightly(cases: Iterable[Any], *, kept: Collection[int]) -> list[Any]:
    """Returns the cases; those whose index is not in ``kept`` run only at night."""
    return [
        case
        if index in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for index, case in enumerate(cases)
    ]


def nightly_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns the cases; those that are not among ``kept`` run only at night."""
    cases = list(cases)
    return rest_nightly(cases, kept=[cases.index(case) for case in kept])


def covering(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Returns all combinations of the axes' values. Every value has one that runs with every change.

    The others run only at night.
    """
    diagonal = {tuple(at % len(axis) for axis in axes) for at in range(max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, at, strict=True)),
            marks=[] if at in diagonal else pytest.mark.nightly,
        )
        for at in product(*(range(len(axis)) for axis in axes))
    ]


def examples(n: int, **limits: Any) -> settings:
    """Returns the settings of a test with random examples: ``n`` at night, 3% of them with every change.

    Args:
        n: of the profile "nightly". Up to 3 of them run with every change, too.
        limits: more arguments of ``hypothesis.settings``.
    """
    share = settings.default.max_examples / settings.get_profile("nightly").max_examples
    return settings(max_examples=max(min(n, 3), int(n * share)), **limits)
