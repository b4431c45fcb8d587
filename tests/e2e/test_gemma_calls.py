"""A server demands calls in Gemma 4's notation, whose marks are special tokens, of a model with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from radixkv.text.tokenizer import Tokenizer
from support.chat_templates import GEMMA_4
from support.json_schemas import closed
from support.live import LiveServer, serving

pytestmark = pytest.mark.nightly
MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
FORECAST = closed(
    town={"enum": ["Hartwell", 'the "old" town, {north}']},
    day={"type": "integer", "minimum": 1, "maximum": 31},
    note={"type": "string", "pattern": "^[a-z ]{1,6}$"},
    hours={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
)
TOOL = {"type": "function", "function": {"name": "forecast", "strict": True, "parameters": FORECAST}}
NAMED = {"type": "function", "function": {"name": "forecast"}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What will the weather be?"}]


@pytest.fixture(scope="module")
def folder(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose last ordinary tokens are the marks instead."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(sensitive, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for mark in MARKS:
        pair = merges.pop()
        token_id = vocabulary.pop("".join(pair if isinstance(pair, list) else pair.split(" ")))
        vocabulary[mark] = token_id
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": token_id, "content": mark})
    path.write_text(json.dumps(tokenizer))
    (folder / "template.jinja").write_text(GEMMA_4)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    errors = tmp_path_factory.mktemp("s") / "errors"
    flags = ("--chat-template", str(folder / "template.jinja"), "--grammar-backend", "xgrammar")
    with serving(folder, errors, *flags) as live:
        yield live


def chat(server: LiveServer, **changes: Any) -> Any:
    body = {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 300, **changes}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def deltas(reply: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines if json.loads(line)["choices"]]


def test_calls_are_demanded(server: LiveServer, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    marks = tokenizer.special_ids(MARKS)
    assert len(marks) == len(MARKS)
    calls_now = {"logit_bias": {str(marks["<|tool_call>"]): 100}}
    for seed, demand in enumerate(({"tool_choice": "required"}, {"tool_choice": NAMED}, calls_now)):
        first = chat(server, seed=seed, return_token_ids=True, **demand).json()
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "forecast"
        validate(json.loads(call["function"]["arguments"]), FORECAST)

        streamed = deltas(chat(server, seed=seed, stream=True, **demand))
        parts = [part["function"] for delta in streamed for part in delta.get("tool_calls") or []]
        assert "".join(part.get("arguments") or "" for part in parts) == call["function"]["arguments"]

        written, _, _ = tokenizer.decode(choice["token_ids"], skip_special_tokens=False).rpartition("<tool_call|>")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "dry"}
        history = [*MESSAGES, choice["message"], result]
        again = chat(server, messages=history, max_tokens=1, return_token_ids=True).json()
        shown = tokenizer.decode(again["prompt_token_ids"], skip_special_tokens=False)
        assert written.startswith("<|tool_call>call:forecast{day:")
        assert written in shown, "the template writes the call as the model did"


def test_a_schema_that_no_grammar_enforces(server: LiveServer) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "parameters": {"type": "object", "not": {}}}}
    reply = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [tool]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert "has not, which no grammar enforces" in reply.json()["error"]["message"]
    assert "call:forecast" in reply.json()["error"]["message"]
