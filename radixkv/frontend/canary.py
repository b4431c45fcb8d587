"""The canary: a known prompt whose answers with and without the cache are compared, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from array import array
from collections.abc import Callable
from typing import NamedTuple

from radixkv.errors import ConfigError, RequestError
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.checks import MAX_PRIORITY
from radixkv.settings.tenants import OPERATOR
from radixkv.wire.cache_messages import Invalidated, Tier
from radixkv.wire.messages import Ready, Submit, TokenLogprobs, pack_tokens, unpack_tokens
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams

NAMESPACE = CacheNamespace(OPERATOR, "radixkv-canary")
"""That of the prompt: no request of a client shares its pages, unless it has this ``cache_salt``."""
N_PAGES = 4
"""Whole pages of the prompt; fewer where the context is too short."""
N_ANSWER_TOKENS = 8
N_LOGPROBS = 5
"""Likeliest tokens that are compared at each place of the answer."""
ROUNDING = 0.3
"""Difference of logprobs that rounding to 16 bits may explain. Twice as much with a KV cache of 8 bits."""
_TEXT = (
    "A canary is a small bird that miners took with them into the mine. When the air became bad, the bird was the "
    "first to notice. As long as it sang, all was well, and the miners went on with their work. "
)


class Answer(NamedTuple):
    """An answer to the prompt."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    n_cached: int
    """Prompt tokens that were not computed."""
    tier: Tier
    """The lowest tier that some of them came from."""


class Canary:
    """Asks for greedy answers to a known prompt, from the cache and without it, and compares them.

    With lower tiers, it drops the prompt from the upper ones before every second or third round, so that its pages
    have been there and back. What differs is dropped from all tiers: no request finds it again.

    Its requests wait behind all others, and no statistics but its own count them.

    Args:
        client: sends the requests.
        served_model: gives the prompt's tokens.
        metrics: counts the rounds.
        interval_s: time between two rounds.
        write: takes a line about each difference.

    Raises:
        ConfigError: the context does not hold a page of a prompt and an answer.
    """

    def __init__(
        self,
        client: EngineClient,
        served_model: ServedModel,
        metrics: Metrics,
        interval_s: float,
        *,
        write: Callable[[str], None] = log_line,
    ) -> None:
        ready = served_model.ready
        tiers: list[Tier] = ["device"] if ready.n_host_slots is None else ["device", "host"]
        self._client = client
        self._metrics = metrics
        self._interval_s = interval_s
        self._write = write
        self.prompt = known_prompt(served_model)
        """The known prompt, as little-endian int32 ids."""
        self._tolerance = tolerance(ready)
        self._dropped = itertools.cycle([None, *tiers[: len(tiers) - 1 + ready.has_disk]])
        """For each round the lowest tier from which the prompt is dropped before it; None drops it from no tier."""

    async def run(self) -> None:
        """Runs a round every ``interval_s`` until it is cancelled. A round in which a request fails is left out."""
        while True:
            await asyncio.sleep(self._interval_s)
            with contextlib.suppress(RequestError):
                await self.check()

    async def check(self) -> None:
        """Runs a round. Raises ``RequestError`` if a request fails, for example while the queue is full."""
        if (lowest_tier := next(self._dropped)) is not None:
            await self._client.invalidate(b"", NAMESPACE, lowest_tier=lowest_tier)
        cached = await self._answer(reads_cache=True)
        if not cached.n_cached:  # the first round, or it was evicted
            cached = await self._answer(reads_cache=True)
        cold = await self._answer(reads_cache=False)
        if not cached.n_cached:
            return
        difference = find_difference(cached, cold, self._tolerance)
        self._metrics.count_canary(cached.tier, has_failed=difference is not None)
        if difference is not None:
            dropped = await self._client.invalidate(b"", NAMESPACE)
            self._write(self._line(cached, difference, dropped))

    async def _answer(self, *, reads_cache: bool) -> Answer:
        # A greedy answer needs no seed, but without one the runtime would draw it, and others for its clients.
        sampling = SamplingParams(
            max_tokens=N_ANSWER_TOKENS, temperature=0.0, seed=0, ignore_eos=True, logprobs=N_LOGPROBS
        )
        prompt = Submit(
            uuid.uuid4().hex,
            self.prompt,
            sampling,
            NAMESPACE,
            reads_cache=reads_cache,
            priority=MAX_PRIORITY,
            is_canary=True,
        )
        tokens, logprobs, done = bytearray(), list[TokenLogprobs](), None
        async with self._client.submit([prompt], arrived=Arrival(time.monotonic()), streams=False) as group:
            async for delta in group.deltas():
                tokens += delta.tokens
                logprobs += delta.logprobs
                done = delta.done or done
        assert done is not None, "the last delta has it"
        tier: Tier = "storage" if done.cache_use.n_fetched else "host" if done.cache_use.n_loaded else "device"
        return Answer(unpack_tokens(tokens), logprobs, done.cache_use.n_cached, tier)

    def _line(self, cached: Answer, difference: str, dropped: Invalidated) -> str:
        counts = {"device": dropped.n_on_device, "host": dropped.n_in_host, "storage": dropped.n_on_disk}
        pages = ", ".join(f"{n} of tier {tier}" for tier, n in counts.items() if n is not None)
        return (
            f"error: the canary's answer differs if {cached.n_cached} tokens of its prompt come from the cache "
            f"(lowest tier: {cached.tier}): {difference}. Its pages are dropped ({pages}). Answers of clients "
            "that came from the cache may be wrong too: /flush_cache empties it"
        )


