"""Typed reads of ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.errors import CheckpointError

_MAX = 2**63 - 1
"""No size is larger; beyond it integers leave tensors, and then floats."""


class Fields:
    """Typed reads of a JSON object; None counts as absent. Raises ``CheckpointError`` naming file, field and value.

    Args:
        path: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, problem: str) -> CheckpointError:
        """What to raise for it."""
        return CheckpointError(f"{self._path}: {problem}")

    def __contains__(self, name: str) -> bool:
        """Whether the object has the field, also with None."""
        return name in self._values

    def get(self, name: str) -> Any:
        """The value as it is."""
        return self._values.get(name)

    def refuse(self, **plain: object) -> None:
        """Raises if one of these fields is there and is not its plain value."""
        for name, only in plain.items():
            value = self._values.get(name)
            if value is not None and value != only:
                raise self.error(f"{name} {value!r} is not supported in this release")

    def part(self, values: Mapping[str, Any]) -> Fields:
        """The fields of an object within this one."""
        return Fields(values, self._path)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} is {value!r}; it must be a string")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self._read(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}; it must be true or false")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MAX) -> int:
        """An integer from ``least`` to ``most``; required where there is no default."""
        value = self._read(name, default)
        if type(value) is not int or value < least:
            what = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.error(f"{name} is {value!r}; it must be {what}")
        if value > most:
            raise self.error(f"{name} is {value}; it must be at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required where there is no default."""
        value = self._read(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(f"{name} is {value!r}; it must be a positive number")
        return float(value)

    def _read(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"it has no {name}")
        return value
