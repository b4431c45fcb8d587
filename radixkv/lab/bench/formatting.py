"""Counts, values, tables and long lines as texts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

MAX_COLUMNS = 100
"""Most characters of a printed line, so that it fits a terminal beside other windows."""


def wrapped(text: str, hanging: int = 2) -> str:
    """Wraps each line of a text between words at ``MAX_COLUMNS``; what follows is indented by ``hanging``."""
    return "\n".join(
        textwrap.fill(
            line, MAX_COLUMNS, subsequent_indent=" " * hanging, break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


def aligned_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, has_numbers: bool = True, indent: str = ""
) -> str:
    """Formats an aligned table, the first column to the left, and the others, too, unless they have numbers.

    A table that is wider than ``MAX_COLUMNS`` becomes several, one below the other, each with the first column.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    tables: list[list[int]] = []
    room = 0
    for index in range(1, len(columns)):
        room -= 2 + widths[index]
        if room < 0 or not tables:
            tables.append([])
            room = MAX_COLUMNS - len(indent) - widths[0] - 2 - widths[index]
        tables[-1].append(index)

    def line(cells: Sequence[str], shown: Sequence[int]) -> str:
        texts = [f"{cells[index]:{'>' if has_numbers else '<'}{widths[index]}}" for index in shown]
        return (indent + "  ".join([f"{cells[0]:<{widths[0]}}", *texts])).rstrip()

    return "\n\n".join("\n".join(line(cells, shown) for cells in (columns, *rows)) for shown in tables)


def plural(n: int, noun: str) -> str:
    """Formats a count with its noun, such as ``1 page`` or ``12,031 pages``; the noun's plural must end in s."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def three_digits(value: float) -> str:
    """Formats a value with three significant digits, or more before the decimal point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def format_tokens(n_tokens: int) -> str:
    """Formats a token count such as 0.5M, 512k or 17 with at most four digits; round capacities stay exact."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n_tokens >= unit or (unit == 10**6 and n_tokens >= unit // 2):
            return f"{n_tokens / unit:.4g}{name}"
    return str(n_tokens)


def cell(value: object) -> str:
    """Formats a cell of a table: two decimals for a float, ``n/a`` for None."""
    if value is None:
        return "n/a"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
