"""Replays on several servers, compared with lists of pages and a naive router, and with one server."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.simulator.caches import CacheSettings
from radixkv.lab.simulator.replay import Replay
from radixkv.lab.simulator.routed_replay import RoutedReplay
from radixkv.lab.simulator.traffic import BlockTraffic, TokenTraffic
from support.cases import covering, examples
from support.engine import token_bytes
from support.naive_cache import BLOCK, Naive, trace_request

ROUTINGS = ["round-robin", "prefix", "events"]


def naive_choice(n_pages, matched, history, n_servers):
    """The rule of docs/routing.md, written down again."""
    recent = history[-32 * n_servers :]
    loads = [recent.count(server) for server in range(n_servers)]
    mean = sum(loads) / n_servers
    ready = [n for n in range(n_servers) if loads[n] <= 1.5 * mean or loads[n] <= mean + 4]
    best = sorted(ready, key=lambda n: (-matched[n], loads[n]))[0]
    if matched[best] and matched[best] / n_pages >= 0.3:
        return best
    return sorted(ready, key=lambda n: loads[n])[0]


def naive_servers(ids, capacity, n_servers, routing, delay):
    """Returns the cached tokens of each prompt, and the server that got it."""
    caches = [Naive(ids, capacity, knows_future=False) for _ in range(n_servers)]
    paths, known, history, cached = caches[0].paths, [[set()] for _ in range(n_servers)], [], []
    for index, path in enumerate(paths):
        if routing == "round-robin":
            chosen = index % n_servers
        else:
            views = [states[max(0, len(states) - 1 - delay)] for states in known]
            matched = [next((n for n, page in enumerate(path) if page not in v), len(path)) for v in views]
            chosen = naive_choice(len(path), matched, history, n_servers)
        history.append(chosen)
        cached.append(BLOCK * caches[chosen].use(index))
        caches[chosen].evict(index, capacity)
        for server in range(n_servers):
            state = known[server][-1]
            if routing == "prefix":
                state = state | set(path) if server == chosen else state
            elif server == chosen:
                state = set(caches[server].last_use)
            known[server].append(state)
    return cached, history


def routed(traffic, capacity, n_servers, routing, delay=0, **settings):
    servers = [Replay(traffic, CacheSettings(capacity, **settings)) for _ in range(n_servers)]
    replay = RoutedReplay(traffic, servers, routing, events_delay=delay)
    return replay, replay.run()


@examples(200)
@given(
    ids=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=60),
    capacity=st.integers(1, 8),
    n_servers=st.integers(1, 4),
    routing=st.sampled_from(ROUTINGS),
    delay=st.sampled_from([0, 0, 1, 5]),
)
def test_servers_equal_lists_of_blocks_behind_a_naive_router(ids, capacity, n_servers, routing, delay):
    traffic = BlockTraffic([trace_request(each) for each in ids], BLOCK, "blocks")
    delay = delay if routing == "events" else 0
    replay, result = routed(traffic, capacity, n_servers, routing, delay)
    cached, history = naive_servers(ids, capacity, n_servers, routing, delay)
    assert result.n_cached_tokens == cached
    computed = [0] * n_servers
    for each, n_cached, server in zip(ids, cached, history, strict=True):
        computed[server] += BLOCK * len(each) - n_cached
    assert [one.n_prompt - one.n_cached for one in replay.by_server] == computed


def random_prompts(n_prompts):
    random = Random(3)
    prompts = [[random.randrange(50) for _ in range(60)]]
    while len(prompts) < n_prompts:
        old = random.choice(prompts[-6:])
        prompts.append([*old[: random.randrange(len(old))], *(random.randrange(50) for _ in range(20))][:90])
    return prompts


@pytest.mark.parametrize(
    ("routing", "tiers"), covering([*ROUTINGS], [{}, {"host_pages": 30}, {"host_pages": 30, "disk_pages": 60}])
)
def test_one_server_behind_a_router_is_a_replay(routing, tiers):
    traffic = TokenTraffic([token_bytes(prompt) for prompt in random_prompts(80)], 4)
    _, result = routed(traffic, 24, 1, routing, **tiers)
    assert result == Replay(traffic, CacheSettings(24, **tiers)).run()
    assert sum(result.n_cached_tokens) > 0


def test_events_of_lower_tiers_count_and_requests_that_do_not_fit_are_not_computed():
    prompts = [[*range(40)], [*range(100, 140)], [*range(200, 300)]]
    requests = [prompts[n] for n in (0, 1, 2, 0, 1, 0, 1)]
    traffic = TokenTraffic([token_bytes(prompt) for prompt in requests], 4)
    replay, result = routed(traffic, 10, 2, "events", host_pages=40)
    assert result.n_too_large == 1
    assert result.n_cached_tokens == [0, 0, 0, 39, 39, 39, 39], "each server keeps the prompt that it got first"
    assert sum(one.n_prompt - one.n_cached for one in replay.by_server) == sum(map(len, requests)) - 100 - sum(
        result.n_cached_tokens
    )
