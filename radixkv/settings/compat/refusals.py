"""Refusals of the names of features that radixkv lacks, by place."""

from __future__ import annotations

import json
from dataclasses import dataclass

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.settings.compat.table import EMPTY_OBJECT_ASKS, REFUSED, Place


@dataclass(frozen=True)
class Refusal:
    """The refusal of one name in one place."""

    name: str
    reason: str
    """The text after the name and its value."""
    accepts: tuple[object, ...] = ()
    """Values that ask for nothing, besides None and empty ones."""
    same_as: str | None = None
    """The field of the same body whose value also asks for nothing."""
    implied_by: str | None = None
    """Our setting besides which the name asks for nothing."""
    kind: type[InvalidRequest] = UnsupportedFeature
    shows_value: bool = True

    def asks_for_nothing(self, value: object) -> bool:
        """Returns whether a value may be ignored: None, an empty text or collection, or an accepted value."""
        if value is None or (isinstance(value, str | list | tuple) and not value):
            return True
        if isinstance(value, dict) and not value:
            return self.name not in EMPTY_OBJECT_ASKS
        return any(_equals(value, accepted) for accepted in self.accepts)

    def error(self, shown_value: str = "", *, name: str | None = None) -> InvalidRequest:
        """Returns the error.

        Args:
            shown_value: the value as text, if it may be repeated.
            name: the name as the user spelled it, if that differs.
        """
        shown = f" {shown_value}" if shown_value and self.shows_value else ""
        return self.kind(f"{name or self.name}{shown} {self.reason}", param=self.name)


def refusals(place: Place, default: str = "leave it out") -> dict[str, Refusal]:
    """Returns the refusals of a place by name.

    Args:
        place: where the names are given.
        default: what to do about names for which the table does not say it.
    """
    found: dict[str, Refusal] = {}
    for refused in REFUSED:
        why = f": {refused.reason}" if refused.reason else " in this release"
        reason = f"is not supported{why}; {refused.instead or default}"
        for each in " ".join(names for places, names in refused.names.items() if place in places).split():
            name, has_values, values = each.partition("=")
            accepts = tuple(json.loads(value) for value in values.split("|")) if has_values else ()
            found[name] = Refusal(name, reason, accepts, refused.same_as, refused.implied_by)
    return found


def _equals(value: object, accepted: object) -> bool:
    """Whether the values are equal and of one type; an int may equal a float, but True does not equal 1."""
    are_numbers = type(value) in (int, float) and type(accepted) in (int, float)
    return (are_numbers or type(value) is type(accepted)) and value == accepted
