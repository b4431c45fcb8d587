"""Chats with tools are rendered by the template named ``tool_use``, wherever they come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM
from radixkv.checkpoints import resolve
from radixkv.errors import UnsupportedFeature
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.lab.simulator.recording import read_recording
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import Site

NAMED = {
    "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "tool_use": (
        "{% for t in tools %}<tool>{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <tool_call> #}"
    ),
}
MESSAGES = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ALONE, WITH_TOOLS = "<user>hello", "<tool>now<user>hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of the embedded model, and two named templates."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(resolve("tiny").folder / name, folder / name)
    templates = [{"name": name, "template": source} for name, source in NAMED.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    return folder


@pytest.fixture
def named_site(served_model: ServedModel, folder: Path, tmp_path: Path) -> Iterator[Site]:
    template, tokenizer = ChatTemplate.load(folder), Tokenizer.load(folder)
    answer_format = AnswerFormat.load(folder, template)
    model = replace(served_model, chat_template=template, tokenizer=tokenizer, answer_format=answer_format)
    with running_site(model, tmp_path) as site:
        yield site


def text(folder: Path, ids: Any) -> str:
    return Tokenizer.load(folder).decode(ids, skip_special_tokens=False)


def test_every_route_renders_with_it(named_site: Site, folder: Path) -> None:
    requests: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/chat/completions", {"messages": MESSAGES}, TOOLS),
        ("/v1/responses", {"input": "hello"}, [{"type": "function", **FUNCTION}]),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 4},
            [{"name": "now", "input_schema": FUNCTION["parameters"]}],
        ),
    ]
    for path, body, tools in requests:
        for more, expected in (({}, ALONE), ({"tools": tools}, WITH_TOOLS)):
            reply = named_site.http.post(path, json=body | more)
            assert reply.status_code == 200, reply.text
            assert text(folder, unpack_tokens(named_site.loop.submitted[-1].tokens)) == expected
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}
    assert named_site.http.post("/v1/chat/completions", json=body).status_code == 200
    assert text(folder, unpack_tokens(named_site.loop.submitted[-1].tokens)) == WITH_TOOLS
    reply = named_site.http.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()
    assert text(folder, reply["tokens"]) == WITH_TOOLS
    explained = named_site.http.post("/cache/explain", json={"messages": MESSAGES, "tools": TOOLS}).json()
    assert explained["prompt_tokens"] == reply["count"]


def test_offline_chats_render_with_it(folder: Path) -> None:
    settings = {"tokenizer": str(folder), "load_format": "dummy", "max_total_tokens": 1024}
    with LLM("tiny", **settings) as llm:
        assert text(folder, llm.chat_prompt(MESSAGES)) == ALONE
        assert text(folder, llm.chat_prompt(MESSAGES, tools=TOOLS)) == WITH_TOOLS
    with LLM("tiny", **settings, chat_template="default") as llm:
        assert text(folder, llm.chat_prompt(MESSAGES)) == ALONE
        with pytest.raises(UnsupportedFeature, match="does not show tools"):
            llm.chat_prompt(MESSAGES, tools=TOOLS)


def test_recorded_requests_render_with_it(folder: Path, tmp_path: Path) -> None:
    requests = {ALONE: {}, WITH_TOOLS: {"tools": TOOLS}}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"messages": MESSAGES, **more}) + "\n" for more in requests.values()))
    traffic = read_recording(log, tokenizer=str(folder)).traffic
    for index, expected in enumerate(requests):
        assert text(folder, unpack_tokens(traffic.symbols(index))) == expected
