"""The borders between the parts of an answer."""

from __future__ import annotations

import secrets

from radixkv.generation.parsers.json_calls import CallPiece
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart

_ID_BYTES = 5
_ID_CHARACTERS = 9
"""Some chat templates take only ids of nine letters and digits."""


class PartWriter:
    """Collects the parts of an answer, without the white space between parts of different kinds.

    The answer's text keeps the indentation of its first line, which a regular expression may demand. White space at
    the end of a text is held back until more text of the same kind follows, or the answer ends.
    """

    def __init__(self) -> None:
        self.n_calls = 0
        self._parts: list[Part] = []
        self._kind: type[Part] | None = None
        """The kind of the last part."""
        self._has_text = False
        """Whether the last part has text yet."""
        self._space = ""

    def add_text(self, kind: type[TextPart] | type[ReasoningPart], text: str) -> None:
        """Adds text of one kind."""
        if kind is not self._kind:
            # An answer that begins with white space keeps it.
            self._has_text = self._kind is None and kind is TextPart
            self._kind, self._space = kind, ""
        if not self._has_text:
            text = self._hold_indentation(text)
        shown = text.rstrip()
        if shown:
            self._has_text = True
            self._parts.append(kind(self._space + shown))
            self._space = ""
        self._space += text[len(shown) :]

    def _hold_indentation(self, text: str) -> str:
        """Returns text from its first character that is no white space on; holds back what stands before it."""
        rest = text.lstrip()
        if self._kind is TextPart:
            _, newline, indentation = text[: len(text) - len(rest)].rpartition("\n")
            self._space = indentation if newline else self._space + indentation
        return rest

    def break_line(self, kind: type[TextPart] | type[ReasoningPart]) -> None:
        """Begins a new line if more text of the same kind follows, such as another message of the same answer."""
        if kind is self._kind and self._has_text:
            self._space += "\n"

    def add_call(self, piece: CallPiece) -> None:
        """Adds what is new of a call."""
        self._kind, self._space = ToolCallPart, ""
        if piece.name is None:
            self._parts.append(ToolCallPart(self.n_calls - 1, arguments=piece.arguments))
            return
        call_id = secrets.token_hex(_ID_BYTES)[:_ID_CHARACTERS]
        self._parts.append(ToolCallPart(self.n_calls, call_id, piece.name, piece.arguments))
        self.n_calls += 1

    def take(self) -> list[Part]:
        """Returns the parts since the last call of this method."""
        parts, self._parts = self._parts, []
        return parts

    def continue_prompt(self) -> None:
        """Drops the text of the prompt, which the answer continues."""
        self._parts = [part for part in self._parts if isinstance(part, ToolCallPart)]
        self._space = ""

    def finish(self) -> list[Part]:
        """Returns the rest at the end of the answer."""
        if self._kind is TextPart and self._has_text and self._space:
            self._parts.append(TextPart(self._space))
        self._space = ""
        return self.take()
