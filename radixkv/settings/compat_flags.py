"""Flags under the names of vLLM and SGLang."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from radixkv.settings.compat import ALIASES, ALWAYS_ON_FLAGS, Place, Refusal, refusals


def spellings(setting: str) -> list[str]:
    """Returns the flags of a setting: ours, then other engines'."""
    aliases = (alias for places, names in ALIASES.items() if Place.FLAG in places for alias in names.items())
    return [_flag(setting), *(_flag(alias) for alias, name in aliases if name == setting)]


def add_always_on_flags(parser: argparse.ArgumentParser, place: Place) -> None:
    """Adds the flags that turn on what radixkv always does; they have no effect."""
    parser.add_argument(
        *map(_flag, ALWAYS_ON_FLAGS[place].split()),
        dest="always_on",
        action="store_true",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of features that radixkv lacks, which are refused by name unless they ask for nothing."""
    for name, refusal in refusals(Place.FLAG).items():
        if refusal.implied_by is None:
            parser.add_argument(_flag(name), action=_RefusedFlag, refusal=refusal)
        else:
            parser.add_argument(_flag(name), action="store_true", help=argparse.SUPPRESS)


def check_implied_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, setting: str) -> None:
    """Refuses flags that ask for what one of our settings does. For when that setting is not given."""
    for name, refusal in refusals(Place.FLAG).items():
        if refusal.implied_by == setting and vars(args)[name]:
            parser.error(str(refusal.error(name=_flag(name))))


def _flag(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")


class _RefusedFlag(argparse.Action):
    """Ends the command with wrong usage, unless the value is one of the accepted ones."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, refusal: Refusal) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._refusal = refusal
        self._accepted = {str(value) for value in refusal.accepts if not isinstance(value, bool)}

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values not in self._accepted:
            parser.error(str(self._refusal.error(name=option_string)))
