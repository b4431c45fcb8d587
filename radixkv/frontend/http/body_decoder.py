"""Bodies to requests, in bounded time.

Decoding cannot be interrupted and holds up every other request. So a body is read in two passes: the first only
finds where each field is, and only fields whose size and structure can be served are decoded.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from typing import Annotated, Generic, TypeVar

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.http.validation_errors import worded
from radixkv.frontend.unsupported_fields import is_unbuilt, unsupported

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
SizeCheck = Callable[[bytes, int], None]
"""Takes a field's JSON and the most tokens of a prompt; raises ``InvalidRequest``."""

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that is short enough to be repeated in an error."""
MAX_PROMPTS = 64
MAX_FIELD_BYTES = 1 << 16
"""The longest JSON of a field that has no check of its own."""
MAX_KEYS = 1 << 16
"""Of all objects in a body, which take a third of a microsecond each. A message has a few."""
MAX_MARKS = 1 << 19
"""Of the brackets and commas in ``messages``, each of which may take a value to decode."""
_FREE_MARKS, _MARKS_A_TOKEN = 1 << 14, 4
"""JSON with more of them than these, for the tokens that fit, is no conversation."""

_LONG_BYTES = 1 << 16
"""Longer lists of lists are decoded one list at a time."""

_AT_FIELD = re.compile(r"`\$\.(\w+)")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_OPENING = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
_LISTS = re.compile(rb"\s*\[\s*\[")

_lists = msgspec.json.Decoder(list[msgspec.Raw])
_ids = msgspec.json.Decoder(list[int])


class BodyDecoder(Generic[RequestT]):
    """Decodes the bodies of one endpoint; unknown fields are ignored.

    Args:
        kind: the request.
        checks: for each field that may be long, what looks at its JSON before it is decoded.
        ids_field: the one that may be lists of token ids, as ``check_prompt`` lets them through.
    """

    def __init__(
        self, kind: type[RequestT], checks: Mapping[str, SizeCheck], *, ids_field: str | None = None
    ) -> None:
        self._checks = checks
        self._ids_field = ids_field
        self._request = msgspec.json.Decoder(kind)
        raw = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
        self._fields = msgspec.json.Decoder(msgspec.defstruct("_Fields", raw))

    def decode(self, body: bytes, max_prompt_tokens: int) -> RequestT:
        """The request in a body. O(length), in steps that take a few milliseconds for a megabyte.

        Raises:
            InvalidRequest: its text never holds a part of the body.
        """
        _check_keys(body)
        try:
            found = msgspec.structs.asdict(self._fields.decode(body))
            fields = {name: bytes(raw) for name, raw in found.items() if raw}
            for name, raw in fields.items():
                self._check(name, raw, max_prompt_tokens)
            ids = self._taken_ids(fields)
            # What was skipped, such as all but the last of a repeated field, is not decoded.
            request = self._request.decode(
                b"{" + b",".join(b'"' + name.encode() + b'":' + raw for name, raw in fields.items()) + b"}"
            )
            if ids is None or self._ids_field is None:
                return request
            return msgspec.structs.replace(request, **{self._ids_field: ids})
        except msgspec.ValidationError as error:
            text = str(error)
            field = _AT_FIELD.search(text) or _MISSING_FIELD.search(text)
            raise InvalidRequest(worded(text), param=field.group(1) if field else None) from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            if not body.strip():
                raise InvalidRequest("the body is empty; send the request as JSON") from None
            # Their texts tell byte positions at best, and a wrong cause for half of a surrogate pair.
            raise InvalidRequest("the body is not valid JSON in UTF-8") from None

    def _taken_ids(self, fields: dict[str, bytes]) -> list[array[int]] | None:
        """Long lists of token ids, for which ``fields`` gets an empty list; None if there are none."""
        name = self._ids_field
        if name is None or len(raw := fields.get(name, b"")) <= _LONG_BYTES or not _LISTS.match(raw):
            return None
        fields[name] = b"[]"
        try:
            # A thread that decodes lets no other run before it is done. Arrays have a tenth of the lists' size, and
            # Python looks for no cycles in them.
            return [array("i", _ids.decode(one)) for one in _lists.decode(raw)]
        except msgspec.ValidationError:
            raise InvalidRequest(f"{name} mixes lists of token ids with something else", param=name) from None
        except OverflowError:
            raise InvalidRequest(f"{name} has a token id outside the vocabulary", param=name) from None

    def _check(self, name: str, raw: bytes, max_prompt_tokens: int) -> None:
        if name in self._checks:
            self._checks[name](raw, max_prompt_tokens)
        elif len(raw) > MAX_FIELD_BYTES and is_unbuilt(name):
            raise unsupported(name)
        elif len(raw) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} has {len(raw)} bytes of JSON; at most {MAX_FIELD_BYTES}", param=name)


def _check_keys(body: bytes) -> None:
    """Refuses more keys than a request could have, whatever they are: even one that is skipped takes its time."""
    if body.count(b":") <= MAX_KEYS:
        return
    # Without escaped quotes and spaces a string that a colon follows is a key; colons in texts do not count.
    n_keys = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, b" \t\r\n").count(b'":')
    if n_keys > MAX_KEYS:
        raise InvalidRequest(f"the body's objects have {n_keys} keys; at most {MAX_KEYS} a request")


def check_prompt(raw: bytes, max_prompt_tokens: int) -> None:
    """Refuses too many prompts or ids by counting brackets, quotes and commas."""
    opening = _OPENING.match(raw)
    if opening is None:
        return
    if opening[1] == b'"':
        # Where a string ends with a backslash this counts too few.
        check_prompt_count((raw.count(b'"') - raw.count(b'\\"')) // 2)
        return
    n_lists = raw.count(b"[") - 1
    if b'"' in raw or (n_lists and opening[1] != b"["):
        raise mixed_prompt()
    check_prompt_count(n_lists)
    for ids in raw.split(b"]"):
        n_ids = ids.strip(b"[, \t\r\n").count(b",") + 1
        if n_ids > max_prompt_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {n_ids} tokens, but this model's maximum context length is {max_prompt_tokens} "
                "tokens; shorten it",
                param="prompt",
            )


def check_messages(raw: bytes, max_prompt_tokens: int) -> None:
    """Refuses more values than a conversation that fits could have, by counting brackets and commas."""
    n_marks = len(raw) - len(raw.translate(None, b",[{"))
    if n_marks > _FREE_MARKS + _MARKS_A_TOKEN * max_prompt_tokens:
        raise ContextLengthExceeded(
            f"messages has {n_marks} brackets and commas, but this model's maximum context length is "
            f"{max_prompt_tokens} tokens; shorten it",
            param="messages",
        )
    if n_marks > MAX_MARKS:
        raise InvalidRequest(
            f"messages has {n_marks} brackets and commas; at most {MAX_MARKS} a request", param="messages"
        )


def mixed_prompt() -> InvalidRequest:
    """The error of a prompt that is of several kinds."""
    return InvalidRequest(
        "prompt mixes strings, token ids and lists; give a string, strings, token ids or lists of them",
        param="prompt",
    )


def check_prompt_count(count: int) -> None:
    """Raises ``InvalidRequest`` for too many prompts."""
    if count > MAX_PROMPTS:
        raise InvalidRequest(f"{count} prompts; at most {MAX_PROMPTS} a request", param="prompt")
