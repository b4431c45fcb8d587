"""Calls of tools that a model writes in Qwen3-Coder's XML, read while the text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from radixkv.generation.parsers.argument_types import argument_types, argument_value
from radixkv.generation.parsers.json_calls import CallPiece

_BEGIN = re.compile(r"<parameter=([^>\n]{1,256})>\n?")
_MAX_BEGIN = 268
"""Characters of the longest beginning."""
_END = re.compile(r"\n?</parameter>|\n(?=<parameter=[^>\n]{1,256}>)")
"""A value without its end ends where a line begins the next one."""
_PARTS = "|".join("</parameter>"[:n] for n in range(1, len("</parameter>")))
_HELD = re.compile(rf"\n?(?:{_PARTS})?\Z|\n<p[^>\n]{{0,{_MAX_BEGIN}}}\Z")
"""The end of a text that may go on as the end of a value, or as the beginning of the next one; it may be empty."""


class XmlCallReader:
    """Reads one call from ``NAME>`` and its parameters, each as ``<parameter=KEY>VALUE</parameter>``.

    Arguments become one JSON object. A text is passed on as it arrives, a value of another type when it ends.

    Args:
        parameters: schemas of the arguments, by the names of functions.
    """

    is_failed = False
    """Whether the text is no call: never, because it begins with a name."""
    is_in_string = False
    """Whether the end of the region may stand within a text: never."""
    unread = ""
    """The text after the call: none."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self.n_calls = 0
        """Calls whose name is known."""
        self._schemas = parameters
        self._schema: Mapping[str, Any] = {}
        """Of the call's arguments."""
        self._text = ""
        self._position = 0
        """Where the text begins that has not been read."""
        self._scanned = 0
        """Where the text begins in which the end of the value may be."""
        self._key: str | None = None
        """Of the value that is being read."""
        self._types: tuple[str, ...] = ()
        self._is_open = False
        """Whether the beginning of a text has been passed on."""
        self._n_arguments = 0
        self._out: list[str] = []

    def feed(self, text: str) -> list[CallPiece]:
        """Returns what the next text adds to the call. O(text)."""
        self._text = self._text[self._position :] + text
        self._scanned, self._position = self._scanned - self._position, 0
        name: str | None = None
        if not self.n_calls:
            name, mark, _ = self._text.partition(">")
            if not mark:
                return []
            self._position, self.n_calls = len(name) + 1, 1
            self._schema = self._schemas.get(name, {})
        while self._end_value() if self._key is not None else self._begin_value():
            pass
        return self._take(name)

    def finish(self, *, is_closed: bool) -> list[CallPiece]:
        """Returns the rest at the end of the text.

        Args:
            is_closed: whether the model ended the text. Otherwise it was cut, and the arguments are incomplete.
        """
        if is_closed and self.n_calls:
            if self._key is not None:
                self._add_value(self._text[self._position :].removesuffix("\n"))
            self._out.append("}" if self._n_arguments else "{}")
        return self._take(None)

    def _take(self, name: str | None) -> list[CallPiece]:
        out, self._out = "".join(self._out), []
        return [CallPiece(name, out)] if out or name is not None else []

    def _begin_value(self) -> bool:
        """Reads the beginning of the next value; returns whether it is there."""
        begin = _BEGIN.search(self._text, self._position)
        if begin is None:
            self._position = max(self._position, len(self._text) - _MAX_BEGIN)
            return False
        self._position = begin.start()
        if begin.end() == len(self._text) and not begin[0].endswith("\n"):
            return False  # the line break that belongs to it may still come
        self._key, self._position, self._scanned = begin[1], begin.end(), begin.end()
        self._types = argument_types(self._schema, begin[1])
        return True

    def _end_value(self) -> bool:
        """Reads the rest of a value, or as much as there is; returns whether its end is there."""
        end = _END.search(self._text, self._scanned)
        if end is not None:
            self._add_value(self._text[self._position : end.start()])
            self._position = end.end()
            return True
        held = _HELD.search(self._text, self._scanned)
        assert held is not None, "it may be empty"
        self._scanned = held.start()
        if self._is_plain and self._position < self._scanned:
            self._pass_on(self._text[self._position : self._scanned])
            self._position = self._scanned
        return False

    @property
    def _is_plain(self) -> bool:
        """Whether the value is its text, whatever that is."""
        return self._types in ((), ("string",))

    def _begin_argument(self) -> None:
        self._out.append(f"{', ' if self._n_arguments else '{'}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._n_arguments += 1

    def _pass_on(self, text: str) -> None:
        """Adds text to an argument."""
        if not self._is_open:
            self._begin_argument()
            self._out.append('"')
            self._is_open = True
        self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _add_value(self, text: str) -> None:
        """Adds the rest of an argument's text, or the value that it stands for."""
        if self._is_plain:
            self._pass_on(text)
            self._out.append('"')
        else:
            self._begin_argument()
            self._out.append(json.dumps(argument_value(text, self._types), ensure_ascii=False))
        self._key, self._is_open = None, False
