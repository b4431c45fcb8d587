"""Texts of concurrent requests are encoded in batches, with the same results as one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.batch_tokenizer import MAX_BATCH_CHARACTERS
from radixkv.frontend.prompt_encoding import PromptEncoder
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from support.live import LIMIT_S
from support.scripted_runtime import ScriptedLoop

ResultT = TypeVar("ResultT")

LIMIT = 20_000
LETTERS = "abcdefgh"


class RecordingTokenizer(Tokenizer):
    """A tokenizer that records its batches and can be blocked."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self.calls: list[list[str]] = []
        self.released = threading.Event()
        self.released.set()

    def encode_batch(
        self,
        texts: Sequence[str],
        limit: int | None = None,
        *,
        adds_special_tokens: bool = True,
        namespace: str = "",
    ) -> list[bytes | InvalidRequest]:
        self.calls.append(list(texts))
        assert self.released.wait(LIMIT_S)
        return super().encode_batch(texts, limit, adds_special_tokens=adds_special_tokens, namespace=namespace)


@pytest.fixture
def tokenizer() -> RecordingTokenizer:
    """Has a token for each word of one letter and one that it adds; other words cannot be encoded."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<s>": 0} | {letter: i for i, letter in enumerate(LETTERS, 1)})
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return RecordingTokenizer(backend)


def text(name: str, n_characters: int = 1000) -> str:
    return f"{name} " * (n_characters // 2)


def oracle(text: str, *, adds_special_tokens: bool = True) -> bytes:
    ids = [LETTERS.index(word) + 1 for word in text.split()]
    return b"".join(token.to_bytes(4, "little") for token in ([0] if adds_special_tokens else []) + ids)


def served_by(tokenizer: Tokenizer) -> ServedModel:
    ready = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=LIMIT, n_pages=LIMIT)
    return ServedModel(name="echo", root="some/echo", ready=ready, tokenizer=tokenizer, created=0)


def encode_request(
    texts: list[str], served_model: ServedModel, *, adds: bool = True, tenant: str = ""
) -> Coroutine[Any, Any, list[bytes]]:
    return PromptEncoder(served_model=served_model, tenant=tenant, adds_special_tokens=adds).texts(texts)


def run_together(*work: Coroutine[Any, Any, ResultT]) -> list[ResultT | BaseException]:
    async def gathered() -> list[ResultT | BaseException]:
        return await asyncio.gather(*work, return_exceptions=True)

    return asyncio.run(gathered())


def test_each_concurrent_request_gets_its_own_ids(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    sizes = (10, 600, 5000, 20_000, 35_000)
    requests = [
        ([text(LETTERS[(i + j) % 8], sizes[(i + j) % 5]) for j in range(1 + i % 3)], i % 7 != 0) for i in range(60)
    ]
    found = run_together(*(encode_request(texts, served_model, adds=adds) for texts, adds in requests))
    assert found == [[oracle(text, adds_special_tokens=adds) for text in texts] for texts, adds in requests]


def test_concurrent_requests_are_encoded_in_few_calls_of_bounded_size(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    run_together(*(encode_request([text(LETTERS[i % 8], 5000)], served_model) for i in range(100)))
    assert len(tokenizer.calls) == -(-100 // (MAX_BATCH_CHARACTERS // 5000))
    assert all(sum(map(len, texts)) <= MAX_BATCH_CHARACTERS for texts in tokenizer.calls)


def test_only_the_text_that_cannot_be_encoded_fails(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    lone, long, unknown = text("a") + "\ud800", text("a", 2 * LIMIT), text("z")
    requests = ([text("a")], [lone], [text("b")], [long])
    found = run_together(*(encode_request(texts, served_model) for texts in requests))
    assert found[0::2] == [[oracle(text("a"))], [oracle(text("b"))]]
    assert isinstance(found[1], InvalidRequest)
    assert isinstance(found[3], ContextLengthExceeded)
    assert (found[1].param, found[3].param) == ("prompt", "prompt")
    requests = ([text("a")], [text("b"), unknown], [text("c")])
    found = run_together(*(encode_request(texts, served_model) for texts in requests))
    assert found[0::2] == [[oracle(text("a"))], [oracle(text("c"))]]
    assert "vocabulary" in str(found[1])


def test_texts_of_cancelled_requests_are_not_encoded(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    tokenizer.released.clear()

    async def ask() -> list[bytes]:
        first, left, last = (asyncio.create_task(encode_request([text(name)], served_model)) for name in "abc")
        while not tokenizer.calls:
            await asyncio.sleep(0.001)
        later, gone = (asyncio.create_task(encode_request([text(name)], served_model)) for name in "de")
        await asyncio.sleep(0)
        left.cancel()
        gone.cancel()
        tokenizer.released.set()
        return [ids for task in (first, last, later) for ids in await task]

    assert asyncio.run(ask()) == [oracle(text(name)) for name in "acd"]
    assert tokenizer.calls == [[text("a"), text("b"), text("c")], [text("d")]]


def test_no_other_text_waits_for_a_long_one(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    tokenizer.released.clear()

    async def ask() -> list[bytes]:
        long = asyncio.create_task(encode_request([text("a", 35_000)], served_model))
        while not tokenizer.calls:
            await asyncio.sleep(0.001)
        others = asyncio.create_task(encode_request([text("b")], served_model))
        while len(tokenizer.calls) < 2:
            await asyncio.sleep(0.001)
        assert not long.done()
        tokenizer.released.set()
        return await long + await others

    assert asyncio.run(asyncio.wait_for(ask(), LIMIT_S)) == [oracle(text("a", 35_000)), oracle(text("b"))]


def test_cancelled_long_texts_are_not_encoded_concurrently(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    tokenizer.released.clear()

    async def ask() -> list[bytes]:
        left = asyncio.create_task(encode_request([text("a", 35_000), text("b")], served_model))
        while not tokenizer.calls:
            await asyncio.sleep(0.001)
        gone, next_one = (asyncio.create_task(encode_request([text(name, 35_000)], served_model)) for name in "cd")
        await asyncio.sleep(0)
        left.cancel()
        gone.cancel()
        await asyncio.gather(left, gone, return_exceptions=True)
        for _ in range(20):  # turns and time enough for a thread to start
            await asyncio.sleep(0.001)
        assert len(tokenizer.calls) == 1
        tokenizer.released.set()
        return await next_one

    assert asyncio.run(asyncio.wait_for(ask(), LIMIT_S)) == [oracle(text("d", 35_000))]
    assert tokenizer.calls == [[text("a", 35_000)], [text("d", 35_000)]]


def test_encoding_recovers_from_a_failed_thread_start(
    tokenizer: RecordingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_model = served_by(tokenizer)

    async def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", no_thread)
            requests = [asyncio.create_task(encode_request([text("a")], served_model)) for _ in range(2)]
            failed = await asyncio.gather(
                *requests, encode_request([text("a"), text("b")], served_model), return_exceptions=True
            )
        assert [str(error) for error in failed] == ["can't start new thread"] * 3
        assert await encode_request([text("c")], served_model) == [oracle(text("c"))]

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))


def test_requests_of_a_closed_loop_do_not_block_another_loop(tokenizer: RecordingTokenizer) -> None:
    served_model = served_by(tokenizer)
    tokenizer.released.clear()

    async def end() -> None:
        async with asyncio.timeout(LIMIT_S):
            left = [asyncio.create_task(encode_request([text("a")], served_model))]
            while not tokenizer.calls:
                await asyncio.sleep(0.001)
            left.append(asyncio.create_task(encode_request([text("b")], served_model)))
            await asyncio.sleep(0)
        assert not any(task.done() for task in left)
        asyncio.get_running_loop().call_soon(tokenizer.released.set)

    asyncio.run(end())
    later = asyncio.wait_for(encode_request([text("c")], served_model), LIMIT_S)
    assert run_together(later) == [[oracle(text("c"))]]
    assert tokenizer.calls == [[text("a")], [text("c")]]
