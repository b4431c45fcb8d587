"""The format of answers is the user's choice, else the checkpoint's, else what its chat template shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import CheckpointError, ConfigError
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.parsers.formats import TOOL_FORMATS, find_tool_format
from radixkv.generation.tools import ToolUse
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate
from support.chat_templates import CHATML, GEMMA_4, LLAMA_3, MISTRAL, QWEN_3, QWEN_3_5
from support.tool_formats import HEADER, SHOWN_BY, TOOLS, chat_template, parse

CALLS = {
    "hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "qwen3_coder": "<function=now></function>",
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]now[ARGS]{}",
    "llama3_json": '{"name": "now", "parameters": {}}',
    "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
}
OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": HEADER,
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<reason>", "close": "</reason>"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
OWN_ANSWER = "<reason>I see.</reason>Hello.<call:f>{a:1}</call>"


def write(folder: Path, response_template: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"response_template": response_template}))
    return folder


@pytest.mark.parametrize("name", SHOWN_BY)
def test_the_chat_template_shows_the_format(tmp_path: Path, name: str) -> None:
    one = AnswerFormat.load(tmp_path, chat_template(name))
    assert one is not None
    assert parse(one, [CALLS[name]]) == [("now", "{}")]


def test_chat_templates_without_tools_show_none() -> None:
    assert all(find_tool_format(None, template) is None for template in (CHATML, MISTRAL, QWEN_3))


def test_llama_shows_its_format() -> None:
    found = find_tool_format(None, LLAMA_3)
    assert found is not None
    assert found.name == "llama3_json"


@pytest.mark.parametrize("alias", [alias for one in TOOL_FORMATS for alias in (one.name, *one.aliases)])
def test_names_of_both_engines(alias: str) -> None:
    found = find_tool_format(alias, "")
    assert found is not None
    assert alias in (found.name, *found.aliases)


def test_mistral_means_the_generation_that_the_chat_template_shows() -> None:
    names = [
        getattr(find_tool_format("mistral", SHOWN_BY[each]), "name", None) for each in ("mistral", "mistral_args")
    ]
    assert names == ["mistral", "mistral_args"]


def test_the_template_that_is_used_with_tools_shows_the_format(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}"},
        {"name": "tool_use", "template": chat_template("hermes", has_reasoning=True).source},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    one = AnswerFormat.load(tmp_path, template)
    assert one is not None
    assert (one.has_tools, one.has_reasoning) == (True, True)
    for tools in (None, TOOLS):
        prompt = template.render([{"role": "user", "content": "a</think>"}], tools=tools, prefill="<think>")
        begun = prompt if tools else f"{prompt}<think>"
        assert parse(one, ["I see.</think>Hello."], prompt=begun) == [("think", "I see."), "Hello."]


XML = (
    "<tool_call>\n<function=search>\n<parameter=count>\n3\n</parameter>\n<parameter=note>\na\n\n b\n</parameter>\n"
    "</function>\n</tool_call>"
)
SEARCH = ("search", '{"count": 3, "note": "a\\n\\n b"}')


@pytest.mark.parametrize(
    ("variables", "answer", "expected"),
    [
        ({}, f"I see.\n</think>\n\nSure.\n\n{XML}", [("think", "I see."), "Sure.", SEARCH]),
        ({"enable_thinking": True}, f"\n</think>\n\n{XML}", [SEARCH]),
        ({"enable_thinking": False}, f"Sure.\n\n{XML}", ["Sure.", SEARCH]),
    ],
)
def test_chats_of_qwen3_5(tmp_path: Path, variables: dict[str, Any], answer: str, expected: list[Any]) -> None:
    """The answer's format comes from the chat template, which shows an answer of the history as it was written."""
    template = ChatTemplate(QWEN_3_5, {}, "the test")
    one = AnswerFormat.load(tmp_path, template)
    assert one is not None
    user = {"role": "user", "content": "Look."}
    prompt = template.render([user], tools=TOOLS, **variables)
    assert parse(one, [answer], prompt=prompt) == expected
    assert parse(one, list(answer), prompt=prompt) == expected
    name, arguments = SEARCH
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    texts = [part for part in expected if isinstance(part, str)]
    reasoning = [part[1] for part in expected if part[0] == "think"]
    message = {"role": "assistant", "content": "".join(texts) or None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "1", "content": "found"}
    history = normalize_messages([user, {**message, "reasoning_content": "".join(reasoning)}, result])
    assert template.render(history, tools=TOOLS, **variables).startswith(prompt + answer + "<|im_end|>\n")


