"""Validates ``Submit`` messages and makes requests of them.

The frontend has validated every message already, but another program may be at the other end of the socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from time import monotonic

import numpy as np

from radixkv.config import MAX_SEED
from radixkv.errors import ContextLengthExceeded, InvalidRequest, shortened
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import RowSampling
from radixkv.sampling import SamplingParams
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire import Submit

MAX_SALT_BYTES = 128
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1


class Intake:
    """Validates messages and makes requests of them.

    Args:
        vocab_size: token ids are below this.
        max_model_len: maximum of prompt and output together, in tokens.
        n_pool_tokens: tokens for which the pool has KV pages.
        eos_token_ids: tokens that end an output, unless its request has ``ignore_eos``.
        seed: seed of the generator that draws seeds for requests without one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        n_pool_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._n_pool_tokens = n_pool_tokens
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(seed)
        self._clock = clock

    def make_choices(self, message: Submit) -> list[Request]:
        """Makes the ``n`` choices of a request; the first one is to lead. O(tokens).

        Raises:
            ContextLengthExceeded: prompt and output could never fit.
            InvalidRequest: another field has an invalid value; ``param`` names it.
        """
        n_prompt, sampling = len(message.tokens) // TOKEN_BYTES, message.sampling
        self.check_prompt(message.tokens)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", sampling.logit_bias)
        if not MIN_PRIORITY <= message.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {shortened(message.priority)}; it must be between -2**31 and 2**31 - 1",
                param="priority",
            )
        namespace, max_tokens = self.namespace(message.cache_salt), self._max_tokens(n_prompt, sampling.max_tokens)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        seed = self._seeds.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed
        received_at = self._clock()
        choices = [
            Request(
                id=message.id,
                namespace=namespace,
                tokens=bytearray(message.tokens),
                n_prompt=n_prompt,
                max_tokens=max_tokens,
                choice=choice,
                sampling=self._row_sampling(sampling, (seed + choice) & MAX_SEED),
                min_tokens=sampling.min_tokens,
                stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | self._eos_token_ids,
                reads_cache=message.reads_cache,
                priority=message.priority,
                received_at=received_at,
            )
            for choice in range(sampling.n)
        ]
        if sampling.prompt_logprobs is not None:
            choices[0].reads_cache = False
            choices[0].n_prompt_logprobs = sampling.prompt_logprobs
        return choices

    def check_prompt(self, tokens: bytes) -> None:
        """Raises ``InvalidRequest`` unless the bytes are one or more int32 ids of the vocabulary. O(tokens)."""
        if not tokens:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"a prompt of {len(tokens)} bytes is not an array of int32 ids", param="prompt")
        ids = np.frombuffer(tokens, dtype="<i4")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidRequest(
                f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of {self._vocab_size}",
                param="prompt",
            )

    def namespace(self, salt: str) -> Namespace:
        """Returns the namespace of a cache salt. Raises ``InvalidRequest`` if the salt is too long."""
        n_bytes = len(salt.encode("utf-8", "surrogatepass"))
        if n_bytes > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt has {n_bytes} bytes; at most {MAX_SALT_BYTES}", param="cache_salt")
        return Namespace(salt=salt)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"{name} has {shortened(token)}, which is outside the vocabulary of {self._vocab_size}",
                    param=name,
                )

    def _max_tokens(self, n_prompt: int, requested: int | None) -> int:
        """Returns the maximum tokens of one choice's output: ``requested``, or all that fit.

        The pool may be one token short: the last token's KV is never computed. Only one choice has to fit; others
        that do not fit beside it wait until it has finished.
        """
        n_available = min(self._max_model_len, self._n_pool_tokens + 1) - n_prompt
        max_tokens = n_available if requested is None else requested
        if n_available < 1 or max_tokens > n_available:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens and max_tokens is {requested}, but the context length is "
                f"{self._max_model_len} tokens and the pool holds {self._n_pool_tokens}; shorten one of them",
                param="max_tokens" if n_available >= 1 else "prompt",
            )
        return max_tokens

    def _row_sampling(self, sampling: SamplingParams, seed: int) -> RowSampling:
        """Returns the sampling settings that all tokens of a choice share.

        ``banned`` lists the stop tokens; they apply only before ``min_tokens``.
        """
        stop_token_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        return RowSampling(
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            seed=seed,
            index=0,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            banned=tuple(sorted(token for token in stop_token_ids if token < self._vocab_size)),
            n_logprobs=sampling.logprobs,
        )
