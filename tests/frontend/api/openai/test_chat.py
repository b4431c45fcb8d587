"""OpenAI's chat API, on a runtime that echoes the rendered conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.api.openai.schema import parse_chat
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import MAX_MODEL_LEN, ScriptedLoop, Site
from support.site_requests import check_refusal, events

HELLO = [{"role": "user", "content": "hello"}]
RENDERED = "<user>hello<assistant>"


def post(site: Site, messages: Any = HELLO, **body: Any) -> httpx.Response:
    return site.http.post("/v1/chat/completions", json={"messages": messages, **body})


def stream(site: Site, **body: Any) -> list[dict[str, Any]]:
    return events(site, "/v1/chat/completions", **{"messages": HELLO, **body})


PromptText = Callable[..., str]


@pytest.fixture
def prompt_text(site: Site, tokenizer: Tokenizer) -> PromptText:
    """Returns a function that renders a request to the text that the runtime gets."""

    def prompt_text(messages: Any = HELLO, **body: Any) -> str:
        reply = post(site, messages, max_tokens=1, **body)
        assert reply.status_code == 200, reply.text
        return tokenizer.decode(unpack_tokens(site.loop.submitted[-1].tokens))

    return prompt_text


def test_a_response_has_all_fields_that_openai_clients_read(site: Site) -> None:
    body = post(site, model="echo", max_tokens=7).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "echo"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<user>h", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    n_prompt = len(RENDERED)
    assert body["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 7,
        "total_tokens": n_prompt + 7,
        "prompt_tokens_details": {"cached_tokens": n_prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 9},
        {"max_tokens": 90, "stop": "lo<"},
        {"max_completion_tokens": 5, "n": 3},
        {"max_tokens": 40, "n": 2, "stop": "hel"},
        {"max_tokens": 3, "messages": [{"role": "user", "content": "日本"}]},
        {"max_tokens": 6, "logprobs": True, "top_logprobs": 3},
    ],
    ids=str,
)
def test_streaming_equals_not_streaming(site: Site, body: dict[str, Any]) -> None:
    whole = post(site, **body, return_token_ids=True).json()
    streamed = stream(site, **body, return_token_ids=True, stream_options={"include_usage": True})
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    usage = streamed.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed)
    for expected in whole["choices"]:
        own_events = [event for event in streamed if event["choices"][0]["index"] == expected["index"]]
        assert own_events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        chunks = [event["choices"][0] for event in own_events]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["delta"] for chunk in chunks[1:])
        assert "".join(chunk["delta"]["content"] for chunk in chunks) == expected["message"]["content"]
        assert [token for chunk in chunks[1:] for token in chunk["token_ids"]] == expected["token_ids"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
            expected["finish_reason"]
        ]
        assert chunks[-1]["stop_reason"] == expected["stop_reason"]
        if expected["logprobs"] is not None:
            entries = [entry for chunk in chunks[1:] for entry in chunk["logprobs"]["content"]]
            assert entries == expected["logprobs"]["content"]


def test_the_template_gets_the_clients_variables(prompt_text: PromptText) -> None:
    assert prompt_text() == RENDERED
    assert prompt_text(add_generation_prompt=False) == "<user>hello"
    assert prompt_text(chat_template_kwargs={"mood": "happy"}) == "<user>hellohappy<assistant>"
    assert prompt_text(reasoning_effort="low") == "<user>hellolow(on)<assistant>"
    assert prompt_text(reasoning_effort="none") == "<user>hello<assistant>"
    off = {"enable_thinking": False}
    assert prompt_text(reasoning_effort="low", chat_template_kwargs=off) == "<user>hellolow<assistant>"
    roles = ["system", "developer", "user", "assistant", "tool"]
    messages = [{"role": role, "content": role[0], "name": "someone"} for role in roles]
    assert prompt_text(messages) == "".join(f"<{role}>{role[0]}" for role in roles) + "<assistant>"


def test_contents_are_texts_or_text_parts(prompt_text: PromptText) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_text([{"role": "user", "content": parts}]) == "<user>one\ntwo<assistant>"
    assert prompt_text([{"role": "user", "content": []}]) == "<user><assistant>"


def test_calls_in_the_history_reach_the_template_as_objects(prompt_text: PromptText) -> None:
    function = {"name": "add", "arguments": '{"a": "é"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "3", "tool_call_id": "1"})
    assert prompt_text(messages) == '<user>hello<assistant>{"a": "é"}<tool>3<assistant>'


def test_the_last_message_is_continued(site: Site, prompt_text: PromptText) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    assert prompt_text(messages, continue_final_message=True) == "<user>hello<assistant>Once upon"
    refused = post(site, messages, continue_final_message=True, add_generation_prompt=True)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_special_tokens_of_the_template_are_encoded_and_none_is_added(site: Site) -> None:
    post(site, [{"role": "user", "content": "<eos>"}], max_tokens=1)
    ids = unpack_tokens(site.loop.submitted[-1].tokens)
    assert ids.count(256) == 1
    assert len(ids) == len("<user>" + "<assistant>") + 1


def test_an_answer_may_have_the_rest_of_the_context(site: Site) -> None:
    body = post(site).json()
    assert body["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert site.loop.submitted[-1].sampling.logprobs is None
    assert body["choices"][0]["finish_reason"] == "length"
    room = MAX_MODEL_LEN - len(RENDERED)
    assert post(site, max_tokens=room).status_code == 200
    for field in ("max_tokens", "max_completion_tokens"):
        error = post(site, **{field: room + 1}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert post(site, max_tokens=1, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "invalid_request", "messages"),
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": "hello"}, "invalid_request", "messages"),
    ({"messages": ["hello"]}, "invalid_request", "messages"),
    ({"messages": [{"content": "a"}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "", "content": "a"}]}, "invalid_request", "messages"),
    ({"messages": [{"role": 3, "content": "a"}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user"}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": [3]}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_feature", "messages"),
    ({"messages": [{"role": "user", "content": "a", "name": 3}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "invalid_request", "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "invalid_request",
        "messages",
    ),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "invalid_request", "messages"),
    ({"messages": [{"role": "u"}] * 4097}, "invalid_request", "messages"),
    ({"max_completion_tokens": 0}, "invalid_request", "max_completion_tokens"),
    ({"max_completion_tokens": 1 << 31}, "invalid_request", "max_completion_tokens"),
    ({"max_tokens": -1}, "invalid_request", "max_tokens"),
    ({"max_tokens": 0, "stream": True}, "invalid_request", "stream"),
    ({"max_tokens": 0, "logprobs": True}, "invalid_request", "logprobs"),
    ({"max_tokens": 0, "prompt_logprobs": 0}, "invalid_request", "prompt_logprobs"),
    ({"max_tokens": 0, "n": 0}, "invalid_request", "n"),
    ({"max_tokens": 0, "n": -1}, "invalid_request", "n"),
    ({"max_tokens": 0, "temperature": -1}, "invalid_request", "temperature"),
    ({"max_tokens": 0, "stop_token_ids": [-1]}, "invalid_request", "stop_token_ids"),
    ({"logprobs": 5}, "invalid_request", "logprobs"),
    ({"top_logprobs": 1}, "invalid_request", "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "invalid_request", "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "invalid_request", "top_logprobs"),
    ({"chat_template_kwargs": "x"}, "invalid_request", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "invalid_request", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": "y" * 70_000}}, "invalid_request", "chat_template_kwargs"),
    ({"add_generation_prompt": "yes"}, "invalid_request", "add_generation_prompt"),
    ({"model": "other"}, "model_not_found", "model"),
    ({"echo": True}, "unsupported_feature", "echo"),
]


@pytest.mark.parametrize(("body", "code", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_invalid_fields_are_refused_by_name(site: Site, body: dict[str, Any], code: str, param: str) -> None:
    reply = site.http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    message = check_refusal(reply, param, code, 404 if code == "model_not_found" else 400)
    assert len(message) < 300
    assert post(site, max_tokens=6).json()["choices"][0]["message"]["content"] == RENDERED[:6]


@pytest.mark.parametrize("item", [b"{},", b"[],", b'{"a":[0,0]},'])
def test_too_many_values_in_messages_are_not_decoded(item: bytes) -> None:
    with pytest.raises(ContextLengthExceeded, match="brackets and commas") as caught:
        parse_chat(b'{"messages": [' + item * 34_000 + b"1]}", MAX_MODEL_LEN)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="; it must be an object"):
        parse_chat(b'{"messages": [' + item * 3_000 + b"1]}", MAX_MODEL_LEN)


def test_the_longest_context_still_limits_a_conversation() -> None:
    message = f"messages has 1400003 brackets and commas; at most {1 << 19} a request"
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse_chat(b'{"messages": [{"content": [' + b"[]," * 700_000 + b"1]}]}", 1 << 23)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")


def test_a_checkpoint_without_a_template_is_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for has_tokenizer in (True, False):
        ready = ScriptedLoop().ready
        served_model = ServedModel(
            name="echo", root="echo", ready=ready, tokenizer=tokenizer if has_tokenizer else None, created=0
        )
        folder = tmp_path / str(has_tokenizer)
        folder.mkdir()
        with running_site(served_model, folder) as site:
            error = post(site).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_request", "messages")
            assert "--chat-template" in error["message"]


def test_the_sampling_settings_of_the_checkpoint_are_defaults(served_model: ServedModel, tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    with running_site(
        replace(served_model, default_sampling={**recommended, "max_new_tokens": 30}), tmp_path
    ) as site:
        assert post(site).json()["usage"]["completion_tokens"] == 30
        sampling = site.loop.submitted[-1].sampling
        assert {name: getattr(sampling, name) for name in recommended} == recommended
        settings = {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        assert post(site, **settings, max_tokens=40).json()["usage"]["completion_tokens"] == 30
        sampling = site.loop.submitted[-1].sampling
        assert [getattr(sampling, name) for name in recommended] == [0, 1.0, 0, 0, 1]
