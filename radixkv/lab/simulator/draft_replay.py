"""A replay of recorded answers that asks the engine's sources of drafts for guesses, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from radixkv.runtime.cache.block_table import ComputedRow
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.open import open_sources
from radixkv.runtime.drafts.sources import Source
from radixkv.runtime.request import Request
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

_MAX_IDS = 1 << 31
"""Ids are below it, whatever the model."""


class Place(NamedTuple):
    """A place in an answer at which a step would sample a token."""

    request: Request
    """All tokens before the place are known."""
    following: bytes
    """The tokens that drafts may guess there, little-endian int32: as many as a row has, and not the answer's last
    one, which ends it and is sampled."""


class Exchange(NamedTuple):
    """A request with its answer, little-endian int32."""

    prompt: bytes
    """At least one token."""
    answer: bytes
    """Empty if it is not known."""
    prediction: bytes = b""
    """What the client expects the answer to be like; empty for none."""


class DraftReplay:
    """Answers requests with recorded tokens, in a page cache that has room for all of them.

    The recorded tokens are what a model would sample. The first one of an answer comes with its prompt.

    Args:
        config: the sources, and lengths of drafts and of matches.
        n_pages: of the cache; enough for all prompts and answers.
        page_size: tokens per page.
    """

    def __init__(self, config: SpeculativeConfig, n_pages: int, page_size: int) -> None:
        self._n_drafts = config.num_speculative_tokens
        self._cache = PageCache(n_pages, page_size)
        self.sources: dict[str, Source]
        self.sources, self._branches = open_sources(config, self._cache, _MAX_IDS)
        """The sources by name, in the order in which the engine asks them."""

    def rounds(self, exchanges: Sequence[Exchange], concurrency: int) -> Iterator[tuple[Place | None, ...]]:
        """Answers requests of clients that each send the next one when their last one has ended.

        Of a chat one request is in flight at a time. All answers go on by a token a round, as without drafts.
        Yields the place of each client; None for those that are done. With several clients, costs a sort and a copy
        of all requests first.

        Args:
            exchanges: the requests, in order.
            concurrency: number of clients.
        """
        # One client sends the requests in their order, whatever chats they are of.
        ready = _chats(exchanges) if concurrency > 1 else [[index] for index in range(len(exchanges))]

        def client() -> Iterator[Place]:
            while ready:  # once nothing is, each chat that goes on has a client
                first, *later = heappop(ready)
                yield from self.places(*exchanges[first])
                if later:
                    heappush(ready, later)

        return zip_longest(*(client() for _ in range(concurrency)))

    def places(self, prompt: bytes, answer: bytes, prediction: bytes = b"") -> Iterator[Place]:
        """Answers a request; yields each place after the answer's first token.

        Args:
            prompt: its tokens, at least one, little-endian int32.
            answer: its tokens, the same.
            prediction: those that the client expects, the same.
        """
        request = self.begin(prompt, prediction)
        for end in range(TOKEN_BYTES, len(answer), TOKEN_BYTES):
            request.known_key += answer[end - TOKEN_BYTES : end]
            yield Place(request, answer[end : min(end + self._n_drafts * TOKEN_BYTES, len(answer) - TOKEN_BYTES)])
            self._compute(request)
        request.known_key += answer[-TOKEN_BYTES:]
        self.end(request)

    def begin(self, prompt: bytes, prediction: bytes = b"") -> Request:
        """Returns a request whose prompt is computed."""
        message = Submit("a", prompt, SamplingParams(), prediction=prediction)
        request = Request(message.id, Namespace(), bytearray(prompt), len(prompt) // TOKEN_BYTES, _MAX_IDS)
        observers = [branch.follow(message, (request,)) for branch in self._branches if branch.is_chosen(message)]
        request.observers = tuple(observer for observer in observers if observer is not None)
        request.block_table = self._cache.open(request.namespace, bytes(request.known_key[:-TOKEN_BYTES]))
        self._compute(request)
        return request

    def end(self, request: Request) -> None:
        """Ends a request, as the engine does."""
        self._cache.close(request.blocks)
        self.released(request)

    def released(self, request: Request) -> None:
        """Tells the sources that a request has ended."""
        for observer in request.observers:
            observer.released(request)

    def _compute(self, request: Request) -> None:
        """Computes all known tokens, as the rows of a step do."""
        blocks, n_tokens = request.blocks, request.n_known
        assert self._cache.reserve(blocks, self._cache.pages_for(n_tokens)), "the pool is too small"
        self._cache.commit_computed([ComputedRow(blocks, request.known_key, n_tokens, 0)], 0)
        self._cache.free_replaced(blocks, 0)


def _chats(exchanges: Sequence[Exchange]) -> list[list[int]]:
    """Returns the indices of each chat's requests, in order; the chats by their first ones.

    A request continues an earlier one if its prompt begins with the prompt and the answer of that one, of several
    the longest. The last token of an answer may be missing: it ends the answer, and prompts may have another one.
    Costs a sort.
    """
    texts = [(one.prompt, True, index) for index, one in enumerate(exchanges)]
    texts += [
        (one.prompt + one.answer[:-TOKEN_BYTES], False, index)
        for index, one in enumerate(exchanges)
        if len(one.answer) > TOKEN_BYTES
    ]
    beginnings: list[tuple[bytes, int]] = []
    continued: dict[int, int] = {}
    for text, is_prompt, index in sorted(texts):
        while beginnings and not text.startswith(beginnings[-1][0]):
            beginnings.pop()
        if not is_prompt:
            beginnings.append((text, index))
        elif (earlier := next((one for _, one in reversed(beginnings) if one < index), None)) is not None:
            continued[index] = earlier
    chats: dict[int, list[int]] = {}
    for index in range(len(exchanges)):
        chats[index] = chats[continued[index]] if index in continued else []
        chats[index].append(index)
    return [chat for index, chat in chats.items() if chat[0] == index]


def n_right(tokens: bytes, following: bytes) -> int:
    """Returns how many of the first guessed tokens are what follows. O(tokens)."""
    n_tokens = 0
    n_compared = min(len(following), len(tokens)) // TOKEN_BYTES
    while n_tokens < n_compared and following.startswith(tokens[: (n_tokens + 1) * TOKEN_BYTES]):
        n_tokens += 1
    return n_tokens
