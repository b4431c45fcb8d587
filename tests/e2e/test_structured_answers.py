"""Structured outputs on a real server: answers that match, and a server without grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, SamplingParams, StructuredOutputs
from radixkv.checkpoints import resolve
from support.cases import rest_nightly
from support.live import LiveServer, serving

HOUR = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}
MESSAGES = [{"role": "user", "content": "What is 41 plus 11?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "opening", "schema": HOUR}}},
    {"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "none"},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": HOUR}}, "tools": [TOOL]},
    {"guided_json": HOUR},
    {"structured_outputs": {"json": HOUR}},
    {"guided_regex": '\\{"hour": [0-9]{1,3}\\}'},
    {"guided_choice": ['{"hour": 52}', '{"hour": 53}']},
    {"guided_grammar": 'root ::= "{\\"hour\\": " [0-9] "}"'},
]


@pytest.mark.nightly
def test_a_server_without_grammars_refuses_structured_outputs(server: LiveServer) -> None:
    before = server.canary()
    reply = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, **FORMATS[0]})
    assert reply.status_code == 400
    assert "grammar_backend none" in reply.json()["error"]["message"]
    assert server.canary() == before


KINDS = rest_nightly(["the prompt ends with <think>", "the model writes <think>"], kept=(0,))


@pytest.fixture(scope="module")
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves the embedded model, which reasons if it is asked to."""
    folder, flags = tmp_path_factory.mktemp("thinking"), []
    if request.param.startswith("the prompt"):
        (folder / "template.jinja").write_text(opening_template())
        flags = ["--chat-template", str(folder / "template.jinja")]
    with serving(resolve("tiny").folder, folder / "errors", "--grammar-backend", "xgrammar", *flags) as live:
        yield live


def opening_template() -> str:
    """Returns the template of the embedded model, which begins the reasoning or, if it is switched off, ends it."""
    template = json.loads((resolve("tiny").folder / "tokenizer_config.json").read_text())["chat_template"]
    last = "{%- endif %}"
    assert template.endswith(last)
    opens = "{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    return template.removesuffix(last) + opens + last


def post(live: LiveServer, path: str, body: dict[str, Any]) -> Any:
    reply = live.http.post(path, json={"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply


def events(reply: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(live: LiveServer, *, thinks: bool = True, **more: Any) -> tuple[str, str]:
    """Returns reasoning and text of an answer, after checking that its stream has the same."""
    body = {"messages": MESSAGES, "max_tokens": 80, "chat_template_kwargs": {"enable_thinking": thinks}, **more}
    (choice,) = post(live, "/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    whole = (message.get("reasoning_content") or "", message["content"] or "")
    deltas = [
        each["choices"][0]["delta"] for each in events(post(live, "/v1/chat/completions", body | {"stream": True}))
    ]
    assert whole == (
        "".join(delta.get("reasoning_content", "") for delta in deltas),
        "".join(delta.get("content", "") for delta in deltas),
    )
    return whole


@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
@pytest.mark.parametrize("form", rest_nightly(FORMATS, kept=(0, 2, 7)))
def test_a_format_begins_after_the_reasoning(thinking: LiveServer, form: dict[str, Any]) -> None:
    free, _ = chat(thinking)
    reasoning, text = chat(thinking, **form)
    assert reasoning
    assert "hour" not in reasoning
    if "tools" not in form:  # a tool changes the prompt
        assert reasoning == free
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
def test_without_reasoning_a_format_begins_at_once(thinking: LiveServer) -> None:
    for more in ({"thinks": False}, {"separate_reasoning": False, "thinks": False}):
        reasoning, text = chat(thinking, guided_json=HOUR, **more)
        assert (reasoning, set(json.loads(text))) == ("", {"hour"})


@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
def test_a_prefilled_answer_goes_on_in_its_part(thinking: LiveServer) -> None:
    begun = {"add_generation_prompt": False, "continue_final_message": True, "guided_json": HOUR}
    for content, is_reasoning in (("The answer is: ", False), ("<think>\nThis needs", True)):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        reasoning, text = chat(thinking, messages=messages, **begun)
        assert bool(reasoning) == is_reasoning
        assert set(json.loads(text)) == {"hour"}


@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
def test_reasoning_may_stay_in_the_content(thinking: LiveServer) -> None:
    reasoning, text = chat(thinking, guided_json=HOUR, separate_reasoning=False)
    thought, _, answer = text.rpartition("</think>")
    assert not reasoning
    assert thought
    assert set(json.loads(answer)) == {"hour"}


@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
def test_several_choices_have_reasoning_each(thinking: LiveServer) -> None:
    body = {"messages": MESSAGES, "n": 3, "seed": 1, "temperature": 0.7, "max_tokens": 120, "guided_json": HOUR}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    for choice in post(thinking, "/v1/chat/completions", body).json()["choices"]:
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"hour"}


@pytest.mark.nightly
@pytest.mark.parametrize("thinking", KINDS, indirect=True, scope="module")
def test_responses_and_messages(thinking: LiveServer) -> None:
    schema = {"type": "json_schema", "name": "opening", "schema": HOUR}
    body = {"input": MESSAGES[0]["content"], "reasoning": {"effort": "high"}, "text": {"format": schema}}
    reply = post(thinking, "/v1/responses", body).json()["output"]
    texts = {item["type"]: item["content"][0]["text"] for item in reply}
    assert texts["reasoning"]
    assert set(json.loads(texts["message"])) == {"hour"}
    stream = events(post(thinking, "/v1/responses", body | {"stream": True}))
    assert stream[-1]["response"]["output"][-1]["content"][0]["text"] == texts["message"]
    body = {
        "messages": MESSAGES,
        "max_tokens": 80,
        "thinking": {"type": "adaptive"},
        "output_config": {"format": schema},
    }
    blocks = post(thinking, "/v1/messages", body).json()["content"]
    parts = {block["type"]: block.get("thinking") or block.get("text") for block in blocks}
    assert parts["thinking"]
    assert set(json.loads(parts["text"])) == {"hour"}
    deltas = [
        one["delta"] for one in events(post(thinking, "/v1/messages", body | {"stream": True})) if "delta" in one
    ]
    assert "".join(delta.get("text", "") for delta in deltas) == parts["text"]


@pytest.mark.nightly
def test_offline_chats(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(opening_template())
    sampling = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputs(json=HOUR))
    with_thoughts, without = {"enable_thinking": True}, {"enable_thinking": False}
    for template, names in ((None, [None]), (str(path), [None, "none"])):
        for name in names:
            llm = LLM("tiny", chat_template=template, reasoning_parser=name, max_total_tokens=4096)
            (output,) = llm.chat(MESSAGES, sampling, use_tqdm=False, chat_template_kwargs=with_thoughts)
            (plain,) = llm.chat(MESSAGES, sampling, use_tqdm=False, chat_template_kwargs=without)
            llm.shutdown()
            thought, end, text = output.outputs[0].text.rpartition("</think>")
            assert bool(thought and end) == (name is None)
            assert set(json.loads(text)) == set(json.loads(plain.outputs[0].text)) == {"hour"}
