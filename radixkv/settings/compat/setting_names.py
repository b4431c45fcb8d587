"""Settings of Python calls under the names of other engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar, cast

from radixkv.errors import ConfigError, RadixKVError, RequestError, UnsupportedFeature, shortened
from radixkv.settings.compat.refusals import refusals
from radixkv.settings.compat.sglang_speculation import FIELDS, TWO_SPECULATIONS, speculation_of
from radixkv.settings.compat.table import ALIASES, UNITS, Place
from radixkv.settings.speculative import DEFAULT_SPECULATION
from radixkv.settings.values import as_bytes

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


class SettingNames:
    """The names by which one class or method takes its settings.

    Args:
        place: the class or method.
        callee: its name in errors.
        error: the type of the error for a setting that is given twice.
        hints: for names that belong elsewhere: what to use.
        typo_cutoff: similarity, 0 to 1, from which an unknown name counts as a misspelt known one (``difflib``).
    """

    def __init__(
        self,
        place: Place,
        callee: str,
        error: Callable[[str], RadixKVError],
        *,
        hints: Mapping[str, str] | None = None,
        typo_cutoff: float = 0.6,
    ) -> None:
        self._callee = callee
        self._error = error
        self._hints = hints or {}
        self._typo_cutoff = typo_cutoff
        self._refusals = refusals(place)
        self._joined = FIELDS if place is Place.LLM else ()
        """Names that are parts of one setting of ours."""
        self._aliases = {
            alias: name for places, aliases in ALIASES.items() if place in places for alias, name in aliases.items()
        }

    def resolve(
        self, settings: Mapping[str, object], known: Collection[str], *, by_position: Collection[str] = ()
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Returns the settings under our names, and by our name the alias that was used, if its unit is ours.

        Args:
            settings: names and values as given.
            known: our names.
            by_position: our names of the settings that are given by position.

        Raises:
            UnsupportedFeature: a name is unknown, or refused with this value.
            RadixKVError: a setting is given under two names, as the type that ``error`` makes.
        """
        resolved: dict[str, object] = {}
        used: dict[str, str] = {}
        unknown: list[str] = []
        refused: list[str] = []
        for name, value in settings.items():
            if name in known:
                resolved[name] = value
            elif name in self._aliases:
                ours = self._aliases[name].removeprefix("no_")
                if ours in settings or ours in used or ours in by_position:
                    raise self._error(f"{used.get(ours, ours)} and {name} are the same setting; give one of them")
                is_opposite = ours != self._aliases[name] and isinstance(value, bool)
                resolved[ours], used[ours] = (not value if is_opposite else self._in_our_unit(name, value)), name
            elif name in self._joined:
                continue
            elif name not in self._refusals:
                unknown.append(name)
            elif not self._refusals[name].asks_for_nothing(value):
                refused.append(name)
        for name in refused:
            if resolved.get(self._refusals[name].implied_by or "") is None:
                raise self._refusals[name].error(shortened(settings[name]))
        if unknown:
            raise self._unknown(sorted(unknown), known)
        if self._joined and (speculation := speculation_of(settings)) is not None:
            given = resolved.get("speculative_config")
            if given is not None and given is not DEFAULT_SPECULATION:
                raise self._error(TWO_SPECULATIONS)
            resolved["speculative_config"] = speculation
        return resolved, {ours: name for ours, name in used.items() if name not in UNITS}

    def _in_our_unit(self, alias: str, value: object) -> object:
        try:
            return as_bytes(value, UNITS[alias]) if alias in UNITS else value
        except ConfigError as error:
            raise self._error(f"{alias} {error}") from None

    def _unknown(self, names: list[str], known: Collection[str]) -> UnsupportedFeature:
        for name in names:
            close = get_close_matches(name, [*known, *self._aliases], 1, self._typo_cutoff)
            if advice := (
                f"use {self._hints[name]}"
                if name in self._hints
                else f"did you mean {close[0]}?"
                if close
                else None
            ):
                return UnsupportedFeature(f"{self._callee} has no setting {name}; {advice}", param=name)
        shown = ", ".join(names)
        return UnsupportedFeature(f"{self._callee} has no setting {shown}; leave it out", param=names[0])


def takes_other_names(
    names: SettingNames,
) -> Callable[[Callable[ParametersT, ResultT]], Callable[ParametersT, ResultT]]:
    """Decorates a function so that callers may use other engines' names, which its errors then show."""

    def decorate(call: Callable[ParametersT, ResultT]) -> Callable[ParametersT, ResultT]:
        parameters = signature(call).parameters.values()
        known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]

        @wraps(call)
        def with_our_names(*args: ParametersT.args, **settings: ParametersT.kwargs) -> ResultT:
            resolved, used = names.resolve(settings, known, by_position=known[: len(args)])
            with naming(used):
                return cast(Callable[..., ResultT], call)(*args, **resolved)

        return with_our_names

    return decorate


@contextmanager
def naming(used: Mapping[str, str]) -> Iterator[None]:
    """Renames settings in errors from our names, the keys, to the names that the user used."""
    try:
        yield
    except RadixKVError as error:
        error.args = (renamed(str(error), used),)
        if isinstance(error, RequestError):
            error.param = used.get(error.param or "", error.param)
        raise


def renamed(text: str, used: Mapping[str, str]) -> str:
    """Returns an error text with settings renamed. A name that is an ordinary word is renamed at the start only."""
    return re.sub(
        r"\w+", lambda word: used.get(word[0], word[0]) if "_" in word[0] or word.start() == 0 else word[0], text
    )