def tolerance(ready: Ready) -> float:
    """Returns how far logprobs of equal prompts may differ: 0 where results do not depend on the batch."""
    if ready.device == "cpu" and ready.dtype == "float32":
        return 0.0
    return ROUNDING if ready.kv_cache_dtype is None else 2 * ROUNDING


def find_difference(cached: Answer, cold: Answer, tolerance: float) -> str | None:
    """Returns where two answers differ by more than rounding, as a clause; None if they do not.

    With a ``tolerance`` of 0, all bits must be equal. Otherwise logprobs of the answers' tokens may differ by it,
    and the first different tokens may be swapped if in both answers their logprobs are as close; what follows them
    is not compared.
    """
    for place, pair in enumerate(zip(cached.tokens, cold.tokens, cached.logprobs, cold.logprobs, strict=True)):
        token, cold_token, found, expected = pair
        if found == expected and token == cold_token:
            continue
        clause = (
            f"token {place} of the answer is {token} with logprob {found.logprob:.9g}, and without the cache "
            f"{cold_token} with {expected.logprob:.9g}"
        )
        if not tolerance:
            return clause
        if token == cold_token:
            if not abs(found.logprob - expected.logprob) <= tolerance:  # also catches NaN
                return clause
        elif _gap(found, cold_token) <= tolerance and _gap(expected, token) <= tolerance:
            return None
        else:
            return clause
    return None


def _gap(found: TokenLogprobs, other: int) -> float:
    """Returns by how much the token is likelier than another one; infinite if that is none of the likeliest."""
    ids = unpack_tokens(found.top_ids)
    if other not in ids:
        return float("inf")
    return found.logprob - array("f", found.top_logprobs)[ids.index(other)]


def known_prompt(served_model: ServedModel) -> bytes:
    """Returns the prompt's tokens, as little-endian int32 ids: whole pages and a part of one more.

    With pages of 16 tokens the answer fills that page, so that the next round may copy its part of the prompt.

    Raises:
        ConfigError: the context does not hold a page of a prompt and an answer.
    """
    page_size = served_model.ready.page_size
    max_tokens = served_model.max_prompt_and_answer - N_ANSWER_TOKENS
    n_pages = min(N_PAGES, (max_tokens - 1) // page_size)
    if n_pages < 1:
        raise ConfigError(
            f"canary_interval_s needs a context of at least {page_size + 1 + N_ANSWER_TOKENS} tokens: a page, one "
            f"more, and {N_ANSWER_TOKENS} of the answer; it has {served_model.max_prompt_and_answer}"
        )
    n_tokens = min(n_pages * page_size + page_size // 2 + 1, max_tokens)
    if served_model.tokenizer is None:
        ids = list(range(min(n_tokens, served_model.ready.vocab_size)))
    else:
        ids = unpack_tokens(served_model.tokenizer.encode(_TEXT))
    return pack_tokens((ids * -(-n_tokens // len(ids)))[:n_tokens])
