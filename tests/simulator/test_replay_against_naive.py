"""Replays against models that keep lists of pages, and against the real scheduler over a fake device."""

from __future__ import annotations

from array import array
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.bench.workloads.datasets.mooncake import TraceRequest
from radixkv.config import SchedulerConfig
from radixkv.simulator.concurrent_replay import Crowd
from radixkv.simulator.replay import Replay
from radixkv.simulator.traffic import BlockTraffic, TokenTraffic
from support.engine import Engine, token_bytes

BLOCK = 512


def trace_request(hash_ids, n_in_last=BLOCK):
    return TraceRequest(0.0, BLOCK * (len(hash_ids) - 1) + n_in_last, 1, list(hash_ids))


def prefixes(pages):
    return [tuple(pages[: end + 1]) for end in range(len(pages))]


class Naive:
    """A cache of pages, each named by all that leads to it; ``pages`` has those of each prompt."""

    def __init__(self, pages, capacity, *, knows_future):
        self.paths = [prefixes(each) for each in pages]
        self.capacity = capacity
        self.knows_future = knows_future
        self.last_use = {}

    def use(self, index):
        """How many pages were found; all of the prompt's are cached then, whatever the capacity."""
        path = self.paths[index]
        n_found = next((n for n, page in enumerate(path) if page not in self.last_use), len(path))
        self.last_use |= dict.fromkeys(path, index)
        return n_found

    def evict(self, index, most, keep=()):
        """To ``most`` pages, of which those to keep are none that go."""
        while len(self.last_use) > most:
            able = [page for page in self.last_use if page not in keep]
            del self.last_use[min(able, key=lambda page: self.worth(page, index))]

    def worth(self, page, index):
        value = self.last_use[page]
        if self.knows_future:
            later = range(index + 1, len(self.paths))
            value = -next((j for j in later if page in self.paths[j]), len(self.paths))
        return value, -len(page)


def naive_blocks(requests, capacity, *, knows_future):
    cache = Naive([request.hash_ids for request in requests], capacity, knows_future=knows_future)
    cached = []
    for index, request in enumerate(requests):
        cached.append(min(BLOCK * cache.use(index), request.input_length))
        cache.evict(index, capacity)
    return cached


