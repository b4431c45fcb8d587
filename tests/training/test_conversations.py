"""Conversations that training is made of: rendered as the engine renders them, and answered rightly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.lab.bench.workloads.documents import generate_documents
from radixkv.lab.bench.workloads.errands import generate_agent_tasks
from training.answers import answers_like, is_json, read_answer
from training.batches import encode
from training.chat_format import BEGIN, SPECIAL_TOKENS, TAGS, ChatFormat, Conversation
from training.conversations import (
    agent_conversation,
    chat_messages,
    question_messages,
    with_reasoning,
    without_earlier_reasoning,
)
from training.extraction import generate_extractions
from training.made_tools import generate_made_tasks
from training.texts import ANSWER, HELD_OUT_SEEDS, IGNORED, Texts
from training.tokenizer import train_tokenizer


def chats(*, thinks: bool) -> Iterator[Conversation]:
    for chat in generate_chats(1, 4):
        yield Conversation(chat_messages(chat, thinks=thinks), enable_thinking=thinks)


def documents(*, thinks: bool) -> Iterator[Conversation]:
    for document in generate_documents(1, 10, 3):
        yield Conversation(
            question_messages(document.text, document.problems, thinks=thinks), enable_thinking=thinks
        )


KINDS: dict[str, Callable[[], Iterator[Conversation]]] = {
    "chats": lambda: chats(thinks=False),
    "chats that think": lambda: chats(thinks=True),
    "documents": lambda: documents(thinks=False),
    "documents that think": lambda: documents(thinks=True),
    "agents": lambda: map(agent_conversation, generate_agent_tasks(1, 3)),
    "agents that think": lambda: map(with_reasoning, map(agent_conversation, generate_agent_tasks(1, 3))),
    "made tools": lambda: generate_made_tasks(1, 3),
    "made tools, thinking": lambda: map(with_reasoning, generate_made_tasks(1, 3)),
    "extraction": lambda: generate_extractions(1, 3),
}


def assistants(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_conversation_begins_with_each_prompt_and_its_answer(kind: str) -> None:
    """So the prompt of each turn finds all earlier turns in the cache, answers included."""
    chat_format = ChatFormat()
    for conversation in islice(KINDS[kind](), 30):
        parts = list(chat_format.parts(conversation))
        text = "".join(part for part, _ in parts)
        answers = [part for part, is_answer in parts if is_answer]
        assert len(answers) == len(assistants(conversation))
        for index, answer in zip(assistants(conversation), answers, strict=True):
            prompt = chat_format.prompt(conversation._replace(messages=conversation.messages[:index]))
            assert text.startswith(prompt + answer)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_message_that_it_was_rendered_from(kind: str) -> None:
    chat_format = ChatFormat()
    for conversation in islice(KINDS[kind](), 30):
        answers = [part for part, is_answer in chat_format.parts(conversation) if is_answer]
        for index, answer in zip(assistants(conversation), answers, strict=True):
            message = conversation.messages[index]
            is_right = answers_like(message)
            text = answer.removesuffix("<|eot_id|>")
            assert is_right(text), (message, text)
            assert read_answer(text).has_reasoning == conversation.enable_thinking
            assert not is_right(text + " More.")
            assert not is_right("")
            if message.get("tool_calls"):
                assert not is_right(text.replace('{"name": "', '{"name": "un', 1))
                assert not is_right(text.replace("}", "", 1))


def test_extracted_values_stand_in_the_text_and_have_the_types_of_the_schema() -> None:
    n_schemas = 0
    for conversation in islice(generate_extractions(2, 1), 300):
        *messages, answer = conversation.messages
        prompt = "\n".join(message["content"] for message in messages)
        assert is_json(answer["content"])(answer["content"])
        assert not is_json(answer["content"])(answer["content"].replace(":", ": 1", 1))
        value = json.loads(answer["content"])
        for leaf in leaves(value):
            assert isinstance(leaf, bool) or str(leaf) in prompt
        start = prompt.find('{"')
        if "schema" in prompt.lower() and start >= 0:
            schema, _ = json.JSONDecoder().raw_decode(prompt[start:])
            check_schema(value, schema)
            n_schemas += 1
    assert n_schemas > 100


def leaves(value: Any) -> Iterator[object]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


def check_schema(value: Any, schema: dict[str, Any]) -> None:
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": float, "boolean": bool}
    assert type(value) is kinds[schema["type"]]
    assert value in schema.get("enum", [value])
    if isinstance(value, dict):
        assert list(value) == schema["required"] == list(schema["properties"])
        for name, inner in value.items():
            check_schema(inner, schema["properties"][name])
    if isinstance(value, list):
        for inner in value:
            check_schema(inner, schema["items"])


def test_made_calls_fit_their_tools() -> None:
    for conversation in islice(generate_made_tasks(4, 2), 200):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                schema = schemas[call["function"]["name"]]
                arguments = json.loads(call["function"]["arguments"])
                assert {*schema["required"]} <= arguments.keys() <= schema["properties"].keys()
                for name, value in arguments.items():
                    check_schema(value, schema["properties"][name])


@pytest.mark.parametrize("generate", [generate_made_tasks, generate_extractions])
def test_what_scores_use_is_held_out(generate: Callable[..., Iterator[Conversation]]) -> None:
    def names(is_held_out: bool) -> set[str]:
        found: set[str] = set()
        for conversation in islice(generate(5, 1, is_held_out=is_held_out), 300):
            for tool in conversation.tools:
                found.add(tool["function"].get("description", ""))
            if not conversation.tools:
                value = json.loads(conversation.messages[-1]["content"])
                found.add(" ".join(sorted(value)))
        return found - {""}

    held_out, learned = names(True), names(False)
    assert len(held_out) > 100
    assert not held_out & learned


def test_reasoning_that_a_client_does_not_return_is_not_learned_as_absent() -> None:
    """Answers without reasoning in a chat that asks for it have no weight."""
    n_without = n_with = 0
    texts = Texts(HELD_OUT_SEEDS.stop + 9, frozenset())
    for _ in range(300):
        is_thinking = False
        for part in texts.text(500):
            is_thinking |= "Think before you answer." in part.text
            if is_thinking and part.text.endswith("<|eot_id|>") and part.weight != 1:
                n_with += part.text.startswith("<think>")
                n_without += not part.text.startswith("<think>")
                assert part.weight == (ANSWER if part.text.startswith("<think>") else IGNORED)
    assert min(n_without, n_with) > 10
    (conversation,) = islice(chats(thinks=True), 1)
    kept = without_earlier_reasoning(conversation).messages
    assert [index for index, message in enumerate(kept) if "reasoning_content" in message] == [len(kept) - 1]


def test_no_token_joins_punctuation_and_letters_and_texts_survive() -> None:
    texts = Texts(HELD_OUT_SEEDS.stop + 3, frozenset())
    made = [texts.text(300) for _ in range(200)]
    joined = ["".join(part.text for part in text) for text in made]
    tokenizer = train_tokenizer(joined, 1500)
    glued = re.compile(r"[.,?!:;}>][A-Za-z]|[A-Za-z][.,?!:;{<]")
    assert not [
        token for token in tokenizer.get_vocab() if glued.search(token) and token not in SPECIAL_TOKENS + TAGS
    ]
    for text, whole in zip(made, joined, strict=True):
        ids, weights = encode(tokenizer, text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole
        assert len(weights) == len(ids)
        shown = tokenizer.decode(ids)
        assert all((tag in whole) == (tag in shown) for tag in TAGS)
        assert BEGIN not in shown
