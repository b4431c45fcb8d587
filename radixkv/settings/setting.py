"""``setting``: a field of a configuration, with all that its flag, its keyword of ``LLM`` and the docs need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from radixkv.errors import ConfigError
from radixkv.settings.checks import (
    Check,
    check_at_least,
    check_bool,
    check_bytes,
    check_choice,
    check_number,
    check_seconds,
    check_text,
)
from radixkv.settings.values import as_bytes, as_count, as_text, parse_number, parse_whole_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ValueT = TypeVar("ValueT")
ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


@dataclass(frozen=True)
class Kind:
    """How the values of a setting are read and checked. Each function raises ``ConfigError``."""

    check: Check = lambda name, value: None
    """Refuses wrong values; not called for None where that is the default."""
    convert: Callable[[Any], Any] = lambda value: value
    """Makes a value of ``LLM`` or of a flag ours, such as 4000 of ``4k``. The error begins with the value."""
    parse: Callable[[str], Any] = str
    """Reads the text of a flag if ``convert`` leaves it a text. The error begins with the text."""
    nargs: Literal["+"] | None = None
    """``+``: a flag takes several values, which stay texts."""

    def of_text(self, text: str) -> Any:
        """Returns the value that the text of a flag gives."""
        value = self.convert(text)
        return self.parse(value) if isinstance(value, str) else value


SWITCH = Kind(check_bool)
"""A flag without a value; with ``no_`` before its name, too, if the default is None."""
COUNT = Kind(partial(check_at_least, 1), as_count)
"""A number of tokens or other things, at least 1."""
SIZE = Kind(check_bytes, as_bytes)
"""A number of bytes."""
SECONDS = Kind(check_seconds, parse=parse_number)
FRACTION = Kind(partial(check_number, 0, 1, "a number between 0 and 1"), parse=parse_number)


def text(instead: str) -> Kind:
    """Returns the kind of texts that are not empty; the error says what to give ``instead``."""
    return Kind(partial(check_text, instead), as_text)


def choice(
    choices: tuple[str, ...],
    is_what: str = "unknown",
    convert: Callable[[Any], Any] = Kind.convert,
    *,
    show: Callable[[str], str] = str,
) -> Kind:
    """Returns the kind of texts that are one of ``choices``; the error says of others what they are."""
    return Kind(partial(check_choice, choices, is_what, show=show), convert)


def whole_number(check: Check) -> Kind:
    """Returns the kind of whole numbers that ``check`` allows."""
    return Kind(check, parse=parse_whole_number)


@dataclass(frozen=True)
class Setting:
    """What there is to know of a setting besides its type."""

    default: Any
    help: str
    """The help of its flag, in which ``%(default)s`` is the default."""
    kind: Kind
    metavar: str | None
    """What the help shows for its value; None: its name."""
    flag: str
    """Name of its flag, with underscores."""
    aliases: tuple[str, ...]
    """Other names, mostly of other engines; one with a dash at its start is for flags only."""
    opposites: tuple[str, ...]
    """Names under which a switch has the opposite value."""
    opposites_help: str
    needs_queue: bool
    """Whether only commands with a queue of requests have its flag."""


def setting(
    default: ValueT,
    help: str,
    kind: Kind,
    metavar: str | None = None,
    *,
    flag: str = "",
    aliases: str = "",
    opposites: str = "",
    opposites_help: str = "",
    needs_queue: bool = False,
    repr: bool = True,
) -> ValueT:
    """Defines a field of a configuration, as ``Setting`` says. Names are separated by spaces.

    Without ``flag`` the flag has the name of the field. The ``repr`` of a configuration leaves the value out if
    ``repr`` is False.
    """
    others, inverse = tuple(aliases.split()), tuple(opposites.split())
    one = Setting(default, help, kind, metavar, flag, others, inverse, opposites_help, needs_queue)
    return field(default=default, repr=repr, metadata={"setting": one})


def settings_of(config: type[DataclassInstance]) -> dict[str, Setting]:
    """Returns the settings of a configuration by the names of their fields."""
    found = ((one.name, cast("Setting | None", one.metadata.get("setting"))) for one in fields(config))
    return {name: one if one.flag else replace(one, flag=name) for name, one in found if one is not None}


def check_settings(config: DataclassInstance) -> None:
    """Checks each setting of a configuration by itself. Raises ``ConfigError``."""
    for name, one in settings_of(type(config)).items():
        value = vars(config)[name]
        if value is not None or one.default is not None:
            one.kind.check(name, value)


def from_values(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Returns a configuration of values by the names of its fields; other names are ignored.

    Raises:
        ConfigError: a value is wrong.
    """
    given: dict[str, Any] = {}
    for name, one in settings_of(config).items():
        try:
            if name in values:
                given[name] = one.kind.convert(values[name])
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None
    return config(**given)
