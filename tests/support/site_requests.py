"""Requests to a site, in each of its APIs."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx

from support.scripted_runtime import Site

COMPLETIONS_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NAMED_EVENTS = ("/v1/messages", "/v1/responses")
"""APIs whose events have names; the streams of all others end with ``[DONE]``."""


def asks(text: str, n_tokens: int = 2) -> dict[str, dict[str, Any]]:
    """Returns a request for this many tokens after a text, by the path of the API."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/completions": {"prompt": text, "max_tokens": n_tokens},
        "/v1/chat/completions": {"messages": messages, "max_tokens": n_tokens},
        "/v1/responses": {"input": text, "max_output_tokens": n_tokens},
        "/v1/messages": {"messages": messages, "max_tokens": n_tokens},
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": n_tokens}},
    }


def post(site: Site, path: str, **body: Any) -> Any:
    """Returns the content of a response of status 200."""
    reply = site.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def post_bytes(site: Site, path: str, content: bytes | str) -> httpx.Response:
    """Sends a body that may be no JSON, as if it was."""
    return site.http.post(path, content=content, headers={"Content-Type": "application/json"})


def events(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    """Returns the events of a stream; checks how they are framed, named and ended."""
    reply = site.http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    *framed, rest = reply.text.split("\n\n")
    assert rest == ""
    if path not in NAMED_EVENTS:
        assert framed.pop() == "data: [DONE]"
        assert all(one.startswith("data: ") for one in framed)
        return [json.loads(one.removeprefix("data: ")) for one in framed]
    found = []
    for one in framed:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def check_refusal(
    reply: httpx.Response, param: str | None, code: str = "invalid_request", status: int = 400
) -> str:
    """Checks an error in OpenAI's form; returns its message."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    message: str = error["message"]
    return message


def until_closed(connection: socket.socket) -> bytes:
    """Returns what the server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))
