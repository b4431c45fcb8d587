"""The model that the server serves, with the threads that tokenize for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from radixkv.errors import InvalidRequest, ModelNotFound, UnsupportedFeature, enumerated, shortened
from radixkv.frontend.batch_tokenizer import BatchTokenizer
from radixkv.frontend.kept_answers import KeptAnswers
from radixkv.generation.models import GenerationModel
from radixkv.generation.nonces import NonceFilter
from radixkv.settings.checks import MAX_PRIORITY, MIN_PRIORITY
from radixkv.settings.config import Task
from radixkv.tree.marks import Marks
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.messages import Pooling
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import check_cache_salt, check_session_id

ResultT = TypeVar("ResultT")
_MAX_LOST_ADAPTERS = 256


class SerialExecutor:
    """Runs work in threads, one call at a time, even if the caller no longer waits for the running one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns or raises what ``work`` does. Work whose caller is cancelled before it starts never starts."""
        await self._lock.acquire()
        # A thread cannot be ended: after its caller has left it continues, and the next call waits for it.
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(running)


@dataclass(frozen=True, kw_only=True)
class ServedModel(GenerationModel):
    """The one model of the server, perhaps with an adapter."""

    name: str
    """The name that replies and metrics have."""
    other_names: tuple[str, ...] = ()
    """Further names that requests may have."""
    adapter: str = ""
    """Digest of the adapter that this is the model with; empty: the model alone."""
    invocation_tokens: tuple[int, ...] | None = None
    """Of an activated LoRA, which acts from their last occurrence in a prompt on; None: it acts everywhere."""
    parent: str | None = None
    """With an adapter: the name of the model alone."""
    alone: ServedModel | None = field(default=None, compare=False, repr=False)
    """With an adapter: the model alone, which has what all adapters share."""
    adapted: dict[str, ServedModel] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The model with each of its adapters, by their names; those that come and go are added and removed."""
    adapter_names: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The name that each adapter has, or had last, by its digest, until it is forgotten; of several the first."""
    lost_adapters: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Why adapters are not served any more that no client has unloaded, by their names; the latest come last."""
    root: str
    """The folder or hub name that the user gave."""
    tokenizer_info: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``tokenizer_config.json`` that ``/tokenizer_info`` shows."""
    created: int
    """When the server loaded the model, in seconds since 1970."""
    max_token_characters: int | None = None
    """Most characters of one token. None if unknown: then no text is refused before it is tokenized."""
    priority_range: tuple[int, int] = (MIN_PRIORITY, MAX_PRIORITY)
    """Lowest and highest ``priority`` that a request may have."""
    caches_prompts: bool = True
    """Whether what is computed of a prompt stays in the cache."""
    pins_prompts: bool = True
    """Whether clients may pin prompts."""
    learns_pauses: bool = True
    """Whether the runtime is told when a conversation pauses, so that it can learn for how long."""
    task: Task = "generate"
    """What the server does with prompts."""
    pooling: Pooling = field(default_factory=Pooling)
    """What the runtime reports of prompts, if the task is not to generate."""
    normalizes: bool = True
    """Whether embeddings get length 1."""
    hidden_size: int = 0
    """Values of an embedding."""
    names_tokens_by_id: bool = False
    """Whether logprobs name tokens by their ids, in requests that do not say."""
    nonce_filter: NonceFilter | None = field(default_factory=NonceFilter)
    """Removes known nonces from system messages; None leaves them."""
    one_at_a_time: SerialExecutor = field(default_factory=SerialExecutor)
    """Runs long tokenizing and rendering: tokenizing takes hundreds of bytes of memory per token."""

    @cached_property
    def batch_tokenizer(self) -> BatchTokenizer:
        """Tokenizes texts of moderate length, also those for adapters. Requires a tokenizer."""
        if self.alone is not None:
            return self.alone.batch_tokenizer
        assert self.tokenizer is not None
        return BatchTokenizer(self.tokenizer, self.max_prompt_and_answer)

    @cached_property
    def kept_answers(self) -> KeptAnswers | None:
        """The tokens of answers, also of adapters, for later turns; None if nothing is cached or the tokenizer does
        not allow it."""
        if self.alone is not None:
            return self.alone.kept_answers
        if self.tokenizer is None or not self.caches_prompts:
            return None
        return KeptAnswers.create(self.tokenizer, self.eos_token_ids)

    def namespace(self, tenant: str, cache_salt: str | None) -> CacheNamespace:
        """Returns whose KV a request for this model may share.

        Args:
            tenant: who has sent it.
            cache_salt: of the request; None: it has none.
        """
        return CacheNamespace(tenant, cache_salt or "", self.adapter)

    @property
    def first_adapter(self) -> str:
        """Digest of the adapter that computes the beginnings of prompts: an activated LoRA does not."""
        return self.adapter if self.invocation_tokens is None else ""

    def key(self, tokens: bytes) -> bytes:
        """Returns the key of a prompt: those of two prompts begin alike as far as they share pages. O(tokens)."""
        if self.invocation_tokens is None:
            return tokens
        marks = Marks()
        marks.add(self.adapter, self.invocation_tokens)
        return marks.key(self.adapter, tokens).key

    def beginning(self, adapter: str, tokens: bytes) -> tuple[str, bytes]:
        """Returns the digest of the adapter that computes the beginning of a prompt, and the prompt's key.

        O(adapters), and ``key``.

        Args:
            adapter: digest of the prompt's own; empty: the model alone.
            tokens: the prompt, little-endian int32.
        """
        for model in self.adapted.values():
            if model.adapter == adapter:
                return model.first_adapter, model.key(tokens)
        return adapter, tokens

    def without_nonces(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Returns messages as the template gets them, and counts no nonce. O(messages)."""
        return messages if self.nonce_filter is None else NonceFilter().remove(messages)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may have."""
        return (self.name, *self.other_names)

    @property
    def warnings(self) -> list[str]:
        """Consequences of the settings that the user may not have intended, one line each."""
        lines = []
        if self.ready.pool_limit is not None:
            lines.append(f"{self.ready.pool_limit}: longer requests are refused")
        if self.tokenizer is None:
            lines.append(f"{self.root} has no tokenizer.json: prompts are token ids, unless --tokenizer is given")
        return lines

    def __post_init__(self) -> None:
        if not self.adapter:
            for adapter in self.ready.adapters:
                self.add_adapter(adapter)

    def add_adapter(self, adapter: ServedAdapter) -> None:
        """Lets requests ask for an adapter, in place of one of the same name. O(names)."""
        self.remove_adapter(adapter.name)
        self.lost_adapters.pop(adapter.name, None)
        if all(one.adapter != adapter.digest for one in self.adapted.values()):
            self.adapter_names[adapter.digest] = adapter.name
        self.adapted[adapter.name] = replace(
            self,
            name=adapter.name,
            other_names=(),
            root=adapter.path,
            created=int(time.time()),
            adapter=adapter.digest,
            invocation_tokens=adapter.invocation_tokens,
            parent=self.name,
            alone=self,
        )

    def remove_adapter(self, name: str, reason: str = "") -> None:
        """Lets no request ask for an adapter any more. Does nothing if there is none of this name. O(names).

        Args:
            name: of the adapter.
            reason: why, if no client has asked for it; errors tell it.
        """
        if reason:
            self.lost_adapters[name] = reason
            if len(self.lost_adapters) > _MAX_LOST_ADAPTERS:
                del self.lost_adapters[next(iter(self.lost_adapters))]
        removed = self.adapted.pop(name, None)
        same = [] if removed is None else [one for one in self.adapted.values() if one.adapter == removed.adapter]
        if same:
            self.adapter_names[same[0].adapter] = same[0].name

    def forget_adapter(self, digest: str) -> None:
        """Forgets what an adapter was called, unless requests may ask for it. O(names)."""
        if all(one.adapter != digest for one in self.adapted.values()):
            self.adapter_names.pop(digest, None)

    def named(self, name: str | None, field: str = "model") -> ServedModel:
        """Returns the model of a name that a request gives: this one also for None, or with one of its adapters.

        Raises:
            ModelNotFound: there is none; it names ``field``.
        """
        if name is None or name in self.names:
            return self
        if (adapted := self.adapted.get(name)) is not None:
            return adapted
        if (reason := self.lost_adapters.get(name)) is not None:
            raise ModelNotFound(
                f"the adapter {shortened(name)} is not served any more: {reason}; load it again", param=field
            )
        others = f", also under the names {enumerated(self.other_names)}" if self.other_names else ""
        adapters = f", and its adapters {enumerated(self.adapted)}" if self.adapted else ""
        raise ModelNotFound(
            f"there is no model {shortened(name)}; this server serves {self.name!r} only{others}{adapters}",
            param=field,
        )

    def check_caches(self, field: str) -> None:
        """Raises ``UnsupportedFeature``, which names ``field``, if prompts cannot be computed for the cache."""
        if not self.caches_prompts:
            raise UnsupportedFeature(
                "a prompt cannot be computed for the cache by a server that caches none; start it without "
                "--no-enable-prefix-caching",
                param=field,
            )

    def check_request(self, priority: int | None, cache_salt: str | None, session_id: str | None) -> None:
        """Raises ``InvalidRequest`` for a ``priority`` that clients may not have, or a text that is too long."""
        lowest, highest = self.priority_range
        if priority is not None and not lowest <= priority <= highest:
            allowed = f"{lowest} to {highest}" if lowest < highest else f"only {lowest}"
            raise InvalidRequest(
                f"priority is {priority}; this server allows {allowed}: leave it out, or start the server with "
                "--priority-range MIN,MAX",
                param="priority",
            )
        check_cache_salt(cache_salt or "")
        check_session_id(session_id or "")
