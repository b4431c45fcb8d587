"""Breakpoints in chat messages, as prefixes of the prompt to pin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from radixkv.errors import InvalidRequest
from radixkv.frontend.prompt_encoding import PromptEncoder
from radixkv.tree.neighbours import n_common_tokens
from radixkv.wire.messages import PromptPin
from radixkv.wire.request_limits import parse_ttl

_MAX_INLINE_CHARACTERS = 1 << 15
"""Up to this many characters, a prompt is searched on the event loop."""


class _Text(NamedTuple):
    """A message's text, or a part of it."""

    text: str
    ttl_s: float | None
    """How long the prompt up to its end is pinned; None without a breakpoint."""


def check_breakpoints(messages: Sequence[dict[str, Any]], default_ttl_s: float) -> None:
    """Raises ``InvalidRequest`` for a malformed breakpoint; its text never repeats a part of the body."""
    for _ in _texts(messages, default_ttl_s):
        pass


async def breakpoint_pins(
    messages: Sequence[dict[str, Any]],
    text: str,
    tokens: bytes,
    encoder: PromptEncoder,
    *,
    default_ttl_s: float,
    max_pins: int,
) -> list[PromptPin]:
    """Returns the pins of the latest breakpoints in the messages.

    A pin ends with the marked part, which is searched in the prompt after the end of the part before it. So it ends
    earlier where the template itself writes the same text between them, such as the name of a role. If the template
    changes the marked part, the pin ends with the last part before it that is in the prompt.

    Args:
        messages: in OpenAI's format, with breakpoints that ``check_breakpoints`` accepts.
        text: the prompt that the chat template makes of the messages.
        tokens: the ids of the prompt.
        encoder: has encoded the text, and encodes beginnings of it.
        default_ttl_s: lifetime of a breakpoint that names none, in seconds.
        max_pins: most pins; the latest breakpoints win.

    Cost: without a breakpoint O(parts); else a search in the text, of all of it for each part that the template
    changes, and the encoding of up to four prefixes. Long texts are searched in a thread.
    """
    parts = list(_texts(messages, default_ttl_s))
    if all(part.ttl_s is None for part in parts):
        return []
    if len(text) <= _MAX_INLINE_CHARACTERS:
        pins = _marked_ends(parts, text)
    else:
        pins = await encoder.served_model.one_at_a_time.run(partial(_marked_ends, parts, text))
    pinned = []
    for position, ttl_s in pins[-max_pins:]:
        prefix = (await encoder.conversation(text[:position])).tokens
        pinned.append(PromptPin(n_common_tokens(prefix, tokens), ttl_s))
    return pinned


def _texts(messages: Sequence[dict[str, Any]], default_ttl_s: float) -> Iterator[_Text]:
    """Yields the texts of the messages in order."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            yield _Text(content, None)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield _Text(text, _ttl(part, default_ttl_s, f"messages[{index}].content[{number}]"))


def _ttl(part: dict[str, Any], default_ttl_s: float, path: str) -> float | None:
    """Returns how long a part's breakpoint lives; None without one. Raises ``InvalidRequest``."""
    marker = part.get("prompt_cache_breakpoint")
    if marker is None:
        return None
    if not isinstance(marker, dict) or marker.get("mode") != "explicit":
        raise InvalidRequest(
            f'{path}.prompt_cache_breakpoint must be an object with "mode": "explicit"', param="messages"
        )
    ttl = marker.get("ttl")
    if ttl is None:
        return default_ttl_s
    if not isinstance(ttl, str):
        raise InvalidRequest(f"{path}.prompt_cache_breakpoint.ttl must be a text such as 30m", param="messages")
    return parse_ttl(ttl, "messages")


def _marked_ends(parts: list[_Text], text: str) -> list[tuple[int, float]]:
    """Returns where the parts with a breakpoint end in the prompt's text, and how long each is pinned."""
    ends: list[tuple[int, float]] = []
    position = 0
    for part in parts:
        position = max(position, _end(text, part.text, position), _end(text, part.text.strip(), position))
        if part.ttl_s is not None:
            ends.append((position, part.ttl_s))
    return ends


def _end(text: str, part: str, start: int) -> int:
    """Returns where the first occurrence of a part from ``start`` on ends; 0 without one."""
    found = text.find(part, start)
    return 0 if found < 0 else found + len(part)
