"""Numbers of things, in words."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """``1 page``, ``12,031 pages``; for nouns whose plural ends in s."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
