"""Pins of one page cache: what they keep, for how long, and how much of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from radixkv.tree.node import Namespace
from support.cases import examples
from support.engine import token_bytes
from support.pinned_cache import PAGE_SIZE, PinnedCache

SALTS = [Namespace(salt=salt) for salt in "abc"]


def test_a_pinned_prefix_outlives_what_was_used_later() -> None:
    world = PinnedCache()
    pinned, later = world.add(0, 3), world.add(100, 10)
    world.pin(pinned)
    world.squeeze(3)
    assert (world.cached(pinned), world.cached(later)) == (3, 0)


def test_a_pin_never_keeps_a_page_from_a_request() -> None:
    world = PinnedCache()
    pinned = world.add(0, 4)
    world.pin(pinned)
    world.squeeze(1)
    assert (world.cached(pinned), world.pinned(pinned), world.pins.n_pages) == (1, 1, 1)
    world.squeeze(0)
    assert (world.cached(pinned), world.pins.n_pages) == (0, 0)
    assert world.add(0, 4) == pinned
    assert world.pinned(pinned) == 0, "pages that were evicted and computed again are not pinned"


def test_a_pin_ends_after_its_time() -> None:
    world = PinnedCache()
    pinned, later = world.add(0, 3), world.add(100, 10)
    world.pin(pinned, 10.0)
    world.now = 9.0
    assert world.pins.find(Namespace(), pinned) == (6, 1.0, True)
    world.now = 10.0
    assert world.pins.find(Namespace(), pinned) == (0, 0.0, False)
    world.squeeze(10)
    assert (world.cached(pinned), world.cached(later)) == (0, 10), "it is the least recently used again"


def test_a_pin_whose_time_is_over_takes_no_room() -> None:
    world = PinnedCache()
    long, short, new = (world.add(100 * i, 2) for i in range(3))
    world.pin(long, 10.0)
    world.pin(short, 1.0)
    world.now = 1.0
    world.pin(new)
    assert [world.pinned(tokens) for tokens in (long, short, new)] == [2, 0, 2]


def test_a_pin_covers_what_is_cached_and_no_later_page() -> None:
    world = PinnedCache()
    start = world.add(0, 2)
    whole = token_bytes(list(range(8)))
    world.pin(whole)
    assert world.add(0, 4) == whole
    assert (world.pinned(whole), world.pinned(start), world.cached(whole)) == (2, 2, 4)


def test_the_oldest_pin_of_a_namespace_gives_way() -> None:
    world = PinnedCache()
    first, second, third = (world.add(100 * i, 2) for i in range(3))
    for tokens in (first, second, third):
        world.pin(tokens)
    assert [world.pinned(tokens) for tokens in (first, second, third)] == [0, 2, 2]


def test_pinning_again_renews_a_pin() -> None:
    world = PinnedCache()
    first, second, third = (world.add(100 * i, 2) for i in range(3))
    for tokens in (first, second, first, third):
        world.pin(tokens)
    assert [world.pinned(tokens) for tokens in (first, second, third)] == [2, 0, 2]
    world.now = 5.0
    world.pin(first, 10.0)
    world.pin(first, 1.0)
    assert world.pins.find(Namespace(), first).seconds_left == 10.0, "a later pin shortens no earlier one"


def test_of_a_pin_above_the_budget_the_first_pages_are_kept() -> None:
    world = PinnedCache()
    small, large = world.add(0, 2), world.add(100, 9)
    world.pin(small)
    world.pin(large)
    assert (world.pinned(small), world.pinned(large)) == (0, 4)


def test_a_pin_above_the_budget_leaves_those_of_its_prefixes() -> None:
    world = PinnedCache()
    system, other, chat = world.add(0, 2), world.add(100, 2), world.add(0, 9)
    world.pin(system, 100.0)
    world.pin(other, 100.0)
    world.pin(chat, 10.0)
    assert (world.pinned(chat), world.pinned(other)) == (4, 0)
    world.now = 10.0
    assert world.pinned(system) == 2


def test_unpin_ends_a_pin_that_does_not_cover_all_of_its_sequence() -> None:
    world = PinnedCache()
    large = world.add(0, 9)
    world.pin(large)
    assert world.pinned(large) == 4
    world.pins.unpin(Namespace(), large)
    assert world.pins.n_pages == 0, "the budget had cut it"
    world.pin(large[: 4 * PAGE_SIZE * 4])
    world.squeeze(2)
    assert world.pins.n_pages == 2
    world.pins.unpin(Namespace(), large[: 4 * PAGE_SIZE * 4])
    assert world.pins.n_pages == 0, "eviction had cut it"


def test_pages_that_several_pins_share_count_once() -> None:
    world = PinnedCache()
    system = list(range(4))
    chats = [world.add_tokens([*system, token, token]) for token in (10, 20)]
    for chat in chats:
        world.pin(chat)
    assert [world.pinned(chat) for chat in chats] == [3, 3]
    assert world.pins.n_pages == 4
    world.pins.unpin(Namespace(), chats[0])
    assert [world.pinned(chat) for chat in chats] == [2, 3]


def test_all_namespaces_together_pin_half_of_the_pages() -> None:
    world = PinnedCache()
    sequences = [world.add(0, 4, salt) for salt in SALTS]
    for salt, tokens in zip(SALTS, sequences, strict=True):
        world.pin(tokens, namespace=salt)
    assert [world.pinned(tokens, salt) for salt, tokens in zip(SALTS, sequences, strict=True)] == [0, 4, 4]


def test_a_turn_of_a_chat_replaces_the_pin_of_the_turn_before() -> None:
    world = PinnedCache(budget=1.0)
    turns = [world.add(0, n_pages) for n_pages in (2, 4, 6)]
    for tokens in turns:
        world.pin(tokens)
    world.pins.unpin(Namespace(), turns[0])
    assert world.pinned(turns[2]) == 6
    world.pins.unpin(Namespace(), turns[2])
    assert world.pins.n_pages == 0, "one pin was left of the three"


def test_a_longer_lived_pin_of_a_prefix_stays() -> None:
    world = PinnedCache(budget=1.0)
    system, chat = world.add(0, 2), world.add(0, 5)
    world.pin(system, 100.0)
    world.pin(chat, 10.0)
    assert world.pins.find(Namespace(), chat) == (10, 10.0, True)
    assert world.pins.find(Namespace(), system) == (4, 100.0, True)
    world.now = 10.0
    assert (world.pinned(chat), world.pinned(system)) == (2, 2)


def test_clear_ends_all_pins() -> None:
    world = PinnedCache()
    for i, salt in enumerate(SALTS):
        world.pin(world.add(100 * i, 1, salt), namespace=salt)
    world.pins.clear()
    assert world.pins.n_pages == 0
    world.cache.check([])


@dataclass(eq=False)
class NaivePin:
    salt: int
    prompt: list[bytes]
    """The prefixes that end with each of the pages that were asked for."""
    pages: list[bytes]
    """The prefixes that end with each of its pages."""
    until: float


TRUNKS = ([1] * 12, [1] * 3 + [2] * 9, [1] * 6 + [2] * 6, [2] * 12)
"""Sequences that share beginnings, by the token that fills each page."""


@examples(150)
@given(
    budget=st.sampled_from((0.1, 0.25, 0.6)),
    operations=st.lists(
        st.tuples(
            st.sampled_from(
                ("add", "pin", "pin", "add and pin", "add and pin", "renew", "unpin", "wait", "wait", "squeeze")
            ),
            st.sampled_from((0, 0, 1, 2)),
            st.builds(
                lambda trunk, n_pages: trunk[:n_pages], st.sampled_from(TRUNKS), st.sampled_from((2, 4, 7, 12))
            ),
            st.sampled_from((0, 1, 3, 8)),
            st.integers(0, 1),
        ),
        min_size=20,
        max_size=40,
    ),
)
def test_pins_do_what_the_naive_model_says(
    budget: float, operations: list[tuple[str, int, list[int], int, int]]
) -> None:
    world = PinnedCache(budget, n_pages=30)
    pins: list[NaivePin] = []

    def covered(salt: int | None = None) -> set[tuple[int, bytes]]:
        return {(pin.salt, page) for pin in pins if salt in (None, pin.salt) for page in pin.pages}

    for verb, salt, ids, amount, n_beyond in operations:
        doubled = [token for token in ids for _ in range(PAGE_SIZE)]
        tokens, namespace = token_bytes([*doubled, *[3] * n_beyond]), SALTS[salt]
        prefixes = [token_bytes(doubled[: (i + 1) * PAGE_SIZE]) for i in range(len(ids))]
        if verb == "wait":
            world.now += 1
            pins = [pin for pin in pins if pin.until > world.now]
            continue  # so that the next operation finds pins whose time is over
        if "add" in verb:
            world.add_tokens(doubled, namespace)
        last = [pin for pin in pins if (pin.salt, pin.prompt) == (salt, prefixes)]
        until = max([world.now + amount, *(pin.until for pin in last)])
        if verb == "renew":
            world.pins.renew(namespace, tokens)
            until = last[0].until if last else world.now
        elif verb in ("pin", "add and pin"):
            world.pin(tokens, amount, namespace)
            until = until if amount else world.now
        elif verb == "unpin":
            world.pins.unpin(namespace, tokens)
            pins = [pin for pin in pins if pin not in last]
        elif verb == "squeeze":
            world.pins.expire()
            n_before = len(covered())
            world.squeeze(3 * amount)
        if verb in ("pin", "add and pin", "renew") and until > world.now:
            cached = prefixes[: world.cached(tokens, namespace)]
            pins = [pin for pin in pins if pin not in last]
            room, room_of_all = int(budget * 30), int(max(budget, 0.5) * 30)
            on_path = [p for p in pins if p.salt == salt and p.pages and p.pages == cached[: len(p.pages)]]
            while len(covered(salt) | {(salt, page) for page in cached}) > room and any(
                pin.salt == salt and pin not in on_path for pin in pins
            ):
                pins.remove(next(pin for pin in pins if pin.salt == salt and pin not in on_path))
            fitting = cached[:room]
            while len(covered() | {(salt, page) for page in fitting}) > room_of_all:
                pins.remove(next(pin for pin in pins if pin not in on_path))
            replaced = [pin for pin in pins if pin.salt == salt and pin.pages and pin.until <= until]
            pins = [pin for pin in pins if pin not in replaced or pin.pages != fitting[: len(pin.pages)]]
            pins.append(NaivePin(salt, prefixes, fitting, until))
        for pin in pins:
            pin.pages = pin.pages[: world.cached(pin.pages[-1], SALTS[pin.salt])] if pin.pages else []
        ends = [
            max((pin.until for pin in pins if pin.salt == salt and prefix in pin.pages), default=0.0)
            for prefix in prefixes
        ]
        n_pinned = sum(end > 0 for end in ends)
        seconds_left = min(ends[:n_pinned]) - world.now if n_pinned else 0.0
        has_pin = any((pin.salt, pin.prompt) == (salt, prefixes) for pin in pins)
        is_own = n_pinned > 0 and (has_pin or n_pinned == len(prefixes))
        assert world.pins.find(namespace, tokens) == (n_pinned * PAGE_SIZE, seconds_left, is_own)
        assert world.pins.n_pages == len(covered())
        assert world.pins.next_end == min((pin.until for pin in pins), default=inf)
        if verb == "squeeze":
            assert len(covered()) == min(n_before, 3 * amount), "a pinned page is evicted when no other can be"
        world.cache.check([])
