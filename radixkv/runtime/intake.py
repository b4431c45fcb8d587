"""Makes requests of ``Submit`` messages.

Server and ``LLM`` check every message before they send it. The checks of ``wire.request_limits`` are repeated here:
another program may be at the other end of the socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from radixkv.errors import InvalidRequest, ModelNotFound, shortened
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.request import NO_ADAPTER, ActiveAdapter, PromptScoring, Recovery, Request
from radixkv.runtime.step.plan import RowSampling
from radixkv.settings.checks import MAX_PRIORITY, MIN_PRIORITY
from radixkv.settings.config import MAX_SEED
from radixkv.settings.tenants import OPERATOR, TenantConfig
from radixkv.tree.marks import Marks
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_messages import Invalidate
from radixkv.wire.messages import Pooling, Ready, Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import check_cache_salt, check_ids, check_length, check_pooled_length
from radixkv.wire.sampling import SamplingParams

_MAX_INVOCATIONS = 1023
"""Most invocations in a prefix to invalidate. Each takes milliseconds of the loop where it is long and on disk."""


class PromptKey(NamedTuple):
    """What the tree knows a prompt by, and what computes it."""

    namespace: Namespace
    key: bytes
    """Of the prompt, see ``Marks``."""
    adapter: ActiveAdapter


class Intake:
    """Validates messages and makes requests of them.

    Args:
        ready: the sizes of model and pool.
        marks: in keys, those of activated LoRAs: the tree's.
        tenants: who may send requests; none: all clients are one.
        eos_token_ids: tokens that end an output, unless its request has ``ignore_eos``.
        seed: seed of the generators that draw seeds for requests without one, one generator a tenant.
        adapters: those that requests may ask for; None: there are none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ready: Ready,
        *,
        marks: Marks,
        tenants: Sequence[TenantConfig] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        adapters: Adapters | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ready = ready
        self._adapters = adapters or Adapters()
        self._marks = marks
        self._tenants = {
            tenant.name: tenant for tenant in tenants or (TenantConfig(OPERATOR, cache_salt="request"),)
        }
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._seeds: dict[str, random.Random] = {}
        """Generators of seeds by tenant: how far one has got shows how many requests it was asked for."""
        self._clock = clock

    def make_choices(self, message: Submit) -> list[Request]:
        """Makes the ``n`` choices of a request; the first one is to lead. O(tokens).

        Raises:
            ContextLengthExceeded: prompt and output could never fit.
            InvalidRequest: another field has an invalid value; ``param`` names it.
        """
        n_prompt, sampling = len(message.tokens) // TOKEN_BYTES, message.sampling
        sender = message.namespace.tenant
        self.check_prompt(message.tokens)
        check_ids(sampling.stop_token_ids, self._ready.vocab_size, "stop_token_ids")
        check_ids(sampling.logit_bias, self._ready.vocab_size, "logit_bias")
        self._check_priority(message)
        namespace, key, adapter = self.prompt_key(message.namespace, message.tokens)
        max_tokens = 1 if message.pooling is not None else self._max_tokens(n_prompt, sampling)
        if message.pooling is not None:
            self._check_pooling(message, message.pooling)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        seed = self._draw_seed(sender) if sampling.seed is None else sampling.seed
        received_at = self._clock()
        row_sampling = self._row_sampling(sampling)
        ends = stop_token_ids if sampling.ignore_eos else stop_token_ids | self._eos_token_ids
        choices = [
            Request(
                id=message.id,
                namespace=namespace,
                known_key=bytearray() if choice else bytearray(key),
                n_prompt=n_prompt,
                max_tokens=max_tokens,
                sender=sender,
                adapter=adapter,
                choice=choice,
                sampling=replace(row_sampling, seed=(seed + choice) & MAX_SEED),
                min_tokens=sampling.min_tokens,
                stop_token_ids=ends,
                reads_cache=message.reads_cache,
                recovery=Recovery(bypasses_tree=message.is_canary and not message.reads_cache),
                uses_tiers=message.reads_cache,
                is_canary=message.is_canary,
                order=(message.priority, 0),
                received_at=received_at,
                pooling=message.pooling,
            )
            for choice in range(sampling.n)
        ]
        if sampling.prompt_logprobs is not None:
            choices[0].reads_cache = choices[0].uses_tiers = False
            choices[0].prompt_scoring = PromptScoring(sampling.prompt_logprobs)
        return choices

    def check_prompt(self, tokens: bytes) -> None:
        """Raises ``InvalidRequest`` unless the bytes are one or more int32 ids of the vocabulary. O(tokens)."""
        if not tokens:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"a prompt of {len(tokens)} bytes is not an array of int32 ids", param="prompt")
        ids = np.frombuffer(tokens, dtype="<i4")
        check_ids((int(ids.min()), int(ids.max())), self._ready.vocab_size, "prompt")

    def namespace(self, asked: CacheNamespace) -> Namespace:
        """Returns the namespace of the tree that a message means: for an activated LoRA that of the model alone.

        Raises:
            ModelNotFound: there is no such adapter.
            InvalidRequest: there is no such tenant, it may use no salt, or the salt is too long.
        """
        adapter = asked.adapter
        if adapter and not self._adapters.has(adapter):
            raise _not_loaded()
        return self._without_adapter(asked)._replace(adapter="" if adapter in self._marks else adapter)

    def prompt_key(self, asked: CacheNamespace, tokens: bytes) -> PromptKey:
        """Returns what the tree knows a sender's prompt by, and what computes it. O(tokens) for an activated LoRA.

        Raises:
            InvalidRequest: as for ``namespace``.
        """
        namespace, adapter = self.namespace(asked), asked.adapter
        if adapter not in self._marks:
            return PromptKey(namespace, tokens, ActiveAdapter(adapter))
        key, position = self._marks.key(adapter, tokens)
        if position is None:
            return PromptKey(namespace, key, NO_ADAPTER)
        token = tokens[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
        return PromptKey(namespace, key, ActiveAdapter(adapter, position, token))

    def prefixes(self, message: Invalidate, tokens: bytes) -> Iterator[tuple[Namespace, bytes]]:
        """Yields the prefixes of keys that an invalidation means, which may be those of all adapters so far.

        Checks the message at once; then O(tokens) for each activated LoRA and occurrence of its invocation.

        Args:
            message: the invalidation.
            tokens: with which the prompts begin, little-endian int32.

        Raises:
            InvalidRequest: as for ``namespace``; or an invocation occurs too often.
        """
        namespace, names = self._without_adapter(message.namespace), self._adapters.names
        adapters = ("", *names) if message.all_adapters else (message.namespace.adapter,)
        for adapter in adapters:
            if adapter and adapter not in names:
                raise _not_loaded()
            if adapter in self._marks and len(self._marks.places(adapter, tokens)) > _MAX_INVOCATIONS:
                raise InvalidRequest(
                    f"the invocation of adapter {names[adapter]!r} occurs in this prompt more than "
                    f"{_MAX_INVOCATIONS} times; invalidate a shorter prompt, or all of its cache_salt",
                    param="prompt",
                )
        return self._prefixes(namespace, adapters, tokens)

    def _prefixes(
        self, namespace: Namespace, adapters: Sequence[str], tokens: bytes
    ) -> Iterator[tuple[Namespace, bytes]]:
        for adapter in adapters:
            if adapter in self._marks:
                for key in self._marks.prefixes(adapter, tokens):
                    yield namespace, key
            else:
                yield namespace._replace(adapter=adapter), tokens

    def _without_adapter(self, asked: CacheNamespace) -> Namespace:
        """Returns the namespace for the model alone. Raises ``InvalidRequest``, see ``namespace``."""
        tenant, salt = asked.tenant, asked.cache_salt
        check_cache_salt(salt)
        isolation = self._tenant(tenant).cache_salt
        if isolation == "tenant":
            return Namespace(tenant, salt)
        if isolation == "shared" and salt:
            raise InvalidRequest(
                f"tenant {tenant!r} shares the cache of all tenants, without salts; leave cache_salt out",
                param="cache_salt",
            )
        return Namespace(salt=salt)

    def check_owns_cache(self, tenant: str) -> None:
        """Raises ``InvalidRequest`` if a tenant's cached pages are also others', and it is not the operator."""
        if tenant != OPERATOR and self._tenant(tenant).cache_salt != "tenant":
            raise InvalidRequest(
                f"tenant {tenant!r} shares its cache with others; only the operator's key may invalidate it"
            )

    def _tenant(self, name: str) -> TenantConfig:
        tenant = self._tenants.get(name)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {shortened(name)}")
        return tenant

    def _draw_seed(self, tenant: str) -> int:
        if tenant not in self._seeds:
            self._seeds[tenant] = random.Random(self._seed if tenant == OPERATOR else f"{self._seed} {tenant}")
        return self._seeds[tenant].randint(0, MAX_SEED)

    def _check_priority(self, message: Submit) -> None:
        tenant, priority = message.namespace.tenant, message.priority
        allowed = self._tenant(tenant).priority_range
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {shortened(priority)}; it must be between -2**31 and 2**31 - 1", param="priority"
            )
        if allowed is not None and not allowed[0] <= priority <= allowed[1]:
            lowest, highest = allowed
            shown = f"{lowest} to {highest}" if lowest < highest else f"only {lowest}"
            raise InvalidRequest(f"priority is {priority}; tenant {tenant!r} may use {shown}", param="priority")

    def _check_pooling(self, message: Submit, pooling: Pooling) -> None:
        """Raises ``InvalidRequest`` for what cannot be pooled, a prompt that is too long among it."""
        check_ids(pooling.token_ids, self._ready.vocab_size, "pooling")
        if message.sampling != SamplingParams():
            raise InvalidRequest(
                "a request with pooling has no answer; leave its sampling parameters out", param="pooling"
            )
        check_pooled_length(len(message.tokens) // TOKEN_BYTES, self._ready.max_pooled, self._ready.pool_limit)

    def _max_tokens(self, n_prompt: int, sampling: SamplingParams) -> int:
        """Returns the maximum tokens of one choice's output: as many as requested, or all that fit.

        Only one choice has to fit; others that do not fit beside it wait until it has finished.
        """
        ready, requested = self._ready, sampling.max_tokens
        longest = ready.max_prompt_and_answer_of(n_prompt, sampling.kv_budget)
        reason = ready.limit_reason(n_prompt, sampling.kv_budget)
        room = check_length(n_prompt, requested, longest, reason=reason)
        return room if requested is None else requested

    def _row_sampling(self, sampling: SamplingParams) -> RowSampling:
        """Returns the sampling settings that all tokens of all choices share; the seed is that of the choice.

        ``banned`` lists all tokens that can end an output, those of the model also with ``ignore_eos``; they are
        banned only before ``min_tokens``.
        """
        stop_token_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        return RowSampling(
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            seed=0,
            index=0,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            banned=tuple(sorted(token for token in stop_token_ids if token < self._ready.vocab_size)),
            n_logprobs=sampling.logprobs,
            is_masked=sampling.structured_outputs is not None,
        )


def _not_loaded() -> ModelNotFound:
    return ModelNotFound(
        "the adapter that this request asks for is not loaded, or no longer; ask for one of those in /v1/models",
        param="model",
    )
