"""Which modules of a model an adapter adapts, matched as PEFT matches them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.checkpoints.adapters.patterns import Match, Pattern, first_matches
from radixkv.checkpoints.adapters.refusal import refusal
from radixkv.checkpoints.files import is_integer

_Names = frozenset[str] | Pattern
"""Names or ends of names, or a pattern of whole names."""
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")
"""The first number in a module's name, which is the index of its layer if no ``layers_pattern`` says otherwise."""

_MAX_DIGITS = 9
"""Of a layer's index; Python converts no number of thousands of digits."""


@dataclass(frozen=True)
class Targets:
    """Modules by ``target_modules``, ``exclude_modules``, ``layers_to_transform`` and ``layers_pattern``."""

    included: _Names | None
    """None: all linear modules."""
    excluded: _Names = frozenset()
    layers: frozenset[int] | None = None
    """Indices of the layers whose modules an end of a name selects; None: all."""
    indices: tuple[Pattern, ...] = ()
    """Patterns of the beginning of a module's name up to its layer's index, the first that matches decides; none:
    the index is the first number in the name."""
    path: Path = Path()
    """Of the file, for errors."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any], path: Path) -> Targets:
        """Reads the fields.

        Args:
            fields: of ``adapter_config.json``.
            path: of the file, for errors.

        Raises:
            CheckpointError: a field has a wrong type.
        """
        value = fields.get("target_modules")
        if value is None:
            raise refusal(path, "target_modules", value, "write the list of the adapter's modules into the file")
        included: _Names | None = None
        if not isinstance(value, str) or value.lower() != "all-linear":
            included = _names(value, "target_modules", path)
        excluded = _names(fields.get("exclude_modules") or [], "exclude_modules", path)
        layers, patterns = fields.get("layers_to_transform"), fields.get("layers_pattern") or []
        if layers is None or layers == []:
            return cls(included, excluded, path=path)
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
        before_index = tuple(
            Pattern(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", "index", "layers_pattern", pattern)
            for pattern in patterns
        )
        return cls(included, excluded, frozenset(indices), before_index, path)

    @property
    def groups(self) -> Sequence[Sequence[Pattern]]:
        """The patterns, as ``first_matches`` takes them."""
        excluded, included = [[one] if isinstance(one, Pattern) else [] for one in (self.excluded, self.included)]
        return excluded, included, self.indices

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the modules that are adapted.

        Args:
            names: of linear modules, without the output head, in the model that the adapter was trained with.

        Raises:
            CheckpointError: as ``first_matches``, whose cost this has.
        """
        names = tuple(names)
        return self.selected(names, first_matches(self.groups, names, self.path))

    def selected(self, names: Iterable[str], matches: Sequence[Mapping[str, Match]]) -> frozenset[str]:
        """Returns the modules that are adapted, see ``select``.

        Args:
            names: of modules.
            matches: of ``groups`` with the names.
        """
        excluded, included, indices = matches
        return frozenset(
            name
            for name in names
            if not _matches(self.excluded, name, excluded)
            and (self.included is None or _matches(self.included, name, included))
            and self._is_in_layers(name, indices)
        )

    def _is_in_layers(self, name: str, indices: Mapping[str, Match]) -> bool:
        if self.layers is None or (isinstance(self.included, frozenset) and name in self.included):
            return True
        if self.indices:  # an alternative in layers_pattern may match without an index
            index = indices[name].layer if name in indices else ""
        else:
            index = match["index"] if (match := _FIRST_INDEX.match(name)) else ""
        return index.isdecimal() and len(index) <= _MAX_DIGITS and int(index) in self.layers


def _names(value: object, field: str, path: Path) -> _Names:
    """Returns the names in a field that is a list of them or a pattern."""
    if isinstance(value, str):
        return Pattern(value, "whole", field, value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal(
            path, field, value, "it must be a list of names or a regular expression; save the adapter again"
        )
    return frozenset(value)


def _matches(names: _Names, name: str, matches: Mapping[str, Match]) -> bool:
    if isinstance(names, Pattern):
        return name in matches
    return name in names or any(name[dot.end() :] in names for dot in re.finditer(r"\.", name))
