"""Validating reader of ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.errors import CheckpointError

_MAX = 2**63 - 1
"""Largest size accepted: larger integers fit neither into tensors nor, further up, into floats."""


class ConfigReader:
    """Reads typed fields of a JSON object; a null field counts as absent.

    Raises ``CheckpointError`` with the file, the field and its value.

    Args:
        path: file of the object, named in error messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, problem: str) -> CheckpointError:
        """Returns the exception to raise for ``problem``."""
        return CheckpointError(f"{self._path}: {problem}")

    def __contains__(self, name: str) -> bool:
        """Returns whether the object has the field, even if it is null."""
        return name in self._values

    def get(self, name: str) -> Any:
        """Returns the value unchecked, None if the field is absent."""
        return self._values.get(name)

    def allow_only(self, **supported: object) -> None:
        """Raises ``CheckpointError`` if one of these fields is present with another value than the one given."""
        for name, only_value in supported.items():
            value = self._values.get(name)
            if value is not None and value != only_value:
                raise self.error(f"{name} {value!r} is not supported in this release")

    def refuse(self, **unsupported: object) -> None:
        """Raises ``CheckpointError`` if one of these fields has the value given."""
        for name, value in unsupported.items():
            if self._values.get(name) == value:
                raise self.error(f"{name} {value!r} is not supported in this release")

    def nested(self, values: Mapping[str, Any]) -> ConfigReader:
        """Returns a reader of an object nested in this one."""
        return ConfigReader(values, self._path)

    def with_value(self, name: str, value: object) -> ConfigReader:
        """Returns a reader of this object with another value of a field."""
        return ConfigReader({**self._values, name: value}, self._path)

    def text(self, name: str, default: str) -> str:
        """Returns a string."""
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} is {value!r}; it must be a string")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a boolean."""
        value = self._read(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}; it must be true or false")
        return value

    def count(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX) -> int:
        """Returns an integer from ``minimum`` to ``maximum``; without a default the field is required."""
        value = self._read(name, default)
        if type(value) is not int or value < minimum:
            expected = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.error(f"{name} is {value!r}; it must be {expected}")
        if value > maximum:
            raise self.error(f"{name} is {value}; it must be at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive number as a float; without a default the field is required."""
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
