"""From a ``Submit`` to requests. What the frontend has checked is checked again: it may be another program."""

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
    """Makes requests of messages, or says why it does not.

    Args:
        vocab_size: token ids are below this.
        max_model_len: longest prompt and answer together, in tokens.
        n_pool_tokens: tokens that the pool holds.
        eos_token_ids: end an answer, unless its request ignores them.
        seed: draws the seeds of requests that bring none.
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

    def choices(self, message: Submit) -> list[Request]:
        """The choices of a request, of which the first is to lead. O(tokens).

        Raises:
            ContextLengthExceeded: prompt and answer could never fit.
            InvalidRequest: another field has a value that it cannot have; ``param`` names it.
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
        ends = frozenset(sampling.stop_token_ids)
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
                stop_token_ids=ends if sampling.ignore_eos else ends | self._eos_token_ids,
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
        """Raises ``InvalidRequest`` if the bytes are not one or more ids of the vocabulary. O(tokens)."""
        if not tokens:
            raise InvalidRequest("a prompt is empty; it needs at least one token", param="prompt")
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"a prompt of {len(tokens)} bytes is not of int32 ids", param="prompt")
        ids = np.frombuffer(tokens, dtype="<i4")
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self._vocab_size:
            raise InvalidRequest(
                f"token id {least if least < 0 else most} is outside the vocabulary of {self._vocab_size}",
                param="prompt",
            )

    def namespace(self, salt: str) -> Namespace:
        """The namespace of a salt. Raises ``InvalidRequest`` if it is too long."""
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

    def _max_tokens(self, n_prompt: int, asked: int | None) -> int:
        """Most tokens of one answer. The last one's KV is never computed, so that the pool may lack room for it.

        Each choice fits if one does: what does not fit beside the others waits until they have ended.
        """
        n_room = min(self._max_model_len, self._n_pool_tokens + 1) - n_prompt
        max_tokens = n_room if asked is None else asked
        if n_room < 1 or max_tokens > n_room:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens and max_tokens is {asked}, but the context is "
                f"{self._max_model_len} tokens and the pool {self._n_pool_tokens}; shorten one of them",
                param="max_tokens" if n_room >= 1 else "prompt",
            )
        return max_tokens

    def _row_sampling(self, sampling: SamplingParams, seed: int) -> RowSampling:
        """What is the same for all tokens of a choice; ``banned`` holds what may not end it too early."""
        ends = self._eos_token_ids.union(sampling.stop_token_ids)
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
            banned=tuple(sorted(token for token in ends if token < self._vocab_size)),
            n_logprobs=sampling.logprobs,
        )
