"""Which answers a chat pauses after, and which of them a prompt goes on from, in every API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from support.live import wait_for
from support.running_site import running_site
from support.scripted_runtime import EOS, Site
from support.site_requests import events, post
from support.small_tokenizers import byte_letters

TEMPLATE = ChatTemplate(
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ tools | tojson if tools and false }}{# <tool_call> #}",
    {},
    "the test",
)
TOKENIZER = Tokenizer(byte_letters([], ["<eos>"], ["<eos>"]))
CALLS = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "fg")
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in "fg"]
QUESTION = {"role": "user", "content": "hello?"}


def encoded(text: str) -> list[int]:
    ids = TOKENIZER.encode(text, adds_special_tokens=False)
    return list(memoryview(ids).cast("i"))


def start(served_model: ServedModel, folder: Path, **settings: Any) -> Any:
    answer_format = AnswerFormat.load(folder, TEMPLATE)
    ready = msgspec.structs.replace(served_model.ready, max_model_len=4096, n_pages=256)
    model = replace(
        served_model,
        ready=ready,
        tokenizer=TOKENIZER,
        chat_template=TEMPLATE,
        answer_format=answer_format,
        **settings,
    )
    return running_site(model, folder)


@pytest.fixture
def site(served_model: ServedModel, tmp_path: Path) -> Iterator[Site]:
    """A site whose model answers with ``hi``."""
    with start(served_model, tmp_path) as site:
        site.loop.answers = [[*encoded("hi"), EOS]]
        yield site


@pytest.fixture
def calling_site(site: Site) -> Site:
    """A site whose model calls two tools."""
    site.loop.answers = [[*encoded(CALLS), EOS]]
    return site


def chat(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    reply = post(site, "/v1/chat/completions", messages=messages, tools=FUNCTIONS, **changes)
    answer = reply["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": "1"} for one in answer.get("tool_calls") or ()
    ]
    return [*messages, answer, *(results or [QUESTION])]


def streamed_chat(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    chunks = events(site, "/v1/chat/completions", messages=messages, tools=FUNCTIONS, **changes)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or () if call.get("id")]
    made = [
        {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": "{}"}}
        for call in calls
    ]
    text = "".join(delta.get("content") or "" for delta in deltas)
    answer = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    return [*messages, answer, *(results or [QUESTION])]


def responses(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    tools = [
        {"type": "function", **function["function"], "parameters": {}, "strict": False} for function in FUNCTIONS
    ]
    output = post(site, "/v1/responses", input=messages, tools=tools, **changes)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in output
        if item["type"] == "function_call"
    ]
    return [*messages, *output, *(results or [QUESTION])]


def message(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    tools = [{"name": function["function"]["name"], "input_schema": {"type": "object"}} for function in FUNCTIONS]
    content = post(site, "/v1/messages", messages=messages, max_tokens=500, tools=tools, **changes)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "1"}
        for block in content
        if block["type"] == "tool_use"
    ]
    return [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": results or "hello?"}]


APIS = pytest.mark.parametrize("turn", [chat, streamed_chat, responses, message])
Turn = Callable[..., list[Any]]


def pauses(site: Site, n_pauses: int) -> list[tuple[str, tuple[str, ...]]]:
    """Returns answer and tools of each pause; a client may have the answer before the pause begins."""
    wait_for(lambda: len(site.loop.paused) == n_pauses, "a pause does not begin")
    return [(one.request_id, one.tools) for one in site.loop.paused]


@APIS
def test_each_prompt_says_from_which_answer_it_goes_on(site: Site, turn: Turn) -> None:
    messages: list[Any] = [QUESTION]
    for _ in range(3):
        messages = turn(site, messages)
    names = [one.id for one in site.loop.submitted]
    assert [one.resumes for one in site.loop.submitted] == ["", *names[:2]]
    assert pauses(site, 3) == [(name, ()) for name in names]


@APIS
def test_the_runtime_is_told_which_tools_an_answer_has_called(calling_site: Site, turn: Turn) -> None:
    messages = turn(calling_site, [QUESTION])
    turn(calling_site, messages)
    first, second = (one.id for one in calling_site.loop.submitted)
    assert calling_site.loop.submitted[1].resumes == first
    assert pauses(calling_site, 2) == [(first, ("f", "g")), (second, ("f", "g"))]


def test_no_other_salt_goes_on_from_an_answer(site: Site) -> None:
    messages = chat(site, [QUESTION])
    chat(site, messages, cache_salt="other")
    assert site.loop.submitted[1].resumes == ""


@pytest.mark.parametrize("changes", [{"n": 2}, {"max_tokens": 1}, {"stop": "h"}])
def test_no_pause_begins_where_nobody_can_go_on_from_one_answer(site: Site, changes: dict[str, Any]) -> None:
    site.loop.answers *= 2
    chat(site, [QUESTION], **changes)
    chat(site, [QUESTION])
    assert [name for name, _ in pauses(site, 1)] == [site.loop.submitted[1].id]


def test_a_server_may_be_told_not_to_learn_pauses(served_model: ServedModel, tmp_path: Path) -> None:
    with start(served_model, tmp_path, learns_pauses=False) as site:
        site.loop.answers = [[*encoded("hi"), EOS]]
        chat(site, chat(site, [QUESTION]))
        assert not any(one.may_pause for one in site.loop.submitted)
        site.http.get("/metrics")  # the runtime has answered all that was sent before
        assert not site.loop.paused


@APIS
def test_a_client_says_how_long_a_pause_takes(site: Site, turn: Turn) -> None:
    turn(site, [QUESTION], expected_pause_s=12.5)
    assert site.loop.submitted[0].expected_pause_s == 12.5


@pytest.mark.parametrize("pause", [-1, 1e9, "soon"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [QUESTION]}),
        ("/v1/responses", {"input": "hello?"}),
        ("/v1/messages", {"messages": [QUESTION], "max_tokens": 5}),
    ],
)
def test_pauses_that_are_none_are_refused(site: Site, path: str, body: dict[str, Any], pause: object) -> None:
    reply = site.http.post(path, json=body | {"expected_pause_s": pause})
    assert reply.status_code == 400
    assert "expected_pause_s" in reply.text
