"""Counts and values as texts."""

from __future__ import annotations


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