GEMMA_CALL = '<|tool_call>call:search{count:3,note:<|"|>a\n\n b<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("variables", "answer", "expected"),
    [
        ({}, "Hello.", ["Hello."]),
        ({}, f"Sure. {GEMMA_CALL}", ["Sure.", SEARCH]),
        (
            {"enable_thinking": True},
            f"<|channel>thought\nI see.\n<channel|>{GEMMA_CALL}",
            [("think", "I see."), SEARCH],
        ),
        ({"enable_thinking": True}, "<|channel>thought\n<channel|>Hello.", ["Hello."]),
        ({"enable_thinking": True}, "<|channel>thought\nI se", [("think", "I se")]),
    ],
)
def test_chats_of_gemma_4(tmp_path: Path, variables: dict[str, Any], answer: str, expected: list[Any]) -> None:
    """Calls and reasoning in the history are no parts of an answer, also where this goes on with the same turn."""
    template = ChatTemplate(GEMMA_4, {"bos_token": "<bos>"}, "the test")
    one = AnswerFormat.load(tmp_path, template)
    assert one is not None
    assert (one.has_tools, one.has_reasoning) == (True, True)
    user = {"role": "user", "content": "Look."}
    name, arguments = SEARCH
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "I look."}
    result = {"role": "tool", "tool_call_id": "1", "content": "found"}
    histories = [
        [user],
        [user, called, result],
        [user, called, result, {"role": "assistant", "content": "b"}, user],
    ]
    for history in histories:
        prompt = template.render(normalize_messages(history), tools=TOOLS, **variables)
        assert (GEMMA_CALL in prompt) == (called in history), "the history shows a call as it was written"
        assert parse(one, [answer], prompt=prompt) == expected
        assert parse(one, list(answer), prompt=prompt) == expected


def test_the_user_chooses(tmp_path: Path) -> None:
    hermes = chat_template("hermes", has_reasoning=True)
    chosen = AnswerFormat.load(tmp_path, hermes, "llama3", "none")
    assert chosen is not None
    assert parse(chosen, [CALLS["llama3_json"]]) == [("now", "{}")]
    assert not chosen.has_reasoning
    only_reasoning = AnswerFormat.load(tmp_path, hermes, "none")
    assert only_reasoning is not None
    assert (only_reasoning.has_tools, only_reasoning.has_reasoning) == (False, True)
    assert AnswerFormat.load(tmp_path, hermes, "none", "none") is None
    assert AnswerFormat.load(tmp_path, None) is None
    forced = AnswerFormat.load(tmp_path, None, "hermes", "deepseek_r1")
    assert forced is not None
    assert (forced.has_tools, forced.has_reasoning) == (True, True)


def test_a_prompt_without_a_header_begins_no_part_of_the_answer(tmp_path: Path) -> None:
    template = ChatTemplate("{{ messages[0].content }}{# tools <tool_call> </think> #}", {}, "the test")
    one = AnswerFormat.load(tmp_path, template)
    assert one is not None
    for prompt in ("what is <tool_call>?", "<think>"):
        assert parse(one, ["Hello."], prompt=prompt) == ["Hello."]


@pytest.mark.parametrize("names", [("gpt", None), (None, "gpt")])
def test_unknown_names(tmp_path: Path, names: tuple[str | None, str | None]) -> None:
    with pytest.raises(ConfigError, match="gpt.*none"):
        AnswerFormat.load(tmp_path, None, *names)


def test_a_checkpoint_describes_its_own(tmp_path: Path) -> None:
    one = AnswerFormat.load(write(tmp_path, OWN), chat_template("hermes"))
    assert one is not None
    expected = [("think", "I see."), "Hello.", ("f", '{"a": 1}')]
    for pieces in ([OWN_ANSWER], list(OWN_ANSWER)):
        assert parse(one, pieces) == expected
    begun = f"<|im_start|>user\nhi{HEADER}<reason>I"
    assert parse(one, [" see.</reason>Hello."], prompt=begun) == [("think", " see."), "Hello."]
    broken = "<call:f>{a:}</call> ok"
    assert parse(one, [broken]) == parse(one, list(broken)) == [broken]


def test_a_choice_comes_before_the_checkpoint(tmp_path: Path) -> None:
    one = AnswerFormat.load(write(tmp_path, OWN), None, "hermes", "none")
    assert one is not None
    assert parse(one, [CALLS["hermes"]]) == [("now", "{}")]
    assert one.open_parser(HEADER, ToolUse()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"fields": 3},
        {"fields": {"tool_calls": {"open": "<a>"}}},
        {**OWN, "fields": {**OWN["fields"], "tool_calls": {"open_pattern": "("}}},
        {**OWN, "fields": {**OWN["fields"], "tool_calls": {"open": 3}}},
        {**OWN, "fields": {**OWN["fields"], "tool_calls": 3}},
    ],
)
def test_a_malformed_template(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(CheckpointError, match="response_template"):
        AnswerFormat.load(write(tmp_path, wrong), None)
