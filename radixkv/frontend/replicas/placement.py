"""Choice of the replica for each prompt."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from radixkv.errors import RequestError, WireError
from radixkv.frontend.replicas.recent_prefixes import RecentPrefixes, prefixes_of
from radixkv.routing import ServerChoice, is_match
from radixkv.wire.cache_messages import Matched
from radixkv.wire.messages import Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import MAX_MATCHED_TOKENS

PROBE_LIMIT_S = 0.005
"""How long a replica may take to say what it has. It answers between two steps, or while its device computes."""
MAX_PROBED_PROMPTS = 64
"""Prompts of one HTTP request that replicas are asked about; for the others, what was sent to a replica counts."""
UNKNOWN_S = 10.0
"""A prompt that was sent longer ago has been computed: the replica knows better whether it still has it."""
TOKENS_PER_ANSWER = 1024
"""Prompt tokens to compute that count as much as an answer in the load of a replica."""
_TOKEN_BYTES = 4

Reason = Literal["prefix", "recent", "load", "new", "silent", "only", "queue_full"]
"""Why a prompt was sent to a replica.

``prefix``: it says that it has the most of the prompt. ``recent``: the most was sent to it lately. ``load``: one
that has more is busy. ``new``: none has enough of it. ``silent``: none is known to have enough, and one has not
said in time. ``only``: no other takes requests. ``queue_full``: another one has refused it.
"""


class Replica(Protocol):
    """What the choice needs to know of a replica."""

    @property
    def load(self) -> float:
        """The sum of ``Place.load`` of the requests that have not ended."""
        ...

    @property
    def empty_since(self) -> float:
        """When its cache was emptied last, in monotonic seconds; 0 if it was not since the start."""
        ...

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """Says how much of each prompt every tier has. Raises ``RequestError``."""
        ...


class Place(NamedTuple):
    """Where a prompt is sent."""

    number: int
    """The number of the replica."""
    load: float
    """How much the prompt adds to its load: its number of answers, and 1 for each 1,024 tokens to compute."""


class Placement:
    """Chooses the replica that has the most of a prompt, unless it is busy, by the rule of ``ServerChoice``.

    A replica has what it says, or what was sent to it in the last seconds if that is more. For a replica that does
    not answer in time, all counts that is remembered of what was sent to it.

    Args:
        beginning: returns the adapter that computes the beginning of a prompt, and its key, as
            ``ServedModel.beginning``. None: the request's adapter computes all of it.
        probe_limit_s: how long a replica may take to say what it has.
        clock: seconds, monotonic; that of ``Replica.empty_since``.
    """

    def __init__(
        self,
        beginning: Callable[[str, bytes], tuple[str, bytes]] | None = None,
        *,
        probe_limit_s: float = PROBE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beginning = beginning or _whole_prompt
        self._clock = clock
        self._probe_limit_s = probe_limit_s
        self._choice: ServerChoice[int] = ServerChoice()
        self._recent: RecentPrefixes[int] = RecentPrefixes()
        self._asking: dict[int, asyncio.Task[Sequence[int] | None]] = {}
        """Questions without an answer so far, by the number of the replica."""
        self._placed: Counter[tuple[int, Reason]] = Counter()

    async def probe(self, replicas: Mapping[int, Replica], prompts: Sequence[Submit]) -> dict[int, Sequence[int]]:
        """Returns how much of the first prompts those replicas have that answer in time, in tokens.

        A token on disk counts half, because it has to be fetched. A replica is not asked before it has answered the
        question before.

        Args:
            replicas: whom to ask, by number; one alone is not asked.
            prompts: of one HTTP request.
        """
        asked = _can_be_asked(prompts)
        if len(replicas) < 2 or not asked:
            return {}

        async def ask(replica: Replica) -> Sequence[int] | None:
            tokens, first = [prompt.tokens for prompt in asked], prompts[0]
            try:
                matched = await replica.match(tokens, first.namespace)
            except (RequestError, WireError):
                return None
            return [match.n_on_device + match.n_in_host + match.n_on_disk // 2 for match in matched.prompts]

        self._asking = {index: task for index, task in self._asking.items() if not task.done()}
        idle = {index: replica for index, replica in replicas.items() if index not in self._asking}
        tasks = {index: asyncio.create_task(ask(replica)) for index, replica in idle.items()}
        self._asking |= tasks
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._probe_limit_s)
        answers = {index: task.result() for index, task in tasks.items() if task.done()}
        return {index: answer for index, answer in answers.items() if answer is not None}

    def choose(
        self,
        prompt: Submit,
        replicas: Mapping[int, Replica],
        found: Mapping[int, int],
        *,
        was_refused: bool = False,
    ) -> Place:
        """Returns the replica for a prompt, and remembers that it is sent there. O(prompt).

        Args:
            prompt: the prompt.
            replicas: from which to choose, by number.
            found: how many of its tokens each replica has that says so.
            was_refused: whether another replica has refused it, because its queue is full.
        """
        now_s = self._clock()
        namespace = prompt.namespace
        adapter, key = self._beginning(namespace.adapter, prompt.tokens)
        prefixes = prefixes_of(key, "\0".join((namespace.tenant, adapter, namespace.cache_salt)).encode())
        since = {
            index: max(replica.empty_since, now_s - UNKNOWN_S if index in found else 0.0)
            for index, replica in replicas.items()
        }
        recent = self._recent.matched(prefixes, since) if prompt.reads_cache else {}
        matched = {index: max(found.get(index, 0), recent.get(index, 0) // _TOKEN_BYTES) for index in replicas}
        loads = {index: replica.load for index, replica in replicas.items()}
        n_tokens = len(prompt.tokens) // _TOKEN_BYTES
        chosen = self._choice.choose(n_tokens, matched, loads, now_s)
        self._recent.add(prefixes, chosen, now_s)
        n_most = max(matched.values())
        reason: Reason
        if was_refused:
            reason = "queue_full"
        elif len(replicas) == 1:
            reason = "only"
        elif not is_match(n_most, n_tokens):
            reason = "silent" if prompt.reads_cache and replicas.keys() - found.keys() else "new"
        elif matched[chosen] < n_most:
            reason = "load"
        else:
            reason = "prefix" if found.get(chosen, 0) == n_most else "recent"
        self._placed[chosen, reason] += 1
        return Place(chosen, prompt.sampling.n + (n_tokens - matched[chosen]) / TOKENS_PER_ANSWER)

    def n_placed(self, index: int) -> dict[str, int]:
        """Returns how many prompts were sent to a replica, by ``Reason``."""
        return {reason: self._placed[index, reason] for reason in get_args(Reason)}


def _whole_prompt(adapter: str, tokens: bytes) -> tuple[str, bytes]:
    return adapter, tokens


def _can_be_asked(prompts: Sequence[Submit]) -> Sequence[Submit]:
    """Returns the first prompts, as many as replicas answer quickly; none if they are of several namespaces."""
    first = prompts[0]
    asked: list[Submit] = []
    n_bytes = 0
    for prompt in prompts[:MAX_PROBED_PROMPTS]:
        n_bytes += len(prompt.tokens)
        if asked and n_bytes > MAX_MATCHED_TOKENS * _TOKEN_BYTES:
            break
        if not prompt.reads_cache or prompt.namespace != first.namespace:
            return ()
        asked.append(prompt)
    return asked
