from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.miss_counts import MissCounts
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import CacheMiss, Done, GetStats
from radixkv.wire.stats import DiskStats, HostStats, Stats
from support.scripted_runtime import DISK, DRAFTS, HOST, SHARED_STORE, STATES, TENANTS, WINDOWS, ScriptedLoop


def scripted(**changes: Any) -> Stats:
    (stats,) = ScriptedLoop().receive(GetStats(id="g"))
    return msgspec.structs.replace(stats, **changes)


def samples(
    metrics: Metrics,
    host: HostStats | None = None,
    disk: DiskStats | None = None,
    shared_store: DiskStats | None = None,
) -> dict[tuple[str, str], float]:
    (stats,) = ScriptedLoop(host=host, disk=disk, shared_store=shared_store).receive(GetStats(id="g"))
    assert isinstance(stats, Stats)
    families = list(text_string_to_metric_families(metrics.render(stats).decode()))
    return {(s.name, s.labels.get("le", "")): s.value for family in families for s in family.samples}


def test_stats_have_the_names_that_dashboards_know() -> None:
    values = samples(Metrics())
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": 7,
        "kv_cache_usage_perc": 0.25,
        "kv_pages": 64,
        "kv_pages_free": 32,
        "kv_pages_evictable": 16,
        "kv_pages_pinned": 8,
        "kv_running_slots": 0,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 50,
        "num_preemptions_total": 1,
        "recomputed_tokens_total": 3,
        "pages_evicted_total": 2,
        "steps_total": 9,
        "step_seconds_total": 1.5,
        "schedule_seconds_total": 0.5,
        "frames_dropped_total": 0,
    }
    for name, value in expected.items():
        assert values[f"radixkv:{name}", ""] == value, name


def test_slots_of_running_requests() -> None:
    slots = {"n_running_slots": 320, "n_running_tokens": 304, "n_duplicate_tokens": 19, "n_saved_tokens": 2048}
    rendered = Metrics().render(scripted(**slots)).decode()
    for name, value in slots.items():
        assert f"\nradixkv:kv_{name.removeprefix('n_')} {value}.0\n" in rendered


def test_each_stage_of_the_start_has_its_seconds() -> None:
    assert b'radixkv:start_seconds{stage="imports"} 2.5\nradixkv:start_seconds{stage="weights"} 1.0\n' in (
        Metrics().render(scripted(start_seconds={"imports": 2.5, "weights": 1.0}))
    )


def test_drafts_are_counted_by_source_and_by_position() -> None:
    rendered = Metrics().render(scripted(drafts=DRAFTS)).decode()
    for name, value in (
        ("num_drafts_total", 10),
        ("num_draft_tokens_total", 60),
        ("num_accepted_tokens_total", 25),
        ("num_steps_without_overlap_total", 9),
        ('num_draft_tokens_by_source_total{source="prompt"}', 40),
        ('num_draft_tokens_by_source_total{source="answers"}', 20),
        ('num_accepted_tokens_by_source_total{source="prompt"}', 20),
        ('num_accepted_tokens_by_source_total{source="answers"}', 5),
        ('num_accepted_tokens_per_pos_total{position="0"}', 10),
        ('num_accepted_tokens_per_pos_total{position="2"}', 7),
        ('num_accepted_tokens_per_pos_total{position="3"}', 0),
    ):
        assert f"\nradixkv:spec_decode_{name} {value}.0\n" in rendered


def test_window_pages_are_counted() -> None:
    rendered = Metrics().render(scripted(windows=WINDOWS)).decode()
    for name, value in (
        ("pages", 30),
        ("pages_evictable", 12),
        ("slabs", 50),
        ("slabs_taken", 22),
        ("tails", 6),
        ("tails_kept_total", 41),
        ("tail_hits_total", 35),
        ("tails_evicted_total", 25),
        ("missed_tokens_total", 513),
    ):
        assert f"\nradixkv:window_{name} {value}.0\n" in rendered


def test_states_are_counted() -> None:
    rendered = Metrics().render(scripted(states=STATES)).decode()
    for name, value in (
        ("state_slots", 20),
        ("state_slots_free", 4),
        ("states_saved_total", 40),
        ("state_hits_total", 33),
        ("states_evicted_total", 24),
        ("state_missed_tokens_total", 512),
    ):
        assert f"\nradixkv:{name} {value}.0\n" in rendered


def test_misses_are_counted_by_reason() -> None:
    misses = MissCounts()
    for miss in (CacheMiss("differs", 32, 7), CacheMiss("differs", 48, 8), CacheMiss("evicted", 0), None):
        misses.add(Done("r", "stop", 100, 1, CacheUse(40), 0.0, miss=miss))
    rendered = Metrics().render(scripted(), misses=misses).decode()
    counts = {"differs": 2, "evicted": 1, "never_seen": 0, "other_namespace": 0, "not_read": 0}
    for reason, count in counts.items():
        assert f'\nradixkv:cache_misses_total{{reason="{reason}"}} {count}.0\n' in rendered
        assert f'\nradixkv:cache_miss_tokens_total{{reason="{reason}"}} {60 * count}.0\n' in rendered


