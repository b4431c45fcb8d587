"""Each chat template shows the calls of a history as Transformers does, in the form that the template reads."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate
from support.chat_templates import LLAMA_3, QWEN_3

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
REST = "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
ARGUMENTS = '{"city": "Zürich", "days": [1, {"a": null}], "exact": true}'


def template(calls: str) -> str:
    """Returns a template that shows an assistant's message with calls as ``calls``."""
    return "{% for m in messages %}{% if m.tool_calls %}" + calls + REST


def each_call(shown: str, content: str = "{{ m.content or '' }}") -> str:
    return template(f"<assistant>{content}{{% for c in m.tool_calls %}}<call>{shown}{{% endfor %}}")


READ_TEXT = {
    "joined": each_call("{{ c.function.name + ' ' + c.function.arguments }}"),
    "written": each_call("{{ c.function.name }} {{ c.function.arguments }}"),
    "null means calls": (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' and m.content is none %}<assistant>"
        "{% for c in m.tool_calls %}<call>{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}<end>" + REST
    ),
    "null and text beside calls": each_call(
        "{{ c.type + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}",
        "{% if m.content is none %}{% else %}{{ ' ' + m.content }}{% endif %}",
    ),
    "with a word None of its own": "{# #}None of this. "
    + each_call("{{ c.function.name + c.function.arguments }}"),
}
READ_OBJECTS = {
    "encoded": each_call("{{ c.function.name }} {{ c.function.arguments | tojson }}"),
    "encoded whole": each_call("{{ c.function | tojson }}"),
    "item by item": each_call(
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
    ),
    "by a filter": each_call(
        "{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    ),
    "refused as text": each_call(
        "{% if c.function.arguments is not mapping %}{{ raise_exception('an object') }}{% endif %}"
        "{{ c.function.name }} {{ c.function.arguments | tojson }}"
    ),
}
READ_BOTH = {
    "either": each_call(
        "{% set a = c.function.arguments %}{{ c.function.name }} {{ a if a is string else a | tojson }}"
    ),
    "not at all": template("<assistant>{{ m.content or '' }}"),
}
STRICT = {
    "ids of nine characters": each_call(
        "{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
        "{{ c.function.name + c.function.arguments }}"
    ),
    "only with tools": "{% if tools %}" + each_call("{{ c.function.name + c.function.arguments }}") + "{% endif %}",
    "results last": (
        "{% if messages[-1].role == 'tool' %}"
        + each_call("{{ c.function.name + c.function.arguments }}")
        + "{% endif %}"
    ),
}


def call(number: int, arguments: str = ARGUMENTS) -> dict[str, Any]:
    return {"id": f"c1234567{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def conversation(content: object, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *[{"role": "tool", "tool_call_id": each["id"], "content": "24 degrees"} for each in calls],
    ]


CONVERSATIONS = {
    "null": conversation(None, call(1)),
    "without arguments": conversation(None, call(1, "{}")),
    "beside text": conversation("Let me see.", call(1)),
    "several": conversation(None, call(1), call(2, '{"city": "Bern"}')),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for each in message.get("tool_calls", []):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return messages


def right(source: str, messages: list[dict[str, Any]]) -> str:
    (text,), _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)], chat_template=source, tools=TOOLS, **TOKENS
    )
    return text


def shown(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, TOKENS, "the test").render(
        normalize_messages(messages), add_generation_prompt=False, tools=TOOLS
    )


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", (READ_TEXT | READ_BOTH | STRICT).values(), ids=READ_TEXT | READ_BOTH | STRICT)
def test_the_messages_of_the_client(source: str, messages: list[dict[str, Any]]) -> None:
    assert shown(source, messages) == right(source, messages)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", READ_OBJECTS.values(), ids=READ_OBJECTS)
def test_the_messages_of_the_client_with_objects(source: str, messages: list[dict[str, Any]]) -> None:
    assert shown(source, messages) == right(source, with_objects(messages))


def test_llama_reads_objects() -> None:
    for name in ("null", "without arguments"):
        messages = CONVERSATIONS[name]
        assert shown(LLAMA_3, messages) == right(LLAMA_3, with_objects(messages))


@pytest.mark.parametrize("source", (READ_TEXT | READ_OBJECTS | READ_BOTH | STRICT).values())
def test_arguments_that_a_client_sends_as_an_object(source: str) -> None:
    messages = conversation(None, call(1))
    assert shown(source, with_objects(messages)) == shown(source, messages)


@pytest.mark.parametrize("source", READ_TEXT.values(), ids=READ_TEXT)
def test_contents_that_mean_nothing_lose_no_calls(source: str) -> None:
    for content in ("", [], None):
        assert ARGUMENTS in shown(source, conversation(content, call(1)))
    without = conversation(None, call(1))
    del without[1]["content"]
    assert shown(source, without) == shown(source, conversation(None, call(1)))


def test_null_is_no_word_of_the_prompt() -> None:
    source = each_call("{{ c.function | tojson }}", "{{ m.content }}")
    assert "None" in right(source, CONVERSATIONS["null"])
    assert shown(source, CONVERSATIONS["null"]) == shown(source, conversation("", call(1)))
    assert shown(QWEN_3, CONVERSATIONS["null"]) == shown(QWEN_3, conversation("", call(1)))


def test_arguments_keep_the_words_of_the_model() -> None:
    arguments = '{"b":1,  "a" : 2.50}'
    assert arguments in shown(READ_TEXT["joined"], conversation(None, call(1, arguments)))


def test_a_template_that_never_ends_is_still_loaded() -> None:
    endless = "{% for a in range(99999999) %}{{ m.tool_calls }}{% endfor %}"
    assert ChatTemplate(endless, TOKENS, "the test").source == endless
