"""Pins: prefixes that are evicted after everything else, for a time and within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf
from operator import attrgetter
from time import monotonic
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened
from radixkv.runtime.alarms import Alarms
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.request import Request
from radixkv.tree.node import TOKEN_BYTES, Namespace, Retention
from radixkv.wire.messages import PromptPin, Submit
from radixkv.wire.request_limits import MAX_PINS, check_ttl

_MAX_SHARE = 0.5
"""Most of a cache's pages that the pins of all namespaces cover, so that room for other prompts is left. A larger
budget of a single namespace counts instead."""
_MAX_PINS = 1 << 16
"""Most pins of a cache. Pins whose pages are gone count until they end."""


class PinnedPrefix(NamedTuple):
    """How much of a prompt is pinned."""

    n_tokens: int
    """Leading tokens that a pin covers, in whole pages."""
    seconds_left: float
    """How long all of them stay pinned; 0 if there are none."""
    is_own: bool
    """Whether a pin was asked for exactly this prompt, or pins cover all its whole pages."""


_Prompt = tuple[Namespace, int]
"""Names what was asked to be pinned: its namespace, and the hash of its whole pages."""


class TierPins:
    """Pins prefixes of a page cache.

    A pin is a floor and not a lock: its pages are evicted when nothing else can be, so no request ever waits for
    it. The pins of a namespace cover at most ``budget`` of the cache's pages, and those of all namespaces half of
    them, or ``budget`` if that is more. The oldest pins give way to a new one; of one that is larger than the
    budget, only the first pages are pinned. See docs/decisions/0027-lifetimes-are-floors.md.

    Args:
        cache: the page cache.
        budget: fraction of the cache's pages.
        clock: seconds, monotonic.
    """

    def __init__(self, cache: PageCache, budget: float, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._budget = budget
        self._clock = clock
        self._pins: OrderedDict[Retention, _Prompt] = OrderedDict()
        """All pins, oldest first."""
        self._by_prompt: dict[_Prompt, Retention] = {}
        self._pins_of: dict[Namespace, OrderedDict[Retention, None]] = {}
        """The pins of each namespace, oldest first."""
        self._by_end = SortedKeyList(key=attrgetter("until"))

    @property
    def n_pages(self) -> int:
        """Pages that a pin covers. O(1)."""
        return self._cache.tree.retentions.n_pages

    @property
    def next_end(self) -> float:
        """When the next pin ends, in the clock's seconds; ``inf`` without pins. O(1)."""
        return float(self._by_end[0].until) if self._by_end else inf

    def pin(self, namespace: Namespace, tokens: bytes, until: float) -> None:
        """Pins what is cached of a sequence, in whole pages.

        A sequence has one pin, which ends as late as the latest that was asked for. A pin replaces those that it
        makes superfluous: they cover a prefix of it, and end no later. So a conversation whose turns are pinned one
        after another has one pin. O(tokens + pins that end on the path), O(pins) if they exceed the budget, and
        O(edges · log leaves) for each pin that ends.

        Args:
            namespace: namespace of the sequence.
            tokens: the sequence, little-endian int32.
            until: when the pin ends, in the clock's seconds; in the past, nothing is pinned.
        """
        self.expire()
        if until <= self._clock():
            return
        retentions = self._cache.tree.retentions
        prompt = self._prompt(namespace, tokens)
        if (last := self._by_prompt.get(prompt)) is not None:
            until = max(until, last.until)
            self._end(last)
        tokens = tokens[: self._make_room(namespace, tokens) * self._cache.page_size * TOKEN_BYTES]
        replaced = [one for one in retentions.ending(namespace, tokens) if one.until <= until]
        pin = retentions.add(namespace, tokens, until)
        self._pins[pin] = prompt
        self._by_prompt[prompt] = pin
        self._pins_of.setdefault(namespace, OrderedDict())[pin] = None
        self._by_end.add(pin)
        for older in replaced:
            self._end(older)
        if len(self._pins) > _MAX_PINS:
            self._end(next(iter(self._pins)))

    def renew(self, namespace: Namespace, tokens: bytes) -> None:
        """Pins what is cached of a sequence by now, if its pin has not ended. Costs as ``pin``."""
        if (pin := self._by_prompt.get(self._prompt(namespace, tokens))) is not None:
            self.pin(namespace, tokens, pin.until)

    def unpin(self, namespace: Namespace, tokens: bytes) -> None:
        """Ends the pin of exactly this sequence, but for a last page that it does not fill.

        Other pins of its prefixes, and of sequences that continue it, stay. O(tokens + edges · log leaves).
        """
        if (pin := self._by_prompt.get(self._prompt(namespace, tokens))) is not None:
            self._end(pin)

    def expire(self) -> None:
        """Ends the pins whose time is over. O(1) if there are none."""
        now = self._clock()
        while self._by_end and self._by_end[0].until <= now:
            self._end(self._by_end[0])

    def clear(self) -> None:
        """Ends all pins. O(pins · edges · log leaves)."""
        for pin in list(self._pins):
            self._end(pin)

    def end_of(self, adapter: str) -> None:
        """Ends the pins of an adapter. O(namespaces with pins), and what ``clear`` costs for those that end."""
        for namespace in [one for one in self._pins_of if one.adapter == adapter]:
            for pin in list(self._pins_of[namespace]):
                self._end(pin)

    def find(self, namespace: Namespace, tokens: bytes) -> PinnedPrefix:
        """Returns how much of a prompt is pinned. Changes nothing else than ``expire`` does.

        O(edges + nodes that are pinned below the prompt).
        """
        self.expire()
        retentions = self._cache.tree.retentions
        n_pages = retentions.find(namespace, tokens).n_retained
        if not n_pages:
            return PinnedPrefix(0, 0.0, is_own=False)
        n_tokens = n_pages * self._cache.page_size
        is_own = (
            self._prompt(namespace, tokens) in self._by_prompt
            or len(tokens) // TOKEN_BYTES < n_tokens + self._cache.page_size
        )
        return PinnedPrefix(n_tokens, retentions.until(namespace, tokens) - self._clock(), is_own)

    def _make_room(self, namespace: Namespace, tokens: bytes) -> int:
        """Ends the oldest pins until the sequence fits into the budget; returns how many pages of it fit.

        Those that end on its path stay: the sequence needs their pages itself.
        """
        retentions, n_pages = self._cache.tree.retentions, self._cache.n_pages
        budget = int(self._budget * n_pages)
        budget_of_all = int(max(self._budget, _MAX_SHARE) * n_pages)
        own = self._off_path(self._pins_of.get(namespace, ()), namespace, tokens)
        everyones = self._off_path(self._pins, namespace, tokens)
        while True:
            path = retentions.find(namespace, tokens)
            n_new = path.n_cached - path.n_retained
            own_room, room_of_all = budget - retentions.n_pages_of(namespace), budget_of_all - retentions.n_pages
            if n_new > own_room and self._end_oldest(own):
                continue
            if min(n_new, own_room) > room_of_all and self._end_oldest(everyones):
                continue
            return path.n_retained + min(n_new, own_room, room_of_all)

    def _off_path(self, pins: Collection[Retention], namespace: Namespace, tokens: bytes) -> Iterator[Retention]:
        """Yields the pins that did not end on the sequence's path when the first was asked for. O(pins)."""
        on_path = set(self._cache.tree.retentions.ending(namespace, tokens))
        yield from [pin for pin in pins if pin not in on_path]

    def _end_oldest(self, pins: Iterator[Retention]) -> bool:
        """Ends pins up to the first one whose end leaves fewer pages pinned; returns whether there was one."""
        n_before = self.n_pages
        for pin in pins:
            if pin in self._pins:
                self._end(pin)
            if self.n_pages < n_before:
                return True
        return False

    def _prompt(self, namespace: Namespace, tokens: bytes) -> _Prompt:
        page_bytes = self._cache.page_size * TOKEN_BYTES
        return namespace, hash(tokens[: len(tokens) // page_bytes * page_bytes])

    def _end(self, pin: Retention) -> None:
        self._cache.tree.retentions.remove(pin)
        prompt = self._pins.pop(pin)
        del self._by_prompt[prompt]
        namespace, _ = prompt
        del self._pins_of[namespace][pin]
        if not self._pins_of[namespace]:
            del self._pins_of[namespace]
        self._by_end.remove(pin)


class Pins:
    """Pins prefixes in each tier with a page cache, within the same budget. The disk tier has none.

    Args:
        caches: the page caches of all tiers that have one, the device's first.
        alarms: call ``expire`` when a pin ends.
        offer: offers a sequence to the tier below the device, with what to call when it is there.
        budget: fraction of a tier's pages that the pins of a namespace cover at most.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        caches: Sequence[PageCache],
        alarms: Alarms,
        *,
        offer: Callable[[Namespace, bytes, Callable[[Namespace, bytes], None]], None],
        budget: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._tiers = [TierPins(cache, budget, clock) for cache in caches]
        self._offer = offer
        self._alarms = alarms
        self._shares = caches[0].is_sharing
        self._budget = budget
        self._clock = clock

    def check_available(self, field: str) -> None:
        """Raises ``UnsupportedFeature``, which names ``field``, if the settings allow no pins."""
        if not self._shares:
            raise UnsupportedFeature(
                "nothing can be pinned: prefix caching is off (--no-enable-prefix-caching)", param=field
            )
        if not self._budget:
            raise UnsupportedFeature("nothing can be pinned: the server has --pin-budget 0", param=field)

    def pin(self, namespace: Namespace, tokens: bytes, ttl_s: float, *, on_device_only: bool = False) -> None:
        """Pins what is cached of a sequence, and stores it in the host tier, whatever the write policy.

        In the host tier, what is stored later is pinned when it is there. O(edges · log leaves), and a copy of the
        tokens.

        Args:
            namespace: namespace of the sequence.
            tokens: the sequence, little-endian int32.
            ttl_s: how long it is pinned, in seconds.
            on_device_only: whether it is pinned on the device alone.
        """
        until = self._clock() + ttl_s
        device, *below = self._tiers
        device.pin(namespace, tokens, until)
        if not on_device_only:
            for tier in below:
                tier.pin(namespace, tokens, until)
                self._offer(namespace, tokens, tier.renew)
        self._set_alarm()

    def unpin(self, namespace: Namespace, tokens: bytes) -> None:
        """Ends the pin of exactly this sequence, in whole pages. O(tokens + edges · log leaves)."""
        for tier in self._tiers:
            tier.unpin(namespace, tokens)

    def expire(self) -> None:
        """Ends the pins whose time is over. O(1) if there are none."""
        for tier in self._tiers:
            tier.expire()
        self._set_alarm()

    def end_of(self, adapter: str) -> None:
        """Ends the pins of an adapter, which has its digest. ``TierPins.end_of``."""
        for tier in self._tiers:
            tier.end_of(adapter)
        self._set_alarm()

    def count_pages(self) -> list[int]:
        """Returns how many pages pins cover in each tier, the device first. Costs what ``expire`` does."""
        self.expire()
        return [tier.n_pages for tier in self._tiers]

    def follow(self, message: Submit, choices: Sequence[Request]) -> PromptPins:
        """Follows a request whose message has pins.

        Raises:
            UnsupportedFeature: nothing can be pinned.
            InvalidRequest: there are too many pins, or one is invalid.
        """
        self.check_available("prompt_cache_options")
        n_prompt = choices[0].n_prompt
        if len(message.pins) > MAX_PINS:
            raise InvalidRequest(
                f"a request has {len(message.pins)} pins; at most {MAX_PINS}", param="prompt_cache_options"
            )
        for pin in message.pins:
            check_ttl(pin.ttl_s, "prompt_cache_options")
            if not 0 <= pin.n_tokens <= n_prompt:
                raise InvalidRequest(
                    f"a pin of {shortened(pin.n_tokens)} tokens does not end within the prompt of {n_prompt}",
                    param="prompt_cache_options",
                )
        return PromptPins(self, message.pins)

    def clear(self) -> None:
        """Ends all pins. O(pins · edges · log leaves)."""
        for tier in self._tiers:
            tier.clear()

    def find(self, namespace: Namespace, tokens: bytes) -> PinnedPrefix:
        """Returns how much of a prompt is pinned, in the tier with the most of it."""
        return max(tier.find(namespace, tokens) for tier in self._tiers)

    def _set_alarm(self) -> None:
        self._alarms.set(self.expire, min(tier.next_end for tier in self._tiers))


class PromptPins(Observer):
    """Pins prefixes of a request's prompt when it has ended."""

    def __init__(self, pins: Pins, prefixes: Sequence[PromptPin]) -> None:
        self._pins = pins
        self._prefixes = prefixes

    def ended(self, choices: Sequence[Request], *, is_prompt_computed: bool) -> None:
        """Pins the prefixes of a prompt that was computed. Costs as ``Pins.pin`` for each."""
        if not is_prompt_computed:
            return
        first = choices[0]
        on_device_only = not any(choice.uses_tiers for choice in choices)
        for prefix in self._prefixes:
            key = bytes(first.known_key[: prefix.n_tokens * TOKEN_BYTES])
            self._pins.pin(first.namespace, key, prefix.ttl_s, on_device_only=on_device_only)
