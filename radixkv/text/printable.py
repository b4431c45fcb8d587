"""Text of others as a terminal may show it."""

from __future__ import annotations

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replaces each character that moves the cursor, colours, reorders or is not seen, line ends too. O(text)."""
    return "".join(one if one.isprintable() else _REPLACEMENT for one in text)
