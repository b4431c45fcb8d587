"""Calls of tools in Gemma 4's notation, read while the text arrives."""

from __future__ import annotations

import json
import re
from typing import Literal

from radixkv.generation.parsers.json_calls import CallPiece

_QUOTE = '<|"|>'
"""Stands before and after a text, in which nothing is escaped."""
_BEGIN = re.compile(r"\s{0,64}call:\s{0,64}([\w.-]{1,256})\s{0,64}\{")
_MAX_BEGIN = 512
"""Characters in which a call must have begun."""
_WORD = re.compile(r'[^,:{}\[\]<"]+')
"""A key without quotes, a number, ``true``, ``false`` or ``null``."""
_TEXT = re.compile(r"[^<]+")
_JSON_TEXT = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}
"""Words that chat templates write where they print a value as Python does."""

_String = Literal["quoted", "json"]


class GemmaCallReader:
    """Reads one call from ``call:NAME{KEY:VALUE,...}``, in which texts stand between two ``<|"|>``.

    Arguments become one JSON object. A text is passed on as it arrives, another value when it ends. What cannot
    stand where it is, is skipped; texts in JSON's quotes are read, too.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        """Calls whose name is known."""
        self.is_failed = False
        """Whether the text is no call; nothing after it is read."""
        self._text = ""
        """What has not been read."""
        self._open: list[Literal["}", "]"]] = []
        """Ends of the open objects and lists."""
        self._is_first = True
        """Whether the innermost of them has nothing yet."""
        self._is_key = True
        """Whether a key comes next, in an object."""
        self._string: _String | None = None
        """How the text is quoted that is being read."""
        self._word = ""
        """What is known of a word."""
        self._out: list[str] = []

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends within a text, in which the end of the region may stand."""
        return self._string is not None

    @property
    def unread(self) -> str:
        """The text that is no call, or none yet."""
        return "" if self.n_calls else self._text

    def feed(self, text: str) -> list[CallPiece]:
        """Returns what the next text adds to the call. O(text)."""
        self._text += text
        if not self.n_calls:
            begin = _BEGIN.match(self._text)
            if begin is None:
                self.is_failed = "{" in self._text or len(self._text) > _MAX_BEGIN
                return []
            self.n_calls = 1
            self._text = self._text[begin.end() :]
            self._begin("}")
            return [CallPiece(begin[1], self._read())]
        arguments = self._read()
        return [CallPiece(None, arguments)] if arguments else []

    def finish(self, *, is_closed: bool) -> list[CallPiece]:
        """Returns the rest at the end of the text.

        Args:
            is_closed: whether the model ended the text. Otherwise it was cut, and the arguments are incomplete.
        """
        if not (is_closed and self.n_calls and self._open):
            return []
        if self._string is not None:
            self._pass_on(self._text)
            self._text = ""
            self._end_string()
        self._end_word()
        while self._open:
            self._end()
        return [CallPiece(None, self._take())]

    def _read(self) -> str:
        """Reads as much as is known. Returns what it adds to the arguments."""
        position, text = 0, self._text
        while position < len(text) and self._open:
            n_read = self._step(text, position)
            if not n_read:  # the rest of a quote may still come
                break
            position += n_read
        self._text = text[position:] if self._open else ""
        return self._take()

    def _take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _step(self, text: str, position: int) -> int:
        """Reads a piece of the text. Returns its length, 0 if more text must come before it can be read."""
        if self._string is not None:
            return self._step_in_string(text, position)
        piece = text[position]
        if (word := _WORD.match(text, position)) is not None:
            self._word += word[0]
            return len(word[0])
        if piece == "<":
            if text.startswith(_QUOTE, position):
                self._begin_string("quoted")
                return len(_QUOTE)
            return 0 if _QUOTE.startswith(text[position:]) else 1
        if piece == '"':
            self._begin_string("json")
        elif piece == ":":
            self._end_word()
        elif piece == ",":
            self._end_word()
            self._end_value()
        elif piece in ("{", "["):
            self._word = ""
            if not self._is_a_key:
                self._begin_item()
                self._begin("}" if piece == "{" else "]")
        else:
            self._end_word()
            self._end()
        return 1

    def _step_in_string(self, text: str, position: int) -> int:
        plain = (_TEXT if self._string == "quoted" else _JSON_TEXT).match(text, position)
        if plain is not None:
            self._pass_on(plain[0])
            return len(plain[0])
        if self._string == "json":
            return self._step_in_json(text, position)
        if text.startswith(_QUOTE, position):
            self._end_string()
            return len(_QUOTE)
        if _QUOTE.startswith(text[position:]):
            return 0
        self._pass_on("<")
        return 1

    def _step_in_json(self, text: str, position: int) -> int:
        """Reads the end of a text in JSON's quotes, or what is escaped in it."""
        if text[position] == '"':
            self._end_string()
            return 1
        if (escape := _ESCAPE.match(text, position)) is not None:
            self._out.append(escape[0])
            return len(escape[0])
        if _CUT_ESCAPE.match(text, position):
            return 0
        self._pass_on(text[position])
        return 1

    def _begin(self, end: Literal["}", "]"]) -> None:
        """Begins an object or a list."""
        self._open.append(end)
        self._out.append("{" if end == "}" else "[")
        self._is_first, self._is_key = True, end == "}"

    def _end(self) -> None:
        """Ends the innermost object or list."""
        self._end_value()
        self._out.append(self._open.pop())
        self._is_first, self._is_key = False, bool(self._open) and self._open[-1] == "}"

    def _end_value(self) -> None:
        """Gives a key a value that has none."""
        if self._open[-1] == "}" and not self._is_key:
            self._out.append("null")
            self._is_key = True

    def _begin_item(self) -> None:
        """Writes what stands before the next key or value."""
        is_value = self._open[-1] == "}" and not self._is_key
        if not is_value:
            self._out.append("" if self._is_first else ", ")
        self._is_first = False

    def _end_item(self) -> None:
        """Writes what stands after a key, and notes what comes next."""
        if self._open[-1] == "}":
            self._out.append(": " if self._is_key else "")
            self._is_key = not self._is_key

    def _begin_string(self, kind: _String) -> None:
        self._word = ""
        self._begin_item()
        self._out.append('"')
        self._string = kind

    def _end_string(self) -> None:
        self._out.append('"')
        self._string = None
        self._end_item()

    def _end_word(self) -> None:
        """Writes a word as a key or a value, if there is one."""
        word, self._word = self._word.strip(), ""
        if word:
            is_key = self._is_a_key
            self._begin_item()
            self._out.append(json.dumps(word, ensure_ascii=False) if is_key else _value(word))
            self._end_item()

    @property
    def _is_a_key(self) -> bool:
        return self._open[-1] == "}" and self._is_key

    def _pass_on(self, text: str) -> None:
        """Adds a part of a text to the arguments."""
        self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])


def _value(word: str) -> str:
    """Returns a word as JSON: itself if it is, else a text."""
    word = _PYTHON_WORDS.get(word, word)
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
