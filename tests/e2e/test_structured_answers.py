"""Structured outputs on a real server: answers that match, and a server without grammars."""

from __future__ import annotations

import json
from pathlib import Path

from support.live import LiveServer, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "degrees": {"type": "integer", "minimum": 0}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
CHAT = {
    "messages": [{"role": "user", "content": "The weather?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}},
    "max_tokens": 60,
    "temperature": 0,
}


def test_an_answer_matches_its_schema(sensitive: Path, tmp_path: Path) -> None:
    with serving(sensitive, tmp_path / "errors", "--grammar-backend", "xgrammar") as live:
        reply = live.http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        if choice["finish_reason"] == "stop":
            answer = json.loads(choice["message"]["content"])
            assert len(answer["city"]) <= 8
            assert answer["degrees"] >= 0
        else:
            assert choice["message"]["content"].startswith('{"city": "')


def test_a_server_without_grammars_refuses_structured_outputs(server: LiveServer) -> None:
    before = server.canary()
    reply = server.http.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 400
    assert "grammar_backend none" in reply.json()["error"]["message"]
    assert server.canary() == before
