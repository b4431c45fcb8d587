"""Templates of texts, which are in the folder ``texts``, and random values for their gaps."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

Values = dict[str, str | int]

Gaps = Mapping[str, str | tuple[str | int, ...]]
"""What fills the gaps of a template, in the order in which values are drawn.

The name of a list of ``WORDS``; another text; one of several texts; or a number from the first to the last of two.
Two gaps with a space between them get two different words. A text may have gaps for the values of earlier gaps.
"""


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "texts" / f"{name}.toml").read_text(encoding="utf-8"))


def read_templates(name: str, kind: type[T]) -> tuple[T, ...]:
    """Returns the templates of the file ``texts/NAME.toml``, in its order."""
    return tuple(msgspec.convert(template, kind) for template in _read(name)["templates"])


WORDS: Mapping[str, tuple[str, ...]] = {name: tuple(words) for name, words in _read("words").items()}
"""Lists of words by their names."""


def draw_values(rng: random.Random, gaps: Gaps) -> Values:
    """Returns a value for each gap."""
    values: Values = {}
    for gap, given in gaps.items():
        options = WORDS.get(given, given) if isinstance(given, str) else given
        if isinstance(options, str):
            values[gap] = options.format_map(values)
            continue
        first, last = options[0], options[-1]
        if " " in gap:
            values |= zip(gap.split(), map(str, rng.sample(options, 2)), strict=True)
        elif isinstance(first, int) and isinstance(last, int):
            values[gap] = rng.randint(first, last)
        else:
            values[gap] = str(rng.choice(options)).format_map(values)
    return values
