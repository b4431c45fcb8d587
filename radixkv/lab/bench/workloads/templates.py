"""Random values for the gaps of text templates."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Values = dict[str, str | int]

Gaps = Mapping[str | tuple[str, str], str | Sequence[str] | tuple[int, int]]
"""What fills the gaps of a template, in the order in which values are drawn.

A text; one of several texts; or a number from the first to the last of two. A pair of gaps gets two different texts
of several. A text may have gaps itself, for the values of earlier gaps.
"""


def draw_values(rng: random.Random, gaps: Gaps) -> Values:
    """Returns a value for each gap."""
    values: Values = {}
    for gap, options in gaps.items():
        if isinstance(gap, tuple):
            values |= zip(gap, map(str, rng.sample(options, len(gap))), strict=True)
        elif isinstance(options, str):
            values[gap] = options.format_map(values)
        else:
            first, last = options[0], options[-1]
            if isinstance(first, int) and isinstance(last, int):
                values[gap] = rng.randint(first, last)
            else:
                values[gap] = str(rng.choice(options)).format_map(values)
    return values
