from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from radixkv.errors import ContextLengthExceeded
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest
from radixkv.frontend.api.openai.translation import completion_prompts, to_chat
from radixkv.frontend.chat import chat_prompt
from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.event_loop_turns import turns_during
from support.scripted_runtime import ScriptedLoop

MIN_TURNS = 10
"""Turns of the event loop while a thread works for half a second; work inside the loop leaves it one."""


def backend(*steps: pre_tokenizers.PreTokenizer, leave_out: str = "") -> tokenizers.Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(leave_out))
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, "he"])}, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def served(tokenizer: Tokenizer, **more: Any) -> ServedModel:
    ready = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=500_000, n_pages=500_000)
    return ServedModel(name="echo", root="some/echo", ready=ready, tokenizer=tokenizer, created=0, **more)


def test_the_loop_runs_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    served_model = served(tokenizer, max_token_characters=5)
    request = CompletionRequest(prompt="hello world " * 50_000)

    async def encode() -> None:
        with pytest.raises(ContextLengthExceeded, match="600000"):
            await completion_prompts(request, served_model, "")

    assert turns_during(encode()) >= MIN_TURNS


def test_the_longest_token_is_known_for_complete_byte_level_vocabularies(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_token_characters == len("<eos>")
    assert Tokenizer(backend()).max_token_characters == 2
    isolated = pre_tokenizers.Split(" ", "isolated")
    assert Tokenizer(backend(isolated)).max_token_characters == 2


def test_the_longest_token_is_unknown_where_characters_may_vanish(tmp_path: Path) -> None:
    removing = backend(pre_tokenizers.Split(" ", "removed"))
    assert len(removing.encode(" " * 100).ids) == 0
    incomplete = backend(leave_out="x")
    assert len(incomplete.encode("x" * 100).ids) == 0
    normalizing, stripping = backend(), backend()
    normalizing.normalizer = tokenizers.normalizers.Strip()
    stripping.add_tokens([tokenizers.AddedToken("<eos>", lstrip=True)])
    assert len(stripping.encode(" " * 100 + "<eos>").ids) == 1
    for made in (removing, incomplete, normalizing, stripping, tokenizers.Tokenizer(models.WordPiece({"a": 0}))):
        assert Tokenizer(made).max_token_characters is None


def test_only_completions_get_the_tokenizers_own_special_tokens() -> None:
    made = backend()
    made.add_special_tokens(["<s>"])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    template = ChatTemplate("<s>{{ messages[0].content }}", {}, "the test")
    served_model = served(Tokenizer(made), chat_template=template)
    messages = [{"role": "user", "content": "x"}]

    def ids(request: CompletionRequest | ChatRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            return unpack_tokens(asyncio.run(chat_prompt(to_chat(request), served_model, "")).submit.tokens)
        return unpack_tokens(asyncio.run(completion_prompts(request, served_model, ""))[0].tokens)

    (x,) = ids(CompletionRequest(prompt="x", add_special_tokens=False))
    assert ids(CompletionRequest(prompt="x")) == [bos, x]
    assert ids(ChatRequest(messages=messages)) == [bos, x]
    assert ids(ChatRequest(messages=messages, add_special_tokens=True)) == [bos, bos, x]


def test_the_loop_runs_while_a_long_conversation_is_rendered(tokenizer: Tokenizer) -> None:
    inner = "{% for b in messages %}{% if b.role == a.content %}x{% endif %}{% endfor %}"
    template = ChatTemplate("{% for a in messages %}" + inner + "{% endfor %}the end", {}, "the test")
    served_model = served(tokenizer, chat_template=template)
    request = ChatRequest(messages=[{"role": "user", "content": "hello"}] * 400)

    async def render() -> None:
        prompt = await chat_prompt(to_chat(request), served_model, "")
        assert prompt.submit.tokens == tokenizer.encode("the end")

    assert turns_during(render()) >= MIN_TURNS
