"""English plurals."""

from __future__ import annotations


def plural(n: int, noun: str) -> str:
    """Formats a count with its noun, such as ``1 page`` or ``12,031 pages``; the noun's plural must end in s."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
