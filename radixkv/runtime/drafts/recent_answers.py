"""``RecentAnswers``: guesses from the answers that were given lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from struct import unpack_from

import numpy as np

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.sources import Guess, Source
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.request import Request
from radixkv.settings.speculative import MAX_LOOKUP
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node
from radixkv.wire.messages import Submit

MAX_NAMESPACE_TOKENS = 1 << 18
"""Tokens that are remembered of the answers of one namespace, in 7 MiB with three lengths of endings."""
MAX_TOKENS = 1 << 20
"""Tokens of all namespaces together, in 28 MiB with three lengths: a token takes 4 bytes, and 8 for each length."""
_FIRST_TOKENS = 1 << 12
"""Tokens for which a namespace has memory at first; it doubles when that is full."""
_MAX_UNNOTED = 1 << 12
"""Tokens of new answers whose endings are noted at once, if there is no guess before."""
_SLOTS_PER_TOKEN = 2
"""An ending is forgotten when another one takes its slot: with more slots that is rarer."""
_SEPARATOR = b"\xff" * TOKEN_BYTES
"""Follows each answer. No id is negative, so no byte of one looks like it, wherever a search begins."""
_HASH_BITS = 64
_POWERS = [pow(0x9E3779B97F4A7C15, exponent, 1 << _HASH_BITS) for exponent in range(MAX_LOOKUP)]
"""Factors of an ending's tokens in its hash, that of the last token first."""


