"""Clients recognise the errors for prompts that are too long, and may then shorten the prompt themselves.

What each client looks for, by its source:

- LiteLLM 1.106, ``exception_mapping_utils.is_error_str_context_window_exceeded``: one of some texts, in lower case.
- langchain-openai 1.7, ``_handle_openai_bad_request``: the code, or one of some texts.
- pydantic-ai has no such check of its own (issue 4060 there): its users search its errors for the words of vLLM and
  Anthropic.
- Claude Code 2.1: the words of Anthropic, and the numbers in them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from radixkv.errors import ContextLengthExceeded
from radixkv.text import chat_template
from radixkv.text.chat_template import ChatTemplate
from support.scripted_runtime import MAX_MODEL_LEN, Site


def litellm_recognises(error: dict[str, Any]) -> bool:
    return "this model's maximum context length is" in error["message"].lower()


def langchain_recognises(error: dict[str, Any]) -> bool:
    return error["code"] == "context_length_exceeded"


def vllm_users_recognise(error: dict[str, Any]) -> bool:
    return re.search(r"maximum context length is \d+ tokens\. However, ", error["message"]) is not None


def all_recognise(error: dict[str, Any]) -> bool:
    return all(f(error) for f in (litellm_recognises, langchain_recognises, vllm_users_recognise))


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * (MAX_MODEL_LEN + 1)}),
        ("/v1/completions", {"prompt": "a" * (MAX_MODEL_LEN * 9)}),
        ("/v1/completions", {"prompt": [1] * (MAX_MODEL_LEN + 1)}),
        ("/v1/completions", {"prompt": "a", "max_tokens": MAX_MODEL_LEN}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN * 9}]}),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": ""}] * 600}),
        ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": MAX_MODEL_LEN}),
        ("/v1/chat/completions", {"messages": [HELLO], "max_completion_tokens": MAX_MODEL_LEN}),
        ("/v1/chat/completions", {"messages": [HELLO] * (MAX_MODEL_LEN + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 17_000}]}),
        ("/generate", {"text": "a" * (MAX_MODEL_LEN + 1)}),
        ("/generate", {"input_ids": [1] * (MAX_MODEL_LEN + 1)}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": MAX_MODEL_LEN}}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_clients_recognise_a_request_that_is_too_long(site: Site, path: str, body: dict[str, Any]) -> None:
    reply = site.http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert all_recognise(error), error
    assert error["param"] in (*body, "max_new_tokens")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("path", "body", "field", "room"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 32_000}, "max_tokens", 511),
        ("/v1/completions", {"prompt": "a" * 511, "max_tokens": 2}, "max_tokens", 1),
        ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 32_000}, "max_tokens", 490),
        ("/v1/chat/completions", {"messages": [HELLO], "max_completion_tokens": 491}, "max_completion_tokens", 490),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 32_000}, "max_output_tokens", 490),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 512}}, "max_new_tokens", 511),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_short_prompt_is_not_called_too_long(
    site: Site, path: str, body: dict[str, Any], field: str, room: int, stream: bool
) -> None:
    reply = site.http.post(path, json={**body, "stream": stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "too long" not in error["message"]
    assert f"{field} is " in error["message"]
    assert f" {room}" in error["message"], "what to reduce it to"


def anthropic_limits(message: str) -> tuple[int, int]:
    """Returns the tokens and their maximum, as Claude Code reads them."""
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert found is not None, message
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(("n_prompt", "maximum"), [(900, 512), (513, 512), (512, 511)])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_anthropic_read_the_numbers(site: Site, n_prompt: int, maximum: int, stream: bool) -> None:
    content = "a" * (n_prompt - len("<user><assistant>"))
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 32_000, "stream": stream}
    reply = site.http.post("/v1/messages", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
    assert anthropic_limits(error["message"]) == (n_prompt, maximum)


@pytest.mark.parametrize("content", ["a" * MAX_MODEL_LEN * 9, [{}] * 20_000], ids=len)
def test_clients_of_anthropic_recognise_what_nobody_has_counted(site: Site, content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    error = site.http.post("/v1/messages", json=body).json()["error"]
    assert "prompt is too long" in error["message"]


@pytest.mark.parametrize("limit", ["MAX_RENDERED_CHARACTERS", "MAX_OPERATIONS"])
def test_clients_recognise_a_conversation_that_no_model_could_take(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(chat_template, limit, 5)
    with pytest.raises(ContextLengthExceeded) as caught:
        ChatTemplate("{% for i in range(9) %}xx{% endfor %}", {}, "here").render([HELLO])
    error = {"message": str(caught.value), "code": caught.value.code}
    assert litellm_recognises(error)
    assert langchain_recognises(error)
