"""Which modules of a model an adapter adapts, matched as PEFT matches them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.checkpoints.adapters.refusal import refusal
from radixkv.checkpoints.files import is_integer

_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")
"""The first number in a module's name, which is the index of its layer if no ``layers_pattern`` says otherwise."""


@dataclass(frozen=True)
class Targets:
    """Modules by ``target_modules``, ``exclude_modules``, ``layers_to_transform`` and ``layers_pattern``."""

    included: frozenset[str] | re.Pattern[str] | None
    """Names or ends of names, or a pattern of whole names; None: all linear modules."""
    excluded: frozenset[str] | re.Pattern[str] = frozenset()
    layers: frozenset[int] | None = None
    """Indices of the layers whose modules an end of a name selects; None: all."""
    indices: tuple[re.Pattern[str], ...] = (_FIRST_INDEX,)
    """Patterns of the beginning of a module's name up to its layer's index, the first that matches decides."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any], path: Path) -> Targets:
        """Reads the fields.

        Args:
            fields: of ``adapter_config.json``.
            path: of the file, for errors.

        Raises:
            CheckpointError: a field has a wrong type, or is a pattern that does not compile.
        """
        value = fields.get("target_modules")
        if value is None:
            raise refusal(path, "target_modules", value, "write the list of the adapter's modules into the file")
        included: frozenset[str] | re.Pattern[str] | None = None
        if not isinstance(value, str) or value.lower() != "all-linear":
            included = _names(value, "target_modules", path)
        excluded = _names(fields.get("exclude_modules") or [], "exclude_modules", path)
        layers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern") or []
        if layers is None or layers == []:
            return cls(included, excluded)
        indices = layers if isinstance(layers, list) else [layers]
        if not all(is_integer(index) for index in indices):
            raise refusal(path, "layers_to_transform", layers, "it must be the index of a layer or a list of them")
        if not isinstance(included, frozenset):
            raise refusal(
                path, "layers_to_transform", layers, "it needs a list of target_modules; save the adapter with one"
            )
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise refusal(path, "layers_pattern", patterns, "it must be a name or a list of names")
        compiled = tuple(
            compile_pattern(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", "layers_pattern", pattern, path)
            for pattern in patterns
        )
        return cls(included, excluded, frozenset(indices), compiled or (_FIRST_INDEX,))

    def __contains__(self, name: object) -> bool:
        """Returns whether a module is adapted.

        Args:
            name: of a linear module, which is not the output head, in the model that the adapter was trained with.
        """
        assert isinstance(name, str), "modules have names"
        if _matches(self.excluded, name):
            return False
        if self.included is None:
            return True
        if not _matches(self.included, name):
            return False
        if self.layers is None or (isinstance(self.included, frozenset) and name in self.included):
            return True
        match = next((match for pattern in self.indices if (match := pattern.match(name))), None)
        # An alternative in layers_pattern may match without an index.
        return match is not None and match["index"] is not None and int(match["index"]) in self.layers


def compile_pattern(pattern: str, field: str, value: object, path: Path) -> re.Pattern[str]:
    """Returns a compiled pattern; raises ``CheckpointError`` if the value of the field is none."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise refusal(path, field, value, f"it is not a regular expression: {error}; correct it") from error


def _names(value: object, field: str, path: Path) -> frozenset[str] | re.Pattern[str]:
    """Returns the names in a field that is a list of them or a pattern."""
    if isinstance(value, str):
        return compile_pattern(value, field, value, path)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal(
            path, field, value, "it must be a list of names or a regular expression; save the adapter again"
        )
    return frozenset(value)


def _matches(names: frozenset[str] | re.Pattern[str], name: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(name) is not None
    return name in names or any(name.endswith(f".{end}") for end in names)