class RecentAnswers(Source, Observer):
    """Guesses what followed in recent answers of the same namespace when a request's last tokens came there.

    It guesses nothing in a namespace of which no page is left in the cache. What it has of it is forgotten when an
    answer of another new namespace comes.

    Args:
        cache: the page cache of the requests.
        sizes: lengths of endings to look for, ascending; the longest one that is found decides.
        max_namespace_tokens: most tokens of one namespace, answers and what separates them.
        max_tokens: most tokens of all namespaces together; the one that got an answer least recently goes first.
    """

    def __init__(
        self,
        cache: PageCache,
        sizes: tuple[int, ...],
        *,
        max_namespace_tokens: int = MAX_NAMESPACE_TOKENS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._cache = cache
        self._roots = cache.tree.roots
        """A namespace of which all pages were dropped has no root, and another one after that."""
        self._sizes = sizes
        self._max_namespace_tokens = max_namespace_tokens
        self._max_tokens = max_tokens
        self._rings: OrderedDict[Namespace, _Ring] = OrderedDict()
        """The namespaces that got an answer least recently come first."""

    @property
    def n_tokens(self) -> int:
        """Tokens for which there is memory, of all namespaces together. O(namespaces)."""
        return sum(ring.n_tokens for ring in self._rings.values())

    def follow(self, message: Submit, choices: Sequence[Request]) -> Observer | None:
        """Follows a request, unless it is kept apart from the cache, is a check of it, or searches beams. O(1)."""
        is_apart = not message.reads_cache or message.is_canary or message.sampling.prompt_logprobs is not None
        return None if is_apart or message.sampling.use_beam_search else self

    def released(self, request: Request) -> None:
        """Takes the answer of a request if the cache has it: not if that was flushed meanwhile, for instance.

        O(tokens of the request), and of all answers when the memory doubles.
        """
        namespace, page_size = request.namespace, self._cache.page_size
        root = self._roots.get(namespace)
        if root is None or not request.n_outputs or request.recovery.bypasses_tree:
            return
        n_pages = (request.n_known - 1) // page_size  # the last token needs no KV
        if self._cache.tree.match(namespace, bytes(request.known_key)) < n_pages * page_size:
            return
        n_tokens = min(request.n_outputs, self._max_namespace_tokens - 1)
        answer = bytes(request.known_key[len(request.known_key) - n_tokens * TOKEN_BYTES :])
        ring = self._rings.get(namespace)
        if ring is None or ring.root is not root:
            self._forget_dropped()
            ring = _Ring(root, self._sizes, min(_FIRST_TOKENS, self._max_namespace_tokens))
        n_needed = ring.n_used + n_tokens + 1
        if n_needed > ring.n_tokens < self._max_namespace_tokens:
            ring = ring.enlarged(min(1 << (n_needed - 1).bit_length(), self._max_namespace_tokens))
        ring.add(answer)
        self._rings[namespace] = ring
        self._rings.move_to_end(namespace)
        while self.n_tokens > self._max_tokens and len(self._rings) > 1:
            self._rings.popitem(last=False)

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns what followed the longest ending when that came last. O(sizes), and of new answers O(tokens)."""
        ring = self._rings.get(request.namespace)
        if ring is None or ring.root is not self._roots.get(request.namespace):
            return None
        return ring.guess(request.known_key, n_tokens)

    def _forget_dropped(self) -> None:
        """Forgets the namespaces whose pages were all dropped or evicted. O(namespaces)."""
        for namespace, ring in list(self._rings.items()):
            if ring.root is not self._roots.get(namespace):
                del self._rings[namespace]


class _Ring:
    """The newest answers of one namespace, and where each ending came last.

    The place of an ending is in a slot that its hash gives, and is compared with the ending when it is looked up:
    nothing has to be removed when new answers overwrite old ones.

    Args:
        root: the namespace's.
        sizes: lengths of endings, ascending.
        n_tokens: tokens for which to have memory.
    """

    def __init__(self, root: Node, sizes: tuple[int, ...], n_tokens: int) -> None:
        self.root = root
        self.n_tokens = n_tokens
        self.n_used = 0
        """Where the next answer is written."""
        self._n_noted = 0
        """Where the answers begin whose endings are not noted yet."""
        self._sizes = sizes
        self._bytes = bytearray(n_tokens * TOKEN_BYTES)
        self._ids = np.frombuffer(self._bytes, np.int32)
        n_bits = (_SLOTS_PER_TOKEN * n_tokens - 1).bit_length()
        self._shift = _HASH_BITS - n_bits
        self._ends = {size: np.zeros(1 << n_bits, np.int32) for size in sizes}
        """By size, the place after an ending by its slot; 0 if there is none."""

    def enlarged(self, n_tokens: int) -> _Ring:
        """Returns a larger ring with the same answers, none of which was overwritten. O(tokens)."""
        ring = _Ring(self.root, self._sizes, n_tokens)
        ring.n_used = self.n_used
        ring._bytes[: self.n_used * TOKEN_BYTES] = self._bytes[: self.n_used * TOKEN_BYTES]
        return ring

    def add(self, answer: bytes) -> None:
        """Adds an answer, over the oldest ones if there is no room. O(tokens), a copy for most answers."""
        n_ids = len(answer) // TOKEN_BYTES
        start = self.n_used if self.n_used + n_ids < self.n_tokens else 0
        if start == 0:
            self._note_new_endings()
            self._n_noted = 0
        self.n_used = start + n_ids + 1
        self._bytes[start * TOKEN_BYTES : self.n_used * TOKEN_BYTES] = answer + _SEPARATOR
        if self.n_used - self._n_noted >= _MAX_UNNOTED:
            self._note_new_endings()

    def _note_new_endings(self) -> None:
        """Notes the endings of the answers that came since: of several at once, as each call takes 50 µs."""
        if self._n_noted < self.n_used:
            self._note_endings(self._n_noted, self.n_used)
            self._n_noted = self.n_used

    def _note_endings(self, start: int, stop: int) -> None:
        """Notes the places after all endings in a part of the ring that another token of the answer follows."""
        ids = self._ids[start:stop].astype(np.uint64)
        hashes = np.zeros_like(ids)
        for n_before in range(min(len(ids) - 1, self._sizes[-1])):
            hashes[n_before:] += ids[: len(ids) - n_before] * np.uint64(_POWERS[n_before])
            if (size := n_before + 1) in self._ends:
                ends = start + size + np.flatnonzero(self._ids[start + size : stop] >= 0)
                self._ends[size][hashes[ends - start - 1] >> self._shift] = ends

    def guess(self, tokens: bytearray, n_tokens: int) -> Guess | None:
        """Returns what followed the longest ending of ``tokens`` when that came last. O(sizes), and of new answers
        O(tokens)."""
        self._note_new_endings()
        n_ids = min(len(tokens) // TOKEN_BYTES, self._sizes[-1])
        last_ids = unpack_from(f"<{n_ids}i", tokens, len(tokens) - n_ids * TOKEN_BYTES)
        hashes = list(accumulate(map(mul, reversed(last_ids), _POWERS)))
        for size in reversed(self._sizes):
            if size <= n_ids:
                slot = hashes[size - 1] % (1 << _HASH_BITS) >> self._shift
                end = TOKEN_BYTES * self._ends[size].item(slot)
                if self._bytes[end - size * TOKEN_BYTES : end] == tokens[-size * TOKEN_BYTES :]:
                    followers = bytes(self._bytes[end : end + n_tokens * TOKEN_BYTES])
                    if followers := followers.partition(_SEPARATOR)[0]:
                        return Guess("answers", size, followers)
        return None