ADDED_BY_A_HOST_TIER = {
    "num_requests_loading": 2,
    "host_slots": 200,
    "host_slots_free": 150,
    "host_slots_pinned": 25,
    "host_state_slots": 12,
    "host_state_slots_free": 5,
    "host_page_bytes": 1000,
    "load_seconds_per_token": 0.001,
    "compute_seconds_per_token": 0.005,
    "host_prefix_cache_hits_total": 30,
    "tier_steps_declined_total": 2,
    "host_pages_loaded_total": 6,
    "host_pages_loaded_ahead_total": 5,
    "host_pages_loaded_ahead_used_by_waiting_total": 2,
    "host_pages_stored_total": 9,
    "host_pages_evicted_total": 3,
    "host_load_seconds_total": 0.5,
    "host_store_seconds_total": 0.75,
    "host_copies_failed_total": 1,
}
ADDED_BY_A_DISK_TIER = {
    "disk_pages": 70,
    "disk_bytes": 77000,
    "fetch_seconds_per_token": 0.002,
    "disk_prefix_cache_hits_total": 20,
    "disk_pages_fetched_total": 5,
    "disk_pages_written_total": 8,
    "disk_pages_lost_total": 2,
    "disk_fetch_seconds_total": 0.25,
    "disk_write_seconds_total": 1.25,
}
ADDED_BY_A_SHARED_STORE = {
    "store_is_away": 1,
    "store_pages": 70,
    "store_bytes": 77000,
    "fetch_seconds_per_token": 0.002,
    "store_prefix_cache_hits_total": 20,
    "store_pages_fetched_total": 5,
    "store_pages_written_total": 8,
    "store_pages_missed_total": 2,
    "store_fetch_seconds_total": 0.25,
    "store_write_seconds_total": 1.25,
    "store_lookups_total": 11,
    "store_lookup_seconds_total": 0.125,
    "store_failures_total": 3,
}
ADDED_BY_BOTH = {
    **ADDED_BY_A_DISK_TIER,
    **ADDED_BY_A_SHARED_STORE,
    "store_fetch_seconds_per_token": 0.002,
    "disk_prefix_cache_hits_total": 0,
}
"""All that was fetched came from the shared store."""


def test_steps_that_prompts_went_without_are_counted_by_step() -> None:
    (stats,) = ScriptedLoop(host=HOST).receive(GetStats(id="g"))
    rendered = Metrics().render(stats).decode()
    for step, count in {"load": 4, "fetch": 3, "lookup": 2}.items():
        assert f'\nradixkv:tier_steps_declined_total{{step="{step}"}} {count}.0\n' in rendered


@pytest.mark.parametrize(
    ("tiers", "without", "expected"),
    [
        ((HOST,), (), ADDED_BY_A_HOST_TIER),
        ((HOST, DISK), (HOST,), ADDED_BY_A_DISK_TIER),
        ((HOST, None, SHARED_STORE), (HOST,), ADDED_BY_A_SHARED_STORE),
        ((HOST, DISK, SHARED_STORE), (HOST,), ADDED_BY_BOTH),
    ],
    ids=["host", "disk", "shared store", "both"],
)
def test_a_tier_adds_its_own(tiers: Any, without: Any, expected: dict[str, float]) -> None:
    values = samples(Metrics(), *tiers)
    added = values.keys() - samples(Metrics(), *without).keys()
    assert {name: values[name, ""] for name, _ in added} == {f"radixkv:{name}": expected[name] for name in expected}


def test_tenants_add_their_own() -> None:
    rendered = Metrics().render(scripted(tenants=TENANTS)).decode()
    found = {line for line in rendered.splitlines() if line.startswith("radixkv:tenant_")}
    assert found == {
        'radixkv:tenant_num_requests_running{tenant="search"} 2.0',
        'radixkv:tenant_num_requests_running{tenant="batch"} 1.0',
        'radixkv:tenant_num_requests_waiting{tenant="search"} 1.0',
        'radixkv:tenant_num_requests_waiting{tenant="batch"} 6.0',
        'radixkv:tenant_kv_pages{tenant="search"} 20.0',
        'radixkv:tenant_computed_tokens_total{tenant="search"} 500.0',
        'radixkv:tenant_computed_tokens_total{tenant="batch"} 250.0',
    }
    assert b"tenant" not in Metrics().render(scripted())


def test_rates_are_missing_until_they_are_measured() -> None:
    host = msgspec.structs.replace(HOST, load_seconds_per_token=None, compute_seconds_per_token=None)
    assert not [name for name, _ in samples(Metrics(), host) if name.endswith("seconds_per_token")]


def test_latencies_are_counted_by_token_and_by_request() -> None:
    metrics = Metrics()
    metrics.first_token(0.02)
    metrics.next_tokens(0.4, 4)
    metrics.done(3.0, 0.03)
    values = samples(metrics)
    assert values["radixkv:time_to_first_token_seconds_bucket", "0.025"] == 1
    assert values["radixkv:inter_token_latency_seconds_count", ""] == 4
    assert values["radixkv:inter_token_latency_seconds_bucket", "0.1"] == 4
    assert values["radixkv:inter_token_latency_seconds_bucket", "0.05"] == 0
    assert values["radixkv:e2e_request_latency_seconds_sum", ""] == 3.0
    assert values["radixkv:request_queue_time_seconds_sum", ""] == 0.03


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.first_token(1.0)
    assert samples(second)["radixkv:time_to_first_token_seconds_count", ""] == 0
