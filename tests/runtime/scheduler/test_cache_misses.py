"""Why the prompt of a request was not cached, as the runtime reports it at the request's end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from radixkv.wire import messages as wire
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.messages import CacheMiss, unpack_tokens
from support.fake_adapters import fake_adapters
from support.fake_device import expected_output
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done

FIRST = range(1, 25)


def miss_of(front: Frontend, prompt: Iterable[int], **changes: object) -> CacheMiss | None:
    front.serve("b", prompt, **changes)  # type: ignore[arg-type]
    return done(front.received["b"]).miss


@pytest.fixture
def front() -> Frontend:
    """A loop that has answered a prompt of ``FIRST``, in pages of 4."""
    front = Frontend()
    front.serve("a", FIRST)
    return front


def test_the_first_prompt_was_never_seen() -> None:
    front = Frontend()
    miss = miss_of(front, FIRST)
    assert (miss.reason, miss.n_matched, miss.first_difference, miss.cached) == ("never_seen", 0, None, b"")


def test_a_prompt_that_leaves_a_cached_one_says_where_and_how(front: Frontend) -> None:
    explained = front.explain([*range(1, 15), 90, 91, 92, 93, 94, 95])
    miss = miss_of(front, [*range(1, 15), 90, 91, 92, 93, 94, 95])
    assert (miss.reason, miss.n_matched, miss.first_difference) == ("differs", 12, 14)
    assert miss.first_difference == explained.first_difference
    assert unpack_tokens(miss.common) == list(range(7, 15))
    assert unpack_tokens(miss.prompt) == [90, 91, 92, 93]
    assert unpack_tokens(miss.cached) == [15, 16], "up to the end of the cached page"


def test_misses_after_the_same_pages_have_the_same_place(front: Frontend) -> None:
    first = miss_of(front, [*range(1, 15), 90, 91, 92, 93, 94, 95])
    second = miss_of(front, [*range(1, 14), *[80] * 9])
    third = miss_of(front, [*range(1, 6), *[80] * 9])
    assert first.place == second.place != third.place


def test_another_salt_is_named(front: Frontend) -> None:
    miss = miss_of(front, FIRST, salt="hers")
    assert (miss.reason, miss.n_matched, miss.n_elsewhere) == ("other_namespace", 0, 24)


def test_among_many_salts_no_other_one_is_searched() -> None:
    front = Frontend(n_pages=256)
    for index in range(20):
        front.submit(f"a{index}", FIRST, salt=f"s{index}")
    front.run()
    assert miss_of(front, FIRST, salt="hers").reason == "never_seen"


def test_an_evicted_prefix_is_named() -> None:
    front = Frontend(n_pages=16)
    front.serve("a", FIRST)
    front.serve("large", range(30, 80))
    assert miss_of(front, FIRST).reason == "evicted"


def test_a_page_behind_the_first_of_an_evicted_run_is_evicted_too() -> None:
    front = Frontend(n_pages=16)
    front.serve("a", FIRST)
    front.serve("large", range(30, 80))
    front.serve("half", [*range(1, 9), *range(90, 95)])
    miss = miss_of(front, FIRST)
    assert (miss.reason, miss.n_matched, miss.first_difference) == ("evicted", 8, 8)


def test_a_prompt_that_is_all_new_behind_the_difference_says_so() -> None:
    front = Frontend(n_pages=256)
    said = list(range(100, 160))
    front.serve("a", [*range(1, 15), 90, *said])
    nonce = miss_of(front, [*range(1, 15), 91, 92, *said])
    new = done(front.serve("c", [*range(1, 15), 93, *range(200, 260)])).miss
    assert (nonce.reason, nonce.is_new) == ("differs", False)
    assert (new.reason, new.is_new) == ("differs", True)


def test_less_than_a_page_beside_the_last_token_is_no_miss(front: Frontend) -> None:
    assert miss_of(front, FIRST) is None
    assert miss_of(front, [*FIRST, 90, 91]) is None
    assert miss_of(front, [*FIRST[:-1], 90]) is None
    assert miss_of(Frontend(), range(4)) is None


def test_a_request_that_reads_no_cache_says_so(front: Frontend) -> None:
    assert miss_of(front, FIRST, prompt_logprobs=0).reason == "not_read"


def test_a_prompt_in_chunks_and_one_with_choices_have_one_miss() -> None:
    front = Frontend(max_num_batched_tokens=8)
    miss = done(front.serve("a", FIRST, n=3)).miss
    assert (miss.reason, miss.n_matched) == ("never_seen", 0), "not its own first chunk"


def test_two_new_requests_of_one_step_share_what_the_first_commits() -> None:
    front = Frontend()
    front.submit("a", FIRST)
    front.serve("b", FIRST)
    assert (done(front.received["a"]).miss is None, done(front.received["b"]).miss is None) == (False, True)


def test_a_request_that_a_cancelled_leader_leaves_behind_keeps_its_miss() -> None:
    front = Frontend(max_num_batched_tokens=8)
    front.submit("a", FIRST, n=2)
    front.turn()
    front.cancel("a", 0)
    front.run()
    miss = done(front.received["a"]).miss
    assert miss.n_matched == 0
    assert front.serve("canary").tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)


def test_what_another_adapter_has_cached_is_named() -> None:
    """Rather than another salt that has as much."""
    adapters = [ServedAdapter(name, f"/{name}", digest) for name, digest in (("sql", "12ab"), ("law", "34cd"))]
    front = Frontend(adapters=fake_adapters(*adapters))
    front.serve("salted", FIRST, salt="hers")
    assert not miss_of(front, FIRST, adapter="12ab").is_other_adapter
    miss = miss_of(front, FIRST, adapter="34cd")
    assert (miss.reason, miss.is_other_adapter) == ("other_namespace", True)
    assert miss.n_elsewhere is not None


def test_an_adapter_that_is_not_loaded_is_refused(front: Frontend) -> None:
    front.serve("a", FIRST, adapter="12ab")
    failed = front.received["a"].terminal
    assert isinstance(failed, wire.Failed)
    assert (failed.code, failed.param) == ("model_not_found", "model")
    assert "the adapter that this request asks for is not loaded" in failed.text
