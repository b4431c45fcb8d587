"""What replies say about the cache: read, written and neither, also of prompts that are cached whole."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from support.cases import covering
from support.live import LiveServer

PAGE = 16
PARTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def count(server: LiveServer, text: str) -> int:
    reply = server.http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": text}]})
    n_tokens: int = reply.json()["input_tokens"]
    return n_tokens


def text_of(server: LiveServer, begin: str, n_left: int) -> tuple[str, int]:
    """Returns a text whose prompt has ``n_left`` tokens more than whole pages, and the length of that prompt."""
    text = begin + " word" * 20
    for _ in range(4 * PAGE):
        if (n_tokens := count(server, text)) % PAGE == n_left:
            return text, n_tokens
        text += " x"
    pytest.fail("no text has the length")


def events(reply: Any) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def message_split(server: LiveServer, text: str, *, stream: bool) -> tuple[int, ...]:
    """Returns the three parts of a message's prompt; those of a stream must be the same from its first event on."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "stream": stream}
    reply = server.http.post("/v1/messages", json=body)
    if not stream:
        usage = reply.json()["usage"]
        return tuple(usage[part] for part in PARTS)
    found = events(reply)
    (start,) = [event["message"]["usage"] for event in found if event["type"] == "message_start"]
    (end,) = [event["usage"] for event in found if event["type"] == "message_delta"]
    assert [start[part] for part in PARTS] == [end[part] for part in PARTS]
    return tuple(end[part] for part in PARTS)


def response_split(server: LiveServer, text: str, *, stream: bool) -> tuple[int, ...]:
    """Returns the same of a response."""
    body = {"input": text, "max_output_tokens": 3, "stream": stream}
    reply = server.http.post("/v1/responses", json=body)
    usage = (events(reply)[-1]["response"] if stream else reply.json())["usage"]
    details = usage["input_tokens_details"]
    n_written, n_cached = details["cache_write_tokens"], details["cached_tokens"]
    return usage["input_tokens"] - n_written - n_cached, n_written, n_cached


@pytest.mark.parametrize(
    ("n_left", "way"), covering([0, 1, 7, 15], [*product((message_split, response_split), (False, True))])
)
def test_a_prompt_that_is_cached_is_not_written_again(
    server: LiveServer, n_left: int, way: tuple[Any, bool]
) -> None:
    split, stream = way
    server.flush_cache()
    text, n_tokens = text_of(server, "Hello", n_left)
    n_whole = n_tokens - n_left
    assert split(server, text, stream=stream) == (n_left, n_whole, 0)
    n_again = 0 if n_left else 1  # the last token of a prompt is always computed
    for _ in range(2):
        n_input, n_written, n_cached = split(server, text, stream=stream)
        assert (n_written, n_input + n_cached) == (0, n_tokens)
        assert n_cached >= n_whole - n_again


def test_what_differs_is_written(server: LiveServer) -> None:
    server.flush_cache()
    first, _ = text_of(server, "Hello", 0)
    message_split(server, first, stream=True)
    longer, n_tokens = text_of(server, first, 0)
    assert n_tokens > count(server, first)
    n_input, n_written, n_cached = message_split(server, longer, stream=True)
    assert (n_input, n_input + n_written + n_cached) == (0, n_tokens)
    assert 0 < n_written <= n_tokens - count(server, first) + PAGE
