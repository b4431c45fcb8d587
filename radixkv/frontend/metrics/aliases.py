"""Repetition of the metrics under the names that dashboards of vLLM or SGLang read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from radixkv.frontend.metrics.stats_delta import StatsDelta
from radixkv.settings.server_config import MetricsCompat
from radixkv.wire.stats import DiskStats, HostStats, Stats

_VLLM: Mapping[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "num_preemptions": ("num_preemptions",),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "requests": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
}
"""Own names without prefix, with vLLM's names of present and earlier releases."""
_SGLANG: Mapping[str, tuple[str, ...]] = {
    "num_requests_running": ("num_running_reqs",),
    "num_requests_waiting": ("num_queue_reqs",),
    "kv_cache_usage_perc": ("token_usage",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("queue_time_seconds",),
}
"""Own names without prefix, with SGLang's names of present and earlier releases."""
_VLLM_LABELS = {"finish_reason": "finished_reason"}
"""Own labels with vLLM's names; families without such a label are unaffected."""


@dataclass(frozen=True)
class MetricAliases:
    """The metrics of another engine, derived from the server's own."""

    engine: MetricsCompat
    model: str
    """Value of the label ``model_name``."""
    page_size: int
    """Tokens per page."""

    def families(self, own: Iterable[Metric]) -> Iterator[Metric]:
        """Yields the own families that the other engine also has, renamed and with its labels."""
        names = _VLLM if self.engine == "vllm" else _SGLANG
        for family in own:
            for name in names.get(family.name.partition(":")[2], ()):
                renamed = Metric(f"{self.engine}:{name}", family.documentation, family.type)
                for sample in family.samples:
                    suffix = sample.name.removeprefix(family.name)
                    labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
                    renamed.add_sample(renamed.name + suffix, self._labels | labels, sample.value)
                yield renamed

    def derived(self, stats: Stats, stats_delta: StatsDelta | None) -> Iterator[Metric]:
        """Yields what the other engine counts in other units; rates only with a ``stats_delta``."""
        if self.engine == "vllm":
            yield from self._vllm_hits(stats)
            if stats.host is not None:
                yield from self._vllm_offloading(stats.host)
        else:
            yield from self._sglang_gauges(stats, stats_delta)
            yield self._sglang_hits(stats)
            if stats.host is not None:
                yield from self._sglang_hierarchical_cache(stats, stats.host)
            if stores := [one for one in (stats.disk, stats.shared_store) if one is not None]:
                yield from self._sglang_storage(stores)

    def _vllm_hits(self, stats: Stats) -> Iterator[Metric]:
        n_loaded = stats.cache_use.n_loaded
        n_hits = stats.cache_use.n_cached - n_loaded
        yield self._counter("prefix_cache_hits", "Prompt tokens that the device had.", n_hits)
        if stats.host is not None:
            n_missed = stats.prefix_queries_total - n_hits
            yield self._counter("external_prefix_cache_queries", "Prompt tokens that the device lacked.", n_missed)
            yield self._counter("external_prefix_cache_hits", "Prompt tokens loaded from the host.", n_loaded)

    def _vllm_offloading(self, host: HostStats) -> Iterator[Metric]:
        n_loaded, n_stored = (n * host.page_bytes for n in (host.pages_loaded_total, host.pages_stored_total))
        yield self._counter("kv_offload_load_bytes", "Bytes copied to the device.", n_loaded)
        yield self._counter("kv_offload_load_time", "Seconds of these copies.", host.load_seconds)
        yield self._counter("kv_offload_store_bytes", "Bytes copied to the host.", n_stored)
        yield self._counter("kv_offload_store_time", "Seconds of these copies.", host.store_seconds)

    def _sglang_hits(self, stats: Stats) -> Metric:
        text = "Prompt tokens that were not computed."
        if stats.host is None:
            return self._counter("cached_tokens", text, stats.cache_use.n_cached)
        hits = CounterMetricFamily("sglang:cached_tokens", text, labels=[*self._labels, "cache_source"])
        for source, value in stats.cache_use.by_source(has_disk=stats.has_storage).items():
            hits.add_metric([*self._labels.values(), source], value)
        return hits

    def _sglang_hierarchical_cache(self, stats: Stats, host: HostStats) -> Iterator[Metric]:
        n_total, n_used = host.n_slots * self.page_size, (host.n_slots - host.n_slots_free) * self.page_size
        yield self._gauge("hicache_host_total_tokens", "Tokens that the host tier holds.", n_total)
        yield self._gauge("hicache_host_used_tokens", "Tokens in the host tier.", n_used)
        n_loaded, n_stored = (n * self.page_size for n in (host.pages_loaded_total, host.pages_stored_total))
        yield self._counter("load_back_tokens", "Tokens copied to the device.", n_loaded)
        yield self._counter("hicache_backup_tokens", "Tokens copied to the host.", n_stored)
        n_evicted = stats.pages_evicted_total * self.page_size
        yield self._counter("evicted_tokens", "Tokens evicted from the device.", n_evicted)

    def _sglang_storage(self, stores: Sequence[DiskStats]) -> Iterator[Metric]:
        n_fetched = sum(one.pages_fetched_total for one in stores) * self.page_size
        n_written = sum(one.pages_written_total for one in stores) * self.page_size
        yield self._counter("prefetched_tokens", "Tokens fetched from disk.", n_fetched)
        yield self._counter("backuped_tokens", "Tokens written to disk.", n_written)

    def _sglang_gauges(self, stats: Stats, stats_delta: StatsDelta | None) -> Iterator[Metric]:
        n_used = stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
        yield self._gauge("num_used_tokens", "Tokens in pages neither free nor evictable.", n_used * self.page_size)
        yield self._gauge("max_total_num_tokens", "Tokens that the pool holds.", stats.n_pages * self.page_size)
        if stats_delta is not None:
            yield self._gauge("cache_hit_rate", "Share of prompt tokens not computed.", stats_delta.hit_rate or 0.0)
            yield self._gauge("gen_throughput", "Generated tokens a second.", stats_delta.generation_tokens_per_s)

    @property
    def _labels(self) -> dict[str, str]:
        # vLLM numbers its data-parallel engines.
        return {"model_name": self.model} | ({"engine": "0"} if self.engine == "vllm" else {})

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"{self.engine}:{name}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"{self.engine}:{name}", text, labels=list(self._labels))
        counter.add_metric(list(self._labels.values()), value)
        return counter
