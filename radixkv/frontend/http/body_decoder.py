"""Decoding of JSON bodies in bounded time.

A decoding call cannot be interrupted and blocks every other request. So a body is decoded in two passes: the first
only locates the fields, and the second decodes fields whose size and structure can be served.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from radixkv.errors import InvalidRequest, context_length_exceeded, shortened
from radixkv.frontend.field_names import numbering
from radixkv.frontend.http.unknown_fields import KnownFields
from radixkv.frontend.http.validation_errors import describe_validation_error
from radixkv.settings.compat import Refusal

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
SizeCheck = Callable[[bytes, int], None]
"""Takes a field's JSON and the maximum of tokens in a prompt; raises ``InvalidRequest``."""

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that is short enough to repeat in an error."""
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(examples=[[{"role": "user", "content": "What is 2 + 2?"}]])]
"""Messages of a chat, with an example for the OpenAPI document."""
MAX_PROMPTS = 64
"""Most prompts of a request."""
MAX_FIELD_BYTES = 1 << 16
"""Longest JSON of a field without a ``SizeCheck``."""
MAX_KEYS = 1 << 16
"""Most keys of all objects in a body; each takes a third of a microsecond. A message has a few."""
MAX_MARKS = 1 << 19
"""Most brackets and commas in ``messages`` or ``tools``; each may stand for a value to decode."""
MAX_UNKNOWN_FIELDS = 64
"""Most unknown fields of an object that are compared with the known ones, and most that are named in all."""
_FREE_MARKS, _MARKS_PER_TOKEN = 1 << 14, 4
"""Brackets and commas of a conversation that fits the context: at most the first plus the second per token."""

_LONG_BYTES = 1 << 16
"""Lists of lists with longer JSON are decoded one list at a time."""

_AT_FIELD = re.compile(r"`\$\.(\w+)")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_OPENING = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
_LISTS = re.compile(rb"\s*\[\s*\[")

_lists = msgspec.json.Decoder(list[msgspec.Raw])
_ids = msgspec.json.Decoder(list[int])


class BodyDecoder(Generic[RequestT]):
    """Decodes the bodies of one endpoint; ignores unknown fields.

    Args:
        kind: the type of the request.
        checks: for each field that may be long, the check of its JSON before decoding.
        refused: by name: fields that are refused unless they ask for nothing.
        ids_field: the field that may hold lists of token ids, which ``check_prompt`` must have checked.
    """

    def __init__(
        self,
        kind: type[RequestT],
        checks: Mapping[str, SizeCheck],
        refused: Mapping[str, Refusal],
        *,
        ids_field: str | None = None,
    ) -> None:
        self._checks = checks
        self._refused = refused
        self._ids_field = ids_field
        self._request = msgspec.json.Decoder(kind)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = frozenset(kind.__struct_fields__) - refused.keys()
        self._spelling = KnownFields({*self._known, *refused})
        hints = get_type_hints(kind)
        self._choices = {name: [*_literals(hints[name])] for name in kind.__struct_fields__ if name in hints}

    def decode(self, body: bytes, max_prompt_tokens: int, misspelt: dict[str, str] | None = None) -> RequestT:
        """Decodes a body. O(length), in steps that take a few milliseconds for a megabyte.

        Args:
            body: JSON.
            max_prompt_tokens: the maximum of tokens in a prompt.
            misspelt: gets the unknown fields that are one letter from a known one, with that one.

        Raises:
            InvalidRequest: the body is not valid; the text never repeats a part of it.
        """
        _check_keys(body)
        try:
            raw_fields = self._fields.decode(body)
            fields = {name: bytes(raw) for name, raw in raw_fields.items() if name in self._known}
            if len(fields) < len(raw_fields):
                self._check_others(raw_fields, {} if misspelt is None else misspelt)
            for name, raw in fields.items():
                self._check(name, raw, max_prompt_tokens)
            ids = self._extract_ids(fields)
            # Skipped parts, such as earlier values of a repeated field, are not decoded.
            request = self._request.decode(
                b"{" + b",".join(b'"' + name.encode() + b'":' + raw for name, raw in fields.items()) + b"}"
            )
            if ids is None or self._ids_field is None:
                return request
            return msgspec.structs.replace(request, **{self._ids_field: ids})
        except msgspec.ValidationError as error:
            text = str(error)
            field = _AT_FIELD.search(text) or _MISSING_FIELD.search(text)
            choices = self._choices.get(field.group(1), ()) if field else ()
            raise InvalidRequest(
                describe_validation_error(text, choices), param=field.group(1) if field else None
            ) from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            if not body.strip():
                raise InvalidRequest("the body is empty; send the request as JSON") from None
            # msgspec's texts give at best byte positions, and a wrong cause for half of a surrogate pair.
            raise InvalidRequest("the body is not valid JSON in UTF-8") from None

    def _check_others(self, fields: Mapping[str, msgspec.Raw], misspelt: dict[str, str]) -> None:
        """Adds misspelt fields; raises the error of the first refused field that asks for something."""
        unknown = (name for name in fields if name not in self._known and name not in self._refused)
        for name in islice(unknown, MAX_UNKNOWN_FIELDS - len(misspelt)):
            if (meant := self._spelling.nearest(name)) is not None:
                misspelt[name] = meant
        for name, raw in fields.items():
            if name in self._refused:
                self._check_refused(self._refused[name], bytes(raw), fields)

    def _check_refused(self, refusal: Refusal, raw: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
        if len(raw) > MAX_FIELD_BYTES:
            raise refusal.error()
        value = msgspec.json.decode(raw)
        is_same = refusal.same_as is not None and raw == bytes(fields.get(refusal.same_as, b""))
        if not is_same and not refusal.asks_for_nothing(value):
            # Texts repeat no other part of a body than numbers and Booleans.
            shown = "true" if value is True else "false" if value is False else shortened(value)
            raise refusal.error(shown if isinstance(value, int | float) else "")

    def _extract_ids(self, fields: dict[str, bytes]) -> list[array[int]] | None:
        """Decodes long lists of token ids, and replaces them in ``fields`` with an empty list.

        Returns None if there are none.
        """
        name = self._ids_field
        if name is None or len(raw := fields.get(name, b"")) <= _LONG_BYTES or not _LISTS.match(raw):
            return None
        fields[name] = b"[]"
        try:
            # A decoding call lets no other thread run before it ends. An array takes a tenth of a list's memory,
            # and the cyclic garbage collector ignores it.
            return [array("i", _ids.decode(one)) for one in _lists.decode(raw)]
        except msgspec.ValidationError:
            raise InvalidRequest(f"{name} mixes lists of token ids with something else", param=name) from None
        except OverflowError:
            raise InvalidRequest(f"{name} has a token id outside the vocabulary", param=name) from None

    def _check(self, name: str, raw: bytes, max_prompt_tokens: int) -> None:
        if name in self._checks:
            self._checks[name](raw, max_prompt_tokens)
        elif len(raw) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} has {len(raw)} bytes of JSON; at most {MAX_FIELD_BYTES}", param=name)


def _literals(kind: object) -> Iterator[str]:
    """Yields the texts that a type allows, if it is a ``Literal`` or has one."""
    for one in get_args(kind):
        if isinstance(one, str):
            yield one
        else:
            yield from _literals(one)


def _check_keys(body: bytes) -> None:
    """Refuses bodies with more than ``MAX_KEYS`` keys: even a skipped key takes time."""
    if body.count(b":") <= MAX_KEYS:
        return
    # Without escaped quotes and spaces, a quote before a colon ends a key. Colons in texts do not count.
    n_keys = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, b" \t\r\n").count(b'":')
    if n_keys > MAX_KEYS:
        raise InvalidRequest(f"the body's objects have {n_keys} keys; at most {MAX_KEYS} a request")


def check_prompts(field: str, max_prompts: int) -> SizeCheck:
    """Returns a check of a field with prompts, as texts or token ids.

    It refuses more than ``max_prompts``, and too many token ids, by counting brackets, quotes and commas.
    """

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        opening = _OPENING.match(raw)
        if opening is None:
            return
        if opening[1] == b'"':
            # A string that ends with a backslash makes this count too low.
            check_prompt_count((raw.count(b'"') - raw.count(b'\\"')) // 2, field, max_prompts)
            return
        n_lists = raw.count(b"[") - 1
        if b'"' in raw or (n_lists and opening[1] != b"["):
            raise mixed_prompt_error(field)
        check_prompt_count(n_lists, field, max_prompts)
        for index, ids in enumerate(raw.split(b"]")):
            n_ids = ids.strip(b"[, \t\r\n").count(b",") + 1
            if n_ids > max_prompt_tokens:
                with numbering(index, n_lists):
                    raise context_length_exceeded(
                        f"the {field} has {n_ids} tokens", max_prompt_tokens, param=field, n_prompt=n_ids
                    )

    return check


def any_size(raw: bytes, max_prompt_tokens: int) -> None:
    """The check of a field that may be as long as the body: its values are counted once it is decoded. O(1)."""


check_prompt = check_prompts("prompt", MAX_PROMPTS)
"""The check of the prompts of a generation."""


def check_values(field: str) -> SizeCheck:
    """Returns a check of a field whose values are all part of the prompt.

    It refuses more values than a prompt that fits the context could have, by counting brackets and commas.
    """

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        n_marks = len(raw) - len(raw.translate(None, b",[{"))
        if n_marks > _FREE_MARKS + _MARKS_PER_TOKEN * max_prompt_tokens:
            raise context_length_exceeded(
                f"{field} has {n_marks} brackets and commas", max_prompt_tokens, param=field
            )
        if n_marks > MAX_MARKS:
            raise InvalidRequest(
                f"{field} has {n_marks} brackets and commas; at most {MAX_MARKS} a request", param=field
            )

    return check


check_messages = check_values("messages")
"""The check of chat messages."""
check_tools = check_values("tools")
"""The check of the tools of a chat."""


def mixed_prompt_error(field: str = "prompt") -> InvalidRequest:
    """Returns the error for a prompt that mixes types."""
    return InvalidRequest(
        f"{field} mixes strings, token ids and lists; give a string, strings, token ids or lists of them",
        param=field,
    )


def check_prompt_count(count: int, field: str = "prompt", max_prompts: int = MAX_PROMPTS) -> None:
    """Raises ``InvalidRequest`` for more than ``max_prompts`` prompts."""
    if count > max_prompts:
        raise InvalidRequest(f"{count} prompts; at most {max_prompts} a request", param=field)
