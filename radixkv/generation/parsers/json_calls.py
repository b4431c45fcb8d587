"""Calls of tools that a model writes as JSON, read while the text arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\],:]+')
"""Text within and outside strings that needs no look at each of its characters."""


@dataclass
class CallPiece:
    """What is new of a call."""

    name: str | None
    """The function's name in the first piece of a call; None in all others."""
    arguments: str


class JsonCallReader:
    """Reads calls from text with JSON objects, each of which has a name and arguments.

    Whatever stands between the objects, such as the brackets and commas of a list, is skipped. Arguments that are
    an object are passed on as they arrive, in the model's own words, once the name is known.

    Args:
        name_key: the key of the function's name.
        arguments_key: the key of the arguments.
        names: the only names that a call may have; None for any.
    """

    def __init__(self, name_key: str, arguments_key: str, names: frozenset[str] | None = None) -> None:
        self.n_calls = 0
        """Calls whose name is known."""
        self.is_failed = False
        """Whether an object is no call; nothing after it is read."""
        self.is_in_string = False
        """Whether the text so far ends within a string."""
        self._unread: list[str] = []
        self._name_key = name_key
        self._arguments_key = arguments_key
        self._names = names
        self._is_escaped = False
        self._depth = 0
        """Open brackets; an object at depth 0 is a call."""
        self._key: object = None
        """The key of the value that is being read, in a call's object; None while a key is read."""
        self._item: list[str] = []
        """The text of that key, or of that value unless it is passed on."""
        self._name: str | None = None
        self._waiting: list[str] = []
        """Arguments that wait for the name."""
        self._has_arguments = False
        self._is_streaming = False
        """Whether the text belongs to arguments that are passed on as they arrive."""
        self._pieces: list[tuple[str | None, list[str]]] = []
        """Names and arguments of the pieces that were not returned yet."""

    @property
    def unread(self) -> str:
        """The text after the last call; it is no call, or none yet."""
        return "".join(self._unread)

    def feed(self, text: str) -> list[CallPiece]:
        """Returns what the next text adds to calls. O(text)."""
        position = 0
        while position < len(text) and not self.is_failed:
            run = (_IN_STRING if self.is_in_string else _OUTSIDE).match(text, position)
            piece = text[position] if run is None or self._is_escaped else run[0]
            self._step(piece)
            if self._name is None:
                self._unread.append(piece)
            position += len(piece)
        if position < len(text):
            self._unread.append(text[position:])
        return self._take_pieces()

    def finish(self, *, is_closed: bool) -> list[CallPiece]:
        """Returns the rest at the end of the text.

        Args:
            is_closed: whether the model ended the text, so that a call without arguments has none. Otherwise it was
                cut, and the arguments may be missing.
        """
        if self._depth and not self.is_failed:
            if is_closed or self._item:
                self._end_item()
            if is_closed and self._name is not None and not self._has_arguments:
                self._pass_on("{}")
        elif not self._depth and not self.is_failed and self.n_calls:
            self._unread = []  # what stands between and after calls
        self._depth = 0
        return self._take_pieces()

    def _take_pieces(self) -> list[CallPiece]:
        pieces, self._pieces = self._pieces, []
        return [CallPiece(name, "".join(arguments)) for name, arguments in pieces]

    def _step(self, piece: str) -> None:
        """Reads a character, or several of which none has a meaning of its own here."""
        if self.is_in_string:
            self._step_in_string(piece)
        elif self._depth == 0:
            if piece == "{":
                self._begin_call()
        elif self._depth == 1 and piece == ":" and self._key is None:
            self._key = _value("".join(self._item).strip())
            self._item = []
        elif self._depth == 1 and piece == ",":
            self._end_item()
        elif self._depth == 1 and piece in ("}", "]"):
            self._end_call()
        else:
            self.is_in_string = piece == '"'
            self._depth += (piece in ("{", "[")) - (piece in ("}", "]"))
            self._add(piece)

    def _step_in_string(self, piece: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif piece == "\\":
            self._is_escaped = True
        elif piece == '"':
            self.is_in_string = False
        self._add(piece)

    def _begin_call(self) -> None:
        self._depth = 1
        self._key, self._item = None, []
        self._name, self._waiting = None, []
        self._has_arguments = self._is_streaming = False

    def _add(self, piece: str) -> None:
        """Adds text to the key or value that is being read."""
        if self._is_streaming:
            self._pass_on(piece)
            self._is_streaming = self._depth > 1
        elif piece == "{" and self._key == self._arguments_key and not (self._item or self._has_arguments):
            self._is_streaming = True
            self._pass_on(piece)
        elif self._item or not piece.isspace():
            self._item.append(piece)

    def _end_item(self) -> None:
        """Ends a value of the call's object."""
        key, item = self._key, "".join(self._item).strip()
        self._key, self._item = None, []
        if key == self._name_key and self._name is None:
            self._set_name(_value(item))
        elif key == self._arguments_key and not self._has_arguments:
            self._pass_on(_as_arguments(item))

    def _end_call(self) -> None:
        self._end_item()
        if self._name is None:
            self.is_failed = True
        elif not self._has_arguments:
            self._pass_on("{}")
        self._depth = 0
        self._name = None

    def _set_name(self, name: object) -> None:
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            self.is_failed = True
            return
        self._name, self._unread = name, []
        self.n_calls += 1
        self._pieces.append((name, self._waiting))

    def _pass_on(self, arguments: str) -> None:
        self._has_arguments = True
        if self._name is None:
            self._waiting.append(arguments)
        elif self._pieces:
            self._pieces[-1][1].append(arguments)
        else:
            self._pieces.append((None, [arguments]))


def _value(text: str) -> object:
    """Returns the value of JSON text; None if it is not JSON."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _as_arguments(item: str) -> str:
    """Returns arguments that are no object: an object that is itself encoded as a string, or ``{}`` for null."""
    value = _value(item)
    if isinstance(value, str):
        return value
    return "{}" if value is None and item in ("", "null") else item
