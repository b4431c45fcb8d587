"""The metrics repeated under the names that dashboards of vLLM and SGLang query."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.frontend.metrics.aliases import MetricAliases
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.metrics.stats_delta import StatsDelta
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import GetStats
from radixkv.wire.stats import Stats
from support.scripted_runtime import DISK, DRAFTS, HOST, ScriptedLoop

Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def stats() -> Stats:
    (stats,) = ScriptedLoop().receive(GetStats(id="g"))
    assert isinstance(stats, Stats)
    return stats


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.first_token(0.02)
    metrics.next_tokens(0.4, 4)
    metrics.done(3.0, 0.03)
    metrics.ended("stop")
    metrics.ended("abort", 2)
    return metrics


def samples(text: bytes, prefix: str) -> dict[Sample, float]:
    """Returns the samples of one prefix by name and labels."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def read(values: dict[Sample, float], name: str, **labels: str) -> float:
    return values[name, tuple(sorted(labels.items()))]


def test_nothing_is_repeated_by_default(metrics: Metrics, stats: Stats) -> None:
    text = metrics.render(stats)
    assert samples(text, "radixkv:")
    assert not samples(text, "vllm:")
    assert not samples(text, "sglang:")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_own_names_stay_as_they_are(metrics: Metrics, stats: Stats, engine: Any) -> None:
    text = metrics.render(stats, MetricAliases(engine, "some/model", 16))
    assert samples(text, "radixkv:") == samples(metrics.render(stats), "radixkv:")


def test_vllm(metrics: Metrics, stats: Stats) -> None:
    values = samples(metrics.render(stats, MetricAliases("vllm", "some/model", 16)), "vllm:")
    labels = {"model_name": "some/model", "engine": "0"}
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": 7,
        "kv_cache_usage_perc": 0.25,
        "gpu_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 50,
        "num_preemptions_total": 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.4,
        "time_per_output_token_seconds_count": 4,
        "e2e_request_latency_seconds_sum": 3,
        "request_queue_time_seconds_sum": 0.03,
    }
    for name, value in expected.items():
        assert read(values, f"vllm:{name}", **labels) == pytest.approx(value), name
    for reason, count in {"stop": 1, "length": 0, "abort": 2, "error": 0}.items():
        assert read(values, "vllm:request_success_total", finished_reason=reason, **labels) == count
    assert read(values, "vllm:time_to_first_token_seconds_bucket", le="0.025", **labels) == 1
    assert read(values, "vllm:time_to_first_token_seconds_bucket", le="0.01", **labels) == 0


def test_sglang(metrics: Metrics, stats: Stats) -> None:
    before = msgspec.structs.replace(
        stats, prefix_queries_total=60, cache_use=CacheUse(30), generation_tokens_total=30
    )
    metrics.set_stats_delta(StatsDelta(before, stats, 4.0))
    values = samples(metrics.render(stats, MetricAliases("sglang", "some/model", 16)), "sglang:")
    expected = {
        "num_running_reqs": 0,
        "num_queue_reqs": 7,
        "token_usage": 0.25,
        "num_used_tokens": 16 * 16,
        "max_total_num_tokens": 64 * 16,
        "cache_hit_rate": 0.25,
        "gen_throughput": 5.0,
        "cached_tokens_total": 40,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 50,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.4,
        "time_per_output_token_seconds_count": 4,
        "e2e_request_latency_seconds_sum": 3,
        "queue_time_seconds_sum": 0.03,
    }
    for name, value in expected.items():
        assert read(values, f"sglang:{name}", model_name="some/model") == pytest.approx(value), name


def test_vllm_with_drafts(metrics: Metrics, stats: Stats) -> None:
    drafting = msgspec.structs.replace(stats, drafts=DRAFTS)
    values = samples(metrics.render(drafting, MetricAliases("vllm", "m", 16)), "vllm:")
    labels = {"engine": "0", "model_name": "m"}
    for name, count in (("drafts", 10), ("draft_tokens", 60), ("accepted_tokens", 25)):
        assert read(values, f"vllm:spec_decode_num_{name}_total", **labels) == count
    for position, count in enumerate(DRAFTS.accepted_by_position):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert read(values, name, position=str(position), **labels) == count


def test_vllm_with_a_host_tier(metrics: Metrics, stats: Stats) -> None:
    stats = msgspec.structs.replace(stats, host=HOST, cache_use=CacheUse(40, n_loaded=30))
    values = samples(metrics.render(stats, MetricAliases("vllm", "m", 16)), "vllm:")
    expected = {
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 10,
        "external_prefix_cache_queries_total": 90,
        "external_prefix_cache_hits_total": 30,
        "kv_offload_load_bytes_total": 6000,
        "kv_offload_load_time_total": 0.5,
        "kv_offload_store_bytes_total": 9000,
        "kv_offload_store_time_total": 0.75,
    }
    for name, value in expected.items():
        assert read(values, f"vllm:{name}", model_name="m", engine="0") == value, name


def test_sglang_with_a_host_tier(metrics: Metrics, stats: Stats) -> None:
    stats = msgspec.structs.replace(stats, host=HOST, cache_use=CacheUse(40, n_loaded=30))
    values = samples(metrics.render(stats, MetricAliases("sglang", "m", 16)), "sglang:")
    expected = {
        "hicache_host_total_tokens": 200 * 16,
        "hicache_host_used_tokens": 50 * 16,
        "load_back_tokens_total": 6 * 16,
        "hicache_backup_tokens_total": 9 * 16,
        "evicted_tokens_total": 2 * 16,
    }
    for name, value in expected.items():
        assert read(values, f"sglang:{name}", model_name="m") == value, name
    for source, value in {"device": 10, "host": 30}.items():
        assert read(values, "sglang:cached_tokens_total", model_name="m", cache_source=source) == value


def test_sglang_with_a_disk_tier(metrics: Metrics, stats: Stats) -> None:
    stats = msgspec.structs.replace(stats, host=HOST, disk=DISK, cache_use=CacheUse(40, n_loaded=30, n_fetched=20))
    values = samples(metrics.render(stats, MetricAliases("sglang", "m", 16)), "sglang:")
    for source, value in {"device": 10, "host": 10, "storage": 20}.items():
        assert read(values, "sglang:cached_tokens_total", model_name="m", cache_source=source) == value
    assert read(values, "sglang:prefetched_tokens_total", model_name="m") == 5 * 16
    assert read(values, "sglang:backuped_tokens_total", model_name="m") == 8 * 16


def test_rates_are_missing_without_a_stats_delta(metrics: Metrics, stats: Stats) -> None:
    values = samples(metrics.render(stats, MetricAliases("sglang", "m", 16)), "sglang:")
    assert ("sglang:gen_throughput", (("model_name", "m"),)) not in values


def test_a_name_with_quotes_is_one_label(metrics: Metrics, stats: Stats) -> None:
    name = 'a"b\\c\nd'
    repeat = dataclasses.replace(MetricAliases("vllm", "m", 16), model=name)
    values = samples(metrics.render(stats, repeat), "vllm:")
    assert read(values, "vllm:num_requests_waiting", model_name=name, engine="0") == 7
