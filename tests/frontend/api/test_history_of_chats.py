"""Answers in the history of chats have the tokens that the model wrote, in every API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import ServedAdapter, unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import EOS, Site
from support.site_requests import events, post
from support.small_tokenizers import byte_letters

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
TEMPLATE = ChatTemplate(
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
    "the test",
)
QUESTION, NEXT = {"role": "user", "content": "hello?"}, {"role": "user", "content": "hello!"}
ANSWER = "hello, hello"
TOKENIZER = Tokenizer(byte_letters(MERGES, ["<eos>"], ["<eos>"]))
"""``hello`` is one token."""
LETTERS = [TOKENIZER.encode(letter, adds_special_tokens=False)[0] for letter in ANSWER]


ADAPTERS = {"sql": "a" * 64, "law": "b" * 64, "same": "a" * 64}
"""Digests of adapters by their names."""


@pytest.fixture
def talking_site(served_model: ServedModel, tmp_path: Path) -> Iterator[Site]:
    """A site whose model writes ``ANSWER`` with one token for each letter."""
    with running_site(replace(served_model, tokenizer=TOKENIZER, chat_template=TEMPLATE), tmp_path) as site:
        site.loop.answers = [[*LETTERS, EOS]]
        yield site


def plain(text: str) -> list[int]:
    return unpack_tokens(TOKENIZER.encode(text, adds_special_tokens=False))


def sent(site: Site) -> list[int]:
    """Returns the tokens of the latest prompt."""
    return unpack_tokens(site.loop.submitted[-1].tokens)


def chat(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    reply = post(site, "/v1/chat/completions", messages=messages, **changes)
    return [*messages, reply["choices"][-1]["message"], NEXT]


def streamed_chat(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    chunks = events(site, "/v1/chat/completions", messages=messages, **changes)
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return [*messages, {"role": "assistant", "content": text}, NEXT]


def responses(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    return [*messages, *post(site, "/v1/responses", input=messages, **changes)["output"], NEXT]


def message(site: Site, messages: list[Any], **changes: Any) -> list[Any]:
    content = post(site, "/v1/messages", messages=messages, max_tokens=50, **changes)["content"]
    return [*messages, {"role": "assistant", "content": content}, NEXT]


@pytest.mark.parametrize("turn", [chat, streamed_chat, responses, message])
def test_the_next_prompt_begins_with_the_last_one_and_its_answer(
    talking_site: Site, turn: Callable[..., list[Any]]
) -> None:
    messages: list[Any] = [QUESTION]
    expected: list[int] = []
    for _ in range(3):
        messages = turn(talking_site, messages)
        assert sent(talking_site)[: len(expected)] == expected
        assert TOKENIZER.decode(sent(talking_site), skip_special_tokens=False).endswith("<assistant>")
        expected = [*sent(talking_site), *LETTERS, EOS]
    assert len(sent(talking_site)) > len(plain(f"{ANSWER}<eos>")) + 2 * len(LETTERS)
    turn(talking_site, messages, cache_salt="other")
    text = TOKENIZER.decode(sent(talking_site), skip_special_tokens=False)
    assert sent(talking_site) == plain(text), "answers are kept for their own salt"


def test_each_of_several_answers_can_be_continued(talking_site: Site) -> None:
    talking_site.loop.answers = [[*LETTERS, EOS], [*plain("hell"), *LETTERS[4:], EOS]]
    reply = post(talking_site, "/v1/chat/completions", messages=[QUESTION], n=2)
    first = [*sent(talking_site)]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {ANSWER}
    chat(talking_site, [QUESTION, {"role": "assistant", "content": ANSWER}, NEXT], n=2)
    begun = sent(talking_site)[len(first) :]
    assert begun[: len(LETTERS)] == LETTERS or begun[: len(LETTERS) - 3] == [*plain("hell"), *LETTERS[4:]]


def test_answers_that_the_model_did_not_end_are_not_kept(talking_site: Site) -> None:
    for ending in ({"max_tokens": 6}, {"stop": [", "]}):
        messages = chat(talking_site, [QUESTION], **ending)
        chat(talking_site, messages)
        assert sent(talking_site) == plain(TOKENIZER.decode(sent(talking_site), skip_special_tokens=False))


def test_counted_and_explained_and_pinned_prompts_are_those_that_are_sent(talking_site: Site) -> None:
    messages = chat(talking_site, [QUESTION])
    chat(talking_site, messages)
    tokens = sent(talking_site)
    assert tokens != plain(TOKENIZER.decode(tokens, skip_special_tokens=False))
    counted = post(talking_site, "/v1/messages/count_tokens", model="echo", messages=messages)
    assert counted["input_tokens"] == len(tokens)
    post(talking_site, "/cache/explain", messages=messages)
    assert unpack_tokens(talking_site.loop.explained[-1].tokens) == tokens
    post(talking_site, "/cache/pin", messages=messages)
    assert unpack_tokens(talking_site.loop.pinned[-1].tokens) == tokens


def test_counting_takes_a_salt(talking_site: Site) -> None:
    messages = message(talking_site, [QUESTION], cache_salt="hers")
    message(talking_site, messages, cache_salt="hers")
    path, body = "/v1/messages/count_tokens", {"model": "echo", "messages": messages}
    counted = [post(talking_site, path, **body, **salt) for salt in ({"cache_salt": "hers"}, {})]
    assert counted[0]["input_tokens"] == len(sent(talking_site)) > counted[1]["input_tokens"]
    reply = talking_site.http.post(path, json={**body, "cache_salt": "x" * 10_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_a_breakpoint_behind_an_answer_pins_its_tokens(talking_site: Site) -> None:
    marker = {"prompt_cache_breakpoint": {"mode": "explicit"}}

    def marked(one: Any) -> dict[str, Any]:
        return {"role": one["role"], "content": [{"type": "text", "text": one["content"], **marker}]}

    question, answer, later = chat(talking_site, [QUESTION])
    for messages, end in (
        ([question, answer, marked(later)], "<eos><assistant>"),
        ([question, marked(answer)], ""),
    ):
        chat(talking_site, messages)
        tokens = sent(talking_site)
        (pin,) = talking_site.loop.submitted[-1].pins
        if end:
            assert pin.n_tokens == len(tokens) - len(plain(end))
        else:
            assert tokens[: pin.n_tokens][-len(LETTERS) :] == LETTERS


def test_answers_of_the_history_are_counted(talking_site: Site) -> None:
    def counts() -> tuple[dict[str, int], list[str]]:
        report = talking_site.http.get("/cache/doctor").json()["history_answers"]
        lines = talking_site.http.get("/metrics").text.splitlines()
        return report, [line for line in lines if line.startswith("radixkv:history_answers_total")]

    question, answer, later = chat(talking_site, [QUESTION])
    for content in (answer["content"], answer["content"], "hello"):
        post(talking_site, "/v1/messages/count_tokens", model="echo", messages=[question, answer, later])
        chat(talking_site, [question, {"role": "assistant", "content": content}, later])
    report, lines = counts()
    assert (report["same"], report["otherwise"]) == (2, 1)
    assert "1 of 3" in report["text"]
    assert lines == [
        'radixkv:history_answers_total{rendered="same"} 2.0',
        'radixkv:history_answers_total{rendered="otherwise"} 1.0',
    ]


def test_answers_of_adapters_are_counted_with_those_of_the_model_and_kept_apart(
    served_model: ServedModel, tmp_path: Path
) -> None:
    adapters = tuple(ServedAdapter(name, f"/{name}", digest) for name, digest in ADAPTERS.items())
    ready = msgspec.structs.replace(served_model.ready, adapters=adapters)
    with_adapters = replace(served_model, ready=ready, tokenizer=TOKENIZER, chat_template=TEMPLATE)
    with running_site(with_adapters, tmp_path) as site:
        site.loop.answers = [[*LETTERS, EOS]]
        messages = chat(site, [QUESTION], model="sql")
        whole = plain(f"<user>hello?<eos><assistant>{ANSWER}<eos><user>hello!<eos><assistant>")
        for name, is_known in (("law", False), (served_model.name, False), ("sql", True), ("same", True)):
            chat(site, messages, model=name)
            assert (sent(site) != whole) == is_known, name
        found = site.http.get("/cache/doctor").json()["history_answers"]
        assert (found["same"], found["otherwise"]) == (2, 0)
        assert 'radixkv:history_answers_total{rendered="same"} 2.0' in site.http.get("/metrics").text
        post(site, "/cache/invalidate", messages=messages)
        means = [(one.namespace.adapter, one.all_adapters) for one in site.loop.invalidated]
    assert means == [("", True), (ADAPTERS["sql"], False)]


NULL_MEANS_CALLS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{# tools <tool_call> #}",
    {},
    "the test",
)


@pytest.fixture
def calling_site(served_model: ServedModel, tmp_path: Path) -> Iterator[Site]:
    """A site whose template shows calls only beside a content that is null, with their arguments as text."""
    with running_site(replace(served_model, tokenizer=TOKENIZER, chat_template=NULL_MEANS_CALLS), tmp_path) as site:
        site.loop.answers = [[*LETTERS, EOS]]
        yield site


def test_calls_of_every_api_reach_the_template(calling_site: Site) -> None:
    function = {"name": "f", "arguments": '{"a":1}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    chats = [{"role": "assistant", "content": content, "tool_calls": calls} for content in (None, "", [])]
    result = {"role": "tool", "tool_call_id": "c", "content": "b"}
    for message in chats:
        post(calling_site, "/v1/chat/completions", messages=[QUESTION, message, result])
        assert sent(calling_site) == plain('<user>hello?<assistant>f{"a":1}<tool>b')
    item = {"type": "function_call", "call_id": "c", **function}
    output = {"type": "function_call_output", "call_id": "c", "output": "b"}
    post(calling_site, "/v1/responses", input=[QUESTION, item, output])
    assert sent(calling_site) == plain('<user>hello?<assistant>f{"a":1}<tool>b')
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": "b"}
    messages = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
    post(calling_site, "/v1/messages", messages=messages, max_tokens=20)
    assert sent(calling_site) == plain('<user>hello?<assistant>f{"a":1}<tool>b')
    reply = post(calling_site, "/tokenize", messages=[QUESTION, chats[0], result], add_generation_prompt=False)
    assert reply["tokens"] == sent(calling_site)
