"""Texts to ids beside the event loop; those that wait meanwhile are encoded together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.text.tokenizer import Tokenizer

CHARACTERS_AT_ONCE = 1 << 17
"""Of the texts that are encoded together, which take hundreds of bytes of memory for each token meanwhile."""

_Outcome = bytes | BaseException


@dataclass(frozen=True)
class _Request:
    texts: Sequence[str]
    adds_special_tokens: bool
    encoded: asyncio.Future[list[bytes]]

    @property
    def n_characters(self) -> int:
        return sum(map(len, self.texts))

    def end(self, outcomes: Sequence[_Outcome]) -> None:
        """Hands over what came of its texts, if its client has not left."""
        if self.encoded.done():
            return
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.encoded.set_exception(outcome)
                return
        self.encoded.set_result([outcome for outcome in outcomes if isinstance(outcome, bytes)])


class Encoder:
    """Encodes in a thread, which takes all texts that came while it was busy: a crowd of requests costs few changes
    of threads, and its texts are spread over the processors.

    Args:
        tokenizer: the model's.
        limit: most tokens of a text.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._waiting: deque[_Request] = deque()
        self._working: asyncio.Task[None] | None = None

    async def encode(self, texts: Sequence[str], *, adds_special_tokens: bool) -> list[bytes]:
        """The little-endian int32 ids of texts, which are few enough to be encoded at once.

        Raises:
            InvalidRequest: for the first text for which ``Tokenizer.encode`` does.
        """
        encoded: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(texts, adds_special_tokens, encoded))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await encoded

    async def _work(self) -> None:
        try:
            while batch := self._next_batch():
                outcomes = iter(await self._encoded(batch))
                for request in batch:
                    request.end([next(outcomes) for _ in request.texts])
        finally:
            self._working = None

    def _next_batch(self) -> list[_Request]:
        """The oldest whose clients wait, as far as they are encoded the same way; at least one if there is one."""
        batch: list[_Request] = []
        room = CHARACTERS_AT_ONCE
        while self._waiting:
            request = self._waiting[0]
            if not request.encoded.done():
                room -= request.n_characters
                if batch and (room < 0 or request.adds_special_tokens != batch[0].adds_special_tokens):
                    break
                batch.append(request)
            self._waiting.popleft()
        return batch

    async def _encoded(self, batch: Sequence[_Request]) -> Sequence[_Outcome]:
        texts = [text for request in batch for text in request.texts]
        try:
            return await asyncio.to_thread(self._outcomes, texts, batch[0].adds_special_tokens)
        except Exception as error:  # there is no thread, and later ones are to ask for it again
            return [error] * len(texts)

    def _outcomes(self, texts: Sequence[str], adds_special_tokens: bool) -> Sequence[_Outcome]:
        try:
            return self._tokenizer.encode_all(texts, self._limit, adds_special_tokens=adds_special_tokens)
        except BaseException as error:  # a panic of the package is no Exception
            # One of them cannot be encoded at all. The others are to get their ids.
            if len(texts) == 1:
                return [error]
            return [outcome for text in texts for outcome in self._outcomes([text], adds_special_tokens)]
