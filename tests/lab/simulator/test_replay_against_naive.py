"""Replays compared with naive lists of pages, and with the real scheduler on a fake device."""

from __future__ import annotations

from array import array
from itertools import combinations
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.lab.simulator.caches import CacheSettings, CostModel
from radixkv.lab.simulator.concurrent_replay import ConcurrentReplay
from radixkv.lab.simulator.replay import Replay
from radixkv.lab.simulator.traffic import BlockTraffic, TokenTraffic
from support.cases import examples, rest_nightly
from support.engine import GHOST_CAPACITY, Engine, token_bytes
from support.naive_cache import BLOCK, Naive, prefixes, trace_request


def naive_blocks(requests, capacity, *, knows_future, knows_ends=False):
    pages = [request.hash_ids for request in requests]
    cache = Naive(pages, capacity, knows_future=knows_future, knows_ends=knows_ends)
    cached = []
    for index, request in enumerate(requests):
        cached.append(min(BLOCK * cache.use(index), request.input_length))
        cache.evict(index, capacity)
    return cached


def naive_engine(prompts, page_size, capacity, *, knows_future):
    """Replays like radixkv: allocates pages before a prompt is computed, and never evicts those it reads."""
    starts = [range(0, len(prompt) - page_size + 1, page_size) for prompt in prompts]
    pages = [
        [tuple(prompt[start : start + page_size]) for start in each] if len(prompt) <= capacity * page_size else []
        for prompt, each in zip(prompts, starts, strict=True)
    ]  # a refused prompt uses no page
    cache = Naive(pages, capacity, knows_future=knows_future)
    cached = []
    for index, prompt in enumerate(prompts):
        path = cache.paths[index]
        n_pages = -(-len(prompt) // page_size)
        if n_pages > capacity:
            cached.append(None)
            continue
        n_cached_pages = next((n for n, page in enumerate(path) if page not in cache.last_use), len(path))
        cache.evict(index - 1, capacity - (n_pages - n_cached_pages), keep=path[:n_cached_pages])
        cache.use(index)
        cached.append(min(page_size * n_cached_pages, len(prompt) - 1))
    return cached


class NaiveDisk:
    """Pages by their last use, each identified by its whole prefix. The oldest one that no other continues goes."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.last_use = {}
        self.now = 0

    def n_found(self, path):
        return next((n for n, page in enumerate(path) if page not in self.last_use), len(path))

    def use(self, pages):
        for page in pages:
            if page not in self.last_use and len(self.last_use) == self.capacity:
                parents = {other[:-1] for other in self.last_use}
                del self.last_use[min((p for p in self.last_use if p not in parents), key=self.last_use.get)]
            self.now += 1
            self.last_use[page] = self.now


def naive_tiers(requests, capacity, host_capacity, disk_capacity=0):
    """Returns the cached blocks of each prompt in any tier, how many of all were loaded, and how many fetched.

    The host tier gets all blocks of a prompt if they fit, and never drops those that it has of the prompt for them.
    What enters the host tier enters the disk. What only the disk has of a prompt enters the host tier before the
    prompt is computed, as far as it fits there.
    """
    pages = [request.hash_ids for request in requests]
    device, host = (Naive(pages, n, knows_future=False) for n in (capacity, host_capacity))
    disk = NaiveDisk(disk_capacity)
    cached, n_loaded, n_fetched = [], 0, 0
    for index, path in enumerate(device.paths):
        n_host = next((n for n, page in enumerate(path) if page not in host.last_use), len(path))
        n_device = device.use(index)
        device.evict(index, capacity)
        n_disk = min(n_host + disk.n_found(path[n_host:]), host_capacity)
        if n_disk > max(n_host, n_device):
            host.evict(index, host_capacity - (n_disk - n_host), keep=path[:n_host])
            host.last_use |= dict.fromkeys(path[:n_disk], index)
            disk.use(path[n_host:n_disk])
            n_fetched += n_disk - n_host if n_device < n_host else n_disk - n_device
            n_host = n_disk
        stored = path[:host_capacity]
        host.evict(index, host_capacity - (len(stored) - n_host), keep=path[:n_host])
        host.last_use |= dict.fromkeys(stored, index)
        if disk_capacity and n_host < len(stored):
            disk.use(stored[disk.n_found(stored) :])
        cached.append(max(n_device, n_host))
        n_loaded += max(0, n_host - n_device)
    return cached, n_loaded, n_fetched


def replay_checked(traffic, capacity, *, knows_future=False, ends_known=0.0, **settings):
    """Returns the cached tokens of each prompt; checks pool and tree after each."""
    replay = Replay(
        traffic, CacheSettings(capacity, "oracle" if knows_future else "lru", **settings), ends_known=ends_known
    )
    cached = []
    for index in range(len(traffic.n_tokens)):
        cached.append(replay.replay(index))
        replay.cache.check([])
    assert replay.cache.tree.n_pages_reachable <= (capacity or replay.cache.n_pages)
    return cached


def prefix_sharing(page, *, max_pages, max_prompts):
    """Returns a strategy of prompts, as lists of pages, with many shared prefixes."""
    return st.lists(st.lists(page, min_size=1, max_size=max_pages), min_size=1, max_size=max_prompts)


blocks = prefix_sharing(st.integers(0, 2), max_pages=6, max_prompts=14)
lengths_of_last = st.lists(st.sampled_from([1, 200, 511, 512]), min_size=14, max_size=14)
capacities = st.integers(1, 12)
knowledge = st.booleans()


@examples(150)
@given(blocks, lengths_of_last, capacities, knowledge)
@example([[0, 1], [1], [0, 1, 2, 2], [0], [0, 1, 2]], [512] * 14, 2, True)
def test_the_rule_blocks_equals_a_list_of_blocks(ids, lasts, capacity, knows_future):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    traffic = BlockTraffic(requests, BLOCK, "blocks")
    expected = naive_blocks(requests, capacity, knows_future=knows_future)
    assert replay_checked(traffic, capacity, knows_future=knows_future) == expected
    unbounded = naive_blocks(requests, 10**6, knows_future=False)
    assert replay_checked(traffic, None, knows_future=knows_future) == unbounded


@examples(150)
@given(blocks, lengths_of_last, capacities)
def test_pages_that_are_known_to_be_over_are_evicted_first(ids, lasts, capacity):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    traffic = BlockTraffic(requests, BLOCK, "blocks")
    expected = naive_blocks(requests, capacity, knows_future=False, knows_ends=True)
    assert replay_checked(traffic, capacity, ends_known=1.0) == expected


@examples(150)
@given(blocks, capacities, st.integers(1, 30))
def test_two_tiers_equal_two_lists_of_blocks(ids, capacity, host_capacity):
    requests = [trace_request(each) for each in ids]
    cached, n_loaded, _ = naive_tiers(requests, capacity, host_capacity)
    result = Replay(
        BlockTraffic(requests, BLOCK, "blocks"), CacheSettings(capacity, host_pages=host_capacity)
    ).run()
    assert result.n_cached_tokens == [BLOCK * n for n in cached]
    assert result.cache_use.n_loaded == BLOCK * n_loaded


@examples(150)
@given(blocks, st.integers(1, 6), st.integers(1, 9), st.integers(1, 30))
def test_three_tiers_equal_three_lists_of_blocks(ids, capacity, host_capacity, disk_capacity):
    requests = [trace_request(each) for each in ids]
    cached, n_loaded, n_fetched = naive_tiers(requests, capacity, host_capacity, disk_capacity)
    traffic = BlockTraffic(requests, BLOCK, "blocks")
    costs = CostModel(load_us_per_token=1e-3, compute_us_per_token=1e6, fetch_us_per_token=1e-3)  # never compute
    replay = Replay(traffic, CacheSettings(capacity, "lru", host_capacity, disk_capacity, costs=costs))
    result = replay.run()
    assert result.n_cached_tokens == [BLOCK * n for n in cached]
    assert (result.cache_use.n_loaded, result.cache_use.n_fetched) == (BLOCK * n_loaded, BLOCK * n_fetched)


def random_chats(seed):
    random = Random(seed)
    chats = [[0, *range(10 * chat + 1, 10 * chat + 9)] for chat in range(20)]
    requests = [trace_request(random.choice(chats)[: random.randrange(1, 9)]) for _ in range(300)]
    return BlockTraffic(requests, BLOCK, "blocks")


@pytest.mark.nightly
@pytest.mark.parametrize("policy", rest_nightly(["lru", "adaptive", "oracle"], kept=(0,)))
def test_a_large_disk_finds_what_an_infinite_cache_does_where_fetching_is_faster(policy):
    traffic = random_chats(2)
    tiers = {"host_pages": 40, "disk_pages": 1000}
    fast, slow = (CostModel(100.0, 1000.0, fetch_us_per_token) for fetch_us_per_token in (800.0, 1000.0))
    infinite = Replay(traffic, CacheSettings(None, policy)).run()
    fetched = Replay(traffic, CacheSettings(20, policy, **tiers, costs=fast)).run()
    assert fetched.n_cached_tokens == infinite.n_cached_tokens
    assert 0 < fetched.cache_use.n_fetched < fetched.cache_use.n_loaded < sum(fetched.n_cached_tokens)
    computed = Replay(traffic, CacheSettings(20, policy, **tiers, costs=slow)).run()
    assert 8 * computed.cache_use.n_fetched < fetched.cache_use.n_fetched, (
        "where computing is faster, only samples are fetched"
    )


@pytest.mark.parametrize("policy", rest_nightly(["lru", "lfuda", "adaptive", "oracle"], kept=(2,)))
def test_a_large_host_tier_finds_what_an_infinite_cache_does(policy):
    traffic = random_chats(1)
    infinite = Replay(traffic, CacheSettings(None, policy)).run()
    tiers = Replay(traffic, CacheSettings(20, policy, host_pages=1000), ends_known=0.5).run()
    assert tiers.n_cached_tokens == infinite.n_cached_tokens
    assert 0 < tiers.cache_use.n_loaded < sum(tiers.n_cached_tokens)
    computed = Replay(traffic, CacheSettings(20, policy, host_pages=1000, costs=CostModel(2.0, 1.0))).run()
    assert 8 * computed.cache_use.n_loaded < tiers.cache_use.n_loaded, (
        "where computing is faster, only samples are loaded"
    )
    alone = Replay(traffic, CacheSettings(20, policy)).run()
    assert sum(computed.n_cached_tokens) < sum(alone.n_cached_tokens) + 2 * computed.cache_use.n_loaded


def best_possible(paths, capacity, index=0, cached=frozenset()):
    """Returns the most blocks that any policy finds from ``index`` on, by trying all evictions."""
    if index == len(paths):
        return 0
    path = paths[index]
    n_cached_pages = next((n for n, page in enumerate(path) if page not in cached), len(path))
    available = sorted(cached | set(path))
    n_kept = min(capacity, len(available))  # keeping more pages is never worse
    rest = (best_possible(paths, capacity, index + 1, frozenset(keep)) for keep in combinations(available, n_kept))
    return n_cached_pages + max(rest)


@examples(60)
@given(prefix_sharing(st.integers(0, 1), max_pages=3, max_prompts=5), st.integers(1, 3))
def test_no_policy_finds_more_than_the_oracle(ids, capacity):
    traffic = BlockTraffic([trace_request(each) for each in ids], BLOCK, "blocks")
    found = sum(replay_checked(traffic, capacity, knows_future=True))
    assert found == BLOCK * best_possible([prefixes(each) for each in ids], capacity)


token_prompts = st.builds(
    lambda pages, tails: [
        [token for page in each for token in [page] * 4] + [7] * tail
        for each, tail in zip(pages, tails, strict=False)
    ],
    prefix_sharing(st.integers(0, 2), max_pages=5, max_prompts=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
)


@examples(150)
@given(token_prompts, capacities, knowledge)
def test_token_ids_equal_a_list_of_pages(prompts, capacity, knows_future):
    traffic = TokenTraffic([token_bytes(prompt) for prompt in prompts], 4)
    expected = naive_engine(prompts, 4, capacity, knows_future=knows_future)
    assert replay_checked(traffic, capacity, knows_future=knows_future) == expected


@examples(60)
@given(token_prompts, st.integers(3, 12), st.integers(0, 20), st.sampled_from(["lru", "lfuda", "adaptive"]))
def test_the_scheduler_on_a_fake_device_finds_the_same(prompts, capacity, n_slots, policy):
    engine = Engine(
        n_pages=capacity, page_size=4, min_copied_tokens=4, n_slots=n_slots, eviction_policy=policy, max_num_seqs=1
    )
    costs = CostModel(1e-3, 1e6)  # load always, as the engine does
    traffic = TokenTraffic([token_bytes(prompt) for prompt in prompts], 4)
    settings = CacheSettings(capacity, policy, n_slots or None, ghost_capacity=GHOST_CAPACITY, costs=costs)
    replay = Replay(traffic, settings)
    cached = []
    for prompt in prompts:
        if len(prompt) > 4 * capacity:  # the intake refuses it
            cached.append(None)
            continue
        request = engine.add(prompt, max_tokens=1)
        engine.run()
        for _ in range(4):  # the stores of what it has computed
            engine.turn()
        cached.append(request.cache_use.counted.n_cached)
    assert [replay.replay(index) for index in range(len(prompts))] == cached


def tokens_of(request):
    ids = [hash_id * BLOCK + offset for hash_id in request.hash_ids for offset in range(BLOCK)]
    return array("i", ids[: request.input_length]).tobytes()


@examples(40)
@given(blocks, lengths_of_last, st.sampled_from([64, 128, 512]), capacities, knowledge)
def test_compact_pages_equal_all_tokens(ids, lasts, page_size, capacity, knows_future):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    n_pages = capacity * BLOCK // page_size
    symbols = BlockTraffic(requests, page_size, "engine")
    tokens = TokenTraffic([tokens_of(request) for request in requests], page_size, min_copied_tokens=page_size)
    expected = replay_checked(tokens, n_pages, knows_future=knows_future)
    assert replay_checked(symbols, n_pages, knows_future=knows_future) == expected


@examples(40)
@given(blocks, lengths_of_last, st.sampled_from([64, 128, 512]), capacities, st.integers(1, 6), st.integers(1, 4))
def test_block_symbols_equal_all_tokens_with_several_in_flight(
    ids, lasts, page_size, capacity, concurrency, n_step_blocks
):
    requests = [trace_request(each, last) for each, last in zip(ids, lasts, strict=False)]
    replays = [
        ConcurrentReplay(traffic, CacheSettings(capacity * BLOCK // page_size), concurrency, n_step_blocks * BLOCK)
        for traffic in (
            BlockTraffic(requests, page_size, "engine", compact_pages=False),
            TokenTraffic([tokens_of(request) for request in requests], page_size, min_copied_tokens=page_size),
        )
    ]
    symbols, tokens = (replay.run() for replay in replays)
    assert symbols == tokens
    for replay in replays:
        replay.cache.check([])
    if concurrency == 1 and n_step_blocks == 4:
        one_at_a_time = Replay(
            BlockTraffic(requests, page_size, "engine"), CacheSettings(capacity * BLOCK // page_size)
        ).run()
        assert symbols.n_cached_tokens == one_at_a_time.n_cached_tokens


@pytest.mark.parametrize(("page_size", "cached"), [(512, 512), (128, 640), (1, 699)])
def test_a_smaller_page_finds_more_of_a_last_block(page_size, cached):
    requests = [trace_request([5, 6], 188), trace_request([5, 6], 188)]
    assert replay_checked(BlockTraffic(requests, page_size, "engine"), 10_000) == [0, cached]
    assert replay_checked(BlockTraffic(requests, page_size, "blocks"), 10_000) == [0, 700]


def test_a_replay_counts_evicted_pages_and_refused_prompts():
    prompts = [[1] * 8, [2] * 8, [1] * 8, [3] * 13, [1] * 8]
    result = Replay(TokenTraffic([token_bytes(prompt) for prompt in prompts], 4), CacheSettings(3)).run()
    assert result.n_cached_tokens == [0, 0, 4, 0, 7]
    assert (result.n_too_large, result.n_evicted_pages, result.max_cached_pages) == (1, 2, 3)
