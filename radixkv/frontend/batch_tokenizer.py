"""Tokenizing in a thread, with all waiting texts in one batch (decision 12)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.errors import InvalidRequest
from radixkv.text.tokenizer import Tokenizer

MAX_BATCH_CHARACTERS = 1 << 17
"""Most characters of one batch: tokenizing takes hundreds of bytes of memory per token."""

_EncodeResult = bytes | BaseException


@dataclass(frozen=True)
class _EncodeRequest:
    texts: Sequence[str]
    adds_special_tokens: bool
    tenant: str
    encoded: asyncio.Future[list[bytes]]

    @property
    def options(self) -> tuple[bool, str]:
        return self.adds_special_tokens, self.tenant

    @property
    def n_characters(self) -> int:
        return sum(map(len, self.texts))

    def finish(self, results: Sequence[_EncodeResult]) -> None:
        """Hands over the ids or the first error, unless the caller has been cancelled."""
        if self.encoded.done():
            return
        for index, result in enumerate(results):
            if isinstance(result, BaseException):
                if isinstance(result, InvalidRequest) and len(results) > 1:
                    result.index = index
                self.encoded.set_exception(result)
                return
        self.encoded.set_result([result for result in results if isinstance(result, bytes)])


class BatchTokenizer:
    """Tokenizes texts in a thread; texts that arrive while it works form the next batch.

    This way few thread switches serve many concurrent requests, and the tokenizer spreads a batch over the
    processors.

    Args:
        tokenizer: of the served model.
        limit: most tokens of a text.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._waiting: deque[_EncodeRequest] = deque()
        self._working: asyncio.Task[None] | None = None

    async def encode(self, texts: Sequence[str], *, adds_special_tokens: bool, tenant: str) -> list[bytes]:
        """Returns the little-endian int32 ids of each text, which ``tenant`` has sent.

        Raises:
            InvalidRequest: ``Tokenizer.encode`` refuses a text; the error is that of the first, with its number.
        """
        encoded: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_EncodeRequest(texts, adds_special_tokens, tenant, encoded))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await encoded

    async def _work(self) -> None:
        try:
            while batch := self._next_batch():
                results = iter(await self._encode_batch(batch))
                for request in batch:
                    request.finish([next(results) for _ in request.texts])
        finally:
            self._working = None

    def _next_batch(self) -> list[_EncodeRequest]:
        """Takes the oldest waiting requests with equal options, up to ``MAX_BATCH_CHARACTERS`` but at least one.

        Drops requests whose callers have been cancelled.
        """
        batch: list[_EncodeRequest] = []
        room = MAX_BATCH_CHARACTERS
        while self._waiting:
            request = self._waiting[0]
            if not request.encoded.done():
                room -= request.n_characters
                if batch and (room < 0 or request.options != batch[0].options):
                    break
                batch.append(request)
            self._waiting.popleft()
        return batch

    async def _encode_batch(self, batch: Sequence[_EncodeRequest]) -> Sequence[_EncodeResult]:
        texts = [text for request in batch for text in request.texts]
        try:
            return await asyncio.to_thread(self._encode_all, texts, *batch[0].options)
        except Exception as error:  # no thread could be started; later requests try again
            return [error] * len(texts)

    def _encode_all(self, texts: Sequence[str], adds_special_tokens: bool, tenant: str) -> Sequence[_EncodeResult]:
        try:
            return self._tokenizer.encode_batch(
                texts, self._limit, adds_special_tokens=adds_special_tokens, namespace=tenant
            )
        except BaseException as error:  # a panic of the tokenizers package is not an Exception
            # One of the texts cannot be encoded; the others must still get their ids.
            if len(texts) == 1:
                return [error]
            return [result for text in texts for result in self._encode_all([text], adds_special_tokens, tenant)]
