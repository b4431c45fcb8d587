"""What the runtime refuses to compile is an error that names the field of the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.scripted_runtime import Site

SCHEMA = {"type": "object", "not": {}}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

GIVEN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "guided_regex": "("}, "guided_regex"),
    ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ("/v1/chat/completions", {**CHAT, "regex": "("}, "regex"),
    ("/v1/chat/completions", {**CHAT, "ebnf": "("}, "ebnf"),
    ("/v1/chat/completions", {**CHAT, "tools": [STRICT]}, "tools"),
    ("/v1/chat/completions", {**CHAT, "tools": [STRICT], "response_format": FORMAT}, "response_format"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", **STRICT["function"]}]}, "tools"),
    (
        "/v1/messages",
        {**CHAT, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config",
    ),
    (
        "/v1/messages",
        {**CHAT, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
        "tools",
    ),
    ("/generate", {"text": "a", "sampling_params": {"regex": "("}}, "regex"),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{"regex": "("}, {}]}, "regex"),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{"regex": "("}, {"ebnf": "("}]}, "sampling_params"),
]


@pytest.mark.parametrize(("path", "body", "param"), GIVEN, ids=lambda value: json.dumps(value)[:40])
@pytest.mark.parametrize("streams", [False, True])
def test_the_error_names_the_field_of_the_request(
    agent_site: Site, path: str, body: dict[str, Any], param: str, streams: bool
) -> None:
    agent_site.loop.refuses_grammars = True
    reply = agent_site.http.post(path, json={**body, "stream": streams})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
