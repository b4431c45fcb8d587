"""Search for the fields that misspelt fields of a body were meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"[a-z_]{4,40}", re.ASCII)
"""Names that are compared. One letter changes a shorter name too much, and other letters are not safe in a log."""


class KnownFields:
    """The fields that a body may have.

    Args:
        names: all of them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name for name in names if _NAME.fullmatch(name)}
        self._by_edit: dict[str, str] = {}
        """Names by their spellings with one letter missing, and with one replaced by a question mark."""
        for name in sorted(self._names):
            for i in range(len(name)):
                self._by_edit[name[:i] + name[i + 1 :]] = self._by_edit[f"{name[:i]}?{name[i + 1 :]}"] = name

    def nearest(self, name: str) -> str | None:
        """Returns the field that is one inserted, deleted or replaced letter away from another name, if any.

        O(letters), whatever the number of fields.
        """
        if not _NAME.fullmatch(name):
            return None
        if name in self._by_edit:
            return self._by_edit[name]
        for i in range(len(name)):
            if (shorter := name[:i] + name[i + 1 :]) in self._names:
                return shorter
            if (replaced := f"{name[:i]}?{name[i + 1 :]}") in self._by_edit:
                return self._by_edit[replaced]
        return None
