"""Search for the fields that misspelt fields of a body were meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAMES = 1024
"""Most unknown names that are compared with the known ones, so that clients cannot make the search expensive."""
_NAME = re.compile(r"[a-z_]{4,40}", re.ASCII)
"""Names that are compared: one letter changes a shorter one too much, and others are no safe text for a log."""


class KnownFields:
    """The fields that a body may have.

    Args:
        names: all of them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(name for name in names if _NAME.fullmatch(name))
        self._nearest: dict[str, str | None] = {}

    def nearest(self, name: str) -> str | None:
        """Returns the field that is one inserted, deleted or replaced letter away, if any.

        O(number of fields) for a new name; a name that was looked up before takes one look-up.
        """
        if name not in self._nearest:
            if len(self._nearest) >= MAX_NAMES:
                return None
            is_name = _NAME.fullmatch(name) is not None
            self._nearest[name] = next((each for each in self._names if is_name and _is_one_edit(name, each)), None)
        return self._nearest[name]


def _is_one_edit(one: str, other: str) -> bool:
    """Whether one inserted, deleted or replaced letter makes one name of the other."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) > 1:
        return False
    n_equal = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    rest = short[n_equal:] if len(short) < len(long) else short[n_equal + 1 :]
    return rest == long[n_equal + 1 :]
