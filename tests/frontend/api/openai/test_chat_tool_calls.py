"""Tools and reasoning in OpenAI's chat API, on a runtime that answers with the last message."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.scripted_runtime import Site
from support.site_requests import check_refusal, events

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
TOOLS = [TOOL, {"type": "function", "function": {"name": "g"}}]
SHOWN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é}"}}\n</tool_call>'
ARGUMENTS = '{"a": "é}"}'
THOUGHT = "<think>\nI see.\n</think>\n\n"


def post(site: Site, answer: str, messages: Any = (), **body: Any) -> httpx.Response:
    messages = [*messages, {"role": "user", "content": answer}]
    return site.http.post("/v1/chat/completions", json={"messages": messages, **body})


def choices(site: Site, answer: str, messages: Any = (), **body: Any) -> list[dict[str, Any]]:
    reply = post(site, answer, messages, **body)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["choices"]
    return found


def choice(site: Site, answer: str, messages: Any = (), **body: Any) -> dict[str, Any]:
    (found,) = choices(site, answer, messages, **body)
    return found


def streamed(site: Site, answer: str, **body: Any) -> dict[int, dict[str, Any]]:
    """Returns per choice what a client puts together from the stream, with the finish reason."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events(site, "/v1/chat/completions", messages=[{"role": "user", "content": answer}], **body):
        for one in event["choices"]:
            message = whole.setdefault(one["index"], {"content": None, "calls": [], "finish_reason": None})
            assert message["finish_reason"] is None, "nothing comes after the end"
            delta = one["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = (message.get(field) or "") + delta[field]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["calls"]):
                    assert call["type"] == "function"
                    assert call["id"]
                    message["calls"].append((call["function"]["name"], ""))
                else:
                    assert "name" not in call["function"]
                assert call["index"] == len(message["calls"]) - 1
                name, arguments = message["calls"][-1]
                message["calls"][-1] = (name, arguments + call["function"]["arguments"])
            message["finish_reason"] = one["finish_reason"]
    return whole


def prompt_text(site: Site, tokenizer: Tokenizer) -> str:
    """Returns what the prompt has after the answer."""
    text = tokenizer.decode(unpack_tokens(site.loop.submitted[-1].tokens), skip_special_tokens=False)
    return text.partition("<eos>")[2]


def test_a_call(agent_site: Site) -> None:
    found = choice(agent_site, CALL, tools=TOOLS)
    (call,) = found["message"].pop("tool_calls")
    assert found["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert found["finish_reason"] == "tool_calls"
    assert call.pop("id")
    assert call == {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello.", {"content": "Hello.", "calls": [], "finish_reason": "stop"}),
    "a call": (CALL, {"content": None, "calls": [("f", ARGUMENTS)], "finish_reason": "tool_calls"}),
    "text and calls": (
        f"I call.\n{CALL}\n{CALL}",
        {"content": "I call.", "calls": [("f", ARGUMENTS)] * 2, "finish_reason": "tool_calls"},
    ),
    "reasoning and text": (
        THOUGHT + "Hello.",
        {"content": "Hello.", "calls": [], "finish_reason": "stop", "reasoning_content": "I see."},
    ),
    "reasoning and a call": (
        THOUGHT + CALL,
        {
            "content": None,
            "calls": [("f", ARGUMENTS)],
            "finish_reason": "tool_calls",
            "reasoning_content": "I see.",
        },
    ),
}


def whole(found: dict[str, Any]) -> dict[str, Any]:
    message = found["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    shown = {"content": message["content"], "calls": calls, "finish_reason": found["finish_reason"]}
    return shown | {name: message[name] for name in ("reasoning_content",) if name in message}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_stream_says_the_same_as_a_whole_answer(agent_site: Site, case: str) -> None:
    answer, expected = ANSWERS[case]
    assert whole(choice(agent_site, answer, tools=TOOLS)) == expected
    assert streamed(agent_site, answer, tools=TOOLS) == {0: expected}


def test_several_choices_logprobs_and_stop_strings(agent_site: Site) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "n": 2, "logprobs": True, "stop": ["STOP"]}
    answer = f"  {CALL}STOP more"
    found = choices(agent_site, answer, **body)
    for one in found:
        assert whole(one) == {"content": None, "calls": [("f", ARGUMENTS)], "finish_reason": "tool_calls"}
        assert one["stop_reason"] == "STOP"
        assert len(one["logprobs"]["content"]) >= len(CALL)
    assert streamed(agent_site, answer, **body) == {index: whole(one) for index, one in enumerate(found)}
    ids = [one["message"]["tool_calls"][0]["id"] for one in found]
    assert len(set(ids)) == 2


def test_a_cut_call_is_not_complete(agent_site: Site) -> None:
    found = choice(agent_site, CALL, tools=TOOLS, max_tokens=50)
    assert found["finish_reason"] == "length"
    (call,) = found["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"] != ARGUMENTS


def test_without_tools_calls_are_text(agent_site: Site, tokenizer: Tokenizer) -> None:
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        found = choice(agent_site, CALL, **body)
        assert (found["message"]["content"], found["finish_reason"]) == (CALL, "stop")
    assert json.loads(prompt_text(agent_site, tokenizer))[0] == SHOWN, "the prompt is the same whatever the choice"


def test_reasoning_may_stay_or_be_left_out(agent_site: Site) -> None:
    answer = THOUGHT + "Hello."
    assert choice(agent_site, answer, separate_reasoning=False)["message"]["content"] == answer
    left_out = choice(agent_site, answer, include_reasoning=False)["message"]
    assert left_out == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert "reasoning_content" not in streamed(agent_site, answer, include_reasoning=False)[0]


def test_the_template_gets_tools_calls_results_and_reasoning(agent_site: Site, tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I see."},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "1"},
        {"role": "assistant", "content": "Done.", "tool_calls": None, "reasoning": "Well."},
    ]
    assert choice(agent_site, "ok", messages, tools=[TOOL])["message"]["content"] == "ok"
    parsed = {**call, "function": {"name": "f", "arguments": {"a": [1]}}}
    assert prompt_text(agent_site, tokenizer) == (
        f"<assistant>[I see.]{json.dumps([parsed])}<tool>3<assistant>Done.[Well.]{json.dumps([SHOWN])}"
    )


def test_a_demanded_call_constrains_the_answer(agent_site: Site) -> None:
    choice(agent_site, CALL, tools=TOOLS)
    assert agent_site.loop.submitted[-1].sampling.structured_outputs is None
    for body in (
        {"tool_choice": "required"},
        {"tool_choice": TOOL},
        {"parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ):
        choice(agent_site, CALL, **{"tools": TOOLS, **body})
        constraint = agent_site.loop.submitted[-1].sampling.structured_outputs
        assert constraint is not None
        assert json.loads(constraint.structural_tag or "")["type"] == "structural_tag"


def test_a_format_of_the_text_does_not_matter_where_calls_are_demanded(agent_site: Site) -> None:
    for demand in ("required", TOOL):
        body = {"tools": TOOLS, "tool_choice": demand}
        choice(agent_site, CALL, **body)
        alone = agent_site.loop.submitted[-1].sampling.structured_outputs
        found = choice(agent_site, CALL, **body, response_format={"type": "json_object"})
        assert found["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert agent_site.loop.submitted[-1].sampling.structured_outputs == alone


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [[]] * 20_000}, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_wrong_use(agent_site: Site, body: dict[str, Any], param: str) -> None:
    reply = post(agent_site, "hello", **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert choice(agent_site, "hello")["message"]["content"] == "hello"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "tool_result", "content": "3"}]},
        {"role": "assistant", "content": "a", "reasoning_content": 3},
    ],
)
def test_wrong_messages(agent_site: Site, message: dict[str, Any]) -> None:
    code = "unsupported_feature" if message["role"] == "user" else "invalid_request"
    assert "messages[0]" in check_refusal(post(agent_site, "hello", [message]), "messages", code)


def test_a_model_without_a_format_of_calls(site: Site) -> None:
    message = check_refusal(post(site, "hello", tools=TOOLS), "tools", "unsupported_feature")
    assert "--tool-call-parser" in message
    assert post(site, "hello", tools=TOOLS, tool_choice="none", max_tokens=2).status_code == 200


def test_a_prompt_with_tools_is_tokenized_alike(agent_site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
    assert choice(agent_site, "hello", tools=TOOLS)
    ids = unpack_tokens(agent_site.loop.submitted[-1].tokens)
    assert agent_site.http.post("/tokenize", json=body).json()["tokens"] == ids
    assert agent_site.http.post("/cache/explain", json=body).json()["prompt_tokens"] == len(ids)
