from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from radixkv.errors import ContextLengthExceeded
from radixkv.frontend.api.openai.prompts import chat_prompt, completion_prompts
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest
from radixkv.frontend.served_model import Served
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import unpack_tokens
from support.event_loop_pauses import least_pause
from support.scripted_runtime import EOS, ScriptedLoop


def backend(*steps: pre_tokenizers.PreTokenizer, leave_out: str = "") -> tokenizers.Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(leave_out))
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, "he"])}, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def test_other_requests_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """The event loop's longest pause is a small part of the time that encoding takes."""
    ready = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=1_000_000, n_pages=1_000_000)
    served = Served("echo", "some/echo", ready, tokenizer, frozenset({EOS}), 0, 5)
    request = CompletionRequest(prompt="hello world " * 250_000)

    async def encode() -> None:
        with pytest.raises(ContextLengthExceeded, match="3000000 tokens"):
            await completion_prompts(request, served)

    assert least_pause(encode, enough=1 / 4) < 1 / 4


def test_the_longest_token_is_known_for_complete_byte_level_vocabularies(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token_characters == len("<eos>")
    assert Tokenizer(backend()).longest_token_characters == 2
    isolated = pre_tokenizers.Split(" ", "isolated")
    assert Tokenizer(backend(isolated)).longest_token_characters == 2


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
        assert Tokenizer(made).longest_token_characters is None


def test_only_completions_get_the_tokenizers_own_special_tokens() -> None:
    made = backend()
    made.add_special_tokens(["<s>"])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    template = ChatTemplate("<s>{{ messages[0].content }}", {}, "the test")
    served = Served("echo", "echo", ScriptedLoop().ready, Tokenizer(made), frozenset(), 0, chat_template=template)
    messages = [{"role": "user", "content": "x"}]

    def ids(request: CompletionRequest | ChatRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            return unpack_tokens(asyncio.run(chat_prompt(request, served)).tokens)
        return unpack_tokens(asyncio.run(completion_prompts(request, served))[0].tokens)

    (x,) = ids(CompletionRequest(prompt="x", add_special_tokens=False))
    assert ids(CompletionRequest(prompt="x")) == [bos, x]
    assert ids(ChatRequest(messages=messages)) == [bos, x]
    assert ids(ChatRequest(messages=messages, add_special_tokens=True)) == [bos, bos, x]


def test_other_requests_go_on_while_a_long_conversation_is_rendered(tokenizer: Tokenizer) -> None:
    ready = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=1_000_000, n_pages=1_000_000)
    inner = "{% for b in messages %}{% if b.role == a.content %}x{% endif %}{% endfor %}"
    template = ChatTemplate("{% for a in messages %}" + inner + "{% endfor %}the end", {}, "the test")
    served = Served("echo", "echo", ready, tokenizer, frozenset(), 0, chat_template=template)
    request = ChatRequest(messages=[{"role": "user", "content": "hello"}] * 900)

    async def render() -> None:
        assert (await chat_prompt(request, served)).tokens == tokenizer.encode("the end")

    assert least_pause(render, enough=1 / 2) < 1 / 2
