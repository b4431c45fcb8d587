"""Comparisons of requests, against a model that keeps their values in place of digests."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from radixkv.frontend.cache_diagnostics.comparison import Verdict, compare
from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 4
PARTS = ("model", "tools", "settings")


class Asked(NamedTuple):
    """What a request has that is compared."""

    salt: str
    parts: tuple[int, ...]
    messages: tuple[int, ...]
    tokens: tuple[int, ...]

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(
            cache_salt=self.salt,
            adapter=str(self.parts[0]),
            parts=dict(zip(PARTS, self.parts, strict=True)),
            messages=[message(str(number)) for number in self.messages],
            key=pack_tokens(self.tokens),
            page_size=PAGE_SIZE,
        )


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


small = st.integers(0, 2)
requests = st.builds(
    Asked,
    st.sampled_from(["", "", "", "a"]),
    st.tuples(*[st.sampled_from([0, 0, 0, 1])] * len(PARTS)),
    st.lists(small, max_size=4).map(tuple),
    st.lists(small, min_size=1, max_size=24).map(tuple),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Asked, Asked]:
    """Draws two requests, of which the second one mostly extends the first one."""
    earlier, other = draw(requests), draw(requests)
    kept = draw(st.integers(0, len(earlier.tokens)))
    later = Asked(
        draw(st.sampled_from([earlier.salt, earlier.salt, other.salt])),
        draw(st.sampled_from([earlier.parts, other.parts])),
        draw(st.sampled_from([earlier.messages, earlier.messages + other.messages, other.messages])),
        draw(st.sampled_from([earlier.tokens, earlier.tokens[:kept]])) + other.tokens,
    )
    return earlier, later


def expected(earlier: Asked, later: Asked, n_cached: int) -> Verdict:
    if earlier.salt != later.salt:
        return Verdict("unavailable")
    n_equal = len(list(takewhile(lambda two: two[0] == two[1], zip(earlier.tokens, later.tokens, strict=False))))
    n_common, n_reusable = whole(n_equal), whole(len(earlier.tokens))
    changed = [name for name, one, two in zip(PARTS, earlier.parts, later.parts, strict=True) if one != two]
    if later.messages[: len(earlier.messages)] != earlier.messages:
        changed.append("messages")
    if changed:
        if changed[0] == "model":  # PARTS[0] is that of the adapter here
            return Verdict("changed", "model", 0, n_reusable)
        return Verdict("changed", changed[0], n_reusable, n_reusable - n_common)
    is_found = n_cached >= min(n_common, whole(len(later.tokens) - 1))
    return Verdict("same" if is_found and n_reusable - n_common <= PAGE_SIZE else "unavailable")


def whole(n_tokens: int) -> int:
    return n_tokens // PAGE_SIZE * PAGE_SIZE


@given(pairs(), st.integers(0, 48))
def test_the_verdict_is_that_of_the_values(pair: tuple[Asked, Asked], n_cached: int) -> None:
    earlier, later = pair
    n_cached = min(n_cached, len(later.tokens) - 1)
    assert compare(earlier.fingerprint(), later.fingerprint(), n_cached, 0) == expected(earlier, later, n_cached)


def test_a_match_that_ends_at_a_state_is_a_hit() -> None:
    prompt = Asked("", (0, 0, 0), (1,), tuple(range(100))).fingerprint()
    assert compare(prompt, prompt, 64, 64).outcome == "same"
    assert compare(prompt, prompt, 64, 0).outcome == "unavailable"
    assert compare(prompt, prompt, 0, 64).outcome == "unavailable"


def test_breakpoints_and_lists_of_one_text_are_no_change() -> None:
    def kept(*messages: dict[str, Any]) -> bytes:
        found = Fingerprint.of(cache_salt="", adapter="", parts={}, messages=messages, key=b"", page_size=PAGE_SIZE)
        return found.messages

    part = {"type": "text", "text": "Hi"}
    marked = part | {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"}}
    assert kept(message("Hi")) == kept(message([part])) == kept(message([marked]))
    assert kept(message("Hi")) != kept(message("Hi", "system"))
    assert kept(message([part])) != kept(message([part, part])) != kept(message([part]), message([part]))
    assert kept({"role": "assistant", "content": None}) != kept({"role": "assistant", "content": ""})


def test_a_history_that_is_rendered_otherwise_is_no_hit() -> None:
    """As by a template that drops reasoning, though the cache had all that both prompts have in common."""
    earlier = Asked("", (0, 0, 0), (1,), tuple(range(40)))
    for n_equal, outcome in ((40, "same"), (37, "same"), (35, "unavailable"), (3, "unavailable")):
        later = earlier._replace(messages=(1, 2), tokens=(*range(n_equal), *range(100, 160)))
        assert compare(earlier.fingerprint(), later.fingerprint(), n_equal, 0).outcome == outcome


def test_an_invocation_that_has_moved_is_a_change_with_its_cost() -> None:
    """What is before the earlier place is common; less than a page behind it is no change, as in other turns."""
    for place, missed in ((2, 40), (18, 24), (31, 12), (33, 8), (37, 4)):
        earlier = Asked("", (0, 0, 0), (1,), (*range(place), -7, *range(place + 1, 40)))
        later = earlier._replace(messages=(1, 2), tokens=(*range(60), -7, *range(61, 80)))
        assert (
            compare(earlier.fingerprint(), earlier._replace(messages=(1, 2)).fingerprint(), 36, 0).outcome == "same"
        )
        for one, other in ((earlier, later), (later._replace(messages=(1,)), earlier._replace(messages=(1, 2)))):
            n_left, n_missed = len(one.tokens), missed + len(one.tokens) - 40
            changed = Verdict("changed", "invocation", n_left, n_missed)
            verdict = compare(one.fingerprint(), other.fingerprint(), whole(place), 0)
            assert verdict == (changed if n_missed > PAGE_SIZE else Verdict("same"))
    elsewhere = earlier._replace(tokens=(*range(10), 99, *range(11, 37), -7, *range(38, 40)))
    assert compare(elsewhere.fingerprint(), later.fingerprint(), 8, 0) == Verdict("unavailable")


def test_a_request_of_another_api_is_not_found() -> None:
    """It has other parts, so there is nothing to compare."""
    ours = Asked("", (0, 0, 0), (1,), (1, 2, 3, 4)).fingerprint()
    theirs = Fingerprint.of(
        cache_salt="",
        adapter="",
        parts={"model": 0},
        messages=[],
        key=pack_tokens((1, 2, 3, 4)),
        page_size=PAGE_SIZE,
    )
    assert compare(theirs, ours, 0, 0) == compare(ours, theirs, 0, 0) == Verdict("not_found")