def naive_engine(prompts, page_size, capacity, *, knows_future):
    """As radixkv does it: pages are had before the prompt is computed, and those that it reads stay."""
    starts = [range(0, len(prompt) - page_size + 1, page_size) for prompt in prompts]
    pages = [
        [tuple(prompt[start : start + page_size]) for start in each] if len(prompt) <= capacity * page_size else []
        for prompt, each in zip(prompts, starts, strict=True)
    ]  # what is refused uses nothing
    cache = Naive(pages, capacity, knows_future=knows_future)
    cached = []
    for index, prompt in enumerate(prompts):
        path = cache.paths[index]
        n_pages = -(-len(prompt) // page_size)
        if n_pages > capacity:
            cached.append(None)
            continue
        n_found = next((n for n, page in enumerate(path) if page not in cache.last_use), len(path))
        cache.evict(index - 1, capacity - (n_pages - n_found), keep=path[:n_found])
        cache.use(index)
        cached.append(min(page_size * n_found, len(prompt) - 1))
    return cached


def replayed(traffic, capacity, *, knows_future=False):
    """Cached tokens of each prompt; pool and tree are checked after each."""
    replay = Replay(traffic, capacity, "oracle" if knows_future else "lru")
    cached = []
    for index in range(len(traffic.n_tokens)):
        cached.append(replay.replay(index))
        replay.cache.check([])
    assert replay.cache.tree.n_pages_reachable <= (capacity or replay.cache.n_pages)
    return cached


def growing(page, *, most_pages, most_prompts):
    """Prompts of which many begin as others do, as lists of pages."""
    return st.lists(st.lists(page, min_size=1, max_size=most_pages), min_size=1, max_size=most_prompts)


blocks = growing(st.integers(0, 2), most_pages=6, most_prompts=14)
lengths_of_last = st.lists(st.sampled_from([1, 200, 511, 512]), min_size=14, max_size=14)
capacities = st.integers(1, 12)
knowledge = st.booleans()


@settings(max_examples=150, deadline=None)
@given(blocks, lengths_of_last, capacities, knowledge)
@example([[0, 1], [1], [0, 1, 2, 2], [0], [0, 1, 2]], [512] * 14, 2, True)
def test_traces_by_the_rule_of_blocks_find_what_a_list_of_blocks_finds(ids, lasts, capacity, knows_future):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    traffic = BlockTraffic(requests, BLOCK, "blocks")
    expected = naive_blocks(requests, capacity, knows_future=knows_future)
    assert replayed(traffic, capacity, knows_future=knows_future) == expected
    unbounded = naive_blocks(requests, 10**6, knows_future=False)
    assert replayed(traffic, None, knows_future=knows_future) == unbounded


def best_possible(paths, capacity, index=0, cached=frozenset()):
    """Most blocks found from ``index`` on by whoever keeps what he likes; tries everything."""
    if index == len(paths):
        return 0
    path = paths[index]
    n_found = next((n for n, page in enumerate(path) if page not in cached), len(path))
    had = sorted(cached | set(path))
    n_kept = min(capacity, len(had))  # a page more does no harm
    rest = (best_possible(paths, capacity, index + 1, frozenset(keep)) for keep in combinations(had, n_kept))
    return n_found + max(rest)


@settings(max_examples=60, deadline=None)
@given(growing(st.integers(0, 1), most_pages=3, most_prompts=5), st.integers(1, 3))
def test_no_policy_finds_more_than_the_oracle(ids, capacity):
    traffic = BlockTraffic([trace_request(each) for each in ids], BLOCK, "blocks")
    found = sum(replayed(traffic, capacity, knows_future=True))
    assert found == BLOCK * best_possible([prefixes(each) for each in ids], capacity)


token_prompts = st.builds(
    lambda pages, tails: [
        [token for page in each for token in [page] * 4] + [7] * tail
        for each, tail in zip(pages, tails, strict=False)
    ],
    growing(st.integers(0, 2), most_pages=5, most_prompts=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
)


@settings(max_examples=150, deadline=None)
@given(token_prompts, capacities, knowledge)
def test_token_ids_find_what_a_list_of_pages_finds(prompts, capacity, knows_future):
    traffic = TokenTraffic([token_bytes(prompt) for prompt in prompts], 4)
    expected = naive_engine(prompts, 4, capacity, knows_future=knows_future)
    assert replayed(traffic, capacity, knows_future=knows_future) == expected


@settings(max_examples=60, deadline=None)
@given(token_prompts, st.integers(3, 12))
def test_the_scheduler_over_a_device_finds_the_same(prompts, capacity):
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    engine = Engine(n_pages=capacity, page_size=4, config=config)
    cached = []
    for prompt in prompts:
        if len(prompt) > 4 * capacity:  # the intake refuses it
            cached.append(None)
            continue
        request = engine.add(prompt, max_tokens=1)
        engine.run()
        cached.append(request.n_cached)
    assert replayed(TokenTraffic([token_bytes(prompt) for prompt in prompts], 4), capacity) == cached


def tokens_of(request):
    ids = [hash_id * BLOCK + place for hash_id in request.hash_ids for place in range(BLOCK)]
    return array("i", ids[: request.input_length]).tobytes()


@settings(max_examples=40, deadline=None)
@given(blocks, lengths_of_last, st.sampled_from([64, 128, 512]), capacities, knowledge)
def test_symbols_for_pages_find_what_all_tokens_would(ids, lasts, page_size, capacity, knows_future):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    n_pages = capacity * BLOCK // page_size
    symbols = BlockTraffic(requests, page_size, "engine")
    tokens = TokenTraffic([tokens_of(request) for request in requests], page_size)
    expected = replayed(tokens, n_pages, knows_future=knows_future)
    assert replayed(symbols, n_pages, knows_future=knows_future) == expected


@settings(max_examples=40, deadline=None)
@given(blocks, lengths_of_last, st.sampled_from([64, 128, 512]), capacities, st.integers(1, 6), st.integers(1, 4))
def test_symbols_find_the_same_with_several_in_flight(ids, lasts, page_size, capacity, concurrency, n_step_blocks):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    crowds = [
        Crowd(traffic, capacity * BLOCK // page_size, concurrency, n_step_blocks * BLOCK)
        for traffic in (
            BlockTraffic(requests, page_size, "engine", abbreviates=False),
            TokenTraffic([tokens_of(request) for request in requests], page_size),
        )
    ]
    symbols, tokens = (crowd.run() for crowd in crowds)
    assert symbols == tokens
    for crowd in crowds:
        crowd.cache.check([])
    if concurrency == 1 and n_step_blocks == 4:
        alone = Replay(BlockTraffic(requests, page_size, "engine"), capacity * BLOCK // page_size, "lru").run()
        assert symbols.n_cached_tokens == alone.n_cached_tokens


@pytest.mark.parametrize(("page_size", "cached"), [(512, 512), (128, 640), (1, 699)])
def test_a_smaller_page_finds_more_of_a_last_block(page_size, cached):
    requests = [trace_request([5, 6], 188), trace_request([5, 6], 188)]
    assert replayed(BlockTraffic(requests, page_size, "engine"), 10_000) == [0, cached]
    assert replayed(BlockTraffic(requests, page_size, "blocks"), 10_000) == [0, 700]


def test_a_run_counts_what_it_evicts_and_what_it_refuses():
    prompts = [[1] * 8, [2] * 8, [1] * 8, [3] * 13, [1] * 8]
    done = Replay(TokenTraffic([token_bytes(prompt) for prompt in prompts], 4), 3, "lru").run()
    assert done.n_cached_tokens == [0, 0, 4, 0, 7]
    assert (done.n_too_large, done.n_evicted_pages, done.most_cached_pages) == (1, 2, 3)
