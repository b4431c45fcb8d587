"""Clients recognise the errors for prompts that are too long, and may then shorten the prompt themselves.

What each client looks for, by its source:

- LiteLLM 1.106, ``exception_mapping_utils.is_error_str_context_window_exceeded``: one of some texts, in lower case.
- langchain-openai 1.7, ``_handle_openai_bad_request``: the code, or one of some texts.
- pydantic-ai has no such check of its own (issue 4060 there): its users search its errors for the words of vLLM and
  Anthropic.
"""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import ContextLengthExceeded
from radixkv.text import chat_template
from radixkv.text.chat_template import ChatTemplate
from support.scripted_runtime import MAX_MODEL_LEN, Site


def litellm_recognises(message: str) -> bool:
    return "this model's maximum context length is" in message.lower()


def langchain_recognises(message: str) -> bool:
    return "prompt is too long" in message


def pydantic_ai_users_recognise(message: str) -> bool:
    return "maximum context length" in message and "prompt is too long" in message


def all_recognise(message: str) -> bool:
    return all(f(message) for f in (litellm_recognises, langchain_recognises, pydantic_ai_users_recognise))


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * (MAX_MODEL_LEN + 1)}),
        ("/v1/completions", {"prompt": "a" * (MAX_MODEL_LEN * 9)}),
        ("/v1/completions", {"prompt": [1] * (MAX_MODEL_LEN + 1)}),
        ("/v1/completions", {"prompt": "a", "max_tokens": MAX_MODEL_LEN}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}),
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
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert all_recognise(error["message"]), error["message"]


@pytest.mark.parametrize("limit", ["MAX_RENDERED_CHARACTERS", "MAX_OPERATIONS"])
def test_clients_recognise_a_conversation_that_no_model_could_take(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(chat_template, limit, 5)
    with pytest.raises(ContextLengthExceeded) as caught:
        ChatTemplate("{% for i in range(9) %}xx{% endfor %}", {}, "here").render([HELLO])
    assert all_recognise(str(caught.value))
